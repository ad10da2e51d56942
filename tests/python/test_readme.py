"""The examples of the README run as printed, and what it names is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import kvpool

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def test_examples_run_as_printed() -> None:
    assert EXAMPLES
    for example in EXAMPLES:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", example],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr


def test_every_class_has_its_section_source_and_tests() -> None:
    classes = {
        "TokenToKVPoolAllocator": "token_to_kv_pool_allocator",
        "ReqToTokenPool": "req_to_token_pool",
        "KVPool": "kv_pool",
        "GDNPool": "gdn_pool",
        "BatchPlanner": "batch_planner",
        "ChunkPool": "chunk_pool",
        "BufferPool": "buffer_pool",
        "PagePool": "page_pool",
        "Workspace": "workspace",
    }
    for name, file in classes.items():
        assert hasattr(kvpool, name)
        assert f"### {name}\n" in README
        for path in (f"src/pool/{file}.rs", f"src/python/{file}.rs", f"tests/python/test_{file}.py"):
            assert (ROOT / path).is_file(), path


def test_linked_files_exist() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert links
    for link in links:
        assert (ROOT / link).is_file(), link


def test_figures_are_filled_in() -> None:
    assert not re.search(r"@[A-Z0-9]+@", README)
