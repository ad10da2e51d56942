"""`generate()` over the pools, beside transformers' own cache, and continuous batching over the allocator."""

from __future__ import annotations

import copy
import gc
import logging
import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import devices
import pytest
import torch
from devices import to_current
from tiny_models import (
    MODELS,
    NOISE,
    PROMPT_LENS,
    STATES_IN_PLACE,
    TINY,
    VOCAB,
    a_model,
    built,
    make,
    padded,
    reference,
    some_tasks,
)
from transformers import (
    AutoModelForSeq2SeqLM,
    DynamicCache,
    Gemma3nTextConfig,
    GenerationConfig,
    Llama4TextConfig,
    Qwen3Config,
    T5Config,
)
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from kvpool import ConfigError, IndexOwnershipError, OutOfMemoryError, StaleBufferError, StateError
from kvpool.integrations import seams as adapters
from kvpool.integrations.seams import EngineMismatchError, differences
from kvpool.integrations.transformers import PooledCache, continuous, seams
from kvpool.integrations.transformers.layout import cache_argument, only_shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shared_fixtures import RunSnippet

PAGE_SIZES = [1, 4, 64]


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest, device: str) -> str:
    """Every test runs on every device that PyTorch has kernels for."""
    if device == "cuda" and request.config.getoption("--software"):
        pytest.skip("it needs PyTorch's kernels on a GPU, which the software driver has not")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return device


def is_whole(cache: PooledCache) -> bool:
    """No slot and no row is in use."""
    cache.allocator.verify()
    free = cache.allocator.stats()["in_use"] == 0 and cache.table.available_size() == cache.table.size
    return free and not cache.table.req_to_token.cpu().any()


def generated(
    model: Any,  # noqa: ANN401
    inputs: dict[str, torch.Tensor],
    cache: PooledCache | None = None,
    **options: Any,  # noqa: ANN401
) -> list[list[int]]:
    torch.manual_seed(7)
    if cache is not None:
        options[cache_argument(model)] = cache
    tokens: list[list[int]] = model.generate(**inputs, **{"do_sample": False, **options}).tolist()
    return tokens


def unambiguous_tokens(model: Any, inputs: dict[str, torch.Tensor], new_tokens: int) -> list[list[int]]:  # noqa: ANN401
    """The best tokens, where noise changes none of them."""
    found = model.generate(
        **inputs, max_new_tokens=new_tokens, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    best = torch.stack(found.logits).topk(2).values
    assert float((best[..., 0] - best[..., 1]).min()) > NOISE
    tokens: list[list[int]] = found.sequences.tolist()
    return tokens


# Tokens


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "chunks": {"prefill_chunk_size": 6},
    "samples": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampled beams": {"num_beams": 2, "do_sample": True},
}


@pytest.mark.parametrize("config", MODELS)
def test_padded_prompts_generate_the_same(config: str) -> None:
    model, inputs = a_model(config), padded()
    wanted = unambiguous_tokens(reference(config, devices.current()), inputs, 12)
    with PooledCache(model, 256, 3, page_size=4) as cache:
        assert generated(model, inputs, max_new_tokens=12, cache=cache) == wanted
        assert cache.get_seq_length() == max(PROMPT_LENS) + 11
        assert cache.allocator.stats()["in_use"] == 3 * 32
    assert is_whole(cache)


def test_chunked_attention_generates_the_same() -> None:
    """Of layers that see only the tokens of their own chunk, a cache keeps what one with a window would."""
    more: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 64}
    torch.manual_seed(0)
    config = Llama4TextConfig(
        **{**TINY, **more, "num_hidden_layers": 4}, head_dim=16, attention_chunk_size=16
    )
    model, inputs = make(config).eval().to(devices.current()), padded()
    assert {*(config.layer_types or ())} == {"chunked_attention", "full_attention"}
    wanted = generated(model, inputs, max_new_tokens=14)
    assert generated(model, inputs, max_new_tokens=14, cache=PooledCache(model, 128, 3)) == wanted


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("config", ["gpt_oss", "qwen3_next"])
def test_every_way_to_generate(config: str, way: str) -> None:
    model, inputs = a_model(config), padded()
    wanted = generated(reference(config, devices.current()), inputs, max_new_tokens=8, **WAYS[way])
    for page_size in PAGE_SIZES if way == "beams" else [4]:
        cache = PooledCache(model, 1024, 9, page_size=page_size)
        assert generated(model, inputs, max_new_tokens=8, cache=cache, **WAYS[way]) == wanted
        # The pages of a prompt are those of all its beams, as far as they are full.
        if way == "beams" and page_size == 1:
            assert cache.allocator.stats()["in_use"] < 9 * 20
        cache.reset()
        assert is_whole(cache)


@pytest.mark.parametrize("config", ["qwen3", "mistral", "deepseek_v3"])
def test_assisted_generation(config: str) -> None:
    """An assistant that is never right, and text that is looked up in the prompt: tokens are taken back."""
    model, other = a_model(config), built("llama", devices.current())
    inputs = {"input_ids": to_current(torch.tensor([[*range(1, 8)] * 3]))}
    wanted = generated(reference(config, devices.current()), inputs, max_new_tokens=16)
    for page_size, more in zip(
        PAGE_SIZES,
        ({"prompt_lookup_num_tokens": 3}, {"assistant_model": other}, {"prompt_lookup_num_tokens": 2}),
        strict=True,
    ):
        cache = PooledCache(model, 256, 1, page_size=page_size)
        assert generated(model, inputs, max_new_tokens=16, cache=cache, **more) == wanted
        assert cache.allocator.stats()["in_use"] == -(-cache.get_seq_length() // page_size) * page_size


@pytest.mark.parametrize("config", ["qwen3", "qwen3_next"])
def test_copies_go_on_from_a_prompt(config: str) -> None:
    """The prompt is computed once and its pages are shared; a conversation goes on in its own cache."""
    model, alone = a_model(config), reference(config, devices.current())
    prompt = to_current(torch.tensor([[*range(40, 61)]]))
    cache = PooledCache(model, 256, 4, page_size=4)
    with torch.no_grad():
        model(prompt, **{cache_argument(model): cache})
    for tail in ([1, 2], [3]):
        inputs = {"input_ids": torch.cat((prompt, to_current(torch.tensor([tail]))), 1)}
        other = copy.deepcopy(cache)
        assert cache.allocator.stats()["shared"] == 5 * 4
        found = generated(model, inputs, max_new_tokens=6, cache=other)
        assert found == generated(alone, inputs, max_new_tokens=6)
        inputs = {"input_ids": to_current(torch.tensor([[*found[0], 9, 8]]))}
        assert generated(model, inputs, max_new_tokens=6, cache=other) == generated(
            alone, inputs, max_new_tokens=6
        )
        del other
        gc.collect()
        assert cache.allocator.stats()["in_use"] == 24
    cache.close()
    assert cache.closed
    assert is_whole(cache)


def test_values_of_another_dtype() -> None:
    cache = PooledCache(a_model("qwen3"), 64, 2, dtype=torch.float16)
    for new in (5, 1):
        keys = to_current(torch.randn(2, 2, new, 16))
        with torch.no_grad():
            found = [cache.update(keys, keys, layer)[0] for layer in range(2)]
        assert found[0].dtype is torch.float32
    assert torch.equal(found[1][:, :, -1:], keys.half().float())


# Histories


def assert_same(ours: Any, theirs: Any) -> None:  # noqa: ANN401
    assert len(ours) == len(theirs)
    for found, wanted in zip(ours, theirs, strict=True):
        assert torch.equal(found, wanted)


class Pair:
    """The same calls to a cache of kvpool and to one of `transformers`."""

    def __init__(self, config: str, page_size: int) -> None:
        model = a_model(config)
        self.ours, self.theirs = (
            PooledCache(model, 1200, 8, page_size=page_size),
            DynamicCache(config=model.config),
        )
        self.call_both("activate_past_recording")
        self.pool, self.views = self.ours.kv_pool, 0

    def step(self, batch: int, new: int) -> None:
        shapes = (buffer.shape[1:] for buffer in self.pool.get_kv_buffer(0))
        sizes = [(batch, heads, new, elements) for heads, elements in shapes]
        for layer in range(self.pool.layer_num):
            assert self.ours.get_mask_sizes(new, layer) == self.theirs.get_mask_sizes(new, layer)
            keys, values = (to_current(torch.randn(size)) for size in sizes)
            found = self.ours.update(keys, values, layer)
            assert_same(found, self.theirs.update(keys, values, layer))
            buffer = self.pool.get_key_buffer(layer)
            self.views += buffer.data_ptr() <= found[0].data_ptr() < buffer.data_ptr() + buffer.nbytes
        assert self.ours.get_seq_length() == self.theirs.get_seq_length()

    def call_both(self, call: str, *given: Any) -> None:  # noqa: ANN401
        for cache in (self.ours, self.theirs):
            getattr(cache, call)(*given)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("config", ["gpt_oss", "deepseek_v3"])
def test_histories_beside_the_dynamic_cache(config: str, page_size: int) -> None:
    """Keys and values bit for bit, in views of the pool and gathered, through every change of the batch."""
    chance = random.Random(page_size)  # noqa: S311 - no secrets
    torch.manual_seed(page_size)
    pair = Pair(config, page_size)
    for _ in range(4):
        batch = chance.randint(1, 3)
        for at in range(30):
            new = chance.choice([1, 1, 1, 2, 9]) if at else chance.randint(1, 30)
            pair.step(batch, new)
            pair.call_both("crop", -chance.randrange(new))
            match chance.randrange(6):
                case 0 | 1:
                    order = [chance.randrange(batch) for _ in range(batch)]
                    pair.call_both("reorder_cache", to_current(torch.tensor(order)))
                case 2 if batch > 1:
                    batch -= 1
                    pair.call_both("batch_select_indices", to_current(torch.arange(batch + 1) != batch // 2))
                case 3 if batch < 4:
                    batch *= 2
                    pair.call_both("batch_repeat_interleave", 2)
        pair.ours.allocator.verify()
        pair.call_both("reset")
        pair.call_both("activate_past_recording")
        assert is_whole(pair.ours)
    assert (pair.views > 0) == (page_size > 1)
    assert pair.views < 4 * 30 * pair.pool.layer_num


def test_pages_that_are_read_in_place() -> None:
    """One sequence always, several while each is within a page; then they are gathered."""
    for page_size, batch, lens in ((1, 1, (20, 1, 9)), (64, 3, (20, 1, 43)), (4, 1, (5, 1))):
        pair = Pair("qwen3", page_size)
        for new in lens:
            pair.step(batch, new)
        assert pair.views == (len(lens) - 1) * pair.pool.layer_num
    pair = Pair("qwen3", 64)
    for new in (60, 3, 1, 1):
        pair.step(2, new)
    assert pair.views == 2 * pair.pool.layer_num


# Refusals


@pytest.fixture
def cache() -> PooledCache:
    """Of a model with two layers, for up to three sequences and 8 pages of 4 slots."""
    return PooledCache(a_model("qwen3"), 32, 3, page_size=4, max_context_len=24)


def states(batch: int, new: int, elements: int = 16) -> torch.Tensor:
    return to_current(torch.randn(batch, 2, new, elements))


def write(cache: PooledCache, batch: int, new: int) -> None:
    for layer in range(cache.kv_pool.layer_num):
        cache.update(states(batch, new), states(batch, new), layer)


@pytest.mark.parametrize("config", ["qwen3", "qwen3_next"])
@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([[1]] * 4, "4 sequences more do not fit: 3 of 3"),
        ([[1] * 12] * 3, "3 sequences of 0 tokens do not fit with 12 more each: 32 of 32"),
        ([[1] * 25], "up to 24"),
    ],
)
def test_prompts_that_do_not_fit_take_nothing(config: str, prompts: list[list[int]], words: str) -> None:
    cache = PooledCache(a_model(config), 32, 3, page_size=4, max_context_len=24)
    inputs = {"input_ids": to_current(torch.tensor(prompts))}
    with pytest.raises(OutOfMemoryError, match=words):
        generated(a_model(config), inputs, max_new_tokens=1, cache=cache)
    assert is_whole(cache)


@pytest.mark.parametrize("config", ["qwen3", "qwen3_next"])
def test_a_call_that_fails_loses_no_slot(config: str) -> None:
    """The pool is short in the middle: what was computed stays until the cache is reset."""
    model, inputs = a_model(config), {"input_ids": to_current(torch.tensor([[5, 6, 7], [7, 8, 9]]))}
    cache = PooledCache(model, 12, 2)
    for _ in range(2):
        with pytest.raises(OutOfMemoryError, match=r"2 sequences of 6 tokens .* 1 more each: 0 of 12"):
            generated(model, inputs, max_new_tokens=8, cache=cache)
        assert cache.get_seq_length() == 6
        cache.reset()
        assert is_whole(cache)
    short = generated(model, inputs, max_new_tokens=4, cache=cache)
    assert short == generated(reference(config, devices.current()), inputs, max_new_tokens=4)


def test_a_forward_pass_that_ends_early(cache: PooledCache) -> None:
    write(cache, 2, 3)
    cache.update(states(2, 1), states(2, 1), 0)
    with pytest.raises(StaleBufferError, match="ended before 1 of 2 layers"):
        cache.update(states(2, 1), states(2, 1), 0)
    with pytest.raises(StaleBufferError, match="a layer with 3 tokens gets 2 more, and another has 4"):
        cache.update(states(2, 2), states(2, 2), 1)
    cache.reset()
    write(cache, 3, 1)
    cache.reset()
    assert is_whole(cache)


def test_refuses_and_changes_nothing(cache: PooledCache) -> None:
    write(cache, 2, 3)
    before = cache.allocator.stats(), cache.table.req_to_token.clone()
    with pytest.raises(StateError, match="the batch has 3 sequences, the cache 2"):
        cache.update(states(3, 1), states(3, 1), 0)
    with pytest.raises(ConfigError, match="another model"):
        cache.update(states(2, 1, 8), states(2, 1, 8), 0)
    with pytest.raises(ConfigError, match="no gradients"):
        cache.update(states(2, 1).requires_grad_(), states(2, 1), 0)
    with pytest.raises(ConfigError, match="negative number"):
        cache.crop(1)
    with pytest.raises(ConfigError, match="4 of 3 tokens"):
        cache.crop(-4)
    for indices in ([0, 2], [-1], []):
        with pytest.raises(IndexError):
            cache.reorder_cache(to_current(torch.tensor(indices)))
    with pytest.raises(OutOfMemoryError, match="2 sequences more do not fit: 1 of 3"):
        cache.batch_repeat_interleave(2)
    with pytest.raises(OutOfMemoryError, match="3 sequences more do not fit: 1 of 3"):
        cache.batch_select_indices(to_current(torch.tensor([1, 1, 1, 1])))
    assert cache.allocator.stats() == before[0]
    assert torch.equal(cache.table.req_to_token, before[1])
    cache.batch_select_indices(to_current(torch.tensor([1, 1])))
    write(cache, 2, 1)


def test_a_copy_that_does_not_fit(cache: PooledCache) -> None:
    assert copy.deepcopy(cache).get_seq_length() == 0
    write(cache, 1, 22)
    other = copy.deepcopy(cache)
    assert cache.allocator.available_size() == 4
    with pytest.raises(IndexOwnershipError):
        other.crop(-4)
    cache.allocator.alloc(4)
    before = cache.allocator.stats()
    with pytest.raises(OutOfMemoryError, match="a copy of a sequence of 22 tokens needs a page: 0 of 32"):
        copy.deepcopy(cache)
    with pytest.raises(OutOfMemoryError, match="needs a page"):
        cache.batch_repeat_interleave(2)
    assert cache.allocator.stats() == before
    assert cache.table.available_size() == 1


def test_a_closed_cache_refuses_writes(cache: PooledCache) -> None:
    write(cache, 1, 3)
    for _ in range(2):
        cache.close()
    assert is_whole(cache)
    with pytest.raises(StaleBufferError, match="closed"):
        cache.update(states(1, 1), states(1, 1), 0)
    cache.reorder_cache(to_current(torch.tensor([0])))  # of no sequence


def test_states_cannot_be_taken_back() -> None:
    cache = PooledCache(a_model("qwen3_next"), 16, 1)
    assert not cache.is_croppable
    with pytest.raises(ConfigError, match="Gated DeltaNet"):
        cache.crop(-1)
    cache.crop(0)


UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "shared keys": (
        Gemma3nTextConfig(
            **{**TINY, "num_hidden_layers": 3},
            num_kv_shared_layers=1,
            vocab_size_per_layer_input=VOCAB,
            hidden_size_per_layer_input=8,
        ),
        "gemma3n_text: layer 2 keeps no keys and values of its own",
    ),
    "an encoder": (
        T5Config(vocab_size=VOCAB, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2),
        "t5 has an encoder",
    ),
    "states in place": (
        STATES_IN_PLACE,
        "bamba: layer 0 writes to its recurrent state in place",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_rejects_unsupported_models(name: str) -> None:
    config, words = UNSUPPORTED[name]
    from_config: Any = AutoModelForSeq2SeqLM.from_config
    model = (from_config if config.is_encoder_decoder else make)(config).eval().to(devices.current())
    with pytest.raises(ConfigError, match=words):
        PooledCache(model, 16, 1)


@devices.cpu_only
def test_all_layers_must_keep_the_same_shape() -> None:
    with pytest.raises(
        ConfigError, match=r"llama: layer 5 has states of the shape \(1, 4\), layer 3 of \(1, 2\)"
    ):
        only_shape(a_model("llama"), "states", {3: (1, 2), 5: (1, 4), 7: (1, 2)})


def test_rejects_bad_sizes() -> None:
    model = a_model("qwen3")
    for sizes in ((0, 1), (1, 0)):
        with pytest.raises(ConfigError):
            PooledCache(model, *sizes)
    with pytest.raises(ConfigError):
        PooledCache(model, 8, 1, max_context_len=0)


# Continuous batching


@contextmanager
def on_the_allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[continuous.SectorPool]]:
    """Continuous batching on kvpool's allocator, and the pools that it makes."""
    made: list[continuous.SectorPool] = []
    begin = continuous.SectorPool.reset

    def noted(pool: continuous.SectorPool) -> None:
        begin(pool)
        made.append(pool)

    monkeypatch.setattr(continuous.SectorPool, "reset", noted)
    continuous.enable()
    try:
        yield made
    finally:
        continuous.disable()


@pytest.mark.parametrize("mixed", [False, True])
def test_continuous_batching(*, mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few sectors for all requests, prompts in chunks, with layers of one and of two kinds."""
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    windows: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 16}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Qwen3Config(**{**TINY, "num_hidden_layers": 3}, head_dim=16, layer_types=kinds, **windows)
    torch.manual_seed(7)
    model = (
        make(config).eval().to(devices.current()) if mixed else built.__wrapped__("qwen3", devices.current())
    )
    prompts = [list(task.prompt) for task in some_tasks(12)]
    wanted = [
        unambiguous_tokens(model, {"input_ids": to_current(torch.tensor([prompt]))}, 12)[0][len(prompt) :]
        for prompt in prompts
    ]
    config_of: Any = GenerationConfig
    options = config_of(max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = ContinuousBatchingConfig(num_blocks=24, page_size=8, max_batch_tokens=64)
    with on_the_allocator(monkeypatch) as made:
        found = model.generate_batch(prompts, options, sizes)
    assert [answer.generated_tokens for answer in found.values()] == wanted
    pool = made[0]
    assert type(pool) is continuous.SectorPool
    assert pool.blocks_per_sector == ([1, 2] if mixed else [1])
    assert pool.allocator.stats()["high_water"] == pool.num_sectors == (36 if mixed else 24)
    assert len(pool.free_sectors) == pool.num_free_sectors
    plain = model.generate_batch(prompts[:2], options, sizes)
    assert [answer.generated_tokens for answer in plain.values()] == wanted[:2]
    assert len({id(each) for each in made}) == 1


@devices.cpu_only
def test_sectors_are_given_lowest_first_and_taken_back() -> None:
    pool = continuous.SectorPool(3, 2)
    for index, blocks in enumerate((1, 2)):
        pool.set_blocks_per_sector(index, blocks)
    for index in (0, 1, 1):
        pool.allocate_sector(index)
    assert (pool.num_free_sectors, pool.free_sectors) == (0, [])
    with pytest.raises(OutOfMemoryError, match="none of 3 sectors"):
        pool.allocate_sector(0)
    assert (pool.get_free_blocks(0, 1), sorted(pool.get_free_blocks(1, 3))) == ([2], [6, 7, 8])
    pool.free_blocks(1, [8])
    pool.try_to_free_sectors()
    assert pool.free_sectors == [4]
    pool.free_blocks(0, [2])
    pool.try_to_free_sectors()
    assert pool.free_sectors == [2, 4]
    pool.free_blocks(0, [2])
    with pytest.raises(IndexOwnershipError):
        pool.try_to_free_sectors()
    pool.reset()
    assert pool.free_sectors == [2, 3, 4]


# Seams


@devices.cpu_only
def test_signatures_are_those_that_the_caches_were_written_for() -> None:
    assert differences(seams.CACHE) == differences(seams.CONTINUOUS) == []


@devices.cpu_only
@pytest.mark.parametrize("version", ["4.57.1", "5.20.9", "6.0.0", None])
def test_a_transformers_that_cannot_be_used_is_named_by_the_import(
    version: str | None, run_snippet: RunSnippet
) -> None:
    """By its version, or by what it lacks: here the classes of the caches, as before 5.0."""
    printed = run_snippet(
        f"""
        import importlib.metadata, sys
        if {version!r}:
            importlib.metadata.version = lambda name: {version!r}
        else:
            import transformers.cache_utils
            del transformers.cache_utils.CacheLayerMixin
        from kvpool.integrations.seams import EngineMismatchError
        for module in ("transformers", "transformers.continuous"):
            try:
                __import__(f"kvpool.integrations.{{module}}")
            except EngineMismatchError as error:
                print(error)
        """,
        has_torch=True,
    )
    expected = f"transformers is {version}; 5.21 or later, and below 6, is needed"
    lines = printed.splitlines()
    assert len(lines) == 2
    if version is None:
        assert all("cannot import name 'CacheLayerMixin'" in line for line in lines)
    else:
        assert lines == [expected] * 2


@devices.cpu_only
def test_another_transformers(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(adapters, "version_of", lambda _: "5.99.0")
    adapters._warn_if_untested.cache_clear()
    for _ in range(2):
        PooledCache(a_model("qwen3"), 8, 1)
    (warning,) = caplog.messages
    assert "5.99.0 was not tested with kvpool; tested are 5.21.0" in warning

    before = [module.CachePool for module in continuous._MAKERS]
    for seam, start in (
        ("CACHE", lambda: PooledCache(a_model("qwen3"), 8, 1)),
        ("CONTINUOUS", continuous.enable),
    ):
        monkeypatch.setattr(seams, seam, {"transformers.cache_utils.Cache": {"grow": "(self)"}})
        with pytest.raises(EngineMismatchError, match=r"5\.99\.0 .* Cache\.grow\(self\) is missing"):
            start()
    monkeypatch.undo()
    monkeypatch.setattr(adapters, "version_of", lambda _: "5.99.0")
    with monkeypatch.context() as patch:
        patch.setattr(f"{seams._BATCHING}.cache.CachePool.reset", lambda self: None)  # noqa: ARG005
        with pytest.raises(EngineMismatchError, match="has no _free_blocks, free_sectors"):
            continuous.enable()
    assert [module.CachePool for module in continuous._MAKERS] == before
    adapters._warn_if_untested.cache_clear()
