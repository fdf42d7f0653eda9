"""Every reason to skip is given."""

from __future__ import annotations

import ast

from tests.support.pages import ROOT
from vllm_aiter_mla import admission

PACKAGE = ROOT / "vllm_aiter_mla"


def strings(node: ast.AST) -> list[str]:
    return [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]


# Every node of the package.
NODES = [
    node for path in sorted(PACKAGE.rglob("*.py")) for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
]


def calls(*names: str) -> list[ast.Call]:
    found = [node for node in NODES if isinstance(node, ast.Call) and node.args]
    return [call for call in found if ast.unparse(call.func).rpartition(".")[2] in names]


def test_every_reason_is_given_and_every_given_one_is_in_the_tables() -> None:
    used = {text for node in NODES if isinstance(node, ast.Constant) for text in strings(node)}
    assert sorted(admission.REASON_CODES - used) == []
    given = [call.args[0] for call in calls("Skip", "NoMatchError", "Rule")]
    given += [call.args[1] for call in calls("stop") if len(call.args) > 1]
    assert {code.value for code in given if isinstance(code, ast.Constant)} <= admission.REASON_CODES
