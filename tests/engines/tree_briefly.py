"""SGLang's cache over kvpool's tree core, briefly: which core it gets, and a few histories of each kind."""

from __future__ import annotations

import json
import sys

import tree_choices
import tree_histories


def main() -> None:
    """Prints how many calls were made, as JSON."""
    tree_choices.main()
    json.dump(
        tree_histories.run("each", seeds=len(tree_histories.POLICIES), steps=12, core="python"), sys.stdout
    )


if __name__ == "__main__":
    main()
