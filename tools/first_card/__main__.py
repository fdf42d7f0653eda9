"""One command for a bare NVIDIA card, within six minutes: facts, the harness, times, prefill rotation, two hypotheses.

    python -m tools.first_card pack first-card.tar.gz --aiter ~/aiter     # here: sources and what a bare machine lacks
    tar xzf first-card.tar.gz && cd first-card && python3 -m tools.first_card out    # there
    python -m tools.first_card out --dry                                  # a rehearsal without a GPU

Wants Python 3.12, torch and Triton, and neither vLLM, AITER nor a network. Each section writes its JSON file when it is
done; one that ends its process or takes too long costs only itself. Exit status: 0 all comparisons held and each
planted fault was caught, 1 not so, 2 a wrong option, 3 no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CARRIED = ROOT / "carried"  # as ``pack`` lays it out; absent in a checkout
SITE = CARRIED / "site"
sys.path[:0] = [str(ROOT), str(SITE)]

from tools.common import Parser, UsageError, aligned, folders, guarded, writable  # noqa: E402
from tools.first_card import dry, pack  # noqa: E402
from vllm_aiter_mla.commands import outputs  # noqa: E402

SECONDS = {"facts": 20, "verify": 55, "churn": 85, "times": 95, "prefill": 35, "order": 20, "tune": 20}
"""By section: after how many seconds it starts nothing more. ``GRACE_S`` later it is ended."""
GRACE_S, START_S, SLOWER_DRY = 10.0, 20.0, 10
TOGETHER_S = 360.0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, checked. Raises UsageError."""
    parser = Parser(__doc__, "%(prog)s OUT [--dry] [--only SECTION,...] | pack ARCHIVE [--aiter CHECKOUT]")
    parser.add_argument("out", type=Path, help="folder for the JSON files")
    parser.add_argument("archive", type=Path, nargs="?", help="after the word pack: the archive to write")
    parser.add_argument("--dry", action="store_true", help="rehearse on this CPU")
    parser.add_argument("--only", default=",".join(SECONDS), metavar="SECTION,...", help="default: %(default)s")
    parser.add_argument("--aiter", type=Path, help="a checkout of AITER; its Triton kernels are timed too")
    parser.add_argument(
        "--python", default=sys.executable, help="of pack: the interpreter whose Triton fills the cache"
    )
    parser.add_argument("--inside", choices=("card", *dry.ENVIRONMENT), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.packs = str(options.out) == "pack"
    if options.packs is (options.archive is None):
        raise UsageError("OUT, or pack ARCHIVE, expected")
    options.only = options.only.split(",")
    if unknown := set(options.only) - set(SECONDS):
        raise UsageError(f"--only {min(unknown)}: no such section; there are {', '.join(SECONDS)}")
    if options.aiter is None and (CARRIED / "aiter").is_dir():
        options.aiter = CARRIED / "aiter"
    if options.aiter is not None and not (options.aiter / "aiter" / "ops" / "triton").is_dir():
        raise UsageError(f"--aiter {options.aiter}: no aiter/ops/triton there")
    writable({"ARCHIVE": options.archive})
    folders({"OUT": None if options.packs else options.out})
    return options


def run(argv: Sequence[str]) -> int:
    options = parse(argv)
    if options.packs:
        return pack.write(options.archive, options.aiter, options.python)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.inside:
        return inside(options)
    began, found = time.monotonic(), dict[str, Any]()
    for kind in dry.ENVIRONMENT if options.dry else ("card",):
        for name, one in whole(options, kind, began).items():
            found[f"{name}, {kind}" if options.dry else name] = one
    for line in report(found):
        print(line)
    return 0 if all(passed(one) for one in found.values()) else 1


# -- the process that watches


def whole(options: argparse.Namespace, kind: str, began: float) -> dict[str, Any]:
    """Run the sections in a process of their own; go on in a new one behind a section that ended or hung."""
    folder, left = options.out / kind if options.dry else options.out, list(options.only)
    folder.mkdir(parents=True, exist_ok=True)
    for name in left:
        (folder / f"{name}.json").unlink(missing_ok=True)
    while left and (options.dry or time.monotonic() - began < TOGETHER_S - GRACE_S):
        with tempfile.TemporaryDirectory(prefix="aiter-mla-") as scratch:
            ended = watch(command(options, folder, kind, left), environment(kind, scratch), folder, left, began)
        if ended == outputs.EXIT_INCOMPLETE:
            sys.exit(outputs.EXIT_INCOMPLETE)
        left = [name for name in left if not (folder / f"{name}.json").exists()]
        if left:
            write(folder, left.pop(0), {"ok": False, "failed": f"its process ended with {ended}"})
    return {name: json.loads(path.read_text()) for name in options.only if (path := folder / f"{name}.json").exists()}


def watch(
    line: Sequence[str], variables: dict[str, str], folder: Path, left: Sequence[str], began: float
) -> int:  # fmt: skip
    """Wait for a process of sections, or end it when a section takes too long; return how it ended."""
    child = subprocess.Popen(line, env=variables, cwd=ROOT)
    slower = SLOWER_DRY if "TRITON_INTERPRET" in variables else 1
    since, done, extra = time.monotonic(), 0, START_S
    try:
        while child.poll() is None:
            time.sleep(0.2)
            now = time.monotonic()
            if done < len(left) and (folder / f"{left[done]}.json").exists():
                since, done, extra = now, done + 1, 0.0
            most = SECONDS[left[min(done, len(left) - 1)]] + GRACE_S + extra
            if now - since > most * slower or now - began > TOGETHER_S * slower:
                child.kill()
    finally:
        child.kill()  # whoever interrupts this: it would hold the card
    return child.wait()


def command(options: argparse.Namespace, folder: Path, kind: str, left: Sequence[str]) -> list[str]:
    line = [sys.executable, "-m", "tools.first_card", str(folder.resolve()), "--inside", kind, "--only", ",".join(left)]
    return [*line, *(["--aiter", str(options.aiter.resolve())] if options.aiter else [])]


def environment(kind: str, scratch: str) -> dict[str, str]:
    """Return what the process of the sections runs in: the carried packages and cache, and a folder that goes again."""
    path = os.pathsep.join(filter(None, [str(ROOT), str(SITE), os.environ.get("PYTHONPATH")]))
    mine = {"PYTHONPATH": path, "VLLM_CACHE_ROOT": scratch, "TMPDIR": scratch}
    if (CARRIED / "cache").is_dir():
        mine["TRITON_CACHE_DIR"] = str(CARRIED / "cache")
    return os.environ | mine | ({} if kind == "card" else dry.ENVIRONMENT[kind])


# -- the process of the sections


def inside(options: argparse.Namespace) -> int:
    if options.inside != "card":
        dry.install(options.inside)
    from tools.first_card import sections
    from vllm_aiter_mla.kernels.device import card

    if not card().is_there():
        print("first_card: a GPU is needed; --dry rehearses without one", file=sys.stderr)
        return outputs.EXIT_INCOMPLETE
    kind = "" if options.inside == "card" else options.inside
    for name in options.only:
        began = time.monotonic()
        asked = sections.Asked(options.aiter, kind, SECONDS[name] * (SLOWER_DRY if kind else 1))
        try:
            skips = kind == dry.LAUNCHES and name == "facts"
            found = {"ok": True, "skipped": True} if skips else sections.SECTIONS[name](asked)
        except Exception as error:
            traceback.print_exc()
            found = {"ok": False, "failed": f"{type(error).__name__}: {error}"}
        if not found.get("skipped"):
            print(f"{name}: {'ok' if passed(found) else 'NOT OK'}, {time.monotonic() - began:.1f} s", flush=True)
        found |= {"took_s": round(time.monotonic() - began, 1)}
        write(options.out, name, found)
    return 0


def write(folder: Path, name: str, found: dict[str, Any]) -> None:
    """Write a section's file at once: who watches takes it for done when it is there."""
    path = folder / f"{name}.json"
    path.with_suffix(".part").write_text(json.dumps(found, indent=1, default=str))
    path.with_suffix(".part").replace(path)


# -- what is printed


def passed(found: dict[str, Any]) -> bool:
    return bool(found.get("ok")) and all(found.get("planted", {}).values())


def report(found: dict[str, Any]) -> list[str]:
    """Return a line for each section, and the table of times."""
    from tools.first_card import contenders, sections

    rows = []
    for name, one in found.items():
        planted = one.get("planted", {})
        caught = f"{sum(planted.values())} of {len(planted)}" if planted else "-"
        said = one.get("failed") or one.get("stopped") or "; ".join(one.get("failures", ()))[:200]
        state = "skipped" if one.get("skipped") else "ok" if passed(one) else "NOT OK"
        rows.append([name, state, f"{one.get('took_s', 0):.1f}", caught, said])
    lines = aligned(("section", "state", "seconds", "planted, caught", "why"), rows)
    if table := list(sections.shown(found)):
        names = (f"{name}, us (ratio)" for name in contenders.NAMES)
        head = ("N", "T", "cache", "weights", *names, "bytes / bandwidth, us")
        lines += ["", *aligned(head, table)]
    return lines


if __name__ == "__main__":
    sys.exit(guarded("first_card", run))
