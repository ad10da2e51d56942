"""Serves a small model through the pools, and checks every request: `python -m kvpool_serving`."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from typing import TYPE_CHECKING, NoReturn

import torch
from rich.console import Console

import kvpool
from kvpool import ConfigError, KvPoolError
from kvpool_serving import report
from kvpool_serving.service import CONFIGS, ServeConfig, default_device

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DESCRIPTION = """\
Serve a small model with random weights through the pools, and check every
request against the model alone.

Streams a few requests, serves a burst of them with continuous batching in a pool
that is too small for all, and generates each again with the model alone. With
--conversations, serves users who share a system prompt and whose turns repeat the
earlier ones: with the prefix cache and without it. With --host-tokens, pages that
the cache evicts come back from host memory, and with --store also those of earlier
runs, however these ended. The exit status is 1 if a token differs or a slot is
missing at the end."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _at_least(least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} on")
        return int(text)

    return count


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options; their names are the fields of `ServeConfig`."""
    parser = _Parser(
        prog="kvpool_serving",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    counted: list[tuple[str, int, str]] = [
        ("requests", 1, "requests of the burst"),
        ("conversations", 0, "users with a conversation of several turns, in place of the burst"),
        ("per-step", 1, "requests or users that arrive in each step"),
        ("pool-size", 1, "token slots"),
        ("page-size", 1, "slots per page"),
        ("host-tokens", 0, "tokens of host memory below the prefix cache; 0 for none"),
        ("prefill-budget", 1, "new tokens per step"),
        ("seed", 0, "seed of weights and requests"),
    ]
    defaults = {field.name: field.default for field in fields(ServeConfig)}
    parser.add_argument("--model", choices=CONFIGS, default=defaults["model"], help="default: %(default)s")
    for name, least, text in counted:
        default = defaults[name.replace("-", "_")]
        parser.add_argument(
            f"--{name}", type=_at_least(least), default=default, metavar="N", help=f"{text} [{default}]"
        )
    parser.add_argument(
        "--store", default="", metavar="FOLDER", help="keep pages in files there, below host memory"
    )
    parser.add_argument(
        "--store-mib", type=_at_least(1), metavar="N", help="the most MiB of these files [1024]"
    )
    parser.add_argument(
        "--swap",
        choices=("auto", "load", "compute"),
        default="auto",
        help="load evicted prefixes from host memory, compute them, or do what is faster [auto]",
    )
    parser.add_argument("--device", default=default_device(), help="in PyTorch's notation [%(default)s]")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and stream nothing")
    return parser


def _check_device(device: str) -> None:
    """Check that pools and PyTorch can use the device."""
    kvpool.PagePool(1, 1, device=device)
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # PyTorch without CUDA fails an assertion
        why = str(error).splitlines()[0]
        raise kvpool.BackendUnavailableError(f"PyTorch cannot use {device}: {why}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status."""
    parser = make_parser()
    options = vars(parser.parse_args(arguments))
    as_json = options.pop("json")
    if options["store_mib"] is None:
        del options["store_mib"]
    elif not options["store"]:
        parser.error("--store-mib is for --store")
    try:
        config = ServeConfig(**options)
        _check_device(config.device)
        result = report.run(config, Console(quiet=as_json))
    except ConfigError as error:
        parser.error(str(error))
    except (KvPoolError, MemoryError) as error:
        parser.exit(1, f"{parser.prog}: {type(error).__name__}: {error}\n")
    if as_json:
        print(json.dumps(report.as_json(result)))
    return 0 if result.is_right else 1


if __name__ == "__main__":
    sys.exit(main())
