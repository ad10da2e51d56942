"""Snapshots of pools, and their files."""

from __future__ import annotations

import dataclasses
import gc
import json
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import devices
import matplotlib.image
import pytest
from common import Fence, some
from matplotlib.text import Text

import kvpool
from kvpool import (
    BufferPool,
    ChunkPool,
    ConfigError,
    GDNPool,
    HostTier,
    KVPool,
    PagePool,
    ReqToTokenPool,
    TokenToKVPoolAllocator,
    Workspace,
)
from kvpool.observe.snapshot import owners, take
from kvpool.observe.snapshot_html import to_html
from kvpool.observe.snapshot_png import _cells, time_text, to_figure
from kvpool.observe.spans import Span

if TYPE_CHECKING:
    from pathlib import Path

    from shared_fixtures import RunSnippet


pytestmark = pytest.mark.usefixtures("device")


def slots(size: int = 20, page_size: int = 1, *, debug: bool = True) -> TokenToKVPoolAllocator:
    return TokenToKVPoolAllocator(size, devices.current(), page_size, debug=debug)


def states(pool: Any) -> list[tuple[int, int, str]]:  # noqa: ANN401
    return [(span.first, span.end, span.state) for span in take(pool).spans]


@pytest.mark.parametrize("page_size", [1, 4])
def test_spans_match_the_pool(page_size: int) -> None:
    pool = slots(10 * page_size, page_size)
    first, second = some(pool.alloc(3 * page_size, owner="a")), some(pool.alloc(2 * page_size, owner="b"))
    pool.free(first[page_size : 2 * page_size])
    pool.free(second[:page_size], after=Fence())
    one = take(pool)
    assert [
        (s.first // page_size, s.end // page_size, s.state, [h[0] for h in s.holders]) for s in one.spans
    ] == [
        (1, 2, "live", ["a"]),
        (2, 3, "free", []),
        (3, 4, "live", ["a"]),
        (4, 5, "fenced", []),
        (5, 6, "live", ["b"]),
        (6, 11, "free", []),
    ]
    assert one.count == 10 * page_size
    assert one.free_runs == [page_size, 5 * page_size]
    assert one.fragmentation == pytest.approx(1 / 6)
    assert owners(one) == [("'a'", 2 * page_size), ("'b'", page_size)]
    assert sum(one.ages_s.values()) == 3 * page_size
    assert sum(one.lifetimes_s.values()) == 2 * page_size


@pytest.mark.parametrize("debug", [False, True])
def test_cached_slots_are_shown_apart(tmp_path: Path, *, debug: bool) -> None:
    pool = slots(debug=debug)
    cache = kvpool.PrefixCache(pool, name="prefixes")
    cache.insert(range(5), some(pool.alloc(5)))
    kept = some(pool.alloc(2, owner="a" if debug else None))
    assert states(pool) == [(1, 6, "evictable"), (6, 8, "live"), (8, 21, "free")]
    lease = cache.match(range(2))
    assert states(pool) == [(1, 3, "locked"), (3, 6, "evictable"), (6, 8, "live"), (8, 21, "free")]
    one = take(pool)
    assert one.in_use == 7
    assert one.cached == "5 of them cached: 3 evictable and 2 locked"
    holders = [holder[0] for span in one.spans for holder in span.holders]
    assert holders == ["prefixes", "prefixes", "a"][: 3 * debug]
    (shown,) = parse(to_html([one]))["pools"]
    assert (shown["cached"], shown["inUse"]) == (one.cached, 7)
    axes = to_figure([one]).axes[0]
    assert one.cached in axes.get_title(loc="left")
    assert [text.get_text() for text in some(axes.get_legend()).get_texts()][:4] == [
        "free",
        "fenced",
        "evictable",
        "locked",
    ]
    cells = _cells(one, {}, 1).tolist()
    assert cells[0] == cells[1] != cells[2] == cells[4] not in (cells[5], cells[-1])
    kvpool.snapshot(tmp_path / "one.png", pool)
    # Slots that a request shares count as its own, too.
    pool.share([1])
    assert states(pool)[:2] == [(1, 2, "live"), (2, 3, "locked")]
    lease.release()
    assert states(pool)[:2] == [(1, 2, "live"), (2, 6, "evictable")]
    assert len(kept) == 2


def test_a_snapshot_of_slots_whose_cache_was_cleared() -> None:
    pool = slots(8)
    cache = kvpool.PrefixCache(pool)
    cache.insert(range(4), some(pool.alloc(4)))
    lease = cache.match(range(4))
    cache.clear()
    assert states(pool) == [(1, 5, "locked"), (5, 9, "free")]
    pool.clear()
    assert states(pool) == [(1, 9, "free")]
    lease.release()
    del cache, lease
    assert states(pool) == [(1, 9, "free")]


def test_every_class_shows_its_units() -> None:
    device = devices.current()
    rows = ReqToTokenPool(3, 8, device)
    rows.alloc(2)
    assert states(rows) == [(1, 3, "live"), (3, 4, "free")]
    tracks = GDNPool(2, 1, 1, 2, 2, 4, 3, device, max_track_slots=2)
    tracks.alloc_track_slot()
    assert states(tracks) == [(3, 4, "live"), (4, 5, "free")]
    chunks = ChunkPool(3, (4,), "float32", device, pin_memory=False)
    chunk = chunks.allocate()
    assert states(chunks) == [(0, 1, "live"), (1, 3, "free")]
    pages = PagePool(4, 3, device=device)
    assert pages.alloc() == 0
    assert states(pages) == [(0, 1, "live"), (1, 3, "free")]
    buffers = BufferPool(device)
    kept = [buffers.alloc((n,), "int8") for n in (3, 100)]
    kept[0].release()
    assert states(buffers) == [(0, 1, "free"), (1, 2, "live")]
    assert [span.n_bytes for span in take(buffers).spans] == [4, 128]
    arena = Workspace(device, 1024)
    tensor = arena.empty((300,), "int8")
    assert states(arena) == [(0, 512, "live"), (512, 1024, "free")]
    sizes = [take(pool).unit_bytes for pool in (rows, tracks, chunks, pages, buffers, arena)]
    assert sizes == [32, tracks.mem_bytes() // 5, 16, 16, None, 1]
    assert (chunk is not None, len(tensor)) == (True, 300)


def test_a_full_pool_and_an_empty_one() -> None:
    pool = slots()
    assert take(pool).fragmentation == 0
    pool.alloc(20)
    assert (take(pool).free_runs, take(pool).fragmentation) == ([], 0)
    assert take(BufferPool(devices.current())).count == 0


def test_garbage_collection_is_restored() -> None:
    pool = slots()
    assert gc.isenabled()
    to_html([take(pool)])
    assert gc.isenabled()
    gc.disable()
    try:
        to_html([take(pool)])
        assert not gc.isenabled()
    finally:
        gc.enable()


def page_data(path: Path) -> dict[str, Any]:
    return parse(path.read_text(encoding="utf-8"))


def parse(text: str) -> dict[str, Any]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_the_page_contains_the_details_of_units(tmp_path: Path) -> None:
    pool = slots()
    pool.name = "decode"
    pool.alloc(3, owner="request 1")
    pool.alloc(2, owner=7)
    pool.alloc(1)
    path = tmp_path / "map.html"
    kvpool.snapshot(path, pool)
    (shown,) = page_data(path)["pools"]
    assert (shown["name"], shown["kind"], shown["unit"]) == ("decode", "TokenToKVPoolAllocator", "slot")
    assert [span[:3] for span in shown["spans"]] == [
        [1, 4, "live"],
        [4, 6, "live"],
        [6, 7, "live"],
        [7, 21, "free"],
    ]
    named = [[shown["holders"][holder][0] for holder, _ in span[4]] for span in shown["spans"]]
    assert named == [["'request 1'"], ["7"], [None], []]
    assert [count for _, _, count, _ in shown["holders"]] == [3, 2, 1]
    assert all(__file__ in shown["sites"][site] for _, site, _, _ in shown["holders"])
    assert all(age >= 0 for span in shown["spans"] for _, age in span[4])


def test_the_page_is_self_contained(tmp_path: Path) -> None:
    path = tmp_path / "map.html"
    kvpool.snapshot(path, slots())
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"(src|href)\s*=|https?://|@import|url\(", text)


def test_owners_cannot_end_the_script(tmp_path: Path) -> None:
    pool = slots()
    pool.alloc(1, owner="</script><script>alert(1)</script>")
    path = tmp_path / "map.html"
    kvpool.snapshot(path, pool)
    assert path.read_text(encoding="utf-8").count("</script>") == 2
    (shown,) = page_data(path)["pools"]
    assert shown["holders"][0][0] == repr("</script><script>alert(1)</script>")


def test_the_picture_shows_each_state(tmp_path: Path) -> None:
    pool = slots(64)
    taken = some(pool.alloc(32, owner="a"))
    pool.free(taken[16:], after=Fence())
    path = tmp_path / "map.png"
    kvpool.snapshot(path, pool)
    pixels = (matplotlib.image.imread(path)[:, :, :3] * 255).round().astype(int)
    height, width, _ = pixels.shape
    assert (height, width) > (400, 1000)
    left = pixels[:, : width // 2]

    def area(colour: str) -> int:
        wanted = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
        return int((abs(left - wanted).max(axis=2) <= 2).sum())

    live, fenced, free = area("#0072b2"), area("#ffb300"), area("#eceff1")
    assert live > 5_000
    assert fenced == pytest.approx(live, rel=0.35)
    assert free == pytest.approx(2 * live, rel=0.35)


def fragmented(size: int) -> Any:  # noqa: ANN401
    """A pool with one owner of every fourth slot, and an owner for each of the others."""
    one = take(slots())
    spans = []
    for at in range(1, size + 1, 4):
        spans += [
            Span(at, at + 1, "live", None, [("a", "here", 2.0, 1)]),
            Span(at + 1, at + 2, "live", None, [(at, "there", 3.0, 1)]),
            Span(at + 2, at + 3, "fenced", None, []),
            Span(at + 3, at + 4, "free", None, []),
        ]
    return dataclasses.replace(one, spans=spans)


def test_spans_that_share_a_cell_are_merged() -> None:
    one = fragmented(32_768)
    (kept,) = parse(to_html([one]))["pools"]
    assert [len(kept["spans"]), len(kept["holders"])] == [32_768, 8_193]
    size = 200_000
    one = fragmented(size)
    one.spans.append(Span(size + 1, 2 * size + 1, "free", None, []))
    text = to_html([one])
    (shown,) = parse(text)["pools"]
    assert len(text) < 3_000_000
    assert shown["spanCount"] == size + 1
    assert len(shown["spans"]) <= 16_384
    # A cell has 25 units: one owner has 7 of them, 6 others have one each.
    assert shown["perCell"] == 25
    first, end, state, n_bytes, held, parts, merged = shown["spans"][0]
    assert (first, end, state, n_bytes, held, merged) == (1, 26, "mixed", None, [], 25)
    assert [(count, kind, len(held)) for count, kind, held in parts] == [
        (7, "live", 1),
        (1, "live", 1),
        (1, "live", 1),
        (4, "live", 1),
        (6, "free", 0),
        (6, "fenced", 0),
    ]
    assert [held[0][0] for _, kind, held in parts if kind == "live"] == [0, 1, 2, None]
    assert shown["holders"][:2] == [["'a'", 0, size // 4, 2.0], ["1", 1, 1, 3.0]]
    assert (shown["holderCount"], shown["sites"]) == (size // 4 + 1, ["here", "there"])
    # Spans larger than a cell are not merged.
    assert shown["spans"][-1] == [size + 1, 2 * size + 1, "free", None, []]
    assert [end for _, end, *_ in shown["spans"][:-1]] == [first for first, *_ in shown["spans"][1:]]
    assert (shown["freeRuns"], shown["longestFreeRun"]) == (size // 4, size + 1)
    assert shown["runLengths"][0] == [1, size // 4 - 1]
    assert sum(count for _, count in shown["runLengths"]) == size // 4
    assert shown["ages"] == [[1.0, size // 2]]


# The parts of a browser that the page uses. Prints the content of the page at exit.
BROWSER = r"""
class Element {
  children = []; textContent = ""; style = {}; dataset = {}; classList = { toggle() {} };
  append(...children) { this.children.push(...children); }
  replaceChildren() { this.children = []; }
  setAttribute() {}
  addEventListener() {}
  getContext() { return { clearRect() {}, fillRect() {}, strokeRect() {} }; }
  get text() { return [this.textContent, ...this.children.map((child) => child.text ?? child)].join("\n"); }
}
const pools = new Element(), source = new Element();
source.textContent = DATA;
globalThis.document = {
  createElement: () => new Element(),
  getElementById: (id) => ({ data: source, pools }[id] || new Element()),
};
globalThis.getComputedStyle = () => ({ getPropertyValue: () => "" });
globalThis.matchMedia = () => new Element();
process.on("exit", () => console.log(pools.text));
"""


def run_page(text: str, end: str = "") -> str:
    """The output of a page's script."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("runs the script of the page with Node.js, which is not installed")
    found = re.search(r'application/json">(.*?)</script>\s*<script>(.*?)</script>', text, re.DOTALL)
    assert found
    script = BROWSER.replace("DATA", json.dumps(found[1])) + found[2] + end
    return subprocess.run([node, "-"], input=script, stdout=subprocess.PIPE, text=True, check=True).stdout


def test_the_script_shows_pools_and_the_unit_under_the_pointer() -> None:
    pool = slots()
    pool.alloc(3, owner="x")
    pool.alloc(1)
    tell = "for (const at of [2, 4, 20]) console.log(describe(data.pools[0], at).lines.join('; '));"
    shown = run_page(to_html([take(pool)]), tell)
    assert re.search(r"live, 3 slots; owner 'x', age [\d.]+ \w+, taken at .*test_snapshot.py", shown)
    assert re.search(r"live, 1 slot; no owner given, age ", shown)
    assert "\nfree, 16 slots\n" in shown
    assert "4 of 20 slots in use; 1 free run, the longest 16; fragmentation 0 %" in shown


def test_the_script_shows_merged_spans() -> None:
    text = to_html([fragmented(200_000)])
    shown = run_page(text, "console.log(describe(data.pools[0], 7).lines.join('; '));")
    assert "150,000 of 200,000 slots in use; 50,000 free runs, the longest 1; fragmentation 100 %" in shown
    assert "Of 200,000 spans, those within a cell are merged" in shown
    assert "and 49,901 more" in shown
    assert shown.startswith("13 slots in 13 spans; 4 slots live: owner 'a', age 2.0 s, taken at here; 1 ")
    assert "; 1 slot live: other holders, oldest 3.0 s; 3 slots free; 3 slots fenced\n" in shown


def test_one_broken_pool_does_not_hide_others() -> None:
    broken, good = take(slots()), take(slots())
    text = to_html([dataclasses.replace(broken, stats=None), good])  # type: ignore[arg-type]
    shown = run_page(text)
    assert f"{broken.name} cannot be shown: TypeError" in shown
    assert f"{good.name} (TokenToKVPoolAllocator)" in shown


def test_cells_are_few_however_many_units_there_are() -> None:
    live, free = [0, 0x72, 0xB2], [0xEC, 0xEF, 0xF1]
    half = 2**46
    spans = [Span(5, half + 5, "live", None, []), Span(half + 5, 2 * half + 5, "free", None, [])]
    one = dataclasses.replace(take(slots()), spans=spans)
    cells = _cells(one, {"in use": "#0072b2"}, half // 2 * 3)
    assert cells.tolist() == [[round((2 * a + b) / 3) for a, b in zip(live, free, strict=True)], free]
    (axes, *_) = to_figure([one]).axes
    assert axes.images[0].get_size() == (64, 128)


def test_pictures_show_names_without_markup(tmp_path: Path) -> None:
    pool = slots()
    pool.name = "$x_{$"
    for owner in ("cost $\\bad{$ 5", 7, "7"):
        pool.alloc(2, owner=owner)
    (axes, *_) = to_figure([take(pool)]).axes
    legend = axes.get_legend()
    assert legend
    shown = [text.get_text() for text in legend.get_texts()][2:]
    assert shown == [r"'cost $\\bad{$ 5' (2)", "7 (2)", "'7' (2)"]
    kvpool.snapshot(tmp_path / "map.png", pool)


def test_a_picture_limits_the_number_of_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.observe.snapshot_png._MOST_POOLS", 2)
    pools = []
    for name, count in (("a", 2), ("b", 1), ("c", 3)):
        pool = slots()
        pool.name = name
        pool.alloc(count)
        pools.append(take(pool))
    figure = to_figure(pools)
    titles = [axes.texts[0].get_text() for axes in figure.axes if axes.images]
    assert titles == ["a", "c"]
    assert [text.get_text() for text in figure.texts] == ["The 2 of 3 pools with the most units in use"]
    assert not to_figure(pools[:2]).texts


@pytest.mark.parametrize("suffix", [".html", ".png"])
def test_pools_of_every_kind_and_size(tmp_path: Path, suffix: str) -> None:
    device = devices.current()
    large = slots(300_000, 16)
    large.alloc(100_000, owner="a" * 100)
    chunks = ChunkPool(3, (4,), "float32", device, pin_memory=False)
    path = tmp_path / f"map{suffix}"
    kvpool.snapshot(path, large, chunks, BufferPool(device), slots(1, debug=False), Workspace(device, 4096))
    assert path.stat().st_size > 3_000


def test_all_living_pools_by_default(tmp_path: Path) -> None:
    pool, kv = slots(), KVPool(8, 1, 1, 2, devices.current())
    tier = HostTier(kv, 8)
    path = tmp_path / "map.html"
    kvpool.snapshot(path)
    shown = {shown["name"] for shown in page_data(path)["pools"]}
    assert pool.name in shown
    assert kv.name not in shown
    assert tier.name not in shown


@pytest.mark.parametrize("name", ["map.pdf", "map", "map.HTM"])
def test_rejects_other_file_types(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"a snapshot is \.html or \.png"):
        kvpool.snapshot(tmp_path / name, slots())
    assert not list(tmp_path.iterdir())


def test_rejects_pools_without_units(tmp_path: Path) -> None:
    kv = KVPool(8, 1, 1, 2, devices.current())
    for pool in (kv, HostTier(kv, 8)):
        with pytest.raises(TypeError, match=f"a {type(pool).__name__} hands out no units"):
            kvpool.snapshot(tmp_path / "map.html", pool)


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_a_page_needs_neither_torch_nor_matplotlib(run_snippet: RunSnippet, tmp_path: Path) -> None:
    code = f"""
    import kvpool
    try:
        kvpool.snapshot("{tmp_path}/map.html")
    except kvpool.StateError as error:
        print(error)
    pool = kvpool.TokenToKVPoolAllocator(8, "cpu", debug=True)
    kvpool.snapshot("{tmp_path}/map.html")
    try:
        kvpool.snapshot("{tmp_path}/map.png")
    except ModuleNotFoundError as error:
        print(error.name)
    """
    printed = run_snippet(code, hidden=["torch", "numpy", "matplotlib"])
    assert printed.split("\n")[0] == "no pool of this process hands out units"
    assert page_data(tmp_path / "map.html")["pools"][0]["name"] == "TokenToKVPoolAllocator-0"


def test_a_picture_has_room_for_what_it_says() -> None:
    """Nothing overlaps, and nothing is cut: measured as it is drawn."""
    pool = slots(size=4000)
    pool.name = "a name of a pool that is longer than the map above which it stands, in an engine with many"
    for number in range(14):
        pool.alloc(20 + number, owner=f"/opt/engine/model_executor/models/llama.py:{number} in forward")
    one = kvpool.ReqToTokenPool(1, 8, "cpu", debug=True)
    one.alloc(1)
    figure = to_figure([take(pool), take(one)])
    figure.canvas.draw()
    maps = [axes for axes in figure.axes if axes.images]
    others = [axes for axes in figure.axes if not axes.images]
    texts = [text for axes in maps for text in axes.findobj(Text) if text.get_text()]
    boxes = [text.get_window_extent() for text in texts]
    legends = [some(axes.get_legend()).get_window_extent() for axes in maps]
    page = figure.bbox
    beside = min(some(axes.get_tightbbox()).x0 for axes in others)
    for box in (*boxes, *legends):
        assert 0 <= box.x0 < box.x1 <= beside
        assert 0 <= box.y0 < box.y1 <= page.y1
    # The legend of the first is above the name of the second.
    assert legends[0].y0 > maps[1].texts[0].get_window_extent().y1
    assert [[tick.get_text() for tick in axes.get_yticklabels()] for axes in maps][1] == ["1"]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(6.4e-05, "64 µs"), (1e-06, "1 µs"), (0.065536, "65.5 ms"), (1.0, "1 s"), (1e6, "1,000,000 s")],
)
def test_times_are_shown_in_their_unit(seconds: float, shown: str) -> None:
    assert time_text(seconds) == shown
