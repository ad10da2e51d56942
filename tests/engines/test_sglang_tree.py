"""SGLang's prefix cache over kvpool's tree core does what it does over its own, call by call.

The configurations are all of SGLang's own test kit: full attention, Mamba and sliding windows, alone and
together, with pages of 1 to 128 tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sglang_on_cpu import require, run

pytestmark = pytest.mark.timeout(1800)

HERE = Path(__file__).parent


@pytest.mark.parametrize("parts", ["FULL", "FULL+MAMBA", "FULL+SWA", "FULL+SWA+MAMBA"])
def test_histories_are_the_same(tmp_path: Path, parts: str) -> None:
    require()
    done = run(tmp_path, str(HERE / "tree_histories.py"), parts, "28", "120")
    assert done.returncode == 0, done.stdout + done.stderr
    for label, counts in json.loads(done.stdout.splitlines()[-1]).items():
        assert min(counts.values()) > 20, (label, counts)
        assert counts.keys() >= {"insert", "match", "lock", "unlock", "evict", "evict_for_alloc", "look"}, (
            label
        )


def test_where_kvpool_gives_way_and_what_it_expects(tmp_path: Path) -> None:
    require()
    done = run(tmp_path, str(HERE / "tree_choices.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "ok"
