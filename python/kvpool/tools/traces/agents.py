"""A seeded generator of sessions of coding agents, by published statistics.

The numbers are those of TraceLab (arXiv:2606.30560, https://github.com/uw-syfi/TraceLab: 4,265 sessions with
357,161 calls) unless another source is named. What nobody has published is an assumption, and says so.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvpool.errors import ConfigError
from kvpool.tools.traces.contexts import Context
from kvpool.tools.traces.trace import END, Trace
from kvpool.tools.units import parse_count

if TYPE_CHECKING:
    from numpy.typing import NDArray

PRESET = "coding"
"""The name of the published workload, which a specification may begin with."""


@dataclass(frozen=True)
class Percentiles:
    """A distribution by some of its percentiles, between which its logarithm is linear.

    Attributes:
        points: Pairs of a probability and the value that is not exceeded with it, ascending, from 0 to 1.
        shift: Added to a value before its logarithm is taken, so that 0 is possible.
    """

    points: tuple[tuple[float, float], ...]
    shift: float = 0.0

    def sample(self, generator: np.random.Generator) -> float:
        """Return a value."""
        probabilities, values = zip(*self.points, strict=True)
        logarithms = np.log(np.add(values, self.shift))
        return float(np.exp(np.interp(generator.random(), probabilities, logarithms)) - self.shift)


# The last point of each, which is not published, is where the mean is the published one.
REQUESTS = Percentiles(((0, 1), (0.585, 1), (0.9, 18), (0.99, 137), (1, 160)))
"""Messages of the user in a session: one in 58.5 %, p90 18, p99 137, mean 9.2."""
TOOL_STEPS = Percentiles(((0, 0), (0.25, 0), (0.5, 1), (0.9, 20), (0.99, 86), (1, 160)), shift=1.0)
"""Calls of the model after results of tools, for each message: p25 0, p50 1, p90 20, p99 86, mean 7.8."""
FIRST_STEPS = Percentiles(((0, 0), (0.25, 4), (0.5, 15), (0.9, 30), (1, 90)), shift=1.0)
"""Likewise, for the first message: p25 4 and p50 15 are those of whole sessions, 58.5 % of which have no
other. The rest is assumed, so that sessions have a mean of 73.6 calls after results of tools."""
TOOL_S = Percentiles(((0, 0.01), (0.5, 0.3), (0.9, 13.6), (0.96, 60), (0.99, 300), (1, 2_000)))
"""Seconds of a tool: p50 0.3, p90 13.6, mean 16.8; 3.1 to 4.9 % take more than a minute. p99 is assumed."""
HUMAN_S = Percentiles(
    ((0, 5), (0.5, 84), (0.75, 300), (0.9, 1_236), (0.957, 3_600), (0.99, 50_040), (1, 330_000))
)
"""Seconds until the next message of the user: p50 1.4 min, p90 20.6 min, p99 13.9 h, mean 2,401 to 3,260 s;
70 to 80 % take at most five minutes, 94.9 to 96.4 % at most an hour."""

_GENERATION_MEDIAN_S, _GENERATION_SIGMA = 5.7, 1.06
"""Of a log-normal distribution with the published p50 of 5.7 s and p90 of 22.2 s."""
_OUTPUT_MEDIAN, _OUTPUT_SIGMA = 218.0, 1.32
"""Tokens of an output: medians 252 and 184 (Claude and Codex), mean 523 (186.9 M tokens in all calls)."""
_GROWTH_MEDIAN, _GROWTH_SIGMA = 650.0, 1.3
"""Tokens by which a prompt is longer than the one before, apart from the least. With it the median is 870
(857 and 886 are published) and the mean 1,750 (1,700 to 1,800)."""
_LEAST_RESULT = 16
"""Tokens of a message or a result at least (assumed): the rest of the growth is the output before."""
_BATCH = 0.05
"""The chance of a step to start sub-agents, in a session that has some (assumed)."""
_MOST_SUB_AGENTS = 3
"""Sub-agents that one step starts at most; each number is as likely (assumed)."""


@dataclass(frozen=True)
class AgentsSpec:
    """A workload of coding agents.

    Attributes:
        sessions: Sessions that start.
        sessions_per_hour: Sessions that start in an hour, at random times (a Poisson process; assumed).
        products: Agents with a prompt of tools of their own (TraceLab has two, Claude Code and Codex).
        tools_tokens: Tokens of that prompt, which sessions of a product share (27,217 in TraceLab's example).
        projects: Projects, each of one product (TraceLab has 43 developers).
        project_tokens: Tokens of a project's instructions, which its sessions share (assumed).
        sub_agents: Share of sessions with sub-agents (44 %: vLLM's AgentX, vllm-project/vllm#57103).
        forks: Share of sub-agents that begin with the context of the agent that starts them; the others begin
            with the prompt of tools (assumed).
        abandoned: Share of sessions that end in the middle of the steps of their last message (assumed).
        context: Tokens of a context at most (256 K in Codex). A prompt that would be longer is compacted: a
            call writes a summary, which follows the prompts of tools and project in place of everything else.
            (9.7 % of TraceLab's sessions are compacted, 86.5 % of the times within an agent's steps.)
        summary: Tokens of a summary (assumed).
        pauses: Factor of all pauses, of tools and of users.
        growth: Factor of the tokens by which prompts grow.
        block: Tokens of a block of the trace.
    """

    sessions: int = 100
    sessions_per_hour: float = 60.0
    products: int = 2
    tools_tokens: int = 27_000
    projects: int = 43
    project_tokens: int = 2_000
    sub_agents: float = 0.44
    forks: float = 0.5
    abandoned: float = 0.1
    context: int = 256_000
    summary: int = 8_000
    pauses: float = 1.0
    growth: float = 1.0
    block: int = 512

    def __post_init__(self) -> None:
        for name in ("sessions", "products", "projects", "summary", "block"):
            _check(name, getattr(self, name), 1, 1 << 31)
        for name in ("tools_tokens", "project_tokens"):
            _check(name, getattr(self, name), 0, 1 << 31)
        for name in ("sub_agents", "forks", "abandoned"):
            _check(name, getattr(self, name), 0, 1)
        for name in ("sessions_per_hour", "pauses", "growth"):
            _check(name, getattr(self, name), 1e-6, 1e6)
        _check("context", self.context, 2 * (self.tools_tokens + self.project_tokens + self.summary), 1 << 31)


def _check(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ConfigError(f"agents: {name} must be from {least:,} to {most:,}, not {value:,}")


def parse_agents(text: str) -> AgentsSpec:
    """Parse a specification: `coding`, or changes of it such as `sessions=50,sub_agents=0,context=1M`.

    Raises:
        ConfigError: If a name is unknown, or a value is not a number or not allowed.
    """
    is_whole = {field.name: field.type == "int" for field in fields(AgentsSpec)}
    changes: dict[str, Any] = {}
    for at, part in enumerate(text.split(",")):
        name, is_set, value = (piece.strip() for piece in part.partition("="))
        if at == 0 and not is_set and name == PRESET:
            continue
        if name not in is_whole or name in changes:
            known = ", ".join(is_whole)
            problem = "is given twice" if name in changes else f"is none of {PRESET} and {known}"
            raise ConfigError(f"agents: {name!r} {problem}")
        number = parse_count(value)
        if number is None or (is_whole[name] and number.denominator > 1):
            kind = "a whole number" if is_whole[name] else "a number"
            raise ConfigError(f"agents: {name} must be {kind} such as 50 or 256K, not {value!r}")
        changes[name] = int(number) if is_whole[name] else float(number)
    return replace(AgentsSpec(), **changes)


class _Call(NamedTuple):
    """A call of the model at a time in seconds."""

    at_s: float
    input_len: int
    output_len: int
    blocks: NDArray[np.int64]
    session: int
    context: int
    followed_by: str = ""


class _Agents:
    """Makes sessions one after the other, and so calls that are not in order of time."""

    def __init__(self, spec: AgentsSpec, seed: int) -> None:
        self.spec = spec
        self.calls: list[_Call] = []
        self.contexts = count()
        self._seed = seed
        nothing = Context(spec.block)
        tools = []
        for _ in range(spec.products):
            tools.append(nothing.copy())
            tools[-1].extend(spec.tools_tokens)
        self._tools = [tools[project % spec.products] for project in range(spec.projects)]
        self._projects = [context.copy() for context in self._tools]
        for context in self._projects:
            context.extend(spec.project_tokens)

    def run(self) -> None:
        """Make the calls of all sessions."""
        arrivals = np.random.default_rng(self._seed)
        at_s = 0.0
        for session in range(self.spec.sessions):
            at_s += arrivals.exponential(3_600.0 / self.spec.sessions_per_hour)
            self._run_session(session, at_s)

    def _run_session(self, session: int, at_s: float) -> None:
        # Each session has random numbers of its own, so that it does not depend on the others.
        generator = np.random.default_rng((self._seed, session))
        project = int(generator.integers(self.spec.projects))
        has_sub_agents = generator.random() < self.spec.sub_agents
        is_abandoned = generator.random() < self.spec.abandoned
        agent = _Agent(self, self._projects[project], session, generator)
        messages = int(REQUESTS.sample(generator))
        for message in range(messages):
            steps = int((TOOL_STEPS if message else FIRST_STEPS).sample(generator))
            if is_abandoned and message == messages - 1:
                steps = int(generator.integers(steps + 1))
            at_s = agent.call(at_s)
            for _ in range(steps):
                starts_sub_agents = generator.random() < _BATCH
                result_s = at_s + agent.pause(TOOL_S)
                agent.wait_for("tool")
                if has_sub_agents and starts_sub_agents:
                    agent.wait_for("sub-agents")
                    result_s = self._run_sub_agents(agent, self._tools[project], at_s)
                at_s = agent.call(result_s)
            agent.wait_for("user")
            at_s += agent.pause(HUMAN_S)
        # One that is abandoned waited for a tool, which never answers.
        agent.wait_for("tool" if is_abandoned else END)

    def _run_sub_agents(self, parent: _Agent, tools: Context, at_s: float) -> float:
        """Run sub-agents at the same time, and return when the last one ends."""
        ends_s = []
        (generator,) = parent.generator.spawn(1)
        for _ in range(int(generator.integers(1, _MOST_SUB_AGENTS, endpoint=True))):
            is_fork = generator.random() < self.spec.forks
            agent = _Agent(self, parent.context if is_fork else tools, parent.session, generator)
            end_s = agent.call(at_s)
            for _ in range(int(TOOL_STEPS.sample(generator))):
                agent.wait_for("tool")
                end_s = agent.call(end_s + agent.pause(TOOL_S))
            agent.wait_for(END)
            ends_s.append(end_s)
        return max(ends_s)


class _Agent:
    """An agent with its context, which begins with `base`."""

    def __init__(self, agents: _Agents, base: Context, session: int, generator: np.random.Generator) -> None:
        self.context = base.copy()
        self.session = session
        self.generator = generator
        self._agents, self._spec, self._kept, self._output_len = agents, agents.spec, len(base), 0
        self._number, self._last_call = next(agents.contexts), -1

    def pause(self, distribution: Percentiles) -> float:
        """Return a pause in seconds."""
        return self._spec.pauses * distribution.sample(self.generator)

    def wait_for(self, followed_by: str) -> None:
        """Say what follows the last call."""
        calls = self._agents.calls
        calls[self._last_call] = calls[self._last_call]._replace(followed_by=followed_by)

    def call(self, at_s: float) -> float:
        """Call the model with the output before and a new message or result, and return when it ends."""
        growth = self._tokens(self._spec.growth * _GROWTH_MEDIAN, _GROWTH_SIGMA)
        growth = min(max(growth, self._output_len + _LEAST_RESULT), self._spec.context // 4)
        if len(self.context) + growth > self._spec.context:
            at_s = self._add(at_s, self._spec.summary)
            self.context = self.context.copy(min(self._kept, self._spec.context // 2))
            self.context.extend(self._spec.summary)
        self.context.extend(growth)
        self._output_len = min(self._tokens(_OUTPUT_MEDIAN, _OUTPUT_SIGMA), self._spec.context // 8)
        return self._add(at_s, self._output_len)

    def _tokens(self, median: float, sigma: float) -> int:
        """Return a number of tokens, at least 1, of a log-normal distribution."""
        return max(1, round(self.generator.lognormal(np.log(median), sigma)))

    def _add(self, at_s: float, output_len: int) -> float:
        """Add a call, and return when it ends."""
        prompt = self.context.prompt()
        calls = self._agents.calls
        self._last_call = len(calls)
        calls.append(_Call(at_s, len(self.context), output_len, prompt, self.session, self._number))
        return at_s + self.generator.lognormal(np.log(_GENERATION_MEDIAN_S), _GENERATION_SIGMA)


def agents_trace(spec: AgentsSpec, seed: int) -> Trace:
    """Generate a trace of coding agents.

    A session has messages of a user. After each one the agent calls the model, which calls tools, whose
    results are in the next call, until it answers. Each prompt is the one before with the output and what is
    new, until it is compacted. Pauses between the calls are those of the model, of tools and of users; they
    do not depend on how a cache does. Sub-agents run at the same time, while their parent waits.

    Calls tell what follows them: a tool, sub-agents, the user or the end. Of a summary nothing is told, and
    an abandoned session waits for a tool.

    The same arguments give the same trace.

    Args:
        spec: The workload.
        seed: Any integer from 0 on.

    Raises:
        ConfigError: If `seed` is negative.
    """
    if seed < 0:
        raise ConfigError(f"agents: seed must be at least 0, not {seed}")
    agents = _Agents(spec, seed)
    agents.run()
    calls = sorted(agents.calls, key=lambda call: call.at_s)
    arrival_s = np.array([call.at_s for call in calls])
    return Trace(
        f"agents (seed {seed})",
        arrival_s - arrival_s[0],
        np.array([call.input_len for call in calls], dtype=np.int64),
        np.array([call.output_len for call in calls], dtype=np.int64),
        tuple(call.blocks for call in calls),
        spec.block,
        np.array([call.session for call in calls], dtype=np.int64),
        np.array([call.context for call in calls], dtype=np.int64),
        np.array([call.followed_by for call in calls]),
    )
