"""The seconds of prefill that a found prefix saves."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

import numpy as np

from kvpool.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

COLUMNS = ("before", "tokens", "seconds")
"""The columns of a table of measured prefills."""


@dataclass(frozen=True)
class PrefillCost:
    """The prefill of a model on some cards: seconds of a token, and of each token before it.

    The first part is that of the weights, the second that of attention, which is quadratic in the length.
    What else a call costs does not depend on what was found, and is left out.

    Attributes:
        name: Name of the model and the cards.
        per_token_s: Seconds of a token without attention.
        per_pair_s: Seconds that a token's attention takes for each token before it.
    """

    name: str
    per_token_s: float
    per_pair_s: float

    def __post_init__(self) -> None:
        for name in ("per_token_s", "per_pair_s"):
            value = getattr(self, name)
            if not (isfinite(value) and value >= 0.0):
                raise ConfigError(f"cost {self.name!r}: {name} must be a number of seconds, not {value}")

    def seconds(self, lens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the seconds in which prefixes of these lengths are computed, float64 of the same shape.

        A prefix of n tokens costs `per_token_s * n + per_pair_s * n**2 / 2`.
        """
        tokens = np.asarray(lens, dtype=np.float64)
        return self.per_token_s * tokens + self.per_pair_s * tokens * tokens / 2.0

    @staticmethod
    def of_model(  # noqa: PLR0913 - the shape of a model and of a machine
        name: str,
        *,
        weights: float,
        layers: int,
        heads: int,
        head_dim: int,
        flops: float,
    ) -> PrefillCost:
        """Return the cost of a dense model, from the operations of its matrix products.

        A token takes two operations for each weight. The attention of a layer takes, for each pair of tokens,
        two operations for each element of all heads to compare a query with a key, and two to sum the values.

        Args:
            name: Name of the model and the cards.
            weights: Weights of the layers: the embedding is not multiplied, and the logits are few.
            layers: Layers of full attention.
            heads: Heads of queries in each layer.
            head_dim: Elements of a head.
            flops: Operations per second that all cards together reach.
        """
        return PrefillCost(name, 2.0 * weights / flops, 4.0 * layers * heads * head_dim / flops)

    @staticmethod
    def fit(name: str, prefills: Sequence[tuple[int, int, float]]) -> PrefillCost:
        """Fit the cost to measured prefills by least squares of the relative errors.

        Args:
            name: Name of the cost.
            prefills: For each prefill the tokens before it, which were cached, its tokens, and its seconds.

        Raises:
            ConfigError: If there are fewer than two prefills, if one has no tokens or no time, or if they do
                not tell the two parts apart.
        """
        table = np.array(prefills, dtype=np.float64).reshape(-1, 3)
        before, tokens, seconds = table.T
        is_sound = (before >= 0).all() and (tokens >= 1).all() and (seconds > 0).all()
        if len(table) < 2 or not is_sound:  # noqa: PLR2004 - the parts
            raise ConfigError(
                f"cost {name!r}: needs two prefills or more, each with tokens and seconds above 0, not these "
                f"{len(table)}"
            )
        pairs = ((before + tokens) ** 2 - before**2) / 2.0
        parts = np.stack((tokens, pairs), axis=1) / seconds[:, None]
        scale = parts.max(axis=0)
        found, _, rank, _ = np.linalg.lstsq(parts / scale, np.ones(len(table)), rcond=1e-6)
        if rank < 2 or (found < 0).any():  # noqa: PLR2004 - the parts
            raise ConfigError(
                f"cost {name!r}: {len(table)} prefills do not tell the linear part from the quadratic"
            )
        per_token_s, per_pair_s = (found / scale).tolist()
        return PrefillCost(name, per_token_s, per_pair_s)


_H100_FLOPS = 989.4e12
"""Operations per second of an H100 SXM in bfloat16 without sparsity, by its data sheet."""
_REACHED = 0.6
"""The share of them that prefill reaches (assumed). It scales the seconds of all policies alike."""

COSTS = {
    # Llama 3.1: https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json, and likewise for 70B.
    # Of 8.03 and 70.55 billion weights, an embedding and a head of 128,256 tokens each are left out.
    "8B": PrefillCost.of_model(
        "8B on one H100",
        weights=8.03e9 - 2 * 128_256 * 4_096,
        layers=32,
        heads=32,
        head_dim=128,
        flops=_REACHED * _H100_FLOPS,
    ),
    "70B": PrefillCost.of_model(
        "70B on eight H100",
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
    return PrefillCost.fit(path.stem, prefills)
