"""The thread that tells how far page-locking has come."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpool._kvpool import _PageLocking

# How often it looks whether the program has ended.
_SECONDS = 0.05


def watch(locking: _PageLocking) -> None:
    """Tell of each step, from a thread that ends with the program."""
    thread = threading.Thread(target=_tell, args=(locking,), name="kvpool-page-locking")
    try:
        thread.start()
    except RuntimeError:  # there is no thread to be had
        _tell(locking)


def _tell(locking: _PageLocking) -> None:
    main = threading.main_thread()
    while locking.tell(_SECONDS):
        # The interpreter waits for this thread, and this thread for the step that was begun.
        if not main.is_alive():
            locking.stop()
