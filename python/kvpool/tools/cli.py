"""The commands of `kvpool`.

Each command has a folder, and imports its dependencies when it is called, so that commands without PyTorch
and NumPy run without them.
"""

from typing import Annotated

import typer

from kvpool._kvpool import __version__
from kvpool.tools.doctor.command import doctor
from kvpool.tools.plan.command import plan
from kvpool.tools.replay.command import replay
from kvpool.tools.serve.command import serve

app: typer.Typer = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvpool {__version__}")
        raise typer.Exit


@app.callback()
def commands(
    *,
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Tools over kvpool, the memory core of an LLM serving engine."""


for command in (serve, replay, plan, doctor):
    app.command()(command)
