"""ASGI middleware for a vLLM server that decodes: another server computes each prompt first, if one can.

    PREFILL_SERVERS=http://10.0.0.1:8000,http://10.0.0.2:8000
    vllm serve MODEL --middleware vllm_prefill_first.PrefillFirst --kv-transfer-config ...

`examples/vllm_prefill_first.py` has to be where Python finds it (`PYTHONPATH`). Both servers have
`KvpoolTransferConnector`. Clients ask the decode server, which asks one prefill server after the other for a
single token; `kv_transfer_params` of its answer tell where K and V of the prompt are. If none answers, the
request goes on without them: this server computes the prompt itself. So no prefill server that dies, at any
moment, makes a request fail.

`PREFILL_TIMEOUT_S` (60) limits a prompt, and `PREFILL_CONNECT_S` (2) a connection.
"""

from __future__ import annotations

import json
import logging
import os
from typing import TYPE_CHECKING, Any

import aiohttp

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    Message = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]
    App = Callable[[Message, Receive, Send], Awaitable[None]]

PATHS = ("/v1/completions", "/v1/chat/completions")

_logger = logging.getLogger("vllm.prefill_first")


class PrefillFirst:
    """Lets a prefill server compute the prompts of requests to `app`."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._servers = [url.rstrip("/") for url in os.environ.get("PREFILL_SERVERS", "").split(",") if url]
        self._timeout = aiohttp.ClientTimeout(
            total=float(os.environ.get("PREFILL_TIMEOUT_S", "60")),
            connect=float(os.environ.get("PREFILL_CONNECT_S", "2")),
        )
        self._session: aiohttp.ClientSession | None = None
        self._turn = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request."""
        is_prompt = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in PATHS
        if not is_prompt or not self._servers:
            await self._app(scope, receive, send)
            return
        body = await _body(receive)
        try:
            request = json.loads(body)
        except ValueError:
            request = None  # vLLM says what is wrong with it
        if isinstance(request, dict) and "kv_transfer_params" not in request and _is_one(request):
            params = await self._prefill(scope, request)
            if params is not None:
                body = json.dumps({**request, "kv_transfer_params": params}).encode()
        headers = [pair for pair in scope["headers"] if pair[0].lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._app({**scope, "headers": headers}, _again(body, receive), send)

    async def _prefill(self, scope: Message, request: dict[str, Any]) -> dict[str, Any] | None:
        """Return the parameters of the first server that computes the prompt; `None` if none does."""
        session = self._session
        if session is None:
            session = self._session = aiohttp.ClientSession(timeout=self._timeout)
        asked = {
            name: value for name, value in request.items() if name not in ("stream_options", "min_tokens")
        }
        asked |= {"max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
        asked |= {name: 1 for name in ("max_completion_tokens", "n") if name in asked}
        kept = (b"authorization", b"x-request-id")
        headers = {name.decode(): value.decode() for name, value in scope["headers"] if name.lower() in kept}
        self._turn += 1
        for at in range(len(self._servers)):
            server = self._servers[(self._turn + at) % len(self._servers)]
            try:
                async with session.post(server + scope["path"], json=asked, headers=headers) as answer:
                    if answer.status == 200:  # noqa: PLR2004
                        params: dict[str, Any] | None = (await answer.json()).get("kv_transfer_params")
                        return params
                    if answer.status < 500:  # noqa: PLR2004 - this server says what is wrong with it
                        return None
                    problem = f"status {answer.status}"
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
            _logger.warning("%s has not computed a prompt: %s", server, problem)
        return None


def _is_one(request: dict[str, Any]) -> bool:
    """Return whether a request has one prompt: the parameters of an answer are those of the first."""
    prompt = request.get("prompt")
    return not isinstance(prompt, list) or all(isinstance(token, int) for token in prompt)


async def _body(receive: Receive) -> bytes:
    """Return the whole body of a request."""
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def _again(body: bytes, receive: Receive) -> Receive:
    """Return what gives a body that was read already, and then what the client does."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return messages.pop() if messages else await receive()

    return next_message
