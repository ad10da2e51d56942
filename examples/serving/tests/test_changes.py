"""What keeps interrupts from losing anything in the engine: deliveries, and guarded changes.

`test_serving.py` and `test_swap.py` interrupt engines at each of their lines.
"""

from __future__ import annotations

import pytest
from kvpool_serving.interrupts import ChangeGuard, Delivery, append_result, call_with_last


def test_a_delivery_passes_later_items_once_and_in_order() -> None:
    items, passed = [1, 2], list[int]()
    delivery = Delivery(items)
    assert not delivery.deliver_next(passed.append)
    items += [3, 4]
    assert delivery.deliver_next(passed.append)
    assert passed == [3]
    assert delivery.deliver_next(passed.append)
    assert not delivery.deliver_next(passed.append)
    items.append(5)
    assert delivery.deliver_next(passed.append)
    assert passed == [3, 4, 5]


def test_an_item_whose_callback_raises_is_not_passed_again() -> None:
    items, passed = list[int](), list[int]()
    delivery = Delivery(items)
    items += [0, 1]
    with pytest.raises(ZeroDivisionError):
        delivery.deliver_next(lambda item: passed.append(1 // item))
    assert delivery.deliver_next(passed.append)
    assert passed == [1]


def test_a_result_is_appended_unless_it_is_empty() -> None:
    items: list[list[int]] = [[1]]
    append_result(items, lambda n: [n], 2)
    append_result(items, lambda _: None, 3)
    append_result(items, lambda _: [], 4)
    assert items == [[1], [2]]
    passed: list[list[int]] = []
    call_with_last(passed.append, items)
    assert (items, passed) == ([[1]], [[2]])


def test_a_change_that_an_exception_ends_is_repaired() -> None:
    repairs: list[bool] = []
    guard = ChangeGuard(lambda: repairs.append(guard.is_changing))
    with guard.change():
        assert guard.is_changing
    assert repairs == []
    with pytest.raises(KeyboardInterrupt), guard.change():
        raise KeyboardInterrupt
    assert repairs == [False]
    with guard.change():
        pass
    assert repairs == [False]


def test_a_repair_that_fails_begins_the_next_change() -> None:
    attempts: list[int] = []

    def repair() -> None:
        attempts.append(len(attempts))
        if len(attempts) == 1:
            raise RuntimeError("the repair fails")

    guard = ChangeGuard(repair)
    with pytest.raises(RuntimeError, match="the repair fails"), guard.change():
        raise KeyboardInterrupt
    assert not guard.is_changing
    with guard.change():
        assert attempts == [0, 1]


def test_a_change_that_was_dropped_before_its_block_is_over() -> None:
    """As by an interrupt between `__enter__` and the first instruction of the block."""
    repairs: list[None] = []
    guard = ChangeGuard(lambda: repairs.append(None))
    change = guard.change()
    change.__enter__()
    assert guard.is_changing
    del change
    assert not guard.is_changing
    assert len(repairs) == 1
    with guard.change():
        assert len(repairs) == 1
