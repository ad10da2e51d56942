"""The parts of LMCache that the adapter relies on: classes and functions, and their signatures."""

from __future__ import annotations

from kvpool.integrations.seams import Engine

__all__ = ["LMCACHE", "SEAMS"]

LMCACHE = Engine("LMCache", "lmcache", ("0.5.6",))

_MEMORY = "lmcache.v1.memory_management"
_PAGED = "lmcache.v1.memory_allocators.paged_tensor_memory_allocator"
_FORMAT = "fmt=<MemoryFormat.KV_2LTD: 1>"

SEAMS: dict[str, dict[str, str]] = {
    f"{_MEMORY}.AddressManager": {
        "__init__": "(self, size, align_bytes=4096)",
        "compute_aligned_size": "(self, raw_size)",
        "allocate": "(self, size)",
        "batched_allocate": "(self, size, batch_size)",
        "free": "(self, address, size)",
        "sbrk": "(self, size)",
        "get_heap_size": "(self)",
        "get_free_size": "(self)",
        "check_consistency": "(self)",
    },
    f"{_MEMORY}.TensorMemoryObj": {
        "__init__": "(self, raw_data, metadata, parent_allocator)",
        "invalidate": "(self)",
        "is_valid": "(self)",
        "reset_l1_manager": "(self)",
    },
    f"{_MEMORY}.MemoryObjMetadata": {
        "__init__": "(self, shape, dtype, address, phy_size, ref_count, pin_count=0, "
        "fmt=<MemoryFormat.UNDEFINED: 0>, cached_positions=None, shapes=None, dtypes=None)",
    },
    f"{_PAGED}.PagedTensorMemoryAllocator": {
        "__init__": f"(self, tensor, shapes, dtypes, {_FORMAT})",
        "_adapt_shapes_and_dtypes": "(self, shapes, dtypes)",
        "allocate": f"(self, shapes, dtypes, {_FORMAT}, allocator_type=None)",
        "batched_allocate": f"(self, shapes, dtypes, batch_size, {_FORMAT}, allocator_type=None)",
        "free": "(self, memory_obj, allocator_type=None)",
        "batched_free": "(self, memory_objs, allocator_type=None, update_stats=True)",
        "memcheck": "(self)",
    },
    _MEMORY: {
        "_allocate_cpu_memory": "(size, numa_mapping=None, shm_name=None, use_hugepages=False)",
        "_free_cpu_memory": "(buffer, size=None, numa_mapping=None, shm_name=None, use_hugepages=False)",
    },
    "lmcache.utils": {"get_size_bytes": "(shapes, kv_dtypes)"},
    "lmcache.observability.LMCStatsMonitor": {
        "update_local_cache_usage": "(*args, **kwargs)",  # a decorator hides the rest
        "update_active_memory_objs_count": "(*args, **kwargs)",
    },
    "lmcache.v1.platform.base.device_spec.DeviceSpec": {"is_available": "(self)"},
}
"""By class or module, the functions and their signatures: names, kinds and defaults."""
