"""The public path of `kvpool.observe.metrics`."""

from kvpool.observe.metrics import *
from kvpool.observe.metrics import __all__ as __all__
