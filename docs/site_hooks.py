"""Hooks of `mkdocs`: pages of the reference, pages outside of `docs`, and links as they are in a checkout.

In a checkout, a page links to others by their places in it. On the site, the pages outside of `docs` lie
beside those in it.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import api  # noqa: E402 - it lies beside this file, which mkdocs loads by its path

OUTSIDE = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benches/RESULTS.md",
    "benches/fleet/README.md",
    "benches/fleet/links.json",
    "examples/serving/README.md",
)
"""Files of the site that lie outside of `docs`."""

REFERENCE = "reference.md"
"""The page that gets the table of all names."""

PAGES = api.api()


def on_config(config: Any) -> None:  # noqa: ANN401 - mkdocs is installed for the site alone
    """Add the pages of the reference to the navigation, and the decisions, each in its order."""
    for section in config.nav:
        for entries in section.values():
            if REFERENCE in entries:
                entries += [{page.title: f"api/{page.file}.md"} for page in api.PAGES]
            for entry in entries:
                if isinstance(entry, dict) and "Decisions" in entry:
                    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
                    entry["Decisions"] += [
                        f"decisions/{page.name}" for page in pages if page.name != "README.md"
                    ]


def on_files(files: Any, config: Any) -> Any:  # noqa: ANN401
    """Add pages that are generated or lie outside of `docs`."""
    from mkdocs.structure.files import File  # noqa: PLC0415

    for name, text in PAGES.items():
        if name != "index.md":
            files.append(File.generated(config, f"api/{name}", content=text))
    for name in OUTSIDE:
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:  # noqa: ANN401
    """Return a page with links as the site has them, and kinds of code that it can colour."""
    uri = page.file.src_uri
    if uri.startswith("api/"):
        return markdown
    if uri == REFERENCE:
        table = PAGES["index.md"].replace("# All names", "## All names", 1)
        markdown += "\n" + re.sub(r"\]\(([a-z-]+\.md)", r"](api/\1", table)
    here = posixpath.dirname(uri if uri in OUTSIDE else f"docs/{uri}")
    from_here = posixpath.dirname(uri)

    def link(found: re.Match[str]) -> str:
        file, mark, anchor = found[1].partition("#")
        target = posixpath.normpath(posixpath.join(here, file)) if file else ""
        if target.startswith("docs/"):
            target = target.removeprefix("docs/")
        elif target not in OUTSIDE:
            return found[0]
        return f"]({posixpath.relpath(target, from_here or '.')}{mark}{anchor})"

    markdown = re.sub(r"\]\((?!https?:)([^)\s]+)\)", link, markdown)
    return re.sub(r"^```(python) \w+$", r"```\1", markdown, flags=re.MULTILINE)
