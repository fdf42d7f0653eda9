"""The list of engines stays short, and each of them is there for a claim."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.engine import engine_mutations, engine_specs

HERE = Path(__file__).parent


def _named_in_tests() -> set[str]:
    """Arguments of each ``pytest.mark.engine(...)`` in this folder."""
    calls = [
        node
        for path in HERE.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.engine"
    ]
    return {argument.value for call in calls for argument in call.args if isinstance(argument, ast.Constant)}


def test_engines_are_few_and_each_is_asked_for_by_a_test():
    compiled = [spec for spec in engine_specs.SPECS.values() if not spec.llm.get("enforce_eager")]
    assert len(compiled) <= engine_specs.MOST
    assert _named_in_tests() == set(engine_specs.SPECS)


def test_no_engine_is_started_twice():
    """Two names of one spec are one engine, unless one of them starts warm."""
    cold = [spec for name, spec in engine_specs.SPECS.items() if name not in engine_specs.AFTER]
    assert len(set(map(str, cold))) == len(cold)


def test_planted_bugs_are_those_that_an_engine_has():
    planted = {spec.mutation.partition(":")[2] for spec in engine_specs.SPECS.values() if spec.mutation}
    defined = {name for name, value in vars(engine_mutations).items() if callable(value)}
    assert planted == defined
