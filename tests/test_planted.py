"""Planted bugs prove that they ran: a test of one names the failure that it expects, and each bug says what it did."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
BROAD = {"AssertionError", "Exception", "BaseException", "fail"}  # `pytest.fail.Exception`: DID NOT RAISE
PLANTS = ("engine/engine_mutations.py", "check/planted_in_engines.py")


def names(node):
    return {one.id if isinstance(one, ast.Name) else getattr(one, "attr", "") for one in ast.walk(node)}


def unproven(source):
    """The lines on which any failed assertion would do."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler):
            broad = "AssertionError" in names(node.type or ast.Name("BaseException"))
        elif isinstance(node, ast.Call) and names(node.func) & {"raises", "suppress"}:
            expected = [*node.args, *(word.value for word in node.keywords if word.arg == "expected_exception")]
            told = any(word.arg in ("match", "check") for word in node.keywords)
            of = BROAD if "raises" in names(node.func) else {"AssertionError"}
            broad = not told and any(names(one) & of for one in expected)
        else:
            continue
        if broad:
            yield node.lineno


def test_planted_bugs_are_caught_by_the_failure_that_their_test_names():
    found = {path.relative_to(TESTS).as_posix(): list(unproven(path.read_text())) for path in TESTS.rglob("*.py")}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "with pytest.raises(AssertionError): f()",
        "with raises((ValueError, AssertionError)): f()",
        "pytest.raises(expected_exception=AssertionError)",
        "with pytest.raises(Exception) as caught: f()",
        "with pytest.raises(pytest.fail.Exception): f()",
        "with contextlib.suppress(AssertionError): f()",
        "try: f()\nexcept AssertionError: pass",
    ],
)
def test_planted_bugs_whose_failure_is_not_named_are_found(source):
    assert list(unproven(source)) != []
    assert list(unproven("with pytest.raises(AssertionError, match='2 rows'): f()")) == []


@pytest.mark.parametrize("file", PLANTS)
def test_planted_bugs_of_engines_say_that_they_ran(file):
    bugs = [node for node in ast.parse((TESTS / file).read_text()).body if isinstance(node, ast.FunctionDef)]
    public = {bug.name: names(bug) & {"spoil", "bug_ran"} for bug in bugs if not bug.name.startswith("_")}
    assert [name for name, says in public.items() if not says] == []
    assert public
