"""The pages: tables say what the code says, and no path or link leads nowhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.import_table import ARROWS, FIRST
from tests.support.pages import FILES, PAGES, ROOT
from vllm_aiter_mla.compat.patches import PATCHES

DEVELOPMENT = PAGES["development.md"]

# Beginnings of paths in the sources of AITER, ATOM and vLLM.
NOT_HERE = ("aiter/", "atom/", "vllm/", "csrc/")
# Files that the page tells the reader to make.
PLANNED = {"kernels/absorb/mine.py", "kernels/mine.py", "commands/mine.py"}


def between(text: str, first: str, last: str) -> str:
    return text.partition(first)[2].partition(last)[0].strip()


def parts() -> dict[str, set[str]]:
    """What each part may import, as docs/development.md says it."""
    found: dict[str, set[str]] = {}
    table = between(DEVELOPMENT, "## The parts of the package", "## The invariants").splitlines()
    for name, _, cell in (line.strip("| ").split(" | ") for line in table if line.startswith("| `")):
        named = set(re.findall(r"`([\w.]+)`", cell))
        if cell.startswith("all above"):
            named = set(found) - named
        found[name.strip("`")] = named | (set(FIRST) if "the first " in cell else set())
    return found


def places(text: str) -> set[str]:
    """Paths of files and folders that a page names in code and in commands."""
    spans = [word for span in re.findall(r"`([^`\n]+)`", text) for word in span.split()]
    commands = [word for line in text.splitlines() if line.startswith("    ") for word in line.split()]
    found = {word.rstrip(".,;:)") for word in (*spans, *commands)} - PLANNED
    return {word for word in found if re.fullmatch(r"[\w.*/-]+", word) and is_place(word)}


def is_place(word: str) -> bool:
    if word.startswith((*NOT_HERE, "/")) or ".." in word:
        return False
    return word.endswith(".py") or bool(re.match(r"(tests|tools|docs|requirements|vllm_aiter_mla)/", word))


def missing(text: str) -> list[str]:
    """Paths that a page names and that are not there."""
    package = ROOT / "vllm_aiter_mla"
    folders = (ROOT, package, package / "kernels" / "triton", ROOT / "tools")
    return [place for place in sorted(places(text)) if not any(list(f.glob(place.rstrip("/"))) for f in folders)]


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_patch_is_described() -> None:
    table = between(DEVELOPMENT, "## Patches of vLLM", "\n## ")
    assert re.findall(r"^\| \[?`(\w+)`", table, re.MULTILINE) == list(PATCHES)


def test_the_table_of_parts_says_what_the_arrows_say() -> None:
    assert parts() == ARROWS


@pytest.mark.parametrize("page", FILES, ids=lambda page: page.name)
def test_every_path_and_link_of_a_page_leads_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert missing(text) == []
    for target, anchor in re.findall(r"\]\(([^):#]*)#?([^):]*)\)", text):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), f"{target}#{anchor}"


@pytest.mark.mutation
@pytest.mark.parametrize("text", ["`runtime/ops.py`", "`python tools/gone.py --json`", "    pytest tests/runtime\n"])
def test_mutation_a_path_that_is_gone_is_seen(text: str) -> None:
    assert missing(text)
