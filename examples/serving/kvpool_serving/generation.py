"""A prompt and its generated tokens, whoever serves them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvpool_serving.sampling import Sampling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvpool.typing import Namespace


@dataclass(eq=False)
class Generation(ABC):
    """A prompt and its generated tokens.

    Attributes:
        prompt: Tokens of the prompt.
        max_new_tokens: The most tokens to generate.
        stop_tokens: Tokens that end the generation; such a token is the last of `tokens`.
        sampling: Sampling parameters.
        namespace: Namespace of the tokens in prefix caches.
        tokens: Tokens generated so far.
    """

    prompt: list[int]
    max_new_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    sampling: Sampling = field(default_factory=Sampling)
    namespace: Namespace = None
    tokens: list[int] = field(default_factory=list)

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether the request gets no more tokens."""

    @property
    def is_complete(self) -> bool:
        """Whether all tokens are generated."""
        tokens = self.tokens
        return len(tokens) >= self.max_new_tokens or bool(tokens and tokens[-1] in self.stop_tokens)

    @property
    def seq_len(self) -> int:
        """Number of prompt and generated tokens."""
        return len(self.prompt) + len(self.tokens)

    def follow(self, step: Callable[[], object]) -> Iterator[int]:
        """Yield the tokens as they are generated. Call `step` to generate more."""
        yielded = 0
        while yielded < len(self.tokens) or not self.is_over:
            if yielded < len(self.tokens):
                yielded += 1
                yield self.tokens[yielded - 1]
            else:
                step()
