"""Handlers that stop the package's threads while the process forks.

These are the threads of stores and caches, and those that page-lock memory. None of them may hold a lock
while the process is copied: the child has no such thread, and would wait for the lock for ever.
"""

from __future__ import annotations

import os

from kvpool._kvpool import _after_fork, _before_fork

if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
