"""Slots that move between processes and machines over NIXL.

NIXL is what vLLM, SGLang, TensorRT-LLM and Dynamo transfer with. The package is `nixl`; it is imported when
an `Endpoint` is made.
"""

from __future__ import annotations

import gc
import importlib
import os
import threading
import traceback
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Protocol

from kvpool.errors import ConfigError
from kvpool.remote import Endpoint as AnyEndpoint
from kvpool.remote import EndpointStats, Peer, RemoteSlots, SlotLease, Transfer, TransferError
from kvpool.remote.reads import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvpool._kvpool import GDNPool, KVPool
    from kvpool.remote import Blocks, Indices, Memory, Rows

__all__ = ["Endpoint", "EndpointStats", "Peer", "RemoteSlots", "SlotLease", "Transfer", "TransferError"]

# UCX, through which NIXL sends, takes its settings from the environment when an agent is made. Over TCP it
# reads in pieces of 8 KiB by default, at half of the speed.
_SEGMENT = "256k"
_environment = threading.Lock()

# The thread of an agent sleeps until the network has something for it, and looks by itself after so many
# microseconds. NIXL's Python class lets it look all the time.
_LOOK_US = 10_000


class NixlAgent(Protocol):
    """The methods of `nixl.nixl_agent` that are used. Its handles and rows are objects of its own."""

    agent: object

    def create_backend(self, backend: str, /) -> object: ...
    def register_memory(self, memory: list[tuple[int, int, int, str]], kind: str, /) -> object: ...
    def prep_xfer_dlist(self, peer: str, rows: object, kind: str, /) -> object: ...
    def get_agent_metadata(self) -> bytes: ...
    def add_remote_agent(self, metadata: bytes, /) -> str | bytes: ...
    def make_prepped_xfer(  # noqa: PLR0913, PLR0917
        self, operation: str, local: object, here: Indices, remote: object, there: Indices, note: bytes, /
    ) -> object: ...
    def transfer(self, handle: object, /) -> str: ...
    def check_xfer_state(self, handle: object, /) -> str: ...
    def release_xfer_handle(self, handle: object, /) -> object: ...
    def get_new_notifs(self) -> dict[str, list[bytes]]: ...
    def send_notif(self, peer: str, note: bytes, /) -> object: ...


@contextmanager
def _ucx(devices: str) -> Iterator[None]:
    """Set the variables of UCX that the environment does not have."""
    wanted = {"UCX_NET_DEVICES": devices, "UCX_TCP_TX_SEG_SIZE": _SEGMENT, "UCX_TCP_RX_SEG_SIZE": _SEGMENT}
    with _environment:
        unset = {name: value for name, value in wanted.items() if name not in os.environ}
        os.environ.update(unset)
        try:
            yield
        finally:
            for name in unset:
                del os.environ[name]


@contextmanager
def _failures(what: str) -> Iterator[None]:
    """Raise exceptions of NIXL as `TransferError`.

    Each build of its extension has its own base class of exceptions.
    """
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0].startswith("nixl"):
            # A reference to the error must not keep the agent alive: see `_Agent.close`.
            traceback.clear_frames(error.__traceback__)
            raise TransferError(f"NIXL cannot {what}: {error}") from error
        raise


class _Reading:
    def __init__(self, agent: NixlAgent, handle: object) -> None:
        self._agent = agent
        self._handle = handle

    def state(self) -> Literal["running", "done", "failed"]:
        with _failures("query a transfer"):
            state = self._agent.check_xfer_state(self._handle)
        if state == "DONE":
            return "done"
        return "running" if state == "PROC" else "failed"

    def release(self) -> None:
        with _failures("release a transfer"):
            self._agent.release_xfer_handle(self._handle)


class _Link:
    """A peer, with the handles of its rows that the agent has prepared.

    The link is valid as long as the agent.
    """

    def __init__(self, agent: _Agent, name: str, blocks: list[object]) -> None:
        self._agent = agent
        self._name = name
        self._blocks = blocks

    def read(self, kind: int, here: Indices, there: Indices, note: bytes) -> _Reading:
        with _failures(f"read from {self._name}"):
            return self._agent.begin(kind, here, self._blocks[kind], there, note)

    def send(self, note: bytes) -> None:
        with _failures(f"send to {self._name}"):
            self._agent.send(self._name, note)


class _Agent:
    """A NIXL agent, with its registered memory and prepared rows."""

    def __init__(
        self, agent: NixlAgent, memory: Sequence[Memory], blocks: tuple[Blocks, ...], *, is_own: bool
    ) -> None:
        self._nixl: NixlAgent | None = agent
        self._is_own = is_own
        with _failures("register memory"):
            self._registered = [
                agent.register_memory([(one.address, one.size, one.device or 0, "")], _kind(one.device))
                for one in memory
            ]
            self._blocks = [self._prepared("", rows) for rows in blocks]

    @property
    def _agent(self) -> NixlAgent:
        if self._nixl is None:
            raise TransferError("the agent is closed")
        return self._nixl

    def _prepared(self, name: str, rows: Blocks) -> object:
        return self._agent.prep_xfer_dlist(name, rows.strided(), _kind(rows.device))

    def metadata(self) -> bytes:
        with _failures("describe itself"):
            return bytes(self._agent.get_agent_metadata())

    def connect(self, metadata: bytes, blocks: Sequence[Blocks]) -> _Link:
        with _failures("reach a peer"):
            name = self._agent.add_remote_agent(metadata)
            name = name.decode() if isinstance(name, bytes) else name
            return _Link(self, name, [self._prepared(name, rows) for rows in blocks])

    def begin(self, kind: int, here: Indices, blocks: object, there: Indices, note: bytes) -> _Reading:
        """Begin to read rows of a peer's prepared blocks. Raises exceptions of NIXL."""
        handle = self._agent.make_prepped_xfer("READ", self._blocks[kind], here, blocks, there, note)
        self._agent.transfer(handle)
        return _Reading(self._agent, handle)

    def send(self, name: str, note: bytes) -> None:
        """Send a note to a peer. Raises exceptions of NIXL."""
        self._agent.send_notif(name, note)

    def notes(self) -> list[tuple[str, bytes]]:
        with _failures("listen"):
            notes = self._agent.get_new_notifs()
        return [(sender, note) for sender, of_sender in notes.items() for note in of_sender]

    def close(self) -> None:
        # The agent ends with its last reference, and its handles have references.
        self._blocks.clear()
        self._registered.clear()
        inner = weakref.ref(self._agent.agent)
        self._nixl = None
        if self._is_own and inner() is not None:
            gc.collect()
            if inner() is not None:
                # The memory that the agent reads into must not be used again.
                raise RuntimeError("a NIXL agent cannot be ended: something refers to it")


def _kind(device: int | None) -> str:
    return "DRAM" if device is None else "VRAM"


def _sleeping(nixl: Any, name: str) -> NixlAgent:  # noqa: ANN401 - the module has no types
    """Return an agent whose thread sleeps while nothing moves: NIXL's class has no argument for that."""
    made: NixlAgent = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False, backends=[]))
    config = nixl.nixlAgentConfig()
    config.useProgThread = True
    config.pthrDelay = _LOOK_US
    # The agent has no backend yet, so its native object can be replaced.
    made.agent = nixl.nixlAgent(name, config)
    made.create_backend("UCX")
    return made


class Endpoint(AnyEndpoint):
    """The endpoint of a process's pools in a network of NIXL. `kvpool.remote.Endpoint` describes its methods.

    Args:
        name: The unique name of the endpoint.
        kv: The pool whose slots are lent and read into, or the memory of another library.
        states: The pool of the states that belong to them.
        agent: An existing `nixl_agent`. With one, a read from a stopped peer keeps its slots until NIXL gives
            up. By default the endpoint makes its own agents, and closes them to end such reads.
        network: The network devices that its own agents use, as UCX lists them: `"eth0"`,
            `"mlx5_0:1,mlx5_1:1"`, `"all"`. `UCX_NET_DEVICES` comes first. NIXL asks peers for no secret: use
            networks that you trust.
        patience_s: Seconds that other reads get to end before the connections of a failed one are closed.

    Raises:
        ConfigError: If NIXL cannot be imported, the pools are on different devices, or `patience_s` is out of
            its range.
        TransferError: If NIXL cannot be used.
    """

    def __init__(  # noqa: PLR0913 - pools, and how they are reached
        self,
        name: str,
        kv: KVPool | Rows,
        *,
        states: GDNPool | None = None,
        agent: NixlAgent | None = None,
        network: str = "lo",
        patience_s: float = PATIENCE_S,
    ) -> None:
        nixl = None if agent is not None else _import()

        def new_agent(name: str, memory: Sequence[Memory], blocks: tuple[Blocks, Blocks]) -> _Agent:
            if agent is not None:
                return _Agent(agent, memory, blocks, is_own=False)
            with _ucx(network), _failures("make an agent"):
                return _Agent(_sleeping(nixl, name), memory, blocks, is_own=True)

        may_cut = agent is None
        super().__init__(name, kv, states=states, new_agent=new_agent, may_cut=may_cut, patience_s=patience_s)


def _import() -> Any:  # noqa: ANN401 - the module has no types
    try:
        return importlib.import_module("nixl")
    except ImportError as error:
        raise ConfigError(f"NIXL cannot be imported: {error}; install 'kvpool[nixl]'") from error
