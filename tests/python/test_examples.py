"""The programs in `examples` run, and the documentation names each."""

from __future__ import annotations

import re
import runpy
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from shared_fixtures import RunSnippet

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted([*(ROOT / "examples").glob("*.py"), *(ROOT / "examples").glob("*/*.py")])
ELSEWHERE = {
    ROOT / "examples" / "serving" / "moving_request.py",  # `test_nixl.py` runs it
    ROOT / "examples" / "vllm_cluster.py",  # `tests/engines/test_vllm_cluster.py` runs it
    ROOT / "examples" / "vllm_prefill_first.py",  # `tests/engines/test_vllm_transfer.py` runs it
}


def relative(path: Path) -> str:
    return path.relative_to(ROOT / "examples").as_posix()


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path not in ELSEWHERE], ids=relative)
def test_an_example_runs(path: Path, run_snippet: RunSnippet) -> None:
    run = f"runpy.run_path({str(path)!r}, run_name='__main__')"
    assert run_snippet(f"import runpy; sys.path.insert(0, {str(path.parent)!r}); {run}", has_torch=True)


def test_the_commands_of_the_cluster_are_a_script_with_the_model_and_ports(tmp_path: Path) -> None:
    cluster = runpy.run_path(str(ROOT / "examples" / "vllm_cluster.py"))
    blocks = cluster["commands"]()
    assert len(blocks) == 7
    text = "".join(blocks)
    assert text.count("MODEL=") == 1
    assert {int(number) for number in re.findall(r"(?<![\w.])\d{4,5}(?!\w)", text)} == {
        *cluster["PORTS"],
        4096,
    }
    made = cluster["Cluster"]("/a model", tmp_path, gpu=False)
    for block in (made.servers, made.look, made.by_events, made.ask, made.apart):
        assert not re.search(rf"\b({'|'.join(map(str, cluster['PORTS']))})\b", block)
        script = [*made._bash(block)["args"]]
        assert "MODEL='/a model'" in script[-1]
        script.insert(1, "-n")
        subprocess.run(script, check=True)


@pytest.mark.parametrize("path", EXAMPLES, ids=relative)
def test_an_example_is_documented(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    assert name in path.read_text(encoding="utf-8")  # how to run it
    readme = path.parent / "README.md"
    if readme.exists():
        assert f"`{path.name}`" in readme.read_text(encoding="utf-8")
    else:
        assert any(name in page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
