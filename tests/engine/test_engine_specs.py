"""The list of engines stays short, and each of them is there for a test."""

import re
import textwrap
from pathlib import Path

from tests.engine import engine_mutations, engine_specs, specs_common

PAGE = Path(__file__).parents[1] / "support/README.md"
TESTS = "".join(path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py"))


def test_few_engines_compile():
    compiled = [spec for spec in engine_specs.SPECS.values() if not spec.vllm.extra.get("enforce_eager")]
    assert len(compiled) <= engine_specs.MOST


def test_each_engine_is_asked_for_by_a_test(suite):
    asked = {name for item in suite for mark in item.iter_markers("engine") for name in mark.args}
    assert asked == set(engine_specs.SPECS)


def test_no_name_stands_for_two_engines():
    assert len(engine_specs.SPECS) == sum(len(topic.SPECS) for topic in engine_specs.TOPICS)


def test_no_engine_is_started_twice():
    """Two names of one spec are one engine, unless one of them starts warm."""
    cold = [spec for name, spec in engine_specs.SPECS.items() if name not in engine_specs.AFTER]
    assert len(set(map(str, cold))) == len(cold)


def test_each_planted_bug_is_planted():
    planted = {spec.fault.bug for spec in engine_specs.SPECS.values()}
    bugs = [name for name, value in vars(engine_mutations).items() if callable(value)]
    assert [bug for bug in bugs if f"{engine_mutations.__name__}:{bug}" not in planted and bug not in TESTS] == []


def test_the_worked_example_of_the_page_defines_the_engines_that_its_tests_ask_for():
    spec, *tests = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = vars(specs_common) | {"SPECS": {}}
    exec(textwrap.dedent(spec), names)
    assert set(re.findall(r'"([a-z]+-[a-z]+)"', "".join(tests))) == set(names["SPECS"])
