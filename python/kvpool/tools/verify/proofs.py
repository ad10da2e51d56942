"""Proofs of a layout over several things that move bytes, with a progress bar."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvpool.verify import LeftOutError, make_driver, prove
from kvpool.verify.driver import STEPS

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from kvpool._kvpool import CacheLayout
    from kvpool.verify import Proof


@dataclass(frozen=True)
class Result:
    """What came of one driver.

    Attributes:
        name: Its name.
        proof: The proof; None if it was left out.
        reason: Why it was left out.
    """

    name: str
    proof: Proof | None
    reason: str = ""


def prove_all(
    layout: CacheLayout, names: list[str], tokens: int | None, device: str, console: Console | None
) -> list[Result]:
    """Prove a layout over drivers, up to the first finding, with a bar if there is a console for it."""
    columns = (
        TextColumn("verifying {task.fields[over]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    results: list[Result] = []
    with Progress(*columns, console=console, transient=True) if console is not None else nullcontext() as bar:
        task = None if bar is None else bar.add_task("", total=STEPS * len(names), over="")
        for at, name in enumerate(names):

            def on_step(advance: int = 1) -> None:
                if bar is not None and task is not None:
                    bar.update(task, advance=advance)

            if bar is not None and task is not None:
                bar.update(task, completed=STEPS * at, over=name)
            results.append(_prove(layout, name, tokens, device, on_step))
            proof = results[-1].proof
            if proof is not None and proof.finding is not None:
                break
    return results


def _prove(
    layout: CacheLayout, name: str, tokens: int | None, device: str, on_step: Callable[[], None]
) -> Result:
    try:
        driver = make_driver(name, layout, tokens, device)
    except LeftOutError as error:
        return Result(name, None, str(error))
    with driver:
        return Result(name, prove(driver, tokens=tokens, on_step=on_step))
