"""The command `kvpool`, also started by `python -m kvpool`."""

import sys

from kvpool.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
