"""A target for atheris: the messages of the processes of a cluster, which takes libFuzzer's arguments."""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python" / "support"))

with atheris.instrument_imports(include=["kvpool.cluster.messages", "cluster_checks"]):
    from cluster_checks import check_payload


def main() -> None:
    atheris.Setup(sys.argv, lambda payload: check_payload(payload) and None)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
