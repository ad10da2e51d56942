"""Rows of the request table that are about to be given to a request, or to be freed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvpool.errors import IndexOwnershipError
from kvpool_serving.interrupts import append_result, call_with_last

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool import BatchPlanner
    from kvpool_serving.pool_calls import PoolCalls


class SpareRows:
    """The allocated rows without a request: the row of one that starts, or those of some that have ended.

    No interrupt comes between a call that takes a row from the table, or frees some, and the change of the
    list: a row is allocated exactly as long as a request has it or it is listed here.

    Args:
        planner: The planner, which has the table.
        calls: The calls that take rows and free them.

    Attributes:
        groups: The rows, in groups that are freed together.
    """

    def __init__(self, planner: BatchPlanner, calls: PoolCalls) -> None:
        self.groups: list[Sequence[int]] = []
        self._alloc, self._finish = calls.alloc_rows, calls.finish
        self._seq_len = planner.seq_len

    def __contains__(self, row: int) -> bool:
        return any(row in rows for rows in self.groups)

    def take(self, owner: str | int | None) -> None:
        """Take one row of the table, if there is one."""
        append_result(self.groups, partial(self._alloc, owner=owner), 1)

    def hand_out(self) -> int:
        """Return the row that was taken.

        The row stays listed until `forget`, which is called when a request has it.
        """
        [row] = self.groups[0]
        return row

    def forget(self) -> None:
        """Clear the list: a request has the listed row now."""
        self.groups.clear()

    def give(self, rows: Sequence[int]) -> None:
        """List rows that a request had."""
        if rows:
            self.groups.append(rows)

    def free(self) -> None:
        """Free the rows with their slots. Rows that the driver fails to free stay listed."""
        while self.groups:
            rows = self.groups[-1]
            try:
                call_with_last(self._finish, self.groups)
            except BaseException:
                # A call that fails, such as by the error of a fence, frees nothing.
                if rows not in self.groups and self._is_allocated(rows[0]):
                    self.groups.append(rows)
                raise

    def _is_allocated(self, row: int) -> bool:
        try:
            self._seq_len(row)
        except IndexOwnershipError:
            return False
        return True
