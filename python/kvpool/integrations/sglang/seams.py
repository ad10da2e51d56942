"""The parts of SGLang that the plugin relies on: classes, and the signatures of their methods."""

from __future__ import annotations

from kvpool.integrations.seams import Engine

__all__ = ["EVICTION", "SEAMS", "SGLANG", "START", "VERIFY", "EngineMismatchError"]

SGLANG = Engine("SGLang", "sglang", ("0.5.23",))

_ALLOCATOR = "sglang.srt.mem_cache.allocator"
_POOLS = "sglang.srt.mem_cache.memory_pool"
_EXTEND = (
    "(self, prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, "
    "num_new_pages=None)"
)

_SLOTS = {
    "alloc": "(self, need_size)",
    "available_size": "(self)",
    "clear": "(self)",
    "free": "(self, free_index)",
    "free_group_begin": "(self)",
    "free_group_end": "(self)",
    "free_page_ids": "(self, page_ids)",
    "free_segment": "(self, free_index, *, start_pos)",
    "free_segments": "(self, segments)",
    "get_all_free_pages": "(self)",
    "merge_and_sort_free": "(self)",
    "resize": "(self, config)",
}

EVICTION = "KVPOOL_SGLANG_EVICTION"
"""The environment variable that asks for kvpool's own policy of eviction."""

START = "sglang.srt.managers.scheduler.Scheduler.__init__"
"""The function that SGLang calls in each scheduler process, after the plugins and before it makes a pool."""

VERIFY = "sglang.srt.sampling.sampling_params.SamplingParams.verify"
"""What SGLang calls with each request before the scheduler has it: by a `ValueError` that request fails."""

SEAMS: dict[str, dict[str, str]] = {
    f"{_ALLOCATOR}.token.TokenToKVPoolAllocator": {
        "__init__": "(self, size, dtype, device, kvcache, need_sort)",
        **_SLOTS,
    },
    f"{_ALLOCATOR}.paged.PagedTokenToKVPoolAllocator": {
        "__init__": "(self, size, page_size, dtype, device, kvcache, need_sort)",
        **_SLOTS,
        "alloc_extend": _EXTEND,
        "alloc_decode": "(self, seq_lens, seq_lens_cpu, last_loc)",
    },
    f"{_ALLOCATOR}.mamba.MambaSlotAllocator": {
        "__init__": "(self, size, device)",
        "alloc": "(self, need_size)",
        "alloc_group_begin": "(self, num_reqs)",
        "alloc_group_end": "(self)",
        "available_size": "(self)",
        "clear": "(self)",
        "free": "(self, free_index)",
    },
    f"{_POOLS}.ReqToTokenPool": {
        "__init__": "(self, size, max_context_len, device, enable_memory_saver)",
        "alloc_rows": "(self, need_size)",
        "available_size": "(self)",
        "clear": "(self)",
        "free_rows": "(self, indices)",
        "write": "(self, indices, values)",
    },
    f"{_POOLS}.HybridReqToTokenPool": {"alloc": "(self, reqs)", "clear": "(self)"},
    START.rpartition(".")[0]: {"__init__": "(self, server_args, port_args)"},
    VERIFY.rpartition(".")[0]: {"verify": "(self, vocab_size)"},
    f"{_POOLS}.MHATokenToKVPool": {"_create_buffers_normal": "(self)", "_kv_buffer_shapes": "(self)"},
}
"""By class, the methods and their signatures: names, kinds and defaults."""


class EngineMismatchError(BaseException):
    """SGLang was configured to run on kvpool, and cannot. The engine does not start.

    This class is not an `Exception`: SGLang logs every `Exception` of a plugin, and continues with its own
    pools.
    """
