"""What the suite covers: each invariant has planted bugs, and each test belongs to one target of the Makefile."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

ROOT = Path(__file__).parents[2]


def planted(items: Iterable[pytest.Item]) -> dict[str, set[str]]:
    """Files with a planted bug by invariant: the arguments of ``pytest.mark.mutation``."""
    found = defaultdict(set)
    for item in items:
        for mark in item.iter_markers("mutation"):
            for invariant in mark.args:
                found[invariant].add(item.path.relative_to(ROOT).as_posix())
    return dict(found)


def markers(item: pytest.Item) -> frozenset[str]:
    return frozenset(mark.name for mark in item.iter_markers())


def test_each_invariant_of_the_page_has_a_planted_bug(suite: list[pytest.Item]) -> None:
    page = (ROOT / "docs" / "development.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| (I\d+) \|", page, re.MULTILINE)) == set(planted(suite))


def test_make_test_plants_a_bug_for_each_invariant(suite: list[pytest.Item]) -> None:
    quick = [item for item in suite if not markers(item) & {"engine", "slow"}]
    assert set(planted(quick)) == set(planted(suite))


def test_each_test_is_run_by_one_target_of_the_makefile(suite: list[pytest.Item]) -> None:
    lanes = [(Expression.compile(chosen), tuple(folders)) for chosen, *folders in selections("test-all")]
    assert len(lanes) == 5
    for names, file in {(markers(item), str(item.path.relative_to(ROOT))) for item in suite}:
        run_by = [
            chosen for chosen, folders in lanes
            if chosen.evaluate(lambda name: name in names) and file.startswith(folders or "tests/")  # noqa: B023
        ]  # fmt: skip
        assert len(run_by) == 1, (file, names)
    assert selections("test") + selections("test-rest") + selections("test-wide") == selections("test-all")


def test_each_path_that_the_makefile_names_is_there() -> None:
    named = re.findall(r"(?<![\w/-])(?:tests|tools)/[\w./-]+\w", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert len(named) > 5
    assert [path for path in named if not (ROOT / path).exists()] == []


def selections(target: str) -> list[list[str]]:
    """What a target of the Makefile hands to pytest's -m, and its folders, in the order in which make would run it."""
    said = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    given = [shlex.split(line.partition(" -m pytest ")[2]) for line in said.splitlines()]
    lanes = [words[words.index("-m") + 1 :] for words in given if "-m" in words]
    return [[chosen, *(word for word in words if word.startswith("tests/"))] for chosen, *words in lanes]
