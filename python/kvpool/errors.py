"""Exceptions of kvpool. Each is a `KvPoolError` and the built-in that a Python programmer expects."""


class KvPoolError(Exception):
    """Base of all errors that kvpool defines.

    The message has the numbers in words; a program reads them from the attributes, which are `None` where
    there is no such number. A plain `IndexError` that kvpool raises has `index`, too.

    Attributes:
        index: The first index that was wrong.
        asked: How much was asked for: bytes, or slots of an allocator.
        available: How much there was, in the same unit.
        code: What the driver returned, a `CUresult`.
    """

    index: int | None = None
    asked: int | None = None
    available: int | None = None
    code: int | None = None


class ConfigError(KvPoolError, ValueError):
    """A value or shape that no pool can take."""


class IndexOwnershipError(KvPoolError, ValueError):
    """An index that its giver does not own: `index` is the first of them."""


class OutOfMemoryError(KvPoolError, MemoryError):
    """Memory that a backend could not give: `asked` and, where it is known, `available` are in bytes."""


class WorkspaceExhaustedError(KvPoolError, MemoryError):
    """An arena that is full: `asked`, and `available` in one piece, are in bytes."""


class StaleBufferError(KvPoolError, RuntimeError):
    """A buffer used after it was given back."""


class DriverError(KvPoolError, RuntimeError):
    """A driver call that failed, with `code`."""


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
