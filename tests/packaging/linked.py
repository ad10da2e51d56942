"""The crates linked into the extension, Rust's standard library among them, with their licences.

python tests/packaging/linked.py licences           writes docs/third-party-licences.txt
python tests/packaging/linked.py licences --check   compares it
python tests/packaging/linked.py sbom TARGET FILE   writes a bill of materials for a Rust target
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LICENCES = ROOT / "docs" / "third-party-licences.txt"
TARGETS = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu")
FEATURES = "cuda,python"
# The licence that is taken where a crate leaves the choice: the first file that it has.
TEXTS = ("LICENSE-MIT", "LICENSE-MIT0", "LICENSE_A2", "LICENSE", "LICENSE.txt")
STD = "std"

HEAD = """\
kvpool's wheels contain compiled code of the Rust crates below, each under the licence whose text follows its
name, and Rust's standard library, under the Apache License, Version 2.0, which is kvpool's own.
"""


@dataclass(frozen=True)
class Crate:
    """A crate that is linked, and the crates that it calls."""

    name: str
    version: str
    licence: str
    needs: set[str] = field(default_factory=set, compare=False)

    @property
    def purl(self) -> str:
        """Its package URL."""
        if self.name == STD:
            return f"pkg:github/rust-lang/rust@{self.version}"
        return f"pkg:cargo/{self.name}@{self.version}"


def output(*command: str) -> str:
    """The output of a command."""
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


@functools.cache
def linked(target: str) -> tuple[Crate, ...]:
    """kvpool, what is linked into it for a Rust target, and the standard library, which all need.

    These are neither tools of the build nor crates that only tests need.
    """
    tree = output(
        *("cargo", "tree", "--locked", "--target", target, "--features", FEATURES),
        *("--edges", "normal,no-proc-macro", "--no-dedupe", "--prefix", "depth", "--format", "{p}|{l}"),
    )
    found: dict[str, Crate] = {}
    path: list[Crate] = []
    for line in tree.splitlines():
        match = re.fullmatch(r"(\d+)([\w-]+) v(\S+)[^|]*\|(.*)", line)
        if match is None:
            raise ValueError(f"cargo tree printed {line!r}")
        depth, name, version, licence = match.groups()
        crate = Crate(name, version, licence.replace("/", " OR "))
        crate = found.setdefault(crate.purl, crate)
        path[int(depth) :] = [crate]
        if int(depth):
            path[-2].needs.add(crate.purl)
    release = re.search(r"^release: (\S+)$", output("rustc", "-vV"), flags=re.MULTILINE)
    if release is None:
        raise ValueError("rustc names no release")
    std = Crate(STD, release[1], "MIT OR Apache-2.0")
    for crate in found.values():
        crate.needs.add(std.purl)
    return (*found.values(), std)


def checksums() -> dict[tuple[str, str], str]:
    """The SHA-256 of each crate's source, by name and version."""
    lock = (ROOT / "Cargo.lock").read_text(encoding="utf-8")
    packages = re.findall(
        r'^name = "(.+)"\nversion = "(.+)"\nsource = ".+"\nchecksum = "(.+)"$', lock, flags=re.MULTILINE
    )
    return {(name, version): checksum for name, version, checksum in packages}


def sbom(target: str) -> dict[str, Any]:
    """A bill of materials, CycloneDX 1.6. Equal sources and compilers give equal ones: it has no date."""
    sums = checksums()
    kvpool, *others = linked(target)
    itself = f"pkg:pypi/{kvpool.name}@{kvpool.version}"

    def component(crate: Crate, purl: str) -> dict[str, Any]:
        checksum = sums.get((crate.name, crate.version))
        return {
            "type": "library",
            "bom-ref": purl,
            "name": crate.name,
            "version": crate.version,
            "purl": purl,
            "licenses": [{"expression": crate.licence}],
        } | ({"hashes": [{"alg": "SHA-256", "content": checksum}]} if checksum else {})

    others.sort(key=lambda crate: crate.name)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component(kvpool, itself)},
        "components": [component(crate, crate.purl) for crate in others],
        "dependencies": [
            {"ref": ref, "dependsOn": sorted(crate.needs)}
            for ref, crate in [(itself, kvpool), *((crate.purl, crate) for crate in others)]
        ],
    }


def licences() -> str:
    """The licence texts of all crates that are linked for any of the targets."""
    crates: set[Crate] = set()
    folders: dict[tuple[str, str], Path] = {}
    for target in TARGETS:
        crates.update(crate for crate in linked(target)[1:] if crate.name != STD)
        metadata = output(
            *("cargo", "metadata", "--locked", "--format-version", "1"),
            *("--filter-platform", target, "--features", FEATURES),
        )
        for package in json.loads(metadata)["packages"]:
            folders[package["name"], package["version"]] = Path(package["manifest_path"]).parent
    by_text: dict[str, list[Crate]] = {}
    for crate in sorted(crates, key=lambda crate: (crate.name, crate.version)):
        folder = folders[crate.name, crate.version]
        file = next((folder / name for name in TEXTS if (folder / name).is_file()), None)
        if file is None:
            raise FileNotFoundError(f"{crate.name} {crate.version} has none of {', '.join(TEXTS)}")
        text = "\n".join(line.rstrip() for line in file.read_text(encoding="utf-8").splitlines())
        by_text.setdefault(textwrap.dedent(text).strip("\n"), []).append(crate)
    parts = [HEAD]
    for text, users in by_text.items():
        names = "\n".join(f"{crate.name} {crate.version} ({crate.licence})" for crate in users)
        parts.append(f"{'-' * 80}\n{names}\n\n{text}\n")
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description="What is linked into the extension.")
    commands = parser.add_subparsers(dest="command", required=True)
    texts = commands.add_parser("licences", help="write the texts of the licences")
    texts.add_argument("--check", action="store_true", help="compare, and write nothing")
    bill = commands.add_parser("sbom", help="write a bill of materials")
    bill.add_argument("target")
    bill.add_argument("file", type=Path)
    args = parser.parse_args()
    if args.command == "sbom":
        args.file.parent.mkdir(parents=True, exist_ok=True)
        args.file.write_text(json.dumps(sbom(args.target), indent=1) + "\n", encoding="utf-8")
    elif not args.check:
        LICENCES.write_text(licences(), encoding="utf-8")
    elif LICENCES.read_text(encoding="utf-8") != licences():
        sys.exit(f"{LICENCES.relative_to(ROOT)} is out of date: make licences")


if __name__ == "__main__":
    main()
