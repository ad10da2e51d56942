"""Naive models of the four pools: what is documented, in plain lists and sets, with no thought of speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class BadFreeError(Exception):
    """A strict model was given something that it can't free."""


class BadBatchError(Exception):
    """The arguments of a batch contradict each other."""


@dataclass
class Fence:
    """Work in flight: passed as soon as somebody sets `done`."""

    done: bool = False
    queries: int = 0

    def query(self) -> bool:
        self.queries += 1
        return self.done


class TokenToKVPoolAllocatorModel:
    """Pages as integers in two lists (free, released), a set of live ones, and a list of fenced ones."""

    def __init__(
        self, size: int, page_size: int = 1, *, need_sort: bool = True, strict: bool = False
    ) -> None:
        self.page_size = page_size
        self.num_pages = size // page_size
        self.need_sort = need_sort
        self.strict = strict
        self.dropped_frees = 0
        self.clear()

    def clear(self) -> None:
        self.high_water = 0
        self.free_pages = list(range(1, self.num_pages + 1))
        self.released_pages: list[int] = []
        self.live: set[int] = set()
        self.fenced: list[tuple[Fence, list[int]]] = []
        self.group_depth = 0
        self.group: list[int] = []

    @property
    def capacity(self) -> int:
        return self.num_pages * self.page_size

    @property
    def in_use(self) -> int:
        return (len(self.live) + sum(len(pages) for _, pages in self.fenced)) * self.page_size

    def available_size(self) -> int:
        self.poll()
        return (len(self.free_pages) + len(self.released_pages)) * self.page_size

    def is_allocated(self, slot: int) -> bool:
        page = slot // self.page_size
        return page in self.live or any(page in pages for _, pages in self.fenced)

    def poll(self) -> None:
        waiting = []
        for fence, pages in self.fenced:
            if fence.done:
                self._release(pages)
            else:
                waiting.append((fence, pages))
        self.fenced = waiting

    def merge_and_sort_free(self) -> None:
        self.poll()
        self._merge()

    def _merge(self) -> None:
        if self.need_sort:
            self.free_pages = sorted(self.free_pages + self.released_pages)
            self.released_pages = []

    def _release(self, pages: list[int]) -> None:
        if self.need_sort:
            self.released_pages = sorted(self.released_pages + pages)
        elif self.page_size > 1:
            self.free_pages += sorted(pages)
        else:
            self.free_pages += pages

    def _take(self, count: int) -> list[int] | None:
        if count > len(self.free_pages):
            self._merge()
        if count > len(self.free_pages):
            return None
        taken, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        self._own(taken)
        return taken

    def _lowest_run(self, count: int) -> list[int] | None:
        free = set(self.free_pages)
        for start in sorted(free):
            run = list(range(start, start + count))
            if free.issuperset(run):
                return run
        return None

    def _take_run(self, count: int) -> list[int] | None:
        if count == 0:
            return []
        run = self._lowest_run(count)
        if run is None:
            self._merge()
            run = self._lowest_run(count)
        if run is None:
            return None
        self.free_pages = [page for page in self.free_pages if page not in run]
        self._own(run)
        return run

    def _own(self, pages: list[int]) -> None:
        self.live.update(pages)
        self.high_water = max(self.high_water, self.in_use)

    def alloc(self, need_size: int, *, contiguous: bool = False) -> list[int] | None:
        self.poll()
        count = -(-need_size // self.page_size)
        pages = self._take_run(count) if contiguous else self._take(count)
        if pages is None:
            return None
        slots = [page * self.page_size + offset for page in pages for offset in range(self.page_size)]
        return slots[:need_size]

    def alloc_extend(
        self, prefix_lens: Sequence[int], seq_lens: Sequence[int], last_loc: Sequence[int]
    ) -> list[int] | None:
        self.poll()
        continued: set[int] = set()
        new_pages = 0
        for prefix, seq, last in zip(prefix_lens, seq_lens, last_loc, strict=True):
            if prefix < 0 or prefix > seq:
                raise BadBatchError
            new_pages += -(-seq // self.page_size) - -(-prefix // self.page_size)
            if prefix % self.page_size and seq > prefix:
                if (last + 1) % self.page_size != prefix % self.page_size:
                    raise BadBatchError
                page = last // self.page_size
                if page not in self.live or page in continued:
                    raise BadFreeError
                continued.add(page)
        pages = self._take(new_pages)
        if pages is None:
            return None
        out = []
        for prefix, seq, last in zip(prefix_lens, seq_lens, last_loc, strict=True):
            page = last // self.page_size
            for position in range(prefix, seq):
                if position % self.page_size == 0:
                    page = pages.pop(0)
                out.append(page * self.page_size + position % self.page_size)
        return out

    def alloc_decode(self, seq_lens: Sequence[int], last_loc: Sequence[int]) -> list[int] | None:
        return self.alloc_extend([seq - 1 for seq in seq_lens], seq_lens, last_loc)

    def free(self, slots: Iterable[int], after: Fence | None = None) -> None:
        self.poll()
        if self.group_depth:
            self.group += slots
            return
        pages: list[int] = []
        bad = 0
        for slot in slots:
            page = slot // self.page_size
            if page in self.live and page not in pages:
                pages.append(page)
            elif page not in pages or self.page_size == 1:
                bad += 1
        if bad and self.strict:
            raise BadFreeError
        self.dropped_frees += bad
        self.live.difference_update(pages)
        if after is not None:
            self.fenced.append((after, pages))
        else:
            self._release(pages)

    def free_group_begin(self) -> None:
        self.group_depth += 1

    def free_group_end(self) -> None:
        self.group_depth -= 1
        if self.group_depth == 0:
            slots, self.group = self.group, []
            self.free(slots)


class ReqToTokenPoolModel:
    """Rows as a first-in-first-out list, the table as a list of lists."""

    def __init__(
        self, max_reqs: int, max_context_len: int, *, padding_row: bool = True, strict: bool = False
    ) -> None:
        self.first = 1 if padding_row else 0
        self.max_reqs = max_reqs
        self.max_context_len = max_context_len
        self.strict = strict
        self.dropped_frees = 0
        self.clear()

    def clear(self) -> None:
        self.free_rows = list(range(self.first, self.first + self.max_reqs))
        self.live: set[int] = set()
        self.table = [[0] * self.max_context_len for _ in range(self.first + self.max_reqs)]

    def alloc(self, n: int = 1) -> list[int] | None:
        if n > len(self.free_rows):
            return None
        rows, self.free_rows = self.free_rows[:n], self.free_rows[n:]
        for row in rows:
            self.table[row] = [0] * self.max_context_len
        self.live.update(rows)
        return rows

    def free(self, rows: Iterable[int]) -> None:
        good: list[int] = []
        bad = 0
        for row in rows:
            if row in self.live and row not in good:
                good.append(row)
            else:
                bad += 1
        if bad and self.strict:
            raise BadFreeError
        self.dropped_frees += bad
        for row in good:
            self.live.remove(row)
            self.free_rows.append(row)
            self.table[row] = [0] * self.max_context_len

    def write(self, cells: Iterable[tuple[int, int]], values: Iterable[int]) -> None:
        for (row, column), value in zip(cells, values, strict=True):
            self.table[row][column] = value
