"""Request traces: readers of published formats, and seeded generators.

A trace has the arrival time, the prompt length and the output length of each request, which prompts begin
alike, and which requests belong to one session. Formats: the Mooncake release (JSON lines,
https://github.com/kvcache-ai/Mooncake), Alibaba's Bailian traces (JSON lines,
https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon), TraceLab's coding sessions (JSON lines,
https://github.com/uw-syfi/TraceLab) and the Azure LLM inference traces (CSV,
https://github.com/Azure/AzurePublicDataset). The first line of a file determines its format.
"""

from kvpool.tools.traces.agents import AgentsSpec, agents_trace, parse_agents
from kvpool.tools.traces.files import read_trace
from kvpool.tools.traces.synthetic import synthetic_trace
from kvpool.tools.traces.trace import BLOCK_SIZE, END, Trace, TraceError

__all__ = [
    "BLOCK_SIZE",
    "END",
    "AgentsSpec",
    "Trace",
    "TraceError",
    "agents_trace",
    "parse_agents",
    "read_trace",
    "synthetic_trace",
]
