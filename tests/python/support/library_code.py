"""Code of libraries whose packages need a GPU to be imported, or take long: file by file.

Kernels of Triton run in Triton's own interpreter, on the CPU.
"""

from __future__ import annotations

import ast
import sys
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import ModuleType


@contextmanager
def interpreted() -> Iterator[None]:
    """Kernels that are defined within it run in Triton's interpreter, with those of Triton that they call."""
    import triton
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    knobs, language = triton.knobs, triton.language
    compiled = {name: value for name, value in vars(language).items() if isinstance(value, JITFunction)}
    before, knobs.runtime.interpret = knobs.runtime.interpret, True
    try:
        for name, value in compiled.items():
            setattr(language, name, InterpretedFunction(value.fn))
        yield
    finally:
        knobs.runtime.interpret = before
        for name, value in compiled.items():
            setattr(language, name, value)


def module_of(path: Path, name: str = "") -> ModuleType:
    """A file as a module: one that imports nothing of its own package. Under `name` others can import it."""
    spec = spec_from_file_location(name or f"library_code_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    if name:
        sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def functions_of(path: Path, *names: str, **known: object) -> list[Any]:
    """Functions and classes of a file, also those within a class, where they find only what `known` has."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {
        node.name: node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names
    }
    assert found.keys() == {*names}, f"{path} has {found.keys()}"
    future = ast.parse("from __future__ import annotations").body
    code = compile(ast.Module([*future, *found.values()], []), str(path), "exec")
    namespace = dict(known)
    exec(code, namespace)  # noqa: S102 - of a package that the tests install
    return [namespace[name] for name in names]
