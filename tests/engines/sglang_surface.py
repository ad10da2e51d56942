"""Checks of the plugin in a process that imports SGLang: `python sglang_surface.py CHECK...`."""

from __future__ import annotations

import logging
import os
import random
import sys
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

import kvpool
from kvpool.integrations import seams as engines
from kvpool.integrations import sglang as plugin
from kvpool.integrations.sglang import seams

HOOKED = [hook.rpartition(".")[0] for hook in (seams.START, seams.VERIFY)]
REPLACED = [target for target in seams.SEAMS if target not in HOOKED]
ALLOCATOR = "sglang.srt.mem_cache.allocator"
POOLS = "sglang.srt.mem_cache.memory_pool"


def original(target: str) -> Any:  # noqa: ANN401 - a class of SGLang
    module, _, name = target.rpartition(".")
    return getattr(import_module(module), name)


@cache
def switch_on() -> dict[str, Any]:
    """SGLang's own classes, by name, after they were replaced."""
    own = {target.rpartition(".")[2]: original(target) for target in REPLACED}
    plugins = import_module("sglang.srt.plugins")
    plugins.load_plugins()
    replaced = import_module("kvpool.integrations.sglang.pools").REPLACEMENTS
    assert set(replaced) == set(REPLACED)
    for target, stand_in in replaced.items():
        assert original(target) is stand_in, target
    return own


def check_replaced() -> None:
    """Every class is replaced, and isinstance and issubclass say what they said before."""
    unified = import_module("sglang.srt.mem_cache.unified_memory_pool")
    own = switch_on()
    pools = import_module(POOLS)
    for name in ("ReqToTokenPool", "HybridReqToTokenPool"):
        stand_in = getattr(pools, name)
        assert issubclass(unified.UnifiedHybridReqToTokenPool, stand_in)
        assert isinstance(object.__new__(unified.UnifiedHybridReqToTokenPool), stand_in)
        assert isinstance(object.__new__(own[name]), stand_in)
        assert not isinstance(object(), stand_in)
    for derived in ("MHATokenToKVPoolFP4", "MHATokenToKVPoolMXFP8", "PageMajorMHATokenToKVPool"):
        assert issubclass(getattr(pools, derived), pools.MHATokenToKVPool)
    assert not issubclass(pools.MLATokenToKVPool, pools.MHATokenToKVPool)
    hybrid = pools.HybridReqToTokenPool
    assert issubclass(hybrid, pools.ReqToTokenPool)
    order = [cls.__name__ for cls in hybrid.__mro__]
    assert order.index("HybridReqToTokenPool") < order.index("_Rows") < order.index("ReqToTokenPool")
    # A class that SGLang derives later is one of its own.
    later = type(hybrid)("Later", (pools.ReqToTokenPool,), {})
    assert isinstance(later(4, 8, "cpu", False), pools.ReqToTokenPool)
    assert not isinstance(pools.ReqToTokenPool(4, 8, "cpu", False), later)


def check_attributes() -> None:
    """kvpool's objects have every attribute of SGLang's."""
    own = switch_on()
    token = original(f"{ALLOCATOR}.token.TokenToKVPoolAllocator")
    paged = original(f"{ALLOCATOR}.paged.PagedTokenToKVPoolAllocator")
    states = original(f"{ALLOCATOR}.mamba.MambaSlotAllocator")
    rows = original(f"{POOLS}.ReqToTokenPool")
    cache = SimpleNamespace()
    for stand_in, arguments in (
        (token, (64, torch.float16, "cpu", cache, False)),
        (paged, (64, 16, torch.float16, "cpu", cache, False)),
        (states, (8, "cpu")),
        (rows, (8, 32, "cpu", False)),
    ):
        theirs, ours = own[stand_in.replaced.__name__](*arguments), stand_in(*arguments)
        # Lists of free slots that only SGLang's methods use.
        private = {"free_pages", "release_pages", "staged_pages", "num_staged_pages", "free_page_ids_group"}
        missing = {name for name in vars(theirs) if not hasattr(ours, name)} - private
        assert not missing, (stand_in, missing)
    saver = rows(8, 32, "cpu", False)
    assert saver.available_size() == len(saver.free_slots) == 8
    allocator = token(64, torch.float16, "cpu", cache, False)
    assert allocator.get_kvcache() is cache
    assert allocator.size_full == 64
    allocator.resize(SimpleNamespace(max_total_num_tokens=32))
    assert (allocator.size, allocator.available_size()) == (32, 32)
    pages = paged(64, 16, torch.float16, "cpu", cache, False)
    pages.resize(SimpleNamespace(max_total_num_tokens=48))
    assert (pages.num_pages, pages.available_size(), pages.get_all_free_pages().tolist()) == (
        3,
        48,
        [1, 2, 3],
    )


def check_buffers() -> None:
    """Buffers of K and V have the shapes of SGLang's, and V lies whole pages behind K."""
    own = switch_on()
    pool = original(f"{POOLS}.MHATokenToKVPool")
    for page_size, v_head_dim in ((1, 8), (16, 8), (24, 8), (16, 4)):
        arguments = (70, page_size, torch.bfloat16, 2, 8, 3, "cpu", False, v_head_dim)
        theirs, ours = own["MHATokenToKVPool"](*arguments), pool(*arguments)
        assert isinstance(ours.kvpool, kvpool.KVPool)
        for name in ("k_buffer", "v_buffer"):
            for expected, found in zip(getattr(theirs, name), getattr(ours, name), strict=True):
                assert (found.shape, found.stride(), found.dtype) == (
                    expected.shape,
                    expected.stride(),
                    expected.dtype,
                )
                assert found.is_contiguous()
        assert ours.get_contiguous_buf_infos()[1:] == theirs.get_contiguous_buf_infos()[1:]
        for k, v in zip(ours.k_buffer, ours.v_buffer, strict=True):
            distance = v.data_ptr() - k.data_ptr()
            assert v_head_dim == 4 or (distance > 0 and distance % (page_size * k[0].nbytes) == 0)


def check_surface() -> None:
    """A random history of calls on both: as many slots, in the same shape, none given twice."""
    own = switch_on()
    numbers = random.Random(3)  # noqa: S311 - no secrets
    for page_size in (1, 4, 16):
        for need_sort in (False, True):
            name, module = (
                ("TokenToKVPoolAllocator", "token")
                if page_size == 1
                else ("PagedTokenToKVPoolAllocator", "paged")
            )
            sizes = () if page_size == 1 else (page_size,)
            arguments = (40 * page_size, *sizes, torch.float16, "cpu", None, need_sort)
            theirs, ours = own[name](*arguments), original(f"{ALLOCATOR}.{module}.{name}")(*arguments)
            _history(numbers, (theirs, ours), page_size)


def check_groups() -> None:
    """Groups of states reserve as SGLang's do, whatever is allocated and freed in between."""
    own = switch_on()
    pair = own["MambaSlotAllocator"](8, "cpu"), original(f"{ALLOCATOR}.mamba.MambaSlotAllocator")(8, "cpu")
    numbers = random.Random(5)  # noqa: S311 - no secrets
    held: list[tuple[torch.Tensor, ...]] = []
    for allocator in pair:
        allocator.alloc_group_begin(5)
    assert [allocator.available_size() for allocator in pair] == [3, 3]
    for _ in range(600):
        count = numbers.choice((1, 1, 1, 2, 3))
        match numbers.randrange(5):
            case 0:
                for allocator in pair:
                    # One begins when the one before has ended.
                    allocator.alloc_group_end()
                    allocator.alloc_group_begin(count * 2 - 2)
            case 1:
                for allocator in pair:
                    allocator.alloc_group_end()
            case 2 if held:
                for allocator, slots in zip(pair, held.pop(numbers.randrange(len(held))), strict=True):
                    allocator.free(slots)
            case _:
                taken = [allocator.alloc(count) for allocator in pair]
                if taken[0] is None or taken[1] is None:
                    assert taken[0] is taken[1] is None
                else:
                    assert taken[1].dtype is torch.int64
                    assert taken[0].shape == taken[1].shape
                    held.append((taken[0], taken[1]))
        assert pair[0].available_size() == pair[1].available_size() == len(pair[1].free_slots)
        live = [slot for row in held for slot in row[1].tolist()]
        assert len({*live, *pair[1].free_slots.tolist()}) == len(live) + pair[1].available_size()
    pair[1].alloc_group_begin(2)
    pair[1].clear()
    pair[1].alloc_group_end()
    assert pair[1].available_size() == 8


def _history(numbers: random.Random, pair: tuple[Any, Any], page_size: int) -> None:
    rows: list[tuple[torch.Tensor, torch.Tensor]] = []
    for _ in range(300):
        if numbers.random() < 0.5:
            if page_size > 1 and rows and numbers.random() < 0.5:
                _decode(numbers, pair, rows, page_size)
                continue
            count = numbers.randrange(1, 8) * page_size
            taken = [allocator.alloc(count) for allocator in pair]
        elif rows:
            row = rows.pop(numbers.randrange(len(rows)))
            way = numbers.randrange(5)
            for allocator, slots in zip(pair, row, strict=True):
                _free(allocator, slots, way, page_size)
            taken = [None, None]
        else:
            continue
        if taken[0] is None or taken[1] is None:
            assert taken[0] is taken[1] is None
        else:
            assert taken[1].dtype is torch.int64
            assert taken[0].shape == taken[1].shape
            rows.append((taken[0], taken[1]))
        assert pair[0].available_size() == pair[1].available_size()
        for side, allocator in enumerate(pair):
            held = [int(slot) // page_size for row in rows for slot in row[side][::page_size]]
            free = allocator.get_all_free_pages().tolist()
            assert len({*held, *free}) == len(held) + len(free) == 40


def _free(allocator: Any, slots: torch.Tensor, way: int, page_size: int) -> None:  # noqa: ANN401
    half = len(slots) // page_size // 2 * page_size
    match way:
        case 0:
            allocator.free(slots)
        case 1:
            allocator.free_segment(slots, start_pos=0)
        case 2:
            allocator.free_segments([(slots[:half], 0), (slots[half:], half)])
        case 3:
            allocator.free_page_ids(slots[::page_size] // page_size)
        case _:
            allocator.free_group_begin()
            allocator.free(slots[:half])
            allocator.free_segment(slots[half:], start_pos=half)
            allocator.free_group_end()


def _decode(numbers: random.Random, pair: tuple[Any, Any], rows: list[Any], page_size: int) -> None:
    """Grows one row by a prefill of some tokens, or by a token."""
    at = numbers.randrange(len(rows))
    had = len(rows[at][0])
    more = numbers.choice((1, numbers.randrange(1, 3 * page_size)))
    before, after = torch.tensor([had]), torch.tensor([had + more])
    grown = []
    for allocator, slots in zip(pair, rows[at], strict=True):
        last = slots[-1:]
        if more == 1:
            grown.append(allocator.alloc_decode(after, after, last))
        else:
            grown.append(allocator.alloc_extend(before, before, after, after, last, more))
    if grown[0] is None or grown[1] is None:
        assert grown[0] is grown[1] is None
        return
    assert [len(new) for new in grown] == [more, more]
    rows[at] = tuple(torch.cat([slots, new]) for slots, new in zip(rows[at], grown, strict=True))
    # Freed by pages, a row of whole pages is the simplest to compare.
    rest = -(had + more) % page_size
    if rest:
        last_pages = [slots[-1:] + 1 + torch.arange(rest) for slots in rows[at]]
        rows[at] = tuple(torch.cat([slots, more]) for slots, more in zip(rows[at], last_pages, strict=True))


def check_drift() -> None:
    """The engine does not start on a changed SGLang: all differences are named, and nothing is replaced."""
    token = original(f"{ALLOCATOR}.token.TokenToKVPoolAllocator")
    memory = import_module(POOLS)
    rows = memory.ReqToTokenPool

    def free(self: object, slots: object, when: object = 1) -> None:
        """A free of another version."""
        raise NotImplementedError(self, slots, when)

    def free_segment(self: object, free_index: object, start_pos: object = None) -> None:
        """A parameter that was needed is optional."""
        raise NotImplementedError(self, free_index, start_pos)

    token.free, token.free_segment = free, free_segment
    del memory.HybridReqToTokenPool
    message = _no_start(plugin.EngineMismatchError)
    for expected in (
        "TokenToKVPoolAllocator.free is (self, slots, when=1), expected was (self, free_index)",
        "free_segment is (self, free_index, start_pos=None), expected was (self, free_index, *, start_pos)",
        "HybridReqToTokenPool is missing",
    ):
        assert expected in message, message
    import_module("sglang.srt.plugins.hook_registry").HookRegistry.apply_hooks()
    assert original(f"{ALLOCATOR}.token.TokenToKVPoolAllocator") is token
    assert memory.ReqToTokenPool is rows


def check_broken() -> None:
    """Nor does it if the replacements cannot be made."""
    setattr(engines, "differences", lambda _: [])  # noqa: B010 - it sees nothing
    del import_module(f"{ALLOCATOR}.mamba").MambaSlotAllocator
    assert "has no attribute 'MambaSlotAllocator'" in _no_start(plugin.EngineMismatchError)


def check_overridden() -> None:
    """Nor does it if a stand-in is not in its place: SGLang does not apply such a hook, and only logs it."""
    hooks = import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register(f"{POOLS}.ReqToTokenPool", print, hooks.HookType.BEFORE)
    assert "scheduler died" in _no_start(RuntimeError)


def _no_start(error: type[BaseException]) -> str:
    """The error that an engine raises instead of starting."""
    arguments = {"device": "cpu", "attention_backend": "torch_native", "skip_tokenizer_init": True}
    try:
        import_module("sglang").Engine(model_path=os.environ["MODEL"], **arguments)
    except error as raised:
        return str(raised)
    raise AssertionError("the engine started")


def check_version() -> None:
    """A version that was not tested is named once, beside those that were."""
    setattr(engines, "version_of", lambda _: "0.5.99")  # noqa: B010 - it is imported from elsewhere
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("kvpool").addHandler(handler)
    plugin.register()
    assert messages == ["SGLang 0.5.99 was not tested with kvpool; tested are 0.5.23"]


def check_off() -> None:
    """An installed plugin that was not asked for changes nothing."""
    own = {target: original(target) for target in REPLACED}
    import_module("sglang.srt.plugins").load_plugins()
    assert {target: original(target) for target in REPLACED} == own
    assert "kvpool.integrations.sglang.pools" not in sys.modules


if __name__ == "__main__":
    for check in sys.argv[1:]:
        globals()[f"check_{check}"]()
    print("checked", *sys.argv[1:])  # noqa: T201 - the test waits for it
