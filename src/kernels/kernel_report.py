"""Reports the limits of the kernels' machine code: computed from the assembled code, not measured.

    python src/kernels/kernel_report.py --tools TOOLS            prints the table
    python src/kernels/kernel_report.py --tools TOOLS --markdown prints it in the format of benches/RESULTS.md

For each kernel the script follows the shortest path through the machine code that moves a whole piece of a
row in the widest words, and counts. Two limits follow:

- Issue: a multiprocessor issues four warp instructions per clock. Those of lower rate count as one.
- Latency (Little's law): bytes in flight, with as many blocks as the registers admit, over the time
  that memory takes to answer.

The bandwidth share is the smaller of both over the bandwidth of the memory, at most 1. Actual kernels
reach less: launches, the tail of a grid and the memory's own overhead are left out. TOOLS needs
`nvidia-cuda-nvdisasm` beside what generate.py needs.
"""

from __future__ import annotations

import argparse
import heapq
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from generate import ASSEMBLERS, CUBINS, HERE, GenerateError, registers, run, source, tool
from rich.console import Console
from rich.table import Table

DISASSEMBLER = "nvidia/cu13/bin/nvdisasm"
BLOCK = 256
WARP = 32
ISSUES_A_CLOCK = 4
REGISTERS = 65536
# The assumed latency of memory under load: more than twice the latency when idle, for which
# microbenchmarks ("Dissecting the NVIDIA Hopper Architecture", 2024) found some 475 clocks on A100 and H100.
LATENCY_NS = 800.0
WIDE = 16
INDEX_BYTES = 8


@dataclass(frozen=True)
class Device:
    """A device, with figures from NVIDIA's data sheet or architecture paper."""

    name: str
    multiprocessors: int
    boost_ghz: float
    gigabytes_s: float
    warps: int

    @property
    def bytes_a_clock(self) -> float:
        """Bytes of memory bandwidth per multiprocessor and clock."""
        return self.gigabytes_s / self.boost_ghz / self.multiprocessors

    def resident_warps(self, registers: int) -> int:
        """Resident warps of a multiprocessor, in whole blocks."""
        of_block = -(-registers // 8) * 8 * BLOCK
        return min(REGISTERS // of_block * BLOCK, self.warps * WARP) // BLOCK * BLOCK // WARP


DEVICES = {
    80: Device("A100 80 GB SXM", 108, 1.41, 2039, 64),
    90: Device("H100 SXM", 132, 1.755, 3350, 64),
    100: Device("B200", 148, 1.965, 8000, 64),
    120: Device("RTX 5090", 170, 2.407, 1792, 48),
}


@dataclass(frozen=True)
class Case:
    """A path: the number and size of the words it reads and writes, and instructions it contains."""

    title: str
    module: str
    kernel: str
    reads: tuple[int, int]
    writes: tuple[int, int]
    #: Other reads: an index has two halves.
    others: int = 2
    #: The beginning of an opcode, and its least number of occurrences.
    marks: tuple[str, int] = ("", 0)


CASES = (
    Case("store, words", "rows", "kvpool_store_wide", (WIDE, 4), (WIDE, 4)),
    Case("store, listed", "rows", "kvpool_store_wide_listed", (WIDE, 4), (WIDE, 4), others=0),
    Case(
        "store, bf16 to 8 bits, scaled",
        "rows",
        "kvpool_store_narrowed",
        (WIDE, 2),
        (8, 2),
        marks=("FFMA", 32),
    ),
    Case("gather", "rows", "kvpool_gather", (WIDE, 4), (WIDE, 4)),
    Case("move, copy", "rows", "kvpool_move", (WIDE, 4), (WIDE, 4), others=4),
    Case("zero, reset", "rows", "kvpool_zero", (WIDE, 0), (WIDE, 4)),
    Case("kv_indices", "table", "kvpool_kv_indices", (4, 8), (4, 8), others=6),
    Case("zero of table rows", "table", "kvpool_zero_columns_listed", (4, 0), (4, 8), others=0),
    Case("plan, kv_indices", "plan", "kvpool_plan_listed", (4, 4), (4, 4), others=0),
)

WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


@dataclass(frozen=True)
class Instruction:
    """An instruction and its possible successors."""

    opcode: str
    next: tuple[int, ...]
    is_conditional: bool = False

    def width(self, name: str) -> int:
        """Bytes of global memory that it reads or writes, according to its name."""
        if not self.opcode.startswith(f"{name}."):
            return 0
        parts = self.opcode.split(".")
        return next((WIDTHS[part] for part in parts if part in WIDTHS), 4)


def kernels(listing: str) -> dict[str, list[Instruction]]:
    """The kernels of a listing of the disassembler."""
    found = {}
    for section in re.split(r"^\.text\.", listing, flags=re.MULTILINE)[1:]:
        name = section.partition(":")[0]
        lines: list[str] = []
        labels: dict[str, int] = {}
        for line in section.splitlines()[1:]:
            if label := re.match(r"\s*(\.L_\w+):", line):
                labels[label.group(1)] = len(lines)
            elif code := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;?\s*(?:/\*.*)?$", line):
                lines.append(code.group(1))
            elif lines and re.match(r"\s*\.section", line):
                break
        found[name] = [instruction(line, at, labels, len(lines)) for at, line in enumerate(lines)]
    return found


def instruction(line: str, at: int, labels: dict[str, int], end: int) -> Instruction:
    """Instruction number `at` of a kernel with `end` instructions."""
    words = line.split()
    is_conditional = words[0].startswith("@")
    opcode = words[1] if is_conditional else words[0]
    name = opcode.partition(".")[0]
    after = (at + 1,) if at + 1 < end else ()
    if name in {"BRA", "BRX", "BRXU", "JMP", "JMX", "JMXU"}:
        targets = tuple(labels[label] for label in re.findall(r"\.L_\w+", line) if label in labels)
        # Uniform branches have their condition after the name.
        may_pass = is_conditional or re.search(r"BRA\S*\s+!?U?P\d", line) is not None
        return Instruction(opcode, targets + (after if may_pass else ()))
    if name == "CALL":
        # A target in this kernel; otherwise a function that returns.
        return Instruction(opcode, after + tuple(labels[label] for label in re.findall(r"\.L_\w+", line)))
    if name in {"EXIT", "RET"}:
        return Instruction(opcode, after if is_conditional else ())
    return Instruction(opcode, after, is_conditional)


# Reads, writes, other reads and marks on the way to an instruction; and its number.
Counts = tuple[int, int, int, int]
State = tuple[int, Counts]


def counted(here: Instruction, counts: Counts, case: Case) -> list[Counts]:
    """The counts after an instruction, executed or skipped; none if no matching path contains it."""
    reads, writes, others, marks = counts
    mark, least = case.marks
    if mark and here.opcode.startswith(mark):
        marks = min(marks + 1, least)
    skipped = (reads, writes, others, marks)
    read, write = here.width("LDG"), here.width("STG")
    if not read and not write:
        return [skipped]
    found = [skipped] if here.is_conditional else []
    if read and others < case.others and read <= INDEX_BYTES:
        found.append((reads, writes, others + 1, marks))
    if read == case.reads[0] and reads < case.reads[1]:
        found.append((reads + 1, writes, others, marks))
    # All reads come before the first write.
    if write == case.writes[0] and writes < case.writes[1] and reads == case.reads[1]:
        found.append((reads, writes + 1, others, marks))
    return found


def shortest(code: list[Instruction], case: Case) -> list[Instruction]:
    """The shortest path through a kernel with the reads and writes of a case.

    Raises:
        GenerateError: If there is none.
    """
    goal = (case.reads[1], case.writes[1], case.others, case.marks[1])
    start: State = (0, (0, 0, 0, 0))
    queue: list[tuple[int, int, Counts]] = [(1, *start)]
    came: dict[State, State | None] = {start: None}
    best: dict[State, int] = {start: 1}
    while queue:
        steps, at, counts = heapq.heappop(queue)
        if best[at, counts] < steps:
            continue
        here = code[at]
        for after in counted(here, counts, case):
            if not here.next and after == goal:
                way = [at]
                state: State | None = came[at, counts]
                while state is not None:
                    way.append(state[0])
                    state = came[state]
                return [code[step] for step in reversed(way)]
            for target in here.next:
                if steps + 1 < best.get((target, after), sys.maxsize):
                    best[target, after] = steps + 1
                    came[target, after] = (at, counts)
                    heapq.heappush(queue, (steps + 1, target, after))
    raise GenerateError(f"{case.kernel}: no path for {case.title!r}")


def row(case: Case, architecture: int, code: list[Instruction], registers: int) -> list[str]:
    """The line of a case: counted and derived figures."""
    device = DEVICES[architecture]
    count = len(shortest(code, case))
    read, written = (width * number for width, number in (case.reads, case.writes))
    warps = device.resident_warps(registers)
    in_flight = warps * WARP * read
    issue = ISSUES_A_CLOCK * WARP * (read + written) / count / device.bytes_a_clock
    # Only reads are waited for; writes follow at the same pace.
    clocks = LATENCY_NS * device.boost_ghz
    latency = in_flight / clocks * (read + written) / read / device.bytes_a_clock if read else float("inf")
    return [
        case.title,
        f"sm_{architecture}",
        str(registers),
        str(warps),
        f"{in_flight / 1024:.0f}",
        str(count),
        f"{count / (read + written):.2f}",
        f"{issue:.2f}",
        f"{latency:.2f}" if read else "",
        f"{min(1.0, issue, latency):.2f}",
    ]


HEADINGS = (
    "path",
    "code",
    "registers",
    "warps",
    "KiB in flight",
    "instructions",
    "for a byte",
    "issue",
    "latency",
    "share",
)


def lines(tools: Path) -> list[list[str]]:
    """All lines of the table.

    Raises:
        GenerateError: If a tool is missing, or a kernel has no such path.
    """
    disassembler, assembler = tool(tools, DISASSEMBLER), tool(tools, ASSEMBLERS[0])
    found: dict[tuple[str, int], list[str]] = {}
    for module in sorted({case.module for case in CASES}):
        for architecture in CUBINS:
            used = registers(assembler, architecture, source(module, architecture))
            cubin = HERE / "cubin" / f"{module}.sm_{architecture}.cubin"
            code = kernels(run(disassembler, "--print-code", cubin))
            for case in CASES:
                if case.module == module:
                    line = row(case, architecture, code[case.kernel], used[case.kernel])
                    found[case.title, architecture] = line
    return [found[case.title, architecture] for case in CASES for architecture in CUBINS]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", type=Path, required=True, help="folder of the compilers' pip packages")
    parser.add_argument("--markdown", action="store_true", help="the format of benches/RESULTS.md")
    arguments = parser.parse_args()
    try:
        found = lines(arguments.tools)
    except GenerateError as error:
        sys.exit(str(error))
    console = Console(width=140)
    if arguments.markdown:
        rule = ["---", "---", *["---:"] * (len(HEADINGS) - 2)]
        for line in (list(HEADINGS), rule, *found):
            console.print(f"| {' | '.join(line)} |", markup=False, highlight=False, soft_wrap=True)
        return
    table = Table()
    for number, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if number < 2 else "right")  # noqa: PLR2004
    for number, line in enumerate(found):
        table.add_row(*line, end_section=number % len(CUBINS) == len(CUBINS) - 1)
    console.print(table)


if __name__ == "__main__":
    main()
