"""Every reason to skip is given and has a remedy, and docs/troubleshooting.md explains every log line."""

from __future__ import annotations

import ast

from tests.support.pages import PAGES, ROOT
from vllm_aiter_mla import admission

PACKAGE = ROOT / "vllm_aiter_mla"
PAGE = PAGES["troubleshooting.md"]
SHORTEST = 8  # letters of a fragment that still identifies a line


def strings(node: ast.AST) -> list[str]:
    return [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]


# Every node of the package.
NODES = [
    node for path in sorted(PACKAGE.rglob("*.py")) for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
]


def calls(*names: str) -> list[ast.Call]:
    found = [node for node in NODES if isinstance(node, ast.Call) and node.args]
    return [call for call in found if ast.unparse(call.func).rpartition(".")[2] in names]


def log_lines() -> set[str]:
    """The longest literal part of each line that is logged; lines built elsewhere have none here."""
    found = set()
    for call in calls("say_once", "warned"):
        parts = sorted((part.strip(" ;:,()") for part in strings(call.args[-1])), key=len)
        found |= {part for part in parts[-1:] if len(part) >= SHORTEST}
    return found


def test_every_reason_has_a_cause_and_a_remedy() -> None:
    assert all(cause and remedy for codes in admission.LEVELS.values() for cause, remedy in codes.values())


def test_every_reason_is_given_and_every_given_one_is_in_the_tables() -> None:
    used = {text for node in NODES if isinstance(node, ast.Constant) for text in strings(node)}
    assert sorted(admission.REASONS - used) == []
    first = (call.args[0] for call in calls("Skip", "NoMatchError"))
    assert {code.value for code in first if isinstance(code, ast.Constant)} <= admission.REASONS


def test_every_log_line_is_explained() -> None:
    found = log_lines()
    assert len(found) >= 6
    assert [line for line in sorted(found) if line not in PAGE] == []
