"""Words that no user should meet: in messages, help texts, JSON fields, names or pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What nobody but us called these things.
GONE = re.compile(
    rf"\b({'|'.join(('stock', 'census', 'verdict', 'emitter', 'rung', 'bucket', 'demote', 'refusal'))})s?\b", re.I
)
SUFFIXES = {".py", ".j2", ".json", ".md", ".toml"}


def texts() -> list[Path]:
    folders = [ROOT / "vllm_aiter_mla", ROOT / "tools", ROOT / "docs"]
    return [ROOT / "README.md", *(p for f in folders for p in f.rglob("*") if p.suffix in SUFFIXES)]


def test_words_of_our_own_are_gone() -> None:
    found = [f"{path.relative_to(ROOT)}: {match[0]}" for path in texts() if (match := GONE.search(path.read_text()))]
    assert found == []


@pytest.mark.parametrize("text", ["the verdict of a layer", '"emitter": 1', "two buckets"])
def test_the_search_finds_such_a_word(text: str) -> None:
    assert GONE.search(text)
