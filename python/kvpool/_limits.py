"""The check of numbers that have a range, such as the time limits of a process."""

from __future__ import annotations

from operator import index
from typing import Final

from kvpool.errors import ConfigError

MIN_S: Final = 0.001
"""The shortest time of an option that must not be 0: system calls count in milliseconds."""

MAX_S: Final = 86_400.0
"""The longest time of any option: a day."""

MAX_INT: Final = (1 << 31) - 1
"""The largest number of an option that the system or a library takes as an int."""

MAX_OPTION_BYTES: Final = 1 << 40
"""The most bytes of an option that limits memory."""


def check_seconds(low: float, high: float, **values: float) -> None:
    """Refuse times outside of `[low, high]`.

    Args:
        low: The shortest time.
        high: The longest time.
        values: The times in seconds, by the names of their arguments.

    Raises:
        ConfigError: If a time is outside of the range, or NaN.
    """
    for name, value in values.items():
        if not low <= value <= high:
            raise ConfigError(f"{name} is {value}; it must be in [{low:g}, {high:g}]")


def check_ints(low: int, high: int, **values: int) -> None:
    """Refuse integers outside of `[low, high]`.

    Args:
        low: The lowest value.
        high: The highest value.
        values: The values, by the names of their arguments.

    Raises:
        ConfigError: If a value is outside of the range.
        TypeError: If a value is not an integer.
    """
    for name, value in values.items():
        if not low <= index(value) <= high:
            raise ConfigError(f"{name} is {value}; it must be in [{low}, {high}]")
