"""FileStore: pages, misuse, damage, what survives the end of a process, forks, interrupts, and memory."""

from __future__ import annotations

import gc
import logging
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from common import MIB, assert_steady, needs_fork, needs_statm, some, together

import kvpool
from kvpool import ConfigError, FileStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shared_fixtures import RunSnippet

pytestmark = pytest.mark.processes

PAGE = 5000
SLOT = 8192
KILLS = int(os.environ.get("KVPOOL_STORE_KILLS", "10"))
"""Processes that are killed."""


def key_of(number: int) -> bytes:
    return random.Random(number).randbytes(32)  # noqa: S311


def keys_of(*numbers: int) -> list[bytes]:
    return [key_of(number) for number in numbers]


def page_of(number: int, size: int = PAGE) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes that belong to a key: both ends and the middle of no two are equal."""
    return np.frombuffer(random.Random(~number).randbytes(size), dtype=np.uint8)  # noqa: S311


def put(store: FileStore, *numbers: int) -> list[bool]:
    pages = np.stack([page_of(number, store.page_bytes) for number in numbers])
    transfer = store.put(keys_of(*numbers), pages)
    assert transfer.wait(60)
    return transfer.present


def found(store: FileStore, *numbers: int) -> list[int]:
    """The pages that are found; they are right to the byte."""
    pages = np.full((len(numbers), store.page_bytes), 0x5A, dtype=np.uint8)
    transfer = store.get(keys_of(*numbers), pages)
    assert transfer.wait(60)
    there = []
    for number, page, is_present in zip(numbers, pages, transfer.present, strict=True):
        if is_present:
            assert np.array_equal(page, page_of(number, store.page_bytes)), number
            there.append(number)
        else:
            assert (page == 0x5A).all()
    return there


def opened(path: Path, slots: int = 4, **options: Any) -> FileStore:  # noqa: ANN401 - those of the class
    return FileStore(path, slots * SLOT, page_bytes=PAGE, **options)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    with opened(tmp_path / "store") as store:
        yield store


# pages


def test_pages_survive_the_store(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        assert put(store, 1, 2, 3) == [True] * 3
    with opened(tmp_path) as store:
        assert store.exists(keys_of(1, 2, 3, 4)) == 3
        assert found(store, 3, 9, 1) == [3, 1]
        assert len(store) == 3
        stats = store.stats()
        assert (stats["pages"], stats["capacity"], stats["bytes"]) == (3, 4, 3 * PAGE)
        assert (stats["hits"], stats["misses"], stats["read_bytes"]) == (2, 1, 2 * PAGE)
        assert stats["damaged"] == stats["errors"] == stats["dropped"] == stats["queued"] == 0


def test_exists_counts_leading_pages(store: FileStore) -> None:
    put(store, 1, 2, 3)
    assert store.exists([]) == 0
    assert store.exists(keys_of(9, 1)) == 0
    assert store.exists(keys_of(1, 2, 9, 3)) == 2


def test_keys_are_bytes_or_rows_of_an_array(store: FileStore) -> None:
    put(store, 1, 2)
    joined = np.frombuffer(b"".join(keys_of(1, 2, 3)), dtype=np.uint8).reshape(3, 32)
    wide = np.zeros((3, 40), dtype=np.uint8)
    wide[:, 4:36] = joined
    for keys in (
        tuple(keys_of(1, 2, 3)),
        joined,
        torch.tensor(joined.tolist(), dtype=torch.uint8),
        wide[:, 4:36],
    ):
        assert store.exists(keys) == 2


def found_by(path: Path, policy: str) -> tuple[int, int]:
    """Found pages of documents that are asked for again and again, and of those that are asked for once."""
    again, once = 0, 0
    pages = np.stack([page_of(0)] * 4)
    with opened(path, 60, policy=policy, direct=False, threads=1) as store:
        assert store.policy == policy
        for turn in range(600):
            for document in (turn % 10, 100 + turn):
                keys = [document.to_bytes(16, "little") + bytes([page]) * 16 for page in range(4)]
                there = store.exists(keys, will_use=True)
                assert store.get(keys[:there], pages[:there]).wait(60)
                parent = keys[there - 1] if there else b""
                assert store.put(keys[there:], pages[there:], parent=parent).wait(60)
                again += there if document < 10 else 0
                once += there if document >= 10 else 0
        assert len(store) == 60
    return again, once


def test_what_is_asked_for_again_stays(tmp_path: Path) -> None:
    # Between two uses of a document, twenty others are used: more than the store has room for.
    assert found_by(tmp_path / "lru", "lru") == (0, 0)
    again, once = found_by(tmp_path / "adaptive", "adaptive")
    assert again > 0.7 * 4 * 600, again
    assert once == 0


def test_the_policy_is_one_of_those_of_the_prefix_cache(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown policy 'mru'; use one of lru, fifo, lfu"):
        opened(tmp_path / "store", policy="mru")
    assert not (tmp_path / "store").exists()
    # A directory is opened by any of them, and nothing is lost.
    for policy in ("lru", "adaptive", "fifo", "lfu", "slru", "priority"):
        with opened(tmp_path / "store", policy=policy) as store:
            put(store, 1, 2, 3)
            assert (store.policy, found(store, 1, 2, 3)) == (policy, [1, 2, 3])
    with opened(tmp_path / "store") as store:
        assert store.policy == "adaptive"


def test_the_page_used_least_recently_goes_first_and_the_end_of_a_call_before_its_beginning(
    store: FileStore,
) -> None:
    put(store, 1, 2, 3, 4)
    put(store, 5)
    assert store.exists(keys_of(1)) == 1
    put(store, 6, 7)
    assert found(store, *range(1, 8)) == [1, 5, 6, 7]
    assert store.stats()["evicted"] == 3
    assert len(store) == 4


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_the_beginning_of_a_prompt_stays_longest(tmp_path: Path, threads: int) -> None:
    prompt = keys_of(*range(32))
    with opened(tmp_path, 32, threads=threads) as store:
        assert all(put(store, *range(32)))
        assert all(put(store, *range(100, 106)))
        assert (store.find(prompt).index(False), sum(store.find(prompt))) == (26, 26)
        store.clear()
        assert put(store, *range(40)) == [True] * 32 + [False] * 8, "more than there is room for"
        assert store.stats()["dropped"] == 8


def test_the_parts_of_a_prompt_follow_their_parent(tmp_path: Path) -> None:
    with opened(tmp_path, 8) as opened_store:

        def put_after(parent: bytes, *numbers: int) -> list[bool]:
            pages = np.stack([page_of(each) for each in numbers])
            transfer = opened_store.put(keys_of(*numbers), pages, parent=parent)
            assert transfer.wait()
            return transfer.present

        put_after(b"", 1, 2)
        put_after(b"", 11, 12)
        put_after(key_of(2), 3, 4)
        put_after(key_of(12), 13, 14)
        put_after(b"", 21, 22)
        assert opened_store.find(keys_of(1, 2, 3, 4)) == [True, True, False, False]
        put_after(b"", 23)
        assert opened_store.find(keys_of(1, 2, 11, 12, 13, 14)) == [True, False, True, True, True, True]
        assert put_after(key_of(2), 3) == [False], "its beginning is not there, and neither is room"
        assert opened_store.touch(keys_of(1, 9)) == [True, False]
        put_after(b"", 24, 25)
        assert opened_store.find(keys_of(1, 11, 12, 13, 14)) == [True, True, True, False, False]
        with pytest.raises(ConfigError, match="parent has 31 bytes; a key has 32"):
            put_after(bytes(31), 5)


def test_pages_may_be_of_any_dtype_and_some_rows_of_many(store: FileStore) -> None:
    region = torch.zeros((6, 2, PAGE // 4), dtype=torch.float16)
    region[4], region[1] = 1.5, -2
    put_rows = store.put(keys_of(1, 2), region, rows=[4, 1])
    assert put_rows.wait()
    assert put_rows.leading == 2
    spaced = np.zeros((5, PAGE + 24), dtype=np.uint8)[:, 8 : 8 + PAGE]
    got = store.get(keys_of(1, 9, 2), spaced, rows=torch.tensor([3, 2, 0]))
    assert got.wait()
    assert (got.present, got.leading) == ([True, False, True], 1)
    assert spaced[3].view(np.float16).tolist() == [1.5] * (PAGE // 2)
    assert spaced[0].view(np.float16).tolist() == [-2.0] * (PAGE // 2)
    assert not spaced[[1, 2, 4]].any()


def test_stored_pages_are_not_written_again(store: FileStore) -> None:
    put(store, 1)
    written = store.stats()["written_bytes"]
    other = np.zeros((2, PAGE), dtype=np.uint8)
    transfer = store.put(keys_of(1, 1), other)
    assert transfer.query()
    assert transfer.present == [True, True]
    assert store.stats()["written_bytes"] == written
    assert found(store, 1) == [1]


def test_removed_and_cleared_pages_are_not_found(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, 1, 2, 3, 4)
        assert store.remove(keys_of(2, 9, 2)) == 1
        assert found(store, 1, 2, 3, 4) == [1, 3, 4]
    with opened(tmp_path) as store:
        assert store.exists(keys_of(2)) == 0
        assert store.clear() == 3
        assert store.clear() == len(store) == 0
    with opened(tmp_path) as store:
        assert len(store) == 0
        assert store
        assert put(store, 5) == [True]


def test_another_capacity_keeps_the_pages_used_last(tmp_path: Path) -> None:
    with opened(tmp_path, 6) as store:
        for number in range(1, 7):
            assert store.exists(keys_of(number), will_use=True) == 0  # each is a prompt
            put(store, number)
    with opened(tmp_path, 2) as store:
        assert found(store, *range(1, 7)) == [5, 6]
    assert (tmp_path / "pages").stat().st_size == 2 * SLOT
    with opened(tmp_path, 9) as store:
        put(store, 7, 8, 9)
        assert found(store, *range(1, 10)) == [5, 6, 7, 8, 9]


def test_a_transfer_keeps_the_memory(store: FileStore) -> None:
    pages = np.stack([page_of(number) for number in range(4)])
    transfer = store.put(keys_of(0, 1, 2, 3), pages)
    del pages
    gc.collect()
    assert transfer.wait()
    assert found(store, 0, 1, 2, 3) == [0, 1, 2, 3]


def test_a_transfer_is_a_fence(store: FileStore) -> None:
    allocator = kvpool.TokenToKVPoolAllocator(16, "cpu")
    slots = some(allocator.alloc(16))
    transfer = store.put(keys_of(1), page_of(1)[None])
    allocator.free(slots, after=transfer)
    assert transfer.wait()
    assert some(allocator.alloc(16)).tolist() == list(range(1, 17))


def test_pages_beyond_the_queue_are_dropped_and_counted(tmp_path: Path) -> None:
    with opened(tmp_path, 100, threads=1, queue_bytes=2 * PAGE) as store:
        transfer = store.put(keys_of(*range(100)), np.stack([page_of(number) for number in range(100)]))
        assert transfer.wait()
        stored = sum(transfer.present)
        assert 2 <= stored < 100
        assert (store.stats()["dropped"], len(store)) == (100 - stored, stored)


def test_a_store_that_is_dropped_ends_its_transfers(tmp_path: Path) -> None:
    store = opened(tmp_path, 200, threads=1)
    transfer = store.put(keys_of(*range(200)), np.stack([page_of(number) for number in range(200)]))
    del store
    gc.collect()
    assert transfer.query()
    with opened(tmp_path, 200) as store:
        assert len(store) == sum(transfer.present)


def test_a_store_tells_its_settings_and_refuses_calls_once_closed(tmp_path: Path) -> None:
    store = opened(tmp_path)
    assert repr(store) == f'FileStore("{tmp_path}", capacity_bytes={4 * SLOT}, page_bytes={PAGE})'
    assert (store.path, store.page_bytes, store.capacity_bytes) == (str(tmp_path), PAGE, 4 * SLOT)
    assert not store.closed
    store.close()
    store.close()
    assert store.closed
    assert store.stats()["pages"] == len(store) == 0
    for call in (lambda: store.exists([]), store.clear, lambda: put(store, 1), lambda: found(store, 1)):
        with pytest.raises(RuntimeError, match=f"the store in {tmp_path} is closed"):
            call()
    opened(tmp_path, direct=False).close()


def test_pages_pass_the_cache_by_where_they_can(tmp_path: Path) -> None:
    with opened(tmp_path / "direct") as store, opened(tmp_path / "cached", direct=False) as cached:
        assert not cached.direct
        for each in (store, cached):
            put(each, 1)
            assert found(each, 1) == [1]


# misuse


@pytest.mark.parametrize(
    ("keys", "error", "text"),
    [
        ([b"short"], ConfigError, "key 0 has 5 bytes; a key has 32"),
        ([bytes(32), bytes(33)], ConfigError, "key 1 has 33 bytes"),
        (bytes(32), TypeError, "not bytes"),
        ([1], TypeError, "one with int"),
        (7, TypeError, "not int"),
        (np.zeros((1, 31), dtype=np.uint8), TypeError, r"uint8 of shape \[1, 31\]"),
        (np.zeros((1, 32), dtype=np.int8), TypeError, r"int8 of shape \[1, 32\]"),
    ],
)
def test_keys_of_another_form_raise(store: FileStore, keys: Any, error: type[Exception], text: str) -> None:  # noqa: ANN401 - wrong
    pages = np.zeros((1, PAGE), dtype=np.uint8)
    for call in (lambda: store.exists(keys), lambda: store.get(keys, pages), lambda: store.put(keys, pages)):
        with pytest.raises(error, match=text):
            call()


@pytest.mark.parametrize(
    ("pages", "rows", "error", "text"),
    [
        (np.zeros((2, PAGE), dtype=np.uint8), None, ConfigError, "there are 1 keys for 2 pages"),
        (np.zeros((1, PAGE - 1), dtype=np.uint8), None, ConfigError, f"pages have {PAGE - 1} bytes each"),
        (np.zeros(PAGE, dtype=np.uint8), None, ConfigError, "pages have 1 bytes each"),
        (np.array(0, dtype=np.uint8), None, ConfigError, "no dimensions"),
        (np.zeros((1, 2 * PAGE), dtype=np.uint8)[:, ::2], None, ConfigError, "must be contiguous"),
        (np.zeros((1, PAGE), dtype=np.uint8).repeat(2, 0), [2], IndexError, r"row 2 is outside \[0, 2\)"),
        (np.zeros((2, PAGE), dtype=np.uint8), [-1], IndexError, "row -1"),
        (np.zeros((2, PAGE), dtype=np.uint8), [0, 0], ConfigError, "row 0 appears twice"),
        (np.broadcast_to(np.zeros(PAGE, dtype=np.uint8), (2, PAGE)), None, ConfigError, "overlap|read-only"),
        ([bytes(PAGE)], None, TypeError, "pages must be a tensor or an array, not list"),
    ],
)
def test_pages_of_another_form_raise(
    store: FileStore,
    pages: Any,  # noqa: ANN401 - wrong
    rows: Any,  # noqa: ANN401 - wrong
    error: type[Exception],
    text: str,
) -> None:
    for call in (store.get, store.put):
        with pytest.raises(error, match=text):
            call(keys_of(1), pages, rows=rows)
    assert store.stats()["misses"] == store.stats()["queued"] == 0


def test_read_only_memory_is_put_and_not_got(store: FileStore) -> None:
    pages = page_of(1)[None]
    assert not pages.flags.writeable
    assert store.put(keys_of(1), pages).wait()
    with pytest.raises(ConfigError, match="pages is read-only"):
        store.get(keys_of(1), pages)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"page_bytes": 0}, "page_bytes is 0"),
        ({"page_bytes": -1}, "page_bytes is -1; it must not be negative"),
        ({"threads": 0}, "threads is 0"),
        ({"page_bytes": 65_537}, "capacity_bytes is 65536, too few for a page of 65537 bytes"),
        ({"queue_bytes": 99}, "queue_bytes is 99, too few for a page of 100 bytes"),
    ],
)
def test_sizes_that_cannot_be_make_no_store(tmp_path: Path, options: dict[str, int], text: str) -> None:
    given: dict[str, Any] = {"page_bytes": 100, **options}
    with pytest.raises(ConfigError, match=text):
        FileStore(tmp_path / "store", 1 << 16, **given)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("timeout", [-1.0, float("nan")])
def test_a_timeout_that_is_no_time_raises(store: FileStore, timeout: float) -> None:
    with pytest.raises(ConfigError, match="must be seconds"):
        store.get([], np.zeros((0, PAGE), dtype=np.uint8)).wait(timeout)


@pytest.mark.cuda
@pytest.mark.usefixtures("driver")
def test_memory_of_a_gpu_is_refused(store: FileStore) -> None:
    pages = torch.zeros((1, PAGE), dtype=torch.uint8).cuda()
    for call in (store.get, store.put):
        with pytest.raises(ConfigError, match="pages is on cuda:0; it must be in host memory"):
            call(keys_of(1), pages)


# files that others have, change or remove


def test_a_store_with_other_pages_is_named_with_both_numbers(tmp_path: Path) -> None:
    opened(tmp_path).close()
    with pytest.raises(
        ConfigError, match=f"{tmp_path}: it has pages of {PAGE} bytes, and page_bytes is 4096"
    ):
        FileStore(tmp_path, 1 << 20, page_bytes=4096)
    index = tmp_path / "index"
    data = bytearray(index.read_bytes())
    data[8] = 2
    index.write_bytes(data)
    with pytest.raises(ConfigError, match=f"{tmp_path}: its layout has version 2, this one reads version 1"):
        opened(tmp_path)


def test_a_directory_that_goes_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "store"
    with opened(path) as store:
        put(store, 1)
        shutil.rmtree(path)
        with caplog.at_level(logging.WARNING, "kvpool"):
            assert put(store, 2) == [False]
            assert put(store, 3) == [False]
            assert store.stats()["errors"] == 2
        assert caplog.messages == [f"the store in {path} cannot write a page: its files were removed"]
        assert found(store, 1, 2, 3) == [1]


def test_a_full_disk_goes_on_with_the_pages_that_it_has_space_for(
    run_snippet: RunSnippet, tmp_path: Path
) -> None:
    # A limit of the size of files takes the place of a disk of three pages.
    run_snippet(
        f"""
        import logging, resource, signal
        import numpy as np
        import kvpool

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        said = []
        handler = logging.Handler()
        handler.emit = said.append
        logging.getLogger("kvpool").addHandler(handler)
        keys = [bytes([number]) * 32 for number in range(8)]
        with kvpool.FileStore({str(tmp_path)!r}, 1 << 20, page_bytes=4096, threads=1) as store:
            pages = np.arange(8, dtype=np.uint8)[:, None].repeat(4096, 1)
            assert store.put(keys[:3], pages[:3]).wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, (3 * 4096, resource.RLIM_INFINITY))
            put = store.put(keys[3:4], pages[3:4])
            assert put.wait() and put.present == [False]
            assert store.stats()["errors"] == 1 and store.exists(keys) == 3, "no other is lost"
            put = store.put(keys[4:6], pages[4:6])
            assert put.wait() and put.present == [True, True], put.present
            out = np.zeros((8, 4096), dtype=np.uint8)
            get = store.get(keys, out)
            assert get.wait() and get.present == [True] + [False] * 3 + [True] * 2 + [False] * 2, get.present
            assert (out == pages)[get.present].all()
            assert store.stats()["errors"] == 1
        [record] = said
        assert "cannot write a page: File too large" in record.getMessage(), record.getMessage()
        """
    )


def test_a_full_disk_keeps_what_was_stored(tmp_path: Path) -> None:
    """A file system of 80 KiB of its own: the pages that were stored stay, later ones evict the oldest."""
    mount = f"mount -t tmpfs -o size=80k,mode=700 tmpfs {shlex.quote(str(tmp_path))}"
    alone = ["unshare", "--map-root-user", "--mount", "sh", "-ec"]
    try:
        tried = subprocess.run([*alone, mount], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("needs unshare")
    if tried.returncode:
        pytest.skip(f"needs a file system of its own: {tried.stderr.strip()}")
    code = f"""
        import logging
        import numpy as np
        import kvpool

        said = []
        handler = logging.Handler()
        handler.emit = said.append
        logging.getLogger("kvpool").addHandler(handler)
        keys = [bytes([number]) * 32 for number in range(40)]
        pages = np.arange(40, dtype=np.uint8)[:, None].repeat(4096, 1)
        with kvpool.FileStore({str(tmp_path)!r}, 1 << 20, page_bytes=4096, threads=1) as store:
            first = store.put(keys[:30], pages[:30])
            # One finds the disk full. Those behind it evict none of their own prompt.
            assert first.wait() and first.leading == sum(first.present) == len(store), first.present
            held = len(store)
            assert 10 <= held < 20 and store.stats()["errors"] == 1, store.stats()
            later = store.put(keys[30:], pages[30:])
            assert later.wait() and all(later.present) and len(store) == held
        with kvpool.FileStore({str(tmp_path)!r}, 1 << 20, page_bytes=4096) as store:
            out = np.full((40, 4096), 255, dtype=np.uint8)
            get = store.get(keys, out)
            assert get.wait() and sum(get.present) == held
            assert (out == pages)[get.present].all()
        [record] = said
        assert "cannot write a page: No space left on device" in record.getMessage(), record.getMessage()
    """
    program = f"{mount}; exec {shlex.quote(sys.executable)} -c {shlex.quote(textwrap.dedent(code))}"
    done = subprocess.run([*alone, program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_random_damage_is_never_believed(tmp_path: Path) -> None:
    rng = random.Random(18)  # noqa: S311
    for turn in range(60):
        path = tmp_path / str(turn)
        with opened(path, 8) as store:
            put(store, *range(8))
        for name in rng.choices(["pages", "index"], k=rng.randint(1, 3)):
            file = path / name
            data = bytearray(file.read_bytes())
            match rng.randrange(3):
                case 0:
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                case 1:
                    del data[rng.randrange(len(data)) :]
                case _:
                    begin, end = rng.randrange(len(data)), rng.randrange(len(data))
                    data[begin : begin + 200] = data[end : end + 200]
            file.write_bytes(data)
        try:
            store = opened(path, 8)
        except ConfigError as error:
            assert str(path) in str(error)  # noqa: PT017 - it may be refused, or not
            continue
        with store:
            there = found(store, *range(8))
            assert len(store) == len(there)
            missing = [number for number in range(8) if number not in there]
            if missing:
                assert put(store, *missing) == [True] * len(missing)
            assert found(store, *range(8)) == list(range(8))


# the end of a process

CHILD = """
import random, sys
sys.modules["torch"] = None  # importing it takes long
import numpy as np
from kvpool import FileStore

path, page_bytes, capacity, seed, turns = sys.argv[1], *map(int, sys.argv[2:])
rng = random.Random(seed)
key = lambda number: random.Random(number).randbytes(32)
page = lambda number: np.frombuffer(random.Random(~number).randbytes(page_bytes), dtype=np.uint8)
pages = np.stack([page(number) for number in range(64)])
store = FileStore(path, capacity, page_bytes=page_bytes)
out = np.empty((64, page_bytes), dtype=np.uint8)
print("ready", len(store), flush=True)
for turn in range(turns):
    numbers = rng.sample(range(64), rng.randint(1, 12))
    match rng.randrange(8):
        case 0:
            store.remove([key(number) for number in numbers])
        case 1 | 2:
            get = store.get([key(number) for number in numbers], out, rows=numbers)
            get.wait()
            for number, there in zip(numbers, get.present):
                assert not there or (out[number] == pages[number]).all()
        case _:
            put = store.put([key(number) for number in numbers], pages, rows=numbers)
            if rng.random() < 0.5:
                put.wait()
assert store.stats()["damaged"] == store.stats()["errors"] == 0, store.stats()
"""


def child(path: Path, page_bytes: int, slots: int, seed: int, turns: int = 1 << 30) -> subprocess.Popen[str]:
    slot = -(-page_bytes // 4096) * 4096
    args = [str(path), page_bytes, slots * slot, seed, turns]
    command = [sys.executable, "-c", CHILD, *map(str, args)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert some(process.stdout).readline().startswith("ready")
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    assert process.wait() == -signal.SIGKILL
    some(process.stdout).close()


@pytest.mark.timeout(max(120, 2 * KILLS))
def test_a_process_killed_at_any_moment_leaves_only_right_pages(tmp_path: Path) -> None:
    slots = 40
    rng = random.Random(KILLS)  # noqa: S311
    survived, damaged = 0, 0
    for turn in range(KILLS):
        # Pages of an odd size in direct and cached files, and larger ones, whose writes are cut short.
        page_bytes = (PAGE, 300_001)[turn % 2]
        path = tmp_path / str(page_bytes)
        process = child(path, page_bytes, slots, turn)
        time.sleep(rng.random() * 0.15)
        kill(process)
        slot = -(-page_bytes // 4096) * 4096
        with FileStore(path, slots * slot, page_bytes=page_bytes) as store:
            listed = len(store)
            there = found(store, *range(64))
            assert listed <= slots
            # The entry of a page is written after it: what is listed is there.
            assert len(there) == listed
            survived += listed
            damaged += store.stats()["damaged"]
        assert (path / "pages").stat().st_size <= slots * slot
    assert survived > KILLS, "hardly anything was stored"
    print(f"{KILLS} kills, {survived} pages found right, {damaged} damaged entries")  # noqa: T201 - for long runs


def test_a_folder_that_the_system_refuses_is_told_with_its_cause(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="file/store cannot be used: ") as refused:
        opened(file / "store")
    assert isinstance(refused.value.__cause__, NotADirectoryError)


def test_a_copy_of_the_directory_does_not_end_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with opened(path) as store:
        put(store, 1)
        shutil.copytree(path, tmp_path / "copy")
        command = [sys.executable, "-c", CHILD, str(path), *map(str, (PAGE, 4 * SLOT, 0, 0))]
        refused = subprocess.run(command, capture_output=True, text=True, check=False)
        assert refused.returncode == 1
        assert f"{path} is in use by a process that the system does not name" in refused.stderr
    with opened(tmp_path / "copy") as store:
        assert found(store, 1) == [1]


def test_a_directory_that_others_may_change_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "store"
    opened(path).close()
    with caplog.at_level(logging.WARNING, "kvpool"):
        opened(path).close()
        assert caplog.messages == []
        path.chmod(0o777)
        (path / "index").chmod(0o604)
        opened(path).close()
    [folder, index] = caplog.messages
    assert folder.startswith(f"{path} is open to other users, who may read the pages of the store")
    assert index.startswith(f"{path / 'index'} is open to other users")


def test_pages_that_have_lost_their_index_are_a_new_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as store:
        put(store, 1, 2)
    index = tmp_path / "index"
    for left in (b"", bytes(index.stat().st_size), index.read_bytes()[:20]):
        index.write_bytes(left)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "kvpool"), opened(tmp_path) as store:
            assert len(store) == 0
            assert put(store, 3) == [True]
        [text] = caplog.messages
        assert text.startswith(f"the store in {tmp_path} has lost its index")
        with opened(tmp_path) as store:
            assert found(store, 1, 2, 3) == [3]


def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    process = child(tmp_path, PAGE, 4, 0)
    with pytest.raises(ConfigError, match=f"{tmp_path} is in use by process {process.pid}$"):
        opened(tmp_path)
    kill(process)
    with opened(tmp_path) as store:
        text = f"{tmp_path} is in use by process {os.getpid()}, this one"
        for _ in range(2):
            with pytest.raises(ConfigError, match=text):
                opened(tmp_path)
        assert put(store, 1) == [True]
        command = [sys.executable, "-c", CHILD, str(tmp_path), *map(str, (PAGE, 4 * SLOT, 0, 0))]
        refused = subprocess.run(command, capture_output=True, text=True, check=False)
        assert refused.returncode == 1
        assert refused.stderr.endswith(f"ConfigError: {tmp_path} is in use by process {os.getpid()}\n")
    opened(tmp_path).close()


@needs_fork
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_refused_and_its_parent_goes_on(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, 1)
    transfer = store.get(keys_of(1), np.zeros((1, PAGE), dtype=np.uint8))
    assert transfer.wait()
    calls: list[Callable[[], object]] = [
        lambda: store.exists(keys_of(1)),
        lambda: put(store, 2),
        lambda: found(store, 1),
        store.stats,
        store.close,
        store.clear,
        lambda: store.remove([]),
        lambda: len(store),
        lambda: store.closed,
        transfer.query,
        transfer.wait,
        lambda: transfer.leading,
    ]
    pid = os.fork()
    if pid == 0:
        wrong = 0
        for call in calls:
            try:
                call()
            except RuntimeError as error:
                wrong += "forked" not in str(error)
            except BaseException:  # noqa: BLE001 - the child must end here
                wrong += 1
            else:
                wrong += 1
        wrong += "FileStore" not in repr(store)
        del calls, call, store, transfer
        gc.collect()
        try:
            opened(tmp_path)
        except ConfigError as error:
            wrong += "in use" not in str(error)
        else:
            wrong += 1
        os._exit(wrong)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    with pytest.raises(ConfigError, match="this one"):
        opened(tmp_path)
    assert put(store, 2) == [True]
    assert found(store, 1, 2) == [1, 2]
    store.close()


@needs_fork
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_outlives_its_parent_does_not_keep_the_store(tmp_path: Path) -> None:
    code = f"""
        import os, sys, time
        import kvpool
        store = kvpool.FileStore({str(tmp_path)!r}, 1 << 20, page_bytes=4096)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, b"!")
            time.sleep(60)
        # A child that has not run yet still has what it inherits.
        os.read(reader, 1)
        print(child, flush=True)
        os.kill(os.getpid(), 9)
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    pid = int(some(process.stdout).readline())
    process.wait()
    try:
        FileStore(tmp_path, 1 << 20, page_bytes=4096).close()
    finally:
        os.kill(pid, signal.SIGKILL)
        some(process.stdout).close()


# threads, interrupts, memory


def test_threads_share_a_store(tmp_path: Path) -> None:
    with opened(tmp_path, 16) as store:

        def work(number: int) -> None:
            rng = random.Random(number)  # noqa: S311
            for _ in range(40):
                numbers = rng.sample(range(24), 4)
                match rng.randrange(6):
                    case 0:
                        store.remove(keys_of(*numbers))
                    case 1:
                        assert store.exists(keys_of(*numbers)) <= 4
                    case 2 | 3:
                        put(store, *numbers)
                    case _:
                        found(store, *numbers)

        together(work)
        assert len(store) <= 16
        assert store.stats()["damaged"] == store.stats()["errors"] == 0


def test_waiting_lets_other_threads_run(tmp_path: Path) -> None:
    size = 32 * MIB
    ran = threading.Event()
    with FileStore(tmp_path, size, page_bytes=size) as store:
        for number in range(9):
            transfer = store.put(keys_of(number), np.ones((1, size), dtype=np.uint8))
            if not transfer.wait(0):
                break
        else:
            pytest.fail("each is over before anybody waits for it")
        before = sys.getswitchinterval()
        sys.setswitchinterval(1000)
        try:
            thread = threading.Thread(target=ran.set)
            thread.start()
            assert transfer.wait()
        finally:
            sys.setswitchinterval(before)
        assert ran.is_set()
        thread.join()


def test_an_interrupt_ends_the_wait_and_loses_nothing(run_snippet: RunSnippet, tmp_path: Path) -> None:
    run_snippet(
        f"""
        import os, signal, threading
        import numpy as np
        import kvpool

        size, count = 4 << 20, 24
        pages = np.ones((count, size), dtype=np.uint8)
        keys = [bytes([number]) * 32 for number in range(count)]
        for end in ("wait", "close"):
            store = kvpool.FileStore({str(tmp_path)!r}, count * size, page_bytes=size, threads=1)
            store.clear()
            transfer = store.put(keys, pages)
            timer = threading.Timer(0.005, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            try:
                while not transfer.query():
                    (transfer.wait if end == "wait" else store.close)()
                timer.join()
                signal.pause()
            except KeyboardInterrupt:
                pass
            timer.join()
            store.close()
            assert transfer.leading == count, (end, transfer.leading, store.stats())
        """
    )


def test_an_interpreter_may_end_with_transfers_in_flight(run_snippet: RunSnippet, tmp_path: Path) -> None:
    run_snippet(
        f"""
        import numpy as np
        import kvpool
        store = kvpool.FileStore({str(tmp_path)!r}, 64 << 20, page_bytes=1 << 20)
        transfer = store.put([bytes([number]) * 32 for number in range(64)], np.ones((64, 1 << 20), np.uint8))
        """
    )
    with FileStore(tmp_path, 64 << 20, page_bytes=1 << 20) as store:
        pages = np.zeros((64, 1 << 20), dtype=np.uint8)
        transfer = store.get([bytes([number]) * 32 for number in range(64)], pages)
        assert transfer.wait()
        assert all((page == 1).all() for page, there in zip(pages, transfer.present, strict=True) if there)


@needs_statm
def test_memory_does_not_grow(tmp_path: Path) -> None:
    with opened(tmp_path, 4) as store:
        pages = np.stack([page_of(number) for number in range(8)])
        keys = keys_of(*range(8))

        def once() -> None:
            store.remove(keys)
            assert store.put(keys, pages.copy()).wait()
            assert store.get(keys, pages.copy()).wait()
            store.exists(keys)

        assert_steady(once, 2 * MIB)


@needs_statm
def test_stores_that_come_and_go_leave_nothing(tmp_path: Path) -> None:
    handles = Path("/proc/self/fd")
    opened(tmp_path).close()
    before = len(list(handles.iterdir()))

    def once() -> None:
        store = opened(tmp_path)
        put(store, 1)
        with pytest.raises(ConfigError):
            opened(tmp_path)

    assert_steady(once, 2 * MIB, warm=20, turns=100)
    assert len(list(handles.iterdir())) == before
