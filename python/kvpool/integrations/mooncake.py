"""A Mooncake Store cluster as the store that machines share below the host tier.

The package is `mooncake-transfer-engine-non-cuda`, or one of its builds for GPUs; it is imported when a
`MooncakeStore` is made.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import math
import mmap
import os
import socket
import struct
import threading
import time
import zlib
from bisect import bisect_right
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvpool.errors import ArgumentError, ConfigError, StateError
from kvpool.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["MooncakeStore"]

_logger = logging.getLogger("kvpool")

_KEY_BYTES = 32

# Behind each page: its key, and the checksum of the page.
_TRAILER = struct.Struct("<32sI")
_VALUES_PER_CALL = 1024
_BYTES_PER_CALL = 64 << 20

# The version of the format of values.
_PREFIX = "kvpool1:"

_METADATA = "P2PHANDSHAKE"  # peers ask each other; no other server is needed

_OK = 0
_IS_THERE = 1

# For how long a value that was found counts as found, and how many such values are remembered.
_SEEN_S = 60.0
_MOST_SEEN = 1 << 16

# Mooncake gives up on a transfer after 60 s without stopping it: late bytes may land in reused memory.
# A transfer without progress for the seconds of this variable ends. If one makes slow progress, the client is
# closed after `_SLOW_S`.
_PROGRESS = "MC_TCP_PROGRESS_TIMEOUT_SEC"
_LONGEST_S = 30
_SLOW_S = 55.0

_TRANSFER_FAILS = -800
_RPC_FAILS = -900
_RPC_TIMES_OUT = -901

# How often a master that is gone is tried again, and how long each time.
_TRY_AGAIN_S = 0.25
# Mooncake asks the master for a sign of life this often, with the same time limit as for all calls.
_PING_S = 1.0
_CONNECT_S = 2.0


class _Client(Protocol):
    """The methods of `mooncake.store.MooncakeDistributedStore` that are used."""

    def setup(  # noqa: PLR0913, PLR0917
        self,
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int,
        local_buffer_size: int,
        protocol: str,
        rdma_devices: str,
        master_server_addr: str,
        /,
    ) -> int: ...

    def health_check(self) -> int: ...
    def register_buffer(self, address: int, size: int, /) -> int: ...
    def unregister_buffer(self, address: int, /) -> int: ...
    def batch_is_exist(self, keys: list[str], /) -> list[int]: ...
    def batch_get_into_multi_buffers(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]], /
    ) -> list[int]: ...
    def batch_put_from_multi_buffers(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]], /
    ) -> list[int]: ...
    def remove(self, key: str, force: bool, /) -> int: ...
    def close(self) -> int: ...


class _Seen:
    """Values that were found not long ago."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until: dict[str, float] = {}  # in the order of these times

    def select(self, names: Sequence[str]) -> list[bool]:
        """Return which of the values were found within `_SEEN_S`."""
        now = time.monotonic()
        with self._lock:
            return [self._until.get(name, now) > now for name in names]

    def clear(self) -> None:
        """Forget all values: a master that is started again has none."""
        with self._lock:
            self._until.clear()

    def record(self, names: Sequence[str], found: Sequence[bool]) -> None:
        """Record what was found, and forget the others, and the oldest of more than `_MOST_SEEN`."""
        until = time.monotonic() + _SEEN_S
        with self._lock:
            for name, is_there in zip(names, found, strict=True):
                self._until.pop(name, None)
                if is_there:
                    self._until[name] = until
            while len(self._until) > _MOST_SEEN:
                del self._until[next(iter(self._until))]


class _Value(NamedTuple):
    """The memory that holds, or receives, the value of a key."""

    key: bytes
    address: int
    size: int

    def trailer(self) -> bytes:
        memory = (ctypes.c_char * self.size).from_address(self.address)
        return _TRAILER.pack(self.key, zlib.crc32(memory))


class _Regions(NamedTuple):
    """The attached regions, in order."""

    starts: list[int]
    ends: list[int]

    @classmethod
    def of(cls, ends: Mapping[int, int]) -> _Regions:
        """Return the regions with these ends by their starts."""
        starts = sorted(ends)
        return cls(starts, [ends[start] for start in starts])

    def have(self, address: int, size: int) -> bool:
        region = bisect_right(self.starts, address) - 1
        return region >= 0 and address + size <= self.ends[region]


class _Trailers:
    """Registered memory for the trailers of one call."""

    def __init__(self, client: _Client) -> None:
        self._memory = mmap.mmap(-1, _TRAILER.size * _VALUES_PER_CALL)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        if client.register_buffer(self._address, len(self._memory)) != _OK:
            raise ConfigError(
                f"Mooncake cannot register {len(self._memory)} bytes at {self._address:#x}; its log on "
                "standard error says why"
            )

    def address(self, number: int) -> int:
        return self._address + number * _TRAILER.size

    def put(self, number: int, trailer: bytes) -> None:
        start = number * _TRAILER.size
        self._memory[start : start + _TRAILER.size] = trailer

    def get(self, number: int) -> bytes:
        start = number * _TRAILER.size
        return self._memory[start : start + _TRAILER.size]


class MooncakeStore(Store):
    """Pages in a Mooncake Store: all processes of the cluster can read what one has written.

    Pages move between registered memory and the memory of the cluster without a copy in between. Behind each
    page a trailer of 36 bytes is stored, with its key and a checksum, and every read compares both. A page
    that does not fit its key counts as missing.

    While the master cannot be reached, pages are missing, and nothing is raised. When it is back, or another
    is started at its address, sharing goes on; pages that were stored before it ended are lost. The logger
    `kvpool` reports the loss of a master with one warning.

    A read of at most 64 MiB that takes a minute, although bytes keep coming, ends the store: the store finds
    nothing from then on, and the logger reports an error.

    Threads can call all methods at the same time. Calls block for as long as Mooncake does, and release the
    GIL. A child of a fork cannot use the store: every call raises `StateError`. The child has to end by
    `os._exit`, as under `multiprocessing`: otherwise Mooncake crashes in its exit handler.

    Args:
        master: `"host:port"` of `mooncake_master`.
        hostname: Name or address by which other machines reach this one; by default the local address of the
            connection to the master.
        segment_bytes: Memory that this process gives to the cluster, and takes back when it ends, with the
            pages in it. With 0, the process uses only the memory of the others.
        protocol: `"tcp"` or `"rdma"`.
        devices: Network devices for RDMA, separated by commas; all by default.
        timeout_s: Seconds that a call waits for a master that does not answer, or for a process with memory
            of the cluster that sends nothing. Mooncake reads the time from environment variables, such as
            `MC_RPC_TIMEOUT_MS`; the ones that are set already are not changed.

    Raises:
        ConfigError: If the package or a library is missing, nothing answers at `master`, or an argument is
            wrong.
    """

    def __init__(  # noqa: PLR0913
        self,
        master: str,
        *,
        hostname: str | None = None,
        segment_bytes: int = 1 << 30,
        protocol: str = "tcp",
        devices: str = "",
        timeout_s: float = 5.0,
    ) -> None:
        self._master, self._endpoint = master, _endpoint(master)
        if segment_bytes < 0:
            raise ConfigError(f"segment_bytes is {segment_bytes}, below 0")
        if protocol not in {"tcp", "rdma"}:
            raise ConfigError(f"protocol is {protocol!r}; it is 'tcp' or 'rdma'")
        if not 0 < timeout_s <= _LONGEST_S:
            raise ConfigError(f"timeout_s is {timeout_s}; it must be above 0, and at most {_LONGEST_S}")
        client = _new_client()
        try:
            # Mooncake would try for more than a minute.
            here = _connect(self._endpoint)
        except OSError as error:
            raise ConfigError(f"the Mooncake master {master} cannot be reached: {error}") from error
        _set_timeouts(timeout_s)
        code = client.setup(hostname or here, _METADATA, segment_bytes, 0, protocol, devices, master)
        if code != _OK:
            raise ConfigError(
                f"Mooncake does not start with the master {master}, segment_bytes {segment_bytes} and "
                f"protocol {protocol!r}: error {code}; its log on standard error says why"
            )
        self._client = client
        self._seen = _Seen()
        self._timeout_s = timeout_s
        self._process = os.getpid()
        self._regions = _Regions([], [])
        self._attaching = threading.Lock()
        self._trailers: list[_Trailers] = []
        self._guard = threading.Condition()
        self._calls = 0  # calls that may use the client, which must not be closed meanwhile
        self._closed = False
        self._abandoning = 0  # calls among them that wait for the client to be closed
        self._left = False
        self._master_is_lost = False
        self._try_at = 0.0
        self.damaged: int = 0
        """The number of stored values that did not fit their keys, and were removed."""
        super().__init__()

    def attach(self, memory: Sequence[tuple[int, int]]) -> None:
        """Register the host memory that pages are copied from and to. Call it before the first read or write.

        Earlier regions stay attached, except those that a new one overlaps. If a region is refused, the ones
        before it stay attached.

        Args:
            memory: Address and bytes of each region, which must stay valid as long as pages move.

        Raises:
            ArgumentError: If a region is empty, two regions overlap, or Mooncake refuses one.
            StateError: If the store is closed, or of another process.
        """
        pieces = sorted(memory)
        for address, size in pieces:
            if address <= 0 or size <= 0:
                raise ArgumentError(f"a region of {size} bytes at {address:#x} is not valid memory")
        for (first, size), (second, _) in pairwise(pieces):
            if second < first + size:
                raise ArgumentError(f"the region at {second:#x} overlaps that of {size} bytes at {first:#x}")
        with self._use() as client, self._attaching:
            if client is None:
                return
            regions = dict(zip(self._regions.starts, self._regions.ends, strict=True))
            for address, size in pieces:
                end = address + size
                if regions.get(address) == end:
                    continue
                for start in [old for old in regions if old < end and address < regions[old]]:
                    del regions[start]
                    self._regions = _Regions.of(regions)
                    client.unregister_buffer(start)
                code = client.register_buffer(address, size)
                if code != _OK:
                    raise ArgumentError(
                        f"Mooncake cannot register {size} bytes at {address:#x}: error {code}"
                    )
                regions[address] = end
                self._regions = _Regions.of(regions)

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether its value is in the cluster, or was within the last minute.

        Mooncake's master cannot be asked without a lease: what it has found, it does not evict for some
        seconds (its option `-default_kv_lease_ttl`). So it is asked about a value that is there once a
        minute, however often this is called. `touch` and `read` always ask.

        Raises:
            ArgumentError: If a key has not 32 bytes.
            StateError: If the store is closed, or of another process.
        """
        names = [_name(key) for key in keys]
        with self._use() as client:
            if client is None or self._abandoning or not self._reach_master():
                return [False] * len(names)
            known = self._seen.select(names)
        unknown = [name for name, is_known in zip(names, known, strict=True) if not is_known]
        found = iter(self._look_up(unknown) if unknown else ())
        return [is_known or next(found) for is_known in known]

    def touch(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether its value is in the cluster. The master keeps it for some seconds.

        Raises:
            ArgumentError: If a key has not 32 bytes.
            StateError: If the store is closed, or of another process.
        """
        return self._look_up([_name(key) for key in keys])

    def _look_up(self, names: Sequence[str]) -> list[bool]:
        """Ask the master."""
        with self._use() as client:
            if client is None:
                return [False] * len(names)
            found: list[bool] = []
            for start in range(0, len(names), _VALUES_PER_CALL):
                part = names[start : start + _VALUES_PER_CALL]
                codes = self._ask(client.batch_is_exist, part)
                found += [code == _IS_THERE for code in codes] if codes is not None else [False] * len(part)
            self._seen.record(names, found)
            return found

    def read(self, keys: Sequence[bytes], addresses: Sequence[int], sizes: Sequence[int]) -> list[bool]:
        """Read values into attached memory.

        Returns:
            For each key whether its value is in memory now: `False` for a value that is missing, has another
            size or does not fit its key. The content of its memory is then undefined.

        Raises:
            ArgumentError: If the arguments differ in number, a key has not 32 bytes, or memory was not
                attached.
            StateError: If the store is closed, or of another process.
        """
        present = self._transfer(self._read, keys, addresses, sizes)
        self._seen.record([_name(key) for key in keys], present)
        return present

    def write(self, keys: Sequence[bytes], addresses: Sequence[int], sizes: Sequence[int]) -> list[bool]:
        """Store values from attached memory, which must not change meanwhile.

        Returns:
            For each key whether its value is in the cluster now, or another process is writing it: `False` if
            the cluster has no room or cannot be reached.

        Raises:
            ArgumentError: If the arguments differ in number, a key has not 32 bytes, or memory was not
                attached.
            StateError: If the store is closed, or of another process.
        """
        return self._transfer(self._write, keys, addresses, sizes)

    def close(self) -> None:
        """Leave the cluster when the calls of other threads are over.

        The values in the segment of this process are lost.

        Raises:
            StateError: If the store is of another process.
        """
        self._check_process()
        super().close()
        with self._guard:
            if self._closed:
                return
            self._closed = True
        self._leave()

    def _abandon(self) -> None:
        """Close the client and all transfers: nothing uses the memory of the current call any more."""
        _logger.error("a read from the Mooncake Store took longer than %g s; the store is given up", _SLOW_S)
        with self._guard:
            self._abandoning += 1
            self._guard.notify_all()
        self._leave()

    def _leave(self) -> None:
        """Close the client once no call uses it, unless it is closed already."""
        with self._guard:
            self._guard.wait_for(lambda: self._left or self._calls == self._abandoning)
            if not self._left:
                self._left = True
                self._client.close()

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise StateError(f"the store belongs to process {self._process}, from which this one was forked")

    @contextmanager
    def _use(self) -> Iterator[_Client | None]:
        """Yield the client; `None` if it is closed.

        Within the block nobody closes it: calls of a closed one crash.
        """
        self._check_process()
        with self._guard:
            if self._closed:
                raise StateError("the store is closed")
            self._calls += 1
        try:
            yield None if self._left else self._client
        finally:
            with self._guard:
                self._calls -= 1
                self._guard.notify_all()

    def _ask(self, call: Callable[..., list[int]], *arguments: object) -> list[int] | None:
        """Return the result of a call; `None` while the master is gone, as each would take seconds."""
        if self._abandoning or not self._reach_master():
            return None
        codes = call(*arguments)
        if _RPC_TIMES_OUT in codes:
            # It still accepts connections. After this pause Mooncake has found out whether it answers.
            self._lost(self._timeout_s + 2 * _PING_S)
        elif _RPC_FAILS in codes:
            self._lost()
        return codes

    def _reach_master(self) -> bool:
        """Check the connection to the master. From time to time, try to connect to one that is gone.

        Returns:
            Whether the master can be called.
        """
        healthy = self._client.health_check() == _OK
        if not healthy:
            self._lost()
        with self._guard:
            if not self._master_is_lost:
                return True
            if time.monotonic() < self._try_at:
                return False
            self._try_at = time.monotonic() + _CONNECT_S  # other threads do not wait for this attempt
        try:
            _connect(self._endpoint)
        except OSError:
            healthy = False
        with self._guard:
            self._master_is_lost = not healthy
            self._try_at = time.monotonic() + _TRY_AGAIN_S
        if healthy:
            _logger.info("the Mooncake master %s is back", self._master)
        return healthy

    def _lost(self, pause_s: float = 0.0) -> None:
        with self._guard:
            if self._master_is_lost:
                return
            self._master_is_lost = True
            self._try_at = time.monotonic() + pause_s
        self._seen.clear()
        _logger.warning("the Mooncake master %s is gone; nothing is shared until it is back", self._master)

    def _transfer(
        self,
        move: Callable[[_Client, _Trailers, list[_Value]], list[bool]],
        keys: Sequence[bytes],
        addresses: Sequence[int],
        sizes: Sequence[int],
    ) -> list[bool]:
        if not len(keys) == len(addresses) == len(sizes):
            raise ArgumentError(f"{len(keys)} keys, {len(addresses)} addresses and {len(sizes)} sizes")
        regions = self._regions
        values = [_Value(*parts) for parts in zip(keys, addresses, sizes, strict=True)]
        for key, address, size in values:
            _check_key(key)
            if size <= 0 or not regions.have(address, size):
                raise ArgumentError(f"{size} bytes at {address:#x} are in no region that was attached")
        with self._use() as client:
            moved = [False] * len(values)
            if client is None:
                return moved
            try:
                trailers = self._trailers.pop()
            except IndexError:  # other threads use all of them
                trailers = _Trailers(client)
            try:
                for part in _calls(values):
                    done = move(client, trailers, [values[i] for i in part])
                    for i, is_done in zip(part, done, strict=True):
                        moved[i] = is_done
            finally:  # registered memory must be kept for later calls
                self._trailers.append(trailers)
            return moved

    def _read(self, client: _Client, trailers: _Trailers, values: list[_Value]) -> list[bool]:
        began = time.monotonic()
        codes = self._ask(client.batch_get_into_multi_buffers, *_arguments(trailers, values))
        if codes is None:
            return [False] * len(values)
        if _TRANSFER_FAILS in codes and time.monotonic() - began > _SLOW_S:
            self._abandon()
            return [False] * len(values)
        right = []
        for i, (value, code) in enumerate(zip(values, codes, strict=True)):
            is_whole = code == value.size + _TRAILER.size
            is_right = is_whole and trailers.get(i) == value.trailer()
            if is_whole and not is_right:
                # A damaged value would be found, and could not be written again.
                client.remove(_name(value.key), True)
                with self._guard:
                    self.damaged += 1
            right.append(is_right)
        return right

    def _write(self, client: _Client, trailers: _Trailers, values: list[_Value]) -> list[bool]:
        for i, value in enumerate(values):
            trailers.put(i, value.trailer())
        codes = self._ask(client.batch_put_from_multi_buffers, *_arguments(trailers, values))
        return [code == _OK for code in codes] if codes is not None else [False] * len(values)


def _arguments(
    trailers: _Trailers, values: list[_Value]
) -> tuple[list[str], list[list[int]], list[list[int]]]:
    """Return the names, addresses and sizes that Mooncake has to move: of each value and its trailer."""
    addresses = [[value.address, trailers.address(i)] for i, value in enumerate(values)]
    return (
        [_name(value.key) for value in values],
        addresses,
        [[value.size, _TRAILER.size] for value in values],
    )


def _new_client() -> _Client:
    try:
        module = importlib.import_module("mooncake.store")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error}: install 'kvpool[mooncake]', or a package of Mooncake for your GPU"
        ) from error
    except ImportError as error:
        raise ConfigError(
            f"Mooncake cannot be loaded: {error}; Debian has what it needs in libibverbs1, libnl-3-200, "
            "libnl-route-3-200, libnuma1 and libcurl4"
        ) from error
    client: _Client = module.MooncakeDistributedStore()
    return client


def _set_timeouts(timeout_s: float) -> None:
    """Set the environment variables that Mooncake reads, unless they are set already.

    Raises:
        ConfigError: If the environment has a time limit of transfers that is too long, or not a number.
    """
    seconds, milliseconds = str(math.ceil(timeout_s)), str(math.ceil(timeout_s * 1000))
    wanted = {
        "MC_RPC_TIMEOUT_MS": milliseconds,
        "MC_RPC_CONNECT_TIMEOUT_MS": milliseconds,
        "MC_TCP_STATUS_TIMEOUT_SEC": seconds,
        _PROGRESS: seconds,
    }
    for name, value in wanted.items():
        if os.environ.setdefault(name, value) != value:
            _logger.warning("%s is %s, which the whole process keeps, not %s", name, os.environ[name], value)
    progress = os.environ[_PROGRESS]
    if not (progress.isdecimal() and 0 < int(progress) <= _LONGEST_S):
        raise ConfigError(f"{_PROGRESS} is {progress!r}; it must be above 0, and at most {_LONGEST_S}")


def _endpoint(master: str) -> tuple[str, int]:
    host, colon, port = master.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ConfigError(f"master is {master!r}; it must be 'host:port'")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _connect(endpoint: tuple[str, int]) -> str:
    """Return the local address of a connection to an endpoint. Raise `OSError` if it does not answer."""
    with socket.create_connection(endpoint, timeout=_CONNECT_S) as connection:
        address: str = connection.getsockname()[0]
        return address


def _check_key(key: bytes) -> None:
    if len(key) != _KEY_BYTES:
        raise ArgumentError(f"a key has {_KEY_BYTES} bytes, not {len(key)}")


def _name(key: bytes) -> str:
    _check_key(key)
    return _PREFIX + key.hex()


def _calls(values: Sequence[_Value]) -> Iterator[list[int]]:
    """Yield the indices of all values, in parts for one call each.

    If a key is twice in one call, Mooncake reads one value and reports that it has read both.
    """
    part: list[int] = []
    keys: set[bytes] = set()
    size = 0
    for i, value in enumerate(values):
        if part and (
            len(part) == _VALUES_PER_CALL or size + value.size > _BYTES_PER_CALL or value.key in keys
        ):
            yield part
            part, keys, size = [], set(), 0
        part.append(i)
        keys.add(value.key)
        size += value.size
    if part:
        yield part
