"""What models keep for their requests, from their published configurations."""

from kvpool.models.layout import layout_of, read_layout

__all__ = ["layout_of", "read_layout"]
