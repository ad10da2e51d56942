"""The pages of a `PrefixCache`, published to routers over ZeroMQ in the format of vLLM's KV events.

`EventPublisher` sends the events of a cache. Routers that index vLLM's read them; `PrefixIndex` and
`EventSubscriber` are for a router of your own. All need `pip install 'kvpool[events]'`.
"""

try:
    from kvpool.integrations.kv_events.index import PrefixIndex, page_keys
    from kvpool.integrations.kv_events.messages import (
        AllBlocksCleared,
        BlockGroup,
        BlockRemoved,
        BlockStored,
        EventBatch,
        decode,
        encode,
    )
    from kvpool.integrations.kv_events.publisher import EventPublisher
    from kvpool.integrations.kv_events.subscriber import EventSubscriber
except ModuleNotFoundError as error:
    if error.name in {"blake3", "msgspec", "zmq"}:
        raise ImportError(f"{error}: install 'kvpool[events]'", name=error.name) from error
    raise

__all__ = [
    "AllBlocksCleared",
    "BlockGroup",
    "BlockRemoved",
    "BlockStored",
    "EventBatch",
    "EventPublisher",
    "EventSubscriber",
    "PrefixIndex",
    "decode",
    "encode",
    "page_keys",
]
