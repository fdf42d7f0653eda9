"""Claims about docs/troubleshooting.md: nothing the plugin can say to a user is missing there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_aiter_mla import admission
from vllm_aiter_mla.commands.plan import outcome
from vllm_aiter_mla.kernels.aiter.contract import LIMITS
from vllm_aiter_mla.passes import match

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "vllm_aiter_mla"
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
SHORTEST = 8  # letters of a fragment that still identifies a line
# Parts that log while serving; the others are commands of their own.
SERVING = (
    "plugin.py",
    "gate.py",
    "worker.py",
    "measuring.py",
    "layers.py",
    "compat",
    "compat/patches",
    "passes",
    "ops",
    "kernels/aiter",
)


def sources(*names: str) -> list[Path]:
    """The files of these folders of the package, or single files."""
    return [
        path for name in names for path in ([PACKAGE / name] if name.endswith(".py") else (PACKAGE / name).glob("*.py"))
    ]


def calls(path: Path, *names: str) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in names:
            yield node


def strings(node: ast.AST) -> list[str]:
    """The literal parts of an expression."""
    return [
        part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]  # fmt: skip


def codes_of(node: ast.expr) -> list[str]:
    """A literal code, or the two of a choice; a variable holds a skip's code from somewhere else."""
    choices = [node.body, node.orelse] if isinstance(node, ast.IfExp) else [node]
    return [choice.value for choice in choices if isinstance(choice, ast.Constant)]


def codes_given() -> set[str]:
    """The codes that the package gives as a reason, literally, wherever it makes a skip."""
    found = {outcome.NO_ROPE[0], *match.NONE_ARGS.values()}
    for path in PACKAGE.rglob("*.py"):
        for call in calls(path, "Skip", "NoMatchError"):
            if call.args:
                found.update(codes_of(call.args[0]))
        # A code beside its line, as a pair: ("not_run", "its fused op ...").
        tuples = (node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Tuple))
        found.update(code for node in tuples for code in strings(node)[:1] if code == "not_run")
    return found


def row(code: str) -> list[str]:
    """The cells of a code's row, the code left out."""
    found = re.search(rf"^\| `{re.escape(code)}` \|(.*)\|$", PAGE, re.MULTILINE)
    return [] if found is None else [cell.strip() for cell in found[1].split("|")]


def test_every_code_that_is_given_is_in_the_table_and_the_other_way_round() -> None:
    assert codes_given() == set(admission.REASONS)


@pytest.mark.parametrize("code", sorted(admission.REASONS))
def test_every_reason_has_a_cause_and_a_remedy(code: str) -> None:
    cells = row(code)
    assert len(cells) == 2, f"docs/troubleshooting.md has no row for {code}"
    assert all(cells)


@pytest.mark.parametrize("check", [*LIMITS, "kernel"])
def test_every_kernel_check_has_a_cause_and_a_remedy(check: str) -> None:
    assert len(row(check)) == 2, f"docs/troubleshooting.md has no row for the check {check}"


def test_no_row_explains_a_code_that_nobody_gives() -> None:
    given = {*admission.REASONS, "kernel", *LIMITS}
    assert set(re.findall(r"^\| `([a-z0-9_-]+)` \|", PAGE, re.MULTILINE)) <= given


def log_lines() -> list[str]:
    """The longest literal part of each line that is logged; lines built elsewhere have none here."""
    found = []
    for path in sources(*SERVING):
        for call in calls(path, "say_once", "warned"):
            parts = sorted((part.strip(" ;:,()") for part in strings(call.args[-1])), key=len)
            if parts and len(parts[-1]) >= SHORTEST:
                found.append(parts[-1])
    return found


def test_log_lines_are_found() -> None:
    assert len(log_lines()) >= 6


@pytest.mark.parametrize("line", log_lines())
def test_every_log_line_is_explained(line: str) -> None:
    assert line in PAGE


@pytest.mark.parametrize(
    ("source", "fragment"),
    [
        ("gate.py", "off although it was switched on: "),
        ("status/record.py", "MLA layers engaged ("),
        ("status/record.py", ", measured here"),
        ("status/record.py", "; speed on "),
        ("measuring.py", "the kernels could not be timed: "),
        ("measuring.py", "the measured choice could not be used: "),
        ("measuring.py", "the static order of kernels stands"),
        ("measuring.py", "kernels timed on this card in "),
        ("worker.py", "it is not among those that are timed"),
        ("status/record.py", "(run: vllm-aiter-mla doctor)"),
        ("status/record.py", "the model has no MLA layer"),
        ("worker.py", "noted when these graphs were compiled: "),
        ("worker.py", "the kernels could not be checked"),
        ("worker.py", "the worker could not be hooked"),
        ("worker.py", "the status line is not complete"),
        ("worker.py", "no status line could be made"),
        ("worker.py", "no status line could be said"),
        ("worker.py", "its kernel could not be checked: "),
        ("worker.py", "this layer shape falls back to vLLM's own kernels"),
        ("kernels/selfcheck.py", "self-check "),
        ("ops/bodies.py", "is being captured without "),
        ("ops/bodies.py", "is inside a piecewise graph"),
        ("kernels/aiter/backend.py", "the cos/sin table is new or was changed, and a graph is being captured"),
        ("kernels/triton/launcher.py", "triton: a graph is being captured and this variant is not compiled"),
        ("settings.py", "contradict each other; "),
    ],
)
def test_lines_and_errors_built_in_pieces_are_explained(source: str, fragment: str) -> None:
    assert fragment in (PACKAGE / source).read_text(encoding="utf-8")
    assert fragment.strip() in PAGE
