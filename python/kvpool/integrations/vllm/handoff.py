"""What a prefill engine tells a decode engine of a request, and a scheduler its workers of the transfers."""

from __future__ import annotations

import hashlib
from base64 import b64decode, b64encode
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvpool.errors import ArgumentError
from kvpool.integrations.vllm.seams import TRANSFER, VLLM

VLLM.require(TRANSFER)

from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

if TYPE_CHECKING:
    import numpy.typing as npt
    from vllm.v1.request import Request

    from kvpool.remote import LeaseKey

__all__ = ["EndpointMetadata", "Handoff", "Lend", "Load", "Plan", "digest_of"]

_KEY = "kvpool"
"""The name under which a hand-off stands in `kv_transfer_params`."""


class Handoff(NamedTuple):
    """The blocks of a prompt that a prefill engine has computed and lent.

    Attributes:
        tokens: Tokens of the prompt.
        digest: What `digest_of` returns for them.
        groups: For each group of the KV cache how many blocks at its beginning are not there any more, as
            they are behind a window, and how many follow, up to the last token.
        ticket: The ticket of the lease of these blocks, group by group.
        peers: The metadata of the endpoint of each worker, by its rank.
    """

    tokens: int
    digest: str
    groups: tuple[tuple[int, int], ...]
    ticket: bytes
    peers: tuple[bytes, ...]

    def to_params(self, request_id: str, engine_id: str) -> dict[str, Any]:
        """Return the `kv_transfer_params` with which the request goes to a decode engine."""
        values = {
            "tokens": self.tokens,
            "digest": self.digest,
            "groups": [*map(list, self.groups)],
            "ticket": b64encode(self.ticket).decode(),
            "peers": [b64encode(peer).decode() for peer in self.peers],
        }
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": engine_id,
            "remote_request_id": request_id,
            _KEY: values,
        }

    @classmethod
    def from_params(cls, params: dict[str, Any]) -> Handoff:
        """Return the hand-off in a request's `kv_transfer_params`.

        Raises:
            ArgumentError: If it is missing or not whole.
        """
        try:
            values = params[_KEY]
            groups = tuple((int(skipped), int(count)) for skipped, count in values["groups"])
            found = cls(
                int(values["tokens"]),
                str(values["digest"]),
                groups,
                b64decode(values["ticket"], validate=True),
                tuple(b64decode(peer, validate=True) for peer in values["peers"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ArgumentError(f"kv_transfer_params have no whole hand-off: {error!r:.200}") from error
        if found.tokens < 1 or not found.peers or min(min(pair) for pair in [(0, 0), *groups]) < 0:
            raise ArgumentError(f"a hand-off of {found.tokens} tokens, {groups!r:.200}, cannot be")
        return found


def digest_of(request: Request, tokens: int) -> str | None:
    """Return a hash of the first tokens of a prompt and of all else that its K and V depend on.

    `None` if they cannot be told by tokens alone, as the prompt is given by embeddings.
    """
    prompt = request.prompt_token_ids
    if prompt is None or getattr(request, "prompt_embeds", None) is not None:
        return None
    lora = request.lora_request
    others = (lora and lora.lora_name, [feature.identifier for feature in request.mm_features])
    found = hashlib.blake2b(repr(others).encode(), digest_size=16)
    found.update(np.asarray(prompt[:tokens], np.int64).tobytes())
    return found.hexdigest()


class Lend(NamedTuple):
    """An order to lend blocks.

    Attributes:
        request_id: The request whose blocks they are.
        key: The key of the lease.
        blocks: Their numbers, int32.
        lease_s: Seconds of the lease.
    """

    request_id: str
    key: LeaseKey
    blocks: npt.NDArray[np.int32]
    lease_s: float


class Load(NamedTuple):
    """An order to read blocks for a request that waits for them.

    Attributes:
        request_id: The request.
        handoff: Its hand-off.
        there: Positions of the blocks among those of the ticket, int32.
        here: The blocks that they go to, int32, one for each.
    """

    request_id: str
    handoff: Handoff
    there: npt.NDArray[np.int32]
    here: npt.NDArray[np.int32]


@dataclass
class Plan(KVConnectorMetadata):  # type: ignore[misc]  # vLLM has no types here
    """What the workers do at a step.

    Attributes:
        ends: Requests whose leases end.
        lends: Blocks to lend, after that.
        sent: Requests that are over and keep their blocks as long as their leases last.
        loads: Blocks to read.
        lacking: Requests that wait for blocks which their hand-offs do not have.
        returns: Hand-offs whose leases are not needed.
        renewals: Hand-offs whose leases are needed longer, as their requests wait to be scheduled.
    """

    ends: list[str] = field(default_factory=list)
    lends: list[Lend] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)
    returns: list[Handoff] = field(default_factory=list)
    renewals: list[Handoff] = field(default_factory=list)


@dataclass
class EndpointMetadata(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """The metadata of a worker's endpoint, for the scheduler."""

    metadata: bytes
