"""Points in the work of a GPU."""

from __future__ import annotations

from typing import Protocol


class Mark(Protocol):
    """The work that was enqueued before a point in a stream, such as a `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return whether the work is done."""
        ...

    def synchronize(self) -> None:
        """Wait until the work is done."""
        ...


def mark(device: int | None) -> Mark | None:
    """Return a mark of the work in the current stream of a GPU; `None` for host memory."""
    if device is None:
        return None
    import torch  # noqa: PLC0415 - users of a GPU alone need it

    event: Mark = torch.cuda.current_stream(device).record_event()
    return event
