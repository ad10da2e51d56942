"""Makes every public call of kvpool inside and beside captures of CUDA graphs, and says what came of both.

The calls are those of `tests/python/support/capture_calls.py`, with what each has to do there. On a GPU the
graphs and streams are PyTorch's. Then slots are read on a second stream after the last reference to their
tensor is gone. It ends with 1 if a capture was spoilt, a call did what it does not document, or a read was
wrong.

    python tests/gpu/captures.py [--seconds 80] [--only WORD] [--first]

Work is done in forked processes: after a spoilt capture, which PyTorch and the device may not get over, the
next call begins in a new one, and so does each call that has to be the first of its process (`--first`).
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import records
import torch
from backend import Device, SpoiltError, open_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from multiprocessing.connection import Connection

    from capture_world import World

    Capturing = Callable[[Device, Any], AbstractContextManager[object]]

from capture_calls import ENTRIES, all_entries
from capture_entry import REFUSES, Entry
from capture_world import POOLS, Inputs
from capture_world import World as MakeWorld
from common import some

from kvpool import KVPool, KvPoolError, TokenToKVPoolAllocator

OWN, THREAD, STREAM, KNOWN = "own", "another thread's", "another stream's", "a known stream's"
CASES = (OWN, THREAD, STREAM, KNOWN)
FIRST_CASES = (OWN, THREAD, STREAM)
ALL = "all pools"
READS = 20
HANG_SECONDS = 30.0


@dataclass(frozen=True)
class Item:
    """One thing to try.

    Attributes:
        name: The call, or what reads.
        case: Whose capture, `first: ` before it if the call is the first of its process, or `read`.
    """

    name: str
    case: str

    @property
    def is_alone(self) -> bool:
        """Whether it needs a process of its own."""
        return self.case.startswith("first")


@contextmanager
def captured_elsewhere(device: Device, stream: Any) -> Iterator[None]:  # noqa: ANN401
    """Within it, another thread captures a stream."""
    begun, over = threading.Event(), threading.Event()
    raised: list[Exception] = []

    def capture() -> None:
        try:
            with device.capturing(stream) as graph:
                begun.set()
                over.wait()
            graph.replay()
        except Exception as error:  # noqa: BLE001 - told below
            raised.append(error)
        finally:
            begun.set()

    thread = threading.Thread(target=capture)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if raised:
        raise SpoiltError(str(raised[0]).splitlines()[0])


@contextmanager
def captured_here(device: Device, stream: Any) -> Iterator[None]:  # noqa: ANN401
    """Within it, this thread captures a stream."""
    with device.capturing(stream) as graph:
        yield
    graph.replay()


BESIDE: dict[str, Capturing] = {THREAD: captured_elsewhere, STREAM: captured_here, KNOWN: captured_elsewhere}


class Attempt:
    """A call, made once, and what came of it and of the capture."""

    def __init__(self, entry: Entry, world: World | None) -> None:
        self._entry, self._world = entry, world
        self.answer: Any = None
        self.error: Exception | None = None
        self.spoilt = ""

    def call(self) -> None:
        """Makes the call; what it raises is kept, without the frames that would keep memory alive."""
        try:
            self.answer = self._entry.call(self._world)  # type: ignore[arg-type]
        except Exception as error:  # noqa: BLE001 - told in the report
            self.error = error.with_traceback(None)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Notes that a capture within it was spoilt."""
        try:
            yield
        except SpoiltError as error:
            self.spoilt = str(error)

    def call_in(self, device: Device, case: str, stream: Any, other: Any) -> Any:  # noqa: ANN401
        """Makes the call on a stream, within its capture or beside that of the other; its own graph."""
        graph = None
        with device.on(stream), self.noting():
            if case == OWN:
                with device.capturing(stream) as graph, device.memory():
                    self.call()
            else:
                with BESIDE[case](device, other), device.on(stream):
                    self.call()
        return graph

    def did(self) -> str:
        """The outcome of the call: `worked`, `refused`, or a description of the fault."""
        if self.error is None:
            is_right = self._world is None or self._entry.check is None or self.spoilt
            if is_right or self._entry.check(self._world, self.answer):  # type: ignore[misc, arg-type]
                return "worked"
            return "worked, but did something else"
        if isinstance(self.error, KvPoolError) and "captur" in str(self.error):
            return "refused"
        return f"raised {type(self.error).__name__}: {str(self.error).splitlines()[0][:120]}"


def everything(world: World) -> tuple[list[object], list[torch.Tensor]]:
    """The state in host memory that a refused call must not change."""
    return world.stats(), [tensor.detach().cpu().clone() for tensor in world.tensors()]


def difference(before: Any, after: Any) -> str:  # noqa: ANN401
    """The forbidden changes that a call has made."""
    for old, new in zip(before[0], after[0], strict=True):
        changed = [f"{name} {old[name]} to {new[name]}" for name in old if old[name] != new[name]]
        if changed:
            return f", but changed {', '.join(changed)}"
    same = (torch.equal(old, new) for old, new in zip(before[1], after[1], strict=True))
    return "" if all(same) else ", but changed a tensor"


def make_world(device: Device, entry: Entry, stream: Any) -> World:  # noqa: ANN401
    """All pools, used a little on a stream."""
    with device.on(stream):
        with device.memory():
            inputs = Inputs()
        device.synchronize()
        world = MakeWorld(inputs)
        entry.prepare(world)
    device.synchronize()
    return world


def try_call(device: Device, entry: Entry, case: str) -> dict[str, object]:
    """A call inside the capture of its own stream, or beside another."""
    stream, other = device.stream(), device.stream()
    world = make_world(device, entry, stream)
    if case == KNOWN:
        with device.on(other):
            world.touch()
        device.synchronize()
    before = everything(world)
    attempt = Attempt(entry, world)
    graph = attempt.call_in(device, case, stream, other)
    with device.on(stream), attempt.noting():
        if graph is not None and not attempt.spoilt:
            graph.replay()
    device.synchronize()
    with device.on(stream):
        did = attempt.did()
        if did == "refused" and not attempt.spoilt:
            did += difference(before, everything(world))
    wanted = {OWN: (_own(entry),), KNOWN: ("worked", "refused")}.get(case, ("worked",))
    return _finding(attempt, did, wanted)


def try_first(device: Device, make: Callable[[], object], case: str, wanted: str) -> dict[str, object]:
    """The same for what makes the first pools of its process."""
    stream, other = device.stream(), device.stream()
    device.synchronize()
    attempt = Attempt(Entry(lambda _: make(), wanted), None)
    attempt.call_in(device, case, stream, other)
    return _finding(attempt, attempt.did(), (wanted,))


def make_all(device: Device) -> Callable[[], object]:
    """Calls that make and use all pools."""
    device.use_pytorch()
    with device.memory():
        inputs = Inputs()
    return lambda: MakeWorld(inputs).stats()


def _own(entry: Entry) -> str:
    return "refused" if entry.own == REFUSES else "worked"


def _finding(attempt: Attempt, did: str, wanted: Sequence[str]) -> dict[str, object]:
    return {
        "capture": "spoilt" if attempt.spoilt else "survived",
        "call": did,
        "detail": attempt.spoilt or ("" if did in wanted else f"expected: {' or '.join(wanted)}"),
        "ok": not attempt.spoilt and did in wanted,
    }


def try_read(device: Device, name: str) -> dict[str, object]:
    """Slots read on a second stream after their tensor is gone: how often others were read in their place."""
    allocator = TokenToKVPoolAllocator(4096, "cuda", need_sort=False)
    pool = KVPool(4096, 1, 1, 8, "cuda", torch.float32)
    first, second = device.stream(), device.stream()
    ones = torch.ones(8, 1, 8).cuda()
    numbers = torch.arange(4097, dtype=torch.int32).cuda()
    with device.on(first):
        allocator.free(some(allocator.alloc(64)))
    wrong = 0
    for _ in range(READS):
        allocator.clear()
        pool.k_buffer[0].zero_()
        device.synchronize()
        with device.on(first):
            slots = some(allocator.alloc(64))[:8]
            wanted = slots.tolist()
        device.order(first, second)
        with device.on(second):
            device.delay()
            if name == READERS[0]:
                pool.set_kv_buffer(0, slots, ones, ones)
                read = None
            else:
                read = numbers[slots]
                allocator.used_on(slots, second)
        del slots
        with device.on(first):
            for _ in range(200):
                allocator.alloc(64, contiguous=True)
                allocator.clear()
        device.synchronize()
        found = pool.k_buffer[0].cpu()[:, 0, 0].nonzero().flatten() if read is None else read.cpu()
        wrong += sorted(found.tolist()) != sorted(wanted)
    return {"wrong": wrong, "of": READS, "ok": wrong == 0}


READERS = ("set_kv_buffer", "a kernel of PyTorch, after used_on")


def attempt_item(device: Device, item: Item) -> dict[str, object]:
    if item.case == "read":
        device.use_pytorch()
        return try_read(device, item.name)
    if item.is_alone:
        case = item.case.removeprefix("first: ")
        if item.name == ALL:
            return try_first(device, make_all(device), case, "worked")
        entry = ENTRIES[item.name]
        return try_first(
            device, POOLS[item.name.removesuffix("()")], case, _own(entry) if case == OWN else "worked"
        )
    device.use_pytorch()
    return try_call(device, all_entries()[item.name], item.case)


def items(*, first: bool) -> list[Item]:
    """All there is to try: what tells most comes first."""
    if first:
        keys = [name if name.startswith("make_") else f"{name}()" for name in POOLS]
        alone = [Item(key, f"first: {case}") for case in FIRST_CASES for key in keys]
        return [*alone, Item(ALL, f"first: {THREAD}"), Item(ALL, f"first: {STREAM}")]
    reads = [Item(name, "read") for name in READERS]
    return [*reads, *(Item(name, case) for case in CASES for name in all_entries())]


def work_on(todo: Sequence[Item], tell: Callable[[dict[str, object]], None]) -> None:
    """Tries one after another, up to one after which the process is not to be trusted."""
    device = open_device()
    for item in todo:
        tell({"begins": item.name})
        try:
            found = attempt_item(device, item)
        except Exception as error:  # noqa: BLE001 - told in the report
            text = (str(error).splitlines() or [""])[0][:160]
            found = {
                "capture": "?",
                "call": "not made",
                "detail": f"{type(error).__name__}: {text}",
                "ok": False,
            }
        tell(found)
        if not found["ok"] and found.get("capture") != "survived":
            return
        gc.collect()


def _child(todo: Sequence[Item], told: Connection) -> None:
    try:
        work_on(todo, told.send)
    except BaseException as error:  # noqa: BLE001 - told to the parent
        told.send({"died": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(0)


class Child:
    """A forked process that tries things, and what it tells."""

    def __init__(self, todo: Sequence[Item]) -> None:
        forks = multiprocessing.get_context("fork")
        self._told, told = forks.Pipe(duplex=False)
        self._process = forks.Process(target=_child, args=(todo, told))
        self._process.start()
        told.close()

    def next(self, seconds: float) -> dict[str, Any] | None:
        """Its next message, `None` at its end. Raises `TimeoutError` if there is none for too long."""
        if not self._told.poll(seconds):
            raise TimeoutError(f"nothing for {seconds:.0f} s")
        try:
            found: dict[str, Any] = self._told.recv()
        except EOFError:
            return None
        return found

    def end(self) -> str:
        """Ends it, and says how it ended by itself."""
        self._told.close()
        self._process.join(0.2)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        code = self._process.exitcode or 0
        return f"signal {-code}" if code < 0 else f"exit status {code}"


def run(todo: list[Item], end: float) -> Iterator[tuple[Item, dict[str, Any]]]:
    """Each thing with what came of it, until there is no time left."""
    # For all children, which collect after each thing what it made.
    gc.disable()
    gc.collect()
    gc.freeze()
    while todo and time.monotonic() < end:
        child = Child(todo[:1] if todo[0].is_alone else todo)
        found: dict[str, Any] | None = {}
        has_begun = True
        try:
            while todo and found is not None and time.monotonic() < end:
                found = child.next(HANG_SECONDS)
                if found is not None:
                    has_begun = "begins" in found
                    if not has_begun:
                        yield todo.pop(0), _lost(found["died"]) if "died" in found else found
        except TimeoutError as error:
            child.end()
            yield todo.pop(0), _lost(f"it hung: {error}")
            continue
        how = child.end()
        if found is None and has_begun and todo:
            yield todo.pop(0), _lost(f"the process died: {how}")


def _lost(detail: str) -> dict[str, Any]:
    return {"capture": "?", "call": "?", "detail": detail, "ok": False}


def line_of(item: Item, found: dict[str, Any]) -> str:
    word = "ok" if found["ok"] else "WRONG"
    if "wrong" in found:
        return f"{word:6}read by {item.name}: {found['wrong']} of {found['of']} wrong"
    text = f"{word:6}{item.name} | {item.case}: capture {found['capture']}, call {found['call']}"
    return f"{text} ({found['detail']})" if found["detail"] else text


def main() -> int:
    """Tries everything there is time for, and says whether all of it is right."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=80.0, help="when to stop (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="WORD", help="only calls that contain WORD")
    parser.add_argument("--first", action="store_true", help="each as the first call of its process")
    arguments = parser.parse_args()
    todo = [item for item in items(first=arguments.first) if arguments.only in item.name]
    count: Counter[bool] = Counter()
    for item, found in run(todo, time.monotonic() + arguments.seconds):
        print(line_of(item, found), flush=True)
        records.add("read" if "wrong" in found else "capture", name=item.name, case=item.case, **found)
        count[bool(found["ok"])] += 1
    records.add("captures", right=count[True], wrong=count[False], left=len(todo))
    late = f", {len(todo)} not tried for lack of time" if todo else ""
    print(f"{count[True]} right, {count[False]} wrong{late}")
    return 1 if count[False] else 0


if __name__ == "__main__":
    sys.exit(main())
