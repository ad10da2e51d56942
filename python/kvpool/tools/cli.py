"""The commands of `kvpool`.

Each stands in a module of its own and imports what it works with when it is called, so that those that need
neither PyTorch nor NumPy run without.
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
