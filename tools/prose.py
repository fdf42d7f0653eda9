"""Check the words of the pages: sentences of at most 25 words, table cells of at most 15, and no phrase of ours.

    python tools/prose.py [FILE ...]

Without files: every page but docs/generated/, and of CHANGELOG.md the newest section. Code blocks are left out. A code
span is one word, a link counts by its text, and a heading or a list item is a sentence. Exit status 1 if something was
found, with one line "file:line: what" for each.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parent.parent
SENTENCE, CELL = 25, 15
WHERE = ("*.md", "docs/*.md", "tools/*.md", "tools/*/*.md", "tests/*/*.md", "vllm_aiter_mla/*/*.md")
ALLOWED = {"the allocator for nothing": "literally: no memory is asked for"}
"""What a sentence or a cell may hold to be left out of the check, and why."""

NOT_A_NOUN = r"(?=[^\w' -]|$| (?:that|which|is|are|was|were|in|on|at|to|by|for|from|with|and|or|but|than|any)\b)"
WRONG = {
    rf"\bof (?:vLLM|AITER|AMD|Triton)'s{NOT_A_NOUN}": "vLLM's kernel, a kernel in vLLM",
    r"(?<!\bthere )\b(?:is|are|was|were) no (?!longer|more|less)\w+": "is not a",
    r"\bnone that\b": "name the thing",
    r"\b(?:stands?|stood|standing) in\b": "is in, replaces",
    r"\bby (?:itself|themselves)\b": "leave it out, or say without what",
    r"(?<!\blet )(?<!\bleave )(?<!\bleft )(?<!\bit )(?<!\bthem )(?<!\bis )(?<!\bare )(?<!\bbe )\balone\b": "only",
    r"\bbeside\b": "next to, with, besides",
    r"\banew\b": "again",
    r"\b(?:it|this|that) is said\b": "name who says so",
    r"\bfor nothing\b": "without need, free",
    r"\ball the same\b": "still, equal",
    r"\bstock\b": "vLLM's own, unmodified vLLM",
    r"\bverdicts?\b|\bcensus(?:es)?\b": "status line, status file",
    r"\b(?:declin|demot)(?:e|es|ed|ing)\b": "skip, with a reason",
    r"\b(?:layer|engine|model|batch)(?:e?s)? (?:is|are|was|were) (?:refused|given up)\b": "is skipped, falls back",
    r"\brefused (?:layer|engine|model)s?\b": "skipped",
    r"\bemitters?\b": "integration",
    r"\brungs?\b": "evidence",
    r"\bbuckets?\b": "decode limit",
    r"\bstand-ins?\b|\bfake AITER\b": "simulated AITER",
    r"\brooms\b|\b(?:a|each|every|its own|the|this) room\b(?! for| to)": "package, folder",
    r"\bweight forms?\b|\bforms? of (?:a|the) weights?\b": "weight format",
}
"""Rules 4 and 10 of the style: what nobody says, or a second word for one thing; and what to write."""
WORD = re.compile(r"\S*\w\S*")
STOP = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\bcf)(?<!\bvs)[.!?][\"')\]]*(?=\s|$)")
MARKDOWN = MarkdownIt("commonmark").enable("table")


def blocks(page: str) -> Iterator[tuple[int, str, bool]]:
    """Yield the first line, the text and "is a table cell" of each paragraph, heading, list item and cell."""
    kind = ""
    for token in MARKDOWN.parse(page):
        if token.type == "inline" and token.map:
            yield token.map[0] + 1, "".join(map(plain, token.children or ())), kind in ("td_open", "th_open")
        kind = token.type


def plain(token: Token) -> str:
    """Return the words of a part of a paragraph."""
    return {"text": token.content, "code_inline": "code", "softbreak": "\n", "hardbreak": "\n"}.get(token.type, "")


def found(page: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the complaint for everything wrong in a page."""
    for first, text, is_cell in blocks(page):
        ends = [] if is_cell else [match.end() for match in STOP.finditer(text)]
        for start, end in zip([0, *ends], [*ends, len(text)], strict=True):
            part = re.sub(r"\s", " ", text[start:end])
            if any(allowed in part for allowed in ALLOWED):
                continue
            count, most, kind = len(WORD.findall(part)), *((CELL, "cell") if is_cell else (SENTENCE, "sentence"))
            if count > most:
                at = first + text[: end - len(part.lstrip())].count("\n")
                yield at, f"{count} words in a {kind}, at most {most}: {part.strip()[:50]}..."
            for pattern, better in WRONG.items():
                for match in re.finditer(pattern, part, re.IGNORECASE):
                    yield first + text[: start + match.start()].count("\n"), f'"{match[0]}": {better}'


def newest(changelog: str) -> str:
    """Return a changelog with only its newest section, on the same lines."""
    head, *sections = re.split(r"^(?=## )", changelog, flags=re.MULTILINE)
    return "\n" * head.count("\n") + "".join(sections[:1])


def main(argv: Sequence[str] | None = None) -> int:
    """Print what is found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    wrong = 0
    for path in parser.parse_args(argv).files or sorted(page for where in WHERE for page in ROOT.glob(where)):
        page = path.read_text(encoding="utf-8")
        name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        for line, what in sorted(found(newest(page) if path.name == "CHANGELOG.md" else page)):
            print(f"{name}:{line}: {what}")
            wrong += 1
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
