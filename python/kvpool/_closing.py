"""A base class for objects that close themselves at the end of a `with`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self


class Closing(ABC):
    """Closes itself at the end of a `with`."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether the object is closed."""

    @abstractmethod
    def close(self) -> None:
        """Close the object and release what it holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
