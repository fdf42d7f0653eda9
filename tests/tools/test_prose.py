"""Claims about the check of the pages: what it finds, on which line, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import prose

WORDS = ("stock", "verdict", "census", "emitter", "rung", "bucket", "stand-in", "declined", "demoted")
LONG, CELL = "word " * prose.SENTENCE, "word " * prose.CELL

WRONG = [
    (f"{LONG}more.", 1, "26 words in a sentence"),
    (f"Short.\n\n- {LONG}\n  more", 3, "26 words in a sentence"),
    (f"First. Second\nends. {LONG}[more](x.md)", 2, "26 words in a sentence"),
    (f"# {LONG}more", 1, "26 words in a sentence"),
    (f"| a | b |\n|---|---|\n| {CELL}`more` | c |", 3, "16 words in a cell"),
    ("A kernel\nof vLLM's that runs.", 2, "of vLLM's"),
    ("There\nis one. It is\nno error.", 2, "is no error"),
    ("There is none that fits.", 1, "none that"),
    ("It starts\nby itself.", 2, "by itself"),
    ("It stands in `compat`.", 1, "stands in"),
    ("It runs on 3.11 alone.", 1, "alone"),
    ("A [cell beside](x.md) it", 1, "beside"),
    ("| a |\n|---|\n| Compiled anew |", 3, "anew"),
    ("**It is said** once.", 1, "It is said"),
    ("It waits for nothing.", 1, "for nothing"),
    ("To end it all the same, stop.", 1, "all the same"),
    *((f"One {word} here.", 1, word) for word in WORDS),
    ("The layer was refused.", 1, "layer was refused"),
]
RIGHT = [
    f"{LONG}. {LONG}",
    f"- {LONG}\n- {LONG}\n\n{LONG}\n\n# {LONG}",
    f"{LONG[:-15]} `a whole command --with options`, e.g. `code. More`.",
    f"```\n{LONG}more anew\n```\n\n    {LONG}more anew\n\n<!-- {LONG}more anew -->",
    f"| {CELL}| `{LONG}` |\n|---|---|\n| [{CELL}](a-long-address/anew/beside.md) | `census` |",
    "The output of vLLM's own kernel. Besides, there is no error, and it is no longer so.",
    "Leave it alone; it is left alone. A file is refused. This leaves room for more.",
]


@pytest.mark.parametrize(("page", "line", "what"), WRONG)
def test_what_nobody_would_say_is_found_on_its_line(page: str, line: int, what: str) -> None:
    ((at, said),) = prose.found(page)
    assert (at, what in said) == (line, True), said


@pytest.mark.parametrize("page", RIGHT)
def test_plain_words_pass(page: str) -> None:
    assert list(prose.found(page)) == []


def test_the_newest_section_of_a_changelog_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "CHANGELOG.md"
    page.write_text("# Changelog\n\n## [2]\n\nMade anew.\n\n## [1]\n\nMade anew.\n")
    assert prose.main([str(page)]) == 1
    assert capsys.readouterr().out == f'{page}:5: "anew": again\n'
