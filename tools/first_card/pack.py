"""One archive for a bare machine: sources, packages that it lacks, Triton's cache for sm_90, AITER's Triton files."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

from tools.common import RunError, run_pip
from tools.first_card import dry

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 60 << 20
WHEELS = ("pydantic", "pydantic_core", "annotated_types", "typing_inspection")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
SOURCES = ("vllm_aiter_mla", "tools", "tests", "pyproject.toml")


def write(archive: Path, aiter: Path | None, python: str) -> int:
    """Write the archive and print what is in it.

    Raises:
        RunError: a part cannot be made, or the archive is larger than ``MOST_BYTES``.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "first-card"
        carried = folder / "carried"
        _sources(folder)
        _packages(carried / "site", Path(name) / "wheels")
        _cache(carried / "cache", aiter, python)
        if aiter is not None:
            _aiter(carried / "aiter", aiter)
        with tarfile.open(archive, "w:gz") as packed:
            packed.add(folder, folder.name)
        for part in (folder, *sorted(carried.iterdir())):
            files = [one for one in part.rglob("*") if one.is_file()]
            print(f"{part.name}: {len(files)} files, {sum(one.stat().st_size for one in files) / 1e6:.1f} MB")
    size = archive.stat().st_size
    print(f"{archive}: {size / 2**20:.1f} MiB")
    if size > MOST_BYTES:
        raise RunError(f"{archive} has {size / 2**20:.1f} MiB; at most {MOST_BYTES >> 20} were expected")
    return 0


def _sources(folder: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z", *SOURCES], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())


def _packages(site: Path, wheels: Path) -> None:
    """Unpack wheels of the versions that are installed here, for Python 3.12."""
    run_pip(
        "download", "--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp",
        *(word for name in PLATFORMS for word in ("--platform", name)), "--dest", str(wheels),
        *(f"{name}=={version(name)}" for name in WHEELS),
    )  # fmt: skip
    for wheel in wheels.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(site)


def _cache(cache: Path, aiter: Path | None, python: str) -> None:
    """Fill Triton's cache by the dry run over the recording libcuda. Another release's kernels have other keys."""
    with tempfile.TemporaryDirectory() as out:
        line = [python, "-m", "tools.first_card", out, "--inside", dry.LAUNCHES]
        mine = {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(cache), "TMPDIR": out, "VLLM_CACHE_ROOT": out}
        more = dry.ENVIRONMENT[dry.LAUNCHES] | mine
        done = subprocess.run([*line, *(["--aiter", str(aiter)] if aiter else [])], cwd=ROOT, env=os.environ | more)
        told = {path.stem: json.loads(path.read_text()) for path in Path(out).glob("*.json")}
    failed = [f"{name}: {one.get('failed') or one.get('failures')}" for name, one in told.items() if not one.get("ok")]
    if done.returncode or failed or not cache.is_dir():
        why = "; ".join(failed) or f"it ended with {done.returncode}"
        raise RunError(f"{python}: the dry run leaves kernels out of Triton's cache: {why}")


def _aiter(folder: Path, checkout: Path) -> None:
    """Copy AITER's Triton files and its licence as its last commit has them."""
    folder.mkdir(parents=True)
    line = ["git", "-C", str(checkout), "archive", "HEAD", "aiter/ops/triton", "LICENSE"]
    packed = subprocess.run(line, capture_output=True, check=False)
    if packed.returncode:
        raise RunError(f"--aiter {checkout}: {packed.stderr.decode().strip()}")
    subprocess.run(["tar", "x", "-C", str(folder)], input=packed.stdout, check=True)
