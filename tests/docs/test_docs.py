"""Claims about the pages: tables that say what the code says, and no path or link that leads nowhere.

That every reason and every log line is explained: ``tests/doctor/test_doctor_troubleshooting.py``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_imports import ARROWS, FIRST
from vllm_aiter_mla.compat.patches import PATCHES

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("docs/*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))])
DEVELOPMENT = (ROOT / "docs" / "development.md").read_text(encoding="utf-8")

OURS = "vllm_aiter_mla/"
NOT_HERE = ("aiter/", "atom/", "vllm/", "csrc/")
"""Beginnings of paths in others' sources: AITER's, ATOM's and vLLM's."""
PLANNED = {"kernels/absorb/mine.py", "kernels/mine.py"}
PLANNED |= {"module/forward.py", "commands/mine.py"}
"""Files that the page tells the reader to make."""


def between(text: str, first: str, last: str) -> str:
    return text.partition(first)[2].partition(last)[0].strip()


def rows(text: str) -> list[list[str]]:
    """The cells of a table's rows, its head left out."""
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def parts() -> dict[str, set[str]]:
    """What each part may import, as docs/development.md says it."""
    found: dict[str, set[str]] = {}
    for name, _, cell in rows(between(DEVELOPMENT, "## The parts of the package", "## The invariants")):
        named = set(re.findall(r"`([\w.]+)`", cell))
        if cell.startswith("all above"):
            named = set(found) - named
        found[name.strip("`")] = named | (set(FIRST) if "the first three" in cell else set())
    return found


def places(text: str) -> set[str]:
    """Paths of files and folders that a page names: in code, in commands and in links to other files."""
    spans = [word for span in re.findall(r"`([^`\n]+)`", text) for word in span.split()]
    commands = [word for line in text.splitlines() if line.startswith("    ") for word in line.split()]
    found = {word.rstrip(".,;:)") for word in (*spans, *commands)}
    return {word for word in found if re.fullmatch(r"[\w.*/-]+", word) and is_place(word)}


def is_place(word: str) -> bool:
    if word.startswith((*NOT_HERE, "/")) or word in PLANNED or ".." in word:
        return False
    return word.endswith(".py") or bool(re.match(r"(tests|tools|docs|requirements|vllm_aiter_mla)/", word))


def exists(place: str) -> bool:
    folders = (ROOT, ROOT / OURS, ROOT / OURS / "kernels" / "triton", ROOT / "tools")
    return any(path.exists() for folder in folders for path in folder.glob(place.rstrip("/")))


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_patch_is_described() -> None:
    table = rows(between(DEVELOPMENT, "## Patches of vLLM", "## "))
    assert [cells[0].strip("`") for cells in table] == list(PATCHES)


def test_the_table_of_parts_says_what_the_arrows_say() -> None:
    assert parts() == ARROWS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    assert [place for place in sorted(places(page.read_text(encoding="utf-8"))) if not exists(place)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_another_page_leads_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^):#]*)#?([^):]*)\)", page.read_text(encoding="utf-8")):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), f"{target}#{anchor}"


def test_every_invariant_has_a_planted_bug_in_each_file_that_is_named() -> None:
    table = rows(between(DEVELOPMENT, "## The invariants", "## Where to add what"))
    assert [row[0] for row in table] == [f"I{number}" for number in range(1, 14)]
    for _, _, guards, tests in table:
        assert all((ROOT / OURS / name).is_file() for name in re.findall(r"`([^`]+)`", guards))
        for name in re.findall(r"`([^`]+)`", tests):
            assert "mark.mutation" in (ROOT / name).read_text(encoding="utf-8"), name


@pytest.mark.mutation
@pytest.mark.parametrize("text", ["`runtime/ops.py`", "`python tools/gone.py --json`", "    pytest tests/runtime\n"])
def test_mutation_a_path_that_is_gone_is_seen(text: str) -> None:
    assert [place for place in places(text) if not exists(place)]
