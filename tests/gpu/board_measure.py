"""How the rows of `board.py` are timed: both sides in turns, on the host and in replayed graphs."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import records
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Call = Callable[[], object]

ROUNDS = 7
CALLS = 50
NODES = 20
REPLAY_US = 2000.0
OURS = "kvpool"
# More than four times the largest cache of the cards that are meant.
ROTATED_BYTES = 256 << 20


@dataclass(frozen=True)
class Target:
    """The target of a row.

    Attributes:
        metric: `host` or `device`.
        least: The least ratio, of a peer's time to kvpool's.
        most_us: The most microseconds.
        peer: Whom the ratio is for; everybody if empty.
    """

    metric: str
    least: float | None = None
    most_us: float | None = None
    peer: str = ""


class Side:
    """The call of one side, repeated over its own data.

    Args:
        calls: One call for each set of data.
        before: Puts the side back to where it began.
    """

    def __init__(self, calls: Sequence[Call], before: Call | None = None) -> None:
        self.calls = list(calls)
        self.before = before or (lambda: None)
        self._next = itertools.cycle(self.calls)
        self._graph: Any = None
        self._replays = 1

    def host_us(self, count: int, pause: float) -> float:
        """Microseconds until a call returns, in a burst or after pauses."""
        self.before()
        torch.cuda.synchronize()
        seconds = 0.0
        start = time.perf_counter()
        for call in itertools.islice(self._next, count):
            if pause:
                torch.cuda.synchronize()
                time.sleep(pause)
                start = time.perf_counter()
            call()
            if pause:
                seconds += time.perf_counter() - start
        seconds = seconds or time.perf_counter() - start
        torch.cuda.synchronize()
        return seconds / count * 1e6

    def capture(self) -> None:
        """Makes a graph of all calls, at least `NODES` of them."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in self.calls[:3]:
                call()
        torch.cuda.synchronize()
        self._nodes = -(-NODES // len(self.calls)) * len(self.calls)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in itertools.islice(itertools.cycle(self.calls), self._nodes):
                call()
        self._graph = graph
        first = min(self.device_us(), self.device_us())
        self._replays = max(1, min(40, int(REPLAY_US / max(first * self._nodes, 1e-3))))

    def device_us(self) -> float:
        """A call's share of a replay."""

        def replays(_: int) -> None:
            self._graph.replay()

        return event_us(replays, self._replays) / self._nodes


def event_us(call: Callable[[int], object], count: int) -> float:
    """Microseconds of the device for a call, which is told its number."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    for number in range(count):
        call(number)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / count


class Board:
    """Makes rows, times them, and tells of each figure as soon as it is known.

    Args:
        dry: Every call is made once on the CPU, with little data, and nothing is timed.
        quick: One size of each row.
    """

    def __init__(self, *, dry: bool, quick: bool) -> None:
        self.dry = self.little = dry
        self.quick = quick
        self.device = "cpu" if dry else "cuda"
        self._ceilings: dict[str, float] = {}

    def sizes(self, *values: Any) -> tuple[Any, ...]:  # noqa: ANN401 - whatever a row has several of
        """All sizes of a row, or the one in the middle."""
        return values[len(values) // 2 :][:1] if self.quick else values

    def sets(self, moved: int) -> int:
        """How many sets of data together exceed the caches, as far as a graph can go through them."""
        return 2 if self.little else max(2, min(64, -(-ROTATED_BYTES // max(1, moved))))

    def synchronize(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def missing(self, what: str, peer: str, why: object) -> None:
        """Names a peer that is not there."""
        words = str(why).splitlines()
        text = (
            f"{type(why).__name__}: {words[0] if words else ''}" if isinstance(why, Exception) else str(why)
        )
        print(f"missing: {what}: {peer}: {text}", flush=True)
        records.add("missing", question=what, peer=peer, why=text)

    def peer(self, what: str, name: str, make: Callable[[], Any], *, of_gpu: bool = False) -> Any:  # noqa: ANN401
        """The result of `make`, or nothing where the peer is missing, which is reported."""
        if of_gpu and self.dry:
            self.missing(what, name, "it runs on a GPU alone")
            return None
        try:
            return make()
        except Exception as error:  # noqa: BLE001 - peers fail in their own ways
            self.missing(what, name, error)
            return None

    def compare(  # noqa: PLR0913 - all that a row has
        self,
        what: str,
        sides: Mapping[str, Sequence[Call] | Side],
        *,
        same: Callable[[str], bool] | None = None,
        moved: int = 0,
        device: bool = True,
        calls: int = CALLS,
        pause: float = 0.0,
        targets: Sequence[Target] = (),
    ) -> None:
        """Times all sides of a row, kvpool's first.

        Args:
            what: The row.
            sides: The calls of each.
            same: Whether a peer's results equal kvpool's.
            moved: The bytes that a call reads and writes.
            device: Whether calls can be captured.
            calls: Those of a burst.
            pause: Seconds of idleness before each call.
            targets: What should be reached.
        """
        ready = {name: side if isinstance(side, Side) else Side(side) for name, side in sides.items()}
        for name in ready:
            if name != OURS and same is not None and not same(name):
                raise AssertionError(f"results of {name} differ from kvpool's")
        if self.dry:
            for side in ready.values():
                side.before()
                side.calls[0]()
            self.made(what)
            return
        self._warm(what, ready, calls, device=device)
        metrics: dict[str, Callable[[Side], float]] = {"host": lambda side: side.host_us(calls, pause)}
        if device:
            metrics["device"] = Side.device_us
        found = {metric: {name: list[float]() for name in ready} for metric in metrics}
        gc.collect()
        gc.disable()
        for _ in range(ROUNDS):
            for metric, measure in metrics.items():
                for name, side in ready.items():
                    found[metric][name].append(measure(side))
        gc.enable()
        for metric, times in found.items():
            medians = {name: statistics.median(values) for name, values in times.items()}
            self.told(f"{what}, {metric}", metric, medians, targets, moved if metric == "device" else 0)

    def _warm(self, what: str, sides: dict[str, Side], calls: int, *, device: bool) -> None:
        """Makes first calls and graphs; a peer that cannot be captured is left out, which is told."""
        for name, side in list(sides.items()):
            side.before()
            for call in side.calls[: calls // 2]:
                call()
            try:
                if device:
                    side.capture()
            except RuntimeError as error:
                if name == OURS:
                    raise
                self.missing(what, name, error)
                del sides[name]

    def made(self, what: str) -> None:
        print(f"made: {what}", flush=True)
        records.add("made", question=what)

    def told(
        self,
        question: str,
        metric: str,
        times: Mapping[str, float],
        targets: Sequence[Target] = (),
        moved: int = 0,
    ) -> None:
        """Tells a line for each peer, and one for each limit in microseconds.

        Args:
            question: The row and what was measured.
            metric: Which targets count.
            times: Microseconds of each side, kvpool's first.
            targets: What should be reached.
            moved: The bytes of a call.
        """
        ours = times[OURS]
        mine = [target for target in targets if target.metric == metric]
        peers = {name: us for name, us in times.items() if name != OURS}
        limits = [target.most_us for target in mine if target.most_us is not None]
        for name, us in peers.items():
            least = next((t.least for t in mine if t.least is not None and t.peer in {"", name}), None)
            ratio = round(us / ours, 2)
            target = "" if least is None else f"ratio >= {least:.2f}"
            self._line(question, ours, name, us, target, None if least is None else ratio >= least, moved)
        for limit in limits:
            self._line(question, ours, "limit", limit, f"<= {limit:g} us", ours <= limit, moved)
        if not peers and not limits:
            self._line(question, ours, "", None, "", None, moved)

    def _line(  # noqa: PLR0913, PLR0917 - the columns
        self,
        question: str,
        ours: float,
        peer: str,
        its: float | None,
        target: str,
        met: bool | None,
        moved: int,
    ) -> None:
        line = {
            "question": question,
            "ours_us": ours,
            "gbs": moved / ours / 1e3 if moved else None,
            "peer": peer,
            "its_us": its,
            "ratio": None if its is None else its / ours,
            "target": target,
            "met": met,
        }
        beside = f"{peer} {its:,.2f} us, {its / ours:.2f}" if its is not None else ""
        print(f"{question}: {ours:,.2f} us; {beside}", flush=True)
        records.add("line", **line)

    def ceiling(self, name: str) -> float:
        """GB/s of the card for `d2d` (read and written), `zeros`, `h2d` or `d2h`."""
        if name not in self._ceilings:
            self._ceilings[name] = 1.0 if self.dry else self._bandwidth(name)
        return self._ceilings[name]

    def ceiling_us(self, name: str, moved: int) -> float:
        """Microseconds that as many bytes take at the card's ceiling."""
        return moved / self.ceiling(name) / 1e3

    def _bandwidth(self, name: str) -> float:
        size = 1 << (16 if self.little else 30 if name in {"d2d", "zeros"} else 28)

        def random(count: int, device: str = self.device) -> list[torch.Tensor]:
            return [torch.randint(0, 255, (size,), dtype=torch.uint8, device=device) for _ in range(count)]

        def copies(to: list[torch.Tensor], source: list[torch.Tensor]) -> Callable[[int], object]:
            return lambda i: to[i % 2].copy_(source[i % 2], non_blocking=True)

        call: Callable[[int], object]
        if name == "zeros":
            blank = random(3)
            call = lambda i: blank[i % 3].zero_()  # noqa: E731
        elif name == "d2d":
            call = copies(random(2), random(2))
        else:
            host = [tensor.pin_memory() for tensor in random(2, "cpu")]
            call = copies(random(2), host) if name == "h2d" else copies(host, random(2))
        us = statistics.median(event_us(call, 8) for _ in range(5))
        torch.cuda.empty_cache()
        return (2 if name == "d2d" else 1) * size / us / 1e3
