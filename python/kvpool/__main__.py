"""The command `kvpool`, also started by `python -m kvpool`."""

import importlib.util
import sys

CLI_MODULES = ("rich", "typer")
"""Modules that every command needs. Without them, `doctor` alone works and parses its arguments itself."""


def main() -> None:
    """Run the command line. Exit with status 1 and one line on stderr if an extra is not installed."""
    missing = [name for name in CLI_MODULES if importlib.util.find_spec(name) is None]
    if missing and sys.argv[1:2] == ["doctor"]:
        from kvpool.tools.doctor.plain import main as doctor  # noqa: PLC0415 - few ask for it

        sys.exit(doctor(sys.argv[2:]))
    if missing:
        sys.stderr.write(f"kvpool: {', '.join(missing)} not found; run: pip install 'kvpool[tools]'\n")
        sys.exit(1)
    from kvpool.tools.cli import app  # noqa: PLC0415 - needs the modules looked for above

    app(prog_name="kvpool")


if __name__ == "__main__":
    main()
