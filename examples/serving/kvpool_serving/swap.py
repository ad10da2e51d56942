"""The choice between loading and computing a prefix that the tier below the device has, and its arrival."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from kvpool.errors import ConfigError, KvPoolError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool import Load

SwapMode: TypeAlias = Literal["auto", "load", "compute"]
"""The treatment of the part of a prefix that only a tier below the cache has: see `Engine`."""

_MODES: Final[tuple[SwapMode, ...]] = ("auto", "load", "compute")

_FADE = 0.95
"""The factor by which the weight of a measurement falls with each new one."""
_REFUSALS = 64
"""Decisions to compute after which a load is tried again: its cost is only known from loads."""


def swap_mode(name: str) -> SwapMode:
    """Return the mode with this name.

    Raises:
        ConfigError: If there is no such mode.
    """
    for mode in _MODES:
        if mode == name:
            return mode
    raise ConfigError(f"swap is {name!r}; it is 'auto', 'load' or 'compute'")


class Swap:
    """Decides whether so many tokens are loaded or computed, with "auto" by the measured costs of both.

    The cost of a step without loads has a fixed part, and grows with the tokens of chunks of prompts. The
    further time of a step with loads is the cost of the loads: the time in which they overlap with the
    computation of other layers counts as free.

    Args:
        mode: "auto", or "load" or "compute" for always the same decision.

    Raises:
        ConfigError: If there is no such mode.
    """

    def __init__(self, mode: SwapMode = "auto") -> None:
        self.mode = swap_mode(mode)
        # Seconds of a step by tokens of chunks, and of loads by tokens.
        self._steps, self._loads = Line(), Line()
        # Seconds of a step without chunks.
        self._least: float | None = None
        # Steps that the host has not waited for: number, seconds, tokens of chunks, loaded tokens.
        self._open = (0, 0.0, 0, 0)
        self._refusals, self._largest = 0, 0

    def pays(self, tokens: int) -> bool:
        """Decide whether to load so many tokens. One in `_REFUSALS` refusals is turned into a load."""
        if self.mode != "auto":
            return self.mode == "load"
        if not self._steps.is_known:
            return False
        # The measured cost of small loads does not predict that of much larger ones.
        is_tried = tokens <= 2 * self._largest
        if not is_tried or self._loads.at(tokens) <= self._steps.slope(self._least) * tokens:
            return True
        self._refusals += 1
        return self._refusals % _REFUSALS == 0

    def record_step(self, seconds: float, chunk_tokens: int, loaded: int, *, is_over: bool) -> None:
        """Record a step.

        Args:
            seconds: Its duration.
            chunk_tokens: Tokens computed, without one for each request.
            loaded: Tokens of the step that were loaded from the tier below.
            is_over: Whether the host has waited for the end of the step, so that the device is idle. If not,
                the time of the step is counted together with that of the next one.
        """
        steps, before, chunks, loads = self._open
        steps, seconds = steps + 1, before + seconds
        chunks, loads = chunks + chunk_tokens, loads + loaded
        if not is_over:
            self._open = (steps, seconds, chunks, loads)
            return
        self._open = (0, 0.0, 0, 0)
        seconds -= (steps - 1) * (self._least or 0.0)
        if loads:
            self._largest = max(self._largest, loads)
            self._loads.add(loads, max(seconds - self._steps.at(chunks, self._least), 0.0))
        elif not chunks:
            self._least = seconds if self._least is None else _FADE * self._least + (1 - _FADE) * seconds
        else:
            self._steps.add(chunks, seconds)

    def drop_open(self) -> None:
        """Forget the steps that the host has not waited for, after an exception has ended the last one."""
        self._open = (0, 0.0, 0, 0)


class Line:
    """A cost with a fixed part and one for each token, fitted to measurements, of which old ones fade."""

    def __init__(self) -> None:
        # Sums over the measurements: weights, tokens, seconds, and products with tokens.
        self._sums = [0.0, 0.0, 0.0, 0.0, 0.0]

    @property
    def is_known(self) -> bool:
        """Whether there is a measurement with at least one token."""
        return self._sums[1] > 0

    def slope(self, fixed: float | None = None) -> float:
        """Return the seconds per token, given the fixed part if it is known."""
        return self._fit(fixed)[1]

    def at(self, tokens: int, fixed: float | None = None) -> float:
        """Return the seconds of `tokens` tokens, given the fixed part if it is known."""
        fixed, slope = self._fit(fixed)
        return fixed + slope * tokens

    def add(self, tokens: int, seconds: float) -> None:
        """Add a measurement."""
        new = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        self._sums = [_FADE * total + more for total, more in zip(self._sums, new, strict=True)]

    def _fit(self, fixed: float | None) -> tuple[float, float]:
        """Return the fixed part and the slope of least squares, neither below 0."""
        weight, x, y, xx, xy = self._sums
        if not self.is_known:
            return fixed or 0.0, 0.0
        if fixed is None:
            spread = weight * xx - x * x
            # One number of tokens alone does not reveal a fixed part.
            slope = (weight * xy - x * y) / spread if spread > 1e-9 * weight * xx else xy / xx
            fixed = max((y - max(slope, 0.0) * x) / weight, 0.0)
        return fixed, max((xy - fixed * x) / xx, 0.0)


class LoadError(RuntimeError):
    """The load of a prefix has failed."""


class Arrivals:
    """The arrival of the prefixes of a step's requests, layer by layer.

    Args:
        loads: The loads.
        layers: The number of layers.
        record_failure: Called before `LoadError` is raised.
    """

    def __init__(self, loads: Sequence[Load], layers: int, record_failure: Callable[[], object]) -> None:
        self._loads = loads
        self._layers = layers
        self._record_failure = record_failure

    def wait_layer(self, layer: int) -> None:
        """Order the current stream, or the calling thread, behind the arrival of a layer and those before.

        Raises:
            LoadError: If the layer does not arrive.
        """
        try:
            for load in self._loads:
                load.wait_layer(layer)
        except KvPoolError:
            raise
        except RuntimeError as error:
            self._record_failure()
            raise LoadError(str(error)) from error

    def wait(self) -> None:
        """Order the current stream, or the calling thread, behind the arrival of all layers.

        Raises:
            LoadError: If a layer does not arrive.
        """
        if self._loads:
            self.wait_layer(self._layers - 1)
