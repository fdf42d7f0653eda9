"""Claims of the pages about commands, the log and vLLM, checked against what they speak of."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import typer.main
from _pytest.mark.expression import Expression
from typer.testing import CliRunner

from tests.sandbox import demo
from vllm_aiter_mla import status
from vllm_aiter_mla.commands import main
from vllm_aiter_mla.compat import offline, switches

ROOT = Path(__file__).parents[2]
PAGES = {
    path.name: path.read_text(encoding="utf-8")
    for path in sorted([*ROOT.glob("docs/*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md"))])
}
COMMANDS = typer.main.get_command(main.app).commands
RUN = re.compile(r"(vllm-aiter-mla \w+|vllm serve|(?<!tests/)tools/[\w/]+\.py|tools\.\w+)(?=[ \\\n]|$)")
SHARED = {"--help", "--version"}
NAMES = [
    f"{path.relative_to(ROOT).as_posix()} {name}".lower()
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^\s*def (test_\w+)", path.read_text(encoding="utf-8"), re.M)
]


def quoted(page: str) -> list[str]:
    """Commands in a page: code spans, and indented or fenced lines; a line that ends in a backslash continues."""
    text = re.sub(r"\\\n\s*", " ", page)
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    lines += [line for block in re.findall(r"^```\n(.*?)^```", text, re.S | re.M) for line in block.splitlines()]
    spans = re.findall(r"`([^`\n]+)`", text)
    return [part.strip() for line in (*lines, *spans) for part in re.split(r";|\|\s*tee", line) if RUN.search(part)]


def words(text: str) -> list[str]:
    """Split a command line; a comment begins with " #" or three spaces."""
    text = text.split("   ")[0].split(" #")[0]
    try:
        return shlex.split(text)
    except ValueError:  # an apostrophe
        return text.split()


@pytest.fixture(scope="module")
def known() -> Callable[[str], set[str]]:
    """Return the options of a command; raises for a command that is not there."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = offline._serve_parser(FlexibleArgumentParser())
    served = {option for action in parser._actions for option in action.option_strings}

    def options(run: str) -> set[str]:
        program, _, name = run.partition(" ")
        if program == "vllm":
            return served
        if program == "vllm-aiter-mla":
            own = {text for one in COMMANDS[name].params for text in (*one.opts, *one.secondary_opts)}
            # These two also take the options of `vllm serve`.
            return own | (served if name in ("plan", "doctor") else set())
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
        if unknown := [name for name in given if name not in there]:
            found[command] = unknown
    return found


@pytest.mark.parametrize("name", PAGES)
def test_quoted_commands_have_options_that_exist(name, known):
    assert wrong(quoted(PAGES[name]), known) == {}


def test_commands_are_found():
    found = {RUN.search(command)[1] for page in PAGES.values() for command in quoted(page)}
    assert found >= {"vllm serve", "vllm-aiter-mla plan", "vllm-aiter-mla verify", "tools.gfx9", "tools/serving.py"}


@pytest.mark.mutation
@pytest.mark.parametrize(
    "text",
    [
        "    vllm-aiter-mla verify --swift\n",
        "    vllm-aiter-mla demo\n",
        "`python tools/make_lock.py --nothing x`",
        "`python tools/gone.py`",
        "    vllm serve M \\\n        --kv-cash-dtype fp8\n",
        "`vllm-aiter-mla plan M --no-such 1`",
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


def test_quoted_plans_run():
    """Those that begin with the name of a bundled example run as they are."""
    plans = [re.search(r"vllm-aiter-mla (plan [a-z].*)", one) for page in PAGES.values() for one in quoted(page)]
    assert any(plans)
    for plan in filter(None, plans):
        result = CliRunner().invoke(main.app, words(plan[1]))
        assert result.exit_code in (0, 1), (plan[1], result.output)
        assert "MLA layers" in result.output, (plan[1], result.output)


def outcome(**changes) -> str:
    """Return the status line of 61 engaged layers."""
    names = [f"layer {index}" for index in range(61)]
    found = status.record_of(names, 1024, "fp8", 0, card="gfx950")
    return status.line(found | {"engaged": dict.fromkeys(names, "aiter"), "skipped": {}} | changes)


def test_quoted_outcomes_are_what_the_status_says():
    """Except for figures: L, and microseconds, for which the pages write A and B."""
    shape = {"layers": ["layer 0"], "chosen": [[1, 128, "triton"], [129, 1024, "aiter"]]}
    timed = outcome(measured=[shape | {"us": {64: {"triton": 1.0, "vllm": 2.0}}}])
    said = {outcome(), timed.replace("1.0 us", "A us").replace("2.0,", "B,")}
    found = [
        line.replace("limit 512;", "limit 1024;")
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
