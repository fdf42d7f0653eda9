"""What I9 rests on: the fingerprint changes with every source that decides a graph or a number, with nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from vllm_aiter_mla import __version__, files

PACKAGE = Path(files.__file__).parent


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PACKAGE, tmp_path / "elsewhere", ignore=shutil.ignore_patterns("__pycache__")))


def test_a_copy_elsewhere_has_the_same_fingerprint(copy: Path) -> None:
    assert files.fingerprint_of(copy, __version__) == files.fingerprint_of(PACKAGE, __version__)


@pytest.mark.parametrize("part", [".", "passes", "ops", "kernels", "compat"])
def test_changing_one_source_changes_the_fingerprint(copy: Path, part: str) -> None:
    before = files.fingerprint_of(copy, __version__)
    with (copy / part / "__init__.py").open("a") as source:
        source.write("# changed\n")
    assert files.fingerprint_of(copy, __version__) != before


def test_adding_renaming_or_moving_bytes_between_files_changes_the_fingerprint(tmp_path: Path) -> None:
    seen = set()
    for written in (
        {"a.py": "ab", "b.py": "c"},
        {"a.py": "a", "b.py": "bc"},
        {"a.py": "ab", "c.py": "c"},
        {"a.py": "ab"},
    ):
        root = tmp_path / str(len(seen))
        root.mkdir()
        for name, text in written.items():
            (root / name).write_text(text)
        seen.add(files.fingerprint_of(root, "1"))
    assert len(seen) == 4


def test_a_new_version_has_a_new_fingerprint() -> None:
    assert files.fingerprint_of(PACKAGE, "9.9") != files.fingerprint_of(PACKAGE, __version__)


@pytest.mark.parametrize("part", sorted(files.NO_GRAPHS))
def test_a_change_that_decides_no_graph_and_no_number_keeps_the_fingerprint(copy: Path, part: str) -> None:
    before = files.fingerprint_of(copy, __version__)
    (copy / part / "new.py").write_text("x = 1\n")
    assert files.fingerprint_of(copy, __version__) == before


def test_the_parts_that_decide_graphs_are_all_covered() -> None:
    parts = {path.relative_to(PACKAGE).parts[0] for path in files.sources(PACKAGE)}
    assert {"passes", "ops", "kernels", "compat", "gate.py", "admission.py", "settings.py", "decode_limit.py"} <= parts


def test_fingerprinting_reads_each_source_once_and_less_than_a_megabyte(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it costs at start-up, without a clock: milliseconds depend on the machine and its load."""
    read: list[Path] = []
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: (read.append(self), real(self))[1])
    files.fingerprint_of(PACKAGE, __version__)
    assert sorted(read) == files.sources(PACKAGE)
    assert sum(path.stat().st_size for path in read) < 1_000_000


def test_the_process_wide_fingerprint_carries_the_version() -> None:
    files.fingerprint.cache_clear()
    assert files.fingerprint() == files.fingerprint_of(PACKAGE, __version__)
    assert files.fingerprint().startswith(f"{__version__}-")
