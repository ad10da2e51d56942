"""Rust and Python say the same of the same thing. (`make lint` compares the stub with the module.)"""

from __future__ import annotations

import ast
import builtins
import inspect
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kvpool
import kvpool.typing
from kvpool import _kvpool, errors

if TYPE_CHECKING:
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
    kvpool.Buffer,
    kvpool.Chunk,
    kvpool.ChunkCopy,
    kvpool.Cleared,
    kvpool.Lease,
    kvpool.PrefixCache,
    kvpool.PrefixTree,
    kvpool.Published,
    kvpool.Removed,
    kvpool.Segment,
    kvpool.Stored,
    kvpool.Tensor,
    kvpool.TreeEviction,
    kvpool.TreeInsertion,
    kvpool.TreeMatch,
    kvpool.TreeNode,
]


def test_every_error_of_rust_is_a_class_here_and_the_other_way_round() -> None:
    ours = {name for name in _kvpool._ERROR_CLASSES if not hasattr(builtins, name)}
    assert ours == set(errors.__all__) - {"KvPoolError"}
    assert {*_kvpool._ERROR_CLASSES} - ours == {"TypeError", "IndexError", "RuntimeError"}


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
    """Those that the stub imports are among those that `kvpool.typing` lists."""
    text = Path(kvpool.__file__).with_name("_kvpool.pyi").read_text(encoding="utf-8")
    [names] = [
        {alias.name for alias in node.names}
        for node in ast.parse(text).body
        if isinstance(node, ast.ImportFrom) and node.module == "kvpool.typing"
    ]
    assert names <= {*kvpool.typing.__all__}


def test_the_version_is_the_installed_one() -> None:
    assert kvpool.__version__ == version("kvpool")
