"""Empty modules in the place of what the peers import and their caches never use."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


class _AnythingType(type):
    """The type of names in such modules: also a base class, a decorator or an annotation."""

    def __getattr__(cls, name: str) -> Any:  # noqa: ANN401
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)

    def __or__(cls, _other: object) -> type:
        return cls

    __ror__ = __or__

    def __getitem__(cls, _key: object) -> type:
        return cls


def _anything(name: str) -> type:
    def call(self: object, *values: object, **named: object) -> object:
        return values[0] if len(values) == 1 and callable(values[0]) and not named else self

    def attribute(_self: object, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)

    members = {
        "__init__": lambda _self, *_values, **_named: None,
        "__call__": call,
        "__getattr__": attribute,
        "__class_getitem__": classmethod(lambda cls, _key: cls),
        "__get_pydantic_core_schema__": classmethod(lambda _cls, _source, _next: {"type": "any"}),
    }
    return _AnythingType(name, (), members)


class _StandIn(types.ModuleType):
    __path__: Sequence[str] = ()
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)


class _Finder:
    """Finds stand-ins, after everything that is installed."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = frozenset(names)

    def find_spec(
        self, name: str, _path: object = None, _target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install(names: Sequence[str]) -> None:
    """Lets modules of these names be imported where they are not installed."""
    sys.meta_path.append(_Finder(names))  # type: ignore[arg-type]
