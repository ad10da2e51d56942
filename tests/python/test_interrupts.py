"""Signals, exceptions from other threads, forks and the interpreter's end, in the middle of long calls.

Each runs in an interpreter of its own, where a crash or a deadlock is seen by its exit. Python takes the
interpreter from no thread there, so that another runs only while a call has given it up: what that does, it
does in the middle of the call.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest
import shared_fixtures

if TYPE_CHECKING:
    from shared_fixtures import RunSnippet
    from software import Driver

pytestmark = pytest.mark.timeout(240)

START = """
    import ctypes, faulthandler, itertools, os, signal, sys, threading, time
    import torch, kvpool

    faulthandler.dump_traceback_later(100, exit=True)
    sys.setswitchinterval(1000)
    torch.set_num_threads(1)

    class Stop(Exception):
        pass

    def meanwhile(work):
        "A thread that does `work` once it is let: with a GIL, when the next call gives that up."
        ready = threading.Event()

        def run():
            ready.wait()
            work()

        thread = threading.Thread(target=run)
        thread.start()
        return thread, ready.set

    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)
"""

COPIES = """
    TOKENS = 20_000
    HALF = TOKENS // 2
    pool = kvpool.KVPool(TOKENS, 1, 4, 32, "cpu", "float32", pin_memory=False)
    states = kvpool.GDNPool(64, 1, 4, 64, 64, 64, 4, "cpu", "float32", 4)
    chunk = kvpool.ChunkPool(1, (TOKENS, 4, 32), "float32", "cpu", False).allocate()
    allocator = kvpool.TokenToKVPoolAllocator(64, "cpu")
    lower, upper = torch.arange(1, HALF + 1), torch.arange(HALF + 1, TOKENS + 1)
    few_lower, few_upper = lower[:200], upper[:200]
    rows = torch.full((TOKENS, 4, 32), 2.0)
    half_rows = rows[:HALF]
    out = (torch.empty_like(half_rows), torch.empty_like(half_rows))
    first, second = torch.arange(1, 33), torch.arange(33, 65)

    def prepare():
        "Each place that is written to has ones, what is read has twos."
        for buffer in (pool.k_buffer[0], pool.v_buffer[0]):
            buffer[1 : HALF + 1], buffer[HALF + 1 : TOKENS + 1] = 1, 2
        states.recurrent_state[:, first], states.recurrent_state[:, second] = 1, 2
        for tensor in (*out, chunk.tensor()):
            tensor.fill_(1)

    def stored():
        return [pool.k_buffer[0][1 : HALF + 1], pool.v_buffer[0][1 : HALF + 1]]

    # Calls, and the tensors that they write.
    copies = {
        "set_kv_buffer": (lambda: pool.set_kv_buffer(0, lower, half_rows, half_rows), stored),
        "gather_kv": (lambda: pool.gather_kv(0, upper, out), lambda: out),
        "move_kv": (lambda: pool.move_kv(lower, upper), stored),
        "copy_states": (lambda: states.copy_states(second, first),
                        lambda: [states.recurrent_state[:, first]]),
        "copy_from": (lambda: chunk.copy_from(rows).wait(), lambda: [chunk.tensor()]),
    }

    def value(name):
        "The number that was written, or the old one: in all places the same."
        tensors = copies[name][1]()
        values = {float(value) for tensor in tensors for value in (tensor.min(), tensor.max())}
        assert len(values) == 1 and values <= {1, 2}, (name, values)
        return values.pop()

    def check(name):
        "The pools work, and nothing waits for a call that was left."
        prepare()
        copies[name][0]()
        assert value(name) == 2, name
        held = allocator.alloc(64)
        allocator.verify()
        allocator.free(held)
        assert allocator.available_size() == 64
"""


def snippet(*parts: str) -> str:
    """Code in pieces, each with its own indentation."""
    return "".join(map(textwrap.dedent, parts))


@pytest.mark.parametrize("handler", ["default", "raises"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_signal_in_the_middle_of_a_copy(run_snippet: RunSnippet, handler: str, threads: int) -> None:
    rest = f"""
        def stop(*_):
            raise Stop

        kvpool.set_num_threads({threads})
        if {handler!r} == "raises":
            signal.signal(signal.SIGINT, stop)
        for name, (call, _) in copies.items():
            caught = 0
            for _ in range(4):
                prepare()
                thread, begin = meanwhile(interrupt)
                try:
                    begin()
                    call()
                    thread.join()
                except (KeyboardInterrupt, Stop):
                    caught += 1
                thread.join()
                value(name)
            assert caught == 4, (name, caught)
            check(name)
    """
    run_snippet(snippet(START, COPIES, rest), has_torch=True)


def test_a_timer_at_any_time_of_a_copy(run_snippet: RunSnippet) -> None:
    rest = """
        is_armed = False

        def stop(*_):
            global is_armed
            if is_armed:
                is_armed = False
                raise Stop

        signal.signal(signal.SIGALRM, stop)
        caught = 0
        for name, (call, _) in copies.items():
            # The first time takes longer.
            call()
            begin = time.perf_counter()
            call()
            usual_s = time.perf_counter() - begin
            for turn in range(16):
                prepare()
                try:
                    is_armed = True
                    signal.setitimer(signal.ITIMER_REAL, (turn + 1) / 16 * usual_s)
                    call()
                    is_armed = False
                except Stop:
                    caught += 1
                signal.setitimer(signal.ITIMER_REAL, 0)
                value(name)
            check(name)
        assert caught
    """
    run_snippet(snippet(START, COPIES, rest), has_torch=True)


def test_an_exception_from_another_thread_in_the_middle_of_a_copy(run_snippet: RunSnippet) -> None:
    rest = """
        raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc

        def work(call):
            try:
                begun.set()
                call()
                # It comes at the latest here.
                while True:
                    time.sleep(0.001)
            except Stop:
                caught.append(True)

        for name, (call, _) in copies.items():
            caught = []
            for _ in range(4):
                prepare()
                thread, begun = threading.Thread(target=work, args=(call,)), threading.Event()
                # With a GIL it has that until its copy gives it up.
                thread.start()
                begun.wait()
                assert raise_in(ctypes.c_ulong(thread.ident), ctypes.py_object(Stop)) == 1
                thread.join()
                value(name)
            assert len(caught) == 4
            check(name)
    """
    run_snippet(snippet(START, COPIES, rest), has_torch=True)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_fork_in_the_middle_of_a_copy(run_snippet: RunSnippet, threads: int) -> None:
    """The child may use all pools but the one that is being copied in, whose lock nobody will give back."""
    rest = f"""
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        kvpool.set_num_threads({threads})
        everything = torch.arange(1, TOKENS + 1)
        for name, (call, _) in copies.items():
            prepare()
            thread = threading.Thread(target=call)
            thread.start()
            child = os.fork()
            if child == 0:
                signal.alarm(60)
                assert allocator.alloc(3).tolist() == [1, 2, 3]
                assert pool.stats() and states.stats() and pool.get_kv_buffer(0)
                fresh = kvpool.KVPool(TOKENS, 1, 4, 32, "cpu", "float32", pin_memory=False)
                fresh.set_kv_buffer(0, everything, rows, rows)
                assert fresh.gather_kv(0, everything)[0].eq(2).all()
                os._exit(7)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 7, (name, status)
            thread.join()
            assert value(name) == 2
            check(name)
    """
    run_snippet(snippet(START, COPIES, rest), has_torch=True)


@pytest.mark.parametrize("is_daemon", [False, True])
@pytest.mark.parametrize("end", ["pass", "sys.exit(0)", "os._exit(0)"])
def test_the_interpreter_ends_in_the_middle_of_copies(
    run_snippet: RunSnippet, end: str, is_daemon: bool
) -> None:
    rest = f"""
        import atexit

        def last():
            assert allocator.alloc(3).tolist() == [1, 2, 3]
            states.copy_states(second, first)
            pool.move_kv(lower, upper)
            print("last")

        def work(copy, is_short):
            # Nothing of PyTorch, whose own calls abort when the interpreter ends in them.
            for turn in itertools.count():
                # Short ones end again and again while the interpreter does.
                pool.move_kv(few_lower, few_upper) if is_short else copy()
                if not {is_daemon} and turn == 3:
                    return

        atexit.register(last)
        for copy, _ in copies.values():
            for is_short in (False, True):
                threading.Thread(target=work, args=(copy, is_short), daemon={is_daemon}).start()
        {end}
    """
    printed = run_snippet(snippet(START, COPIES, rest), has_torch=True)
    assert printed.split() == ([] if end.startswith("os") else ["last"])


def test_interrupts_arrive_where_the_tests_were_started_in_the_background(run_snippet: RunSnippet) -> None:
    """A shell ignores SIGINT for a command in the background of a script."""
    program = """
    import signal
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        shared_fixtures.restore_interrupts()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)
    finally:
        signal.signal(signal.SIGINT, before)
    run_snippet(program)


# With a driver


LATE = """
    driver = ctypes.CDLL(None)
    NEVER = ctypes.c_long(1 << 40)
"""


@pytest.mark.cuda
@pytest.mark.parametrize("wait", ["pool.wait_page_locked()", "pool.allocate_batch(66)"])
def test_an_interrupt_while_page_locking_is_waited_for(
    driver: Driver, run_snippet: RunSnippet, wait: str
) -> None:
    assert driver.calls() == 0
    rest = f"""
        kvpool.set_num_threads(1)
        go = threading.Event()
        pool = kvpool.ChunkPool(66, (1 << 22,), "uint8", progress=lambda *_: go.wait())
        thread, begin = meanwhile(interrupt)
        try:
            begin()
            {wait}
            pool.wait_page_locked()
        except KeyboardInterrupt:
            print("interrupted")
        thread.join()
        go.set()
        stats = pool.stats()
        assert stats["available"] + stats["in_use"] == 66
        lost = stats["in_use"]
        assert lost in (0, 66)
        assert pool.wait_page_locked(60)
        assert lost or len({{chunk.index for chunk in pool.allocate_batch(66)}}) == 66
        assert pool.allocate() is None
    """
    assert run_snippet(snippet(START, LATE, rest), has_torch=True).split() == ["interrupted"]


@pytest.mark.cuda
@pytest.mark.parametrize("how", ["interrupt", "exception"])
def test_an_interrupt_while_the_planner_waits_for_values(
    driver: Driver, run_snippet: RunSnippet, how: str
) -> None:
    """Lengths that only the device has are waited for; the step is planned whole, or not at all."""
    assert driver.calls() == 0
    rest = f"""
        torch.cuda._lazy_init = lambda: None
        torch._C._cuda_init()
        table = kvpool.ReqToTokenPool(4, 64, "cuda")
        allocator = kvpool.TokenToKVPoolAllocator(64, "cuda", 4)
        planner = kvpool.BatchPlanner(table, allocator, 4, 64)
        raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
        main = threading.get_ident()
        other = interrupt
        if {how!r} == "exception":
            other = lambda: raise_in(ctypes.c_ulong(main), ctypes.py_object(Stop))
        for turn in range(12):
            (row,) = table.alloc()
            lens = torch.tensor([9], dtype=torch.int32).cuda()
            driver.soft_set_queries(NEVER)
            caught = 0
            thread, begin = meanwhile(other)
            try:
                begin()
                planner.extend([row], [0], lens)
                thread.join()
                # It comes at the latest here.
                while True:
                    time.sleep(0.001)
            except (KeyboardInterrupt, Stop):
                caught = 1
            thread.join()
            assert caught
            seq_len = planner.seq_len(row)
            assert seq_len in (0, 9)
            assert allocator.stats()["in_use"] == (12 if seq_len else 0)
            allocator.verify()
            planner.finish([row])
            assert allocator.available_size() == 64 and table.available_size() == 4
    """
    run_snippet(snippet(START, LATE, rest), has_torch=True)


@pytest.mark.cuda
@pytest.mark.parametrize("is_daemon", [False, True])
@pytest.mark.parametrize("end", ["pass", "sys.exit(0)", "os._exit(0)"])
def test_the_interpreter_ends_while_threads_page_lock_and_copy(
    driver: Driver, run_snippet: RunSnippet, end: str, is_daemon: bool
) -> None:
    assert driver.calls() == 0
    rest = f"""
        import atexit
        told = []
        pools = [kvpool.ChunkPool(66, (1 << 22,), "uint8", progress=lambda *n: told.append(n))
                 for _ in range(2)]
        # Nothing of PyTorch, whose own calls abort when the interpreter ends in them.
        import numpy
        source = numpy.ones(1 << 22, dtype="uint8")

        def work(pool):
            for turn in itertools.count():
                pool.allocate().copy_from(source).wait()
                if not {is_daemon} and turn == 3:
                    return

        def last():
            assert pools[0].stats()["in_use"] <= 66
            print("last")

        atexit.register(last)
        for pool in pools:
            threading.Thread(target=work, args=(pool,), daemon={is_daemon}).start()
        {end}
    """
    printed = run_snippet(snippet(START, rest), has_torch=True)
    assert printed.split() == ([] if end.startswith("os") else ["last"])
