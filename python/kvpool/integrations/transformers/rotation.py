"""Rotary embeddings whose factors depend on the longest request of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpool.errors import ConfigError
from kvpool.integrations.transformers.layout import name_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["check_rotation"]


def check_rotation(model: PreTrainedModel, longest: int) -> None:
    """Refuse lengths at which the factors of a model's rotary embeddings change.

    Beyond an original length, "dynamic" and "longrope" embeddings rotate every token of a step by other
    factors, also those of short requests. Keys that were written before keep the factors of before, so that
    the result would depend on what else is in a step, and on how a prompt is cut.

    Args:
        model: The model.
        longest: The most tokens of a request.

    Raises:
        ConfigError: If requests may be so long.
    """
    for module in model.modules():
        found: Any = getattr(module, "rope_type", None)
        kinds = found if isinstance(found, dict) else {None: found}
        for layer_type, kind in kinds.items():
            if not isinstance(kind, str) or not ("dynamic" in kind or kind == "longrope"):
                continue
            original = _original_length(module, layer_type, kind)
            if original is None or longest > original:
                upto = f"{longest} tokens" if original is None else f"{original}"
                raise ConfigError(
                    f"{name_of(model)} rotates queries and keys by factors (rope_type={kind!r}) that change "
                    f"for all requests of a step when one of them has more than {upto} tokens, which is not "
                    f"supported: max_context_len={longest} must be at most {upto}"
                )


def _original_length(module: Any, layer_type: str | None, kind: str) -> int | None:  # noqa: ANN401
    """Return up to how many tokens the factors are the same, where that is known."""
    parameters: Any = getattr(module.config, "rope_parameters", None) or {}
    if layer_type is not None:
        parameters = parameters.get(layer_type) or {}
    if kind == "longrope":
        name = "original_max_position_embeddings"
        # A model may have both, and begin anew where its own is passed.
        found = [parameters.get(name), getattr(module.config, name, None)]
    else:
        found = [getattr(module, "original_max_seq_len", None)]
    return min((int(length) for length in found if length is not None), default=None)
