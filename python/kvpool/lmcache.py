"""The public path of `kvpool.integrations.lmcache.mem_pool`."""

from kvpool.integrations.lmcache.mem_pool import *
from kvpool.integrations.lmcache.mem_pool import __all__ as __all__
