"""Writes which families of `transformers` run on the pools into `docs/engines/transformers.md`.

Every type of causal language model that the installed `transformers` has and that a small configuration can
be made for is run, with random weights in float32 and its own plain attention, and once more with windows of
16 tokens where it has a setting for them:

    python docs/families.py                 # all of them, in some minutes
    python docs/families.py llama phimoe    # some, without writing

`PooledModel`: three requests of unequal length in chunks, then token by token, beside the model's own forward
pass. `PooledCache`: the tokens of `generate()` for a padded batch, beside those with `DynamicCache`.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
import re
import sys
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as FAMILIES

from kvpool import BatchPlanner, ConfigError
from kvpool.integrations.transformers import PooledCache, PooledModel
from kvpool.integrations.transformers.layout import cache_argument

PAGE = Path(__file__).parent / "engines" / "transformers.md"
BEGIN, END = "<!-- families: docs/families.py -->\n", "<!-- /families -->\n"

VOCAB = 256
DECODED = 6
LENGTHS = (9, 45, 76)
MAX_CONTEXT_LEN = 192

NEAR = 1e-4
"""The most that logits may differ, as a part of the largest one."""

MOST_WEIGHTS = 2e7
"""A configuration with more is none for this program."""

# Sizes by the names that configurations have for them.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "emb_dim"), 64
    ),
    **dict.fromkeys(("word_embed_proj_dim", "lru_width"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("encoder_ffn_dim", "d_inner", "d_ff", "dim_ff", "dff", "mamba_d_ssm"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "moe_num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("expert_ffn_hidden_size",), 32),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_decoder_layers", "encoder_layers", "num_encoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("num_decoder_attention_heads", "time_step_rank", "conv_kernel"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "kv_channels", "attention_head_dim", "dim_head"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"), 512),
    **dict.fromkeys(("context_length", "max_target_positions"), 512),
    "max_source_positions": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    "tie_word_embeddings": False,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "first_k_dense_replace": 1,
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "hidden_size_per_layer_input"), 16),
    **dict.fromkeys(("mamba_d_state", "mamba_d_head", "state_size", "ssm_state_size", "mamba_head_dim"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "chunk_size"), 16),
    **dict.fromkeys(("mamba_chunk_size", "attention_window_size"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    **dict.fromkeys(("image_token_id", "image_token_index"), 5),
    "audio_token_id": 6,
    "video_token_id": 7,
    "vision_start_token_id": 8,
    "vision_end_token_id": 9,
    "embedding_multiplier": 1.0,
    "vocab_size_per_layer_input": VOCAB,
    "is_decoder": True,
    "add_cross_attention": False,
    "is_encoder_decoder": False,
}

# Windows, by the names that configurations have for them.
WINDOWS: dict[str, Any] = {
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "window_size", "local_attention"), 16),
    **dict.fromkeys(("sliding_window_size", "keep_window_size", "index_topk"), 16),
    "floor_scale": 8,
    "use_sliding_window": True,
    "max_window_layers": 2,
}

_ALL_HEADS = {"num_key_value_heads": 4}
_HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_WINDOWS: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16}

# Options that a family needs besides.
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"), _ALL_HEADS
    ),
    **dict.fromkeys(("glm_moe_dsa", "minicpm3", "sarvam_mla", "youtu"), _ALL_HEADS),
    **dict.fromkeys(("dots3_note", "dots3_note_text"), _ALL_HEADS),
    "bamba": {"attn_layer_indices": [1, 3]},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {**_WINDOWS, "rope_parameters": dict.fromkeys(_WINDOWS["layer_types"], _ROPE)},
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "dots1": {"n_shared_experts": 1},
    "gemma3n_text": {**_WINDOWS, "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 16},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {**_HYBRID, **_ALL_HEADS},
    "bailing_hybrid": {**_HYBRID, **_ALL_HEADS},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {**_ALL_HEADS, "head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2},
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [16, 32]},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}


class Verdict(NamedTuple):
    """How a family runs: "exact", "refused", "untested" or "WRONG", and why."""

    is_what: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.is_what}: {self.why}" if self.why else self.is_what


class UntestedError(Exception):
    """There is no small model of a family that generates by itself."""


def config_of(family: str, *, windows: bool = False) -> Any:  # noqa: ANN401 - of `transformers`
    """Make a small configuration of a family, or of a part of one."""
    made: Any = CONFIG_MAPPING[family]
    names = {field.name for field in dataclasses.fields(made)}
    options = {name: value for name, value in SIZES.items() if name in names} | OWN.get(family, {})
    if windows:
        options |= {name: value for name, value in WINDOWS.items() if name in names}
    for name, part in (made.sub_configs or {}).items():
        kind = getattr(part, "model_type", "")
        if kind in CONFIG_MAPPING and name not in options:
            options[name] = config_of(kind)
    return made(**options)


def has_windows(family: str) -> bool:
    """Return whether a family has a setting for windows."""
    names = {field.name for field in dataclasses.fields(CONFIG_MAPPING[family])}
    return bool(names & WINDOWS.keys())


def model_of(family: str, *, windows: bool) -> Any:  # noqa: ANN401 - of `transformers`
    """Make a small model with random weights, so wide that tokens depend on the whole prompt."""
    make: Any = AutoModelForCausalLM.from_config
    try:
        config = config_of(family, windows=windows)
        with torch.device("meta"):
            weights = sum(weight.numel() for weight in make(config).parameters())
    except Exception as error:  # whatever a configuration raises
        raise UntestedError("no configuration") from error
    if weights > MOST_WEIGHTS:
        raise UntestedError("no small configuration")
    try:
        torch.manual_seed(0)
        model = make(config, attn_implementation="eager", dtype=torch.float32).eval()
        chance = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim > 1:
                    scale = 0.6 if "embed" in name else 1.2 / weight.shape[-1] ** 0.5
                    weight.copy_(torch.randn(weight.shape, generator=chance) * scale)
        model.config.eos_token_id = None
        model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, bos_token_id=1)
        model.generate(**padded(), max_new_tokens=2)
    except Exception as error:  # whatever a model raises
        raise UntestedError("the small model does not generate without pools either") from error
    return model


def padded() -> dict[str, torch.Tensor]:
    """Return three prompts, padded on the left."""
    longest, chance = max(LENGTHS) // 2, torch.Generator().manual_seed(6)
    mask = torch.arange(longest) >= longest - torch.tensor(LENGTHS)[:, None] // 2
    ids = torch.randint(10, VOCAB, (len(LENGTHS), longest), generator=chance)
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


def own_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
    """Return the logits of the prompt at once, then token by token."""
    states = DynamicCache(config=model.config.get_text_config(decoder=True))
    takes = inspect.signature(model.forward).parameters
    logits, start = [], 0
    for length in (len(tokens) - DECODED, *([1] * DECODED)):
        end = start + length
        options: dict[str, Any] = {cache_argument(model): states}
        if "attention_mask" in takes:
            options["attention_mask"] = torch.ones(1, end, dtype=torch.int64)
        if "position_ids" in takes:
            options["position_ids"] = torch.arange(start, end)[None]
        with torch.no_grad():
            logits.append(model(tokens[None, start:end], use_cache=True, **options).logits[0])
        start = end
    return torch.cat(logits)


def difference(model: Any, pooled: PooledModel) -> float:  # noqa: ANN401
    """Return the largest difference of logits over pools, as a part of the largest logit."""
    chance = torch.Generator().manual_seed(1)
    requests = [torch.randint(10, VOCAB, (length,), generator=chance) for length in LENGTHS]
    wanted = [own_logits(model, tokens) for tokens in requests]
    planner = BatchPlanner(pooled.table, pooled.allocator, len(requests), 1024)
    rows = pooled.table.alloc(len(requests)) or []
    pooled.start(rows)
    done, found = [0] * len(requests), 0.0
    while running := [i for i, tokens in enumerate(requests) if done[i] < len(tokens)]:
        ends = []
        for i in running:
            left = len(requests[i]) - DECODED - done[i]
            chunk = int(torch.randint(1, 24, (), generator=chance))
            ends.append(done[i] + (min(chunk, left) if left > 0 else 1))
        plan = planner.extend([rows[i] for i in running], [done[i] for i in running], ends)
        if plan is None:
            raise UntestedError("the pools are too small")
        new = torch.cat([requests[i][done[i] : end] for i, end in zip(running, ends, strict=True)])
        for i, end, logits in zip(running, ends, pooled.forward(new, plan), strict=True):
            gap = (logits - wanted[i][end - 1]).nan_to_num(nan=torch.inf, posinf=0, neginf=0)
            found = max(found, float(gap.abs().max()))
            done[i] = end
    largest = max(float(logits.nan_to_num(neginf=0).abs().max()) for logits in wanted)
    return found / largest


def in_pooled_model(model: Any) -> Verdict:  # noqa: ANN401
    """Run a model in `PooledModel`, beside its own forward pass."""
    try:
        pooled = PooledModel(copy.deepcopy(model), 1024, 8, MAX_CONTEXT_LEN, page_size=16)
        found = difference(model, pooled)
    except ConfigError as error:
        return Verdict("refused", why_of(str(error)))
    return Verdict("exact") if found <= NEAR else Verdict("WRONG", f"by {found:.1e} of the largest logit")


def in_pooled_cache(model: Any) -> Verdict:  # noqa: ANN401
    """Let a model generate with `PooledCache`, beside `DynamicCache`."""
    inputs = padded()
    wanted = model.generate(**inputs, max_new_tokens=20)
    try:
        with PooledCache(model, 1024, len(LENGTHS), page_size=16) as cache:
            found = model.generate(**inputs, max_new_tokens=20, **{cache_argument(model): cache})
    except ConfigError as error:
        return Verdict("refused", why_of(str(error)))
    return Verdict("exact") if torch.equal(found, wanted) else Verdict("WRONG", "other tokens")


def why_of(message: str) -> str:
    """Return the reason of a refusal, without the names of model and layer, and without numbers."""
    reason = re.sub(r"^[\w.-]+(: layer \d+ |: | )", "", message)
    reason = re.sub(r" \(heads[^)]*\) of the shape.*", " of another shape than other layers", reason)
    reason = re.split(
        r"; | \(it | \(a lower|, which is not supported| \(check=False|: \w+Error: | \(layer", reason
    )[0]
    return re.sub(r"\b\d+\b", "N", re.sub(r"\blayer \d+", "a layer", reason))


def check(family: str) -> dict[str, Verdict]:
    """Return how a family runs in each class: with windows and without, the worse of both."""
    found: dict[str, list[Verdict]] = {"PooledModel": [], "PooledCache": []}
    for windows in (False, True):
        if windows and not has_windows(family):
            continue
        try:
            model = model_of(family, windows=windows)
        except UntestedError as error:
            if not windows:
                return dict.fromkeys(found, Verdict("untested", str(error)))
            continue
        for name, run in (("PooledModel", in_pooled_model), ("PooledCache", in_pooled_cache)):
            verdict = run(model)
            if windows and verdict.is_what == "refused" and found[name][0].is_what == "exact":
                verdict = Verdict("exact without windows", verdict.why)
            found[name].append(verdict)
    order = ("WRONG", "refused", "exact without windows", "exact")
    return {name: min(verdicts, key=lambda one: order.index(one.is_what)) for name, verdicts in found.items()}


def written(found: dict[str, dict[str, Verdict]]) -> str:
    """Return the lists of the page."""
    lines = [f"With transformers {transformers.__version__}, {len(found)} families:", ""]
    for name in ("PooledModel", "PooledCache"):
        by_verdict: dict[Verdict, list[str]] = defaultdict(list)
        for family, verdicts in found.items():
            by_verdict[verdicts[name]].append(family)
        order = ["exact", "exact without windows", "refused", "untested", "WRONG"]
        rows = sorted(
            by_verdict.items(), key=lambda row: (order.index(row[0].is_what), -len(row[1]), row[0].why)
        )
        lines += [f"| `{name}` | families | |", "|---|---:|---|"]
        lines += [f"| {verdict} | {len(names)} | {', '.join(names)} |" for verdict, names in rows]
        lines.append("")
    return "\n".join([*lines, ""])


def main(families: list[str]) -> int:
    """Run families, and write the page if these are all of them."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    found = {}
    for family in families or FAMILIES:
        found[family] = check(family)
        print(
            family, *(f"{name}: {verdict}" for name, verdict in found[family].items()), sep="\n  ", flush=True
        )
    if not families:
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(before + BEGIN + written(found) + END + rest.split(END)[1])
    return any(verdict.is_what == "WRONG" for verdicts in found.values() for verdict in verdicts.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
