"""The reader of KV events as a target for atheris, which takes libFuzzer's arguments."""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python" / "support"))

with atheris.instrument_imports(include=["kvpool.integrations.kv_events", "kv_event_checks"]):
    from kv_event_checks import check_payload


def main() -> None:
    atheris.Setup(sys.argv, lambda payload: check_payload(payload) and None)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
