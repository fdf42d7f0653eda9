"""The list of engines stays short, and each of them is there for a test."""

import re
import textwrap
from dataclasses import replace
from pathlib import Path

from tests.engine import engine_mutations, engine_specs, specs_common

PAGE = Path(__file__).parents[1] / "support/README.md"
TESTS = "".join(path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py"))


def asked_for(items):
    return {name for item in items for mark in item.iter_markers("engine") for name in mark.args}


def test_few_engines_compile_in_the_ci(suite):
    specs = [engine_specs.SPECS[name] for name in asked_for(one for one in suite if not one.get_closest_marker("wide"))]
    assert len([spec for spec in specs if not spec.vllm.extra.get("enforce_eager")]) <= engine_specs.MOST


def test_each_engine_is_asked_for_by_a_test(suite):
    assert asked_for(suite) == set(engine_specs.SPECS)


def test_each_engine_names_its_integration():
    """The passes have graph partition: they find no whole layer without it. One engine has the module over it."""
    by = {name: spec.plugin.integration for name, spec in engine_specs.SPECS.items() if spec.side == "on"}
    assert [name for name, one in by.items() if one == "auto"] == ["fp8-on", "eager-drafts-on", "vllms-pass-on"]
    partition = {
        name: engine_specs.SPECS[name].vllm.compilation.get("use_inductor_graph_partition", False) for name in by
    }
    assert [name for name, one in by.items() if one == "passes" and not partition[name]] == []
    assert [name for name, one in by.items() if one == "module" and partition[name]] == ["full-module-partition"]


def test_both_sides_of_a_pair_have_the_same_options_of_vllm():
    for name, on in engine_specs.SPECS.items():
        off = engine_specs.SPECS.get(f"{name.removesuffix('-on')}-off")
        if name.endswith("-on") and off is not None:
            assert (off.side, replace(off.vllm, compile_cache=on.vllm.compile_cache)) == ("off", on.vllm), name


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
