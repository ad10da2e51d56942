"""Tiny models of `transformers` with random weights, and what they generate by themselves."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import devices
import torch
import transformers
from devices import to_current
from transformers import (
    BambaConfig,
    DeepseekV3Config,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

VOCAB = 128
# The most that logits may differ between computations; the largest are about 5.
NOISE = 5e-4
# The seed of weights with which no two candidates are that close.
SEEDS = {"qwen3": 2, "llama": 2, "mistral": 1, "gpt_oss": 0, "gemma2": 1, "deepseek_v3": 11, "qwen3_next": 4}

TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Wide enough that tokens depend on the whole prompt.
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# Of the padded prompts; windows of models have 16 tokens.
PROMPT_LENS = (20, 13, 1)
# Every expert computes every token: a choice among them would turn rounding into another token.
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 4}

# A model that writes to its recurrent states in place.
STATES_IN_PLACE = BambaConfig(
    **TINY, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=16
)

CONFIGS: dict[str, Any] = {
    "qwen3": lambda: Qwen3Config(**TINY, head_dim=16),
    "llama": lambda: LlamaConfig(**TINY),
    # Window shorter than most requests.
    "mistral": lambda: MistralConfig(**TINY, sliding_window=16),
    # Attention sinks; a window shorter than most requests in every other layer.
    "gpt_oss": lambda: GptOssConfig(
        **TINY, head_dim=16, num_local_experts=4, num_experts_per_tok=4, sliding_window=16
    ),
    # Capped scores, with a cap that most of them come near; the same windows.
    "gemma2": lambda: Gemma2Config(
        **TINY,
        head_dim=16,
        sliding_window=16,
        attn_logit_softcapping=2.0,
        query_pre_attn_scalar=16,
        tie_word_embeddings=False,
    ),
    # Multi-head latent attention: keys of 24, values of 12 elements.
    "deepseek_v3": lambda: DeepseekV3Config(
        **{**TINY, "num_key_value_heads": 4},
        **EXPERTS,
        n_shared_experts=1,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,
    ),
    # Gated DeltaNet, attention, Gated DeltaNet; heads of K and V differ in number and elements.
    "qwen3_next": lambda: Qwen3NextConfig(
        **{**TINY, "num_hidden_layers": 3},
        **EXPERTS,
        head_dim=16,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_conv_kernel_dim=4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        num_experts=4,
        shared_expert_intermediate_size=32,
    ),
}
MODELS = list(CONFIGS)


make: Any = transformers.AutoModelForCausalLM.from_config


@cache
def built(config: str, device: str, dtype: torch.dtype = torch.float32) -> Any:  # noqa: ANN401
    """A model with random weights, the same every time."""
    torch.manual_seed(SEEDS[config])
    model = make(CONFIGS[config]())
    return model.to(dtype).to(device).eval()


@cache
def reference(config: str, device: str) -> Any:  # noqa: ANN401
    """The same model with its own attention."""
    return built.__wrapped__(config, device)


def a_model(config: str, dtype: torch.dtype = torch.float32) -> Any:  # noqa: ANN401
    return built(config, devices.current(), dtype)


def padded() -> dict[str, torch.Tensor]:
    """Three prompts, padded on the left."""
    chance = torch.Generator().manual_seed(6)
    longest = max(PROMPT_LENS)
    ids = torch.randint(1, VOCAB, (len(PROMPT_LENS), longest), generator=chance)
    mask = torch.arange(longest) >= longest - torch.tensor(PROMPT_LENS)[:, None]
    return {"input_ids": to_current(ids * mask), "attention_mask": to_current(mask.long())}


class Task(NamedTuple):
    """A prompt and the number of tokens to generate."""

    prompt: tuple[int, ...]
    new_tokens: int


def some_tasks(n: int, longest: int = 70, most: int = 40) -> list[Task]:
    chance = torch.Generator().manual_seed(n)

    def up_to(most: int) -> int:
        return int(torch.randint(1, most + 1, (), generator=chance))

    def prompt() -> tuple[int, ...]:
        return tuple(torch.randint(VOCAB, (up_to(longest),), generator=chance).tolist())

    return [Task(prompt(), up_to(most)) for _ in range(n)]


@cache
def generated(config: str, device: str, task: Task) -> tuple[list[int], float]:
    """The tokens of the model alone, and the smallest gap to the second-best candidate."""
    out = reference(config, device).generate(
        torch.tensor([task.prompt], device=device),
        max_new_tokens=task.new_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(out.logits).topk(2).values
    return out.sequences[0, len(task.prompt) :].tolist(), float((best[:, 0] - best[:, 1]).min())


def alone(config: str, tasks: Sequence[Task]) -> list[list[int]]:
    """The tokens of the model alone for each request; no gap is small enough for noise to change a token."""
    found = [generated(config, devices.current(), task) for task in tasks]
    assert min(gap for _, gap in found) > NOISE
    return [tokens for tokens, _ in found]


def logit_gaps(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:  # noqa: ANN401
    """By how much the logit of each token is below that of the model's best one after those before it."""
    text = to_current(torch.tensor([[*prompt, *tokens]]))
    with torch.no_grad():
        logits: torch.Tensor = model(text, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return logits.amax(1) - logits.gather(1, text[0, len(prompt) :, None])[:, 0]


def check_alone(config: str, prompt: Sequence[int], tokens: Sequence[int]) -> None:
    """Each token is the best for the model alone after those before it, or so near that noise decides."""
    assert float(logit_gaps(reference(config, devices.current()), prompt, tokens).max()) <= NOISE
