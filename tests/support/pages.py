"""The pages of the documentation, and the commands that they quote."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
OTHERS = (
    "README.md", "CONTRIBUTING.md", "SECURITY.md", "RELEASING.md",
    "tools/serving.md", "tools/gfx9/README.md", "tests/sandbox/README.md", "tests/runner_v2/README.md",
    "tests/support/README.md", "vllm_aiter_mla/verify/README.md", "findings/README.md",
)  # fmt: skip
FILES = sorted([*ROOT.glob("docs/*.md"), *(ROOT / name for name in OTHERS)])
PAGES = {
    path.relative_to(ROOT).as_posix() if path.name == "README.md" else path.name: path.read_text(encoding="utf-8")
    for path in FILES
}
"""By name; a README by its path."""
RUN = re.compile(r"(vllm-aiter-mla \w+|vllm serve|(?<!tests/)tools/[\w/]+\.py|tools\.\w+)(?=[ \\\n]|$)")


def quoted(page: str) -> list[str]:
    """Commands in a page: code spans, and indented or fenced lines; a line that ends in a backslash continues."""
    text = re.sub(r"\\\n\s*", " ", page)
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    lines += [line for block in re.findall(r"^```\n(.*?)^```", text, re.S | re.M) for line in block.splitlines()]
    spans = re.findall(r"`([^`\n]+)`", text)
    return [part.strip() for line in (*lines, *spans) for part in re.split(r";|\|\s*tee", line) if RUN.search(part)]


def words(text: str) -> list[str]:
    """Split a command line; a comment begins with " #" or three spaces."""
    text = text.split("   ")[0].split(" #")[0]
    try:
        return shlex.split(text)
    except ValueError:  # an apostrophe
        return text.split()


def table(page: str, title: str) -> list[list[str]]:
    """Cells of the rows under a title whose first cell is code."""
    part = PAGES[page].partition(title)[2].partition("\n##")[0]
    lines = [line for line in part.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
