"""LMCache 0.5 on kvpool.

`pip install 'kvpool[lmcache]'`, then start LMCache with `KVPOOL_LMCACHE=1` in its environment. The classes
and functions of `memory` replace its own before it makes any allocator: the bookkeeping of ranges and of
pages, and host memory. The rest of LMCache does not change.

`kvpool.lmcache` has the names of LMCache's older `mem_pool`, for which LMCache need not be installed.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING, Any

from kvpool.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

__all__ = ["is_switched_on", "register"]

_MEMORY = "lmcache.v1.memory_management"
"""The module of LMCache that all its allocators import."""

_PAGED = "lmcache.v1.memory_allocators.paged_tensor_memory_allocator"
"""The other one with a name that is replaced. It imports the first, and neither imports an allocator."""


def is_switched_on() -> bool:
    """Return whether the environment asks for kvpool: `KVPOOL_LMCACHE` is 1.

    LMCache loads every installed plugin, so the plugin must be switched on as well.
    """
    return os.environ.get("KVPOOL_LMCACHE") == "1"


class _Replacing(MetaPathFinder):
    """Finds the modules with names that are replaced, which happens as soon as both are executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in {_MEMORY, _PAGED}:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute, then = loader.exec_module, _replace if fullname == _PAGED else _import_paged

            def execute_and_then(module: ModuleType) -> None:
                execute(module)
                then()

            loader.exec_module = execute_and_then
        return spec


def _import_paged() -> None:
    """Replace the names, unless the other module is being imported: they are replaced after that."""
    if _PAGED not in sys.modules:
        import_module(_PAGED)


def _replace() -> None:
    from kvpool.integrations.lmcache.seams import LMCACHE, SEAMS  # noqa: PLC0415 - once LMCache is used

    try:
        LMCACHE.require(SEAMS)
        from kvpool.integrations.lmcache.memory import replace  # noqa: PLC0415 - which needs them
    except BaseException:
        sys.modules.pop(_MEMORY, None)  # or a later import would go on without kvpool
        raise
    replace()


def register() -> None:
    """Replace LMCache's names as soon as it is imported.

    The call does nothing unless the plugin is switched on, or if it was called before. LMCache calls this in
    each of its processes, through the entry point `kvpool` of `lmcache.device_plugins`. The import of its
    allocators then raises `EngineMismatchError` if a class or a signature is not the one that the
    replacements were written for, and nothing is replaced.

    Raises:
        ConfigError: If LMCache's allocators are imported already.
    """
    if not is_switched_on() or any(isinstance(finder, _Replacing) for finder in sys.meta_path):
        return
    if _MEMORY in sys.modules:
        raise ConfigError(
            f"{_MEMORY} is imported already; kvpool must be registered before LMCache is imported"
        )
    sys.meta_path.insert(0, _Replacing())
