"""Answers pip before it keeps a source: name and version, which the source's own PKG-INFO has."""

from __future__ import annotations

import shutil
from email.parser import Parser
from pathlib import Path


def prepare_metadata_for_build_wheel(folder: str, config_settings: object = None) -> str:
    """Writes the metadata into a folder in `folder` and returns its name."""
    del config_settings
    said = Parser().parsestr(Path("PKG-INFO").read_text(encoding="utf-8"))
    made = Path(folder) / f"{said['Name']}-{said['Version']}.dist-info"
    made.mkdir()
    shutil.copy("PKG-INFO", made / "METADATA")
    return made.name
