"""Costs of prefills by name, and from a table of measurements."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING

from kvpool.errors import ConfigError
from kvpool.prefill_cost import PrefillCost

if TYPE_CHECKING:
    from pathlib import Path

COLUMNS = ("before", "tokens", "seconds")
"""The columns of a table of measured prefills."""

_H100_FLOPS = 989.4e12
"""Operations per second of an H100 SXM in bfloat16 without sparsity, by its data sheet."""
_REACHED = 0.6
"""The share of them that prefill reaches (assumed). It scales the seconds of all policies alike."""

COSTS = {
    # Llama 3.1: https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json, and likewise for 70B.
    # Of 8.03 and 70.55 billion weights, an embedding and a head of 128,256 tokens each are left out.
    "8B": PrefillCost.of_model(
        name="8B on one H100",
        weights=8.03e9 - 2 * 128_256 * 4_096,
        layers=32,
        heads=32,
        head_dim=128,
        flops=_REACHED * _H100_FLOPS,
    ),
    "70B": PrefillCost.of_model(
        name="70B on eight H100",
        weights=70.55e9 - 2 * 128_256 * 8_192,
        layers=80,
        heads=64,
        head_dim=128,
        flops=8 * _REACHED * _H100_FLOPS,
    ),
}
"""Costs by the names that `kvpool replay --cost` takes."""


def read_cost(path: Path) -> PrefillCost:
    """Fit the cost to a table of measured prefills: CSV with the columns `before`, `tokens` and `seconds`.

    Raises:
        ConfigError: If a column is missing, a value is no number, or the rows do not determine the cost.
        OSError: If the file cannot be opened.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            if not {*COLUMNS} <= {*(rows.fieldnames or ())}:
                raise ConfigError(f"{path}: needs the columns {', '.join(COLUMNS)}")
            prefills = [(int(row["before"]), int(row["tokens"]), float(row["seconds"])) for row in rows]
    except (ValueError, TypeError, csv.Error) as error:
        raise ConfigError(f"{path}: not a table of prefills: {error}") from None
    return PrefillCost.fit(prefills, path.stem)
