"""What an adapter relies on in its engine: classes, and the signatures of their methods."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["differences", "signature"]


def signature(function: Any) -> str:  # noqa: ANN401 - a function of an engine
    """The signature of a function, without annotations."""
    parameters = inspect.signature(function).parameters.values()
    return str(inspect.Signature([each.replace(annotation=inspect.Parameter.empty) for each in parameters]))


def differences(seams: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Compares the installed engine with `seams`: by class or imported module, functions and signatures.

    Returns a line for each difference, with what was found and what was expected.
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
            function = getattr(found, method, None)
            if function is None:
                problems.append(f"{name}.{method}{expected} is missing")
            elif signature(function) != expected:
                problems.append(f"{name}.{method} is {signature(function)}, expected was {expected}")
    return problems
