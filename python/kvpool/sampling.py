"""The public path of `kvpool.serving.sampling`."""

from kvpool.serving.sampling import *
from kvpool.serving.sampling import __all__ as __all__
