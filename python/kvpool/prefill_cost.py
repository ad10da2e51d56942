"""The seconds of prefill that a found prefix saves."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, overload

from kvpool.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray

# Below this share of what they would be if they had nothing in common, the two parts are not told apart.
_INDEPENDENCE = 1e-9


@dataclass(frozen=True)
class PrefillCost:
    """The prefill of a model on some devices: seconds of a token, and of each token before it.

    The first part is that of the weights, the second that of attention, which is quadratic in the length: a
    token far behind in a prompt costs more than one at its beginning. What else a call costs does not depend
    on what was found, and is left out.

    Attributes:
        per_token_s: Seconds of a token without attention.
        per_pair_s: Seconds that a token's attention takes for each token before it.
        name: Name of the model and the devices, for reports.

    Raises:
        ConfigError: Unless both are finite, neither is negative, and one is above 0.
    """

    per_token_s: float
    per_pair_s: float
    name: str = "prefill"

    def __post_init__(self) -> None:
        both = (self.per_token_s, self.per_pair_s)
        if not all(isfinite(value) and value >= 0.0 for value in both) or both == (0.0, 0.0):
            raise ConfigError(
                f"cost {self.name!r}: per_token_s={self.per_token_s} and per_pair_s={self.per_pair_s} must "
                "be finite and at least 0, and one above 0"
            )

    @overload
    def seconds(self, tokens: float) -> float: ...

    @overload
    def seconds(self, tokens: NDArray[np.int64]) -> NDArray[np.float64]: ...

    def seconds(self, tokens: Any) -> Any:
        """Return the seconds in which a prefix of `tokens` tokens is computed, or those of each of an array.

        A prefix of n tokens costs `per_token_s * n + per_pair_s * n**2 / 2`.
        """
        return self.per_token_s * tokens + self.per_pair_s * tokens * tokens / 2.0

    @staticmethod
    def of_model(  # noqa: PLR0913 - the shape of a model and of a machine
        *,
        weights: float,
        layers: int,
        heads: int,
        head_dim: int,
        flops: float,
        name: str = "prefill",
    ) -> PrefillCost:
        """Return the cost of a dense model, from the operations of its matrix products.

        A token takes two operations for each weight. The attention of a layer takes, for each pair of tokens,
        two operations for each element of all heads to compare a query with a key, and two to sum the values.

        Args:
            weights: Weights of the layers: the embedding is not multiplied, and the logits are few.
            layers: Layers of full attention.
            heads: Heads of queries in each layer.
            head_dim: Elements of a head.
            flops: Operations per second that all devices together reach.
            name: Name of the model and the devices.
        """
        return PrefillCost(2.0 * weights / flops, 4.0 * layers * heads * head_dim / flops, name)

    @staticmethod
    def fit(prefills: Iterable[tuple[int, int, float]], name: str = "prefill") -> PrefillCost:
        """Fit the cost to measured prefills by least squares of the relative errors.

        Args:
            prefills: For each prefill the tokens before it, which were cached, its tokens, and its seconds.
            name: Name of the cost.

        Raises:
            ConfigError: If there are fewer than two prefills, if one has no tokens or no time, or if they do
                not tell the two parts apart.
        """
        table = list(prefills)
        is_sound = all(
            before >= 0 and tokens >= 1 and 0 < seconds < float("inf") for before, tokens, seconds in table
        )
        if len(table) < 2 or not is_sound:  # noqa: PLR2004 - the parts
            raise ConfigError(
                f"cost {name!r}: needs two prefills or more, each with tokens and seconds above 0, not these "
                f"{len(table)}"
            )
        # Each prefill says that its tokens and its pairs, by its seconds, make 1.
        rows = [
            (tokens / seconds, ((before + tokens) ** 2 - before**2) / 2.0 / seconds)
            for before, tokens, seconds in table
        ]
        sums = [sum(row[part] for row in rows) for part in (0, 1)]
        squares = [sum(row[part] ** 2 for row in rows) for part in (0, 1)]
        product = sum(row[0] * row[1] for row in rows)
        determinant = squares[0] * squares[1] - product**2
        solved = [sums[part] * squares[1 - part] - sums[1 - part] * product for part in (0, 1)]
        if determinant <= _INDEPENDENCE * squares[0] * squares[1] or min(solved) < 0.0:
            raise ConfigError(
                f"cost {name!r}: {len(table)} prefills do not tell the linear part from the quadratic"
            )
        return PrefillCost(solved[0] / determinant, solved[1] / determinant, name)
