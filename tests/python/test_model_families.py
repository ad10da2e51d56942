"""Which models `PooledModel` serves exactly, and which it refuses: one of each kind, with random weights."""

from __future__ import annotations

import copy
import inspect
import logging
from typing import TYPE_CHECKING, Any

import devices
import pytest
import torch
from devices import to_current
from tiny_models import TINY, VOCAB, a_model, make
from transformers import CONFIG_MAPPING, DynamicCache

from kvpool import BatchPlanner, ConfigError
from kvpool.integrations.transformers import PooledCache, PooledModel
from kvpool.integrations.transformers.layout import cache_argument

if TYPE_CHECKING:
    from collections.abc import Iterator

# The most that logits of about 5 may differ from the model's own.
EXACT = 3e-5
DECODED = 6
MAX_CONTEXT_LEN = 96


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest, device: str) -> str:
    """Every test runs on every device that PyTorch has kernels for."""
    if device == "cuda" and request.config.getoption("--software"):
        pytest.skip("it needs PyTorch's kernels on a GPU, which the software driver has not")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return device


def decoder_of(encoder_too: str) -> tuple[str, dict[str, Any]]:
    """The decoder of a model with an encoder, by itself."""
    sizes = {"d_model": 32, "decoder_layers": 2, "encoder_layers": 2, "decoder_ffn_dim": 64}
    heads = {"encoder_ffn_dim": 64, "decoder_attention_heads": 4, "encoder_attention_heads": 4}
    alone = {"is_decoder": True, "is_encoder_decoder": False, "pad_token_id": 0, "decoder_start_token_id": 1}
    return encoder_too, {**sizes, **heads, **alone, "vocab_size": VOCAB, "max_position_embeddings": 128}


ROPE = {"rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": MAX_CONTEXT_LEN,
    **ROPE,
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
PHI3 = {**TINY, "pad_token_id": 0}

# Served exactly, by what is special about them: the type and its options.
EXACT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "a window that only the mask knows": (
        "qwen2_moe",
        {
            **TINY,
            **EXPERTS,
            "shared_expert_intermediate_size": 32,
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 0,
        },
    ),
    "the same in every layer": ("phimoe", {**PHI3, **EXPERTS, "sliding_window": 16}),
    "chunks longer than requests": (
        "llama4_text",
        {
            **TINY,
            **EXPERTS,
            "intermediate_size_mlp": 64,
            "head_dim": 8,
            "attention_chunk_size": 128,
            "layer_types": ["chunked_attention", "full_attention"],
            "floor_scale": 8,
            "no_rope_layers": [1, 0],
        },
    ),
    "positions from the length of the cache": decoder_of("bart"),
    "positions from the length of the cache, scaled embeddings": decoder_of("marian"),
    "factors of short requests, longrope": (
        "phi3",
        {**PHI3, "rope_parameters": LONGROPE, "original_max_position_embeddings": MAX_CONTEXT_LEN},
    ),
    "factors of short requests, dynamic": (
        "llama",
        {
            **TINY,
            "max_position_embeddings": MAX_CONTEXT_LEN,
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, **ROPE},
        },
    ),
    "keys and values shared by layers": (
        "gemma3n_text",
        {
            **TINY,
            "num_hidden_layers": 4,
            "head_dim": 8,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 16,
            "activation_sparsity_pattern": [0.0] * 4,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
        },
    ),
}

# Refused: the type, its options, and the words that say why.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a mask of its own": ("doge", {**TINY, "keep_window_size": 16}, "layer 0 attends with a mask that it"),
    "a window of the cache alone": (
        "moshi",
        {**TINY, "ffn_dim": 64, "sliding_window": 16},
        "mask of layer 0 lets a token attend to all tokens, and its cache keeps 16",
    ),
    "chunks": (
        "llama4_text",
        {**TINY, **EXPERTS, "head_dim": 8, "intermediate_size_mlp": 64, "attention_chunk_size": 16},
        "layer 0 has a mask that is not that of a causal model",
    ),
    "attention twice": ("diffllama", TINY, "layer 0 computes attention 2 times"),
    "layers run several times": (
        "dory",
        {**TINY, "num_hidden_layers": 3, "head_dim": 8, "n_input_layers": 1, "n_output_layers": 1},
        "layer 1 computes attention 2 times",
    ),
    "the same, with cycles of layers": ("hrm_text", {**TINY, "head_dim": 8}, "layer 0 computes attention"),
    "attention of its own": (
        "bloom",
        {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        "itself",
    ),
    "attention of its own, with rotary embeddings": (
        "gpt_neox_japanese",
        TINY,
        "layer 0 computes attention by",
    ),
    "sparse attention": (
        "deepseek_v32",
        {**TINY, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "index_n_heads": 2},
        "layer 0 chooses the keys",
    ),
    "no cache": (
        "openai-gpt",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4},
        "takes no cache",
    ),
    "a state in a form of its own": (
        "rwkv",
        {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2},
        "takes no cache of keys and values; it keeps its state in 'state'",
    ),
    "a cache of its own class": (
        "minimax",
        {**TINY, **EXPERTS, "head_dim": 8},
        "MiniMax uses cache of its own",
    ),
    "factors that long requests change, longrope": (
        "phi3",
        {**PHI3, "rope_parameters": LONGROPE, "original_max_position_embeddings": MAX_CONTEXT_LEN - 1},
        r"rope_type='longrope'.* max_context_len=96 must be at most 95",
    ),
    "factors that long requests change, dynamic": (
        "llama",
        {
            **TINY,
            "max_position_embeddings": 48,
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, **ROPE},
        },
        r"rope_type='dynamic'.* must be at most 48",
    ),
    "too few positions": (
        "gpt2",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": MAX_CONTEXT_LEN - 1},
        "a table of positions with 95 entries",
    ),
}


def model_of(kind: str, options: dict[str, Any]) -> Any:  # noqa: ANN401
    """A model with its own plain attention."""
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {kind}")
    config_class: Any = CONFIG_MAPPING[kind]
    names = {*inspect.signature(config_class).parameters, *(config_class.attribute_map or {})}
    config = config_class(**{name: value for name, value in options.items() if name in names})
    torch.manual_seed(0)
    model = make(config, attn_implementation="eager").eval()
    chance = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:  # so that tokens depend on the whole prompt
                scale = 0.5 if "embed" in name else (1.4 / weight.shape[-1]) ** 0.5
                weight.copy_(torch.randn(weight.shape, generator=chance) * scale)
    return model.to(devices.current())


def own_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
    """The logits of a model: of the prompt at once, then token by token, as `generate` computes them."""
    states = DynamicCache(config=model.config.get_text_config(decoder=True))
    takes = inspect.signature(model.forward).parameters
    logits, start = [], 0
    for length in (len(tokens) - DECODED, *([1] * DECODED)):
        options: dict[str, Any] = {cache_argument(model): states}
        if "position_ids" in takes:
            options["position_ids"] = to_current(torch.arange(start, start + length)[None])
        mask = to_current(torch.ones(1, start + length, dtype=torch.int64))
        with torch.no_grad():
            out = model(tokens[None, start : start + length], attention_mask=mask, use_cache=True, **options)
        logits.append(out.logits[0])
        start += length
    return torch.cat(logits)


def pooled_logits(
    pooled: PooledModel, requests: list[torch.Tensor]
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Run prompts in chunks of several lengths, and decode: yield request, token, and the logits after it."""
    planner = BatchPlanner(pooled.table, pooled.allocator, 8, 512)
    rows = pooled.table.alloc(len(requests))
    assert rows is not None
    pooled.start(rows)
    chance, done = torch.Generator().manual_seed(3), [0] * len(requests)
    while True:
        running = [i for i, tokens in enumerate(requests) if done[i] < len(tokens)]
        if not running:
            break
        ends = []
        for i in running:
            left = len(requests[i]) - DECODED - done[i]
            chunk = int(torch.randint(1, 20, (), generator=chance))
            ends.append(done[i] + (min(chunk, left) if left > 0 else 1))
        plan = planner.extend([rows[i] for i in running], [done[i] for i in running], ends)
        assert plan is not None
        new = torch.cat([requests[i][done[i] : end] for i, end in zip(running, ends, strict=True)])
        for i, end, logits in zip(running, ends, pooled.forward(new, plan), strict=True):
            yield i, end - 1, logits
            done[i] = end
    planner.finish(rows)


def largest_difference(model: Any, pooled: PooledModel) -> float:  # noqa: ANN401
    chance = torch.Generator().manual_seed(1)
    requests = [to_current(torch.randint(3, VOCAB, (n,), generator=chance)) for n in (9, 70, 41)]
    wanted = [own_logits(model, tokens) for tokens in requests]
    return max(
        float((logits - wanted[i][token]).abs().max()) for i, token, logits in pooled_logits(pooled, requests)
    )


@pytest.mark.parametrize("name", EXACT_MODELS)
def test_logits_are_the_models_own(name: str) -> None:
    model = model_of(*EXACT_MODELS[name])
    pooled = PooledModel(copy.deepcopy(model), 256, 4, MAX_CONTEXT_LEN, page_size=4)
    assert largest_difference(model, pooled) < EXACT
    assert pooled.allocator.stats()["in_use"] == 0


def test_requests_of_several_lengths_decode_in_a_padded_step() -> None:
    """A model that asks for the length of its cache gets a call for each length, and one for the padding."""
    model = model_of(*decoder_of("bart"))
    pooled = PooledModel(copy.deepcopy(model), 256, 4, MAX_CONTEXT_LEN, page_size=4)
    planner = BatchPlanner(pooled.table, pooled.allocator, 8, 512)
    rows = pooled.table.alloc(3) or []
    chance = torch.Generator().manual_seed(1)
    requests = [to_current(torch.randint(3, VOCAB, (n,), generator=chance)) for n in (12, 20, 12)]
    ends = [len(tokens) - 1 for tokens in requests]
    plan = planner.extend(rows, [0] * 3, ends)
    assert plan is not None
    pooled.forward(torch.cat([tokens[:-1] for tokens in requests]), plan)
    plan = planner.decode(rows, [end + 1 for end in ends], pad_to=8)
    assert plan is not None
    new = torch.stack([tokens[-1] for tokens in requests])
    logits = pooled.forward(torch.cat((new, new.new_zeros(5))), plan)
    for found, tokens in zip(logits[:3], requests, strict=True):
        torch.testing.assert_close(found, own_logits(model, tokens)[-1], rtol=0, atol=EXACT)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("check", [True, False])
def test_refused_models_are_named_with_what_they_do(name: str, *, check: bool) -> None:
    kind, options, words = REFUSED[name]
    model = model_of(kind, options)
    with pytest.raises(ConfigError, match=words) as error:
        PooledModel(model, 256, 4, MAX_CONTEXT_LEN, check=check)
    assert kind in str(error.value)
    assert "Layer" not in str(error.value)  # no classes of `transformers`
    assert model.config._attn_implementation == "eager"


def test_a_model_that_looks_ordinary_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers mix what they get with the token before, which a step over pools does not have."""
    model = model_of("llama", TINY)
    embed = model.model.embed_tokens.forward

    def mixed(token_ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = embed(token_ids)
        found[:, 1:] += found[:, :-1].clone()
        return found

    monkeypatch.setattr(model.model.embed_tokens, "forward", mixed)
    with pytest.raises(ConfigError, match="llama has other logits over pools than in its own forward pass"):
        PooledModel(model, 256, 4, MAX_CONTEXT_LEN)
    assert model.config._attn_implementation == "eager"
    PooledModel(model, 256, 4, MAX_CONTEXT_LEN, check=False)


def test_a_request_must_not_change_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions are scaled by the longest request of a step, without a name that tells."""
    model = model_of("llama", TINY)
    rotate = model.model.rotary_emb.forward

    def scaled(x: torch.Tensor, position_ids: torch.Tensor) -> Any:  # noqa: ANN401
        return rotate(x, position_ids / (1 + position_ids.max() // 90))

    monkeypatch.setattr(model.model.rotary_emb, "forward", scaled)
    with pytest.raises(
        ConfigError, match="other logits for a request when another one of the same step has 96"
    ):
        PooledModel(model, 256, 4, MAX_CONTEXT_LEN)
    PooledModel(model, 256, 4, 90)


def test_weights_may_come_later() -> None:
    model = model_of("llama", TINY)
    weights = copy.deepcopy(model.state_dict())
    for weight in model.parameters():
        weight.data.fill_(torch.nan)
    with pytest.raises(ConfigError, match=r"logits of llama are not finite.*check=False"):
        PooledModel(model, 256, 4, MAX_CONTEXT_LEN)
    pooled = PooledModel(model, 256, 4, MAX_CONTEXT_LEN, check=False)
    model.load_state_dict(weights)
    own = model_of("llama", TINY)
    assert largest_difference(own, pooled) < EXACT


@pytest.mark.parametrize("config", ["qwen3", "qwen3_next"])
def test_the_comparison_leaves_no_trace(config: str) -> None:
    model, before = a_model(config), torch.random.get_rng_state()
    pooled = PooledModel(model, 64, 2, 32, page_size=4)
    assert torch.equal(torch.random.get_rng_state(), before)
    plain = PooledModel(model, 64, 2, 32, page_size=4, check=False)
    assert pooled.allocator.stats() == plain.allocator.stats()
    assert pooled.table.available_size() == 2
    assert not any(
        buffer.any()
        for layer in range(pooled.kv_pool.layer_num)
        for buffer in pooled.kv_pool.get_kv_buffer(layer)
    )
    if pooled.gdn_pool is not None:
        assert not pooled.gdn_pool.recurrent_state.any()
        assert not pooled.gdn_pool.conv_state.any()


@pytest.mark.parametrize("longest", [1, 2, 5, 6])
def test_short_requests_are_compared_as_far_as_they_go(longest: int) -> None:
    PooledModel(model_of("mistral", {**TINY, "sliding_window": 16}), 64, 2, longest)


# The cache of `generate()`


CACHE_REFUSED = {
    "layers run several times": (*REFUSED["layers run several times"][:2], "dory adds 1 layers"),
    "no cache": (*REFUSED["no cache"][:2], "takes no cache"),
    "a cache of its own class": (*REFUSED["a cache of its own class"][:2], "MiniMax uses cache of its own"),
    "sparse attention": (*REFUSED["sparse attention"][:2], "layer 0 chooses the keys"),
}


@pytest.mark.parametrize("name", CACHE_REFUSED)
def test_a_cache_refuses_models_by_what_they_do(name: str) -> None:
    kind, options, words = CACHE_REFUSED[name]
    with pytest.raises(ConfigError, match=words) as error:
        PooledCache(model_of(kind, options), 64, 2)
    assert kind in str(error.value)


def test_attention_that_reads_no_views_gets_copies() -> None:
    """Its keys are viewed in another shape, which the rows of a pool do not allow."""
    model = model_of("gpt_neox_japanese", TINY)
    chance = torch.Generator().manual_seed(6)
    prompt = torch.randint(3, VOCAB, (3, 12), generator=chance)
    mask = torch.arange(12) >= torch.tensor([0, 5, 11])[:, None]
    inputs = {"input_ids": to_current(prompt * mask), "attention_mask": to_current(mask.long())}
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(**inputs, **options)
    with PooledCache(model, 256, 3, page_size=4) as cache:
        found = model.generate(**inputs, **options, **{cache_argument(model): cache})
    assert found.tolist() == wanted.tolist()
