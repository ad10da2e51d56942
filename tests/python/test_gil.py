"""The GIL: nobody waits for a device with it, nor for a lock that a thread holds which waits for a device.

A gate of the software driver stands for work of the host that needs the GIL, as a callback in Python does:
the thread that opens it has to get the GIL first. The driver ends a process that waits for a gate with the
GIL, and an alarm ends one that waits for a lock with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from shared_fixtures import RunSnippet

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("driver")]

SETUP = """
import ctypes, faulthandler, signal, sys, threading, time
import kvpool
from kvpool import _kvpool

faulthandler.enable()
faulthandler.dump_traceback_later(20, exit=True)
soft = ctypes.CDLL(None)
soft.soft_stream.restype = ctypes.c_size_t
soft.soft_set_queries(ctypes.c_long(1 << 60))
stream = ctypes.c_size_t(soft.soft_stream(0))
_kvpool._use_stream(stream.value)


def opening():
    '''A thread that opens the gates when it has got the GIL.'''
    def open_gates():
        time.sleep(0.02)
        soft.soft_open_gates()
    thread = threading.Thread(target=open_gates)
    thread.start()
    return thread
"""

CALLS = """
kv = kvpool.KVPool(64, 2, 1, 4, "cuda", "float32")
rows = kvpool.KVPool(64, 1, 1, 4, "cuda", "float32").k_buffer[0]
out = tuple(kvpool.KVPool(64, 1, 1, 4, "cuda", "float32").k_buffer[0][:2] for _ in range(2))
gdn = kvpool.GDNPool(4, 2, 1, 4, 4, 8, 4, "cuda", "float32", 3)
table = kvpool.ReqToTokenPool(8, 32, "cuda")
slots = kvpool.TokenToKVPoolAllocator(64, "cuda")
planned = kvpool.ReqToTokenPool(8, 32, "cuda"), kvpool.TokenToKVPoolAllocator(64, "cuda")
planner = kvpool.BatchPlanner(*planned, 4, 64)
requests = planned[0].alloc(2)
planner.extend(requests, [0, 0], [4, 4])
chunks = kvpool.ChunkPool(4, 8, "float32")
assert chunks.wait_page_locked()
chunk = chunks.allocate()
pageable = kvpool.ChunkPool(4, 8, "float32", pin_memory=False).allocate()
on_device = kvpool.ChunkPool(4, 8, "float32", "cuda").allocate()
buffers = kvpool.BufferPool("cuda")
workspace = kvpool.Workspace("cuda", 1 << 14)
[row] = table.alloc()
unknown = kvpool.ReqToTokenPool(4, 8, "cuda", foreign_writes=True).req_to_token
held = [kvpool.KVPool(16, 1, 1, 4, "cuda", "float32") for _ in range(3)]
for pool in held:
    pool.move_kv([1], [2])
length = [4]
del pool


def decode():
    length[0] += 1
    planner.decode(requests, [length[0]] * 2)


def fill():
    buffers.release(buffers.alloc(1 << 15, "uint8"))
    buffers.clear()


calls = {
    "set_kv_buffer": lambda: kv.set_kv_buffer(0, [1, 2], rows[:2], rows[:2]),
    "gather_kv": lambda: kv.gather_kv(0, [1, 2], out),
    "move_kv": lambda: kv.move_kv([1], [2]),
    "reset_states": lambda: gdn.reset_states([1]),
    "copy_states": lambda: gdn.copy_states([1], [2]),
    "write": lambda: table.write((row, slice(0, 3)), [1, 2, 3]),
    "free of rows": lambda: table.free(table.alloc()),
    "values": lambda: slots.is_allocated(unknown),
    "alloc": lambda: slots.free(slots.alloc(3, contiguous=True)),
    "decode": decode,
    "copy_from": lambda: chunk.copy_from(on_device.tensor()),
    "copy_from, pageable": lambda: pageable.copy_from(on_device.tensor()),
    "zeros": lambda: workspace.zeros(4, "float32"),
    "cpu": lambda: rows.cpu(),
    "check": kv.check,
    "clear": fill,
    "drop": lambda: held.pop(),
}
for name, call in calls.items():
    call()
    soft.soft_run_all()
    # In its way is first the work before it, then the end of the queue.
    for most in (0, 1):
        soft.soft_set_queue(ctypes.c_long(most))
        assert soft.soft_close_gate(stream) == 0
        opener = opening()
        print(name, most, file=sys.stderr, flush=True)
        call()
        kv.move_kv([3], [4])
        opener.join()
        soft.soft_set_queue(ctypes.c_long(0))
        soft.soft_run_all()
print("done")
"""


def test_no_call_waits_for_the_device_with_the_gil(run_snippet: RunSnippet) -> None:
    assert run_snippet(SETUP + CALLS, hidden=["torch"]) == "done\n"


LOCKS = """
kv = kvpool.KVPool(64, 2, 1, 4, "cuda", "float32")
table = kvpool.ReqToTokenPool(8, 32, "cuda")
slots = kvpool.TokenToKVPoolAllocator(64, "cuda")
planned = kvpool.ReqToTokenPool(8, 32, "cuda"), kvpool.TokenToKVPoolAllocator(64, "cuda")
planner = kvpool.BatchPlanner(*planned, 4, 64)
requests = planned[0].alloc(2)
planner.extend(requests, [0, 0], [4, 4])
buffers = kvpool.BufferPool("cuda")
buffers.release(buffers.alloc(1 << 14, "uint8"))
[row] = table.alloc()
pairs = {
    "table": (lambda: table.write((row, slice(0, 3)), [1, 2, 3]), table.stats),
    "allocator": (lambda: slots.alloc(3, contiguous=True), slots.stats),
    "planner": (lambda: planner.decode(requests, [5, 5]), planner.stats),
    "planner's rows": (lambda: planner.decode(requests, [6, 6]), planned[0].stats),
    "planner's slots": (lambda: planner.decode(requests, [7, 7]), planned[1].stats),
    "rows": (lambda: kv.move_kv([1] * 2000, [2] * 2000), lambda: kv.move_kv([1] * 2000, [2] * 2000)),
    "buffers": (buffers.clear, buffers.stats),
}
for name, (call, other) in pairs.items():
    print(name, file=sys.stderr, flush=True)
    soft.soft_run_all()
    soft.soft_set_queue(ctypes.c_long(1))
    assert soft.soft_close_gate(stream) == 0
    kv.move_kv([3], [4])
    calling = threading.Thread(target=lambda: (_kvpool._use_stream(stream.value), call()))
    calling.start()
    time.sleep(0.05)
    assert calling.is_alive()
    opener = opening()
    other()
    calling.join()
    opener.join()
    soft.soft_set_queue(ctypes.c_long(0))
print("done")
"""


def test_no_call_waits_for_a_lock_with_the_gil(run_snippet: RunSnippet) -> None:
    assert run_snippet(SETUP + LOCKS, hidden=["torch"]) == "done\n"


ROOM = """
table = kvpool.ReqToTokenPool(255, 1024, "cuda", foreign_writes=True).req_to_token
slots = kvpool.TokenToKVPoolAllocator(64, "cuda")
slots.is_allocated(table[0])
assert soft.soft_close_gate(stream) == 0
asking = threading.Thread(
    target=lambda: (_kvpool._use_stream(stream.value), print(len(slots.is_allocated(table[:, :512]))))
)
asking.start()
time.sleep(0.05)
assert asking.is_alive()
_kvpool._use_stream(soft.soft_stream(0))
print(len(slots.is_allocated(table[0])))
soft.soft_open_gates()
asking.join()
"""


def test_reading_values_of_a_device_waits_for_no_other_reader(run_snippet: RunSnippet) -> None:
    assert run_snippet(SETUP + ROOM, hidden=["torch"]) == "1024\n131072\n"


ZEROS = """
table, slots = kvpool.ReqToTokenPool(8, 32, "cuda"), kvpool.TokenToKVPoolAllocator(64, "cuda")
made = []
assert soft.soft_close_gate(stream) == 0
making = threading.Thread(
    target=lambda: (_kvpool._use_stream(stream.value), made.append(kvpool.BatchPlanner(table, slots, 4, 64)))
)
making.start()
time.sleep(0.05)
assert making.is_alive()
print(table.stats()["in_use"], slots.stats()["in_use"])
soft.soft_open_gates()
making.join()
print(len(made))
"""


def test_a_planner_that_is_made_waits_for_its_memory_without_the_locks_of_its_pools(
    run_snippet: RunSnippet,
) -> None:
    assert run_snippet(SETUP + ZEROS, hidden=["torch"]) == "0 0\n1\n"


FORK = """
import os

kv = kvpool.KVPool(64, 2, 1, 4, "cuda", "float32")
slots = kvpool.TokenToKVPoolAllocator(64, "cuda")
soft.soft_set_queue(ctypes.c_long(1))
assert soft.soft_close_gate(stream) == 0
kv.move_kv([3], [4])
calling = threading.Thread(
    target=lambda: (_kvpool._use_stream(stream.value), slots.alloc(3, contiguous=True))
)
calling.start()
time.sleep(0.05)
assert calling.is_alive()
opener = opening()
child = os.fork()
if not child:
    signal.alarm(10)
    os._exit(slots.stats()["in_use"])
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
calling.join()
opener.join()
"""


def test_no_process_forks_within_a_call_that_waits(run_snippet: RunSnippet) -> None:
    assert run_snippet(SETUP + FORK, hidden=["torch"]) == "3\n"
