"""The parts of `transformers` that the caches rely on: classes, and the signatures of their methods."""

from __future__ import annotations

from kvpool.integrations.versions import TRANSFORMERS

__all__ = ["CACHE", "CONTINUOUS", "TRANSFORMERS"]

_LAYER = {
    "lazy_initialization": "(self, key_states, value_states)",
    "update": "(self, key_states, value_states, *args, **kwargs)",
    "get_mask_sizes": "(self, query_length)",
    "get_seq_length": "(self)",
    "get_max_length": "(self)",
}

CACHE: dict[str, dict[str, str]] = {
    "transformers.cache_utils.Cache": {
        "__init__": "(self, layers=None, layer_class_to_replicate=None, offloading=False, "
        "offload_only_non_sliding=True)",
        "update": "(self, key_states, value_states, layer_idx, *args, **kwargs)",
        "get_conv_state": "(self, layer_idx, state_idx=0)",
        "update_conv_state": "(self, conv_states, layer_idx, state_idx=0, **kwargs)",
        "get_recurrent_state": "(self, layer_idx, state_idx=0)",
        "update_recurrent_state": "(self, recurrent_states, layer_idx, state_idx=0, **kwargs)",
        "has_previous_state": "(self, layer_idx=None, state_idx=None)",
        "is_recording_past": "(self, layer_idx)",
        "get_seq_length": "(self, layer_idx=0)",
        "get_mask_sizes": "(self, query_length, layer_idx)",
        "reset": "(self)",
        "crop": "(self, tokens_to_remove)",
        "reorder_cache": "(self, beam_idx)",
        "batch_repeat_interleave": "(self, repeats)",
        "batch_select_indices": "(self, indices)",
    },
    "transformers.cache_utils.CacheLayerMixin": {"__init__": "(self, **kwargs)", **_LAYER},
    "transformers.cache_utils.DynamicCache": {
        "__init__": "(self, ddp_cache_data=None, config=None, offloading=False, "
        "offload_only_non_sliding=False)",
    },
    "transformers.cache_utils.DynamicLayer": _LAYER,
    "transformers.cache_utils.DynamicSlidingWindowLayer": {
        **_LAYER,
        "__init__": "(self, sliding_window, **kwargs)",
    },
    "transformers.cache_utils.LinearAttentionLayer": {
        "update_conv_state": "(self, conv_states, state_idx=0, conv_kernel_size=None, **kwargs)",
    },
}
"""The parts that `PooledCache` relies on: by class, the methods and their signatures."""

_BATCHING = "transformers.generation.continuous_batching"

_POOL = {"__init__": "(self, num_sectors, num_allocators, num_reserved_sectors=2)"}

CONTINUOUS: dict[str, dict[str, str]] = {
    # Where pools are made: the names that are replaced.
    f"{_BATCHING}.cache.CachePool": _POOL,
    f"{_BATCHING}.offloading_manager.CachePool": _POOL,
    f"{_BATCHING}.cache_allocators.cache_pool.CachePool": {
        **_POOL,
        "reset": "(self)",
        "set_blocks_per_sector": "(self, index, blocks_per_sector)",
        "allocate_sector": "(self, index)",
        "try_to_free_sectors": "(self)",
        "free_blocks": "(self, index, block_ids)",
        "get_free_blocks": "(self, index, num_blocks)",
        "count_free_blocks": "(self, index)",
    },
    f"{_BATCHING}.cache_allocators.cache_pool.RegularTrees": {
        "add_tree": "(self, root)",
        "delete_full_trees": "(self)",
    },
}
"""The parts that `kvpool.integrations.transformers.continuous` relies on."""
