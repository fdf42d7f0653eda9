"""docs/generated/ holds what `make docs` writes, and `--check` sees a page that is missing or old."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import docs


def test_the_generated_pages_are_up_to_date(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pages = docs.pages()
    monkeypatch.setattr(docs, "pages", lambda: pages)
    assert docs.run(["--check"]) == 0, "run: make docs"
    monkeypatch.setattr(docs, "FOLDER", tmp_path)
    assert docs.run(["--check"]) == 1, "no page is there"
    assert docs.run([]) == docs.run(["--check"]) == 0
    (tmp_path / "ledger.md").write_text("old")
    assert docs.run(["--check"]) == 1
