"""ReqToTokenPool: rows, every form of writing and reading, misuse, and random histories."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import devices
import numpy as np
import pytest
import torch
from common import cuda_only, some, turns_of_others

from kvpool import ConfigError, DriverError, ReqToTokenPool, make_req_to_token_pool

if TYPE_CHECKING:
    from software import Driver

    from kvpool.typing import CountedStats


pytestmark = pytest.mark.usefixtures("device")


def make(
    max_reqs: int = 4, max_context_len: int = 8, *, padding_row: bool = True, strict: bool = False
) -> ReqToTokenPool:
    return ReqToTokenPool(
        max_reqs, max_context_len, devices.current(), padding_row=padding_row, strict=strict
    )


def snapshot(pool: ReqToTokenPool) -> tuple[list[list[int]], CountedStats]:
    return pool.req_to_token.tolist(), pool.stats()


# Construction


@pytest.mark.parametrize(("padding_row", "rows"), [(True, 5), (False, 4)])
def test_the_table_is_zero_and_on_its_device(padding_row: bool, rows: int) -> None:
    table = make(padding_row=padding_row).req_to_token
    assert type(table) is torch.Tensor
    assert table.dtype is torch.int32
    assert table.shape == (rows, 8)
    assert table.device.type == devices.current()
    assert table.is_contiguous()
    assert not table.any()


def test_table_stays_where_it_is() -> None:
    pool = make()
    address = pool.req_to_token.data_ptr()
    pool.write((some(pool.alloc())[0], slice(0, 8)), list(range(8)))
    pool.clear()
    assert pool.req_to_token.data_ptr() == address
    pool.req_to_token[2, 3] = 77
    assert pool.read(2, 4).tolist() == [0, 0, 0, 77]


def test_the_factory_makes_a_pool_of_its_arguments() -> None:
    assert list(inspect.signature(make_req_to_token_pool).parameters) == [
        "max_reqs",
        "max_context_len",
        "device",
    ]
    assert inspect.signature(make_req_to_token_pool).parameters["device"].default == "cuda"
    pool = make_req_to_token_pool(4, 8, "cpu")
    assert isinstance(pool, ReqToTokenPool)
    assert pool.req_to_token.shape == (5, 8)


# alloc and free


def test_without_a_padding_row_the_first_row_is_zero() -> None:
    pool = make(padding_row=False)
    assert pool.alloc(4) == [0, 1, 2, 3]
    pool.free(0)
    assert pool.alloc() == [0]
    assert pool.stats()["dropped_frees"] == 0


@pytest.mark.parametrize("padding_row", [True, False])
def test_rows_in_use_are_those_that_nobody_has_freed(padding_row: bool) -> None:
    pool, first = make(padding_row=padding_row), int(padding_row)
    assert pool.rows_in_use() == []
    rows = some(pool.alloc(4))
    assert pool.rows_in_use() == sorted(rows) == [*range(first, first + 4)]
    pool.free([first + 1, first + 2])
    assert pool.rows_in_use() == [first, first + 3]
    pool.clear()
    assert pool.rows_in_use() == []


def test_alloc_is_all_or_nothing() -> None:
    pool = make()
    assert (pool.alloc(2), pool.alloc(n=1), pool.alloc(0)) == ([1, 2], [3], [])
    before = snapshot(pool)
    for need in (2, 5, 2**31, 2**63, 10**30):
        assert pool.alloc(need) is None
    for need in (-1, -(10**30)):
        with pytest.raises(ConfigError, match=str(need)):
            pool.alloc(need)
    for wrong in (1.0, float("nan"), "1", None, [1]):
        with pytest.raises(TypeError):
            pool.alloc(wrong)  # type: ignore[arg-type]
    assert snapshot(pool) == before


def test_free_takes_one_row_in_every_form() -> None:
    pool = make()
    pool.alloc(4)
    pool.free(np.int64(3))
    pool.free(torch.tensor(1))
    pool.free(range(4, 5))
    assert pool.alloc(3) == [3, 1, 4]


@pytest.mark.parametrize("foreign_writes", [True, False])
def test_rows_that_are_not_zeroed_keep_their_slots(foreign_writes: bool) -> None:
    pool = ReqToTokenPool(2, 4, devices.current(), zero_rows=False, foreign_writes=foreign_writes)
    [row] = some(pool.alloc())
    pool.write((row, slice(0, 2)), [7, 8])
    pool.req_to_token[row, 3] = 9
    pool.free(row)
    assert pool.read(row, 4).tolist() == [7, 8, 0, 9]
    pool.clear()
    assert pool.req_to_token.tolist() == [[0] * 4, [7, 8, 0, 9], [0] * 4]


def test_rows_that_others_write_are_zeroed_whole() -> None:
    pool = ReqToTokenPool(3, 4, devices.current(), foreign_writes=True, strict=True)
    first, second = some(pool.alloc(2))
    pool.req_to_token[first:] = 5
    pool.free(first)
    assert pool.req_to_token.tolist() == [[0] * 4, [0] * 4, [5] * 4, [5] * 4]
    pool.write((second, 1), 6)
    assert pool.read(second, 3).tolist() == [5, 6, 5]
    pool.clear()
    assert not pool.req_to_token.any()


def test_generations_count_up_and_survive_clear() -> None:
    pool = make(3)
    generation = pool.generation
    assert (generation.dtype, generation.device.type, generation.tolist()) == (torch.int64, "cpu", [0] * 4)
    rows = some(pool.alloc(2))
    assert generation.tolist() == [0, 1, 1, 0]
    assert pool.alloc(2) is None
    pool.free(rows)
    pool.clear()
    assert generation.tolist() == [0, 1, 1, 0]
    assert some(pool.alloc(3)) == [1, 2, 3]
    assert generation.tolist() == [0, 2, 2, 1]
    assert pool.generation.data_ptr() == generation.data_ptr()
    assert make(2, padding_row=False).generation.tolist() == [0, 0]


def test_rows_that_others_wrote_are_cleared_when_that_was_said() -> None:
    pool = make()
    rows = some(pool.alloc(3))
    pool.req_to_token[rows[0]] = 55
    pool.req_to_token[rows[1]] = 55
    pool.mark_modified(rows[:2])
    pool.mark_modified(torch.tensor(rows[2]))
    pool.free(rows)
    assert not pool.req_to_token.any()
    with pytest.raises(IndexError):
        pool.mark_modified([5])
    with pytest.raises(IndexError):
        pool.mark_modified([-1])


# write and read


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (slice(None), [1, 2, 3, 4, 5, 6, 7, 8]),
        (slice(6, None), [0, 0, 0, 0, 0, 0, 1, 2]),
        (slice(None, 2), [1, 2, 0, 0, 0, 0, 0, 0]),
        (slice(7, 8), [0, 0, 0, 0, 0, 0, 0, 1]),
        (slice(2, 4, 1), [0, 0, 1, 2, 0, 0, 0, 0]),
        (slice(3, 3), [0] * 8),
        (slice(8, 8), [0] * 8),
        (slice(np.int64(1), np.int64(3)), [0, 1, 2, 0, 0, 0, 0, 0]),
    ],
)
def test_a_slice_of_a_row_is_written(columns: slice, expected: list[int]) -> None:
    pool = make()
    length = sum(map(bool, expected))
    pool.write((1, columns), list(range(1, length + 1)))
    assert pool.req_to_token[1].tolist() == expected


def test_one_cell_is_written_by_every_kind_of_index() -> None:
    pool = make()
    pool.write((1, 7), 5)
    pool.write((np.int64(2), np.int32(0)), torch.tensor([6]))
    pool.write((3, 1), [7])
    pool.write((4, 2), torch.tensor(8))
    pool.write((0, 3), np.array([9]))
    assert [pool.req_to_token[i, j].item() for i, j in ((1, 7), (2, 0), (3, 1), (4, 2), (0, 3))] == [
        5,
        6,
        7,
        8,
        9,
    ]
    assert pool.req_to_token.count_nonzero() == 5


def test_cells_of_several_rows_are_written() -> None:
    pool = make()
    pool.write(([4, 1, 1], [7, 0, 5]), [21, 22, 23])
    assert [pool.req_to_token[i, j].item() for i, j in ((4, 7), (1, 0), (1, 5))] == [21, 22, 23]
    assert pool.req_to_token.count_nonzero() == 3


@pytest.mark.parametrize(
    "value", [9, [9], (9,), torch.tensor(9), torch.tensor([9]), np.array([9], dtype=np.int32)]
)
def test_one_value_fills_everything(value: Any) -> None:  # noqa: ANN401
    pool = make()
    pool.write((1, slice(2, 5)), value)
    pool.write((torch.tensor([2, 3]), torch.tensor([0, 1])), value)
    assert pool.req_to_token[1].tolist() == [0, 0, 9, 9, 9, 0, 0, 0]
    assert pool.req_to_token.count_nonzero() == 5


def test_one_place_named_twice_keeps_the_last_value() -> None:
    pool = make()
    pool.write((torch.tensor([1, 1, 1]), torch.tensor([0, 2, 0])), [7, 8, 9])
    assert pool.read(1, 3).tolist() == [9, 0, 8]


def test_writing_no_cells_changes_nothing() -> None:
    pool = make()
    pool.write((1, slice(2, 2)), [])
    pool.write(([], []), [])
    pool.write(
        (torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.int64)),
        torch.empty(0, dtype=torch.int32),
    )
    assert not pool.req_to_token.any()


def test_values_reach_the_ends_of_int32() -> None:
    pool = make()
    pool.write((1, slice(0, 2)), [2**31 - 1, -(2**31)])
    assert pool.req_to_token[1, :2].tolist() == [2**31 - 1, -(2**31)]


def test_values_that_share_the_table() -> None:
    pool = make()
    pool.write((1, slice(0, 6)), [1, 2, 3, 4, 5, 6])
    pool.write((1, slice(2, 8)), pool.read(1, 6))
    assert pool.req_to_token[1].tolist() == [1, 2, 1, 2, 3, 4, 5, 6]
    pool.write((2, slice(0, 8)), pool.req_to_token[1])
    assert pool.req_to_token[2].tolist() == [1, 2, 1, 2, 3, 4, 5, 6]


OUTSIDE: list[Any] = [
    (5, 0),
    (-1, 0),
    (1, 8),
    (1, -1),
    (10**30, 0),
    (1, 10**30),
    (2**32 + 1, 0),
    (5, slice(0, 1)),
    (-1, slice(0, 1)),
    (1, slice(7, 9)),
    (1, slice(8, 9)),
    (1, slice(9, 10)),
    (1, slice(-1, None)),
    (1, slice(0, -7)),
    (1, slice(0, 10**30)),
    ([5], [0]),
    ([1], [8]),
    ([-1], [0]),
    ([1], [-1]),
    (torch.tensor([1, 5]), torch.tensor([0, 0])),
    (torch.tensor([1, 1], dtype=torch.int32), torch.tensor([0, 8], dtype=torch.int32)),
    (torch.tensor([1, 2**32 + 1]), torch.tensor([0, 0])),
    (np.array([1, 1]), np.array([0, 2**32])),
]


@pytest.mark.parametrize("index", OUTSIDE, ids=str)
def test_writes_outside_the_table(index: Any) -> None:  # noqa: ANN401
    pool = make()
    pool.write((1, slice(0, 8)), 3)
    before = snapshot(pool)
    with pytest.raises(IndexError, match=r"\d"):
        pool.write(index, 9)
    with pytest.raises(IndexError, match=r"\d"):
        pool.write(index, [9])
    assert snapshot(pool) == before


@pytest.mark.parametrize(
    ("index", "values"),
    [
        ((1, slice(0, 3)), [1, 2]),
        ((1, slice(0, 3)), []),
        ((1, slice(0, 2)), [1, 2, 3]),
        ((1, 0), [1, 2]),
        ((1, 0), []),
        (([1, 2], [0]), [1, 2]),
        (([1, 2], [0, 1]), [1, 2, 3]),
        (([1, 2, 3], [0, 1, 2]), torch.tensor([1, 2])),
        ((1, slice(0, 4, 2)), [1, 2]),
        ((1, slice(4, 0, -1)), [1, 2, 3, 4]),
        ((1, slice(3, 1)), []),
        ((1, slice(0, 1)), [2**31]),
        ((1, 0), -(2**31) - 1),
        (([1], [0]), 10**30),
    ],
    ids=str,
)
def test_writes_of_a_wrong_shape_or_value(index: Any, values: Any) -> None:  # noqa: ANN401
    pool = make()
    before = snapshot(pool)
    with pytest.raises(ConfigError):
        pool.write(index, values)
    assert snapshot(pool) == before


@pytest.mark.parametrize(
    "index",
    [
        1,
        (1,),
        (1, 2, 3),
        (1.0, 0),
        (1, 0.0),
        ("1", 0),
        (1, None),
        None,
        (slice(0, 1), 0),
        (torch.tensor([1.0]), torch.tensor([0])),
        (torch.tensor([1]), torch.tensor([True])),
        (1, slice(0.0, 1.0)),
        (1, slice("a", "b")),
    ],
    ids=str,
)
def test_writes_with_a_wrong_type_of_index(index: Any) -> None:  # noqa: ANN401
    pool = make()
    with pytest.raises(TypeError):
        pool.write(index, 9)
    with pytest.raises(TypeError):
        pool.write((1, 0), 1.5)  # type: ignore[arg-type]
    assert not pool.req_to_token.any()


def test_read_gives_the_first_tokens_of_a_row() -> None:
    pool = make()
    pool.write((2, slice(0, 5)), [5, 6, 7, 8, 9])
    found = pool.read(2, 3)
    assert type(found) is torch.Tensor
    assert found.dtype is torch.int32
    assert found.tolist() == [5, 6, 7]
    assert found.data_ptr() == pool.req_to_token[2].data_ptr()
    assert pool.read(2, 8).tolist() == [5, 6, 7, 8, 9, 0, 0, 0]
    assert pool.read(2, 0).shape == (0,)
    assert pool.read(row=0, length=2).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("row", "length", "error"),
    [
        *[(5, 1, IndexError), (-1, 1, IndexError), (1, 9, IndexError), (10**30, 1, IndexError)],
        *[(1, 10**30, IndexError), (1, -1, (IndexError, ValueError))],
        *[(1.0, 1, TypeError), (1, 1.0, TypeError), ("1", 1, TypeError), (1, None, TypeError)],
    ],
)
def test_reads_outside_the_table(row: Any, length: Any, error: Any) -> None:  # noqa: ANN401
    with pytest.raises(error, match=None if error is TypeError else r"\d"):
        make().read(row, length)


# The driver


@cuda_only
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_places_that_are_part_of_the_table_are_read_before(driver: Driver, seed: int) -> None:
    driver.set_seed(seed)
    table = ReqToTokenPool(4, 8, "cuda")
    [row] = table.alloc() or []
    table.write((row, slice(0, 4)), [3, 2, 1, 0])
    table.write((torch.full((4,), row).cuda(), table.read(row, 4)), [9, 8, 7, 6])
    driver.run()
    assert table.read(row, 4).tolist() == [6, 7, 8, 9]
    with pytest.raises(ConfigError, match="kv_indices must not overlap req_to_token"):
        table.build_kv_indices([row], [0, 2], table.req_to_token[row, 4:6])


@cuda_only
def test_threads_run_while_a_write_waits_for_parts_of_the_table(driver: Driver) -> None:
    driver.run()
    table = ReqToTokenPool(4, 8, "cuda", foreign_writes=True)
    [row] = table.alloc() or []
    part = table.req_to_token[row, 4:8]

    def work() -> None:
        for _ in range(300):
            table.write((row, slice(0, 4)), part)

    assert turns_of_others(work) > 0


@cuda_only
def test_rows_that_are_not_zeroed_are_not_lost(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    table = ReqToTokenPool(4, 8, "cuda")
    rows = table.alloc(4)
    assert rows is not None
    table.write((rows[0], slice(0, 8)), [7] * 8)
    driver.fail("cuLaunchKernel")
    table.free(rows)
    assert "zeroed when they are handed out again: cuLaunchKernel" in caplog.text
    driver.fail("cuLaunchKernel")
    with pytest.raises(DriverError):
        table.alloc(4)
    assert table.available_size() == 4
    again = table.alloc(4)
    assert again is not None
    driver.run()
    assert not table.req_to_token.cpu().any()
