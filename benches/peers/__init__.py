"""The prefix caches of other engines."""
