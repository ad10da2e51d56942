"""A process that has a NIXL endpoint: one command for each line of standard input, one answer for each."""

from __future__ import annotations

import argparse
import json
import select
import sys
from base64 import b64decode, b64encode
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

sys.modules["torch"] = cast("Any", None)  # it takes seconds, and nothing here needs it

import kvpool  # noqa: E402
from kvpool.integrations.nixl import Endpoint  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from kvpool.integrations.nixl import SlotLease, Transfer

    Array = npt.NDArray[np.float32]

parser = argparse.ArgumentParser()
parser.add_argument("name")
parser.add_argument("--rows", type=int, default=512)
parser.add_argument("--dim", type=int, default=8)
parser.add_argument("--network", default="lo")
ARGUMENTS = parser.parse_args()
ROWS, DIM = ARGUMENTS.rows, ARGUMENTS.dim
LAYERS = 4


class Process:
    """Pools whose rows hold what their owners wrote, an endpoint, and what each command does."""

    def __init__(self) -> None:
        kv = kvpool.KVPool(ROWS, LAYERS, 2, DIM, "cpu", "float32")
        states = kvpool.GDNPool(4, 2, 2, 4, 4, 6, 4, "cpu", "float32")
        self.buffers = [array(buffer) for buffer in (*kv.k_buffer, *kv.v_buffer)]
        self.states = [array(state) for state in (states.recurrent_state, states.conv_state)]
        self.endpoint = Endpoint(ARGUMENTS.name, kv, states=states, network=ARGUMENTS.network)
        self.peers: dict[str, Any] = {}
        self.leases: list[SlotLease] = []
        self.transfers: list[Transfer] = []

    def metadata(self) -> str:
        return b64encode(self.endpoint.metadata()).decode()

    def connect(self, metadata: str) -> str:
        peer = self.endpoint.connect(b64decode(metadata))
        self.peers[peer.name] = peer
        return peer.name

    def fill(self, slots: Sequence[int], seed: int) -> None:
        """Writes numbers that belong to the place in the list of slots, the buffer and the seed."""
        for at, buffer in enumerate(self.buffers):
            buffer[slots] = self.numbers(slots, seed, at)
        for state, sign in zip(self.states, (1, -1), strict=True):
            for slot in range(1, 5):
                state[:, slot] = sign * (seed + slot / 8)

    @staticmethod
    def numbers(slots: Sequence[int], seed: int, at: int) -> Array:
        drawn = np.random.default_rng(seed * 100 + at).random((len(slots), 1, 1), np.float32)
        return np.broadcast_to(drawn, (len(slots), 2, DIM))

    def wrong(self, slots: Sequence[int], seed: int) -> int:
        """Rows that do not have these numbers."""
        wrong = np.zeros(len(slots), bool)
        for at, buffer in enumerate(self.buffers):
            wrong |= (buffer[slots] != self.numbers(slots, seed, at)).any((1, 2))
        return int(wrong.sum())

    def state(self, slot: int) -> list[float]:
        found = [state[:, slot].ravel() for state in self.states]
        assert all((numbers == numbers[0]).all() for numbers in found)
        return [float(numbers[0]) for numbers in found]

    def lend(
        self,
        slots: Sequence[int],
        seconds: float,
        states: Sequence[int] = (),
        writable: bool = False,
    ) -> str:
        self.leases.append(self.endpoint.lend(slots, states=states, lease_s=seconds, writable=writable))
        return b64encode(self.leases[-1].ticket).decode()

    def lease(self, at: int) -> list[Any]:
        """Whether a lease is over, was returned, and what was said."""
        lease = self.leases[at]
        notify = lease.notify
        return [lease.query(), lease.returned, None if notify is None else notify.decode()]

    def read(self, peer: str, ticket: str, slots: Sequence[int], states: Sequence[int] = ()) -> int:
        remote = self.peers[peer].slots(b64decode(ticket))
        self.transfers.append(self.peers[peer].read(remote, slots, states=states))
        return len(self.transfers) - 1

    def write(self, peer: str, slots: Sequence[int], ticket: str, notify: str) -> int:
        remote = self.peers[peer].slots(b64decode(ticket))
        self.transfers.append(self.peers[peer].write(slots, remote, notify=notify.encode()))
        return len(self.transfers) - 1

    def transfer(self, at: int) -> list[Any]:
        """Whether a transfer is over, and its error."""
        is_over, error = self.transfers[at].query(), self.transfers[at].error
        return [is_over, None if error is None else str(error)]

    def stats(self) -> dict[str, Any]:
        return {**self.endpoint.stats()}

    def listening(self) -> list[str]:
        """Addresses on which this process listens, as in /proc."""
        own = set()
        for link in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # of the folder that is being listed
                own.add(str(link.readlink()))
        lines = Path("/proc/self/net/tcp").read_text(encoding="ascii").splitlines()[1:]
        fields = [line.split() for line in lines]
        return [
            words[1].partition(":")[0]
            for words in fields
            if words[3] == "0A" and f"socket:[{words[9]}]" in own
        ]


def array(tensor: object) -> Array:
    """The memory of a `kvpool.Tensor`."""
    assert isinstance(tensor, kvpool.Tensor)
    return tensor.numpy()


def main() -> None:
    process = Process()
    while True:
        if not select.select([sys.stdin], [], [], 0.005)[0]:
            process.endpoint.poll()
            continue
        line = sys.stdin.readline()
        if not line:
            return
        name, arguments = json.loads(line)
        try:
            answer: object = getattr(process, name)(*arguments)
        except (kvpool.KvPoolError, IndexError) as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        sys.stdout.write(f"{json.dumps(answer)}\n")
        sys.stdout.flush()


main()
