"""Errors of transfers."""

from kvpool.errors import KvPoolError


class TransferError(KvPoolError, ConnectionError):
    """A transfer did not bring its rows, or the network cannot be used."""
