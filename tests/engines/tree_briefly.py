"""SGLang's cache over kvpool's tree core, briefly: which core it gets, and a few histories of each kind."""

from __future__ import annotations

import json
import sys

import tree_choices
import tree_histories
import tree_sessions
import tree_waiting
import tree_worth


def main() -> None:
    """Prints how many calls were made, as JSON."""
    tree_choices.main()
    tree_worth.main()
    tree_sessions.main()
    tree_waiting.main()
    tree_histories.run("each", seeds=2, steps=12, core="kvpool")
    json.dump(
        tree_histories.run("each", seeds=len(tree_histories.POLICIES), steps=12, core="python"), sys.stdout
    )


if __name__ == "__main__":
    main()
