"""The public path of `kvpool.integrations.lmcache`."""

from kvpool.integrations.lmcache import *
from kvpool.integrations.lmcache import __all__ as __all__
