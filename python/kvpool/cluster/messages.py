"""The messages of a cluster's processes: MessagePack, bounded, with types that are checked."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from kvpool.cluster.channel import MAX_BYTES, ChannelError
from kvpool.errors import ConfigError
from kvpool.integrations.kv_events.messages import refuse_extension
from kvpool.sampling import Sampling

MAX_TOKENS: Final = 1 << 20
"""The most tokens of a request."""

MAX_STOP_TOKENS: Final = 1 << 12
"""The most stop tokens of a request."""

_Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=200, pattern="^[^/#]+$")]
MAX_TEXT: Final = 1000
_Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
_Bytes: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=MAX_BYTES)]
_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Token: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Tokens: TypeAlias = Annotated[list[_Token], msgspec.Meta(max_length=MAX_TOKENS)]

Role: TypeAlias = Literal["prefill", "decode"]


class _Message(msgspec.Struct, tag=True, omit_defaults=True, forbid_unknown_fields=True):
    """A message."""


class Join(_Message):
    """A worker to the router: it is there.

    Attributes:
        name: Its name. Another worker of the same name has gone.
        role: Its part of the work: prompts, or what follows.
        model: Properties that must be equal in all processes for tokens to be equal.
        metadata: The metadata of its `Endpoint`.
        capacity: Its token slots.
        events: The endpoint at which it publishes the events of its prefix cache, if it has one.
        replay: The endpoint at which missed ones are asked for.
    """

    name: _Name
    role: Role
    model: Annotated[dict[_Text, _Text | int], msgspec.Meta(max_length=64)]
    metadata: _Bytes
    capacity: _Number
    events: _Text | None = None
    replay: _Text | None = None


class Refused(_Message):
    """The router to a worker: it cannot join."""

    reason: _Text


class Meet(_Message):
    """The router to a worker: there is one that lends it rows.

    Attributes:
        name: Its name.
        metadata: The metadata of its `Endpoint`.
    """

    name: _Name
    metadata: _Bytes


class Part(_Message):
    """The router to a worker: another one is lost, and lends nothing any more."""

    name: _Name


class Work(_Message):
    """The router to a worker: go on with a request.

    Attributes:
        number: The number of this attempt, which no other has.
        prompt: Tokens of the prompt.
        tokens: The tokens that follow and are known.
        max_new_tokens: The most tokens to generate, those in `tokens` included.
        stop_tokens: Tokens that end it.
        temperature: As in `Sampling`.
        top_k: As in `Sampling`.
        top_p: As in `Sampling`.
        seed: As in `Sampling`.
        namespace: As in `Engine.submit`, but for bytes.
        namespace_bytes: The namespace, if it is bytes.
        is_handed_over: Lend its rows when the next token is generated, for another worker to go on.
        peer: The worker that lends the rows of all tokens but the last. Without it they are computed.
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
        """Return how tokens are selected.

        Raises:
            ConfigError: If that makes no sense.
        """
        return Sampling(self.temperature, self.top_k, self.top_p, self.seed)


class Abort(_Message):
    """The router to a worker: an attempt is not needed any more."""

    number: _Number


class Report(_Message):
    """A worker to the router: what has happened.

    Attributes:
        tokens: New tokens of attempts, in order.
        lent: Attempts whose rows are lent, with the tickets; `None` where they could not be.
        failed: Attempts that cannot be served, and why.
        stats: The statistics of the engine, now and then.
    """

    tokens: list[tuple[_Number, _Tokens]] = []
    lent: list[tuple[_Number, _Bytes | None]] = []
    failed: list[tuple[_Number, _Text]] = []
    stats: Annotated[dict[_Text, int], msgspec.Meta(max_length=256)] | None = None


ToRouter: TypeAlias = Join | Report
ToWorker: TypeAlias = Refused | Meet | Part | Work | Abort


_encoder = msgspec.msgpack.Encoder()
_to_router: Any = msgspec.msgpack.Decoder(ToRouter, ext_hook=refuse_extension)
_to_worker: Any = msgspec.msgpack.Decoder(ToWorker, ext_hook=refuse_extension)


def encode(message: ToRouter | ToWorker) -> bytes:
    """Return a message as bytes."""
    return _encoder.encode(message)


def check(message: ToRouter | ToWorker) -> None:
    """See that a message is one that the other end takes: it leaves who sends another.

    Raises:
        ConfigError: If not, such as for an int beyond 64 bits.
    """
    decoder = _to_router if isinstance(message, ToRouter) else _to_worker
    try:
        payload = encode(message)
        _decode(decoder, payload)
    except (ChannelError, msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"this cannot be sent: {error}") from error
    if len(payload) > MAX_BYTES:
        raise ConfigError(f"this cannot be sent: its {len(payload)} bytes are more than {MAX_BYTES}")


def from_worker(payload: bytes) -> ToRouter:
    """Return what a worker says.

    Raises:
        ChannelError: If no worker says that.
    """
    message: ToRouter = _decode(_to_router, payload)
    return message


def from_router(payload: bytes) -> ToWorker:
    """Return what the router says.

    Raises:
        ChannelError: If no router says that.
    """
    message: ToWorker = _decode(_to_worker, payload)
    return message


def _decode(decoder: Any, payload: bytes) -> Any:  # noqa: ANN401
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ChannelError(f"a message cannot be used: {error}") from error
