"""Claims about an engine that the gate skips: one line, the knob's name, the status file, an untouched config."""

import copy
import json
import logging
import os
import subprocess
import sys
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from typer.testing import CliRunner
from vllm.config import PassConfig, VllmConfig

from tests.gate import gate_support
from tests.gate.gate_support import ON, PASSES, WHOLE, assert_skipped, compile_options, pass_of
from tests.support.planted import raising
from vllm_aiter_mla import admission, gate
from vllm_aiter_mla.admission import Skip
from vllm_aiter_mla.commands.main import app
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import custom_op, patches, release
from vllm_aiter_mla.compat import layer as compat_layer
from vllm_aiter_mla.serving import ops
from vllm_aiter_mla.status import metrics, status_files

UNTESTED = {"aiter_mla": {"enabled": True, "debug": {"untested_vllm": True}}}
ATTENTION, UPDATE, FUSED = release.OP_ARGUMENTS


def set_on(holder, field, value):
    return lambda built: setattr(getattr(built, holder), field, value)


def make_sparse(built):
    built.model_config = copy.copy(built.model_config)
    built.model_config.hf_text_config = copy.copy(built.model_config.hf_text_config)
    built.model_config.hf_text_config.index_topk = 2048


def test_a_hash_that_does_not_see_the_flag_skips_the_engine(config, said, monkeypatch):
    """A graph of the flag off would come out of vLLM's compile cache."""
    assert pass_of(config(additional_config=ON)) is not None
    monkeypatch.setattr(PassConfig, "compute_hash", lambda self: "one for all")
    assert_skipped(said, config(additional_config=ON), "capability", "hash of pass_config: RuntimeError")


@pytest.mark.parametrize(
    ("change", "code", "knob"),
    [
        (set_on("parallel_config", "decode_context_parallel_size", 2), "dcp", "decode_context_parallel_size"),
        (set_on("parallel_config", "prefill_context_parallel_size", 2), "pcp", "prefill_context_parallel_size"),
        (set_on("cache_config", "cache_dtype", "fp8_e5m2"), "kv_cache_dtype", "fp8_e5m2"),
        (set_on("cache_config", "cache_dtype", "fp8_ds_mla"), "kv_cache_dtype", "fp8_ds_mla"),
        (set_on("attention_config", "hisparse_config", object()), "hisparse", "hisparse_config"),
        (make_sparse, "sparse_mla", "index_topk"),
        (set_on("compilation_config", "mode", "unheard of"), "capability", "cannot be read"),
    ],
)
def test_what_a_cpu_config_cannot_be_built_with_skips_too(config, said, change, code, knob):
    built = config()
    built.additional_config = ON
    change(built)
    skip = gate.apply(built)
    assert isinstance(skip, Skip)
    assert skip.code == code
    assert_skipped(said, built, code, knob)


def test_platform_skip_on_a_cpu_adds_nothing(config, said, monkeypatch, real_facts):
    off = compile_options(config())
    monkeypatch.setattr(compat_config, "platform_facts", real_facts)
    built = config(additional_config=ON)
    assert_skipped(said, built, "platform", "kernel=triton")
    assert not [line for line in said.at(logging.INFO) if "on: " in line]
    assert compile_options(built) == off


@pytest.mark.parametrize("kernel", ["triton", "reference"])
def test_platform_skip_leaves_out_a_kernel_for_tests_and_the_line_says_so(
    config, said, monkeypatch, real_facts, kernel
):
    monkeypatch.setattr(compat_config, "platform_facts", real_facts)
    assert pass_of(config(additional_config={"aiter_mla": {"enabled": True, "kernel": kernel}})) is not None
    assert [line for line in said.at(logging.INFO) if "on: " in line and "(platform)" in line]
    assert said.at(logging.WARNING) == []


def test_platform_skip_of_a_platform_that_cannot_be_asked(config, said, monkeypatch):
    monkeypatch.setattr(compat_config, "platform_facts", raising(AttributeError("no such name")))
    assert_skipped(said, config(additional_config=ON), "capability", "no such name")


@pytest.mark.mutation("I11")
def test_mutation_platform_skip_that_takes_any_platform_is_caught(config, said, monkeypatch):
    with pytest.raises(AssertionError, match="has engaged"):
        test_platform_skip_on_a_cpu_adds_nothing(config, said, monkeypatch, lambda vllm_config: {})


def test_a_model_without_mla_is_skipped(compiling, dense_model, said):
    assert_skipped(said, VllmConfig(model_config=dense_model, additional_config=ON), "not_mla", "model")


def test_a_vllm_outside_the_window_is_skipped_unless_forced(config, said, monkeypatch):
    monkeypatch.setattr(release, "vllm_version", lambda: "0.34.0rc1")
    assert_skipped(said, config(additional_config=ON), "vllm_version", "0.34.0rc1")
    assert pass_of(config(additional_config=UNTESTED)) is not None


def test_a_failed_registration_step_skips_unless_it_is_optional(config, said, monkeypatch):
    fail = raising(OSError("no such library"))
    patches.keep_failure("patch pass_config", fail)
    assert pass_of(config(additional_config=ON)) is not None
    monkeypatch.setattr(ops, "register", fail)
    assert_skipped(said, config(additional_config=ON), "capability", "torch ops: OSError")


def test_strict_mode_makes_a_skip_an_error_that_names_the_knob(config):
    with pytest.raises(ValidationError, match=r"enforce_eager.*strict"):
        config(additional_config={"aiter_mla": PASSES["aiter_mla"] | {"strict": True}}, enforce_eager=True)


BROKEN = {
    "our pass": lambda patch: patch.setitem(sys.modules, "vllm_aiter_mla.passes.pipeline", None),
    "vLLM's config": lambda patch: patch.setattr(compat_config, "write", raising(AttributeError("no such field"))),
    "vLLM's worker": lambda patch: patch.setattr(patches, "hook_workers", raising(ImportError("no worker_base"))),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_pass_that_cannot_be_installed_skips_the_engine(config, said, monkeypatch, broken):
    off = compile_options(config())
    broken(monkeypatch)
    built = config(additional_config=ON)
    assert_skipped(said, built, "capability", "Error: ")
    assert compile_options(built) == off
    with pytest.raises(ValidationError, match=r"capability.*strict"):
        config(additional_config={"aiter_mla": {"enabled": True, "strict": True}})


def test_a_skipped_config_is_in_the_status_file(registered, mla_model, cache_root):
    assert pass_of(gate_support.vllm_config(mla_model, additional_config=PASSES)) is None
    (path,) = (cache_root / "aiter_mla").glob(f"status-*-{os.getpid()}-*.json")
    record = json.loads(path.read_text())
    assert (record["num_layers"], record["engaged"]) == (2, {})
    assert {skip["code"] for skip in record["skipped"].values()} == {"compilation_mode"}


def test_an_engine_that_is_skipped_because_vllm_gives_it_no_mla_layer_is_noticed(compiling, dense_model, cache_root):
    VllmConfig(model_config=dense_model, additional_config=ON)
    found = CliRunner().invoke(app, ["status"])
    assert (found.exit_code, ": 0/0: not_mla: " in found.output, " -> none: " in found.output) == (1, True, True)
    layers = metrics.read_samples(cache_root / "aiter_mla")[metrics.LAYERS]
    samples = {labels[-1]: count for labels, count in layers.items()}
    assert samples == {"engaged": 0, "skipped": 1}, "no alert fires"


def test_a_skip_that_cannot_be_recorded_costs_a_warning_and_no_engine(registered, mla_model, said, monkeypatch):
    monkeypatch.setattr(status_files, "write_status", raising(RuntimeError("planted")))
    assert pass_of(gate_support.vllm_config(mla_model, additional_config=PASSES)) is None
    skipped, unrecorded = said.at(logging.WARNING)
    assert "compilation_mode" in skipped
    assert skipped.endswith("leave the mode unset")
    assert "planted" in unrecorded


def test_only_the_mla_layers_of_a_hybrid_are_counted():
    text = SimpleNamespace(num_hidden_layers=93, linear_attn_config={"full_attn_layers": [4, 8, 12, 96]})
    model = SimpleNamespace(use_mla=True, hf_text_config=text)
    assert compat_config.mla_layers(model) == (3, 7, 11)
    text = SimpleNamespace(num_hidden_layers=10, layer_group_size=4)
    for architecture, layers in (("BailingMoeV2_5ForCausalLM", [3, 7]), ("BailingMoeV3ForCausalLM", [3, 7, 8, 9])):
        model = SimpleNamespace(use_mla=True, hf_text_config=text, architectures=[architecture])
        assert list(compat_config.mla_layers(model)) == layers
    assert compat_config.mla_layers(SimpleNamespace(use_mla=False)) == compat_config.mla_layers(None) == ()


INSIDE = ("0.30.0", "0.32.0+cpu", "0.33.1rc2.dev7+gabc", "v0.31.0", "0.33")
OUTSIDE = ("0.29.3", "0.34.0", "0.34.0rc1", "1.0.0", "0.1.dev1+gabc", "dev", "")


@pytest.mark.parametrize("version", [*INSIDE, *OUTSIDE])
def test_the_window_of_versions(version):
    assert release.in_window(version) == (version in INSIDE)


def test_the_installed_vllm_lacks_nothing_and_a_missing_name_is_reported(monkeypatch):
    from vllm.config import CompilationConfig

    assert release.missing_capabilities() == ()
    assert release.op_differences(fused=True) == release.op_differences(fused=False) == ()
    monkeypatch.delattr(CompilationConfig, "_attention_ops")
    assert release.missing_capabilities() == ("CompilationConfig._attention_ops",)


SCHEMA = {
    ATTENTION: "(Tensor q, Tensor kv_c_normed, Tensor k_pe, Tensor(a3!) output, str layer_name, "
    "Tensor? output_scale=None, Tensor(a6!)? output_block_scale=None, Tensor? kv_cache_dummy_dep=None, "
    "SymInt? quant_group_size=None, bool? quant_scale_ue8m0=None, bool? quant_col_major=None, "
    "bool? quant_tma_aligned=None, Tensor? q_dcp_replicated=None) -> ()",
    UPDATE: "(Tensor kv_c_normed, Tensor k_pe, str layer_name, str kv_cache_dtype, Tensor k_scale) -> Tensor",
    FUSED: "(Tensor positions, Tensor(a1!) q_pe, Tensor(a2!) k_pe, Tensor kv_c, Tensor cos_sin_cache, bool is_neox, "
    "str kv_cache_dtype, Tensor kv_cache_scale, str layer_name) -> Tensor",
}
# What a later vLLM could bring: the op, a part of its schema, its replacement, and the word that must be in the line.
OTHERS = {
    "an argument more": (ATTENTION, ") -> ()", ", Tensor? attn_sink=None) -> ()", "attn_sink"),
    "an argument more of the KV update": (UPDATE, ") -> T", ", bool skip_scale=False) -> T", "skip_scale"),
    "an argument more of the fused op": (FUSED, ") -> T", ", bool inverse=False) -> T", "inverse"),
    "an argument less": (ATTENTION, ", Tensor? q_dcp_replicated=None", "", "q_dcp_replicated"),
    "another name": (FUSED, "kv_cache_scale", "kv_scale", "kv_scale"),
    "an argument that is written now": (UPDATE, "Tensor k_pe", "Tensor(a1!) k_pe", "k_pe!"),
    "an argument that is no longer written": (FUSED, "Tensor(a2!) k_pe", "Tensor k_pe", "k_pe!"),
    "another order": (UPDATE, "Tensor kv_c_normed, Tensor k_pe", "Tensor k_pe, Tensor kv_c_normed", "order"),
}


BY_PASSES = {"compilation_config": WHOLE}
"""Only the passes need every op."""


def plant(monkeypatch, op, old="", new=""):
    """Give an op a schema like the known one, with ``old`` replaced."""
    release.op_differences(op == FUSED)  # imports the modules that define the ops
    assert old in SCHEMA[op]
    schema = torch._C.parse_schema(f"vllm::{op}{SCHEMA[op].replace(old, new)}")
    monkeypatch.setattr(torch.ops.vllm, op, SimpleNamespace(default=SimpleNamespace(_schema=schema)))


@pytest.mark.parametrize("other", OTHERS)
def test_another_argument_of_an_op_skips_the_engine_by_name(config, said, monkeypatch, other):
    op, old, new, word = OTHERS[other]
    plant(monkeypatch, op, old, new)
    # An untested vLLM may be tried; an unknown argument may not.
    asked = {"aiter_mla": UNTESTED["aiter_mla"] | {"integration": "passes"}}
    assert_skipped(said, config(additional_config=asked, **BY_PASSES), "op_schema", word)
    assert f"vllm::{op}" in said.at(logging.WARNING)[0]


@pytest.mark.parametrize("op", SCHEMA)
def test_the_known_arguments_are_accepted_and_a_missing_op_skips_the_engine(config, said, monkeypatch, op):
    plant(monkeypatch, op)
    assert release.op_differences(op == FUSED) == ()
    monkeypatch.setattr(torch.ops.vllm, op, SimpleNamespace())
    built = config(additional_config=PASSES, **BY_PASSES)
    assert_skipped(said, built, "op_schema", f"vllm::{op} cannot be found")


def test_a_module_that_cannot_be_imported_skips_the_engine(config, said, monkeypatch):
    monkeypatch.setattr(release, "ATTENTION_MODULE", "vllm.moved.elsewhere")
    assert_skipped(said, config(additional_config=ON), "op_schema", "vllm.moved")


def test_without_vllms_fused_op_which_only_the_passes_need_the_module_serves(config, said, monkeypatch):
    monkeypatch.setattr(release, "FUSED_MODULE", "vllm.moved.elsewhere")
    assert pass_of(config(additional_config=ON, **BY_PASSES)).integration == "module"


@pytest.mark.mutation("I11")
def test_mutation_a_fused_op_that_the_passes_do_not_look_for_is_caught(config, said, monkeypatch):
    monkeypatch.setattr(admission, "PASSES_RULES", admission.PASSES_RULES[1:])
    with pytest.raises(AssertionError, match="'passes' == 'module'"):
        test_without_vllms_fused_op_which_only_the_passes_need_the_module_serves(config, said, monkeypatch)


@pytest.mark.slow
def test_with_the_flag_off_no_op_is_looked_at_and_vllms_attention_is_not_imported(registered, mla_model, monkeypatch):
    monkeypatch.setattr(release, "op_differences", lambda fused: pytest.fail("asked with the flag off"))
    gate_support.vllm_config(mla_model)
    code = (
        "import sys, vllm.engine.arg_utils; from vllm.config import VllmConfig; from vllm.plugins import *;"
        f"load_general_plugins(); VllmConfig(); print('{release.ATTENTION_MODULE}' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"


PRIVATE_NAMES = (
    "vllm.utils.torch_utils:_resolve_layer_name",
    "vllm.forward_context:get_forward_context",
    "vllm.model_executor.layers.attention.attention:get_attention_context",
    "vllm.model_executor.layers.attention.kv_transfer_utils:maybe_transfer_kv_layer",
    "vllm.compilation.breakable_cudagraph:eager_break_during_capture",
    "vllm._custom_ops:rotary_embedding",
    "vllm._custom_ops:concat_and_cache_mla_rope_fused",
)


@pytest.fixture
def forgotten():
    """What an earlier test has imported is looked for again, before and after."""
    loaders = (compat_layer._vllm, custom_op.attention_hooks, compat_layer._ops)
    for load in loaders:
        load.cache_clear()
    yield
    for load in loaders:
        load.cache_clear()


@pytest.mark.parametrize("path", PRIVATE_NAMES)
def test_private_names_that_serving_calls_skip_the_engine_if_one_is_missing(config, said, monkeypatch, forgotten, path):
    config()  # vLLM inspects the model's class once; it could not while the name is missing
    module, _, name = path.partition(":")
    monkeypatch.delattr(import_module(module), name)
    assert_skipped(said, config(additional_config=ON), "capability", name)


@pytest.mark.mutation("I11")
def test_mutation_a_comparison_that_forgets_an_argument_is_caught(config, said, monkeypatch):
    op, old, new, word = OTHERS["an argument more"]
    monkeypatch.setitem(release.OP_ARGUMENTS, op, f"{release.OP_ARGUMENTS[op]} {word}")
    plant(monkeypatch, op, old, new)
    with pytest.raises(AssertionError, match="has engaged"):
        assert_skipped(said, config(additional_config=ON), "op_schema", word)
