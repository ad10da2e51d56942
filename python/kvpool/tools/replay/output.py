"""The results of a replay, or of a measurement of hit rates: printed, and drawn into a file."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from kvpool.tools.output import refuse

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvpool.tools.replay.hit_rates import HitRates
    from kvpool.tools.replay.hybrid_rates import HybridRates
    from kvpool.tools.replay.replay import ReplayResult
    from kvpool.tools.replay.window_rates import WindowRates

T = TypeVar("T")

PICTURE_FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Output:
    """The form of results.

    Attributes:
        plot: File of the picture, if there is one.
        as_json_object: Whether to print one JSON object in place of tables.
    """

    plot: Path | None
    as_json_object: bool

    def check(self) -> None:
        """Exit if the picture cannot be written, before the results are computed."""
        if self.plot is None:
            return
        if not self.plot.parent.is_dir():
            refuse(f"--plot: {self.plot.parent} is not a folder")
        if self.plot.suffix not in PICTURE_FORMATS:
            refuse(f"--plot: {self.plot.name} must end in {', '.join(PICTURE_FORMATS)}")

    def print_replay(self, result: ReplayResult) -> None:
        """Print a replay, and draw its occupancy and latencies."""
        from kvpool.tools.replay.report import as_json, print_report  # noqa: PLC0415 - it needs NumPy

        self._print(result, as_json, print_report)
        if self.plot is not None:
            from kvpool.tools.replay.plot import save_plot  # noqa: PLC0415 - Matplotlib loads slowly

            save_plot(result, self.plot)
            self._print_path(self.plot)

    def print_rates(self, rates: HitRates) -> None:
        """Print hit rates, and draw them."""
        from kvpool.tools.replay.report import (  # noqa: PLC0415 - it needs NumPy
            print_comparison,
            print_rates,
            rates_as_json,
        )

        self._print(rates, rates_as_json, print_comparison if rates.costs else print_rates)
        if self.plot is not None:
            from kvpool.tools.replay.plot import save_rates  # noqa: PLC0415 - Matplotlib loads slowly

            save_rates(rates, self.plot)
            self._print_path(self.plot)

    def print_hybrid_rates(self, rates: HybridRates) -> None:
        """Print what hybrid models find."""
        from kvpool.tools.replay.report import print_hybrid_rates, shares_as_json  # noqa: PLC0415 - NumPy

        self._print(rates, shares_as_json, print_hybrid_rates)

    def print_window_rates(self, rates: WindowRates) -> None:
        """Print what models with windows find."""
        from kvpool.tools.replay.report import print_window_rates, shares_as_json  # noqa: PLC0415 - NumPy

        self._print(rates, shares_as_json, print_window_rates)

    def _print(
        self, found: T, as_json: Callable[[T], dict[str, Any]], show: Callable[[T, Console], None]
    ) -> None:
        if self.as_json_object:
            sys.stdout.write(json.dumps(as_json(found)) + "\n")
        else:
            show(found, Console())

    def _print_path(self, plot: Path) -> None:
        if not self.as_json_object:
            sys.stdout.write(f"picture: {plot}\n")
