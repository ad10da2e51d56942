"""Transfers of slots between processes: leases, reads and writes."""

from kvpool.remote.agent import Agent, Blocks, Indices, Link, Memory, Reading
from kvpool.remote.endpoint import Endpoint, Peer, SlotLease, Transfer
from kvpool.remote.errors import TransferError
from kvpool.remote.messages import RemoteSlots
from kvpool.typing import EndpointStats

__all__ = [
    "Agent",
    "Blocks",
    "Endpoint",
    "EndpointStats",
    "Indices",
    "Link",
    "Memory",
    "Peer",
    "Reading",
    "RemoteSlots",
    "SlotLease",
    "Transfer",
    "TransferError",
]
