"""The command `kvpool`, with and without what it needs."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import command_line
import pytest
from model_configs import CONFIGS

import kvpool
from kvpool.tools import output
from kvpool.tools.cli import main, make_parsers
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
    assert re.findall(r"^  (\w+)  ", text, re.MULTILINE) == [*COMMANDS]
    assert "It needs rich, numpy and torch: pip install 'kvpool[tools,torch]'" in text
    for command in COMMANDS:
        status, text, errors = run_alone(command, "--help")
        assert (status, errors) == (0, "")
        assert text.startswith(f"usage: kvpool {command} ")
        assert max(map(len, text.splitlines())) <= output.WIDTH


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", "x", "--memory", "1"), "plan without --json needs rich: pip install 'kvpool[tools]'"),
        (("replay",), "replay needs rich, numpy and torch: pip install 'kvpool[tools,torch]'"),
        (("doctor", "--bandwidth"), "doctor --bandwidth needs rich: pip install 'kvpool[tools]'"),
        (("verify",), "verify needs rich and numpy: pip install 'kvpool[tools]'"),
    ],
)
def test_without_extras_commands_say_all_that_they_need(arguments: tuple[str, ...], said: str) -> None:
    assert run_alone(*arguments) == (1, "", f"kvpool: {said}\n")


def test_a_plan_as_json_needs_no_extra(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Llama-3.1-8B"]))
    status, text, errors = run_alone("plan", str(tmp_path), "--memory", "1GiB", "--context", "512", "--json")
    assert (status, errors) == (0, "")
    assert json.loads(text)


def test_with_a_part_of_the_extras_commands_say_what_is_missing(hide: Callable[[set[str]], None]) -> None:
    hide({"torch", "matplotlib"})
    for arguments, names, extras in (
        (("replay", "--plot", "x.svg"), "torch and matplotlib", "tools,torch"),
        (("replay",), "torch", "torch"),
    ):
        result = command_line.invoke(main, arguments)
        said = f"kvpool: replay needs {names}: pip install 'kvpool[{extras}]'\n"
        assert (result.exit_code, result.stdout, result.stderr) == (1, "", said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("other",), "there is no command 'other'; there are doctor, plan, replay, verify"),
        (("replay", "--layers", "two"), "argument --layers: 'two' is not an integer"),
        (("replay", "--layers", "0"), "argument --layers: 0 is less than 1"),
        (("replay", "--no-such"), "unrecognized arguments: --no-such"),
        (("replay", "--prefix"), "unrecognized arguments: --prefix"),
        (("plan", "x"), "the following arguments are required: --memory"),
    ],
)
def test_wrong_options_are_one_line(arguments: tuple[str, ...], said: str) -> None:
    result = command_line.invoke(main, arguments)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"kvpool: {said}\n")


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


def test_every_option_has_a_line_of_help() -> None:
    for name, parser in make_parsers().items():
        for action in parser._actions:
            assert action.help, (name, action)
            assert len(action.help) <= 110, (name, action.help)
            assert not action.help.endswith("."), (name, action.help)


def test_the_version() -> None:
    assert command_line.invoke(main, ["--version"]) == (0, VERSION, "")


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
