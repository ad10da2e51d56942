"""Transfers of slots between processes: leases, reads and writes."""

from kvpool.remote.agent import Agent, Blocks, Indices, Link, Memory, Reading
from kvpool.remote.endpoint import Endpoint, Peer, SlotLease, Transfer
from kvpool.remote.errors import TransferError
from kvpool.remote.leases import LeaseKey, LeaseKeys
from kvpool.remote.messages import RemoteSlots
from kvpool.remote.rows import Rows
from kvpool.typing import EndpointStats

__all__ = [
    "Agent",
    "Blocks",
    "Endpoint",
    "EndpointStats",
    "Indices",
    "LeaseKey",
    "LeaseKeys",
    "Link",
    "Memory",
    "Peer",
    "Reading",
    "RemoteSlots",
    "Rows",
    "SlotLease",
    "Transfer",
    "TransferError",
]
