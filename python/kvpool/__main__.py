"""The command `kvpool`, also started by `python -m kvpool`."""

import sys

from kvpool.tools.needs import COMMAND_LINE, missing


def main() -> None:
    """Run the command line. Exit with status 1 and one line on stderr if an extra is not installed."""
    if missing(COMMAND_LINE):
        from kvpool.tools.plain import main as plain  # noqa: PLC0415 - few ask for it

        plain(sys.argv[1:])
        return
    from kvpool.tools.cli import app  # noqa: PLC0415 - needs the modules looked for above

    app(prog_name="kvpool")


if __name__ == "__main__":
    main()
