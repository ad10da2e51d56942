"""The KV cache and states of a model, per token and per request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KvLayers:
    """Attention layers with keys and values of one shape.

    Attributes:
        layers: Numbers of the layers.
        k_head_num: Heads of a key.
        k_head_dim: Elements of a key head.
        v_head_num: Heads of a value.
        v_head_dim: Elements of a value head.
    """

    layers: tuple[int, ...]
    k_head_num: int
    k_head_dim: int
    v_head_num: int
    v_head_dim: int


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention: keys and values of all heads are computed from one latent vector.

    Attributes:
        layers: Numbers of the layers.
        head_num: Heads.
        kv_lora_rank: Elements of the latent vector.
        qk_rope_head_dim: Elements of the rotated part of a key, shared by all heads.
        qk_nope_head_dim: Elements of the part of a key that is computed from the latent vector.
        v_head_dim: Elements of a value head.
    """

    layers: tuple[int, ...]
    head_num: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class States:
    """Layers with a state of fixed size per request, in the terms of `GDNPool`.

    Attributes:
        kind: "Gated DeltaNet", "Kimi Delta Attention", "Mamba-2", "Mamba" or "short convolution".
        layers: Numbers of the layers.
        head_num: Value heads; for Mamba, which has none, its channels.
        head_k_dim: Elements of a key head; for Mamba, the size of the state.
        head_v_dim: Elements of a value head; 1 for Mamba.
        group_num: Key heads, or the groups of Mamba-2; 0 for Mamba, whose convolution has none.
        conv_kernel_size: Taps of the convolution.
        conv_channels: Channels of the convolution where they do not follow from heads: keys and queries of
            each head, or no heads at all (short convolutions, which have no recurrent state).
    """

    kind: str
    layers: tuple[int, ...]
    head_num: int
    head_k_dim: int
    head_v_dim: int
    group_num: int
    conv_kernel_size: int
    conv_channels: int | None = None

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: values, and keys and queries of each group."""
        if self.conv_channels is not None:
            return self.conv_channels
        return self.head_num * self.head_v_dim + 2 * self.group_num * self.head_k_dim


@dataclass(frozen=True)
class Chain:
    """Layers with one compressed entry for several tokens, of all tokens, as DeepSeek V4 has them.

    Attributes:
        layers: Numbers of the layers.
        ratio: Tokens that an entry stands for.
        index_dim: Elements of an entry's index key; 0 without.
        overlaps: Whether an entry pools the tokens of the one before, too.
    """

    layers: tuple[int, ...]
    ratio: int
    index_dim: int
    overlaps: bool


@dataclass(frozen=True)
class Model:
    """The layers of a model.

    Attributes:
        model_type: Model type in the configuration.
        layer_num: Layers, of all kinds.
        query_head_num: Query heads of attention.
        attention: Layers with keys and values, by shape; empty with `mla`.
        mla: Latent attention, in all attention layers or in none.
        states: Layers with states; None without.
        windowed: Attention layers that attend to the last `window` tokens only, or to those of a chunk.
        window: Size of the window or chunk; None without such layers.
        is_chunked: Whether they attend to the tokens of a chunk of `window` tokens.
        shared: Layers that use the keys and values of another, with that one.
        index_dim: Elements of the index key that each layer keeps beside the latent vector; 0 without.
        chains: Layers with compressed entries, by ratio.
        dtype: Data type of weights and activations in the configuration; None if missing.
        max_context_len: The most tokens of a request; None if the configuration does not limit them.
        notes: Assumptions, and parts that are not counted.
    """

    model_type: str
    layer_num: int
    query_head_num: int
    attention: tuple[KvLayers, ...]
    mla: Mla | None
    states: States | None
    windowed: tuple[int, ...]
    window: int | None
    is_chunked: bool
    shared: tuple[tuple[int, int], ...]
    index_dim: int
    chains: tuple[Chain, ...]
    dtype: str | None
    max_context_len: int | None
    notes: tuple[str, ...]
