"""Serves a model of your own through kvpool's pools: a small decoder in plain PyTorch, with random weights.

The pools are too small for all requests at once, so that some are retracted and resumed. Afterwards each
request is generated again without the pools, and must produce the same tokens.

    python examples/serving/own_model.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own abbreviation
from kvpool_serving import Engine
from torch import Tensor, nn

import kvpool
from kvpool.attention import PoolAttention

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    # Arguments: the layer, and query, key and value as [tokens, heads, head_dim].
    Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
    WaitLayer = Callable[[int], object] | None

VOCAB_SIZE, MAX_CONTEXT_LEN, MAX_REQS = 128, 96, 8
LAYERS, HEADS, HEAD_DIM = 2, 4, 16


class Decoder(nn.Module):
    """The model. It is independent of the pools: attention is an argument."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.tokens = nn.Embedding(VOCAB_SIZE, width)
        self.positions = nn.Embedding(MAX_CONTEXT_LEN, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(LAYERS))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))
        self.logits = nn.Linear(width, VOCAB_SIZE)
        for parameter in self.parameters():  # large enough that a token depends on earlier ones
            nn.init.normal_(parameter, std=0.3)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return logits `[tokens, VOCAB_SIZE]`."""
        hidden = self.tokens(token_ids) + self.positions(positions)
        for layer, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            query, key, value = qkv(F.layer_norm(hidden, hidden.shape[-1:])).chunk(3, dim=-1)
            heads = (x.unflatten(-1, (HEADS, HEAD_DIM)) for x in (query, key, value))
            hidden = hidden + F.gelu(out(attend(layer, *heads).flatten(1)))
        logits: Tensor = self.logits(F.layer_norm(hidden, hidden.shape[-1:]))
        return logits


class PooledDecoder:
    """The model with its pools, for `kvpool_serving.Engine`."""

    vocab_size = VOCAB_SIZE
    gdn_pool = None  # this model has no state besides K and V

    def __init__(self, decoder: Decoder, size: int, page_size: int, device: str) -> None:
        self.decoder = decoder
        self.kv, self.allocator = kvpool.make_full_attention_net_mem_pool(
            size, LAYERS, HEADS, HEAD_DIM, HEADS, HEAD_DIM, device, "float32", page_size=page_size
        )
        self.table = kvpool.make_req_to_token_pool(MAX_REQS, MAX_CONTEXT_LEN, device)

    def start(self, rows: Sequence[int]) -> None:
        """Do nothing: there is no state to reset."""

    @torch.no_grad()
    def forward(self, token_ids: Tensor, plan: kvpool.BatchPlan, wait_layer: WaitLayer = None) -> Tensor:
        """Return logits after the last token of each request."""
        attention = PoolAttention(plan, self.kv, wait_layer)  # a prefix may come from a tier, layer by layer

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self.kv.set_kv_buffer(layer, plan.out_cache_loc, key, value)
            return attention(query, layer)

        logits = self.decoder(token_ids, plan.positions.long(), attend)
        last: Tensor = logits[plan.qo_indptr[1:].long() - 1]
        return last


@torch.no_grad()
def generate(decoder: Decoder, prompt: list[int], count: int, device: str) -> list[int]:
    """Generate tokens without pools: each one recomputes the whole sequence."""

    def attend(_: int, *heads: Tensor) -> Tensor:
        query, key, value = (x.transpose(0, 1) for x in heads)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(0, 1)

    tokens = list(prompt)
    for _ in range(count):
        token_ids = torch.tensor(tokens, device=device)
        logits = decoder(token_ids, torch.arange(len(tokens), device=device), attend)
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :]


def main() -> None:
    """Serve twelve requests and compare each of them."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    decoder = Decoder().to(device)
    engine = Engine(PooledDecoder(decoder, size=160, page_size=4, device=device), max_step_tokens=32)
    prompts = [torch.randint(VOCAB_SIZE, (5 + 3 * number,)).tolist() for number in range(12)]
    requests = [engine.submit(prompt, max_new_tokens=24) for prompt in prompts]
    print("request 0:", end="")
    for token in engine.stream(requests[0]):  # each step runs all requests
        print(f" {token}", end="", flush=True)
    print()
    engine.run()
    for request in requests:
        assert request.tokens == generate(decoder, request.prompt, request.max_new_tokens, device)
    stats = engine.stats()
    assert stats["in_use"] == 0
    print(f"{stats['finished']} requests in {stats['steps']} steps, {stats['retractions']} retractions")


if __name__ == "__main__":
    main()
