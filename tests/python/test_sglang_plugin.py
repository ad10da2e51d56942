"""The plugin of SGLang: when it is on, what it replaces, and a look at the real engine.

`make test-engines` has the engine in many configurations.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from sglang_on_cpu import HERE, PLUGIN_ON, require, run, serve, tiny_model

from kvpool.integrations import sglang

if TYPE_CHECKING:
    from pathlib import Path

needs_sglang = pytest.mark.usefixtures("sglang_is_there")


@pytest.fixture
def sglang_is_there() -> None:
    require()


@pytest.mark.parametrize(
    ("plugins", "switch", "is_on"),
    [
        (None, None, False),
        ("", "", False),
        ("other", "0", False),
        ("kvpool", None, True),
        ("other, kvpool", None, True),
        ("kvpool2", None, False),
        (None, "1", True),
    ],
)
def test_it_is_on_only_where_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, plugins: str | None, switch: str | None, is_on: bool
) -> None:
    for name, value in (("SGLANG_PLUGINS", plugins), ("KVPOOL_SGLANG", switch)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert sglang.is_switched_on() is is_on
    if not is_on:
        sglang.register()


@needs_sglang
@pytest.mark.timeout(600)
# Each is a process, and SGLang takes seconds to import.
@pytest.mark.parametrize("checks", ["replaced attributes buffers surface", "drift", "version"])
def test_checks_within_sglang(tmp_path: Path, checks: str) -> None:
    done = run(tmp_path, str(HERE / "sglang_surface.py"), *checks.split(), **PLUGIN_ON)
    assert done.stdout.endswith(f"checked {checks}\n"), done.stdout + done.stderr


@needs_sglang
@pytest.mark.timeout(600)
def test_an_installed_plugin_changes_nothing_by_itself(tmp_path: Path) -> None:
    done = run(tmp_path, str(HERE / "sglang_surface.py"), "off")
    assert done.stdout.endswith("checked off\n"), done.stdout + done.stderr


@needs_sglang
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_engine_gives_the_same_tokens(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    config = {
        "model": str(model),
        "requests": 12,
        "engine": {"page_size": 16, "max_total_tokens": 1024},
    }
    with ThreadPoolExecutor(2) as threads:
        own = threads.submit(serve, tmp_path, config)
        pooled = threads.submit(serve, tmp_path, config, **PLUGIN_ON)
    assert pooled.result().tokens == own.result().tokens
    assert pooled.result().cached > 0
    assert "SGLang: PagedTokenToKVPoolAllocator is kvpool's" in pooled.result().log
