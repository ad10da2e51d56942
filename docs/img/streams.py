"""Draws the pictures of `docs/streams.md`, readable in light and in dark mode."""

from __future__ import annotations

import html
import sys
from pathlib import Path

HERE = Path(__file__).parent
WIDTH, MARGIN, LANE = 1000, 20, 62
LEFT = 150  # where lanes begin

STYLE = """
  .card { fill: #ffffff; stroke: #d0d7de; }
  text { font-family: "Segoe UI", "Noto Sans", "DejaVu Sans", Helvetica, Arial, sans-serif; fill: #1f2328; }
  .code { font-family: ui-monospace, "SF Mono", Menlo, "DejaVu Sans Mono", monospace; }
  .muted { fill: #59636e; }
  .lane { stroke: #d0d7de; stroke-width: 1.5; }
  .host { fill: #ddf4ff; stroke: #0969da; }
  .work { fill: #dafbe1; stroke: #1a7f37; }
  .wait { fill: #fff8c5; stroke: #9a6700; }
  .busy { fill: #ffe2d5; stroke: #bc4c00; }
  .none { fill: #f6f8fa; stroke: #afb8c1; }
  .arrow { stroke: #59636e; stroke-width: 1.5; fill: none; }
  .head { fill: #59636e; }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117; stroke: #3d444d; }
    text { fill: #f0f6fc; }
    .muted { fill: #9198a1; }
    .lane { stroke: #3d444d; }
    .host { fill: #10243e; stroke: #4493f8; }
    .work { fill: #12261e; stroke: #3fb950; }
    .wait { fill: #2e2412; stroke: #d29922; }
    .busy { fill: #33180c; stroke: #f0883e; }
    .none { fill: #151b23; stroke: #656c76; }
    .arrow { stroke: #9198a1; }
    .head { fill: #9198a1; }
  }
"""


class Picture:
    """A drawing that grows by boxes, words and arrows."""

    def __init__(self, title: str, height: int) -> None:
        """An empty card with a title."""
        size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        marker = (
            'id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto"'
        )
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{html.escape(title)}">',
            f"<style>{STYLE}</style>",
            f'<defs><marker {marker}><path class="head" d="M0 0 L8 4 L0 8 z"/></marker></defs>',
            f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        ]
        self.words(MARGIN, 30, title, 16, bold=True)

    def words(
        self,
        x: float,
        y: float,
        words: str,
        size: int = 12,
        *,
        of: str = "",
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """A line of text."""
        weight = ' font-weight="600"' if bold else ""
        kind = f' class="{of}"' if of else ""
        shown = html.escape(words, quote=False)
        place = f'x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"'
        self._parts.append(f"<text {place}{weight}{kind}>{shown}</text>")

    def box(
        self, x: float, y: float, width: float, kind: str, words: str, *, height: float = 34, of: str = ""
    ) -> None:
        """A box with one line, or with two that a newline separates."""
        self._parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5"/>'
        )
        lines = words.split("\n")
        for at, line in enumerate(lines):
            middle = y + height / 2 + 4 + (at - (len(lines) - 1) / 2) * 14
            self.words(x + width / 2, middle, line, 11, anchor="middle", of=of)

    def note(self, y: float, *lines: str) -> None:
        """Lines of text below the lanes."""
        for at, line in enumerate(lines):
            self.words(LEFT, y + 16 * at, line, of="muted")

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        """An arrow along points."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        self._parts.append(f'<path class="arrow" d="M{path}" marker-end="url(#head)"{dash}/>')

    def lanes(self, top: float, *names: str) -> list[float]:
        """Lanes from left to right; where their boxes stand."""
        heights = []
        for at, name in enumerate(names):
            y = top + at * LANE
            self.words(MARGIN, y + 22, name, 12, bold=True)
            self._parts.append(
                f'<line class="lane" x1="{LEFT}" y1="{y + 17:g}" x2="{WIDTH - MARGIN}" y2="{y + 17:g}"/>'
            )
            heights.append(y)
        return heights

    def svg(self) -> str:
        """The whole file."""
        return "\n".join([*self._parts, "</svg>"]) + "\n"


def order() -> Picture:
    """Why a free waits for nothing."""
    picture = Picture("One stream: slots go to the next owner in the order of the stream", 218)
    host, stream = picture.lanes(58, "host", "current stream")
    for x, width, words in [
        (160, 90, "a = alloc(4)"),
        (260, 126, "set_kv_buffer(a)"),
        (396, 90, "attention(a)"),
        (496, 72, "free(a)"),
        (578, 90, "b = alloc(4)"),
        (678, 126, "set_kv_buffer(b)"),
    ]:
        picture.box(x, host, width, "host", words, of="code")
    for x, width, words in [
        (330, 110, "write rows of a"),
        (470, 110, "read rows of a"),
        (760, 110, "write rows of b"),
    ]:
        picture.box(x, stream, width, "work", words)
    picture.arrow((323, host + 34), (360, stream - 3))
    picture.arrow((441, host + 34), (500, stream - 3))
    picture.arrow((741, host + 34), (790, stream - 3))
    picture.note(
        188,
        "free(a) only tells the host's books. b may have the same slots at once: its rows are written after",
        "the reads of a, since the stream runs in order.",
    )
    return picture


def stage() -> Picture:
    """Slots that are on the device before anybody asks."""
    picture = Picture("The stage: the next slots are on the device before anybody asks", 276)
    picture.words(MARGIN, 76, "host's copy", 12, bold=True)
    picture.words(MARGIN, 166, "on the device", 12, bold=True)
    parts = [
        (150, 160, "none", "given back by tensors\nthat are gone"),
        (310, 190, "busy", "a = alloc(4)\n17  18  19  20"),
        (500, 120, "busy", "b = alloc(2)\n21  22"),
        (620, 230, "work", "the window: what comes next\n23  24  25  26  27  28 ..."),
        (850, 130, "none", "free positions"),
    ]
    for x, width, kind, words in parts:
        picture.box(x, 54, width, kind, words, height=40)
        picture.box(x, 144, width, kind, words, height=40)
    picture.arrow((735, 96), (735, 142))
    picture.words(725, 123, "one asynchronous copy brings thousands of slots", anchor="end", of="muted")
    picture.arrow((620, 212), (620, 188))
    picture.words(628, 214, "cursor: alloc moves it and hands out a view, no driver call", of="muted")
    picture.note(
        244,
        "free(a) looks where a lies and reads its numbers from the host's copy. Positions return when",
        "tensors are gone.",
    )
    return picture


def deferred() -> Picture:
    """A free of a tensor that the host does not know."""
    picture = Picture("A free of what only the GPU knows: slots return when their numbers have landed", 236)
    host, stream = picture.lanes(58, "host", "current stream")
    picture.box(160, host, 150, "host", "free(a.to(int64))", of="code")
    picture.box(326, host, 120, "host", "goes on", of="")
    picture.box(560, host, 90, "host", "alloc(4)", of="code")
    picture.box(760, host, 150, "host", "a later call", of="")
    picture.box(240, stream, 150, "work", "earlier work")
    picture.box(400, stream, 170, "work", "copy to page-locked\nhost memory", height=36)
    picture.arrow((235, host + 34), (410, stream - 3))
    picture.arrow((570, stream + 14), (835, stream + 14), (835, host + 37), dashed=True)
    picture.words(590, stream + 32, "event passed: the slots return", of="muted")
    picture.note(
        188,
        "available_size() counts the slots from the free on. alloc waits for the copy only where it would",
        "answer None otherwise. What is wrong with the numbers is reported by the call that completes the",
        "free.",
    )
    return picture


def fence() -> Picture:
    """Two streams, and slots that stay in use until the second has read them."""
    picture = Picture("Several streams: an event before the first use, a fence before the last", 306)
    host, compute, transfer = picture.lanes(78, "host", "compute stream", "transfer stream")
    picture.box(158, host, 106, "host", "a = alloc(256)", of="code")
    picture.box(270, host, 104, "host", "event.record()", of="code")
    picture.box(380, host, 150, "host", "transfer.wait_event", of="code")
    picture.box(546, host, 170, "host", "free(a, after=fence)", of="code")
    picture.box(880, host, 96, "host", "alloc(256)", of="code")
    picture.box(190, compute, 170, "work", "write rows of a")
    picture.box(380, compute, 360, "work", "next layers, next steps")
    picture.box(400, transfer, 330, "work", "read rows of a")
    picture.box(740, transfer, 60, "wait", "fence")
    picture.arrow((360, compute + 26), (398, transfer + 8))
    picture.box(546, host - 22, 330, "busy", "in use: neither available nor handed out", height=18)
    picture.arrow((770, transfer - 2), (876, host + 37), dashed=True)
    picture.note(
        276,
        "fence is anything with query() -> bool: a torch.cuda.Event, a ChunkCopy, a transfer handle. It is",
        "asked by later calls of the allocator; nobody waits for it.",
    )
    return picture


def graph() -> Picture:
    """What is captured, and what runs before each replay."""
    picture = Picture("CUDA graphs: fixed addresses in the graph, numbers before each replay", 238)
    host, stream = picture.lanes(58, "host", "stream")
    picture.box(160, host, 118, "host", "planner.decode", of="code")
    picture.box(290, host, 118, "wait", "capture begins")
    picture.box(418, host, 130, "host", "model.forward", of="code")
    picture.box(558, host, 106, "wait", "capture ends")
    picture.box(690, host, 118, "host", "planner.decode", of="code")
    picture.box(818, host, 130, "host", "graph.replay()", of="code")
    picture.box(190, stream, 92, "work", "metadata")
    picture.box(418, stream, 200, "none", "recorded, not run:\nset_kv_buffer, attention", height=38)
    picture.box(720, stream, 92, "work", "metadata")
    picture.box(830, stream, 150, "work", "the graph runs")
    picture.arrow((219, host + 34), (232, stream - 3))
    picture.arrow((483, host + 34), (500, stream - 3), dashed=True)
    picture.arrow((749, host + 34), (762, stream - 3))
    picture.arrow((883, host + 34), (900, stream - 3))
    picture.note(
        192,
        "The planner writes its numbers outside of the graph, to the same addresses each time. Padded rows",
        "point at row 0 and slot 0, which are nobody's. Calls that bring numbers from the host raise",
        "DriverError in a capture.",
    )
    return picture


PICTURES = {"order": order, "stage": stage, "deferred": deferred, "fence": fence, "graph": graph}


def main() -> None:
    """Draw, or with `--check` end with status 1 where a file is not what would be drawn."""
    stale = False
    for name, make in PICTURES.items():
        path, svg = HERE / f"streams-{name}.svg", make().svg()
        if "--check" not in sys.argv:
            path.write_text(svg, encoding="utf-8")
        else:
            stale |= not path.is_file() or path.read_text(encoding="utf-8") != svg
    sys.exit(stale)


if __name__ == "__main__":
    main()
