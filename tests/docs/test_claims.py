"""Claims of the pages about commands, the log and vLLM, checked against what they speak of."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import typer.main
from _pytest.mark.expression import Expression

from tests.sandbox import demo
from tests.support.decisions import spans
from tests.support.pages import PAGES, ROOT, RUN, quoted, table, words
from tests.support.statuses import record_of
from tools import aot
from tools.gfx9 import cases
from vllm_aiter_mla.commands import check, main
from vllm_aiter_mla.commands.check import steps
from vllm_aiter_mla.commands.compat import vllm_options
from vllm_aiter_mla.commands.plan import issues
from vllm_aiter_mla.decided import ShapeTiming
from vllm_aiter_mla.kernels import formulas
from vllm_aiter_mla.kernels.triton import tiles
from vllm_aiter_mla.status.line import status_line

COMMANDS = typer.main.get_command(main.app).commands
SHARED = {"--help", "--version"}
NAMES = [
    f"{path.relative_to(ROOT).as_posix()} {name}".lower()
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^\s*def (test_\w+)", path.read_text(encoding="utf-8"), re.M)
]


@pytest.fixture(scope="module")
def known() -> Callable[[str], set[str]]:
    """Return the options of a command; raises for a command that is not there."""

    parser = vllm_options.serve_parser()
    served = {option for action in parser._actions for option in action.option_strings}

    def options(run: str) -> set[str]:
        program, _, name = run.partition(" ")
        if program == "vllm":
            return served
        if program == "vllm-aiter-mla":
            own = {text for one in COMMANDS[name].params for text in (*one.opts, *one.secondary_opts)}
            return own | (served if name == "check" else set())  # ``refused`` looks where they stand
        path = ROOT / (run if run.endswith(".py") else run.replace(".", "/"))
        sources = path.glob("*.py") if path.is_dir() else [path]
        return set(re.findall(r"\"(--?[\w-]+)\"", "".join(source.read_text() for source in sources)))

    return options


def wrong(commands: Iterable[str], known: Callable[[str], set[str]]) -> dict[str, list[str]]:
    """Quoted commands that are not there, or their options that are not there."""
    found = {}
    for command in commands:
        match = RUN.search(command)
        own, _, _server = command[match.end() :].partition(" -- ")
        given = [re.split("[=.]", word)[0] for word in words(own) if re.match(r"--?[a-zA-Z]", word)]
        try:
            there = known(match[1]) | SHARED
        except (KeyError, OSError):
            there, given = set(), [match[1]]
        unknown = [name for name in given if name not in there]
        if unknown := unknown or (refused(own) if match[1] == "vllm-aiter-mla check" else []):
            found[command] = unknown
    return found


def refused(line: str) -> list[str]:
    """Return why ``check`` would not begin with what follows its name; a synopsis and the bare name are no lines."""
    typed = words(line)
    if not typed or "[MODEL]" in typed:
        return []
    try:
        given = COMMANDS["check"].make_context("check", typed)
        model, only = given.params["model"], given.params["only"] or ()
        chosen = steps.select_steps([step for word in only for step in word.split(",")], model is not None)
        check._check_serve_arguments(model, given, chosen)
        check._check_step_options(given, chosen, model)
    except Exception as error:  # typer's or our own
        return [f"{type(error).__name__}: {error}"]
    return []


@pytest.mark.parametrize("name", PAGES)
def test_quoted_commands_have_options_that_exist(name, known):
    assert wrong(quoted(PAGES[name]), known) == {}


def test_quoted_targets_of_make_are_in_the_makefile():
    there = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    named = {target for page in PAGES.values() for target in re.findall(r"(?:^    |`)make ([a-z][\w-]*)", page, re.M)}
    assert {"demo", "test-all"} <= named <= set(there)


def test_commands_are_found():
    found = {RUN.search(command)[1] for page in PAGES.values() for command in quoted(page)}
    assert found >= {"vllm serve", "vllm-aiter-mla check", "vllm-aiter-mla status", "tools.gfx9", "tools/serving.py"}


@pytest.mark.mutation
@pytest.mark.parametrize(
    "text",
    [
        "    vllm-aiter-mla check --swift\n",
        "`vllm-aiter-mla check M --no-such 1`",
        "`vllm-aiter-mla check --only timing --kv-cache-dtype fp8`",
        "`vllm-aiter-mla check -tp 8 M`",
        "`vllm-aiter-mla check M --only plan --tokens 1`",
        "`vllm-aiter-mla check M --heads 16`",
        "`vllm-aiter-mla check --only plan`",
        "`vllm-aiter-mla check M --only kernel`",
        "`vllm-aiter-mla check M -tp 1,2`",
        "    vllm-aiter-mla demo\n",
        "`python tools/make_lock.py --nothing x`",
        "`python tools/gone.py`",
        "    vllm serve M \\\n        --kv-cash-dtype fp8\n",
        "`vllm-aiter-mla plan M --kv-cache-dtype fp8`",
    ],
)
def test_mutation_an_option_that_is_not_there_is_seen(text, known):
    assert wrong(quoted(text), known)


def test_quoted_demos_are_lines_that_the_demo_takes(monkeypatch):
    monkeypatch.setattr(demo, "why_no_gpu", lambda workers: None)
    lines = [line for page in PAGES.values() for line in re.findall(r"ARGS=(\"[^\"\n]*\"|--?[\w-]+)", page)]
    assert len(lines) >= 4
    for line in lines:
        if not line.strip('"').startswith("tests"):
            demo.parse(shlex.split(line.strip('"')))


def chosen(page: str) -> dict[str, int]:
    """The ``-k`` of each quoted pytest command, and how many files have a test that it chooses."""
    # After --aiter-mla-verify it chooses cases of the harness, which name themselves.
    given = [a or b for a, b in re.findall(r"pytest (?!-p vllm_aiter_mla)[^`\n]*?-k (?:\"([^\"]+)\"|(\w+))", page)]
    found = {}
    for text in given:
        expression = Expression.compile(text)
        found[text] = sum(expression.evaluate(lambda part, name=name: part in name) for name in NAMES)
    return found


def test_quoted_selections_choose_tests():
    found = {text: count for page in PAGES.values() for text, count in chosen(page).items()}
    assert len(found) > 5
    assert [text for text, count in found.items() if count == 0] == []
    assert chosen("`pytest -m engine -k no_such_thing`") == {"no_such_thing": 0}


def outcome(**changes) -> str:
    engaged = {f"layer {index}": "triton" for index in range(61)}
    found = record_of(list(engaged), 1024, "fp8", 0, card="gfx942")
    return status_line(*[replace(found, engaged=engaged, skipped={}, **changes)] * 8)


def test_quoted_outcomes_are_what_the_status_says():
    """Except for microseconds, for which the pages write A and B."""
    chosen = spans((1, 128, "triton"), (129, 1024, "vllm"))
    timed = outcome(shape_timings=(ShapeTiming("", ("layer 0",), chosen, {64: {"triton": 1.0, "vllm": 2.0}}),))
    said = {outcome(), timed.replace("1.0 us", "A us").replace("2.0,", "B,")}
    found = [
        line
        for page in PAGES.values()
        for line in re.findall(r"`(?:aiter-mla: )?(61/61 MLA layers engaged on 8 of 8 ranks \([^`.][^`]*\))`", page)
    ]
    assert len(found) >= 4
    assert set(found) == said


def test_the_readmes_launches_and_bytes_are_those_of_the_formulas():
    """DeepSeek-R1 at TP 8: 61 layers, 64 tokens, 16 heads a rank; query, cache and absorb weight in fp8."""
    paths = formulas.paths(formulas.StepSize(64, 16, 128, 64, 512, 1, 1))
    counted = [(61 * len(path), formulas.moved(path)) for path in paths.values()]
    rows = re.findall(r"^\| (?:vLLM|plugin)[^|]*\| ([\d,]+) \| ([\d,]+) \|$", PAGES["README.md"], re.M)
    assert [tuple(int(cell.replace(",", "")) for cell in row) for row in rows] == counted


def test_the_tiles_of_the_kernel_page_are_those_that_run():
    rows = re.findall(r"^\| up to (\d+) \| (.+) \|$", PAGES["kernels.md"], re.M)
    assert [int(tokens) for tokens, _ in rows] == [16, 32, 64, 128, 256, 512]
    for tokens, cells in rows:
        found = [tiles.tile_for(arch, int(tokens), n) for arch in ("gfx942", "gfx950") for n in (8, 16, 32, 128)]
        assert cells.split(" | ") * 2 == [one.label.replace("/", ", ").replace("w", " waves") for one in found], tokens


def test_the_pages_say_how_many_variants_are_compiled_and_executed():
    counts = {name: len(aot.variants(target)) for name, target in aot.TARGETS.items()}
    assert f"compiles {sum(counts.values())} variants" in PAGES["kernels.md"]
    page = (ROOT / "tools/gfx9/README.md").read_text()
    assert f"{counts['gfx942']} for gfx942 and {counts['gfx950']} for gfx950" in page
    launches = [
        sum(len(list(cases.matrix(variant))) for variant in aot.variants(aot.TARGETS[name]))
        for name in ("gfx942", "gfx950")
    ]
    assert "That makes {} and {} launches".format(*launches) in " ".join(page.split())


def test_defaults_of_vllms_variables_are_the_installed_ones():
    """0.32 runs the tests; the column says for 0.33 what differs there."""
    held, on = 0, vllm_options.switch_states()
    for name, default, _ in table("configuration.md", "## vLLM's environment variables"):
        value = re.match(r"\*{0,2}([01])\b", default)
        if value:
            assert on[name.strip("`")] is bool(int(value[1])), name
            held += 1
    assert held >= 7


def test_what_use_aiter_switches_on_is_on_by_default():
    from vllm import envs

    page = PAGES["configuration.md"].partition("What else `VLLM_ROCM_USE_AITER=1` changes")[2].partition("\n##")[0]
    suffixes = re.findall(r"\| `(_\w+)` \|", page)
    named = {f"VLLM_ROCM_USE_AITER{suffix}" for suffix in suffixes}
    known = {name for name in envs.environment_variables if name.startswith("VLLM_ROCM_USE_AITER_")}
    assert named <= known
    assert named == {name for name in known if envs.environment_variables[name]() is True}


def test_the_known_issues_of_the_page_are_those_of_check():
    page = PAGES["operate.md"].partition("## Known issues")[2].partition("\n## ")[0]
    known = {issue["id"]: issue["link"] for issue in json.loads(issues.KNOWN_ISSUES.read_text(encoding="utf-8"))}
    assert dict(re.findall(r"^\| \[([\w#]+)\]\(([^)]+)\)", page, re.M)) == known


def strings_of(tree: ast.AST) -> str:
    """Every constant text of the package's sources, what stands between the fields of a formatted one included."""
    found = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return "\n".join(" ".join(text.split()) for text in found)


SOURCES = "\n".join(
    strings_of(ast.parse(path.read_text(encoding="utf-8"))) for path in (ROOT / "vllm_aiter_mla").rglob("*.py")
)


# What stands in a log line for the moment: "...", a name in capitals or with a dot or underscore, a number, a subject.
FILLED_IN = re.compile(r"\.\.\.|\b[A-Z]+\b(?!')|\S*\w[._]\w\S*|\b\d[\d.]*\b|[:;]|^(?:aiter|gate|AITER) ")


def fixed_parts(cell: str) -> list[str]:
    """Parts of the log lines in a cell, of three words or more, which are the same in each such line."""
    lines = [max(line) for line in re.findall(r"``(.+?)``|`([^`]+)`", cell)]
    parts = [part.strip(" ,()") for line in lines for part in FILLED_IN.split(line)]
    return [part for part in parts if len(part.split()) > 2]


def unknown_log_lines(rows: list[list[str]]) -> list[str]:
    return [part for cell, *_ in rows for part in fixed_parts(cell) if part not in SOURCES]


def test_quoted_log_lines_are_lines_of_the_package():
    rows = table("troubleshooting.md", "## Log lines")
    rows += [[line] for line in re.findall(r"^\| (\* `.*?) \|", PAGES["troubleshooting.md"], re.M)]
    assert len(rows) > 20
    assert unknown_log_lines(rows) == []


@pytest.mark.mutation
def test_mutation_a_log_line_that_nothing_says_is_seen():
    assert unknown_log_lines([["`FILE: the measured choice could not be used: ...`"]]) != []
