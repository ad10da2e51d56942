"""A serving process with a MooncakeStore: for each line of prompts, a line that says what came of them."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from kvpool_serving import Engine
from pool_reader import PoolReader, alone, settle

from kvpool import HostTier, PrefixCache
from kvpool.integrations.mooncake import MooncakeStore

if TYPE_CHECKING:
    from kvpool_serving import Request

MASTER, SEGMENT = sys.argv[1], int(sys.argv[2])


def serve(engine: Engine, prompts: list[list[int]]) -> dict[str, object]:
    """Serves prompts, and waits until the store has what it takes of them."""
    before = engine.stats()
    requests: list[Request] = [engine.submit(prompt, 6) for prompt in prompts]
    engine.run()
    settle(engine)
    after = engine.stats()
    return {
        "tokens": [request.tokens for request in requests],
        "are_right": all(request.tokens == alone(request) for request in requests),
        "fetched": after["fetched_tokens"] - before["fetched_tokens"],
        "loaded": after["loaded_tokens"] - before["loaded_tokens"],
    }


def main() -> None:
    model = PoolReader(256, page_size=4)
    tier = HostTier(model.pool, 1 << 14)
    with MooncakeStore(MASTER, segment_bytes=SEGMENT, timeout_s=1.0) as store:
        cache = PrefixCache(model.allocator, tiers=(tier, store), model="pool reader")
        engine = Engine(model, 64, prefix_cache=cache, swap="load")
        print("{}", flush=True)  # noqa: T201 - it is ready
        for line in sys.stdin:
            print(json.dumps(serve(engine, json.loads(line))), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
