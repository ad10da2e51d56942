"""The messages of a cluster's processes: MessagePack, bounded, with types that are checked."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias, TypeVar

import msgspec
from msgspec.msgpack import Decoder, Encoder

from kvpool._messagepack import refuse_extension
from kvpool.cluster.channel import MAX_BYTES, ChannelError
from kvpool.errors import ConfigError
from kvpool.serving.sampling import Sampling

MAX_TOKENS: Final = 1 << 20
"""The most tokens of a request."""

MAX_STOP_TOKENS: Final = 1 << 12
"""The most stop tokens of a request."""

MAX_LISTED: Final = 1 << 16
"""The most entries of a list of a report."""

_Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=200, pattern="^[^/#]+$")]
MAX_TEXT: Final = 1000
_Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
_Bytes: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=MAX_BYTES)]
_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Token: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Tokens: TypeAlias = Annotated[list[_Token], msgspec.Meta(max_length=MAX_TOKENS)]

_LISTED: Final = msgspec.Meta(max_length=MAX_LISTED)

Role: TypeAlias = Literal["prefill", "decode"]
"""The work of a worker: to compute prompts, or to generate the tokens that follow."""


class _Message(msgspec.Struct, tag=True, omit_defaults=True, forbid_unknown_fields=True):
    """A message."""


class Join(_Message):
    """A message of a worker to the router: the worker joins the cluster.

    Attributes:
        name: The name of the worker. An earlier worker of the same name counts as lost.
        role: Its part of the work: "prefill" for prompts, "decode" for the tokens that follow.
        model: Properties that must be equal in all processes for tokens to be equal.
        metadata: The metadata of its `Endpoint`.
        capacity: The most token slots that a request can have there.
        events: The endpoint at which the worker publishes the events of its prefix cache, if it has one.
        replay: The endpoint at which the router requests missed events.
    """

    name: _Name
    role: Role
    model: Annotated[dict[_Text, _Text | int], msgspec.Meta(max_length=64)]
    metadata: _Bytes
    capacity: _Number
    events: _Text | None = None
    replay: _Text | None = None


class Refused(_Message):
    """A message of the router to a worker: the worker cannot join."""

    reason: _Text


class Connect(_Message):
    """A message of the router to a worker: another worker has joined, and may lend rows to this one.

    Attributes:
        name: The name of the other worker.
        metadata: The metadata of its `Endpoint`.
    """

    name: _Name
    metadata: _Bytes


class Disconnect(_Message):
    """A message of the router to a worker: another worker is lost, and lends no rows any more."""

    name: _Name


class Work(_Message):
    """A message of the router to a worker: serve a request, from its known tokens on.

    Attributes:
        number: The unique number of this attempt.
        prompt: Tokens of the prompt.
        tokens: The known tokens after the prompt.
        max_new_tokens: The most tokens to generate, those in `tokens` included.
        stop_tokens: Tokens that end the request.
        temperature: `Sampling.temperature` of the request.
        top_k: `Sampling.top_k` of the request.
        top_p: `Sampling.top_p` of the request.
        seed: `Sampling.seed` of the request.
        namespace: The namespace, if it is a str or an int.
        namespace_bytes: The namespace, if it is bytes.
        is_handed_over: Whether the worker lends the rows when the next token is generated, so that another
            worker continues.
        peer: The worker that lends the rows of all tokens but the last. Without one, the rows are computed.
        ticket: The ticket of that lease.
    """

    number: _Number
    prompt: _Tokens
    tokens: _Tokens
    max_new_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
    stop_tokens: Annotated[list[_Token], msgspec.Meta(max_length=MAX_STOP_TOKENS)] = []
    temperature: float = 0.0
    top_k: _Number = 0
    top_p: float = 1.0
    seed: int = 0
    namespace: _Text | int | None = None
    namespace_bytes: Annotated[bytes, msgspec.Meta(max_length=MAX_TEXT)] | None = None
    is_handed_over: bool = False
    peer: _Name | None = None
    ticket: _Bytes | None = None

    def sampling(self) -> Sampling:
        """Return the sampling parameters.

        Raises:
            ConfigError: If a value is out of its range.
        """
        return Sampling(self.temperature, self.top_k, self.top_p, self.seed)


class Abort(_Message):
    """A message of the router to a worker: an attempt is not needed any more."""

    number: _Number


class Report(_Message):
    """A message of a worker to the router: the events since the last report.

    Attributes:
        tokens: New tokens of attempts, in order.
        lent: Attempts whose rows are lent, with the tickets; a ticket is `None` if the rows could not be
            lent.
        failed: Attempts that cannot be served, with the reasons.
        stats: The statistics of the engine, in one report each `report_s` of the worker; otherwise empty.
        unread: Attempts for which rows are lent that the worker does not read.
    """

    tokens: Annotated[list[tuple[_Number, _Tokens]], _LISTED] = []
    lent: Annotated[list[tuple[_Number, _Bytes | None]], _LISTED] = []
    failed: Annotated[list[tuple[_Number, _Text]], _LISTED] = []
    stats: Annotated[dict[_Text, int], msgspec.Meta(max_length=256)] | None = None
    unread: Annotated[list[_Number], _LISTED] = []


ToRouter: TypeAlias = Join | Report
ToWorker: TypeAlias = Refused | Connect | Disconnect | Work | Abort


_Decoded = TypeVar("_Decoded")

_encoder = Encoder()
_to_router: Decoder[ToRouter] = Decoder(ToRouter, ext_hook=refuse_extension)
_to_worker: Decoder[ToWorker] = Decoder(ToWorker, ext_hook=refuse_extension)


def encode(message: ToRouter | ToWorker) -> bytes:
    """Return a message as bytes."""
    return _encoder.encode(message)


def check(message: ToRouter | ToWorker) -> None:
    """Check that the other end accepts a message. Otherwise the other end would end the connection.

    Raises:
        ConfigError: If the other end would refuse the message, such as for an int beyond 64 bits.
    """
    try:
        payload = encode(message)
        if isinstance(message, ToRouter):
            from_worker(payload)
        else:
            from_router(payload)
    except (ChannelError, msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"this cannot be sent: {error}") from error
    if len(payload) > MAX_BYTES:
        raise ConfigError(f"this cannot be sent: its {len(payload)} bytes are more than {MAX_BYTES}")


def from_worker(payload: bytes) -> ToRouter:
    """Return the message of a worker.

    Raises:
        ChannelError: If the payload is not a message of a worker.
    """
    return _decode(_to_router, payload)


def from_router(payload: bytes) -> ToWorker:
    """Return the message of a router.

    Raises:
        ChannelError: If the payload is not a message of a router.
    """
    return _decode(_to_worker, payload)


def _decode(decoder: Decoder[_Decoded], payload: bytes) -> _Decoded:
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ChannelError(f"a message cannot be used: {error}") from error
