"""Command-line tools over the pools; they need the extra `kvpool[tools]`."""
