"""Writes the generated documentation: docstrings of the stub, and options of commands.

The docstrings are those of the extension module, which stand beside the Rust code; with `--check` nothing is
written, and what is out of date is an error. The pages of the reference are made from the stub when the site
is built (`docs/site_hooks.py`), and are not committed.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import NamedTuple

import griffe

ROOT = Path(__file__).parent.parent
STUB = ROOT / "python" / "kvpool" / "_kvpool.pyi"
TOOLS = ROOT / "docs" / "tools.md"
OPTIONS = "\n## Options\n"
"""The heading in the page of the tools from which on it is generated."""


class Page(NamedTuple):
    """A page of the reference.

    Attributes:
        file: Its name in the folder `api` of the site, without the ending.
        title: Its heading.
        names: What it describes, in this order: names of the package, or all of a module, such as
            `remote.*`.
    """

    file: str
    title: str
    names: tuple[str, ...]


# Everything that the package exports is on one of these.
PAGES = (
    Page("pools", "All pools", ("Pool", "Leak", "pools", "snapshot", "get_num_threads", "set_num_threads")),
    Page("token-slots", "Token slots", ("TokenToKVPoolAllocator",)),
    Page("request-table", "The request table", ("ReqToTokenPool", "make_req_to_token_pool")),
    Page("kv-buffers", "K, V and states", ("KVPool", "GDNPool", "make_full_attention_net_mem_pool")),
    Page(
        "layouts",
        "Layouts and the arena",
        ("CacheLayout", "Group", "Plane", "CacheArena", "SlabLayout", "models.*"),
    ),
    Page(
        "step-planning",
        "Planning a step",
        ("BatchPlanner", "BatchPlan", "HostPlan", "ArenaPlanner", "ArenaPlan", "GroupPlan"),
    ),
    Page(
        "cached-prefixes",
        "The prefix cache",
        (
            "PrefixCache",
            "PrefillCost",
            "Lease",
            "Session",
            "WaitingRequest",
            "Load",
            "Fetch",
            "Published",
            "Segment",
            "Stored",
            "Removed",
            "Cleared",
        ),
    ),
    Page(
        "cached-units",
        "The prefix cache of an arena",
        ("ArenaPrefixCache", "ArenaLease", "LeasedUnits", "GroupReport"),
    ),
    Page("tiers", "Tiers and stores", ("HostTier", "ArenaHostTier", "FileStore", "Store", "StoreTransfer")),
    Page("chunks", "Chunks", ("ChunkPool", "Chunk", "ChunkCopy")),
    Page("scratch", "Buffers, pages and arenas", ("BufferPool", "Buffer", "PagePool", "Workspace")),
    Page("tensors", "Tensors", ("Tensor",)),
    Page(
        "errors",
        "Errors",
        (
            "KvPoolError",
            "ArgumentError",
            "BackendUnavailableError",
            "ConfigError",
            "DriverError",
            "IndexOwnershipError",
            "OutOfMemoryError",
            "StaleBufferError",
            "StaleError",
            "StateError",
            "WorkspaceExhaustedError",
        ),
    ),
    Page("types", "Types for annotations", ("typing.*",)),
    Page("attention", "Attention", ("attention.*",)),
    Page("processes", "Processes and machines", ("remote.*", "integrations.nixl.Endpoint")),
    Page("events", "KV events", ("integrations.kv_events.*",)),
    Page(
        "models",
        "Models of transformers",
        ("integrations.transformers.*", "integrations.transformers.continuous.*"),
    ),
    Page("mooncake", "The Mooncake Store", ("integrations.mooncake.*",)),
    Page(
        "engines",
        "Plugins of engines",
        ("integrations.sglang.*", "integrations.vllm.*", "integrations.lmcache.*", "integrations.pymllm.*"),
    ),
    Page("metrics", "Metrics", ("metrics.*",)),
    Page("verify", "Every byte of a layout", ("verify.*",)),
)

# Docstrings that the interpreter gives to every class.
INHERITED = {None, *(getattr(object, name).__doc__ for name in dir(object))}


def documented_stub(text: str, module: object) -> str:
    """Return `text` of a stub with the docstrings of `module`."""
    lines = text.splitlines()
    edits: list[tuple[int, int, list[str]]] = []

    def visit(body: list[ast.stmt], owner: object, indent: int) -> None:
        for node in body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef):
                continue
            found = inspect.getattr_static(owner, node.name, None)
            thing = getattr(found, "__func__", found)
            edits.extend(_edit(node, _docstring(thing), lines, indent + 4))
            if isinstance(node, ast.ClassDef):
                visit(node.body, thing, indent + 4)

    visit(ast.parse(text).body, module, 0)
    for start, end, new in sorted(edits, reverse=True):
        lines[start:end] = new
    return "\n".join(lines) + "\n"


def _docstring(thing: object) -> str | None:
    written: str | None = getattr(thing, "__doc__", None)
    return None if written is None or written in INHERITED else inspect.cleandoc(written)


def _edit(
    node: ast.ClassDef | ast.FunctionDef, docstring: str | None, lines: list[str], indent: int
) -> list[tuple[int, int, list[str]]]:
    """Return lines to replace, counted from 0, so that `node` has `docstring`."""
    space = " " * indent
    new = []
    if docstring is not None:
        first, *rest = f'"""{docstring}'.splitlines()
        closing = '"""' if not rest else f'\n{space}"""'
        quoted = [space + first, *(space + line if line else "" for line in rest)]
        new = ("\n".join(quoted) + closing).splitlines()
    body = node.body[0]
    if isinstance(body, ast.Expr) and isinstance(body.value, ast.Constant):
        start, end = body.lineno - 1, body.end_lineno or body.lineno
        if body.value.value is ...:
            return [(start, end, [lines[start].removesuffix(" ..."), *new])] if new else []
        if not new and len(node.body) == 1:
            new = [f"{space}..."]
        return [(start, end, new)]
    first = min([body.lineno, *(each.lineno for each in getattr(body, "decorator_list", []))]) - 1
    return [(first, first, [*new, ""] if new else [])]


def api() -> dict[str, str]:
    """Return the pages of the reference as Markdown by their names, and the table of them as `index.md`.

    Raises:
        ValueError: If something that the package exports is on no page.
    """
    package = griffe.load(
        "kvpool",
        search_paths=[str(ROOT / "python")],
        docstring_parser="google",
        docstring_options={"warnings": False, "returns_multiple_items": False, "returns_named_value": False},
        allow_inspection=False,
    )
    named = {name for page in PAGES for name in page.names}
    exported = {str(name) for name in package.exports or () if not _resolved(package, str(name)).is_module}
    missing = {name for name in exported if not name.startswith("__")} - named
    if missing:
        raise ValueError(f"{', '.join(sorted(missing))}: on no page; add them to PAGES")
    pages, rows, index = {}, [], []
    for page in PAGES:
        parts = [f"# {page.title}\n"]
        for name in page.names:
            module, _, last = name.rpartition(".")
            if last == "*":
                parts.append(_module(package[module]))
                found = [module]
            else:
                parts.append(_entry(_resolved(package, name), f"kvpool.{name}"))
                found = [name]
            index += [(one, page.file) for one in found]
        pages[f"{page.file}.md"] = "\n".join(parts)
        has = ", ".join(f"[`{one}`]({file}.md#{_slug(one)})" for one, file in index if file == page.file)
        rows.append(f"| [{page.title}]({page.file}.md) | {has} |")
    return {"index.md": "\n".join(["# All names", "", "| page | has |", "|---|---|", *rows, ""])} | pages


def _resolved(package: griffe.Object | griffe.Alias, name: str) -> griffe.Object | griffe.Alias:
    """Return what a name stands for, which may come from another module."""
    thing: griffe.Object | griffe.Alias = package[name]
    return thing.final_target if isinstance(thing, griffe.Alias) else thing


def _slug(name: str) -> str:
    """Return the anchor of a name's heading."""
    return f"kvpool{name}".lower().replace(".", "")


def _module(module: griffe.Object | griffe.Alias) -> str:
    """Return the part of a module: first its classes and functions, then its types."""
    lines = [f"## `{module.path}`", "", module.docstring.value if module.docstring else "", ""]
    names = sorted(map(str, module.exports or ()), key=str.lower)
    if module.path != "kvpool.typing":
        found = {name: _resolved(module, name) for name in names}
        described = [name for name, thing in found.items() if thing.is_class or thing.is_function]
        # Types that another module describes are left out here.
        described = [name for name in described if found[name].module.path != "kvpool.typing"]
        parts = [_entry(found[name], f"{module.path}.{name}") for name in described]
        names = [name for name, thing in found.items() if thing.is_attribute]
        return "\n".join([*lines, *parts, *_types(module, names)])
    return "\n".join([*lines, *_types(module, names)])


def _types(module: griffe.Object | griffe.Alias, names: list[str]) -> list[str]:
    """Return lines on types: what each stands for, and the keys of those that are dicts."""
    lines = []
    for name in names:
        thing = _resolved(module, name)
        text = thing.docstring.value.partition("\n\n")[0] if thing.docstring else ""
        classes = [*reversed(thing.mro()), thing] if isinstance(thing, griffe.Class) else []
        keys = [
            f"`{key}`" for each in classes for key, member in each.members.items() if not member.docstring
        ]
        lines.append(_item(name, f"{text} Keys: {', '.join(keys)}." if keys else text))
    return [*lines, ""] if lines else []


def _entry(thing: griffe.Object | griffe.Alias, name: str) -> str:
    """Return the section of a class or a function, or the part of a method in that of its class."""
    in_class = thing.is_function and thing.parent is not None and thing.parent.is_class
    lines = [f"{'###' if in_class else '##'} `{name}`", ""]
    call = thing if thing.is_function else _constructor(thing)
    if isinstance(call, griffe.Function):
        lines += ["```text", _signature(call, name), "```", ""]
    for section in thing.docstring.parsed if thing.docstring else ():
        lines += _section(section)
    documented = [member for member in thing.members.values() if member.docstring and member.is_public]
    properties = [member for member in documented if member.is_attribute]
    if properties:
        lines += ["**Properties**", ""]
        lines += [_item(each.name, each.docstring.value) for each in properties if each.docstring]
        lines.append("")
    lines += [_entry(member, f"{thing.name}.{member.name}") for member in documented if member.is_function]
    return "\n".join(lines)


def _constructor(thing: griffe.Object | griffe.Alias) -> griffe.Object | griffe.Alias | None:
    """Return the constructor of a class; `None` if only this package calls it: its arguments are not told."""
    sections = thing.docstring.parsed if thing.docstring else ()
    is_told = "dataclass" in thing.labels or any(one.kind.value == "parameters" for one in sections)
    return thing.members.get("__new__") or (thing.members.get("__init__") if is_told else None)


def _section(section: griffe.DocstringSection) -> list[str]:
    if not isinstance(section.value, list):
        return [section.value, ""]
    items = [
        _item(
            str(getattr(item, "name", "") or (item.annotation if section.kind.value == "raises" else "")),
            item.description,
        )
        for item in section.value
    ]
    return [f"**{section.title or section.kind.value.title()}**", "", *items, ""]


def _item(name: str, text: str) -> str:
    line = " ".join(text.split())
    return f"- `{name}`: {line}" if name else f"- {line}"


def _signature(call: griffe.Function, name: str) -> str:
    given = [parameter for parameter in call.parameters if parameter.name not in {"self", "cls"}]
    words, kinds = [], griffe.ParameterKind
    for at, parameter in enumerate(given):
        star = parameter.kind is kinds.keyword_only and (
            at == 0 or given[at - 1].kind is not kinds.keyword_only
        )
        words += ["*"] if star else []
        default = f" = {parameter.default}" if parameter.default is not None else ""
        words.append(
            f"{parameter.name}: {parameter.annotation}{default}"
            if parameter.annotation
            else f"{parameter.name}{default}"
        )
    returns = f" -> {call.returns}" if call.name not in {"__new__", "__init__"} and call.returns else ""
    line = f"{name}({', '.join(words)}){returns}"
    if len(line) <= 110:
        return line
    return "\n".join([f"{name}(", *(f"    {word}," for word in words), f"){returns}"])


def tools(text: str) -> str:
    """Return the page of the tools with the arguments and options of each command."""
    from kvpool.tools.cli import make_parsers  # noqa: PLC0415 - after the stub was written

    lines = [text.partition(OPTIONS)[0] + OPTIONS]
    for name, parser in make_parsers().items():
        lines += [f"### kvpool {name}", "", "| argument or option | meaning |", "|---|---|"]
        for action in parser._actions[1:]:  # noqa: SLF001 - nothing else lists them; the first is --help
            names = action.option_strings or [action.dest.upper()]
            meaning = re.sub(r"([|*])", r"\\\1", action.help or "")
            if action.choices is not None:
                meaning += f": {', '.join(action.choices)}"
            if action.required and action.option_strings:
                meaning += " (required)"
            lines.append(f"| {', '.join(f'`{one}`' for one in names)} | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    """Write the files, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    module = importlib.import_module("kvpool._kvpool")
    texts = {STUB: documented_stub(STUB.read_text(), module), TOOLS: tools(TOOLS.read_text())}
    stale = _update(texts, check=check)
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'out of date; `make api` writes it' if check else 'written'}")
    return int(check and bool(stale))


def _update(texts: dict[Path, str], *, check: bool) -> list[Path]:
    """Write the files that have another text, unless they are only checked. Returns them."""
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    if not check:
        for path in stale:
            path.write_text(texts[path])
    return stale


if __name__ == "__main__":
    sys.exit(main())
