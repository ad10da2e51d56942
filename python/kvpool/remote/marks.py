"""Points in the work of a GPU."""

from __future__ import annotations

from typing import Protocol


class Mark(Protocol):
    """Work that was enqueued before, such as what a `torch.cuda.Event` marks."""

    def query(self) -> bool:
        """Return whether it is done."""
        ...

    def synchronize(self) -> None:
        """Wait until it is done."""
        ...


def mark(device: int | None) -> Mark | None:
    """Return the work that the current stream of a GPU has; `None` for host memory, which has none."""
    if device is None:
        return None
    import torch  # noqa: PLC0415 - users of a GPU alone need it

    event: Mark = torch.cuda.current_stream(device).record_event()
    return event
