"""A cluster of processes: some compute prompts, others generate, and a router distributes the requests.

The package needs `pip install 'kvpool[cluster]'`.
"""

from kvpool._addresses import parse_address
from kvpool.cluster.channel import ChannelError, ChannelOptions
from kvpool.cluster.members import WorkerStatus
from kvpool.cluster.messages import Role
from kvpool.cluster.requests import ClusterRequest
from kvpool.cluster.router import Router
from kvpool.cluster.secret import read_secret
from kvpool.cluster.worker import Worker

__all__ = [
    "ChannelError",
    "ChannelOptions",
    "ClusterRequest",
    "Role",
    "Router",
    "Worker",
    "WorkerStatus",
    "parse_address",
    "read_secret",
]
