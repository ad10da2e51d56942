"""The README and the pages of `docs`: examples run as printed, and names exist."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kvpool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shared_fixtures import RunSnippet

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += [ROOT / folder / "README.md" for folder in ("benches/fleet", "examples/serving")]
RESULTS = ROOT / "benches" / "RESULTS.md"
CLASSES = {
    "TokenToKVPoolAllocator": "token_to_kv_pool_allocator",
    "ReqToTokenPool": "req_to_token_pool",
    "KVPool": "kv_pool",
    "GDNPool": "gdn_pool",
    "BatchPlanner": "batch_planner",
    "PrefixCache": "prefix_cache",
    "HostTier": "host_tier",
    "ChunkPool": "chunk_pool",
    "FileStore": "file_store",
    "BufferPool": "buffer_pool",
    "PagePool": "page_pool",
    "Workspace": "workspace",
}

# Runs blocks of code one after the other in one namespace, with the line numbers of their page.
RUNNER = """
import linecache
import os
import sys
os.environ.pop("KVPOOL_DEBUG", None)
os.chdir({folder!r})
sys.path.insert(0, {beside!r})
namespace = {{"__name__": "__main__"}}
for page, line, source in {blocks!r}:
    text = "\\n" * line + source
    # Triton reads what it compiles.
    linecache.cache[page] = len(text), None, text.splitlines(keepends=True), page
    exec(compile(text, page, "exec"), namespace)
"""


def each_of(pages: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=lambda page: page.relative_to(ROOT).as_posix())


each_page = each_of(PAGES)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def fences(page: Path) -> Iterator[tuple[str, int, str]]:
    """The kind of each code block, its first line, counted from 0, and the code."""
    text = text_of(page)
    for block in re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        yield block[1], text.count("\n", 0, block.start(2)), block[2]


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)


def code_in(text: str) -> list[str]:
    """The code between backticks in text."""
    return re.findall(r"`([^`\n]+)`", text)


def has(page: Path, kind: str) -> bool:
    return any(found == kind for found, _, _ in fences(page))


def run_blocks(run_snippet: RunSnippet, page: Path, kinds: set[str], folder: Path) -> None:
    """Runs blocks of a page in a process of their own."""
    blocks = [(page.name, line, source) for kind, line, source in fences(page) if kind in kinds]
    if sys.version_info < (3, 11):  # which has no `transformers`
        blocks = [*itertools.takewhile(lambda block: "transformers" not in block[2], blocks)]
        if not blocks:
            pytest.skip("its first example needs transformers")
    run_snippet(RUNNER.format(folder=str(folder), beside=str(page.parent), blocks=blocks), has_torch=True)


@each_of([page for page in PAGES if has(page, "python")])
def test_examples_run_as_printed(page: Path, tmp_path: Path, run_snippet: RunSnippet) -> None:
    run_blocks(run_snippet, page, {"python"}, tmp_path)


SHOWN = re.compile(r"^```python\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?", flags=re.MULTILINE | re.DOTALL)
"""An example, and the output that is shown right below it."""

NEXT = "\n--- the next example ---\n"


@pytest.mark.parametrize("name", ["tutorial", "cookbook"])
def test_output_is_what_the_page_shows(name: str, tmp_path: Path, run_snippet: RunSnippet) -> None:
    page = ROOT / "docs" / f"{name}.md"
    found = [(example[1], example[2] or "") for example in SHOWN.finditer(text_of(page))]
    assert len(found) == len([kind for kind, _, _ in fences(page) if kind == "python"])
    assert sum(shown != "" for _, shown in found) >= 6
    blocks = [(page.name, 0, f"{code}\nprint({NEXT!r}, end='')") for code, _ in found]
    printed = run_snippet(RUNNER.format(folder=str(tmp_path), beside="", blocks=blocks), has_torch=True)
    assert printed.split(NEXT)[:-1] == [shown for _, shown in found]


HIDES_PYTORCH = 'sys.modules["torch"] = None'

# The part of JAX that the pages use: capsules, and arrays that kvpool reads.
JAX = """
import sys, types
import numpy
sys.modules["jax"] = types.ModuleType("jax")
sys.modules["jax"].dlpack = types.SimpleNamespace(from_dlpack=numpy.from_dlpack)
sys.modules["jax"].numpy = numpy
"""


def test_examples_of_jax_run_on_what_it_has(tmp_path: Path, run_snippet: RunSnippet) -> None:
    page = ROOT / "docs" / "frameworks.md"
    blocks = [
        (page.name, line, code) for kind, line, code in fences(page) if kind in {"python", "python jax"}
    ]
    run_snippet(JAX + RUNNER.format(folder=str(tmp_path), beside="", blocks=blocks))


def test_the_first_examples_need_neither_pytorch_nor_numpy(tmp_path: Path, run_snippet: RunSnippet) -> None:
    for name in ("classes.md", "frameworks.md"):
        _, line, code = next(fences(ROOT / "docs" / name))
        runner = RUNNER.format(folder=str(tmp_path), beside="", blocks=[(name, line, code)])
        run_snippet(runner, hidden=["torch", "numpy"])


@pytest.mark.cuda
@each_of([page for page in PAGES if has(page, "python gpu")])
def test_examples_run_on_a_gpu(
    page: Path, tmp_path: Path, run_snippet: RunSnippet, request: pytest.FixtureRequest
) -> None:
    if request.config.getoption("--software"):
        pytest.skip("it needs PyTorch's kernels")
    # Where the others go without PyTorch, those for a GPU begin anew.
    others = set() if HIDES_PYTORCH in text_of(page) else {"python"}
    run_blocks(run_snippet, page, {*others, "python gpu"}, tmp_path)


def test_examples_for_a_gpu_import_what_they_name() -> None:
    page = ROOT / "docs" / "frameworks.md"
    assert HIDES_PYTORCH in text_of(page)
    [code] = [source for kind, _, source in fences(page) if kind == "python gpu"]
    tree = ast.parse(code)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    known = {(name.asname or name.name).partition(".")[0] for node in imports for name in node.names}
    names = [
        node.value.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    ]
    assert {"kvpool", "torch", "triton", "tl"} <= {*names} & known


@each_page
def test_every_block_has_a_tested_kind_and_compiles(page: Path) -> None:
    for kind, line, source in fences(page):
        assert kind in {
            "python",
            "python gpu",
            "python jax",
            "python mooncake",
            "python nixl",
            "rust",
            "sh",
            "text",
            "diff",
        }, f"{page.name}:{line}"
        if kind.startswith("python"):
            compile(source, f"{page.name}:{line}", "exec")
        if kind == "rust":  # a test of the crate's documentation
            assert f'include_str!("../docs/{page.name}")' in text_of(ROOT / "src/lib.rs")
    assert len(re.findall(r"^```", text_of(page), flags=re.MULTILINE)) == 2 * len(list(fences(page)))


def test_pages_have_examples_that_are_run() -> None:
    kinds = [kind for page in PAGES for kind, _, _ in fences(page)]
    assert kinds.count("python") > 20
    assert "python gpu" in kinds


def slugs(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_and_pictures_exist(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)]+)\)", prose(page))
    for link in links:
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.is_file(), link
        assert not anchor or anchor in slugs(target), link


def test_every_page_and_picture_is_linked() -> None:
    texts = [text_of(page) for page in PAGES]
    for page in PAGES[1:]:
        assert any(f"{page.name})" in text or f"{page.name}#" in text for text in texts), page.name
    for picture in (ROOT / "docs" / "img").iterdir():
        if picture.suffix in {".svg", ".png"}:
            assert any(f"img/{picture.name})" in text for text in texts), picture.name


def test_the_readme_is_short_and_begins_with_what_to_do() -> None:
    lines = text_of(PAGES[0]).splitlines()
    assert len(lines) <= 160
    assert [line.split("#")[0].strip() for line in lines[2:6]] == ["```sh", "make demo", "make test", "```"]
    first, second, *_ = fences(PAGES[0])
    assert (first[0], second[0]) == ("sh", "python")
    assert len([line for line in second[2].splitlines() if line]) == 6
    assert lines[5:8] == ["```", "", "```python"]


def test_every_class_has_its_section_source_and_tests() -> None:
    for name, file in CLASSES.items():
        assert hasattr(kvpool, name)
        assert f"### {name}\n" in text_of(ROOT / "docs" / "classes.md")
        assert f"[`{name}`](docs/classes.md#{name.lower()})" in text_of(PAGES[0])
        for path in (f"src/pool/{file}.rs", f"src/python/{file}.rs", f"tests/python/test_{file}.py"):
            assert (ROOT / path).is_file(), path


def test_everything_public_is_on_one_page_of_the_reference() -> None:
    pages: dict[str, str] = runpy.run_path(str(ROOT / "docs" / "api.py"))["api"]()
    assert all(page.count("\n```") % 2 == 0 for page in pages.values())
    text = "\n".join(pages.values())
    headings = re.findall(r"^## `kvpool\.(\w+)`$", text, flags=re.MULTILINE)
    described = {name for name in kvpool.__all__ if isinstance(getattr(kvpool, name), type)}
    assert described <= {*headings}
    assert {"make_req_to_token_pool", "snapshot", "remote", "typing"} <= {*headings}
    assert len(headings) == len({*headings})


@each_page
def test_tables_stand_apart_from_text(page: Path) -> None:
    lines = prose(page).splitlines()
    for above, below in itertools.pairwise(lines):
        if above.startswith("|") != below.startswith("|"):
            assert not (above.strip() and below.strip()), below


def test_every_metric_is_named_in_the_docs() -> None:
    from prometheus_client.core import CounterMetricFamily

    from kvpool import metrics

    text = text_of(ROOT / "docs" / "debugging.md").partition("## Metrics")[2].partition("\n## ")[0]
    named = set()
    for row in re.findall(r"^\| (`kvpool_[^|]*)\|", text, flags=re.MULTILINE):
        first, *rest = code_in(row)
        words = first.split("_")
        starts = ["_".join(words[:count]) for count in range(1, len(words))]
        named |= {first, *rest, *(start + end for start in starts for end in rest)}
    tables = [metrics._POOLS, metrics._CACHES, metrics._TIERS, metrics._STORES, metrics._ENDPOINTS]
    tables.append(metrics._of_units("slot"))
    exported = {
        one.name + ("_total" if issubclass(one.family, CounterMetricFamily) else "")
        for table in tables
        for one in table.values()
    }
    missing = {*exported, metrics._READ_TIMES[0], metrics._AGES[0]} - named
    assert missing <= {"kvpool_slots_page_locked"}, missing


def test_every_state_of_a_segment_is_named_in_the_docs() -> None:
    stub = ast.parse(text_of(ROOT / "python" / "kvpool" / "_kvpool.pyi"))
    [segment] = [one for one in stub.body if isinstance(one, ast.ClassDef) and one.name == "Segment"]
    [state] = [one for one in segment.body if isinstance(one, ast.FunctionDef) and one.name == "state"]
    assert isinstance(state.returns, ast.Subscript)
    states = ast.literal_eval(state.returns.slice)
    documented = inspect.getdoc(kvpool.Segment.state)
    assert documented is not None
    assert {*states} == {*re.findall(r'"([\w ]+)"', documented)}
    page = text_of(ROOT / "docs" / "prefix-cache.md").partition("## Why a prompt missed")[2]
    assert {*states} == {*re.findall(r'^\| `"([\w ]+)"` \|', page.partition("\n## ")[0], flags=re.MULTILINE)}


@each_page
def test_files_that_pages_name_exist(page: Path) -> None:
    for code in code_in(prose(page)):
        path = re.fullmatch(r"(?:src|python|tests|benches|docs|examples|\.ci)/[\w./-]+", code)
        assert path is None or (ROOT / code).exists(), code


def defines(source: str, owner: str, name: str) -> bool:
    """Whether Rust source defines a function of a type, or of a module that is the whole file."""
    has_name = re.search(rf"\bfn {name}\b", source) is not None
    return (
        has_name and re.search(rf"\b(?:impl|struct|enum|trait|for)\b[^;{{]*\b{owner}\b", source) is not None
    )


@pytest.mark.parametrize("page", ["one-allocation.md", "one-prefix.md"])
def test_symbols_of_the_pages_that_follow_a_call_exist(page: str) -> None:
    sources = {
        path.relative_to(ROOT).as_posix(): text_of(path) for path in sorted((ROOT / "src").rglob("*.rs"))
    }
    text = text_of(ROOT / "docs" / page)
    symbols = {code for code in code_in(text) if re.fullmatch(r"\w+::\w+", code)}
    assert len(symbols) > 30
    for symbol in symbols:
        owner, name = symbol.split("::")
        named = {path: source for path, source in sources.items() if f"fn {name}" in source}
        files = [s for path, s in named.items() if Path(path).stem == owner or defines(s, owner, name)]
        assert any(re.search(rf"\bfn {name}\b", source) for source in files), symbol
    words = {word for source in sources.values() for word in re.findall(r"\w+", source)}
    for code in code_in(text):
        if re.fullmatch(r"[a-z]\w*_\w+", code):
            assert code in words, code
    # A step names its file first, then its functions.
    for row in re.findall(r"^\| *\d\w* *\|([^|]*)\|", text, flags=re.MULTILINE):
        file, *rest = code_in(row)
        for symbol in rest:
            owner, _, name = symbol.rpartition("::")
            is_module = Path(file).stem == owner or not owner
            found = re.search(rf"\bfn {name}\b", sources[file]) if is_module else None
            assert found or defines(sources[file], owner, name), f"{symbol} in {file}"


def test_the_pages_name_the_python_that_ci_runs() -> None:
    found = re.search(r'python-version: "([\d.]+)"', text_of(ROOT / ".github" / "workflows" / "ci.yml"))
    assert found is not None
    for page in ("README.md", "docs/testing.md"):
        assert f"| Linux x86-64, CPython {found[1]}, PyTorch" in text_of(ROOT / page), page


def commands(page: Path) -> list[str]:
    """The commands of a page: code between backticks and shell blocks."""
    shell = [line for kind, _, source in fences(page) if kind == "sh" for line in source.splitlines()]
    return [*code_in(prose(page)), *shell]


def make_commands() -> set[str]:
    """The targets of the Makefile that are commands, not files."""
    found = re.search(r"^COMMANDS := ((?:.*\\\n)*.*)$", text_of(ROOT / "Makefile"), flags=re.MULTILINE)
    assert found is not None
    return {*re.findall(r"[\w-]+", found[1])}


def test_make_help_lists_commands() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S607
    listed = {*re.findall(r"^make ([\w-]+) +\S", done.stdout, flags=re.MULTILINE)}
    assert {"help", "demo", "dev", "test", "test-engines", "lint", "bench", "gpu"} <= listed
    assert listed <= make_commands()
    for file in (ROOT / "Makefile", ROOT / ".ci" / "run", *(ROOT / ".github" / "workflows").iterdir()):
        called = re.findall(r"^ *(?:- run: )?make ([\w-]+)", text_of(file), flags=re.MULTILINE)
        assert {*called} <= make_commands(), file


@each_page
def test_commands_that_pages_name_exist(page: Path) -> None:
    from kvpool.tools.cli import make_parsers

    targets = make_commands()
    known = make_parsers()
    for command in commands(page):
        if make := re.match(r"make ([\w-]+)", command):
            assert make[1] in targets, command
        if tool := re.match(r"kvpool ([a-z]+)(.*)", command):
            assert tool[1] in known, command
            options = {option for action in known[tool[1]]._actions for option in action.option_strings}
            assert set(re.findall(r"--[\w-]+", tool[2])) <= options, command


def test_charts_are_those_of_the_tables() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benches" / "chart.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def numbers(text: str) -> list[float]:
    """The numbers in a text."""
    return [float(found.replace(",", "")) for found in re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?", text)]


def test_quoted_figures_are_those_of_the_results() -> None:
    measured = {
        float(f"{number:.{digits}g}") for number in numbers(text_of(RESULTS)) for digits in (2, 3, 4, 5)
    }
    page = text_of(ROOT / "docs" / "benchmarks.md")
    table = page.partition("## What the README quotes")[2].partition("\n## ")[0]
    rows = [row.split("|")[2:] for row in table.splitlines() if row.startswith("| ")][1:]
    assert len(rows) > 10
    for row in rows:
        quoted = numbers(re.sub(r"\([^)]*\)|`[^`]*`", "", " ".join(row)))
        assert quoted, row
        assert set(quoted) <= measured, row


def test_figures_are_filled_in() -> None:
    for page in PAGES:
        assert not re.search(r"@[A-Z0-9]+@", text_of(page))
