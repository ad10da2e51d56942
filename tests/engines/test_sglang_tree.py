"""SGLang's prefix cache over kvpool's tree core does what it does over its own, call by call.

The configurations are all of SGLang's own test kit: full attention, Mamba and sliding windows, alone and
together, with pages of 1 to 128 tokens.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from sglang_on_cpu import environment, require, run

pytestmark = pytest.mark.timeout(1800)

HERE = Path(__file__).parent


PARTS = ["FULL", "FULL+MAMBA", "FULL+SWA", "FULL+SWA+MAMBA"]
KINDS = {"insert", "drop", "match", "lock", "unlock", "evict", "evict_for_alloc", "look", "events"}


def compare(folder: Path, parts: str, core: str, **variables: str) -> None:
    """Compares histories of all configurations with these parts."""
    done = run(folder, str(HERE / "tree_histories.py"), parts, "32", "120", core, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    for label, counts in json.loads(done.stdout.splitlines()[-1]).items():
        # SGLang's cores differ from each other now and then.
        assert counts.pop("excused", 0) < 8, label
        assert min(counts.values()) > 20, (label, counts)
        assert counts.keys() >= KINDS, label


@pytest.mark.parametrize("parts", PARTS)
def test_histories_are_the_same(tmp_path: Path, parts: str) -> None:
    require()
    compare(tmp_path, parts, "python")


@pytest.mark.parametrize("parts", PARTS)
def test_histories_are_those_of_the_compiled_core(tmp_path: Path, parts: str) -> None:
    require()
    torch = os.environ.get("KVPOOL_SGLANG_TORCH")
    if torch is None:
        pytest.skip(
            "KVPOOL_SGLANG_TORCH names no PyTorch that the compiled core takes: see `make test-engines`"
        )
    path = environment(tmp_path)["PYTHONPATH"]
    compare(tmp_path, parts, "compiled", PYTHONPATH=os.pathsep.join([torch, path]))


@pytest.mark.parametrize("parts", PARTS)
def test_caches_that_evict_by_worth_do_the_same(tmp_path: Path, parts: str) -> None:
    require()
    compare(tmp_path, parts, "kvpool")


def test_what_is_used_again_is_worth_more(tmp_path: Path) -> None:
    require()
    done = run(tmp_path, str(HERE / "tree_worth.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "ok"


def test_requests_say_of_which_session_they_are(tmp_path: Path) -> None:
    require()
    done = run(tmp_path, str(HERE / "tree_sessions.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "ok"


def test_what_waiting_requests_will_find_is_kept(tmp_path: Path) -> None:
    require()
    done = run(tmp_path, str(HERE / "tree_waiting.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "ok"


def test_where_kvpool_gives_way_and_what_it_expects(tmp_path: Path) -> None:
    require()
    done = run(tmp_path, str(HERE / "tree_choices.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "ok"
