"""SGLang's prefix cache over kvpool's tree core, without an engine: it does what it does over SGLang's own.

`make test-engines` has all configurations of SGLang's test kit at length.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from sglang_on_cpu import HERE, require, run

if TYPE_CHECKING:
    from pathlib import Path


def test_each_kind_of_model_and_every_policy(tmp_path: Path) -> None:
    require()
    done = run(tmp_path, str(HERE / "tree_briefly.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads(done.stdout.splitlines()[-1])
    assert len(made) == 4
    for label, counts in made.items():
        assert min(counts[kind] for kind in ("insert", "match", "evict", "events")) > 2, (label, counts)
