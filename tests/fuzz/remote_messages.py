"""A target for atheris: the messages of peers, which takes libFuzzer's arguments."""

from __future__ import annotations

import sys
from pathlib import Path

import atheris
import torch  # noqa: F401 - the first tensor would take the seconds of a short run

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python" / "support"))

with atheris.instrument_imports(include=["kvpool.remote.messages", "message_checks", "json"]):
    from message_checks import check_message


def main() -> None:
    atheris.Setup(sys.argv, lambda content: check_message(content) and None)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
