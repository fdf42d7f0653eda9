"""Claims about ``plan`` that vLLM answers: what engages, the numbers, the command, and wrong input.

All of them are in one file, so that one process of the test run starts vLLM for them.
"""

import json
import re
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from tests.plan.truth_configs import FP8, ROWS, V3, Row
from tests.support import plans
from tests.support.model_configs import ROWS as MATRIX
from tests.support.pages import PAGES, ROOT, quoted, table, words
from tests.support.plans import codes, planned
from tests.support.progress import without_progress
from vllm_aiter_mla import admission, files
from vllm_aiter_mla.commands import outputs
from vllm_aiter_mla.commands.compat import vllm_options
from vllm_aiter_mla.commands.main import app
from vllm_aiter_mla.commands.plan import config_source, planner, printout
from vllm_aiter_mla.commands.plan.record import Plan
from vllm_aiter_mla.compat.config import mla_layers
from vllm_aiter_mla.settings import FLAG_FIELD, LIMIT_FIELD
from vllm_aiter_mla.verify import cases

CONFIG = config_source.examples()["deepseek-r1"]["config"]
R1 = ("deepseek-r1", "-tp", "8")
REQUESTS = ("--max-num-seqs", "256")
MTP = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}')
GRAPH, OURS = "--compilation-config", "--additional-config"
PLAIN = ("VLLM_ROCM_USE_AITER_FP8BMM=0", "VLLM_ROCM_USE_AITER_FP4BMM=0")
PARTITION = "-cc.use_inductor_graph_partition=true"
# tests/plan/test_plan_parts.py has what vLLM need not be asked.
pytestmark = pytest.mark.slow


@pytest.fixture
def shared(monkeypatch):
    """Let the command ask the process that answers for all tests, whatever the card."""
    monkeypatch.setattr(planner, "make_plans", plans.ask)


def invoke(*arguments):
    done = CliRunner().invoke(app, ["check", *arguments[:1], "--only", "plan", *arguments[1:]])
    return done.exit_code, done.stdout, done.stderr


def check(row, folder, bug=""):
    """Compare a plan with the gate's decision and with what the row expects."""
    for file, content in row.written().items():
        (folder / file).write_text(json.dumps(content))
    plan = planned(str(folder), "-tp", "4", *row.arguments, bug=bug)
    decision, found, total = plan["decision"], codes(plan), sum(row.formats.values())
    engine = [code for code in found if code in admission.CODES_BY_LEVEL["engine"]]
    assert tuple(found) == row.codes
    assert decision["limit"] == row.limit
    assert decision["skip"] == (None if row.limit else engine[0])
    assert plan["limit"] == decision["limit"] or decision["limit"] is None
    assert plan["compile_ranges"]["num_within_limit"] == int(row.limit is not None and plan["integration"] == "passes")
    assert plan["absorb_weights"] == row.formats
    assert plan["layers"]["engaged"] == (0 if found else total)
    assert plan["layers"]["mla"] == total
    assert f"Status line: {0 if found else total}/" in printout.format_plan(plans.parsed(plan))


@pytest.mark.parametrize("name", ROWS)
def test_plan_truth(name, tmp_path):
    check(ROWS[name], tmp_path)


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("bug", "shown"),
    [
        ("nothing is quantised", r"\{'mxfp4': 61\} == \{'fp8': 61\}"),
        ("the limit is not the gate's", r"^assert \(1 == "),
    ],
)
def test_plan_truth_catches_a_planted_bug(bug, shown, tmp_path):
    with pytest.raises(AssertionError, match=shown):
        check(Row(V3, {"fp8": 61}, FP8), tmp_path, bug)


@pytest.mark.parametrize("name", MATRIX)
def test_plan_promises_what_the_engine_of_the_model_matrix_gives(name, tmp_path):
    """tests/engine/test_engine_models_matrix.py runs these rows; a draft is asked about where it is the model's own."""
    row = MATRIX[name]
    (tmp_path / "config.json").write_text(json.dumps(row.config))
    drafts = MTP if row.drafts and not row.draft else ()
    plan = planned(str(tmp_path), "--trust-remote-code", *drafts, env=PLAIN)
    assert codes(plan) == [code for code in (row.reason, "not_mla" if row.not_mla else "") if code]
    assert plan["layers"]["engaged"] == row.layers - (1 if row.draft else 0)
    # What a skipped engine counts, by the config alone, is what vLLM builds.
    text = SimpleNamespace(**row.config)
    model = SimpleNamespace(use_mla=not row.not_mla, hf_text_config=text, architectures=row.config["architectures"])
    assert len(mla_layers(model)) == plan["layers"]["mla"] - plan["layers"]["drafts"]


@pytest.mark.parametrize(
    ("arguments", "format", "kernel", "bytes_of_a_weight"),
    [((*R1, "--kv-cache-dtype", "fp8"), "fp8", "triton", 1),
     (("deepseek-r1-mxfp4", "-tp", "8", OURS, '{"aiter_mla": {"kernel": "triton"}}'), "mxfp4", "triton", 17 / 32)],
)  # fmt: skip
def test_a_supported_model_engages_and_its_weights_are_counted(arguments, format, kernel, bytes_of_a_weight):
    plan = planned(*arguments)
    assert (plan["outcome"], codes(plan), plan["heads_per_rank"], plan["absorb_weight"]) == ("engaged", [], 16, format)
    assert plan["layers"] == {"mla": 61, "drafts": 0, "total": 61, "engaged": 61}
    assert {span["kernel"] for span in plan["kernels"]} == {kernel}
    absorb = plan["figures"]["by_tokens"]["1"]["aiter"]["launches"][0]
    assert absorb["read"] == 16 * 128 * 512 * bytes_of_a_weight + 2 * 16 * 128


@pytest.mark.parametrize(
    ("arch", "env", "format", "expected"),
    [
        ("gfx950", PLAIN[1:], "fp8", []),
        ("gfx942", ("VLLM_ROCM_USE_AITER=0",), "plain", ["aiter_off"]),
        *(
            pytest.param(*row, marks=pytest.mark.wide)
            for row in (
                ("gfx942", (), "fp8", []),
                ("gfx942", PLAIN, "plain", []),
                ("gfx950", PLAIN, "plain", []),
                ("gfx942", ("VLLM_ROCM_USE_AITER_MLA=0",), "fp8", ["aiter_off"]),
                ("gfx942", ("VLLM_MLA_DISABLE=1",), None, ["mla_disabled"]),
                ("gfx942", ("VLLM_USE_BREAKABLE_CUDAGRAPH=1",), "fp8", []),
            )
        ),
    ],
)
def test_the_variables_and_the_card_decide_as_in_the_server(arch, env, format, expected):
    """Each row starts a process with its variables."""
    plan = planned("deepseek-v2-lite", "-tp", "4", arch=arch, env=(*plans.ENV, *env))
    assert (plan["absorb_weight"], codes(plan), plan["arch"]) == (format, expected, arch)
    name, origin = (env[0].partition("=")[0], "--env") if env else ("VLLM_BATCH_INVARIANT", "default")
    assert plan["environment"][name][1] == origin


def test_a_variable_that_is_unset_is_planned_by_the_installed_vllms_default():
    plan = planned(*R1, "--kv-cache-dtype", "fp8", env=())
    value, origin = plan["environment"]["VLLM_ROCM_USE_AITER_FP8BMM"]
    assert origin == "default"
    assert any(f"--env VLLM_ROCM_USE_AITER_FP8BMM={1 - int(value)}" in note for note in plan["assumptions"])
    assert plan["absorb_weight"] == ("fp8" if value == "1" else "plain")


CHECKPOINTS = [
    (name.strip("`"), arch, weight)
    for names, *weights in table("configuration.md", "### What a checkpoint needs")
    for name in names.split(", ")
    for arch, weight in zip(("gfx942", "gfx950"), weights, strict=True)
]
assert len(CHECKPOINTS) == 8, "four, on both cards"


@pytest.mark.parametrize(
    ("name", "arch", "weight", "default"),
    [
        pytest.param(*row, default, marks=[pytest.mark.wide] * (not default and row not in CHECKPOINTS[:2]))
        for row in CHECKPOINTS
        for default in (1, 0)
    ],
)
def test_the_table_of_checkpoints_says_what_plan_says_for_both_defaults_of_vllm(name, arch, weight, default):
    """One flag and VLLM_ROCM_USE_AITER=1 are enough everywhere: no row needs another variable."""
    env = tuple(f"VLLM_ROCM_USE_AITER_{which}BMM={default}" for which in ("FP8", "FP4"))
    plan = planned(name, "--kv-cache-dtype", "fp8", arch=arch, env=env)
    assert (plan["outcome"], codes(plan)) == ("engaged", [])
    assert plan["absorb_weight"] == (weight if default else "plain")


@pytest.mark.parametrize(
    ("option", "code"),
    [
        ("-cc.use_inductor_graph_partition=false", "graph_partition"),
        ("-O0", "compilation_mode"),
        ("--enforce-eager", "enforce_eager"),
        (PARTITION, None),
        ("-cc.splitting_ops=[]", None),
    ],
)
def test_the_options_of_the_graph_decide_which_integration_runs(option, code):
    plan = planned("kimi-k2", "-tp", "8", option)
    assert codes(plan) == []
    assert plan["integration"] == ("passes" if code is None else "module")
    assert (plan["passes_skip"] or {"code": None})["code"] == code
    assert bool(plan["compile_ranges"]["num_within_limit"]) is (code is None), "the module has no compile range"
    assert (f"the passes cannot run: {code}" in printout.format_plan(plans.parsed(plan))) is (code is not None)


MODULE = (OURS, '{"aiter_mla": {"integration": "module"}}')


@pytest.mark.parametrize(
    ("changed", "options", "code"),
    [
        ("", (), None),
        ("vLLM has another forward", (), "unknown_forward"),
        ("vLLM has another rotary embedding", (), "rope_other_operand"),
        ("", ("--model-impl", "transformers"), "transformers_backend"),
        ("", ("-cc.pass_config.fuse_attn_quant=true",), "fused_output_quant"),
    ],
)
def test_plan_sees_why_the_module_integration_leaves_a_layer_to_vllm(changed, options, code):
    """As the status line would say it: start-up asks the same functions. The trial of the rotation needs a card."""
    plan = planned("deepseek-v2-lite", *MODULE, *options, bug=changed)
    assert (plan["integration"], codes(plan)) == ("module", [code] if code else [])
    assert plan["layers"]["engaged"] == (0 if code else 27)
    assert plan["outcome"] == ("skipped" if code else "engaged")


@pytest.mark.mutation
def test_mutation_a_plan_that_asks_no_wrapper_is_caught():
    with pytest.raises(AssertionError, match=r"\[\] != \['rope_other_operand'\]"):
        test_plan_sees_why_the_module_integration_leaves_a_layer_to_vllm(
            "plan asks no wrapper", (), "rope_other_operand"
        )


def test_the_passes_need_no_known_forward_and_the_remedy_names_partition():
    plan = planned("deepseek-v2-lite", PARTITION, bug="vLLM has another forward")
    assert (plan["outcome"], codes(plan)) == ("engaged", [])
    assert PARTITION in admission.REMEDIES["unknown_forward"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((*REQUESTS, *MTP), {"limit": 512, "within_limit": (1, 512), "above_limit": (), "full": (2, 512)}),
        (REQUESTS, {"limit": 256, "within_limit": (1, 256), "above_limit": (272, 512),
                    "ranges": [[1, 256], [257, 4681], [4682, 16384]]}),
        (("--max-num-seqs", "1024"), {"batch": (1024, 16384), "without a graph": 513}),
        ((*REQUESTS, "--max-num-batched-tokens", "8192"), {"ranges": [[1, 256], [257, 4681], [4682, 8192]]}),
        ((*REQUESTS, "--max-num-batched-tokens", "8192", "-O1"), {"ranges": [[1, 256], [257, 8192]]}),
        ((*REQUESTS, "--max-num-batched-tokens", "256"), {"ranges": [[1, 256]]}),
        (("--max-num-seqs", "1024", f"-cc.pass_config.{LIMIT_FIELD}=512"),
         {"ranges": [[1, 512], [513, 4681], [4682, 16384]], "without a graph": None}),
        (("--enforce-eager",), {"ranges": [], "within_limit": (), "above_limit": (), "notes": (True, True)}),
        (("-O0",), {"ranges": [], "within_limit": (), "above_limit": (), "notes": (True, True)}),
        (
            (*REQUESTS, "-cc.cudagraph_capture_sizes=[8, 300]"),
            {"within_limit": (8, 8), "above_limit": (300, 300)},
        ),
        (("--max-num-batched-tokens", "512"), {"batch": (512, 512)}),
        (("--performance-mode", "throughput"), {"batch": (2048, 32768)}),
        (("--no-enable-chunked-prefill", "--max-model-len", "20000"), {"batch": (1024, 20000)}),
    ],
)  # fmt: skip
def test_limit_ranges_captures_and_batch_are_those_of_the_finished_config(arguments, expected):
    plan = planned(*R1, PARTITION, *arguments)
    captures, ranges, options = plan["captures"], plan["compile_ranges"], plan["options"]
    text = printout.format_plan(plans.parsed(plan))
    ends = {name: (*captures[name][:1], *captures[name][-1:]) for name in ("within_limit", "above_limit", "full")}
    found = ends | {
        "limit": plan["limit"],
        "ranges": ranges["ranges"],
        "batch": (options["max_num_seqs"], options["max_num_batched_tokens"]),
        "notes": (bool(ranges["note"]), bool(captures["note"])),
        "without a graph": captures["within_limit"][-1] + 1 if "run without a graph" in text else None,
    }
    assert found == found | {"notes": (False, False)} | expected
    assert ranges["num_within_limit"] == int(bool(ranges["ranges"]))


def test_verify_captures_the_sizes_that_vllm_captures():
    modes = ((), ("--performance-mode", "interactivity"))
    found = [planned(*R1, PARTITION, "--max-num-seqs", "1024", *mode)["captures"]["within_limit"] for mode in modes]
    assert {*cases.capture_sizes(1024)} == {size for sizes in found for size in sizes}


@pytest.mark.parametrize(
    ("arguments", "arch", "note", "said"),
    [
        (("kimi-k2", "-tp", "8"), "gfx950", "needs no concat", True),
        (("kimi-k2", "-tp", "8", "--kv-cache-dtype", "fp8"), "gfx950", "needs no concat", False),
        (("kimi-k2", "-tp", "8"), "gfx942", "needs no concat", False),
        (R1, "gfx950", "needs no concat", False),
    ],
)
def test_what_a_reader_should_know_is_said(arguments, arch, note, said):
    """A decode may need no concat: Kimi-K2 has 8 heads a rank here, DeepSeek-R1 16. Or API servers may wait long."""
    assert any(note in one for one in planned(*arguments, arch=arch)["assumptions"]) is said


def test_launches_per_step_count_every_mla_layer():
    plan = planned("kimi-k3", "-tp", "8", "--kv-cache-dtype", "fp8", *REQUESTS)
    paths = plan["figures"]["by_tokens"]["256"]
    assert paths["vLLM, unfused"]["launches_per_step"] == 4 * 24
    assert paths["aiter"]["launches_per_step"] == 2 * 24
    assert plan["figures"]["q_prepared_bytes"] == 256 * 16 * 576, "12 heads, which the decode kernel pads"


@pytest.mark.parametrize(
    ("name", "arch", "cache", "heads"),
    [("kimi-k2", "gfx942", "fp8", 16), ("kimi-k2", "gfx950", "auto", 8), ("kimi-k2", "gfx942", "auto", 16),
     ("deepseek-r1", "gfx942", "fp8", 16)],
)  # fmt: skip
def test_the_prepared_query_has_the_heads_that_vllms_decode_kernel_reads(name, arch, cache, heads):
    """Kimi-K2 has 8 heads a rank here; Gluon's kernel, on gfx950 over a 16-bit cache, takes them unpadded."""
    plan = planned(name, "-tp", "8", "--kv-cache-dtype", cache, *REQUESTS, arch=arch)
    assert plan["figures"]["q_prepared_bytes"] == 256 * heads * 576 * (1 if cache == "fp8" else 2)


# Of a process that ends with an error at each attempt to connect.
NO_NETWORK = """
import socket
def refuse(*arguments, **options):
    open({log!r}, "a").write(repr(arguments))
    raise OSError("no network here")
socket.getaddrinfo = socket.socket.connect = refuse
"""


def quoted_plans():
    """What follows ``check`` in each line of the pages that asks for a plan, without ``--only plan``."""
    lines = [command for page in PAGES.values() for command in quoted(page)]
    typed = [words(line.partition(" check ")[2].partition(" >")[0]) for line in lines if " check deep" in line]
    asked = (tuple(word for word in line if word not in ("--only", "plan")) for line in typed if "plan" in line)
    return [*dict.fromkeys(asked)]  # several pages quote the same


def plans_of_quoted(arguments):
    """The plans that a quoted line gives, each with the figures that the pages promise."""
    drafts = int("--speculative-config" in arguments)
    status, out, _ = invoke(*arguments, "--json", "-")
    made = json.loads(out)["steps"][0]["data"]
    found = made if isinstance(made, list) else [made]
    assert (status, len(found)) == (outputs.EXIT_OK, 4 if "1,2,4,8" in arguments else 1)
    for plan in found:
        assert (plan["outcome"], plan["limit"]) == ("engaged", 512 if drafts else 1024)
        assert plan["layers"] == {"mla": 61 + drafts, "drafts": drafts, "total": 61, "engaged": 61 + drafts}
    return found


@pytest.mark.usefixtures("shared")
def test_quoted_plans_have_the_figures_of_the_pages():
    lines = quoted_plans()
    assert any("--speculative-config" in arguments for arguments in lines)
    assert any("1,2,4,8" in arguments for arguments in lines)
    for arguments in lines:
        plans_of_quoted(arguments)


def test_a_quoted_plan_runs_in_a_process_of_its_own_that_opens_no_connection(tmp_path, monkeypatch, capfd):
    """An attempt whose failure is caught counts too. vLLM's log does not reach the reader."""
    log = tmp_path / "attempts"
    (tmp_path / "sitecustomize.py").write_text(NO_NETWORK.format(log=str(log)))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    several = next(arguments for arguments in quoted_plans() if "1,2,4,8" in arguments)
    for plan in plans_of_quoted((*several, *REQUESTS, *MTP)):
        assert plan["arch"] == "gfx942"
    assert not log.exists()
    assert "amdsmi" not in capfd.readouterr().err


@pytest.mark.usefixtures("shared")
def test_the_page_holds_the_decode_limit_the_reason_and_the_way_out():
    status, out, _ = invoke(*R1, *REQUESTS, *MTP, "-dcp", "2")
    assert status == outputs.EXIT_FAILED
    assert "Decode limit: 512 " in out
    assert "dcp: decode_context_parallel_size is 2 -> --decode-context-parallel-size 1" in " ".join(out.split())
    status, out, _ = invoke(*R1, *REQUESTS, *MTP, "--port", "8001", "--api-key", "k")
    assert status == outputs.EXIT_OK, "options of the server itself are known"
    assert "62/62 MLA layers would engage" in out
    assert "61 attentions with MLA in 61 layers, and 1 in the draft" in out


# In a process of its own: the shared ones have the switch.
def test_aiters_attention_by_name_is_planned_without_the_switch_and_nothing_is_assumed(monkeypatch):
    monkeypatch.delenv("VLLM_ROCM_USE_AITER", raising=False)
    status, out, err = invoke(*R1, "--attention-backend", "ROCM_AITER_MLA")
    assert (status, "61/61 MLA layers would engage" in out) == (outputs.EXIT_OK, True), out + err
    assert "is assumed" not in out
    assert "FP8BMM is unset" not in out


@pytest.mark.usefixtures("shared")
def test_an_answer_that_stops_at_the_layers_is_not_known_and_names_the_line(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"hidden_act": "no such function"}))
    status, out, _ = invoke(str(tmp_path), "-tp", "8")
    assert status == outputs.EXIT_INCOMPLETE
    assert "Status line: not known" in out
    assert ".py:" in out


# test_plan_truth formats a plan of every family.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.wide] * (n > 0)) for n, name in enumerate(config_source.examples())]
)
def test_page_of_every_example_renders(name):
    assert name in printout.format_plan(plans.parsed(planned(name, "-tp", "4")))


@pytest.mark.parametrize("broken", ["raise ImportError('no vllm here')", "import os; os._exit(3)"])
def test_a_vllm_that_is_missing_or_ends_is_a_message(broken, monkeypatch, tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(broken)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    status, out, err = invoke("deepseek-r1")
    assert (status, "Traceback" in err) == (outputs.EXIT_FAILED, False), "no option is wrong"
    assert "no vllm here" in out or "status 3" in out


def test_an_allow_list_without_the_plugin_is_no_promise(monkeypatch):
    """A server with it starts without a line, and the flag does nothing."""
    monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver")
    assert "VLLM_PLUGINS='lora_filesystem_resolver'" in refused("deepseek-r1")
    assert "VLLM_PLUGINS=''" in refused("deepseek-r1", "--env", "VLLM_PLUGINS=")
    allowed = {"VLLM_PLUGINS": ("other,aiter_mla", "--env")}
    assert planner.child_environment(allowed, "folder")["VLLM_PLUGINS"] == "other,aiter_mla"


def refused(*arguments, status=outputs.EXIT_USAGE):
    """The one line that the command prints, besides what it is at."""
    ended, out, err = invoke(*arguments)
    said = without_progress(err)
    assert (ended, out, len(said), said[0].startswith("check: ")) == (status, "", 1, True), err
    return said[0]


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["-tp", "0"], "--tensor-parallel-size 0"),
        (["-tp", "eight"], "--tensor-parallel-size/-tp"),
        (["-pp", "-1"], "--pipeline-parallel-size -1"),
        (["-dcp", "0"], "--decode-context-parallel-size 0"),
        (["--block-size", "0"], "--block-size 0"),
        (["--block-size", "10000000000000000"], "--block-size 10000000000000000"),
        (["--max-num-seqs", "0"], "--max-num-seqs 0"),
        (["--max-num-seqs", "9" * 20, "--max-num-batched-tokens", "9" * 20], f"--max-num-seqs {'9' * 20}"),
        ([MTP[0], '{"num_speculative_tokens":"two"}'], "num-speculative-tokens two"),
        (["--model", "X"], "--model X"),
        (["-tp", "8", "--model=X"], "--model X"),
        (["--config", "none.yaml"], "none.yaml"),
        (["--config"], "config file"),
        (["--no-such-option", "1"], "--no-such-option"),
        (["--dtype", "floatx"], "--dtype"),
        ([OURS, "2"], f"{OURS} 2"),
        (["-cc.pass_config.fuse_norm_qant=true"], "pass_config.fuse_norm_qant Unexpected"),
        (
            [OURS, '{"aiter_mla": {"max_token_num": 100000000000000000000}}'],
            "aiter_mla.max_token_num 100000000000000000000",
        ),
        ([OURS, '{"aiter_mla": {"kernl": "auto"}}'], "did you mean 'kernel'?"),
        (["--env", "=1"], "NAME=VALUE"),
        (["--kv-cach-dtype", "fp8"], "--kv-cache-dtype"),
        (["--jsn", "x"], "--json"),
        (["--env", "VLLM_MLA_DISABLE"], "NAME=VALUE"),
        ([GRAPH, f'{{"pass_config": {{"{FLAG_FIELD[:-1]}al": true}}}}'], f"pass_config.{FLAG_FIELD[:-1]}al"),
        ([GRAPH, f'{{"pass_confg": {{"{FLAG_FIELD}": true}}}}'], "pass_confg Unexpected"),
        ([GRAPH, f'{{"pass_config": {{"{FLAG_FIELD}": "yes"}}}}'], f"pass_config.{FLAG_FIELD}"),
        ([GRAPH, '{"splitting_ops": [1]}'], "splitting_ops.0"),
        ([GRAPH, '{"mode": 7}'], "mode Input should be"),
        ([GRAPH, '{"inductor_passes": {"post_grad_custom_post_pass": "mine.pass"}}'], "'mine'"),
        ([GRAPH, "{"], GRAPH),
        ([GRAPH, "{}", "-cc.mode=3"], GRAPH),
        (["-cc..x=1"], GRAPH),
        ([MTP[0], "[]"], f"{MTP[0]} []: a JSON object expected"),
        (["-cc.mode"], "vLLM's parser"),
        ([OURS, '{"aiter_mla": {"kernel": "tritn"}}'], "aiter_mla.kernel"),
        (["--additional_config={}", f"{OURS}.x=3"], OURS),
    ],
)
def test_a_wrong_option_is_one_line(arguments, named):
    assert named in refused("deepseek-r1", *arguments)


def test_a_parser_that_prints_its_help_and_ends_has_planned_nothing():
    with pytest.raises(ValueError, match="vllm serve --help=all"):
        vllm_options.parse_serve_options(["deepseek-r1", "-h"])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["-tp", "8", "deepseek-r1"], "MODEL comes first"),
        (["--max-num-seqs=4", "M"], "MODEL comes first"),
        (["--model", "M"], "MODEL comes first"),
        (["deepsek-r1"], "did you mean deepseek-r1?".capitalize()),
        *(([name], "kimi-k2.5") for name in ("x" * 5000, "~nobody-of-this-name/x", "no/such-model")),
        (["deepseek-r1", "--env", "VLLM_BATCH_INVARIANT=maybe"], "VLLM_BATCH_INVARIANT=maybe"),
    ],
)
def test_what_is_wrong_before_any_option_is_one_line_too(arguments, named):
    """Where the model belongs, which examples there are, a variable that vLLM cannot read."""
    assert named in refused(*arguments)


WRONG_FIELDS = [
    {}, {"num_hidden_layers": 10**9}, {"num_attention_heads": -128}, {"quantization_config": ["fp8"]},
    {"num_hidden_layers": "61"}, {"qk_nope_head_dim": 10**30}, {"kv_lora_rank": 512.5},
    {"max_position_embeddings": 10**12}, {"torch_dtype": "floatx"}, {"text_config": "yes"},
    {"quantization_config": {"quant_method": "compressed-tensors", "ignore": [1]}},
]  # fmt: skip


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("changed", WRONG_FIELDS, ids=repr)
def test_a_wrong_config_never_engages(tmp_path, changed):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changed if changed else {}))
    status, out, err = invoke(str(tmp_path), "-tp", "8")
    assert status != outputs.EXIT_OK
    assert "would engage" not in out or "Status line: 0/" in out or "not known whether" in out
    assert out or err.splitlines()[-1].startswith("check: ")


@pytest.mark.parametrize(
    ("arguments", "layers", "reasons"),
    [
        # What a plan has no tokenizer for is no reason against, and is said.
        ((*R1, "--reasoning-parser", "deepseek_r1", "--tool-call-parser", "deepseek_v3"), (61, 61), []),
        ((*R1, "--reasoning-config.reasoning_start_str", "<v>", "--reasoning-config.reasoning_end_str", "</v>"),
         (61, 61), []),
        ((*R1, "--enable-sleep-mode"), (61, 61), []),
        # Experts are quantised as in the checkpoint: vLLM then knows their back ends.
        (("kimi-k2.5", "-tp", "8", "--moe-backend", "flydsl", "-cc.pass_config.fuse_allreduce_rms=false"),
         (61, 61), []),
        (("deepseek-r1-mxfp4", "-tp", "8", "--moe-backend", "aiter_triton_mxfp4_bf16"), (61, 61), []),
        (("deepseek-r1", "-dp", "8", "-ep", "--all2all-backend", "deepep_low_latency", "--enable-eplb"), (61, 61), []),
        # A reason of the engine is said once, also where layers are of several kinds.
        ((*R1, "-dcp", "2", *MTP), (0, 62), ["dcp"]),
    ],
    ids=lambda value: " ".join(value) if value and isinstance(value[0], str) else None,
)  # fmt: skip
def test_field_an_option_of_a_public_recipe_is_planned(arguments, layers, reasons):
    plan = planned(*arguments)
    assert (plan["layers"]["engaged"], plan["layers"]["mla"], codes(plan)) == (*layers, reasons)
    unread = [note for note in plan["assumptions"] if "no tokenizer" in note]
    assert bool(unread) is any("--reasoning" in argument for argument in arguments)


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize(
    ("option", "named"),
    [
        ([MTP[0], '{"model": "ORG/NAME", "method": "eagle3", "num_speculative_tokens": 3}'], "the draft ORG/NAME"),
        (["--spec-model", "NAME", "--spec-tokens", "3"], "the draft NAME"),
        (["--hf-config-path", "ORG/NAME"], "--hf-config-path ORG/NAME"),
    ],
)
def test_field_f7_a_repository_that_is_not_here_is_no_refusal_of_vllms(option, named):
    said = refused(*R1, *option)
    assert f"{named} is not in the local cache" in said
    assert "does not take" not in said


@pytest.mark.usefixtures("shared")
def test_a_speculators_config_whose_verifier_is_not_here_names_it(tmp_path):
    config = {"model_type": "llama", "speculators_config": {"verifier": {"name_or_path": "ORG/NAME"}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "verifier ORG/NAME is not in the local cache" in refused(str(tmp_path))


@pytest.mark.usefixtures("shared")
def test_a_library_that_is_not_here_is_no_refusal_of_vllms():
    status, out, err = invoke(*R1, MTP[0], '{"method": "suffix", "num_speculative_tokens": 3}')
    said = " ".join(re.sub(r"[|+-]", " ", out).split())
    assert (status, "vLLM lacks something on this machine" in said, "Traceback" in err) == (3, True, False), out


HEADS = {"hidden_size": 7168, "num_attention_heads": 128, "num_hidden_layers": 1, "torch_dtype": "bfloat16"}
MLA_DRAFT = {name: value for name, value in CONFIG.items() if name != "quantization_config"} | HEADS
DRAFTS = {
    "eagle3, MLA that vLLM's flag does not know": ("eagle3", MLA_DRAFT | {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2", "draft_vocab_size": 1024}, 1),
    "eagle3 without MLA": ("eagle3", HEADS | {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "intermediate_size": 1024,
        "num_key_value_heads": 8, "vocab_size": CONFIG["vocab_size"], "draft_vocab_size": 1024, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "max_position_embeddings": 4096}, 0),
    "a whole model": ("draft_model", MLA_DRAFT | {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_hidden_layers": 2}, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAFTS)
def test_the_layers_of_a_draft_are_those_of_its_modules(name, tmp_path):
    method, config, layers = DRAFTS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = {"method": method, "model": str(tmp_path), "num_speculative_tokens": 2}
    plan = planned(*R1, MTP[0], json.dumps(spec))
    assert (plan["layers"]["drafts"], plan["layers"]["mla"], codes(plan)) == (layers, 61 + layers, [])


@pytest.mark.parametrize("text", ["[1]", "[" * 100_000, "{"])
def test_a_file_that_is_no_json_object_is_named(tmp_path, text):
    path = tmp_path / "given.json"
    path.write_text(text)
    assert str(path) in refused(str(path))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-tp", "7"), "attention heads (128) must be divisible by tensor parallel size (7)"),
        (("--max-num-batched-tokens", "128", "--max-num-seqs", "256"), "does not take this model with these options"),
        (("-tp", "8", *REQUESTS, "--max-num-batched-tokens", "128"), "max_num_batched_tokens (128) must"),
        (("-tp", "8", MTP[0], '{"method": "mtp"}'), "num_speculative_tokens must be provided"),
    ],
)
@pytest.mark.usefixtures("shared")
def test_what_vllm_refuses_to_start_is_vllms_reason_in_one_line(arguments, said):
    assert said in refused("deepseek-r1", *arguments)


def test_the_largest_options_that_are_let_through_give_a_plan():
    most = ("--max-num-seqs", str(2**20), "--block-size", str(2**16), "--max-num-batched-tokens", str(2**30))
    spec = (MTP[0], '{"method": "mtp", "num_speculative_tokens": 1023}')
    assert planned("deepseek-r1", *most, *spec)["limit"] == 2**30


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize(
    ("name", "field"), [("deepseek-r1", {"quantization_config": {"quant_method": "\x1b[31m\u202e"}}),
                        ("deepseek-v2-lite", {"model_type": "\x1b[31m\u202e\r\nfine"})]
)  # fmt: skip
def test_control_characters_of_a_config_do_not_reach_the_terminal(tmp_path, name, field):
    (tmp_path / "config.json").write_text(json.dumps(config_source.examples()[name]["config"] | field))
    _, out, err = invoke(str(tmp_path))
    said = out + err
    assert "\\x1b[31m\\u202e" in said
    assert all(line.isprintable() for line in said.splitlines())
    assert "\nfine" not in said


@pytest.mark.parametrize("arguments", [(), ("--kv-cache-dtype", "fp8", "-tp", "8")], ids=["default", "fp8"])
def test_records_of_real_plans_are_read_by_report_as_they_were_made(arguments, tmp_path):
    made, _ = plans.plan_of(plans.ARCH, (), config_source.find_config("deepseek-r1"), arguments)
    files.write_record(tmp_path / "plan.json", made)
    assert files.read_record(Plan, tmp_path / "plan.json") == made
