"""Exceptions of kvpool. Each is a `KvPoolError` and the built-in that a Python programmer expects."""


class KvPoolError(Exception):
    """Base of all errors that kvpool defines."""


class ConfigError(KvPoolError, ValueError):
    """A value or shape that no pool can take."""


class IndexOwnershipError(KvPoolError, ValueError):
    """An index that its giver does not own."""


class OutOfMemoryError(KvPoolError, MemoryError):
    """Memory that a backend could not give."""


class WorkspaceExhaustedError(KvPoolError, MemoryError):
    """An arena that is full."""


class StaleBufferError(KvPoolError, RuntimeError):
    """A buffer used after it was given back."""


class DriverError(KvPoolError, RuntimeError):
    """A driver call that failed."""


class BackendUnavailableError(KvPoolError, RuntimeError):
    """A device that cannot be used here."""


__all__ = [
    "BackendUnavailableError",
    "ConfigError",
    "DriverError",
    "IndexOwnershipError",
    "KvPoolError",
    "OutOfMemoryError",
    "StaleBufferError",
    "WorkspaceExhaustedError",
]
