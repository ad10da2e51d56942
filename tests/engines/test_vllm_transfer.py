"""Prefill and decode on two vLLM servers, with kills at every step of a hand-off."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
from nano_models import make
from sglang_on_cpu import ROOT
from vllm_cluster_runs import require
from vllm_pair import Order, Server, at_once, prompts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

REQUESTS, LEASE_S = 30, 4.0

PREFILL = ("added", "computing", "lent", "finished", "allocated", "connecting", "connected", "reading",
           "checking", "arrived")  # fmt: skip
"""Places at which the prefill server is killed, in the order of a hand-off: see `vllm_dying`."""

DECODE = ("allocated", "reading")
"""Places at which the decode server is killed."""

KILLS = [*(("llama", place) for place in PREFILL), ("gemma3", "reading")]

CONNECTOR: dict[str, Any] = {
    "kv_connector": "KvpoolTransferConnector",
    "kv_connector_extra_config": {"lease_s": LEASE_S},
}
DYING = {**CONNECTOR, "kv_connector": "DyingConnector", "kv_connector_module_path": "vllm_dying"}


@pytest.fixture(scope="module", params=["llama"])
def model(request: pytest.FixtureRequest) -> Path:
    require()
    return make(ROOT / "target" / "nano_models", request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="module")
def expected(model: Path, folder: Path) -> list[list[list[int]]]:
    """What one server alone answers to each prompt, for each place."""
    server = Server(folder, model)
    try:
        server.wait_ready()
        return [
            at_once(server.tokens, prompts(seed, REQUESTS)) for seed in range(len(PREFILL) + len(DECODE) + 1)
        ]
    finally:
        server.kill()


class Pair:
    """A prefill server, and a decode server that asks it for every prompt."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.order = Order(folder / "kill")
        self.prefill = self._start()
        self.decode = self._start_decode()
        self.prefill.wait_ready()
        self.decode.wait_ready()

    def _start(self, **options: Any) -> Server:  # noqa: ANN401
        return Server(self.folder, self.model, DYING, KILL_ORDER=str(self.order.path), **options)

    def _start_decode(self, **options: Any) -> Server:  # noqa: ANN401
        return self._start(
            options=("--middleware", "vllm_prefill_first.PrefillFirst"),
            PREFILL_SERVERS=f"http://127.0.0.1:{self.prefill.port}",
            **options,
        )

    def start_again(self) -> None:
        """Starts what was killed, where it was."""
        if self.prefill.process.poll() is not None:
            self.prefill = self._start(port=self.prefill.port)
        if self.decode.process.poll() is not None:
            self.decode = self._start_decode(port=self.decode.port)
        self.prefill.wait_ready()
        self.decode.wait_ready()


@pytest.fixture(scope="module")
def pair(folder: Path, model: Path, expected: object) -> Iterator[Pair]:
    del expected  # its server has ended
    pair = Pair(folder, model)
    yield pair
    pair.prefill.kill()
    pair.decode.kill()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["llama", "gemma3"], indirect=True)
def test_prompts_are_computed_on_one_and_answered_on_the_other(
    pair: Pair, expected: list[list[list[int]]]
) -> None:
    pair.start_again()
    asked = prompts(0, REQUESTS)
    assert at_once(pair.decode.tokens, asked) == expected[0]
    source = "vllm:prompt_tokens_by_source_total{.*source=.%s"
    elsewhere, here = (
        pair.decode.metric(source % name) for name in ("external_kv_transfer", "local_compute")
    )
    assert elsewhere > sum(map(len, asked)) / 2
    assert here <= REQUESTS  # the last token of each
    pair.prefill.wait_unused()
    pair.decode.wait_unused()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("model", "place"), KILLS, indirect=["model"])
def test_no_request_fails_when_the_prefill_server_is_killed(
    pair: Pair, expected: list[list[list[int]]], place: str
) -> None:
    pair.start_again()
    seed = 1 + PREFILL.index(place)
    pair.order.give(place, pair.prefill)
    assert at_once(pair.decode.tokens, prompts(seed, REQUESTS)) == expected[seed]
    assert pair.order.is_done()
    assert pair.prefill.process.wait(10) == -signal.SIGKILL
    pair.decode.wait_unused()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("place", DECODE)
def test_blocks_return_when_the_decode_server_is_killed(
    pair: Pair, expected: list[list[list[int]]], place: str
) -> None:
    pair.start_again()
    seed = 1 + len(PREFILL) + DECODE.index(place)
    pair.order.give(place, pair.decode)

    def ask(prompt: list[int]) -> list[int]:
        try:
            return pair.decode.tokens(prompt)
        except OSError:  # as a load balancer does, to any server
            return pair.prefill.tokens(prompt)

    assert at_once(ask, prompts(seed, REQUESTS)) == expected[seed]
    assert pair.order.is_done()
    assert pair.decode.process.wait(10) == -signal.SIGKILL
    pair.prefill.wait_unused(LEASE_S + 10)


@pytest.mark.timeout(600)
def test_what_a_decode_server_is_told_is_not_believed(pair: Pair, expected: list[list[list[int]]]) -> None:
    """Of another prompt, of an engine that is gone, of a lease that is over: the prompt is computed."""
    pair.start_again()
    asked = prompts(len(expected) + 1, 4, 400)
    params = [pair.prefill.prefill(prompt) for prompt in asked]
    # Each prompt with the hand-off of the one before.
    crossed = [
        pair.decode.tokens(prompt, kv_transfer_params=params[at - 1]) for at, prompt in enumerate(asked)
    ]
    assert crossed == [pair.prefill.tokens(prompt) for prompt in asked]
    text = pair.decode.log.read_text(errors="replace")
    assert text.count("tokens that was computed for it") == 4
    pair.prefill.wait_unused()
    broken = {**params[0]["kvpool"], "ticket": "AAAA"}
    wrong_ones: list[dict[str, Any]] = [{}, {"kvpool": {}}, {"kvpool": 5}, {"kvpool": broken}]
    for told in wrong_ones:
        prompt = prompts(len(expected) + 2, 1)[0]
        wrong = {"do_remote_prefill": True, **told}
        assert pair.decode.tokens(prompt, kv_transfer_params=wrong) == pair.prefill.tokens(prompt)


@pytest.mark.timeout(600)
def test_a_hand_off_of_an_engine_that_was_started_again_is_refused(pair: Pair) -> None:
    pair.start_again()
    [prompt] = prompts(1000, 1)
    params = pair.prefill.prefill(prompt)
    pair.prefill.kill()
    pair.start_again()
    assert pair.decode.tokens(prompt, kv_transfer_params=params) == pair.prefill.tokens(prompt)
    assert pair.decode.metric("vllm:kv_cache_usage_perc") == 0


@pytest.mark.timeout(600)
def test_a_prefill_server_that_stands_still_is_waited_for_as_long_as_its_lease_lasts(pair: Pair) -> None:
    pair.start_again()
    first, second = prompts(1001, 2)
    params = [pair.prefill.prefill(prompt) for prompt in (first, second)]
    pair.prefill.signal(signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(TimeoutError):  # the client gives up, and vLLM ends the request
        pair.decode.call(
            "/v1/completions",
            {"model": pair.decode.model, "prompt": second, "max_tokens": 8, "kv_transfer_params": params[1]},
            timeout=1,
        )
    found = pair.decode.tokens(first, kv_transfer_params=params[0])
    assert time.monotonic() - begun < LEASE_S + 10
    pair.decode.wait_unused()
    pair.prefill.signal(signal.SIGCONT)
    time.sleep(1)
    if pair.prefill.process.poll() is not None:  # UCX may end a process whose peer has gone
        pair.start_again()
    assert found == pair.prefill.tokens(first)
