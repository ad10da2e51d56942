"""Rust and Python say the same of the same thing. (`make lint` compares the stub with the module.)"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import kvpool
import kvpool.typing
from kvpool import ConfigError, _kvpool, errors

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

DEVICES = {
    kvpool.BufferPool: "cuda",
    kvpool.ChunkPool: "cpu",
    kvpool.GDNPool: "cuda",
    kvpool.KVPool: "cuda",
    kvpool.PagePool: "cpu",
    kvpool.ReqToTokenPool: "cuda",
    kvpool.TokenToKVPoolAllocator: "cuda",
    kvpool.Workspace: "cuda",
}
CLASSES: list[type] = [
    *DEVICES,
    kvpool.ArenaLease,
    kvpool.ArenaPrefixCache,
    kvpool.Buffer,
    kvpool.Chunk,
    kvpool.ChunkCopy,
    kvpool.Cleared,
    kvpool.GroupReport,
    kvpool.Lease,
    kvpool.LeasedUnits,
    kvpool.PrefixCache,
    kvpool.Published,
    kvpool.Removed,
    kvpool.Segment,
    kvpool.Stored,
    kvpool.Tensor,
]


def test_every_error_of_rust_is_a_class_here_and_the_other_way_round() -> None:
    ours = {name for name in _kvpool._ERROR_CLASSES if not hasattr(builtins, name)}
    assert ours == set(errors.__all__) - {
        "KvPoolError",
        "StaleBufferError",
    }  # the base, and an earlier name of one
    assert {*_kvpool._ERROR_CLASSES} - ours == {"TypeError", "IndexError"}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_public_name_is_documented(cls: type) -> None:
    assert cls.__doc__
    for name, member in inspect.getmembers(cls):
        if not name.startswith("_"):
            assert member.__doc__, f"{cls.__name__}.{name}"


@pytest.mark.parametrize("cls", list(DEVICES), ids=lambda cls: cls.__name__)
def test_signatures_can_be_read(cls: type) -> None:
    assert inspect.signature(cls).parameters["device"].default == DEVICES[cls]


@pytest.mark.parametrize("module", [kvpool, kvpool.typing], ids=lambda module: module.__name__)
def test_all_names_what_is_there(module: ModuleType) -> None:
    assert sorted(module.__all__) == module.__all__
    for name in module.__all__:
        assert hasattr(module, name)


def test_types_of_public_signatures_are_public() -> None:
    """The types that the stub imports are among those that `kvpool.typing` lists."""
    text = Path(kvpool.__file__).with_name("_kvpool.pyi").read_text(encoding="utf-8")
    [names] = [
        {alias.name for alias in node.names}
        for node in ast.parse(text).body
        if isinstance(node, ast.ImportFrom) and node.module == "kvpool.typing"
    ]
    assert names <= {*kvpool.typing.__all__}


def refused(call: Callable[[Any], object], name: str) -> set[str]:
    """The names that a call lists when it gets another one."""
    with pytest.raises(ConfigError) as caught:
        call("no such name")
    text = str(caught.value).replace("no such name", "")
    return {one for one in re.findall(r"\w+", text) if f"'{one}'" in getattr(kvpool.typing, name)}


def test_names_in_types_are_those_that_calls_take() -> None:
    kv = kvpool.KVPool(64, 1, 1, 4, "cpu")
    slots = kvpool.TokenToKVPoolAllocator(64, "cpu")
    arena = kvpool.CacheArena(kv.cache_layout, 1 << 14, "cpu")
    calls: dict[str, list[Callable[[Any], Any]]] = {
        "Policy": [
            lambda name: kvpool.PrefixCache(slots, policy=name).policy,
            lambda name: kvpool.ArenaPrefixCache(arena, policy=name).policy,
        ],
        "Rounding": [lambda name: kvpool.BufferPool("cpu", rounding=name).rounding],
        "WriteMode": [lambda name: kvpool.HostTier(kv, 64, write=name).write],
        "Layout": [lambda name: kvpool.KVPool(64, 1, 1, 4, "cpu", layout=name).layout],
        "Fit": [lambda name: slots.alloc(1, contiguous=name) and name],
    }
    for alias, makers in calls.items():
        names = {*re.findall(r"'(\w+)'", getattr(kvpool.typing, alias))}
        assert len(names) >= 2
        for make in makers:
            assert {make(name) for name in names} <= {*names, None}
            assert refused(make, alias) == names


def test_a_type_checker_sees_no_name_that_is_not_there() -> None:
    """`__getattr__` of a module gives every name a type."""
    for path in Path(kvpool.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert not any(isinstance(one, ast.FunctionDef) and one.name == "__getattr__" for one in tree.body)


def test_the_version_is_the_installed_one() -> None:
    assert kvpool.__version__ == version("kvpool")
