"""What a release ships: an sdist and a wheel that install and run without the checkout."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib.metadata import PathDistribution, distribution, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PLAN = ("check", "deepseek-r1", "--only", "plan", "-tp", "8", "--kv-cache-dtype", "fp8", "--arch", "gfx950")

pytestmark = pytest.mark.slow


def run(*command, cwd, **environment):
    """Run outside the checkout, so that nothing is imported from it by chance."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(command, cwd=cwd, env=clean | environment, capture_output=True, text=True)


def succeeded(*command, cwd):
    done = run(*command, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of the sdist and of the wheel that was built from it; with the variable DIST, that of a release."""
    if "DIST" in os.environ:
        return ROOT / os.environ["DIST"]
    folder = tmp_path_factory.mktemp("built")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tree = folder / "tree"
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((ROOT / name).read_bytes())
    out = folder / "dist"
    # Without isolation: the build takes the pinned setuptools and asks no index.
    succeeded(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree), cwd=folder)
    return out


@pytest.fixture(scope="module")
def wheel(built):
    (found,) = built.glob("*.whl")
    return found


def environment(folder, wheel, above="", *options):
    """The ``bin`` of a new environment that holds the wheel; ``above`` is a folder of packages that it also sees."""
    succeeded(sys.executable, "-m", "venv", str(folder), cwd=folder.parent)
    (site,) = folder.glob("lib/python3*/site-packages")
    if above:
        (site / "above.pth").write_text(above + "\n")
    succeeded(str(folder / "bin" / "python"), "-m", "pip", "install", *options, str(wheel), cwd=folder)
    return folder / "bin"


def test_twine_takes_both(built):
    files = sorted(str(path) for path in built.iterdir())
    assert [Path(name).suffix for name in files] == [".whl", ".gz"]
    succeeded(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=built)


def test_the_wheel_holds_the_package_and_its_data_and_the_sdist_what_the_build_needs(built, wheel):
    package = ROOT / "vllm_aiter_mla"
    tracked = subprocess.run(["git", "ls-files", package.name], cwd=ROOT, capture_output=True, text=True, check=True)
    ours = {name for name in tracked.stdout.split() if (ROOT / name).is_file() and not name.endswith(".md")}
    held = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in held if name.startswith("vllm_aiter_mla/")} == ours
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "vllm_aiter_mla/plugin.py"} <= names
    assert not [name for name in names if name.startswith("tests")], "without their helpers none runs"


def test_the_description_of_the_wheel_names_no_file_of_the_checkout(wheel):
    """A package index shows it, where a relative link leads nowhere and a diagram is text."""
    (folder,) = [path for path in zipfile.Path(wheel).iterdir() if path.name.endswith(".dist-info")]
    told = PathDistribution(folder).metadata
    assert "Never run on an AMD card" in told.get_payload()
    assert not re.findall(r"\]\((?!https?://)|```", told.get_payload())
    assert not told.get_all("Project-URL"), "the repository has no address of its own"


def needed(folder):
    """``folder`` with links to what the wheel needs, and what that needs, as installed here; and to nothing else."""
    folder.mkdir()
    todo, seen = [Requirement(text) for text in requires("vllm-aiter-mla") or ()], set()
    while todo:
        requirement = todo.pop()
        if requirement.name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(requirement.name)
        found = distribution(requirement.name)
        todo += map(Requirement, found.requires or ())
        for top in {path.parts[0] for path in found.files or ()} - {"..", "__pycache__"}:
            (folder / top).symlink_to(Path(str(found.locate_file(top))).resolve())
    return str(folder)


def test_the_wheel_runs_in_an_environment_that_only_holds_its_dependencies(wheel, tmp_path):
    bin_folder = environment(tmp_path / "empty", wheel, needed(tmp_path / "needed"), "--no-index")
    command = str(bin_folder / "vllm-aiter-mla")
    assert "check" in succeeded(command, "--help", cwd=tmp_path)
    told = run(command, "check", "--only", "machine", cwd=tmp_path)
    assert told.returncode == 1
    assert "vllm" in told.stdout
    for rest in (PLAN, *(("check", "--only", step) for step in ("kernels", "timing"))):
        told = run(command, *rest, cwd=tmp_path)
        assert told.returncode == 3, rest
        assert "Traceback" not in told.stderr, rest
        assert "not installed" in told.stdout, rest


def test_the_wheel_runs_with_vllm_and_moves_nothing(wheel, tmp_path):
    """The environment sees the packages of this one after its own, as in an image."""
    # Without an index pip fails if the wheel asks for anything that is not there already.
    above = sysconfig.get_paths()["purelib"]
    bin_folder = environment(tmp_path / "beside", wheel, above, "--no-index")
    installed = {path.name for path in (tmp_path / "beside").glob("lib/python3*/site-packages/*.dist-info")}
    assert {name.split("-")[0] for name in installed} <= {"pip", "setuptools", "vllm_aiter_mla"}
    where = succeeded(str(bin_folder / "python"), "-c", "import vllm_aiter_mla as a; print(a.__file__)", cwd=tmp_path)
    assert where.startswith(str(tmp_path))
    assert "would engage" in succeeded(str(bin_folder / "vllm-aiter-mla"), *PLAN, cwd=tmp_path)
    shown = "from vllm.plugins import load_general_plugins as l; l(); from vllm.config import PassConfig as P;"
    shown += "print(P(fuse_aiter_qk_rope_kvcache_mla=True).fuse_aiter_qk_rope_kvcache_mla)"
    assert succeeded(str(bin_folder / "python"), "-c", shown, cwd=tmp_path).strip().endswith("True")
