"""What `kvpool verify` has found, as a table and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from kvpool.tools.output import bytes_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

    from kvpool._kvpool import CacheLayout
    from kvpool.tools.verify.proofs import Result


def as_json(layout: CacheLayout, results: Iterable[Result]) -> dict[str, Any]:
    """Return the results as plain values; what was left out has a reason in place of a proof."""
    return {
        "model": layout.model,
        "fingerprint": layout.fingerprint,
        "results": [
            {
                "over": one.name,
                "proof": None if one.proof is None else one.proof.as_json(),
                "left_out": one.reason or None,
            }
            for one in results
        ],
    }


def print_report(layout: CacheLayout, results: Iterable[Result], console: Console) -> None:
    """Print the layout, and a row for each thing that moved its bytes."""
    console.print(str(layout), highlight=False, soft_wrap=True)
    table = Table()
    table.add_column("over")
    for name in ("tokens", "compared", "s"):
        table.add_column(name, justify="right")
    table.add_column("result")
    for one in results:
        if one.proof is None:
            table.add_row(one.name, "", "", "", Text(f"left out: {one.reason}"))
            continue
        proof = one.proof
        verdict = "every byte is right" if proof.finding is None else str(proof.finding)
        table.add_row(
            one.name,
            f"{proof.tokens:,}",
            bytes_text(proof.checked_bytes),
            f"{proof.seconds:.2f}",
            Text("; ".join((verdict, *proof.notes))),
        )
    console.print(table, highlight=False)
