"""Fails if fewer than 98 % of the public names have a known type, and lists those that have not.

    python tests/typing/completeness.py REPORT

REPORT is what `pyright --verifytypes kvpool --ignoreexternal --outputjson` writes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

LEAST = 0.98


def main(path: str) -> int:
    found = json.loads(Path(path).read_text(encoding="utf-8"))["typeCompleteness"]
    for symbol in found["symbols"]:
        if symbol["isExported"] and (symbol["isTypeAmbiguous"] or not symbol["isTypeKnown"]):
            reasons = [each["message"].splitlines()[0] for each in symbol["diagnostics"]]
            print(f"{symbol['name']}: {'; '.join(reasons) or 'because of another'}")
    score = found["completenessScore"]
    print(f"{100 * score:.2f} % of {sum(found['exportedSymbolCounts'].values())} names have a known type")
    return int(score < LEAST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
