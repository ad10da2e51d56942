"""The commands of `kvpool`.

Each command has a folder, and imports its dependencies when it is called, so that commands without PyTorch
and NumPy run without them.
"""

import typer

from kvpool.tools.doctor.command import doctor
from kvpool.tools.plan.command import plan
from kvpool.tools.replay.command import replay
from kvpool.tools.serve.command import serve

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def commands() -> None:
    """Tools over kvpool, the memory core of an LLM serving engine."""


for command in (serve, replay, plan, doctor):
    app.command()(command)
