"""The part of a model's keys, values and states that one of several GPUs has."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvpool.errors import ConfigError

if TYPE_CHECKING:
    from kvpool.models.model import KvLayers, States


def shard(group: KvLayers, tp: int) -> KvLayers:
    """Return the layers with the heads of one of `tp` GPUs.

    Raises:
        ConfigError: If heads can neither be divided nor replicated evenly.
    """
    return replace(
        group,
        k_head_num=share(group.k_head_num, tp, "KV heads"),
        v_head_num=share(group.v_head_num, tp, "KV heads"),
    )


def shard_states(states: States, tp: int) -> States:
    """Return the states with the heads or channels of one of `tp` GPUs.

    Raises:
        ConfigError: If they cannot be divided.
    """
    if states.head_num % tp:
        raise ConfigError(
            f"{states.head_num} heads of {states.kind} states cannot be divided among {tp} GPUs"
        )
    channels = states.conv_channels
    if channels is not None and channels % tp:
        raise ConfigError(f"{channels} channels of {states.kind} states cannot be divided among {tp} GPUs")
    groups = states.group_num and share(states.group_num, tp, f"groups of {states.kind} heads")
    return replace(
        states,
        head_num=states.head_num // tp,
        group_num=groups,
        conv_channels=None if channels is None else channels // tp,
    )


def share(heads: int, tp: int, what: str) -> int:
    """Return the heads of one GPU: divided, or one head replicated on several GPUs.

    Raises:
        ConfigError: If neither is possible.
    """
    if heads % tp == 0:
        return heads // tp
    if tp % heads == 0:
        return 1
    raise ConfigError(f"{heads} {what} can neither be divided among {tp} GPUs nor replicated evenly")
