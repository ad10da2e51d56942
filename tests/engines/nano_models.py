"""Models of a million random weights, with a tokenizer of 1,024 words, for engines without a network.

python nano_models.py FOLDER [NAME ...]
"""

from __future__ import annotations

import shutil
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

WORDS = 1024
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]

SPREAD = 0.15
"""Of the weights: wide enough that the tokens of a greedy run vary."""

_TOKENS = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DENSE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
_LONG = {"max_position_embeddings": 32_768}

MODELS: dict[str, tuple[type[Any], Any]] = {
    "llama": (
        LlamaForCausalLM,
        LlamaConfig(**_TOKENS, **_DENSE, **_LONG, num_hidden_layers=2, head_dim=32),
    ),
    # One layer of one head: an engine's own time is most of a step.
    "smallest": (
        LlamaForCausalLM,
        LlamaConfig(
            **_TOKENS, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1, head_dim=32, max_position_embeddings=131_072,
        ),
    ),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **_TOKENS, **_DENSE, **_LONG, num_hidden_layers=6, head_dim=32, sliding_window=64,
            layer_types=["sliding_attention"] * 5 + ["full_attention"], query_pre_attn_scalar=32,
        ),
    ),
    "qwen3_next": (
        Qwen3NextForCausalLM,
        Qwen3NextConfig(
            **_TOKENS, **_DENSE, **_LONG, num_hidden_layers=4, head_dim=64, linear_num_key_heads=2,
            linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64,
            linear_conv_kernel_dim=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
            shared_expert_intermediate_size=64, decoder_sparse_step=1,
            layer_types=["linear_attention"] * 3 + ["full_attention"],
        ),
    ),
    "mamba2": (
        Mamba2ForCausalLM,
        Mamba2Config(
            **_TOKENS, hidden_size=64, num_hidden_layers=2, state_size=16, num_heads=4, head_dim=32, expand=2,
            n_groups=1, chunk_size=32, conv_kernel=4, tie_word_embeddings=False,
        ),
    ),
}  # fmt: skip


def make(folder: Path, name: str) -> Path:
    """Makes a model in a folder of its name, unless it is there."""
    place = folder / name
    if place.exists():
        return place
    kind, config = MODELS[name]
    torch.manual_seed(0)
    model = kind(config)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.normal_(0, SPREAD)
    words = {word: number for number, word in enumerate(SPECIAL)}
    words |= {f"w{number}": number for number in range(len(SPECIAL), WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=SPECIAL[3]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as made:
        model.float().save_pretrained(made)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(made)
        with suppress(FileExistsError):  # another process was faster
            shutil.copytree(made, place)
    return place


if __name__ == "__main__":
    for each in sys.argv[2:] or MODELS:
        make(Path(sys.argv[1]), each)
