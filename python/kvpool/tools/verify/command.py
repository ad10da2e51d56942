"""The command `kvpool verify`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from kvpool.errors import ConfigError, KvPoolError
from kvpool.tools.needs import COMMANDS
from kvpool.tools.options import Parser, at_least
from kvpool.tools.output import fail, need, refuse, waiting

if TYPE_CHECKING:
    from argparse import Namespace

    from kvpool._kvpool import CacheLayout

DESCRIPTION = """\
Fill every entry of a layout with bytes that tell what they are, have them
moved, and read them back.

The first wrong byte is named by what it should be and what it is, and ends the
command with status 1. What is not installed, or does not take the layout, is
left out, with the reason. It needs no GPU."""

OVER = (
    "pool",
    "arena",
    "host-tier",
    "arena-tier",
    "file-store",
    "nixl",
    "vllm-offload",
    "vllm-connector",
    "vllm-transfer",
)
"""What can be verified: the names of `kvpool.verify.DRIVERS`, which needs NumPy."""

PAGE_SIZE, DTYPE, HEADS, HEAD_DIM = 16, "bfloat16", 2, 64


def make_parser() -> Parser:
    """Return the parser of its options."""
    parser = Parser("kvpool verify", DESCRIPTION)
    add, count = parser.add_argument, at_least(1)
    add("--config", type=Path, metavar="CONFIG", help="a model's Hugging Face config.json, or its folder")
    add(
        "--layers",
        type=count,
        metavar="N",
        help="layers of full attention alone (default: a window and states as well)",
    )
    add("--heads", type=count, metavar="N", help=f"K and V heads per layer (default: {HEADS})")
    add("--head-dim", type=count, metavar="N", help=f"elements per head (default: {HEAD_DIM})")
    add("--dtype", metavar="DTYPE", help=f"data type of K and V (default: the model's, or {DTYPE})")
    add(
        "--page-size",
        type=count,
        default=PAGE_SIZE,
        metavar="N",
        help=f"tokens per page (default: {PAGE_SIZE})",
    )
    add("--tp", type=count, default=1, metavar="N", help="GPUs that share each layer (default: 1)")
    add("--over", metavar="NAMES", help=f"some of {', '.join(OVER)}")
    add("--tokens", type=count, metavar="N", help="tokens of all requests (default: about 64 MiB of them)")
    add("--device", default="cpu", metavar="DEVICE", help="device of the pools (default: cpu)")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    return parser


def run(options: Namespace) -> int:
    """Run the command, and return its exit status."""
    need("verify", *COMMANDS["verify"].needs)
    names = _names(options.over)
    try:
        layout = _layout(options)
    except (ConfigError, TypeError) as error:
        refuse(str(error))
    except OSError as error:
        fail(str(error))
    with waiting("loading what is verified"):
        from rich.console import Console  # noqa: PLC0415 - of an extra, as the rest

        from kvpool.tools.verify.proofs import prove_all  # noqa: PLC0415
        from kvpool.tools.verify.report import as_json, print_report  # noqa: PLC0415

    console = Console(stderr=True)
    try:
        results = prove_all(
            layout,
            names,
            options.tokens,
            options.device,
            console if console.is_terminal and not options.json else None,
        )
    except ConfigError as error:
        refuse(str(error))
    except (ImportError, KvPoolError) as error:
        _fail_of(error)
    except (OSError, MemoryError) as error:
        fail(str(error) or "out of memory")
    if options.json:
        sys.stdout.write(json.dumps(as_json(layout, results)) + "\n")
    else:
        print_report(layout, results, Console())
    finding = next((one.proof.finding for one in results if one.proof and one.proof.finding), None)
    if finding is not None:
        fail(str(finding))
    if all(one.proof is None for one in results):
        fail("nothing could be verified")
    return 0


def _names(text: str | None) -> list[str]:
    """Return what to verify, in the order that is given."""
    names = [*OVER] if text is None else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in OVER:
            refuse(f"--over: there is no {name!r}; there are {', '.join(OVER)}")
    return [*dict.fromkeys(names)]


def _layout(options: Namespace) -> CacheLayout:
    from kvpool.tools.verify.layouts import layout_of_model, layout_of_options  # noqa: PLC0415

    if options.config is not None:
        for name in ("layers", "heads", "head_dim"):
            if getattr(options, name) is not None:
                refuse(f"--{name.replace('_', '-')} and --config: give one of them")
        return layout_of_model(
            options.config, page_size=options.page_size, dtype=options.dtype, tp=options.tp
        )
    if options.tp != 1:
        refuse("--tp is for --config")
    return layout_of_options(
        options.layers,
        options.heads or HEADS,
        options.head_dim or HEAD_DIM,
        page_size=options.page_size,
        dtype=options.dtype or DTYPE,
    )


def _fail_of(error: Exception) -> NoReturn:
    fail(f"{type(error).__name__}: {error}")
