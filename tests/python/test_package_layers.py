"""The folders of the package: allowed imports, without cycles."""

from __future__ import annotations

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kvpool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shared_fixtures import RunSnippet

PACKAGE = Path(__file__).parents[2] / "python" / "kvpool"
# Imports of integrations that are not named after their engine.
ENGINES = {"kv_events": {"blake3", "msgspec", "zmq"}, "vllm": {"numpy", "prometheus_client", "vllm"}}

# The modules of the package, by name.
MODULES = {
    ".".join(("kvpool", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
EXTENSION = "kvpool._kvpool"
# Modules of `kvpool.tools` that every command may import.
SHARED_BY_COMMANDS = {
    "bandwidths",
    "costs",
    "devices",
    "needs",
    "options",
    "output",
    "policies",
    "traces",
    "units",
}

# Names of the extension that `kvpool` does not export, by the modules that import them.
PRIVATE = {
    "kvpool": {"_report_leaks_with"},
    "_fork": {"_after_fork", "_before_fork"},
    "store": {"_StoreCall", "_StoreQueue"},
    "workspace": {"_Workspace"},
    "observe.leaks": {"_Workspace", "_noted"},
    "observe.registry": {"_pools"},
    "models.layout": {"_STORAGE_DTYPES"},
    "tools.plan.pool_bytes": {"_STORAGE_DTYPES", "_footprint"},
    "tools.plan.solver": {"_STORAGE_DTYPES"},
    "tools.replay.command": {"_STORAGE_DTYPES"},
    "tools.replay.config": {"_STORAGE_DTYPES"},
    # Parts of one engine's scheduler each: they have the shape of its classes, and change with them.
    "integrations.lmcache.memory": {"AddressSpace"},
    "integrations.pymllm": {"SlotTree"},
    "integrations.sglang.tree_core": {"HybridFrees", "HybridStep", "HybridTree"},
    "integrations.sglang.tree_events": {"HybridTree"},
    "integrations.sglang.tree_owners": {"HybridTree"},
    "integrations.sglang.waiting": {"HybridTree"},
    "integrations.vllm.hashing": {"BlockHasher"},
    "integrations.vllm.kv_cache_manager": {"BlockQueue"},
    "integrations.vllm.block_pool": {"Block", "BlockMap", "BlockQueue"},
    "integrations.vllm.offload": {
        "OffloadOrder",
        "OffloadRequest",
        "OffloadTable",
        "OffloadTurn",
        "_store_keys",
    },
}

# The folders that the modules of a folder may import. "" is the public face.
MAY_IMPORT = {
    "": {"observe", "integrations", "verify"},
    "observe": {""},
    "integrations": {"", "remote"},
    "remote": {""},
    "models": {""},
    "verify": {"", "integrations", "remote"},
    "tools": {"", "models", "verify", "integrations"},
}


def imports(path: Path) -> Iterator[str]:
    """The modules that a file imports, also within functions and for types alone."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, f"{path}: a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in {*MODULES, EXTENSION} else node.module


def private_names(name: str) -> set[str]:
    """The names that a module imports from the extension and that `kvpool` does not export."""
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == EXTENSION]
    return {alias.name for node in froms for alias in node.names} - {*kvpool.__all__}


def own_imports(name: str) -> set[str]:
    return {found for found in imports(MODULES[name]) if found in MODULES}


def folder(name: str) -> str:
    """The folder of a module; empty for the face, whose modules are in the package itself."""
    first = name.split(".")[1:2]
    return first[0] if first and (PACKAGE / first[0]).is_dir() else ""


def test_imports_have_no_cycles() -> None:
    graph = {name: own_imports(name) for name in MODULES}
    order = [*TopologicalSorter(graph).static_order()]
    assert len(order) == len(MODULES) > 40


@pytest.mark.parametrize("name", MODULES)
def test_folders_import_allowed_folders_only(name: str) -> None:
    if name == "kvpool.__main__":  # it runs the tools
        return
    found = {folder(other) for other in own_imports(name)}
    assert found <= MAY_IMPORT[folder(name)] | {folder(name)}


@pytest.mark.parametrize("name", [name for name in MODULES if name.count(".") > 2])
def test_commands_do_not_import_each_other(name: str) -> None:
    command = name.split(".")[2]
    others = {other.split(".")[2] for other in own_imports(name) if other.startswith("kvpool.tools.")}
    assert others <= {command, *SHARED_BY_COMMANDS}


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("kvpool.integrations.")])
def test_integrations_import_their_engine_only(name: str) -> None:
    packages = {found.partition(".")[0] for found in imports(MODULES[name])} - sys.stdlib_module_names
    engine = name.split(".")[2]
    assert packages <= {"kvpool", "torch", "typing_extensions", *ENGINES.get(engine, {engine})}


def test_private_names_of_the_extension_are_used_where_they_belong() -> None:
    """Each is for the modules that are listed: an engine's parts for the integration of that engine."""
    found = {name: private_names(name) for name in MODULES}
    assert {name.removeprefix("kvpool."): names for name, names in found.items() if names} == PRIVATE


def test_modules_log_to_one_logger() -> None:
    """To the one that the documentation names, under the same name in each module."""
    lines = [line for path in MODULES.values() for line in path.read_text(encoding="utf-8").splitlines()]
    assert {line for line in lines if "getLogger" in line} == {'_logger = logging.getLogger("kvpool")'}


def test_importing_the_package_loads_no_other_folder(run_snippet: RunSnippet) -> None:
    loaded = run_snippet(
        """
        import kvpool
        print(*(name for name in sys.modules if name.startswith("kvpool.")))
        """
    )
    assert {folder(name) for name in loaded.split()} == {""}


def test_observers_load_on_first_use(run_snippet: RunSnippet) -> None:
    run_snippet(
        """
        import kvpool
        from kvpool import Leak, snapshot
        assert {"Leak", "pools", "snapshot"} <= {*dir(kvpool)}
        assert kvpool.pools() == []
        assert kvpool.Leak is Leak and kvpool.snapshot is snapshot
        assert not hasattr(kvpool, "nonsense")
        """
    )
