"""Claims that the pages make about vLLM, about the commands and about the log, held against what they speak of."""

from __future__ import annotations

import operator
import re
import shlex
from functools import partial
from pathlib import Path

import pytest
import typer.main
from _pytest.mark.expression import Expression
from typer.testing import CliRunner

from vllm_aiter_mla.commands import main
from vllm_aiter_mla.compat import offline, switches
from vllm_aiter_mla.status import record

ROOT = Path(__file__).parents[2]
PAGES = {
    path.name: path.read_text(encoding="utf-8")
    for path in sorted([*ROOT.glob("docs/*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md"))])
}
COMMAND = re.compile(
    r"(vllm-aiter-mla (?:bench|demo|doctor|plan|report|verify)|vllm serve|tools/[\w/]+\.py|tools\.gfx9)\b"
)
SHARED = {"--help", "--version"}


def quoted(page: str) -> list[str]:
    """Commands in a page: code spans, and indented or fenced lines; a line that ends in a backslash goes on."""
    text = re.sub(r"\\\n\s*", " ", page)
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    lines += [line for block in re.findall(r"^```\n(.*?)^```", text, re.S | re.M) for line in block.splitlines()]
    spans = re.findall(r"`([^`\n]+)`", text)
    return [part.strip() for line in (*lines, *spans) for part in re.split(r";|\|\s*tee", line) if COMMAND.search(part)]


def options(command: str) -> tuple[str, list[str]]:
    """What is run, and the names of the options that it is given itself; those behind ``--`` are the server's."""
    found = COMMAND.search(command)
    rest = command[found.end() :].split("   ")[0].split(" #")[0]
    own, _, served = rest.partition(" -- ")
    names = [word.partition("=")[0] for word in words(own) if re.match(r"--?[a-zA-Z]", word)]
    server = [word.partition("=")[0] for word in words(served) if re.match(r"--?[a-zA-Z]", word)]
    return found[1], names if found[1] != "vllm serve" else names + server


def words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # an apostrophe in a comment
        return text.split()


def cli_options(name: str) -> set[str]:
    command = typer.main.get_command(main.app).commands[name]
    return SHARED | {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}


@pytest.fixture(scope="module")
def serve_options() -> set[str]:
    """Every option of vLLM's own ``vllm serve``."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = offline._serve_parser(FlexibleArgumentParser())
    return {option for action in parser._actions for option in action.option_strings} | SHARED


def unknown(command: str, served: set[str]) -> list[str]:
    """Options of a quoted command that it does not have."""
    run, names = options(command)
    if run == "vllm serve":
        known = served
    elif run.startswith("vllm-aiter-mla "):
        name = run.split()[1]
        # These two take the options of `vllm serve` beside their own.
        known = cli_options(name) | (served if name in ("plan", "doctor") else set())
    elif run == "tools.gfx9":
        known = SHARED | set(re.findall(r"\"(--?[\w-]+)\"", (ROOT / "tools/gfx9/__main__.py").read_text()))
    else:
        source = (ROOT / run).read_text()
        if "tools.serving" in source:
            source += "".join(path.read_text() for path in ROOT.glob("tools/serving/*.py"))
        known = SHARED | set(re.findall(r"\"(--?[\w-]+)\"", source))
    return [name for name in names if name.partition(".")[0] not in known]


@pytest.mark.parametrize("name", PAGES)
def test_quoted_commands_have_options_that_exist(name, serve_options):
    wrong = {command: found for command in quoted(PAGES[name]) if (found := unknown(command, serve_options))}
    assert not wrong


def test_commands_are_found():
    found = [command for page in PAGES.values() for command in quoted(page)]
    assert len(found) > 60
    assert {options(command)[0] for command in found} >= {"vllm serve", "vllm-aiter-mla plan", "tools/serve_bench.py"}


@pytest.mark.mutation
@pytest.mark.parametrize(
    "text",
    [
        "    vllm-aiter-mla verify --swift\n",
        "`python tools/aiter_crossover.py --json x`",
        "    vllm serve M \\\n        --kv-cash-dtype fp8\n",
        "`vllm-aiter-mla plan M --no-such 1`",
    ],
)
def test_mutation_an_option_that_is_not_there_is_seen(text, serve_options):
    assert [found for command in quoted(text) if (found := unknown(command, serve_options))]


def selections(page: str) -> list[str]:
    """The ``-k`` of each quoted pytest command."""
    # Behind --aiter-mla-verify it chooses cases of the harness, which are named by its own code.
    return [a or b for a, b in re.findall(r"pytest (?!-p vllm_aiter_mla)[^`\n]*?-k (?:\"([^\"]+)\"|(\w+))", page)]


def selected(expression: str) -> bool:
    """Whether a test is chosen by it: by the name of its function, its file or one of its folders."""
    chosen = Expression.compile(expression)
    for path in (ROOT / "tests").rglob("test_*.py"):
        of_file = path.relative_to(ROOT).as_posix().lower()
        for name in re.findall(r"^\s*def (test_\w+)", path.read_text(encoding="utf-8"), re.M):
            if chosen.evaluate(partial(operator.contains, f"{of_file} {name.lower()}")):
                return True
    return False


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if selections(page)])
def test_quoted_selections_choose_tests(name):
    assert [expression for expression in selections(PAGES[name]) if not selected(expression)] == []


@pytest.mark.mutation
def test_mutation_a_selection_of_nothing_is_seen():
    page = "`pytest -m engine -k no_such_thing`"
    assert [expression for expression in selections(page) if not selected(expression)] == ["no_such_thing"]


def examples(page: str) -> list[list[str]]:
    """Arguments of quoted `plan` commands that run as they stand: they begin with the name of a bundled example."""
    plans = [command for command in quoted(page) if re.match(r"vllm-aiter-mla plan [a-z]", command)]
    return [words(COMMAND.split(command)[-1].split("   ")[0].split(" #")[0]) for command in plans]


def test_quoted_plans_run():
    runs = [arguments for page in PAGES.values() for arguments in examples(page)]
    assert runs
    for arguments in runs:
        result = CliRunner().invoke(main.app, ["plan", *arguments])
        assert result.exit_code in (0, 1), (arguments, result.output)
        assert "MLA layers" in result.output, (arguments, result.output)


def outcome(**changes) -> str:
    """What the status file would say of 61 engaged layers."""
    names = [f"layer {index}" for index in range(61)]
    found = record.as_record(names, 1024, "fp8", 0, card="gfx950")
    return record.line(found | {"engaged": dict.fromkeys(names, "aiter"), "skipped": {}} | changes)


def test_quoted_outcomes_are_what_the_status_says():
    """Figures apart: L, and microseconds, for which the pages write A and B."""
    shape = {"layers": ["layer 0"], "chosen": [[1, 128, "triton"], [129, 1024, "aiter"]]}
    timed = outcome(measured=[shape | {"us": {64: {"triton": 1.0, "vllm": 2.0}}}])
    said = {outcome(), timed.replace("1.0 us", "A us").replace("2.0,", "B,")}
    found = [
        re.sub(r"1\.\.512;", "1..1024;", line)
        for page in PAGES.values()
        for line in re.findall(r"`(?:aiter-mla: )?(61/61 MLA layers engaged \([^`.][^`]*\))`", page)
    ]
    assert len(found) >= 4
    assert set(found) == said


def table_rows(page: str, title: str) -> list[list[str]]:
    part = PAGES[page].partition(title)[2].partition("\n##")[0]
    lines = [line for line in part.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_defaults_of_vllms_variables_are_the_installed_ones():
    """0.32 runs the tests; the column says for 0.33 what differs there."""
    held = 0
    for name, default, _ in table_rows("configuration.md", "## vLLM's environment variables"):
        value = re.match(r"\*{0,2}([01])\b", default)
        if value:
            assert switches.switched_on(name.strip("`")) is bool(int(value[1])), name
            held += 1
    assert held >= 7


def test_what_use_aiter_switches_on_is_on_by_default():
    from vllm import envs

    page = PAGES["operate.md"].partition("## What `VLLM_ROCM_USE_AITER=1` changes")[2].partition("\n## ")[0]
    suffixes = re.findall(r"\| `(_\w+)` \|", page)
    named = {f"VLLM_ROCM_USE_AITER{suffix}" for suffix in suffixes}
    known = {name for name in envs.environment_variables if name.startswith("VLLM_ROCM_USE_AITER_")}
    assert named <= known
    assert named == {name for name in known if switches._reader(name)() is True}


def test_aiters_mla_attention_is_not_batch_invariant():
    """docs/configuration.md and doctor say that VLLM_BATCH_INVARIANT takes it away."""
    from vllm.v1.attention.backends.mla.rocm_aiter_mla import AiterMLABackend

    assert not AiterMLABackend.supports_batch_invariance()


def test_rocm_aiter_mla_is_a_name_that_vllm_takes():
    assert offline.impl_name("ROCM_AITER_MLA") == "AiterMLAImpl"


def test_nothing_tells_to_install_from_an_index_what_is_not_there():
    sources = [*ROOT.glob("vllm_aiter_mla/**/*.py"), *ROOT.glob("tools/**/*.py")]
    texts = {path.name: path.read_text(encoding="utf-8") for path in sources} | PAGES
    assert [name for name, text in texts.items() if re.search(r"pip install '?\"?vllm-aiter-mla", text)] == []
