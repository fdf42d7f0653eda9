"""The pages: tables and formulas say what the code says, and no path or link leads nowhere."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from tests.support.pages import FILES, PAGES, ROOT
from vllm_aiter_mla import settings
from vllm_aiter_mla.commands.compat.vllm_options import VARIABLES
from vllm_aiter_mla.commands.machine.checks import VERIFIED
from vllm_aiter_mla.commands.plan import config_source
from vllm_aiter_mla.kernels import formulas

CONFIGURATION = PAGES["configuration.md"]
NAMES = {
    *settings.PASS_CONFIG_FIELDS,
    *(field.name for field in fields(settings.Settings) if field.name != "debug"),
    *(f"debug.{field.name}" for field in fields(settings.DebugSettings)),
    *settings.KERNELS, *settings.ROUNDINGS,
    *VARIABLES, *config_source.examples(),
}  # fmt: skip

# Beginnings of paths in the sources of AITER, ATOM and vLLM.
NOT_HERE = ("aiter/", "atom/", "vllm/", "csrc/")
# Files that the page tells the reader to make.
PLANNED = {"kernels/mine.py", "commands/mine.py", "requirements/releases/X.Y.lock"}


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


def prose(text: str) -> list[str]:
    """Words of sentences and tables: no code blocks, commands or addresses of links."""
    text = re.sub(r"^```.*?^```$|^    .*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    return [word for word in re.sub(r"\]\([^)]*\)", "]", text).split() if re.search(r"\w", word)]


def test_the_readme_is_read_in_five_minutes() -> None:
    """At 170 words a minute."""
    assert 500 < len(prose(PAGES["README.md"])) <= 850
    assert prose("One [two](a/b.md#c) | - |\n\n    make demo\n```\nthree\n```\n`four`") == ["One", "[two]", "`four`"]


def test_the_tested_versions_are_those_that_the_machine_step_knows() -> None:
    verified = json.loads(VERIFIED.read_text())
    known = {f"{name} {version}": how for name, each in verified.items() for version, how in each.items()}
    assert dict(re.findall(r"^\| (\w+ [\d.]+) \| tested \| (.*) \|$", PAGES["support.md"], re.MULTILINE)) == known


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


def test_every_option_choice_variable_and_example_is_documented() -> None:
    assert [name for name in sorted(NAMES) if f"`{name}`" not in CONFIGURATION] == []


@pytest.mark.parametrize(("e", "w"), [(1, 1), (1, 2), (2, 2)])
def test_the_documented_formulas_are_those_of_the_code(e: int, w: int) -> None:
    sizes = {"T": 64, "N": 16, "P": 128, "R": 64, "L": 512, "e": e, "w": w}
    step = formulas.StepSize(*sizes.values())
    found = {one.name: [one.read, one.written] for path in formulas.paths(step).values() for one in path}
    table = CONFIGURATION.partition("| launch | reads | writes |\n|---|---|---|\n")[2].partition("\n\n")[0]
    rows = [line.replace("`", "").strip("| ").split(" | ")[1:] for line in table.splitlines()]
    # "2 T (N + 1) R" is a product.
    products = [[re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", cell) for cell in row] for row in rows]
    assert len(rows) == 7
    assert sorted([eval(product, {}, sizes) for product in row] for row in products) == sorted(found.values())
