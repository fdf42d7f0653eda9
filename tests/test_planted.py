"""Planted bugs prove that they ran: a test of one names the failure that it expects, and each bug says what it did."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PLANTS = ("engine/engine_mutations.py", "check/planted_in_engines.py")
UNPROVEN = [
    "with pytest.raises(AssertionError): f()",
    "with raises((ValueError, AssertionError)) as caught: f()",
    "pytest.raises(expected_exception=AssertionError)",
    "with pytest.raises(Exception): f()",
    "with pytest.raises(pytest.fail.Exception): f()",
    "with contextlib.suppress(AssertionError): f()",
    "try: f()\nexcept (ValueError, AssertionError): caught()",
]


def names(node):
    return {one.id if isinstance(one, ast.Name) else getattr(one, "attr", "") for one in ast.walk(node)}


def unproven(source):
    """The lines that would take any failed assertion for the bug; ``Exception`` is also pytest's DID NOT RAISE."""
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.ExceptHandler) and call.type is not None and "AssertionError" in names(call.type):
            yield call.lineno
        if not isinstance(call, ast.Call) or not (called := names(call.func) & {"raises", "suppress"}):
            continue
        words = {word.arg: word.value for word in call.keywords}
        expected = set().union(*map(names, [*call.args, words.get("expected_exception", call.func)]))
        broad = {"AssertionError"} if "suppress" in called else {"AssertionError", "Exception", "BaseException"}
        if expected & broad and not words.keys() & {"match", "check"}:
            yield call.lineno


def test_planted_bugs_are_caught_by_the_failure_that_their_test_names():
    found = {path.relative_to(TESTS).as_posix(): list(unproven(path.read_text())) for path in TESTS.rglob("*.py")}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize("source", UNPROVEN)
def test_planted_bugs_whose_failure_is_not_named_are_found(source):
    assert len(list(unproven(source))) == 1
    assert list(unproven("with pytest.raises(AssertionError, match='2 rows'): f()")) == []


@pytest.mark.parametrize("file", PLANTS)
def test_planted_bugs_of_engines_say_that_they_ran(file):
    bugs = [node for node in ast.parse((TESTS / file).read_text()).body if isinstance(node, ast.FunctionDef)]
    assert [bug.name for bug in bugs if bug.name[0] != "_" and not names(bug) & {"spoil", "bug_ran"}] == []
    assert bugs
