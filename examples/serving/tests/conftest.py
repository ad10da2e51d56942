"""The tests of the engine, with the options and fixtures of the library's."""

from __future__ import annotations

import sys

pytest_plugins = ["shared_fixtures"]

# It needs `transformers`, which has no version for older ones.
collect_ignore = ["test_serve.py"] if sys.version_info < (3, 11) else []
