"""Interrupts that wait for the end of a change. In `test_serving.py` they come at each line of an engine."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

import pytest
from kvpool_serving.interrupts import Interrupts

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_comes_at_the_end() -> None:
    interrupts, done = Interrupts(), list[str]()
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        with interrupts.deferred():
            interrupt()
            interrupt()
            done.append("the inner change")
        done.append("the outer change")
    assert done == ["the inner change", "the outer change"]
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_an_interrupt_is_allowed_within() -> None:
    interrupts, done = Interrupts(), list[str]()
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        with pytest.raises(KeyboardInterrupt), interrupts.allowed():
            interrupt()
        interrupt()
        done.append("is deferred again")
    assert done == ["is deferred again"]
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        interrupt()
        with interrupts.allowed():
            done.append("never")
    assert done == ["is deferred again"]


def test_the_handler_of_the_program_runs() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    interrupts = Interrupts()
    with interrupts.deferred():
        interrupt()
        assert seen == []
    assert seen == [signal.SIGINT]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts.deferred(), interrupts.allowed():
        interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_threads_without_signals_defer_nothing() -> None:
    interrupts, before = Interrupts(), signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def work() -> None:
        with interrupts.deferred(), interrupts.allowed():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
