"""What the adapter relies on in vLLM: classes, and the signatures of their methods."""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version

from kvpool.errors import KvPoolError
from kvpool.integrations.seams import differences

__all__ = ["SEAMS", "TESTED_VERSIONS", "EngineMismatchError", "require_seams"]

TESTED_VERSIONS = ("0.33.0",)
"""Versions of vLLM whose tests the adapter has passed."""

_OFFLOAD = "vllm.v1.kv_offload"

SEAMS: dict[str, dict[str, str]] = {
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
"""By class, the methods and their signatures: names, kinds and defaults."""

_logger = logging.getLogger("kvpool")


class EngineMismatchError(KvPoolError, RuntimeError):
    """The installed vLLM is not what the adapter was written for."""


def require_seams() -> None:
    """Compares the installed vLLM with `SEAMS`, and warns about a version that was not tested.

    Raises:
        EngineMismatchError: If a class or a signature differs. The message has what was found and expected.
    """
    try:
        found = version("vllm")
    except PackageNotFoundError:
        found = "of unknown version"
    problems = differences(SEAMS)
    if problems:
        raise EngineMismatchError(f"vLLM {found} is not what kvpool was written for: {'; '.join(problems)}")
    if found.partition("+")[0] not in TESTED_VERSIONS:  # 0.33.0+cpu is a build of 0.33.0
        _logger.warning(
            "vLLM %s was not tested with kvpool; tested are %s", found, ", ".join(TESTED_VERSIONS)
        )
