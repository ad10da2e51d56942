"""The reports about a pool that the extension asks for, by name."""

from kvpool.observe.leaks import ExpectBalanced, leaks
from kvpool.observe.notebook import to_html

__all__ = ["ExpectBalanced", "leaks", "to_html"]
