"""vLLM 0.33 on kvpool: its offloading of KV cache to host memory and to disk.

`offload` has the classes that vLLM's settings name. Nothing of vLLM is replaced.
"""
