"""The public path of `kvpool.serving.attention`."""

from kvpool.serving.attention import *
from kvpool.serving.attention import __all__ as __all__
