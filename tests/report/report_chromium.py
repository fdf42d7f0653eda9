"""Headless Chromium on one page: how it behaves at a given width, and its console."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

BINARY = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = "Chromium is not installed; install it with: apt-get install chromium"
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--enable-logging=stderr", "--dump-dom", "--virtual-time-budget=5000",
)  # fmt: skip
# The page in a frame of a phone's width, with no script of its own: the frame around it looks and measures.
_FRAME = """<!doctype html><meta charset="utf-8"><style>body{{margin:0}}iframe{{border:0;display:block}}</style>
<iframe id="f" style="width:{width}px;height:{height}px" srcdoc="{page}"></iframe><pre id="found"></pre><script>
document.getElementById("f").onload = function () {{
  const d = this.contentDocument, w = d.documentElement.clientWidth;
  const cut = [...d.querySelectorAll("body *")].filter(
    e => !e.closest(".scroll") && e.getBoundingClientRect().right > w + 1);
  const charts = [...d.querySelectorAll("svg.chart")];
  this.contentWindow.document.fonts.ready.then(() => {{
    document.getElementById("found").textContent = JSON.stringify({{
      width: w, scroll: d.documentElement.scrollWidth, cut: cut.map(e => e.outerHTML.slice(0, 120)),
      charts: charts.length,
      drawn: charts.filter(e => e.closest("details:not([open])") || e.getBoundingClientRect().height > 20).length,
      loads: d.defaultView.performance.getEntriesByType("resource").map(e => e.name)
    }});
  }});
}};
</script>"""


def measure(page: str, folder: Path, width: int, height: int = 900) -> dict[str, Any]:
    """What a frame of ``width`` pixels finds: the page's scroll width, elements that stick out, charts, requests."""
    outer = folder / f"frame-{width}.html"
    outer.write_text(_FRAME.format(width=width, height=height, page=html.escape(page)), encoding="utf-8")
    assert BINARY is not None
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        command = [BINARY, *FLAGS, f"--user-data-dir={profile}", outer.resolve().as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    match = re.search(r'<pre id="found">(.+?)</pre>', done.stdout, re.DOTALL)
    assert match, f"the frame found nothing; console: {console}"
    return dict(json.loads(html.unescape(match[1]))) | {"console": console}
