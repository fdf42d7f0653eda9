"""The page in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report import report_chromium as chromium

pytestmark = pytest.mark.skipif(chromium.BINARY is None, reason=chromium.MISSING)


@pytest.fixture(scope="module")
def file(page: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def test_report_renders_without_console_messages(file: Path) -> None:
    dom, console = chromium.run(file, "--dump-dom")
    assert console == []
    assert dom.count('<svg class="chart"') >= 8


@pytest.mark.parametrize("width", [375, 1200])
def test_report_fits_its_window(page: str, tmp_path: Path, width: int) -> None:
    found = chromium.measure(page, tmp_path, width)
    assert found["width"] == width
    assert found["scroll"] <= width
    assert found["cut"] == []
    assert found["drawn"] == found["charts"] >= 8
    assert found["loads"] == []
    assert found["console"] == []


def test_report_overflow_is_something_the_browser_test_sees(page: str, tmp_path: Path) -> None:
    wide = page.replace("<h1>", '<svg width="900" height="9"></svg><h1>', 1)
    found = chromium.measure(wide, tmp_path, 375)
    assert found["scroll"] > 375
    assert found["cut"]
