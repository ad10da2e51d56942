"""`PooledModel`: unmodified models of `transformers` on the pools, compared with the models alone."""

from __future__ import annotations

import logging
import random
import threading
from typing import Any, Literal, NamedTuple

import devices
import pytest
import torch
from devices import to_current
from kvpool_serving import Engine, Request, Sampling
from pool_reader import is_whole
from tiny_models import (
    MODELS,
    NOISE,
    STATES_IN_PLACE,
    VOCAB,
    Task,
    a_model,
    alone,
    built,
    check_alone,
    logit_gaps,
    make,
    padded,
    reference,
    some_tasks,
)
from transformers import DynamicCache, MambaConfig

from kvpool import BatchPlan, BatchPlanner, ConfigError, HostTier, PrefixCache, StaleBufferError, StateError
from kvpool.integrations.transformers import PooledModel
from kvpool.integrations.transformers.layout import cache_argument


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest, device: str) -> str:
    """Every test runs on every device that PyTorch has kernels for."""
    if device == "cuda" and request.config.getoption("--software"):
        pytest.skip("it needs PyTorch's kernels on a GPU, which the software driver has not")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return device


def serve_chats(engine: Engine) -> list[Request]:
    """Serves conversations that begin alike, some forked; each prompt holds what was said before it."""
    users, turns = 9, 3
    chance = random.Random(users)  # noqa: S311 - no secrets
    served: list[Request] = []

    def message(most: int) -> list[int]:
        return chance.choices(range(VOCAB), k=chance.randint(1, most))

    def submit(before: list[int], turns: int) -> None:
        def on_token(request: Request, _token: int) -> None:
            if request.is_over and turns > 1:
                submit(request.prompt + request.tokens, turns - 1)
            elif len(request.tokens) == 3 and len(served) % 4 == 0 and not request.is_over:
                served.append(engine.fork(request))

        served.append(engine.submit(before + message(15), chance.randint(1, 40), on_token=on_token))

    head = message(20)
    for _ in range(users):
        submit(head, turns)
    engine.run()
    assert len(served) > users * turns  # and forks
    return served


def check_served(config: str, served: list[Request]) -> None:
    for request in served:
        assert len(request.tokens) == request.max_new_tokens
        check_alone(config, request.prompt, request.tokens)


class PoolOptions(NamedTuple):
    """The size of a pool, whether it has a prefix cache, and how many tokens must be found in that."""

    size: int
    page_size: int
    prefix_cache: bool
    found_tokens: int = 0


POOL_OPTIONS = {
    "ample": PoolOptions(3000, 16, prefix_cache=True, found_tokens=700),
    "much too small": PoolOptions(224, 4, prefix_cache=True, found_tokens=60),
    "much too small, without a cache": PoolOptions(224, 1, prefix_cache=False),
}


# Through the engine


@pytest.mark.parametrize(
    ("config", "room_name"),
    [
        *((config, "ample") for config in MODELS),
        *((config, "much too small") for config in ("qwen3", "gpt_oss", "deepseek_v3", "qwen3_next")),
        *((config, "much too small, without a cache") for config in ("qwen3", "qwen3_next")),
    ],
)
def test_every_request_equals_the_model_alone(config: str, room_name: str) -> None:
    """Conversations go on as they are answered, some requests are forked, and prompts are chunked."""
    room = POOL_OPTIONS[room_name]
    snapshots = room.size // 64
    pooled = PooledModel(
        a_model(config), room.size, 24, 200, page_size=room.page_size, max_track_slots=snapshots
    )
    engine = Engine(pooled, max_step_tokens=48, prefix_cache=room.prefix_cache)
    served = serve_chats(engine)
    check_served(config, served)
    assert len({token for request in served for token in request.tokens}) > VOCAB // 2
    assert max(len(request.prompt) for request in served) > 48
    stats, cache = engine.stats(), engine.prefix_cache
    assert (stats["retractions"] > 0) == (room.size < 1000)
    assert (cache is not None and cache.stats()["evicted"] > 0) == (room == POOL_OPTIONS["much too small"])
    assert stats["found_tokens"] >= room.found_tokens
    assert (stats["found_tokens"] > 0) == room.prefix_cache
    assert is_whole(engine)


@pytest.mark.parametrize(
    ("config", "swap"),
    [("qwen3", "load"), ("gpt_oss", "load"), ("qwen3_next", "load"), ("qwen3_next", "auto")],
)
def test_evicted_prefixes_come_back_layer_by_layer(config: str, swap: Literal["load", "auto"]) -> None:
    pooled = PooledModel(a_model(config), 192, 24, 200, page_size=4, max_track_slots=8)
    tier = HostTier(pooled.kv_pool, 4000, states=pooled.gdn_pool)
    cache = PrefixCache(pooled.allocator, states=pooled.gdn_pool, tiers=(tier,))
    engine = Engine(pooled, max_step_tokens=48, prefix_cache=cache, swap=swap)
    check_served(config, serve_chats(engine))
    stats = engine.stats()
    assert stats["retractions"] > 0
    assert stats["loaded_tokens"] > 0 or swap == "auto"  # as fast as the machine is
    assert is_whole(engine)


@pytest.mark.parametrize("config", ["qwen3", "qwen3_next", "gpt_oss", "gemma2"])
def test_the_model_generates_as_before(config: str) -> None:
    """Also in between steps, and with its weights as they were."""
    model = built.__wrapped__(config, devices.current())
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    tasks = some_tasks(64)[:3]
    wanted = alone(config, tasks)
    engine = Engine(PooledModel(model, 512, 4, 120), 64)
    request = engine.submit(tasks[0].prompt, tasks[0].new_tokens)
    for _, task, tokens in zip(engine.stream(request), tasks[1:], wanted[1:], strict=False):
        prompt = to_current(torch.tensor([task.prompt]))
        out = model.generate(prompt, max_new_tokens=task.new_tokens, do_sample=False)
        assert out[0, prompt.shape[1] :].tolist() == tokens
    assert list(engine.stream(request)) == wanted[0]
    several = [
        each.generate(**padded(), max_new_tokens=8, do_sample=False).tolist()
        for each in (model, reference(config, devices.current()))
    ]
    assert several[0] == several[1]
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())


def test_states_are_kept_where_prompts_part() -> None:
    """The second prompt with the same beginning ends a chunk there; the third one finds its state."""
    tasks = [Task((*range(1, 41), *([number] * 11)), 3) for number in (3, 7, 5)]
    engine = Engine(PooledModel(a_model("qwen3_next"), 512, 4, 120, page_size=4), 64)
    found = []
    for task, tokens in zip(tasks, alone("qwen3_next", tasks), strict=True):
        request = engine.submit(*task)
        engine.run()
        assert request.tokens == tokens
        found.append(request.prefix_len)
    assert found == [0, 0, 40]
    assert is_whole(engine)


def test_end_of_text_and_abort() -> None:
    pooled = PooledModel(a_model("qwen3"), 512, 8, 120, page_size=16)
    engine = Engine(pooled, 32)
    tasks = [task for task in some_tasks(20) if task.new_tokens > 6]
    wanted = alone("qwen3", tasks)
    stops = [tokens[len(tokens) // 2] for tokens in wanted]
    requests = [
        engine.submit(task.prompt, task.new_tokens, stop_tokens=[stop])
        for task, stop in zip(tasks, stops, strict=True)
    ]
    for _ in range(4):
        engine.step()
    engine.abort(requests[0])
    engine.run()
    for request, tokens, stop in list(zip(requests, wanted, stops, strict=True))[1:]:
        assert request.tokens == tokens[: tokens.index(stop) + 1]
    assert requests[0].tokens == wanted[0][: len(requests[0].tokens)]
    assert is_whole(engine)


@pytest.mark.parametrize("config", ["qwen3", "qwen3_next"])
def test_sampled_tokens_do_not_depend_on_the_batch(config: str) -> None:
    tasks = some_tasks(12)
    samplings = [Sampling(0.8 + 0.1 * i, 20 * (i % 2), 1 - 0.02 * i, seed=i) for i in range(12)]
    found = []
    for max_reqs, page_size in ((12, 1), (1, 16), (5, 16)):
        pooled = PooledModel(a_model(config), 256, max_reqs, 120, page_size=page_size)
        engine = Engine(pooled, 40)
        requests = [
            engine.submit(task.prompt, task.new_tokens, sampling=sampling)
            for task, sampling in zip(tasks, samplings, strict=True)
        ]
        engine.run()
        found.append([request.tokens for request in requests])
        assert is_whole(engine)
    assert found[0] == found[1] == found[2]
    model = reference(config, devices.current())
    gaps = [logit_gaps(model, task.prompt, tokens) for task, tokens in zip(tasks, found[0], strict=True)]
    assert float(torch.cat(gaps).max()) > NOISE  # they are not the best ones


def test_bfloat16_is_within_its_noise() -> None:
    """Each token is the best for the model alone after the same tokens, or so near that rounding decides.

    Logits of about 5 have steps of 2**-5 in bfloat16, and what they come from is rounded many times. A token
    may be behind the best one by 8 such steps, and few may be at all.
    """
    model = a_model("qwen3", torch.bfloat16)
    engine = Engine(PooledModel(model, 512, 24, 120, page_size=16), 48)
    requests = [engine.submit(task.prompt, task.new_tokens) for task in some_tasks(64)]
    engine.run()
    found = torch.cat([logit_gaps(model, request.prompt, request.tokens) for request in requests])
    assert float(found.max()) <= 8 * 2**-5
    assert float((found > 0).float().mean()) < 0.05


# One batch


class Batch:
    """Requests in the pools of a model, and the logits of the model alone."""

    def __init__(self, config: str, page_size: int = 4, **options: Any) -> None:  # noqa: ANN401
        self.model = a_model(config)
        self.pooled = PooledModel(self.model, 640, 12, 128, page_size=page_size, **options)
        self.planner = BatchPlanner(self.pooled.table, self.pooled.allocator, 16, 640)
        self.tokens = {row: list(task.prompt) for row, task in zip(self.rows(5), some_tasks(5), strict=True)}

    def rows(self, n: int) -> list[int]:
        rows = self.pooled.table.alloc(n)
        assert rows is not None
        self.pooled.start(rows)
        return rows

    def plan(self, lens: dict[int, int]) -> BatchPlan:
        """Plan the given numbers of further tokens."""
        begins = [self.planner.seq_len(row) for row in lens]
        ends = [begin + new for begin, new in zip(begins, lens.values(), strict=True)]
        plan = self.planner.extend([*lens], begins, ends)
        assert plan is not None
        return plan

    def new_tokens(self, plan: BatchPlan) -> torch.Tensor:
        """The new tokens of a plan; of the padding, zeros."""
        found = []
        for i, row in enumerate(plan.host.req_pool_indices.tolist()):
            end, new = plan.host.seq_lens[i], plan.host.qo_indptr[i + 1] - plan.host.qo_indptr[i]
            found += self.tokens[row][end - new : end] if row else [0] * new
        return to_current(torch.tensor(found))

    def check(self, plan: BatchPlan, tolerance: float = NOISE) -> None:
        """The logits of a batch equal those of the model alone."""
        logits = self.pooled.forward(self.new_tokens(plan), plan)
        assert logits.shape == (plan.padded_batch_size, VOCAB)
        assert logits.dtype is self.model.dtype
        for i, row in enumerate(plan.host.req_pool_indices[: plan.batch_size].tolist()):
            tokens = self.tokens[row][: plan.host.seq_lens[i]]
            with torch.no_grad():
                wanted = self.model(to_current(torch.tensor([tokens]))).logits[0, -1]
            torch.testing.assert_close(logits[i], wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("config", "page_size"), [*((config, 4) for config in MODELS), ("qwen3", 1), ("qwen3_next", 16)]
)
def test_logits_of_chunks_and_single_tokens(config: str, page_size: int) -> None:
    """Chunks of any lengths in one batch: equal and different ones, single tokens at the start and later."""
    batch = Batch(config, page_size)
    for row in batch.tokens:
        batch.tokens[row] = (batch.tokens[row] * 70)[:70]
    for lens in ([1, 2, 20, 2, 33], [1, 30, 1, 4, 4], [17, 1, 1, 3, 1], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]):
        batch.check(batch.plan(dict(zip(batch.tokens, lens, strict=True))))
    # Another order, and not all of them.
    for rows in ([5, 2, 3], [4], [1, 5]):
        batch.check(batch.plan(dict.fromkeys(rows, 1)))


@pytest.mark.parametrize("config", MODELS)
def test_a_decode_step_padded_for_a_graph_is_right(config: str) -> None:
    batch = Batch(config)
    lens = {row: len(tokens) - 1 for row, tokens in batch.tokens.items() if len(tokens) > 1}
    batch.check(batch.plan(lens))
    rows = [*lens][:3]
    plan = batch.planner.decode(rows, [lens[row] + 1 for row in rows], pad_to=8)
    assert plan is not None
    assert plan.padded_batch_size == 8
    batch.check(plan)


def test_states_are_those_of_the_model() -> None:
    """Recurrent states are those of the model's own cache, with V before K; so are the last inputs."""
    batch = Batch("qwen3_next")
    gdn_pool = batch.pooled.gdn_pool
    assert gdn_pool is not None
    batch.check(batch.plan({row: len(tokens) for row, tokens in batch.tokens.items()}))
    for row, tokens in batch.tokens.items():
        states = DynamicCache(config=batch.model.config)
        with torch.no_grad():
            batch.model(to_current(torch.tensor([tokens])), **{cache_argument(batch.model): states})
        for i, layer in enumerate((0, 2)):
            kept: Any = states.layers[layer]
            wanted = kept.recurrent_states[0][0].transpose(-1, -2)
            torch.testing.assert_close(gdn_pool.recurrent_state[i, row], wanted, rtol=0, atol=NOISE)
            inputs = kept.conv_states[0][0, :, 1:]
            torch.testing.assert_close(gdn_pool.conv_state[i, row], inputs, rtol=0, atol=NOISE)
    assert not gdn_pool.recurrent_state[:, 0].any()


@pytest.mark.parametrize("config", ["qwen3", "deepseek_v3", "mistral"])
def test_shared_prefix_and_rejected_tokens(config: str) -> None:
    batch = Batch(config)
    (row,) = batch.rows(1)
    batch.tokens[row] = [7 * i % VOCAB for i in range(40)]
    batch.check(batch.plan({row: 40}))
    (other,) = batch.rows(1)
    batch.tokens[other] = [*batch.tokens[row][:32], 5, 6, 7, 8, 9, 10]
    plan = batch.planner.extend([other], [32], [35], [batch.pooled.table.read(row, 32)])
    assert plan is not None
    batch.check(plan)
    # Three tokens are drafted, one is accepted.
    plan = batch.planner.decode([other], [38], 3)
    assert plan is not None
    batch.check(plan)
    batch.planner.truncate([other], [36])
    batch.tokens[other][36:] = [77, 78]
    batch.check(batch.plan({other: 2}))


@pytest.mark.parametrize("config", MODELS)
def test_a_forked_request_shares_whole_pages(config: str) -> None:
    """A request continues in two ways: pages are shared, a part of one and the states are copied."""
    batch = Batch(config)
    (row,) = batch.rows(1)
    batch.tokens[row] = [*range(22), 30, 31]
    batch.check(batch.plan({row: 22}))
    (other,) = batch.rows(1)
    slots = batch.planner.fork(row, other, 22)
    assert slots is not None
    batch.pooled.kv_pool.move_kv(*slots)
    if batch.pooled.gdn_pool is not None:
        batch.pooled.gdn_pool.copy_states(row, other)
    batch.tokens[other] = [*range(22), 40, 41]
    batch.check(batch.plan({row: 1, other: 1}))
    batch.check(batch.plan({other: 1, row: 1}))


def test_keys_of_another_dtype() -> None:
    batch = Batch("llama", dtype=torch.float16)
    assert batch.pooled.kv_pool.dtype is torch.float16
    for lens in ([1, 2, 1, 2, 3], [1, 1, 1, 1, 1]):
        for row in batch.tokens:
            batch.tokens[row] = (batch.tokens[row] * 10)[:10]
        batch.check(batch.plan(dict(zip(batch.tokens, lens, strict=True))), tolerance=0.1)


# Shapes of pools


@pytest.mark.parametrize("config", MODELS)
def test_pools_have_the_shapes_of_the_model(config: str) -> None:
    pooled = PooledModel(a_model(config), 100, 3, 50, page_size=4)
    kv_pool, gdn_pool = pooled.kv_pool, pooled.gdn_pool
    wanted = {
        "deepseek_v3": (2, 4, 24, 4, 12),
        "qwen3": (2, 2, 16, 2, 16),
        "gpt_oss": (2, 2, 16, 2, 16),
        "gemma2": (2, 2, 16, 2, 16),
        "qwen3_next": (1, 2, 16, 2, 16),
    }
    assert (
        kv_pool.layer_num,
        kv_pool.k_head_num,
        kv_pool.k_head_dim,
        kv_pool.v_head_num,
        kv_pool.v_head_dim,
    ) == wanted.get(config, (2, 2, 8, 2, 8))
    assert (kv_pool.size, kv_pool.page_size, pooled.allocator.page_size) == (100, 4, 4)
    assert kv_pool.dtype is torch.float32
    assert (pooled.table.size, pooled.table.max_context_len) == (3, 50)
    assert pooled.vocab_size == VOCAB
    assert (gdn_pool is not None) == (config == "qwen3_next")
    if gdn_pool is not None:
        assert gdn_pool.recurrent_state.shape == (2, 4 + 2 * 3, 4, 12, 8)
        assert gdn_pool.conv_state.shape == (2, 4 + 2 * 3, 2 * 2 * 8 + 4 * 12, 3)
        assert gdn_pool.conv_state.dtype is torch.float32


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (
            MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4),
            "no layer with attention",
        ),
        (STATES_IN_PLACE, "bamba: layer 0 writes to its recurrent state in place"),
    ],
    ids=["no attention", "states written in place"],
)
def test_rejects_unsupported_models(config: Any, match: str) -> None:  # noqa: ANN401
    model = make(config).eval().to(devices.current())
    before = model.config._attn_implementation
    with pytest.raises(ConfigError, match=match):
        PooledModel(model, 100, 2, 50)
    assert model.config._attn_implementation == before


def test_failed_pools_leave_the_model_unchanged() -> None:
    model = built.__wrapped__("qwen3", devices.current())
    for sizes in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(ConfigError):
            PooledModel(model, *sizes)
        assert model.config._attn_implementation == "sdpa"


def test_models_of_one_configuration_are_made_one_after_the_other() -> None:
    """Where they share the object: one that is made beside another must not set that one's attention back."""
    config = built.__wrapped__("qwen3", devices.current()).config
    first, second = (make(config).eval().to(devices.current()) for _ in range(2))
    assert first.config is second.config
    made: list[PooledModel] = []
    other = threading.Thread(target=lambda: made.append(PooledModel(second, 64, 2, 32)))
    seen: list[tuple[int, str]] = []

    def look(*_: object) -> None:
        if not other.ident:
            other.start()
            other.join(0.3)
        seen.append((len(made), first.config._attn_implementation))

    first.register_forward_pre_hook(look)
    made.append(PooledModel(first, 64, 2, 32))
    other.join()
    assert len(made) == 2
    assert {attention for _, attention in seen} == {"sdpa", "kvpool"}
    assert (1, "sdpa") not in seen


def test_another_attention_set_later_is_refused() -> None:
    """It would not read the pool."""
    batch = Batch("qwen3")
    row = next(row for row, tokens in batch.tokens.items() if len(tokens) > 2)
    plan = batch.plan({row: 3})
    model = batch.pooled.model
    model.set_attn_implementation("sdpa")
    try:
        with pytest.raises(StateError, match="qwen3 was set to 'sdpa' after PooledModel"):
            batch.pooled.forward(to_current(torch.zeros(3, dtype=torch.int64)), plan)
    finally:
        model.set_attn_implementation("kvpool")
    batch.check(plan)


def test_rejects_mismatched_batches() -> None:
    batch = Batch("qwen3")
    rows = [row for row, tokens in batch.tokens.items() if len(tokens) > 2][:2]
    plan = batch.plan({rows[0]: 3, rows[1]: 1})
    for tokens in (torch.zeros(3), torch.zeros(5), torch.zeros(1, 4)):
        with pytest.raises(ConfigError, match="the plan 4 new tokens"):
            batch.pooled.forward(to_current(tokens.long()), plan)
    batch.check(plan)
    for lens in ({rows[0]: 0, rows[1]: 1}, {rows[0]: 0}, {}):
        new = to_current(torch.zeros(sum(lens.values()), dtype=torch.int64))
        with pytest.raises(ConfigError, match=f"{len(new)} of {len(lens)} requests have new tokens"):
            batch.pooled.forward(new, batch.plan(lens))
    with pytest.raises(StaleBufferError):
        batch.check(plan)
