"""Sizes and bandwidths as users write and read them."""

from __future__ import annotations

import re
from fractions import Fraction

from kvpool.errors import ConfigError

_BYTES = {"": 1, "b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgt", 1)
    for ending, base in (("b", 1000), ("ib", 1024))
}
_COUNTS = {"": 1, "k": 1_000, "m": 1_000_000}
_BITS = {f"{letter}bit": 1000**power for power, letter in enumerate(("", "k", "m", "g", "t"))}
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def parse_bytes(text: str) -> int:
    """Parse a size such as 80GiB, 80GB, 1.5MiB or plain bytes.

    Raises:
        ConfigError: If the text is not a size.
    """
    found = _number(text, _BYTES)
    if found is None:
        raise ConfigError(f"{text!r} is not a size: give 80GiB (1024**3 bytes), 80GB (1000**3) or bytes")
    return int(found)


def parse_count(text: str) -> Fraction | None:
    """Parse a number such as 65536, 500K (1,000) or 8.2M (1,000,000); None if the text is something else."""
    return _number(text, _COUNTS)


def parse_bandwidth(text: str) -> float:
    """Parse a bandwidth such as 400Gbit/s, 50GB/s or 1.5GiB/s, and return bytes per second.

    Raises:
        ConfigError: If the text is not a bandwidth, or the bandwidth is 0.
    """
    amount = text.strip().removesuffix("/s")
    bits, whole = _number(amount, _BITS), _number(amount, _BYTES)
    found = whole if bits is None else bits / 8
    # Gb/s is bits to some and bytes to others.
    if not found or not text.strip().endswith(("bit/s", "B/s")):
        raise ConfigError(f"{text!r} is not a bandwidth: give 400Gbit/s, 50GB/s (1000**3 bytes) or 50GiB/s")
    return float(found)


def bandwidth_text(bytes_per_s: float) -> str:
    """Format a bandwidth in bytes and, as links are sold, in bits."""
    return f"{_short(bytes_per_s)}B/s ({_short(8 * bytes_per_s)}bit/s)"


def _number(text: str, units: dict[str, int]) -> Fraction | None:
    """Return a number with one of the units, in the least unit; None if the text is something else."""
    match = re.fullmatch(r"(\d{1,30}(?:\.\d{1,30})?) ?([A-Za-z]*)", text.strip())
    unit = units.get(match[2].lower()) if match else None
    return None if match is None or unit is None else Fraction(match[1]) * unit


def _short(number: float) -> str:
    """Return three digits, and the prefix of a unit."""
    scale, prefix = next((pair for pair in _PREFIXES if number >= pair[0]), (1.0, ""))
    digits = number / scale
    return f"{digits:,.0f} {prefix}" if digits >= 100 else f"{digits:.3g} {prefix}"  # noqa: PLR2004
