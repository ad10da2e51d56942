"""Command-line tools; they need the extra `kvpool[tools]`."""
