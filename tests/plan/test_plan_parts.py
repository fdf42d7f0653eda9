"""Claims about what ``plan`` computes itself: every reason, kernels by batch size, formulas, the config's place."""

import json
import os
import sys
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from types import SimpleNamespace

import pytest
import vllm.envs
from hypothesis import given
from hypothesis import strategies as st

from tests.support import plans
from tests.support.pages import ROOT
from vllm_aiter_mla import admission
from vllm_aiter_mla.commands import serve_options
from vllm_aiter_mla.commands.compat import rocm_config, vllm_options
from vllm_aiter_mla.commands.plan import build, config_source, kernels, vllm_facts
from vllm_aiter_mla.commands.plan.record import NotKnownError
from vllm_aiter_mla.kernels import device, formulas
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.serving.backends import candidates
from vllm_aiter_mla.settings import LIMIT_FIELD, Settings

ENGINE = admission.ConfigView(
    is_supported_version=False, missing_names=("x",), op_differences=("x",), is_atom_active=True, is_mla=False,
    is_sparse=True,
    enforce_eager=True, breakable_cudagraph=True, mode="NONE", backend="eager", dcp=2, pcp=2, has_hisparse=True,
    kv_cache_dtype="fp8_e5m2", model_dtype="float16", model_impl="transformers",
    splitting_ops=(admission.KV_UPDATE_OP,), user_pass="x", card="cuda", uses_aiter=False, attention="Other",
)  # fmt: skip
PASSES = Settings(integration="passes")
LAYER = admission.LayerView(
    impl="Other", is_sparse=True, q_pad_num_heads=64, has_absorbed_weight=False, missing_names=("x",), has_amx_bmm=True,
    has_rope_kernel=False, cudagraph_support="ALWAYS",
    kv_cache_dtype="fp8_e5m2", kv_cache_ndim=4, dcp=2, pcp=2, dcp_q_replicate=True, has_hisparse=True,
    graph_dtype="float16", cos_sin_dtype_matches=False, has_sliding_window=True, is_query_scaled=True, num_heads=0,
    kv_lora_rank=0,
)  # fmt: skip


def test_a_view_with_everything_wrong_gives_every_reason_of_admission():
    found = [skip.code for skip in build.engine_reasons(plans.simulated_facts(PASSES, **vars(ENGINE)))]
    # Each of these is a view of its own: a mode that breakable graphs did not set, another attention with AITER on, MLA
    # that a variable switched off, a model without a class in vLLM, and a folder of graphs, which another mode lacks.
    others = {
        "compilation_mode", "attention_backend", "mla_disabled", "no_vllm_class", "cache_dir", *build.UNKNOWN_CODES,
    }  # fmt: skip
    assert sorted(found) == sorted(set(admission.CODES_BY_LEVEL["engine"]) - others)
    layer = [skip.code for skip in admission.layer_skips(LAYER)]
    shared = {"capability", "sparse_mla", "dcp", "pcp", "hisparse", "kv_cache_dtype"}
    assert sorted(layer) == sorted(set(admission.CODES_BY_LEVEL["layer"]) | shared)


@pytest.mark.parametrize("ops", [(admission.KV_UPDATE_OP,), (admission.MLA_ATTENTION_OP, admission.KV_UPDATE_OP)])
@pytest.mark.parametrize("eager", [True, False])
def test_a_mode_that_eager_execution_sets_is_no_reason_of_its_own(ops, eager):
    view = admission.ConfigView(mode="NONE", splitting_ops=ops, has_hisparse=True, enforce_eager=eager)
    found = [skip.code for skip in build.engine_reasons(plans.simulated_facts(PASSES, **vars(view)))]
    assert found == ["hisparse", "enforce_eager" if eager else "compilation_mode", "graph_partition"]


@pytest.mark.parametrize("default", [True, False])
def test_a_switch_is_read_by_the_installed_vllms_own_reader(default: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8BMM is on in 0.30 to 0.32 and off in 0.33."""
    name = vllm_options.FP8_BMM
    read = lambda: bool(int(os.environ.get(name, str(int(default)))))  # noqa: E731
    variables = vllm.envs.environment_variables | {name: read}
    monkeypatch.setattr(vllm.envs, "environment_variables", variables)
    monkeypatch.delenv(name, raising=False)
    assert vllm_options.switch_states()[name] is default
    monkeypatch.setenv(name, str(int(not default)))
    assert vllm_options.switch_states()[name] is not default
    monkeypatch.setenv(name, "maybe")
    with pytest.raises(ValueError, match=f"{name}=maybe"):
        vllm_options.switch_states()
    del variables[name]
    assert vllm_options.switch_states()[name] is False


VIEW = admission.LayerView(num_heads=2, model_dtype="bfloat16")


@pytest.mark.parametrize("limit", [2, 200, 256, 1024])
def test_kernel_spans_cover_the_decode_limit_without_gaps(limit):
    decision, spans = kernels.decide_kernels("gfx942", Settings(), VIEW, "plain", 16, limit)
    assert (spans[0].first, spans[-1].last) == (1, limit)
    for before, after in pairwise(spans):
        assert after.first == before.last + 1
    assert {decision.kernel_at(tokens) for span in spans for tokens in (span.first, span.last)} == {
        s.kernel for s in spans
    }


def test_two_heads_per_rank_leave_aiter_from_256_tokens_on():
    small, large, *larger = kernels.decide_kernels("gfx942", Settings(), VIEW, "plain", 16, 1024)[1]
    assert (small.kernel, small.detail, small.last) == ("aiter", "its per-head kernel", 255)
    assert (large.kernel, large.first, large.rejected_kernels[0].kernel) == ("triton", 256, "aiter")
    assert {span.kernel for span in larger} == {"triton"}, "on larger tiles"


@pytest.mark.parametrize("kernel", ["auto", "aiter", "aiter-opt", "triton", "vllm"])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_a_plan_asks_the_servers_candidates_in_the_servers_order(kernel, arch):
    planned, _ = kernels.decide_kernels(arch, Settings(kernel=kernel), replace(VIEW, num_heads=16), "plain", 16, 64)
    names = {*(span.kernel for span in planned.kernel_spans), *(other.kernel for other in planned.rejected_kernels)}
    assert names == {*candidates(Settings(kernel=kernel), Platform(arch))}


def bytes_once(t, n, stored, weight):
    """Bytes of DeepSeek's widths: weights, q, latent, k_pe, table rows, slot and position; query and cache rows."""
    read = n * 128 * 512 * weight + t * n * 192 * 2 + t * 576 * 2 + t * (64 * 2 + 16)
    return read + t * (n + 1) * 576 * stored


@given(
    tokens=st.integers(1, 512),
    heads=st.sampled_from([1, 2, 8, 16, 128]),
    stored=st.integers(1, 2),
    weight=st.integers(1, 2),
)
def test_the_one_launch_moves_each_value_once(tokens, heads, stored, weight):
    step = formulas.StepSize(tokens, heads, 128, 64, 512, stored, weight)
    _, fused, aiter, once = map(formulas.moved, formulas.paths(step).values())
    assert once == bytes_once(tokens, heads, stored, weight)
    # docs/kernels.md: the unfused sequence writes and reads the absorbed and the rotated query once, and k_pe back.
    assert fused - once == 4 * tokens * heads * 576 + 2 * tokens * 64
    assert aiter - once == 4 * tokens * heads * 512


@pytest.mark.parametrize(
    ("weight", "moved", "share"), [(1, 2_151_424, 0.476), (17 / 32, 1_659_904, 0.412), (2, 3_200_000, 0.575)]
)
def test_at_64_tokens_and_16_heads_the_one_launch_over_fp8_weights_moves_at_most_half_of_vllms_bytes(
    weight, moved, share
):
    step = formulas.StepSize(64, 16, 128, 64, 512, stored=1, weight=weight)
    _, fused, _, once = map(formulas.moved, formulas.paths(step).values())
    assert (once, once / fused) == (moved, pytest.approx(share, abs=0.0005))


@pytest.mark.parametrize("stored", [1, 2])
def test_launches_per_layer_are_those_of_the_architecture(stored):
    """vLLM's own concat and fp8 quantisation are one compiled kernel: docs/evidence.md counts it so."""
    step = formulas.StepSize(8, 16, 128, 64, 512, stored)
    assert tuple(map(len, formulas.paths(step).values())) == (4, 3, 2, 1)


def test_examples_carry_what_they_rest_on():
    bundled = config_source.examples()
    assert {"deepseek-r1", "deepseek-v2-lite", "kimi-k2", "kimi-k2.5", "kimi-k3", "glm-4.7-flash"} <= set(bundled)
    for name, entry in bundled.items():
        assert entry["example"]["basis"]
        assert isinstance(entry["example"]["assumed"], list)
        assert config_source.find_config(name).config_location == "bundled example"
        assert config_source.find_config(entry["example"]["hub_name"]).config == config_source.find_config(name).config
    assert "base" not in json.dumps([entry["config"] for entry in bundled.values()])


def test_a_hub_name_is_read_from_the_local_cache(monkeypatch, tmp_path):
    from huggingface_hub import constants

    snapshot = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(config_source.examples()["kimi-k2"]["config"]))
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    found = config_source.find_config("some/model")
    assert (found.config_location, found.config) == ("local Hugging Face cache", snapshot / "config.json")
    # vLLM's --revision chooses among the snapshots, and no other one takes its place.
    with pytest.raises(LookupError, match="some/model --revision v2: not in the local"):
        config_source.find_config("some/model", "v2")
    other = snapshot.with_name("1" * 40)
    other.mkdir()
    (other / "config.json").write_text("{}")
    (tmp_path / "models--some--model" / "refs" / "v2").write_text("1" * 40)
    assert config_source.find_config("some/model", "v2").config == other / "config.json"
    vllm_facts._check_revision("v2", other)
    vllm_facts._check_revision("a branch", tmp_path)  # no folder of the cache: vLLM asks for no revision of it
    with pytest.raises(ValueError, match="--revision v2"):  # as a file of --config may say
        vllm_facts._check_revision("v2", snapshot)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ((), None), (("--revision", "v2"), (0, 2, "v2")), (("-q", "--revision=v2"), (1, 1, "v2")),
        (("--revision",), (0, 2, "")), (("--revision", "a", "--revision=b"), (2, 1, "b")),
        (("--code-revision", "v2"), None),
    ],
)  # fmt: skip
def test_the_last_of_several_options_counts(words, found):
    assert serve_options.last_typed(("--revision",), words) == found


def test_a_cache_that_cannot_be_searched_is_not_called_empty(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(__spec__=None))
    with pytest.raises(LookupError, match="ImportError: cannot import name 'try_to_load_from_cache'") as caught:
        config_source.find_config("some/model")
    assert "not in the local" not in str(caught.value)


def no_driver():
    raise RuntimeError("AMDSMI_STATUS_DRIVER_NOT_LOADED")


@pytest.mark.parametrize(
    ("init", "handles", "finds"), [(no_driver, [], False), (lambda: None, [], False), (lambda: None, ["a card"], True)],
    ids=["no driver", "no card", "a card"],
)  # fmt: skip
def test_a_rocm_image_has_a_card_only_if_amdsmi_finds_one(monkeypatch, init, handles, finds):
    """The package is in the image; a build machine or a laptop has no card."""
    ended = []
    amdsmi = SimpleNamespace(
        amdsmi_init=init, amdsmi_get_processor_handles=lambda: handles, amdsmi_shut_down=lambda: ended.append(1)
    )
    monkeypatch.setitem(sys.modules, "amdsmi", amdsmi)
    assert rocm_config.has_amd_card() is finds
    assert ended == [1] * (init is not no_driver), "the library was left open"


def test_a_machine_without_amdsmi_has_no_card(monkeypatch):
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    assert not rocm_config.has_amd_card()


def simulates(monkeypatch, found_card, arch=None):
    """Return the card that a plan simulates where torch is built for ROCm; None if it simulates none."""
    simulated = []
    monkeypatch.setattr(device, "card", lambda: SimpleNamespace(rocm="7.0.1", arch="gfx942"))
    monkeypatch.setattr(rocm_config, "has_amd_card", lambda: found_card)
    monkeypatch.setattr(rocm_config, "driver_arch", lambda: "gfx950")
    monkeypatch.setattr(vllm_facts.simulated_card, "simulate_rocm", simulated.append)
    for module, name in ((vllm_facts.vllm_options, "load_plugins"), (rocm_config, "inspect_models_in_process")):
        monkeypatch.setattr(module, name, lambda: None)
    loaded = vllm_facts.load_vllm(arch)
    assert simulated == ([loaded.arch] if loaded.has_simulated_card else [])
    return simulated[0] if simulated else None


def test_a_plan_simulates_a_card_in_a_rocm_image_without_one(monkeypatch):
    assert simulates(monkeypatch, found_card=False) == "gfx942"
    assert simulates(monkeypatch, found_card=False, arch="gfx950") == "gfx950"
    assert simulates(monkeypatch, found_card=True) is None


def test_what_serves_does_not_import_what_is_made_up():
    package = ROOT / "vllm_aiter_mla"
    makers = ("rocm_config", "simulate_rocm")
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if any(name in path.read_text() for name in makers)
    }
    assert found == {
        f"commands/{name}.py" for name in ("plan/build", "plan/child", "plan/simulated_card", "plan/vllm_facts")
    }


def test_a_library_that_is_missing_is_not_known_and_no_wrong_option():
    """As for the connector of --kv-transfer-config, which vLLM imports while it reads its options."""
    try:
        import_module("a_library_that_nobody_has")
    except ImportError as error:
        told = vllm_facts._user_error(error, ["--option"], before_parsing=True)
    assert isinstance(told, NotKnownError)
    assert "a_library_that_nobody_has" in str(told)


def test_a_file_that_an_option_names_and_that_is_not_there_is_a_wrong_option():
    told = vllm_facts._user_error(FileNotFoundError(2, "No such file", "no.yaml"), [], before_parsing=True)
    assert not isinstance(told, NotKnownError)
    assert "no.yaml" in str(told)


def test_a_module_that_an_option_names_and_that_is_not_there_is_a_wrong_option():
    def told(arguments):
        try:
            raise ModuleNotFoundError("No module named 'mine'", name="mine")
        except ModuleNotFoundError as error:
            return vllm_facts._user_error(error, arguments, before_parsing=True)

    assert not isinstance(told(["-cc", '{"pass": "mine.ours"}']), NotKnownError)
    for other in ('{"backend": "mine_high"}', '{"backend": "to.mine"}', "--nothing"):
        assert isinstance(told([other]), NotKnownError)


def test_an_error_of_another_library_whose_errors_are_no_method_is_a_wrong_option_in_its_words():
    class OtherError(Exception):
        errors = ("one", "another")

    told = vllm_facts._user_error(OtherError("no such layer"), (), before_parsing=True)
    assert (type(told), str(told)) == (ValueError, "no such layer")


def test_in_eager_mode_vllms_fusion_does_not_run_and_fp8_takes_a_launch_more():
    step = formulas.StepSize(64, 16, 128, 64, 512, 1)
    assert {name: len(launches) for name, launches in formulas.paths(step, eager=True).items()} == {
        "vLLM, unfused": 5, "aiter": 2, "triton": 1,
    }  # fmt: skip
    assert len(formulas.paths(step)["vLLM, unfused"]) == 4


def test_a_newer_release_of_a_bundled_example_is_answered_with_its_name():
    with pytest.raises(LookupError, match=r"Did you mean deepseek-v3\?"):
        config_source.find_config("deepseek-ai/DeepSeek-V3.1")


def test_aiter_that_is_off_comes_before_what_vllm_raises_without_it():
    answered = plans.simulated_facts(uses_aiter=False, attention="not known (ValueError: block size 1)")
    skip = admission.Skip("not_known", "ValueError")
    first, second = build.engine_reasons(replace(answered, skip=skip))
    assert (first.code, second.code) == ("aiter_off", "not_known")
    assert "ValueError" not in first.message


def test_a_key_that_is_almost_the_plugins_own_is_said(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    _, given = vllm_facts.parse_options(
        tmp_path, ["--additional-config", json.dumps({"aiter-mla": {"enabled": True}, "another": {}})]
    )
    notes = " ".join(given.notes)
    assert [f"additional_config.{key} " in notes for key in ("aiter-mla", "another")] == [True, False]


@pytest.mark.parametrize(
    ("number", "named"),
    [
        ("num_drafts", "--speculative-config"),
        ("max_token_num", f"pass_config.{LIMIT_FIELD} or additional_config.aiter_mla.max_token_num"),
        ("max_num_seqs", "--max-num-seqs"),
    ],
)
def test_a_number_that_no_engine_comes_near_is_named_as_it_is_typed(number, named):
    made, too_many = plans.simulated_facts(), 2**40
    if number == "max_token_num":
        made = plans.simulated_facts(Settings(max_token_num=too_many))
    else:
        options = replace(made.engine.options, **{number: too_many})
        made = replace(made, engine=replace(made.engine, options=options))
    with pytest.raises(ValueError, match=f"{named}[^ ]* {too_many}: "):
        build.make_plan(made, plans.VLLM, {})


def test_a_plan_over_a_card_that_is_made_up_says_what_vllm_looks_through():
    (said,) = (text for text in plans.made_up().assumptions if "simulated" in text)
    assert "amdsmi" in said
    assert "no ROCm" not in said
