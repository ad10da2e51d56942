"""Versions of engines that several parts of the package check. Importing it imports no engine."""

from __future__ import annotations

from kvpool.integrations.seams import Engine

__all__ = ["TRANSFORMERS"]

TRANSFORMERS = Engine(
    "transformers",
    "transformers",
    tested=("5.21.0", "5.22.2", "5.23.0", "5.24.0"),
    least=(5, 21),
    below=(6,),
)
"""For `kvpool.integrations.transformers`, `kvpool serve` and `kvpool doctor`; those of the extra."""
