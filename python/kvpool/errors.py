"""Exceptions of kvpool. Each is a `KvPoolError` and the built-in that a Python programmer expects."""


class KvPoolError(Exception):
    """Base of all errors that kvpool defines.

    The message has all numbers. Programs read them from the attributes, which are `None` if they do not
    apply. An `IndexError` that kvpool raises also has `index`.

    Attributes:
        index: The first bad index.
        asked: The requested amount: bytes, or slots of an allocator.
        available: The available amount, in the same unit.
        code: The result of the driver call, a `CUresult`.
    """

    index: int | None = None
    asked: int | None = None
    available: int | None = None
    code: int | None = None


class ConfigError(KvPoolError, ValueError):
    """A value or shape that is not supported, where an object is made."""


class ArgumentError(ConfigError):
    """A value or shape that is not supported, in another call. Nothing was changed."""


class IndexOwnershipError(KvPoolError, ValueError):
    """A free of an index that the caller does not own: `index` is the first of them."""


class OutOfMemoryError(KvPoolError, MemoryError):
    """There is not enough memory: `asked` and perhaps `available` are bytes, or slots of an allocator."""


class WorkspaceExhaustedError(KvPoolError, MemoryError):
    """An arena is full: `asked`, and `available` in one piece, are in bytes."""


class StaleError(KvPoolError, RuntimeError):
    """A buffer, lease, node or plan was used after it was freed, cleared or replaced."""


StaleBufferError = StaleError
"""The name of `StaleError` in earlier versions."""


class StateError(KvPoolError, RuntimeError):
    """A call that is not possible now: what it is for is closed, in use elsewhere, or has not begun."""


class DriverError(KvPoolError, RuntimeError):
    """A driver call failed, with `code`."""


class BackendUnavailableError(KvPoolError, RuntimeError):
    """A device cannot be used on this machine."""


__all__ = [
    "ArgumentError",
    "BackendUnavailableError",
    "ConfigError",
    "DriverError",
    "IndexOwnershipError",
    "KvPoolError",
    "OutOfMemoryError",
    "StaleBufferError",
    "StaleError",
    "StateError",
    "WorkspaceExhaustedError",
]
