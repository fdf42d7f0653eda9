"""Command lines as typed: what follows MODEL reaches vLLM's parser unchanged, through the installed script."""

import functools
import json
import re
import shlex
import subprocess
import sys
from itertools import chain

import pytest
import typer.main
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.core import TyperGroup
from typer.testing import CliRunner

from tests.support.pages import PAGES, RUN, quoted, words
from vllm_aiter_mla import plugin
from vllm_aiter_mla.commands import main
from vllm_aiter_mla.commands.compat import vllm_options
from vllm_aiter_mla.commands.main import app
from vllm_aiter_mla.settings import FLAG_FIELD

plugin.register()
COMMANDS = ("check", "plan")
"""The command that takes the options of `vllm serve`, and its alias."""
# Options of both commands, as they may stand between those of vLLM.
OURS = (["--arch", "gfx950"], ["--arch=gfx942"], ["--env", "VLLM_MLA_DISABLE=0"], ["--env=VLLM_MLA_DISABLE=0"],
        ["--verbose"])  # fmt: skip


class Script:
    """The process that runs the console script; ``bug`` plants one."""

    def __init__(self, bug=""):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.typed_child", *filter(None, [bug])], text=True, encoding="utf-8",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *line):
        print(json.dumps(line), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self):
        self._process.communicate()


@pytest.fixture(scope="module")
def script():
    made = Script()
    yield made
    made.close()


@functools.cache
def table():
    """The options of `vllm serve` from its own parser, but ``--help`` and ``--model``, which our commands refuse."""
    refused = ("help", "model")
    return [
        action
        for action in vllm_options.serve_parser()._actions
        if action.option_strings and action.dest not in refused
    ]


def of(option):
    return next(action for action in table() if option in action.option_strings)


TEXTS = ("v", "auto", "fp8_e4m3", "-1", "0", "8", "1k", "a=b", "x y", "vvv.vv", "../v", '{"v": 1}', "[1, 2]", "é", "")


def spelt(draw, action):
    """One option of vLLM's, its name and value spelt in one of the ways that `vllm serve` knows."""
    name = draw(st.sampled_from(action.option_strings))
    if name.startswith("--") and draw(st.booleans()):
        name = "--" + name[2:].replace("-", "_")
    if action.nargs == 0:
        return [name]
    values = [str(choice) for choice in action.choices or () if choice is not None] or TEXTS
    if "config" in action.dest and draw(st.booleans()):
        name += draw(st.sampled_from([".v", ".level", ".pass_config.fuse_rope_kvcache", ".verbose.v+"]))
    value = draw(st.sampled_from(values))
    more = [draw(st.sampled_from(values))] if action.nargs == "+" and draw(st.booleans()) else []
    return draw(st.sampled_from([[name, value, *more], [f"{name}={value}"]]))


@st.composite
def lines(draw):
    """Options of vLLM's, some of them repeated, and the same with our own options between them."""
    options = [spelt(draw, action) for action in draw(st.lists(st.sampled_from(table()), min_size=1, max_size=5))]
    mixed = list(options)
    for own in draw(st.lists(st.sampled_from(OURS), max_size=2)):
        mixed.insert(draw(st.integers(0, len(mixed))), own)
    return list(chain(*options)), list(chain(*mixed))


@pytest.mark.slow
@settings(max_examples=300)
@given(line=lines(), command=st.sampled_from(COMMANDS))
def test_what_follows_model_reaches_vllm_unchanged(script, line, command):
    theirs, typed = line
    answer = script.run(command, "deepseek-r1", *typed)
    assert answer["reached"] == theirs, answer


FLAG = f"-cc.pass_config.{FLAG_FIELD}=true"
SPELLINGS = [
    ([FLAG], lambda options: getattr(options.compilation_config.pass_config, FLAG_FIELD), True),
    (["-cc", '{"custom_ops": ["+vv"]}'], lambda options: options.compilation_config.custom_ops, ["+vv"]),
    (["-cc.custom_ops+=+v,-vv"], lambda options: options.compilation_config.custom_ops, ["+v", "-vv"]),
    (["--compilation_config.mode", "3"], lambda options: int(options.compilation_config.mode), 3),
    (["-tp=8"], lambda options: options.tensor_parallel_size, 8),
    (["-tp", "8", "-tp", "4"], lambda options: options.tensor_parallel_size, 4),
    (["--tensor_parallel_size=8"], lambda options: options.tensor_parallel_size, 8),
    (["-dcp", "2"], lambda options: options.decode_context_parallel_size, 2),
    (["-dpn", "1"], lambda options: options.data_parallel_rank, 1),
    (["-ep"], lambda options: options.enable_expert_parallel, True),
    (["-n", "2", "-r", "1"], lambda options: (options.nnodes, options.node_rank), (2, 1)),
    (["-q", "fp8"], lambda options: options.quantization, "fp8"),
    (["-O3"], lambda options: str(options.optimization_level), "3"),
    (["-O", "1"], lambda options: str(options.optimization_level), "1"),
    (["-O=2"], lambda options: str(options.optimization_level), "2"),
    (["--max-model-len", "-1"], lambda options: options.max_model_len, -1),
    (["--max-model-len=16k"], lambda options: options.max_model_len, 16000),
    (["--enforce-eag"], lambda options: options.enforce_eager, True),
    (["--no-enable_prefix_caching"], lambda options: options.enable_prefix_caching, False),
    (["--middleware", "a.v", "--middleware", "b"], lambda options: options.middleware, ["a.v", "b"]),
    (["--served-model-name", "v", "vv", "--port", "8001"], lambda options: options.served_model_name, ["v", "vv"]),
    (["-sc.method=ngram", "-sc.num_speculative_tokens", "3"], lambda options: options.speculative_config,
     {"method": "ngram", "num_speculative_tokens": 3}),
    (["--hf-overrides", '{"v": {"v": 1}}'], lambda options: options.hf_overrides, {"v": {"v": 1}}),
    (["--additional-config.aiter_mla.kernel", "vllm"], lambda options: options.additional_config,
     {"aiter_mla": {"kernel": "vllm"}}),
]  # fmt: skip


@pytest.mark.parametrize(("typed", "read", "value"), SPELLINGS, ids=[" ".join(row[0]) for row in SPELLINGS])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_spelling_of_vllm_serve_has_the_value_that_was_typed(script, command, typed, read, value):
    answer = script.run(command, "deepseek-r1", *typed)
    assert read(vllm_options.parse_serve_options(["deepseek-r1", *answer["reached"]])) == value


def test_the_options_of_a_file_are_read_by_vllm(script, tmp_path):
    path = tmp_path / "v.yaml"
    path.write_text("tensor-parallel-size: 8\nverbose-v: 1\n".partition("verbose")[0])
    answer = script.run("check", "deepseek-r1", "--config", str(path), "-tp", "4")
    assert answer["reached"] == ["--config", str(path), "-tp", "4"]
    assert vllm_options.parse_serve_options(["deepseek-r1", *answer["reached"][:2]]).tensor_parallel_size == 8


GRAPH, OF_FILE = "--compilation-config", "compilation-config:\n  cudagraph_mode: NONE\n"
HALVES = [  # what names a config, option strings first, and the file of --config
    ([f"{GRAPH}.cudagraph_mode=NONE", FLAG], ""),
    ([FLAG, "--compilation_config.cudagraph_mode", "NONE"], ""),
    ([GRAPH, '{"cudagraph_mode": "NONE"}', "-cc", '{"custom_ops": ["+v"]}'], ""),
    (["-cc={}", FLAG], ""),
    ([FLAG, "--compilation-conf", "{}"], ""),
    ([FLAG], OF_FILE),
    ([GRAPH, "{}"], OF_FILE),
    (["-sc", '{"method": "ngram"}', "--speculative-config.num_speculative_tokens=3"], ""),
    (["--attention-config.backend=TRITON_MLA", "-ac.flash_attn_version=3"], ""),
    (["--hf-overrides.v=1", "--hf-overrides", '{"w": 1}'], ""),
    (["--additional-config.aiter_mla.kernel=vllm"], "additional-config: {v: 1}"),
]


@pytest.mark.parametrize(("typed", "in_file"), HALVES)
def test_a_config_of_which_vllm_would_drop_a_part_is_refused_with_its_spellings(typed, in_file, tmp_path):
    path = tmp_path / "v.yaml"
    path.write_text(in_file)
    names = {word.partition(".")[0].partition("=")[0].replace("_", "-") for word in typed if word.startswith("-")}
    with pytest.raises(ValueError, match="vLLM would use only the last") as caught:
        vllm_options.parse_serve_options(["deepseek-r1", *(["--config", str(path)] if in_file else []), *typed])
    assert [name for name in names - {"--compilation-conf"} if name not in str(caught.value)] == []
    assert ("the file of --config" in str(caught.value)) is bool(in_file)
    assert "\n" not in str(caught.value)


OLD_AND_NEW = [
    (["doctor", "--json", "-"], ["--only", "machine", "--json", "-"]),
    (["plan", "M", "-tp", "8", "--seed", "3"], ["--only", "plan", "M", "-tp", "8", "--seed", "3"]),
    (
        ["verify", "-btriton", "--only=fresh", "-k", "x", "--replays=8", "--seed", "7", "--heads", "8", "--quick"],
        ["--only", "kernels", "--backend=triton", "--case=fresh", "--case", "x", "--long-run=8", "--data-seed", "7",
         "--heads", "8", "--quick"],
    ),
    (
        ["measure", "M", "-tp", "8", "-n", "16", "-n8", "-t", "1", "-tp4", "--tune", "--type", "fp8"],
        ["--only", "timing", "M", "-tp", "8", "--heads", "16", "--heads=8", "--tokens", "1", "-tp4", "--tune",
         "--type", "fp8"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), OLD_AND_NEW, ids=lambda line: line[0])
def test_a_command_of_before_is_the_new_one_and_says_its_spelling(monkeypatch, old, new):
    read = []
    monkeypatch.setattr(TyperGroup, "parse_args", lambda self, ctx, args: read.extend(args) or ["--help"])
    done = CliRunner().invoke(app, old)
    assert read == ["check", *new]
    assert f"vllm-aiter-mla check {shlex.join(new)}" in done.stderr


def test_every_command_of_before_has_an_alias_and_help_lists_only_the_new_ones():
    assert {old[0] for old, _ in OLD_AND_NEW} == set(main.ALIASES)
    listed = CliRunner().invoke(app, ["--help"]).stdout.partition("Commands:")[2].partition("Exit status")[0]
    assert [line.split()[0] for line in listed.splitlines() if re.match(r"  \w", line)] == ["check", "status", "report"]
    assert {*main.COMMANDS} == {"check", "status", "report"}


OBJECTS = ("--speculative-config", "--override-generation-config", "--mm-processor-kwargs")


@pytest.mark.parametrize("value", ["[]", "2", "true", '"v"'])
@pytest.mark.parametrize("option", OBJECTS)
def test_json_that_is_no_object_is_refused_where_vllm_takes_objects(option, value):
    with pytest.raises(ValueError, match=f"{option} .*: a JSON object expected"):
        vllm_options.parse_serve_options(["deepseek-r1", option, value])


def test_json_of_another_type_is_taken_where_vllm_takes_it():
    found = vllm_options.parse_serve_options(
        ["M", "--allowed-origins", '["v"]', "--limit-mm-per-prompt", "null", "-sc", "None"]
    )
    assert (found.allowed_origins, found.limit_mm_per_prompt, found.speculative_config) == (["v"], None, None)


def test_values_of_one_spelling_and_another_options_config_are_one_source_each(tmp_path):
    path = tmp_path / "v.yaml"
    path.write_text(f"{OF_FILE}tensor-parallel-size: 2\n")
    of_file = ["--config", str(path), "-tp", "4", "-ac.backend=TRITON_MLA"]
    lines = (["-cc.mode=3", FLAG, "-sc.method=ngram"], of_file)
    first, second = (vllm_options.parse_serve_options(["deepseek-r1", *line]) for line in lines)
    assert (int(first.compilation_config.mode), SPELLINGS[0][1](first)) == (3, True)
    assert (second.compilation_config.cudagraph_mode.name, second.tensor_parallel_size) == ("NONE", 4)


@pytest.mark.parametrize("command", COMMANDS)
def test_from_two_dashes_on_nothing_is_ours(script, command):
    typed = ["-tp", "8", "--", "--arch", "gfx950", "--json"]
    assert script.run(command, "deepseek-r1", "--arch", "gfx942", *typed)["reached"] == typed


@pytest.mark.parametrize(("command", "own"), [("check", "--json"), ("check", "--html"), ("plan", "--json")])
def test_an_option_in_the_place_of_a_file_is_refused(script, command, own):
    """It would be eaten: a file of its name, and an engine without it."""
    answer = script.run(command, "deepseek-r1", own, "--enforce-eager")
    assert (answer["status"], answer["reached"]) == (2, None)
    assert "--enforce-eager" in answer["said"]


NOT_IN_SILENCE = [("--limit", "limit_mm_per_prompt"), ("--tokens", "tokens_only")]
"""Ours take a number, and vLLM's JSON and nothing: an abbreviation of theirs is refused."""


def test_no_option_of_ours_hides_one_of_vllms():
    """vLLM's parser takes abbreviations too: ours must not be the beginning of exactly one of its options."""
    names = [name for action in table() for name in action.option_strings]
    for option in typer.main.get_command(app).commands["check"].params[1:]:
        for name in option.opts:
            assert name.startswith("--"), "one letter would be taken out of vLLM's options"
            hidden = {of(full).dest for full in names if full.startswith(name)}
            assert len(hidden) != 1 or (name, *hidden) in NOT_IN_SILENCE, name


def typed_lines(page):
    """What follows MODEL in each line of a page, and each code span that is options of `vllm serve` alone."""
    text = re.sub(r"\\\n\s*", " ", PAGES[page])
    served = [line.strip() for line in text.splitlines() if " vllm-aiter-mla deepseek-ai/" in line]
    for line in (*quoted(PAGES[page]), *served):
        found = words(line.partition(" > ")[0])
        start = next((i for i, word in enumerate(found) if word in ("check", "serve")), None)
        if start is None and line in served:
            start = found.index("vllm-aiter-mla")
        if start is not None and found[start + 1 :] and not found[start + 1].startswith("-"):  # a MODEL
            yield found[start + 2 :]
    yield from (words(span) for span in re.findall(r"`(-[^`\n]+)`", text) if not RUN.search(span))


PLACEHOLDERS = {"N": "2", "HEAD": "10.0.0.1", "{...}": "{}"}
FROM_PAGES = [
    pytest.param([PLACEHOLDERS.get(word, word) for word in line], id=f"{page} {' '.join(line)}")
    for page in ("README.md", "operate.md")
    for line in typed_lines(page)
]
assert len(FROM_PAGES) > 15


@pytest.mark.parametrize("line", FROM_PAGES)
def test_every_command_line_of_the_pages_is_read_by_vllms_parser(script, line):
    if len(line) == 1 and any(line[0] in action.option_strings and action.nargs != 0 for action in table()):
        line = [*line, "2"]  # the page names an option without its value
    answer = script.run("check", "deepseek-r1", *line)
    ours = {"--only", "plan", "--json", "plan.json", "--arch", "gfx942", "--require-all"} & set(line)
    assert answer["reached"] == [word for word in line if word not in ours]
    vllm_options.parse_serve_options(["deepseek-r1", *answer["reached"]])


@pytest.mark.mutation
@pytest.mark.parametrize("command", COMMANDS)
def test_mutation_a_short_option_of_ours_is_caught(command):
    planted = Script("v")
    try:
        answer = planted.run(command, "deepseek-r1", "-tp", "8", FLAG)
        assert answer["reached"] == ["-tp", "8", FLAG.replace("v", "")], "the planted option eats the letter"
        with pytest.raises(AssertionError, match=re.escape(FLAG.replace("v", ""))):
            test_what_follows_model_reaches_vllm_unchanged.hypothesis.inner_test(
                planted, (["-tp", "8", FLAG], ["-tp", "8", FLAG]), command
            )
    finally:
        planted.close()
