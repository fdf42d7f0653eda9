"""What people typed, and what they looked for: public recipes and an operator's first hour, row by row."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from tests.plan.truth_configs import IN_ATTENTION, MINICPM3, quark
from tests.support import plans
from tests.support.pages import PAGES
from vllm_aiter_mla.admission import REMEDIES
from vllm_aiter_mla.commands import outputs, serve_options
from vllm_aiter_mla.commands.check.options import build_plan_environment
from vllm_aiter_mla.commands.check.record import StepResult
from vllm_aiter_mla.commands.check.run import exit_status_of
from vllm_aiter_mla.commands.check.steps import STEPS
from vllm_aiter_mla.commands.compat import vllm_options
from vllm_aiter_mla.commands.main import COMMANDS, app
from vllm_aiter_mla.commands.plan import config_source, issues, planner, printout
from vllm_aiter_mla.commands.plan.record import NotKnownError
from vllm_aiter_mla.settings import FLAG_FIELD

slow = pytest.mark.slow
MTP = ("--speculative-config", '{"method":"mtp","num_speculative_tokens":3}')
OTHERS = ("fuse_rope_kvcache", "fuse_qk_norm_rope_kvcache")
R1 = ("deepseek-r1", "-tp", "8")
LMCACHE = ("--kv-transfer-config.kv_connector=LMCacheConnectorV1", "--kv-transfer-config.kv_role=kv_both")
MISTRAL = {
    "dim": 7168, "n_layers": 61, "head_dim": 128, "hidden_dim": 16384, "n_heads": 128, "n_kv_heads": 128,
    "norm_eps": 1e-06, "vocab_size": 131072, "rope_theta": 10000.0, "tied_embeddings": False, "q_lora_rank": 1536,
    "max_position_embeddings": 294912, "max_seq_len": 294912, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "kv_lora_rank": 512, "v_head_dim": 128, "llama_4_scaling": {"original_max_position_embeddings": 8192, "beta": 0.1},
    "yarn": {"original_max_position_embeddings": 8192, "factor": 36, "apply_scale": False, "beta": 32, "alpha": 1},
    "moe": {"expert_parallel": 1, "expert_model_parallel": 1, "route_every_n": 1, "first_k_dense_replace": 3,
            "num_experts": 128, "num_experts_per_tok": 4, "num_expert_groups": 1, "num_expert_groups_per_tok": 1,
            "routed_scale": 1.0, "expert_hidden_dim": 4096, "num_shared_experts": 1},
    "quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"},
}  # fmt: skip


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Types a command line on a machine without a card; one process answers for gfx942."""

    def made_plans(source: Any, asked: Any, *_: Any) -> Any:
        made = (plans.plan_of("gfx942", (), source, tuple(arguments))[0] for arguments in asked)
        return tuple(map(issues.with_known_issues, made))

    monkeypatch.setattr(planner, "make_plans", made_plans)

    def run(*line: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["check", line[0], "--only", "plan", *line[1:]])
        return done.exit_code, " ".join((done.stdout + done.stderr).split())

    return run


@slow
@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        pytest.param((*R1, "--kv-cache-dtype", "fp8", f"-cc.pass_config.{FLAG_FIELD}=true"), 0, ["61/61"], id="F1"),
        # tests/plan/test_plan.py has both quickly.
        pytest.param((*R1, *MTP), 0, ["62/62", "1 in the draft"], id="F10", marks=pytest.mark.wide),
        pytest.param(
            (*R1, "-dcp", "2", *MTP), 1, ["dcp: decode_context_parallel_size is 2"], id="F12", marks=pytest.mark.wide
        ),
        pytest.param(
            (*R1, *(f"-cc.pass_config.{name}=true" for name in OTHERS)), 0,
            [f"pass_config.{name} matches nothing on MLA" for name in OTHERS], id="F13",
        ),
    ],
)  # fmt: skip
def test_field_a_recipe_is_planned_right(typed: Any, line: tuple[str, ...], status: int, said: list[str]) -> None:
    code, text = typed(*line)
    assert (code, [one for one in said if one not in text]) == (status, []), text
    assert [one for one in said if text.count(one) > 1 and " " in one] == [], "said once"


@slow
def test_field_f9_a_folder_with_params_json_only(typed: Any, tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text(json.dumps(MISTRAL))
    mistral = ("--config_format", "mistral", "--tokenizer_mode", "mistral", "--load_format", "mistral")
    for arguments in (mistral, ()):
        code, text = typed(str(tmp_path), "-tp", "8", *arguments)
        assert (code, "query_scaled" in text, "128 / TP 8 = 16 per rank" in text) == (1, True, True), text


@slow
@pytest.mark.parametrize("line", [(*R1, "--kv-cache-dtype", "fp8"), (*R1, "-dcp", "2", *MTP), ("kimi-k2", "-tp", "8")])
def test_field_o8_a_plan_fits_into_80_columns(typed: Any, line: tuple[str, ...]) -> None:
    assert typed  # its process answers
    assert (
        max(map(len, CliRunner().invoke(app, ["check", line[0], "--only", "plan", *line[1:]]).stdout.splitlines()))
        <= outputs.DEFAULT_WIDTH
    )


@slow
@pytest.mark.parametrize(
    ("line", "concerned", "remedy"),
    [
        (("deepseek-r1", "-tp", "2", "--kv-cache-dtype", "fp8"), "aiter#4363", "--kv-cache-dtype auto"),
        (R1, "aiter#4888", "VLLM_ROCM_USE_AITER_CUSTOM_AR=0"),
    ],
    ids=["F11", "F6"],
)
def test_field_known_issues_are_in_a_plan(typed: Any, line: tuple[str, ...], concerned: str, remedy: str) -> None:
    _, text = typed(*line)
    assert (concerned in text, remedy in text) == (True, True)


@slow
@pytest.mark.parametrize(
    ("options", "listed"),
    [
        ((), False),
        (("-cc.cudagraph_mode=FULL_DECODE_ONLY",), False),
        (("-cc.cudagraph_mode=PIECEWISE",), True),
        ((*LMCACHE, "--kv-transfer-config.kv_connector_extra_config.use_layerwise=false"), False),
        ((*LMCACHE, "--kv-transfer-config.kv_connector_extra_config.use_layerwise=true"), True),
        (("-cc.cudagraph_mode=NONE",), True),
    ],
    ids=["default", "full", "piecewise", "connector", "layerwise connector", "none"],
)
def test_field_decode_without_full_graphs_is_a_known_issue(typed: Any, options: tuple[str, ...], listed: bool) -> None:
    code, text = typed(*R1, "--kv-cache-dtype", "fp8", *options)
    assert (code, "vllm#51171" in text) == (0, listed), text


@slow
def test_field_f6_vllm_plans_with_its_remedy() -> None:
    plan = plans.planned(*R1, arch="gfx942", env=(f"{vllm_options.CUSTOM_AR}=0",))
    assert (plan["outcome"], plan["environment"][vllm_options.CUSTOM_AR]) == ("engaged", ["0", "--env"])


def test_field_f6_its_remedy_ends_the_warning() -> None:
    variable = f"{vllm_options.CUSTOM_AR}=0"
    for env in ((), (variable,)):
        found = [one.id for one in issues.with_known_issues(plans.made_up(*env)).known_issues]
        assert ("aiter#4888" in found) is (env == ())


def test_field_a_variable_that_no_plan_knows_is_passed_on_with_a_note() -> None:
    typed = ("VLLM_ROCM_USE_AITER_MHA=0", "VLLM_ROCM_USE_AITR=1")
    variables = build_plan_environment(typed, {})
    assert [variables[one.partition("=")[0]] for one in typed] == [("0", "--env"), ("1", "--env")]
    plan = plans.made_up(*typed)
    assert [note.partition(" ")[0] for note in plan.assumptions if "passed on" in note] == [typed[0]]
    assert "did you mean VLLM_ROCM_USE_AITER?" in plan.warnings[0]


def test_field_o10_every_option_of_vllm_is_a_name_that_a_command_takes_at_once() -> None:
    groups = [set(action.option_strings) - {"-h"} for action in vllm_options.serve_parser()._actions]
    assert [group for group in groups if group and not group & serve_options.vllm_option_names()] == []
    for name in {name for group in groups for name in group}:
        serve_options.check_names([name, name.replace("-", "_").replace("__", "--", 1), f"{name}=1"])


@pytest.mark.parametrize("word", ["--no-enable-expert-parallel", "--disable-expert-parallel", "--enable-log-stats"])
def test_field_o10_a_switch_is_turned_round_as_vllms_parser_does(word: str) -> None:
    """vLLM 0.33 takes ``--disable-X`` for each ``--enable-X``, and the other way round."""
    serve_options.check_names([word])
    with pytest.raises(ValueError, match="did you mean"):
        serve_options.check_names([word + "e"])


@pytest.mark.parametrize(
    ("word", "meant"),
    [("--tp", "-tp"), ("--kv-cach-dtype", "--kv-cache-dtype"), ("--kv_cach_dtype=fp8", "--kv-cache-dtype"),
     ("--require_all", "--require-all"), ("--max-num-seq5", "--max-num-seqs"),
     ("--no-async-schedulin", "--no-async-scheduling")],
)  # fmt: skip
def test_field_o10_a_misspelt_option_is_named_with_the_right_one_before_vllm_is_imported(word: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean {meant}"):
        serve_options.check_names(["-tp", "8", word], ["--require-all"])
    serve_options.check_names(["--", word])


def test_field_o13_no_summary_is_cut() -> None:
    whole = CliRunner().invoke(app, ["--help"], terminal_width=outputs.DEFAULT_WIDTH).stdout
    assert "..." not in whole.partition("Commands:")[2]
    assert [name for name in COMMANDS if f"\n  {name} " not in whole] == []


def test_field_exit_statuses_are_in_one_table() -> None:
    whole = CliRunner().invoke(app, ["--help"]).stdout
    table = [line.split()[0] for line in whole.partition("Exit status")[2].splitlines()[1:] if line.strip()]
    assert table == ["0", "1", "2", "3", "4", "128+n"]


@pytest.mark.parametrize(("skipped", "asked", "status"), [(True, True, 3), (True, False, 0), (False, True, 0)])
def test_field_o11_a_gate_can_ask_for_every_step(skipped: bool, asked: bool, status: int) -> None:
    found = [StepResult("passed", "", name=name) for name in STEPS]
    if skipped:
        found[-1] = StepResult("skipped", "no GPU", name=found[-1].name)
    assert exit_status_of(found, False, require_all=asked) == status
    parameters = typer.main.get_command(app).commands["check"].params  # type: ignore[attr-defined]
    assert "--require-all" in [name for one in parameters for name in one.opts]


def kimi_k25_mxfp4() -> dict[str, Any]:
    """amd/Kimi-K2.5-MXFP4: experts in MXFP4, attention and vision as they are."""
    config = config_source.examples()["kimi-k2.5"]["config"]
    text = {name: value for name, value in config["text_config"].items() if name != "quantization_config"}
    left_out = quark(IN_ATTENTION, "re:.*vision_tower.*", "re:.*mm_projector.*")
    return config | {"text_config": text, "quantization_config": left_out}


NOT_BUNDLED = {
    "amd/DeepSeek-R1-0528-MXFP4-MTP-MoEFP4": config_source.examples()["deepseek-r1-mxfp4"]["config"],
    "amd/Kimi-K2.5-MXFP4": kimi_k25_mxfp4(),
}
"""Configs of the recipes' checkpoints that have no example of their own."""
CARDS = {"MI300X": ("gfx942",), "MI355X": ("gfx950",), "either": ("gfx942", "gfx950")}
DEFAULTS = {"0.30 to 0.32": plans.ENV, "0.33": tuple(one.replace("=1", "=0") for one in plans.ENV)}
"""The variables that a plan depends on, as vLLM has them by default."""
README_MODELS = {
    "DeepSeek-V2": ("deepseek-v2-lite",), "V3": ("deepseek-v3",), "R1": ("deepseek-r1",),
    "Kimi-K2.x": ("kimi-k2", "kimi-k2.5"), "GLM-4.7-Flash": ("glm-4.7-flash",),
}  # fmt: skip


def recipes() -> list[tuple[str, str, tuple[str, ...], tuple[str, ...]]]:
    """(card, model, options, variables) of each row of the recipe table; "add ..." adds to the last whole command."""
    found: list[tuple[str, str, tuple[str, ...], tuple[str, ...]]] = []
    for line in PAGES["operate.md"].partition("## Recipes")[2].partition("\n## ")[0].splitlines():
        if line.count("`") < 2 or not line.startswith("| "):
            continue
        _, _, card, command, *_ = (cell.strip() for cell in line.split("|"))
        words = shlex.split(command.partition("`")[2].rpartition("`")[0])
        if not command.startswith("add "):
            at = words.index("vllm")
            model_, options_, variables = words[at + 2], tuple(words[at + 3 :]), tuple(words[:at])
            added: tuple[str, ...] = ()
        else:
            added = tuple(words)
        found += [(arch, model_, options_ + added, variables) for arch in CARDS[card]]
    return found


def readme_models() -> list[tuple[str, str, tuple[str, ...], tuple[str, ...]]]:
    """(card, model, options, variables) of each model and card that README names, as it needs them."""
    rows = dict(re.findall(r"^\| (a model|a card) \| (.*) \|$", PAGES["README.md"], re.M))
    cards = re.findall(r"\((gfx\w+)\)", rows["a card"])
    said = rows["a model"].partition("): ")[2].partition(", [")[0]
    names = re.findall(r"([\w.-]+)(?: \(on (gfx\w+) with `([^`]+)`\))?(?:, |$)", said)
    assert [name for name, *_ in names] == list(README_MODELS), "a model without its example here"
    return [
        (arch, example, ("-tp", "4"), (variable,) if variable and on == arch else ())
        for name, on, variable in names for example in README_MODELS[name] for arch in cards
    ]  # fmt: skip


PROMISED = [
    *(("0.30 to 0.32", *one) for one in (*recipes(), *readme_models())), *(("0.33", *one) for one in readme_models())
]  # fmt: skip
assert len(PROMISED) >= 34, "eight recipes, and six models with both defaults, on their cards"


@slow
@pytest.mark.parametrize(
    ("default", "arch", "name", "options", "variables"), PROMISED,
    ids=[f"{at} {' '.join(one[:3])}" for at, one in enumerate(PROMISED)],
)  # fmt: skip
def test_field_recipes_engage(
    tmp_path: Path, default: str, arch: str, name: str, options: tuple[str, ...], variables: tuple[str, ...]
) -> None:
    """Each layer of each recipe and of each model that README names would engage, on each card that is named."""
    if name in NOT_BUNDLED:
        (tmp_path / "config.json").write_text(json.dumps(NOT_BUNDLED[name]))
        name = str(tmp_path)
    # Variables that no plan depends on are only passed on, and each set of them would take a process.
    read = [one for one in variables if one.partition("=")[0] in vllm_options.VARIABLES and not one.endswith("AITER=1")]
    plan, _ = plans.plan_of(arch, (*DEFAULTS[default], *read), config_source.find_config(name), options)
    assert (plan.outcome, plan.reasons, plan.arch) == ("engaged", (), arch)
    assert "aiter#4181" not in {issue.id for issue in issues.with_known_issues(plan).known_issues}


@slow
@pytest.mark.parametrize("default", DEFAULTS)
def test_field_recipes_engage_or_the_remedy_is_the_variable_to_set(default: str) -> None:
    """Without the variable of its recipe GLM-4.7-Flash is the row that fails, and both remedies name it."""
    plan, _ = plans.plan_of("gfx950", DEFAULTS[default], config_source.find_config("zai-org/GLM-4.7-Flash"), ())
    by_id = {issue.id: issue for issue in issues.with_known_issues(plan).known_issues}
    if default == "0.33":
        assert (plan.outcome, "aiter#4181" in by_id) == ("engaged", False)
        return
    assert [reason.code for reason in plan.reasons] == ["mxfp4_width"]
    variable = f"{vllm_options.FP4_BMM}=0"
    assert (variable in REMEDIES["mxfp4_width"], by_id["aiter#4181"].remedy) == (True, variable)


AS_IT_STANDS = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "nobody_knows",
    "auto_map": {"AutoConfig": "theirs.Config"},
    "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 64,
    "rope_theta": 10000.0, "max_position_embeddings": 32768, "torch_dtype": "bfloat16",
}  # fmt: skip
YARN = {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}


@slow
@pytest.mark.parametrize(
    ("config", "status", "said"),
    [
        (AS_IT_STANDS | YARN, 1, ["not_mla", "read as they stand"]),
        ({name: value for name, value in (AS_IT_STANDS | YARN).items() if "position" not in name}, 3,
         ["the config class of 'nobody_knows' is not here", "Python files"]),
    ],
    ids=["yarn", "yarn without positions"],
)  # fmt: skip
def test_field_48_a_config_without_its_class_is_read_and_vllm_is_not_blamed(
    typed: Any, tmp_path: Path, config: dict[str, Any], status: int, said: list[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, text = typed(str(tmp_path), "--trust-remote-code")
    text = re.sub(r"[ |]+", " ", text)
    assert (code, [one for one in said if one not in text], "vLLM could not" in text) == (status, [], False), text


@slow
def test_field_53_a_library_that_a_models_class_lacks_is_no_refusal_of_vllms() -> None:
    """vLLM only logs what went wrong while it looked at the class."""
    with pytest.raises(NotKnownError, match="vLLM lacks a_library on this machine"):
        plans.plan_of("gfx942", (), config_source.find_config("deepseek-r1"), (), "the model's class needs a library")


@slow
def test_field_55_a_model_that_is_not_taken_gets_no_advice_for_the_fast_path(typed: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MINICPM3))
    code, text = typed(str(tmp_path), "--trust-remote-code")
    advice = ("max_token_num", "With measure=false", "unset ", "FP8BMM", "planned as if")
    assert (code, "not_mla" in text, [one for one in advice if one in text]) == (1, True, []), text
    code, text = typed("glm-5", "-tp", "8")
    assert (code, "sparse_mla" in text, [one for one in advice[:2] if one in text]) == (1, True, []), text


@slow
def test_field_72_a_foreign_message_is_one_sentence(typed: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(AS_IT_STANDS | {"architectures": ["NobodyKnowsForCausalLM"]}))
    code, text = typed(str(tmp_path), "--trust-remote-code")
    assert (code, "NobodyKnowsForCausalLM" in text, "--verbose" in text, len(text) < 400) == (2, True, True, True), text


@slow
@pytest.mark.parametrize("line", [("-dp", "16", "--max-num-seqs", "4096", "--max-num-batched-tokens", "4096"), R1[1:]])
def test_field_39_no_two_numbers_of_the_table_touch(typed: Any, line: tuple[str, ...]) -> None:
    assert typed  # its process answers
    shown = CliRunner().invoke(app, ["check", "deepseek-r1", "--only", "plan", *line]).stdout
    rows = re.findall(r"^ *\d+ +(?:vLLM, \w+|aiter|triton) .*$", shown, re.M)
    assert len(rows) == 12
    for row in rows:
        layer, step, of_a_layer, of_a_step = (int(one.replace(",", "")) for one in row.split()[-4:])
        assert (step, of_a_step) == (61 * layer, 61 * of_a_layer), row
        assert len(row) <= outputs.DEFAULT_WIDTH


def test_field_a_misspelt_variable_is_said_on_top() -> None:
    text = printout.format_plan(plans.made_up("VLLM_ROCM_USE_AITR_MOE=1", "HSA_NO_SCRATCH_RECLAIM=1"))
    first = text.splitlines()[1]
    assert ("VLLM_ROCM_USE_AITR_MOE=1" in first, "did you mean VLLM_ROCM_USE_AITER_MOE?" in first) == (True, True)
    assert text.count("WARNING") == 1, "another library's variable is only passed on"


@pytest.mark.parametrize("option", serve_options.OLD_OPTIONS)
def test_field_42_an_option_of_an_earlier_vllm_is_answered_with_what_to_do(option: str) -> None:
    assert option not in serve_options.vllm_option_names(), "this release has it"
    is_opposite = option.replace("--disable-", "--enable-", 1) in serve_options.vllm_option_names()
    if is_opposite and serve_options._vllm_release() >= serve_options.MIN_RELEASE_OF_DISABLE:
        serve_options.check_names([option])
        return
    with pytest.raises(ValueError, match="no such option: ") as raised:
        serve_options.check_names([option, "1"])
    named = re.findall(r"--?[a-z][\w-]+", str(raised.value).partition(": no such option: ")[2])
    assert [one for one in named if one != "-cc" and one not in serve_options.vllm_option_names()] == []
    serve_options.check_names(named)


@pytest.mark.parametrize(
    "word",
    ["--disable-log-request", "--no-enable-log-requestz", "--enable-prefix-cachingg", "--no-enable-prefix-cachingg",
     "--disable-custom-all-reducee", "--no-async-schedulin"],
)  # fmt: skip
def test_field_42_no_hint_turns_a_switch_round(word: str) -> None:
    with pytest.raises(ValueError, match="did you mean") as raised:
        serve_options.check_names([word])
    meant = str(raised.value).partition("did you mean ")[2]
    assert meant.startswith(serve_options.OFF_PREFIXES) is word.startswith(serve_options.OFF_PREFIXES)
    serve_options.check_names([meant.rstrip("?")])


def test_field_42_an_option_is_left_to_a_vllm_whose_release_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Sources that nobody has built have no ``_version.py``; from 0.33 on vLLM takes this option."""
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine/arg_utils.py").write_text('"--enable-log-requests"')
    monkeypatch.setattr(serve_options, "_vllm_folder", lambda: tmp_path)
    monkeypatch.setattr(serve_options, "vllm_option_names", serve_options.vllm_option_names.__wrapped__)
    serve_options.check_names(["--disable-log-requests"])
    (tmp_path / "_version.py").write_text("version = '0.32.0'")
    with pytest.raises(ValueError, match="no such option"):
        serve_options.check_names(["--disable-log-requests"])


def test_field_no_remedy_sends_a_reader_of_the_plan_to_the_plan() -> None:
    assert [code for code, remedy in REMEDIES.items() if "--only plan" in remedy] == []


SHARED_EXPERTS = ("VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS=1",)
GRAPHS = ("--compilation-config", '{"cudagraph_mode": "FULL_AND_PIECEWISE"}')
MORIIO = '{"kv_connector": "MoRIIOConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": {}}'
PUBLIC = {
    "recipes#661, 2026-07-21": (
        ("gfx950", SHARED_EXPERTS), "kimi-k2.5-mxfp4", ("-tp", "4", "--kv-cache-dtype", "fp8", "--max-num-seqs", "512",
         "--async-scheduling"), "61/61", 16, set(), ["aiter#4452"]),
    "ATOM#886, 2026-05-22": (
        ("gfx950", SHARED_EXPERTS), "kimi-k2.5-mxfp4", ("-dp", "8", "--enable-expert-parallel", *GRAPHS,
         "--kv-cache-dtype", "fp8"), "61/61", 64, set(), ["aiter#4452"]),
    "vllm#52312, 2026-08": (
        ("gfx950", SHARED_EXPERTS), "deepseek-v3", ("-tp", "8", "--max-model-len", "16K"), "61/61", 16, set(),
        ["aiter#5765"]),
    "recipes#825, 2026-08-19": (
        ("gfx950", SHARED_EXPERTS), "glm-5.1-mxfp4", ("-tp", "8", "--kv-cache-dtype", "fp8_e4m3", "--moe-backend",
         "aiter"), "0/78", 8, {"sparse_mla"}, ["aiter#4452", "aiter#4181", "aiter#3737"]),
    "vllm#50347, 2026-07-30": (
        ("gfx950", SHARED_EXPERTS), "kimi-k3", ("-tp", "8", "--enforce-eager"), "0/24", 12, {"no_rope"},
        ["vllm#51171"]),
    "aiter#1455, 2025-11-20": (
        ("gfx942", ()), "kimi-k2", ("--max-model-len", "100K", "--max-num-seqs", "256", "-tp", "4", "-dp", "2"),
        "61/61", 16, set(), []),
    "llm-d#1735, 2026-06-09": (
        ("gfx942", ()), "deepseek-v3", ("-tp", "1", "-dp", "16", "--data-parallel-size-local", "8", "--headless",
         "--data-parallel-start-rank", "8", "--all2all-backend", "mori_low_latency", "--enable-expert-parallel"),
        "61/61", 128, set(), []),
    "legacy-rocm-build#5376, 2025-09-18": (
        ("gfx942", ()), "deepseek-r1", ("-tp", "8", "--max-num-seqs", "1024", "--max-num-batched-tokens", "131072",
         "--max-model-len", "10240"), "61/61", 16, set(), ["aiter#4888"]),
    "vllm#47276, 2026-07-01": (
        ("gfx942", ()), "deepseek-v3", ("-dp", "8", "--enable-expert-parallel", "--kv-cache-dtype", "fp8",
         "--block-size", "1"), "61/61", 128, set(), []),
    "recipes#432, 2026-04-30": (
        ("gfx942", ()), "glm-5", ("-tp", "8", *MTP, "--chat-template-content-format=string", "--block-size=1"),
        "0/79", 8, {"sparse_mla"}, ["aiter#4888"]),
}  # fmt: skip
"""Public commands by their source: what they ran on, the model, its options; then layers that engage, heads of a rank,
codes, and known issues."""


@slow
@pytest.mark.parametrize("source", PUBLIC)
def test_field_a_public_command_is_planned_right(tmp_path: Path, source: str) -> None:
    (arch, env), name, line, engaged, heads, codes, known = PUBLIC[source]
    glm = config_source.examples()["glm-5"]["config"]
    left_out = quark(IN_ATTENTION, "re:.*shared.*", "re:.*indexer.*")
    made = {"kimi-k2.5-mxfp4": kimi_k25_mxfp4(), "glm-5.1-mxfp4": glm | {"quantization_config": left_out}}
    if name in made:
        (tmp_path / "config.json").write_text(json.dumps(made[name]))
        name = str(tmp_path)
    serve_options.check_names(line)
    by_default = DEFAULTS["0.30 to 0.32"]  # of the vLLM that these commands ran; the later one wins
    plan = issues.with_known_issues(plans.plan_of(arch, (*by_default, *env), config_source.find_config(name), line)[0])
    assert {reason.code for reason in plan.reasons} == codes, plan.reasons
    assert (f"{plan.layers.engaged}/{plan.layers.mla}", plan.heads_per_rank) == (engaged, heads)
    assert [issue.id for issue in plan.known_issues] == known


@slow
@pytest.mark.parametrize(
    ("line", "said"),
    [
        (("--speculative_config", '{"num_speculative_tokens": 2}'), "without speculative model"),
        (
            ("-cc", '{"full_cuda_graph": false, "cudagraph_mode": "PIECEWISE"}'),
            "full_cuda_graph is now cudagraph_mode, for example ",
        ),
        (("-cc", '{"use_inductor": true}'), "use_inductor is now backend"),
        (("--config=serve.yaml",), "--config=serve.yaml: vLLM reads no file that is given so"),
        (("--cuda-graph-sizes", "1", "256"), "--cudagraph-capture-sizes"),
        (("--swap-space", "64"), "drop it"),
        (("--max-seq-len-to-capture", "16384"), "--max-cudagraph-capture-size"),
    ],
)
def test_field_a_public_command_for_an_earlier_vllm_is_answered_with_what_to_change(
    typed: Any, line: tuple[str, ...], said: str
) -> None:
    """vllm#28222 (2025-11-06), vllm#29304 (2025-11-24), legacy-rocm-build#5376 (2025-09-18)."""
    code, text = typed("deepseek-v3", "-tp", "8", *line)
    assert (code, said in text, "errors.pydantic.dev" in text) == (2, True, False), text


def test_field_a_variable_of_an_earlier_vllm_is_answered_with_what_replaces_it() -> None:
    for name, meant in serve_options.OLD_VARIABLES.items():
        assert not vllm_options.has_variable(name), "this release has it"
        (warning,) = plans.made_up(f"{name}=1").warnings
        assert warning.endswith(meant)


@slow
def test_field_29304_a_connector_that_hangs_is_said() -> None:
    pytest.importorskip("msgpack", reason="vLLM's MoRIIO needs it")
    line = ("-tp", "1", "-dp", "8", "--enable-expert-parallel", "--block-size", "1", "--kv-transfer-config", MORIIO)
    plan = issues.with_known_issues(plans.plan_of("gfx942", (), config_source.find_config("deepseek-v3"), line)[0])
    assert ("vllm#45749" in {issue.id for issue in plan.known_issues}, plan.outcome) == (True, "engaged")
