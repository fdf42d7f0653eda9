"""``.ci/run`` ends where a program is missing whose tests would be skipped."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = ("chromium", "promtool")


def ran(folder, *there):
    """The script with nothing on its path but what it calls, ``there`` and a ``make`` that only speaks."""
    for name in ("bash", "env", "dirname"):
        (folder / name).symlink_to(shutil.which(name))
    for name in ("make", *there):
        (folder / name).write_text("#!/bin/sh\necho ran\n")
        (folder / name).chmod(0o755)
    return subprocess.run([ROOT / ".ci" / "run"], env={"PATH": str(folder)}, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("missing", PROGRAMS)
def test_a_program_that_is_missing_ends_it_before_any_test(tmp_path, missing):
    done = ran(tmp_path, *(name for name in PROGRAMS if name != missing))
    assert (done.returncode, done.stdout) == (1, "")
    assert f"no {missing}" in done.stderr


def test_with_both_it_makes_what_a_change_needs_to_land(tmp_path):
    done = ran(tmp_path, *PROGRAMS)
    assert (done.returncode, done.stdout) == (0, "ran\nran\n"), done.stderr
