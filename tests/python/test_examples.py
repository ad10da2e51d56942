"""The programs in `examples` run, and the documentation names each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from shared_fixtures import RunSnippet

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted([*(ROOT / "examples").glob("*.py"), *(ROOT / "examples").glob("*/*.py")])
OVER_NIXL = {ROOT / "examples" / "serving" / "moving_request.py"}  # `test_nixl.py` runs them


def relative(path: Path) -> str:
    return path.relative_to(ROOT / "examples").as_posix()


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path not in OVER_NIXL], ids=relative)
def test_an_example_runs(path: Path, run_snippet: RunSnippet) -> None:
    run = f"runpy.run_path({str(path)!r}, run_name='__main__')"
    assert run_snippet(f"import runpy; sys.path.insert(0, {str(path.parent)!r}); {run}", has_torch=True)


@pytest.mark.parametrize("path", EXAMPLES, ids=relative)
def test_an_example_is_documented(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    assert name in path.read_text(encoding="utf-8")  # how to run it
    readme = path.parent / "README.md"
    if readme.exists():
        assert f"`{path.name}`" in readme.read_text(encoding="utf-8")
    else:
        assert any(name in page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
