"""The command `kvpool`, with and without what it needs."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

import kvpool
from kvpool.tools import output
from kvpool.tools.cli import app
from kvpool.tools.needs import COMMAND_LINE, COMMANDS, lack, remedy

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
VERSION = f"kvpool {kvpool.__version__}\n"


def run_alone(*arguments: str) -> tuple[int, str, str]:
    """Runs the command in an interpreter without site-packages: with kvpool only."""
    done = subprocess.run(
        [sys.executable, "-S", "-W", "error", "-m", "kvpool", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(kvpool.__file__).parents[1])},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Callable[[set[str]], None]:
    """Makes packages look as if they were not installed."""
    find = importlib.util.find_spec

    def hidden(names: set[str]) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in names else find(name))

    return hidden


def test_without_extras_there_is_help_and_a_version() -> None:
    assert run_alone("--version") == (0, VERSION, "")
    status, text, errors = run_alone("--help")
    assert (status, errors) == (0, "")
    assert run_alone() == (status, text, errors)
    assert re.findall(r"^  (\w+) ", text, re.MULTILINE) == [*COMMANDS]
    assert "It needs typer, rich, numpy and torch: pip install 'kvpool[tools,torch]'" in text


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("plan", "plan needs typer and rich: pip install 'kvpool[tools]'"),
        ("replay", "replay needs typer, rich, numpy and torch: pip install 'kvpool[tools,torch]'"),
        ("other", "every command but doctor needs typer and rich: pip install 'kvpool[tools]'"),
    ],
)
def test_without_extras_commands_say_all_that_they_need(command: str, said: str) -> None:
    assert run_alone(command) == (1, "", f"kvpool: {said}\n")


def test_with_typer_commands_say_all_that_they_need(hide: Callable[[set[str]], None]) -> None:
    def error_output(*arguments: str) -> str:
        result = CliRunner().invoke(app, arguments)
        assert (result.exit_code, result.stdout) == (1, "")
        return result.stderr

    hide({"torch", "transformers", "matplotlib"})
    for arguments, names, extras in (
        (("serve",), "torch and transformers", "transformers"),
        (("replay", "--plot", "x.svg"), "torch and matplotlib", "tools,torch"),
        (("replay",), "torch", "torch"),
    ):
        needed = f"{arguments[0]} needs {names}"
        assert error_output(*arguments) == f"kvpool: {needed}: pip install 'kvpool[{extras}]'\n"


def test_extras_have_what_messages_say() -> None:
    tomllib = pytest.importorskip("tomllib")  # not before Python 3.11
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for command in COMMANDS.values():
        for package in (*COMMAND_LINE, *command.needs):
            found = re.search(r"\[(\w+)\]", remedy([package]))
            assert found is not None
            assert any(re.match(rf"{package}\b", one) for one in extras[found[1]]), package
    assert not any("torch" in one for one in extras["tools"])
    assert lack("it", ["json"]) == ""


def test_the_version_and_completion() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == VERSION
    words = {"_KVPOOL_COMPLETE": "complete_bash", "COMP_WORDS": "kvpool pl", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "kvpool"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **words},
    )
    assert done.stdout.split() == ["plan"]


def test_a_command_says_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with output.waiting("reading a file"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(output, "PATIENCE_S", 0.0)
    with output.waiting("reading a file"):
        deadline = time.monotonic() + 30
        while not (said := capsys.readouterr().err):
            assert time.monotonic() < deadline
    assert said == "kvpool: reading a file ...\n"
