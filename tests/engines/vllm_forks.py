"""Imports vLLM once and runs pytest in forks of the process: the import takes the most time.

    python vllm_forks.py '[[ARGUMENT, ...], ...]'

Ends with 1 if one of them fails.
"""

from __future__ import annotations

import json
import os
import sys

import pytest
import vllm_on_kvpool


def passes(arguments: list[str]) -> bool:
    """Whether a run of pytest with these arguments does."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            status = int(pytest.main(arguments, plugins=[vllm_on_kvpool]))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return os.waitpid(process, 0)[1] == 0


if __name__ == "__main__":
    sys.exit(not all(passes(arguments) for arguments in json.loads(sys.argv[1])))
