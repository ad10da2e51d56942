"""Plain PyTorch implementations of kvpool's operations: the other side of each benchmark."""

from __future__ import annotations

import torch


class SortedAllocator:
    """Lowest slot first: a sorted free list and released slots, merged when the list runs short."""

    def __init__(self, size: int, device: str = "cpu") -> None:
        self.size = size
        self.device = device
        self.clear()

    def clear(self) -> None:
        """Makes every slot free."""
        self.free_slots = torch.arange(1, self.size + 1, dtype=torch.int32, device=self.device)
        self.release_slots = torch.empty(0, dtype=torch.int32, device=self.device)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Takes the lowest slots of the free list, after a merge if it is too short."""
        if need_size > len(self.free_slots):
            self.merge_and_sort_free()
            if need_size > len(self.free_slots):
                return None
        taken = self.free_slots[:need_size]
        self.free_slots = self.free_slots[need_size:]
        return taken

    def free(self, indices: torch.Tensor) -> None:
        """Adds the slots to the released ones."""
        if indices.numel():
            self.release_slots = torch.cat((self.release_slots, indices))

    def merge_and_sort_free(self) -> None:
        """Sorts free and released slots into one list."""
        if len(self.release_slots):
            self.free_slots, _ = torch.sort(torch.cat((self.free_slots, self.release_slots)))
            self.release_slots = torch.empty(0, dtype=torch.int32, device=self.device)


class FifoAllocator:
    """First in, first out: one list, taken from the front and appended to at the back."""

    def __init__(self, size: int, device: str = "cpu") -> None:
        self.size = size
        self.device = device
        self.clear()

    def clear(self) -> None:
        """Makes every slot free."""
        self.free_slots = torch.arange(1, self.size + 1, dtype=torch.int32, device=self.device)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Takes the slots at the front."""
        if need_size > len(self.free_slots):
            return None
        taken = self.free_slots[:need_size]
        self.free_slots = self.free_slots[need_size:]
        return taken

    def free(self, indices: torch.Tensor) -> None:
        """Appends the slots."""
        if indices.numel():
            self.free_slots = torch.cat((self.free_slots, indices))


class PagedAllocator:
    """Whole pages, lowest first: freed slots are reduced to their pages."""

    def __init__(self, size: int, page_size: int, device: str = "cpu") -> None:
        self.size = size
        self.page_size = page_size
        self.device = device
        self._offsets = torch.arange(page_size, dtype=torch.int32, device=device)
        self.clear()

    def clear(self) -> None:
        """Makes every page free."""
        self.free_pages = torch.arange(
            1, self.size // self.page_size + 1, dtype=torch.int32, device=self.device
        )
        self.release_pages = torch.empty(0, dtype=torch.int32, device=self.device)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Takes the lowest pages and returns their first slots."""
        pages = -(-need_size // self.page_size)
        if pages > len(self.free_pages):
            self.merge_and_sort_free()
            if pages > len(self.free_pages):
                return None
        taken = self.free_pages[:pages]
        self.free_pages = self.free_pages[pages:]
        return (taken[:, None] * self.page_size + self._offsets).flatten()[:need_size]

    def free(self, indices: torch.Tensor) -> None:
        """Adds the pages of the slots to the released ones."""
        if indices.numel():
            self.release_pages = torch.cat((self.release_pages, torch.unique(indices // self.page_size)))

    def merge_and_sort_free(self) -> None:
        """Sorts free and released pages into one list."""
        if len(self.release_pages):
            self.free_pages, _ = torch.sort(torch.cat((self.free_pages, self.release_pages)))
            self.release_pages = torch.empty(0, dtype=torch.int32, device=self.device)


class KVBuffers:
    """One K and one V tensor, written and read by indexing."""

    def __init__(
        self, rows: int, head_num: int, head_dim: int, dtype: torch.dtype, device: str = "cpu"
    ) -> None:
        self.k = torch.zeros(rows, head_num, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros(rows, head_num, head_dim, dtype=dtype, device=device)

    def set_kv_buffer(self, indices: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes one row for each index."""
        self.k[indices] = k.to(self.k.dtype)
        self.v[indices] = v.to(self.v.dtype)

    def gather_kv(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads one row for each index."""
        return self.k[indices], self.v[indices]

    def move_kv(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Copies rows as if all sources were read first."""
        self.k[dst] = self.k[src]
        self.v[dst] = self.v[src]


class States:
    """Recurrent and convolution states of linear-attention layers, reset and copied by indexing."""

    def __init__(
        self,
        recurrent_shape: tuple[int, ...],
        conv_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: str = "cpu",
    ) -> None:
        self.recurrent_state = torch.zeros(recurrent_shape, device=device)
        self.conv_state = torch.zeros(conv_shape, dtype=dtype, device=device)

    def reset_states(self, indices: torch.Tensor) -> None:
        """Zeroes both states of all layers."""
        self.recurrent_state[:, indices] = 0
        self.conv_state[:, indices] = 0

    def copy_states(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copies both states of all layers."""
        self.recurrent_state[:, dst] = self.recurrent_state[:, src]
        self.conv_state[:, dst] = self.conv_state[:, src]


class PerRequestSteps:
    """A scheduler step as in pymllm's runner: the table is written and read request by request."""

    def __init__(self, rows: int, columns: int, size: int, device: str = "cpu") -> None:
        self.req_to_token = torch.zeros(rows, columns, dtype=torch.int32, device=device)
        self.allocator = SortedAllocator(size, device)
        self.device = device

    def _metadata(self, rows: list[int], seq_lens: list[int], new: list[int]) -> dict[str, torch.Tensor]:
        lens = torch.tensor(seq_lens, dtype=torch.int32, device=self.device)
        counts = torch.tensor(new, dtype=torch.int32, device=self.device)
        kv_indptr = torch.zeros(len(rows) + 1, dtype=torch.int32, device=self.device)
        kv_indptr[1:] = torch.cumsum(lens, dim=0)
        qo_indptr = torch.zeros(len(rows) + 1, dtype=torch.int32, device=self.device)
        qo_indptr[1:] = torch.cumsum(counts, dim=0)
        kv_indices = torch.cat([self.req_to_token[row, :n] for row, n in zip(rows, seq_lens, strict=True)])
        return {
            "req_pool_indices": torch.tensor(rows, dtype=torch.int32, device=self.device),
            "seq_lens": lens,
            "kv_indptr": kv_indptr,
            "qo_indptr": qo_indptr,
            "kv_indices": kv_indices,
            "kv_last_page_len": torch.ones(len(rows), dtype=torch.int32, device=self.device),
        }

    def extend(
        self, rows: list[int], prefix_lens: list[int], seq_lens: list[int]
    ) -> dict[str, torch.Tensor] | None:
        """Allocates slots for the new tokens of each request, writes them, and makes the metadata."""
        new = [n - prefix for prefix, n in zip(prefix_lens, seq_lens, strict=True)]
        slots = self.allocator.alloc(sum(new))
        if slots is None:
            return None
        begin = 0
        for row, prefix, n in zip(rows, prefix_lens, seq_lens, strict=True):
            self.req_to_token[row, prefix:n] = slots[begin : begin + n - prefix]
            begin += n - prefix
        spans = zip(prefix_lens, seq_lens, strict=True)
        positions = torch.cat([torch.arange(*span, dtype=torch.int32, device=self.device) for span in spans])
        return {"out_cache_loc": slots, "positions": positions, **self._metadata(rows, seq_lens, new)}

    def decode(self, rows: list[int], seq_lens: list[int]) -> dict[str, torch.Tensor] | None:
        """Like `extend`, with one token per request."""
        slots = self.allocator.alloc(len(rows))
        if slots is None:
            return None
        for i, (row, n) in enumerate(zip(rows, seq_lens, strict=True)):
            self.req_to_token[row, n - 1] = slots[i]
        positions = torch.tensor(seq_lens, dtype=torch.int32, device=self.device) - 1
        metadata = self._metadata(rows, seq_lens, [1] * len(rows))
        return {"out_cache_loc": slots, "positions": positions, **metadata}
