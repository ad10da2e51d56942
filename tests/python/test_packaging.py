"""The published packages: source distribution, page on the index, extras, and checks of wheels."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import check_wheel
import linked
import pytest

ROOT = Path(__file__).parents[2]
TARGET = "x86_64-unknown-linux-gnu"
BOM = "INFO/sboms/kvpool.cyclonedx.json"


def tracked() -> set[str]:
    """The files that git knows here."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a checkout of git")
    done = subprocess.run([git, "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    return set(done.stdout.splitlines())


def test_the_source_distribution_is_the_checkout(tmp_path: Path) -> None:
    files = tracked()
    command = [sys.executable, "-m", "maturin", "sdist", "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [path] = tmp_path.iterdir()
    with tarfile.open(path) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert packed - {"PKG-INFO"} == {name for name in files if not name.startswith(".github/")}
    assert "PKG-INFO" in packed


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_classifiers_name_the_pythons_that_ci_runs() -> None:
    project, workflow = text_of(ROOT / "pyproject.toml"), text_of(ROOT / ".github" / "workflows" / "ci.yml")
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    versions = re.findall(r"^ +python-version: (.*)$", workflow, flags=re.MULTILINE)
    run = {version for line in versions for version in re.findall(r'"(3\.\d+)"', line)}
    assert {*named} == run
    assert f'requires-python = ">={named[0]}"' in project


def test_extras_that_are_named_exist() -> None:
    table = (
        text_of(ROOT / "pyproject.toml").partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    )
    extras = set(re.findall(r"^(\w+) = ", table, flags=re.MULTILINE))
    assert len(extras) > 5
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    named = {
        (path, extra)
        for path in [*pages, *(ROOT / "python").rglob("*.py")]
        for names in re.findall(r"(?:kvpool|'\.)\[([a-z][a-z,]*)\]", text_of(path))
        for extra in names.split(",")
    }
    assert len(named) > 10
    assert [(path, extra) for path, extra in named if extra not in extras] == []


def test_the_page_on_the_index_stands_by_itself() -> None:
    text = text_of(ROOT / "docs" / "index-page.md")
    assert text.startswith("# kvpool\n\n```sh\npip install kvpool\n```\n")
    assert re.findall(r"\]\((?!https:)[^)]*\)|\]\[|<img", text) == []


def test_linked_crates_are_neither_tools_nor_parts_of_the_tests() -> None:
    names = {crate.name for crate in linked.linked(TARGET)}
    assert {"kvpool", "pyo3", "numpy", "cudarc", "libc", "std"} <= names
    assert names.isdisjoint({"pyo3-macros", "pyo3-build-config", "proptest", "loom", "cc", "autocfg"})
    bill = linked.sbom(TARGET)
    refs = {part["bom-ref"] for part in [bill["metadata"]["component"], *bill["components"]]}
    assert refs == {edges["ref"] for edges in bill["dependencies"]}
    assert all(set(edges["dependsOn"]) < refs for edges in bill["dependencies"])
    assert all("hashes" in part for part in bill["components"] if part["name"] != "std")


def fake_wheel(folder: Path, **changes: bytes | None) -> check_wheel.Wheel:
    """A wheel that passes every check of its files, but for `changes`: other contents, or `None` for none."""
    kernels = b"".join(
        path.read_bytes() for end in ("ptx", "cubin") for path in check_wheel.KERNELS.rglob(f"*.{end}")
    )
    info = "kvpool-1.0.dist-info"
    page = "Requires-Python: >=3.10\nLicense-Expression: A\nAuthor: B\nSummary: C\n\n[a link](https://example.org)\n"
    files: dict[str, bytes | None] = {
        "kvpool/py.typed": b"",
        "kvpool/_kvpool.pyi": b"",
        "kvpool/_kvpool.abi3.so": bytes(18) + (62).to_bytes(2, "little") + kernels,
        f"{info}/METADATA": page.encode(),
        f"{info}/licenses/LICENSE": (ROOT / "LICENSE").read_bytes(),
        f"{info}/licenses/docs/third-party-licences.txt": linked.LICENCES.read_bytes(),
        BOM.replace("INFO", info): json.dumps(linked.sbom(TARGET)).encode(),
    }
    path = folder / "kvpool-1.0-cp310-abi3-manylinux_2_17_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (
            files | {name.replace("INFO", info): data for name, data in changes.items()}
        ).items():
            if data is not None:
                archive.writestr(name, data)
    return check_wheel.Wheel(path)


def problems(wheel: check_wheel.Wheel) -> list[str]:
    return [
        *check_wheel.problems_of_size(wheel),
        *check_wheel.problems_of_extension(wheel),
        *check_wheel.problems_of_paths(wheel),
        *check_wheel.problems_of_contents(wheel),
    ]


def test_a_good_wheel_passes(tmp_path: Path) -> None:
    assert problems(fake_wheel(tmp_path)) == []


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("kvpool/big", bytes(check_wheel.LARGEST), "more than 12,000,000"),
        ("kvpool/_kvpool.abi3.so", bytes(20), "for ELF machine 0"),
        ("kvpool/_kvpool.abi3.so", bytes(18) + b"\x3e\0", "rows.ptx is not in it"),
        ("kvpool/a.py", str(linked.ROOT / "src").encode(), f"kvpool/a.py names {linked.ROOT}"),
        ("kvpool/py.typed", None, "lacks kvpool/py.typed"),
        ("INFO/METADATA", b"Author: B\n\n", "its metadata lacks Requires-Python"),
        ("INFO/METADATA", b"Author: B\n\n[a](docs/b.md)\n", "its page has relative links"),
        ("INFO/licenses/LICENSE", b"", "lacks LICENSE"),
        (BOM, None, "has 0 bills of materials"),
        (BOM, b'{"components": []}', "lacks pkg:cargo/pyo3@"),
        (BOM, b'{"components": [{"purl": "pkg:cargo/a@1"}]}', "lists pkg:cargo/a@1"),
        ("tests/a.py", b"", "has tests/a.py"),
    ],
)  # fmt: skip
def test_faults_of_a_wheel_are_named(tmp_path: Path, name: str, data: bytes | None, said: str) -> None:
    wrong = problems(fake_wheel(tmp_path, **{name: data}))
    assert any(said in problem for problem in wrong), wrong
