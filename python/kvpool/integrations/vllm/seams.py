"""The parts of vLLM that the adapter relies on: classes, and the signatures of their methods."""

from __future__ import annotations

from kvpool.integrations.seams import Engine, Seams

__all__ = ["BLOCK_POOL", "OFFLOADING", "VLLM"]

VLLM = Engine("vLLM", "vllm", ("0.32.0", "0.33.0"))

_OFFLOAD = "vllm.v1.kv_offload"

OFFLOADING: Seams = {
    f"{_OFFLOAD}.base.OffloadingManager": {
        "lookup": "(self, key, req_context)",
        "get_load_source": "(self, key, req_context)",
        "prepare_load": "(self, keys, req_context)",
        "touch": "(self, keys, req_context)",
        "complete_load": "(self, keys, req_context)",
        "prepare_store": "(self, keys, req_context)",
        "complete_store": "(self, keys, req_context, success=True)",
        "on_new_request": "(self, req_context)",
        "on_request_finished": "(self, req_context)",
        "take_events": "(self)",
        "reset_cache": "(self)",
        "get_stats": "(self)",
        "config_info": "(self)",
        "shutdown": "(self)",
    },
    f"{_OFFLOAD}.base.ReqContext": {
        "set_state": "(self, val)",
        "get_state": "(self, cls)",
        "get_offload_key_position": "(self, key)",
    },
    f"{_OFFLOAD}.base.OffloadingEvent": {
        "__init__": "(self, keys, medium, removed, locality=None, ownership=None, removal_expected=False, "
        "metadata_only=False)",
    },
    f"{_OFFLOAD}.base.PrepareStoreOutput": {"__init__": "(self, keys_to_store, store_spec, evicted_keys)"},
    f"{_OFFLOAD}.cpu.common.CPULoadStoreSpec": {"__init__": "(self, block_ids)"},
    f"{_OFFLOAD}.cpu.manager.CPUOffloadingManager": {
        "__init__": "(self, num_chunks, cache_policy='lru', cache_policy_module_path=None, "
        "enable_events=False, store_threshold=1, max_tracker_size=64000, info=None)",
    },
    f"{_OFFLOAD}.cpu.policies.base.CachePolicy": {
        "__init__": "(self, cache_capacity)",
        "get": "(self, key)",
        "insert": "(self, key, chunk, req_context)",
        "remove": "(self, key)",
        "touch": "(self, keys, req_context)",
        "on_store_miss": "(self, keys, req_context)",
        "on_request_access": "(self, keys, req_context)",
        "on_request_finished": "(self, key_groups, insertion_only_keys, reused_keys, req_context)",
        "evict": "(self, n, protected)",
        "clear": "(self)",
        "mark_evictable": "(self, key)",
        "mark_non_evictable": "(self, key)",
    },
    f"{_OFFLOAD}.cpu.shared_offload_region.SharedOffloadRegion": {
        "__init__": "(self, engine_id, num_chunks, rank, kv_bytes_per_chunk, cpu_page_size, barrier=None, *, "
        "creator_memory_check=None, populate_shard=None, num_segments=1)",
        "create_kv_memoryview": "(self)",
        "cleanup": "(self)",
    },
    f"{_OFFLOAD}.cpu.spec.CPUOffloadingSpec": {"__init__": "(self, config)", "get_manager": "(self)"},
    f"{_OFFLOAD}.file_mapper.FileMapper": {
        "from_offloading_spec": "(root_dir, offloading_spec, blocks_per_file=1, parallel_agnostic=False)",
        "get_run_config": "(self)",
    },
    f"{_OFFLOAD}.tiering.base.JobResult": {
        "__init__": "(self, job_id, success, successful_keys=None, transfer_time=None, transfer_bytes=None)",
    },
    f"{_OFFLOAD}.tiering.base.SecondaryTierManager": {
        "__init__": "(self, offloading_spec, primary_kv_view, tier_type, backpressure_detector=None)",
        "lookup": "(self, key, req_context)",
        "submit_store": "(self, job_metadata)",
        "submit_load": "(self, job_metadata)",
        "get_finished_jobs": "(self)",
        "touch": "(self, keys, req_context)",
        "on_new_request": "(self, req_context)",
        "drain_jobs": "(self)",
        "shutdown": "(self)",
    },
    f"{_OFFLOAD}.tiering.base.TransferJob": {
        "__init__": "(self, job_id, keys, chunk_ids, is_promotion, req_context, submit_time=<factory>)",
    },
    f"{_OFFLOAD}.tiering.factory.SecondaryTierFactory": {
        "create_secondary_tier": "(tier_config, primary_kv_view, offloading_spec)",
    },
    f"{_OFFLOAD}.tiering.manager.CPUPrimaryTierOffloadingManager": {
        "__init__": "(self, num_chunks, mmap_region, cache_policy='lru', cache_policy_module_path=None, "
        "enable_events=False, info=None)",
        "prepare_read": "(self, keys, req_context)",
        "get_kv_memoryview": "(self)",
    },
    f"{_OFFLOAD}.tiering.manager.TieringOffloadingManager": {
        "__init__": "(self, primary_tier, secondary_tiers=None, tier_poll_interval_s=0.001)",
    },
    f"{_OFFLOAD}.tiering.spec.TieringOffloadingSpec": {"__init__": "(self, config)", "get_manager": "(self)"},
}
"""The methods that `offload` relies on, by class, and their signatures: names, kinds and defaults."""

_CORE = "vllm.v1.core"

BLOCK_POOL: Seams = {
    f"{_CORE}.block_pool.BlockPool": {
        "__init__": tuple(
            "(self, num_gpu_blocks, enable_caching, hash_block_size, enable_kv_cache_events=False, "
            f"metrics_collector=None, {lookahead}medium='GPU')"
            for lookahead in ("num_hash_lookahead_tokens=0, ", "")
        ),
        "get_cached_block": "(self, block_hash, kv_cache_group_ids)",
        "cache_full_blocks": "(self, request, blocks, num_cached_blocks, num_full_blocks, block_size, "
        "kv_cache_group_id, block_mask=None)",
        "get_new_blocks": "(self, num_blocks)",
        "touch": "(self, blocks)",
        "free_blocks": "(self, ordered_blocks)",
        "_emit_block_removed_events": "(self, block_hashes)",
        "_notify_reuse": "(self, blocks)",
        "_remove_cached_block_hashes": "(self, block)",
    },
    f"{_CORE}.kv_cache_coordinator.BlockPool": {},
    f"{_CORE}.kv_cache_utils.FreeKVCacheBlockQueue": {
        "popleft": "(self)",
        "popleft_n": "(self, n)",
        "remove": "(self, block)",
        "append": "(self, block)",
        "append_n": "(self, blocks)",
        "prepend_n": "(self, blocks)",
        "get_all_free_blocks": "(self)",
        "iter_blocks_after": "(self, cursor)",
    },
    f"{_CORE}.block_pool.BlockHashToBlockMap": {
        "get_one_block": "(self, key)",
        "contain": "(self, key, block_id)",
        "insert": "(self, key, block)",
        "pop": "(self, key, block_id)",
    },
    f"{_CORE}.kv_cache_utils.KVCacheBlock": {
        "__init__": "(self, block_id, ref_cnt=0, _block_hash=None, _block_hash_num_tokens=None, "
        "prev_free_block=None, next_free_block=None, is_null=False, *, pool=None)",
        "set_block_hash": "(self, block_hash, num_tokens=None)",
        "reset_hash": "(self)",
    },
    f"{_CORE}.kv_cache_utils.make_block_hash_with_group_id": {"": "(block_hash, group_id)"},
    f"{_CORE}.kv_cache_utils.resolve_block_hashes": {
        "": "(block_hashes, hash_block_size, block_size, *, supports_fine_grained_hash_lookup=False, "
        "alignment_tokens=None)",
    },
}
"""The methods that `block_pool` relies on, with those that `BlockQueue`, `BlockMap` and `Block` replace."""

_UTILS = f"{_CORE}.kv_cache_utils"

HASHES: Seams = {
    f"{_UTILS}.get_request_block_hasher": {
        "": (
            "(hash_block_size, caching_hash_fn, num_hash_lookahead_tokens=0)",
            "(hash_block_size, caching_hash_fn)",
        ),
    },
    f"{_UTILS}.hash_block_tokens": {
        "": "(hash_function, parent_block_hash, curr_block_token_ids, extra_keys=None)",
    },
    f"{_UTILS}.generate_block_hash_extra_keys": {
        "": "(request, start_token_idx, end_token_idx, start_mm_idx)"
    },
    "vllm.v1.engine.core.get_request_block_hasher": {},
}
"""The functions that `hashing` relies on."""

_MANAGERS = [
    f"{_CORE}.single_type_kv_cache_manager.{kind}"
    for kind in (
        "FullAttentionManager",
        "SlidingWindowManager",
        "ChunkedLocalAttentionManager",
        "MambaManager",
    )
]

PREFIXES: Seams = {
    **{
        manager: {
            "find_longest_cache_hit": "(block_hashes, max_length, kv_cache_group_ids, block_pool, "
            "kv_cache_spec, drop_eagle_block, alignment_tokens, dcp_world_size=1, pcp_world_size=1)",
        }
        for manager in _MANAGERS
    },
    f"{_CORE}.kv_cache_coordinator.SpecGroup": {"__new__": "(_cls, spec, group_ids, manager_cls, use_eagle)"},
    **{
        f"{_CORE}.kv_cache_coordinator.{kind}": {
            "find_longest_cache_hit": "(self, block_hashes, max_cache_hit_length)"
        }
        for kind in ("UnitaryKVCacheCoordinator", "HybridKVCacheCoordinator")
    },
}
"""The methods that `finders` stands for, and those that call them."""

STEPS: Seams = {
    f"{_CORE}.kv_cache_manager.KVCacheManager": {
        "allocate_slots": "(self, request, num_new_tokens, num_new_computed_tokens=0, "
        "new_computed_blocks=None, num_lookahead_tokens=0, num_external_computed_tokens=0, "
        "delay_cache_blocks=False, num_encoder_tokens=0, full_sequence_must_fit=False, "
        "reserved_blocks=0, has_scheduled_reqs=True, skip_zeroing_group_ids=())",
        "cache_blocks": "(self, request, num_computed_tokens)",
        "free": "(self, request)",
        "pop_blocks_for_free": "(self, request)",
    },
    f"{_CORE}.kv_cache_manager.KVCacheBlocks": {
        "__init__": "(self, blocks)",
        "get_block_ids": "(self, allow_none=False, *, group_ids=None)",
    },
    f"{_CORE}.kv_cache_coordinator.KVCacheCoordinator": {
        "get_num_cacheable_tokens": "(self, num_computed_tokens, kv_cache_group_id)",
    },
    **{
        manager: {
            "_get_num_evictable_blocks": "(blocks)",
            "allocate_new_blocks": "(self, request_id, num_tokens, num_tokens_main_model)",
            "cache_blocks": "(self, request, num_tokens, retention_interval=None, *, replay_boundaries)",
            "get_num_skipped_tokens": "(self, num_computed_tokens)",
            "remove_skipped_blocks": "(self, request_id, processed_computed_tokens, num_prompt_tokens=None)",
        }
        for manager in _MANAGERS
    },
    f"{_CORE}.sched.scheduler.KVCacheManager": {},
}
"""The methods that `kv_cache_manager` and `quiet` rely on or replace."""

TURNS: Seams = {
    "vllm.exceptions.VLLMValidationError": {"__init__": "(self, message, *, parameter=None, value=None)"},
    "vllm.sampling_params.SamplingParams": {},
    "vllm.v1.request.Request": {"is_finished": "(self)"},
    "vllm.v1.request.RequestStatus": {},
}
"""What `turns` and `kv_cache_manager` rely on to know the turns of sessions."""

_TOKENS = {
    "add_request": "(self, request)",
    "_make_cached_request_data": "(self, running_reqs, resumed_reqs, num_scheduled_tokens, "
    "spec_decode_tokens, req_to_new_blocks)",
    "_reserve_prefill_lookahead": "(self, request, num_computed_tokens, num_new_tokens)",
    "_update_request_with_output": "(self, request, new_token_ids, is_stale=False)",
}

TOKENS: Seams = {
    f"{_CORE}.kv_cache_manager.KVCacheManager": {
        "new_step_starts": "(self)",
        "prefix_cache_lookup_enabled": "(self, request)",
    },
    f"{_CORE}.sched.request_queue.SchedulingPolicy": {},
    f"{_CORE}.sched.scheduler.Scheduler": _TOKENS,
    f"{_CORE}.sched.async_scheduler.AsyncScheduler": _TOKENS,
    f"{_CORE}.sched.scheduler.CachedRequestData": {},
    f"{_CORE}.sched.scheduler.check_stop": {"": "(request, max_model_len)"},
    "vllm.v1.request.Request": {"update_block_hashes": "(self)"},
    "vllm.sampling_params.SamplingParams": {},
}
"""The methods that `tokens` relies on or replaces. What they do, it compares by their source."""

_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"

CONNECTOR: Seams = {
    f"{_CONNECTOR}.offloading_connector.OffloadingConnector": {
        "__init__": "(self, vllm_config, role, kv_cache_config)",
        "get_mem_pool_context": "(self)",
        "shutdown": "(self)",
    },
    f"{_OFFLOAD}.base.OffloadingWorker": {
        "submit_store": "(self, job_id, src_spec, dst_spec)",
        "submit_load": "(self, job_id, src_spec, dst_spec, expedited=False)",
        "get_finished": "(self)",
        "wait": "(self, job_ids)",
        "shutdown": "(self)",
    },
    f"{_OFFLOAD}.base.GPULoadStoreSpec": {"__init__": "(self, block_ids, group_sizes, block_indices)"},
    f"{_OFFLOAD}.base.TransferResult": {
        "__init__": "(self, job_id, success, transfer_size=None, transfer_time=None)"
    },
    f"{_OFFLOAD}.cpu.shared_offload_region.SharedOffloadRegion": {
        "create_next_worker_view": "(self, tensor_page_size)"
    },
    "vllm.v1.worker.utils.allocate_kv_cache": {
        "": "(kv_cache_config, device, layout, kernel_block_sizes=None)"
    },
}
"""The methods that `connector` relies on, beside those of `offload`."""

TRANSFER: Seams = {
    f"{_CONNECTOR}.base.KVConnectorBase_V1": {
        "__init__": "(self, vllm_config, role, kv_cache_config)",
        "register_kv_caches": "(self, kv_caches)",
        "get_handshake_metadata": "(self)",
        "supports_sleep_mode": "(kv_transfer_config)",
        "start_load_kv": "(self, forward_context, **kwargs)",
        "get_transfer_results": "(self, finished_req_ids)",
        "shutdown": "(self)",
        "set_xfer_handshake_metadata": "(self, metadata)",
        "bind_kv_cache_manager": "(self, kv_cache_manager)",
        "on_new_request": "(self, request)",
        "get_loaded_kv_cache_group_ids": "(self, request)",
        "get_num_new_matched_tokens": "(self, request, num_computed_tokens)",
        "update_state_after_alloc": "(self, request, blocks, num_external_tokens)",
        "build_connector_meta": "(self, scheduler_output)",
        "update_connector_output": "(self, connector_output)",
        "request_finished": "(self, request, block_ids)",
    },
    f"{_CONNECTOR}.base.SupportsHMA": {"request_finished_all_groups": "(self, request, block_ids)"},
    f"{_CONNECTOR}.base.KVConnectorTransferResults": {
        "__init__": "(self, finished_sending=<factory>, finished_recving=<factory>, "
        "failed_recving=<factory>)",
    },
    f"{_CORE}.kv_cache_manager.KVCacheManager": {"get_blocks": "(self, request_id)"},
    **{manager: {"get_num_skipped_tokens": "(self, num_computed_tokens)"} for manager in _MANAGERS},
    f"{_CORE}.block_pool.BlockPool": {"touch": "(self, blocks)", "free_blocks": "(self, ordered_blocks)"},
    f"{_CORE}.kv_cache_manager.KVCacheBlocks": {
        "get_block_ids": "(self, allow_none=False, *, group_ids=None)",
    },
    "vllm.v1.kv_cache_interface.group_kernel_blocks": {"": "(cache, num_blocks)"},
}
"""The methods that `transfer` and its halves rely on."""
