"""The public calls of the pools, as the package has them."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from capture_world import POOLS

import kvpool
from kvpool import _kvpool, lmcache
from kvpool._closing import Closing

if TYPE_CHECKING:
    from collections.abc import Iterator

# They hold numbers, or have no calls of their own: reports, LMCache's records and its abstract class. Where
# PyTorch is, there is no `Tensor`.
_WITHOUT_CALLS = (
    "BasePool",
    "CacheLayout",
    "Cleared",
    "Group",
    "KVObj",
    "LMCacheMemPoolMetadata",
    "Leak",
    "Plane",
    "Removed",
    "Segment",
    "SlabLayout",
    "SlotTreeEviction",
    "SlotTreeInsertion",
    "SlotTreeMatch",
    "SlotTreeNode",
    "Stored",
    "Tensor",
)


def _classes() -> Iterator[type]:
    """The public classes, each once."""
    found = {**vars(_kvpool), **{name: getattr(kvpool, name) for name in kvpool.__all__}}
    found |= {name: getattr(lmcache, name) for name in lmcache.__all__}
    for name, value in sorted(found.items()):
        is_call = isinstance(value, type) and not issubclass(value, Exception)
        if is_call and not name.startswith("_") and name not in _WITHOUT_CALLS:
            yield value


def _can_be_made(kind: type) -> bool:
    """Whether a class has a constructor; `Pool` has one for others to inherit."""
    try:
        kind()
    except TypeError as error:
        return "No constructor" not in str(error) and "cannot create" not in str(error)
    except Exception:  # noqa: BLE001 - it lacks arguments, or a device
        return True
    return kind is not kvpool.Pool


def _members(kind: type) -> Iterator[tuple[str, object]]:
    """The members of a class, and those inherited from private classes."""
    for base in kind.__mro__:
        if base is kind or base is Closing or base.__name__.startswith("_"):
            yield from vars(base).items()


def surface() -> tuple[set[str], set[str]]:
    """The public calls, and the properties among them."""
    calls = {name for name in kvpool.__all__ if inspect.isroutine(getattr(kvpool, name))}
    properties = set()
    for kind in _classes():
        # None of the pools is made here: it would be the first use of the driver.
        if kind.__name__ in POOLS or _can_be_made(kind):
            calls.add(f"{kind.__name__}()")
        for name, member in _members(kind):
            if name == "__enter__":
                calls.add(f"{kind.__name__}.with")
            elif not name.startswith("_"):
                calls.add(f"{kind.__name__}.{name}")
                if not callable(member) and not isinstance(member, staticmethod):
                    properties.add(f"{kind.__name__}.{name}")
    return calls, properties
