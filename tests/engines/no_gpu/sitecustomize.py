"""On `PYTHONPATH`: packages that need a GPU are importable, so that SGLang starts on a machine without one.

A package that is not installed becomes a module whose names are all placeholders. A placeholder can be a base
class, a decorator, a type in an annotation, or called; code that computes with one fails.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PACKAGES = frozenset(
    [
        *(
            "aiter",
            "anthropic",
            "av",
            "build",
            "cuda",
            "cutlass",
            "datasets",
            "decord",
            "deep_ep",
            "deep_gemm",
        ),
        *("deepseek_recipe", "easydict", "flash_attn", "flash_attn_interface", "flashinfer", "grpc"),
        *("grpc_health", "grpc_reflection", "humming", "intel_extension_for_pytorch", "kernels"),
        *("mistral_common", "modelscope", "mooncake", "ninja", "nixl", "numba", "nvshmem", "outlines"),
        *("outlines_core", "py_spy", "pynvml", "quack", "sgl_flash_mla", "sgl_kernel", "smg_grpc_proto"),
        *("smg_grpc_servicer", "soundfile", "tilelang", "timm", "tml_renderers", "torch_memory_saver"),
        *("torch_npu", "torchao", "torchaudio", "torchcodec", "torchvision", "triton_kernels", "vllm"),
        *("watchfiles", "xatlas"),
    ]
)

SUPPLIED = {"sgl_kernel.mamba": Path(__file__).with_name("qwen3_next_kernels.py")}
"""Modules of them that are here instead."""


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


class PlaceholderType(type):
    """The type of placeholders, which are classes."""

    def __getattr__(cls, name: str) -> Any:  # noqa: ANN401 - a placeholder is anything
        if _is_special(name):
            raise AttributeError(name)
        return placeholder(name)

    def __or__(cls, other: object) -> Any:  # noqa: ANN401
        return cls

    __ror__ = __or__

    def __getitem__(cls, item: object) -> Any:  # noqa: ANN401
        return cls

    def __iter__(cls) -> Iterator[object]:
        return iter(())


def placeholder(name: str) -> PlaceholderType:
    """A class that can be used in every way in which a module is used while it is imported."""

    def call(self: object, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        # A decorator returns what it decorates.
        return arguments[0] if len(arguments) == 1 and not options and callable(arguments[0]) else self

    def attribute(_: object, name: str) -> Any:  # noqa: ANN401
        if _is_special(name):
            raise AttributeError(name)
        return placeholder(name)

    def schema(*_: object) -> object:
        from pydantic_core import core_schema

        return core_schema.any_schema()

    methods = {
        "__init__": lambda _, *__, **___: None,
        "__call__": call,
        "__getattr__": attribute,
        "__get_pydantic_core_schema__": classmethod(schema),
    }
    return PlaceholderType(name, (), methods)


class Absent(ModuleType):
    """A module, and every module below it, of a package that is not installed."""

    __path__: list[str] = []  # noqa: RUF012 - as modules have it

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name == "__version__":
            return "99.0"
        if name == "__file__":
            return "absent"
        if _is_special(name):
            raise AttributeError(name)
        found = placeholder(name)
        setattr(self, name, found)
        return found


class Finder(MetaPathFinder, Loader):
    """The last of the finders: it finds what no other has found."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - absent packages have no place
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """The spec of an absent package or of a module below one."""
        if fullname in SUPPLIED:
            return spec_from_file_location(fullname, SUPPLIED[fullname])
        top = fullname.partition(".")[0]
        is_absent = top in PACKAGES and (top == fullname or isinstance(sys.modules.get(top), Absent))
        return ModuleSpec(fullname, self, is_package=True) if is_absent else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """A module of placeholders."""
        return Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing."""


sys.meta_path.append(Finder())
