"""The public path of `kvpool.serving.attention`."""

from kvpool.serving.attention import AttentionGroup, PoolAttention, plain_attention

__all__ = ["AttentionGroup", "PoolAttention", "plain_attention"]
