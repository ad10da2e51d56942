"""The readers of traces as a target for atheris, which takes libFuzzer's arguments."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python" / "support"))

with atheris.instrument_imports(include=["kvpool.tools.traces", "trace_checks", "json"]):
    from trace_checks import check_content


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sample.trace"
        atheris.Setup(sys.argv, lambda content: check_content(path, content) and None)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
