"""Claims about an engine that the gate declines: one line, the knob's name, the status file, an untouched config."""

from __future__ import annotations

import copy
import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from vllm.config import VllmConfig

from tests.gate import gate_support as support
from tests.gate.gate_support import ON, Lines
from tests.gate.test_gate import Build, pass_of
from vllm_aiter_mla import gate
from vllm_aiter_mla.admission import ATTENTION_OPS, KV_UPDATE_OP, MLA_ATTENTION_OP
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import patches
from vllm_aiter_mla.passes.pipeline import AiterMLAPipeline
from vllm_aiter_mla.status import gauge

PASSES = {"aiter_mla": {"enabled": True, "integration": "passes"}}


def declines(lines: Lines, built: Any, code: str, knob: str) -> None:
    assert pass_of(built) is None
    assert not set(ATTENTION_OPS) & set(built.compilation_config.splitting_ops or ())
    said = lines.at(logging.WARNING)
    assert len(said) == 1
    assert code in said[0]
    assert knob in said[0]
    assert "\n" not in said[0]


@pytest.mark.parametrize(
    ("options", "code", "knob"),
    [
        ({"enforce_eager": True}, "enforce_eager", "enforce_eager"),
        ({"optimization_level": 0}, "compilation_mode", "compilation_config.mode"),
        ({"compilation_config": {"mode": 2}}, "compilation_mode", "DYNAMO_TRACE_ONCE"),
        (
            {"compilation_config": {"use_inductor_graph_partition": False}},
            "graph_partition",
            "use_inductor_graph_partition=False",
        ),
        ({"compilation_config": {"splitting_ops": [MLA_ATTENTION_OP]}}, "splitting_ops", MLA_ATTENTION_OP),
        ({"compilation_config": {"splitting_ops": [KV_UPDATE_OP]}}, "splitting_ops", KV_UPDATE_OP),
    ],
)
def test_an_explicit_contradiction_declines_in_one_line_that_names_the_knob(
    config: Build, lines: Lines, options: dict[str, Any], code: str, knob: str
) -> None:
    declines(lines, config(additional_config=PASSES, **options), code, knob)


def test_an_explicit_value_of_the_partition_is_never_overridden(config: Build, lines: Lines) -> None:
    built = config(additional_config=ON, compilation_config={"use_inductor_graph_partition": False})
    assert built.compilation_config.use_inductor_graph_partition is False


def test_the_default_cpu_platform_declines_because_of_its_mode(registered: None, mla_model: Path, lines: Lines) -> None:
    declines(lines, support.vllm_config(mla_model, additional_config=PASSES), "compilation_mode", "DYNAMO_TRACE_ONCE")


def test_a_declined_config_is_in_the_status_file_and_in_the_gauge(
    registered: None, mla_model: Path, lines: Lines, cache_root: Path, monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(gauge.FOLDER, str(tmp_path))
    support.vllm_config(mla_model, additional_config=PASSES)
    record = json.loads((cache_root / "aiter_mla" / f"status-{os.getpid()}-0.json").read_text())
    layers = support.DEEPSEEK_V2["num_hidden_layers"]
    assert (record["total"], record["engaged"]) == (layers, {})
    assert {code for code, _ in record["skipped"].values()} == {"compilation_mode"}
    assert gauge.layers_of("0") == {"engaged": 0, "skipped": layers}
    assert lines.at(logging.WARNING)[0].endswith("(run: vllm-aiter-mla doctor)")


def test_the_status_of_a_declined_hybrid_counts_its_mla_layers_alone() -> None:
    text = SimpleNamespace(num_hidden_layers=93, linear_attn_config={"full_attn_layers": [4, 8, 12, 96]})
    model = SimpleNamespace(use_mla=True, hf_text_config=text)
    assert compat_config.mla_layers(model) == (3, 7, 11)
    assert compat_config.mla_layers(SimpleNamespace(use_mla=False)) == compat_config.mla_layers(None) == ()


def test_a_skip_that_cannot_be_recorded_costs_a_warning_and_no_engine(
    registered: None, mla_model: Path, lines: Lines, monkeypatch
) -> None:
    def fails(*arguments: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(gate, "write_status", fails)
    built = support.vllm_config(mla_model, additional_config=PASSES)
    assert pass_of(built) is None
    said = lines.at(logging.WARNING)
    assert "compilation_mode" in said[0]
    assert said[1] == "aiter-mla: the status file could not be written: RuntimeError: planted"


def test_a_model_without_mla_declines(compiling: None, dense_model: Any, lines: Lines) -> None:
    declines(lines, VllmConfig(model_config=dense_model, additional_config=ON), "not_mla", "model")


@pytest.mark.parametrize(
    ("holder", "field", "value", "code", "named"),
    [
        ("parallel_config", "decode_context_parallel_size", 2, "dcp", "decode_context_parallel_size is 2"),
        ("parallel_config", "prefill_context_parallel_size", 2, "pcp", "prefill_context_parallel_size is 2"),
        ("cache_config", "cache_dtype", "fp8_e5m2", "kv_cache_dtype", "fp8_e5m2"),
        ("cache_config", "cache_dtype", "fp8_ds_mla", "kv_cache_dtype", "fp8_ds_mla"),
        ("attention_config", "hisparse_config", object(), "hisparse", "attention_config.hisparse_config"),
    ],
)
def test_what_a_cpu_config_cannot_be_built_with_declines_too(
    config: Build, lines: Lines, holder: str, field: str, value: Any, code: str, named: str
) -> None:
    built = config()
    built.additional_config = ON
    setattr(getattr(built, holder), field, value)
    skip = gate.apply(built).skip
    assert skip is not None
    assert skip.code == code
    declines(lines, built, code, named)


def test_a_sparse_model_declines(config: Build, lines: Lines) -> None:
    built = config()
    built.additional_config = ON
    built.model_config = copy.copy(built.model_config)
    built.model_config.hf_text_config = copy.copy(built.model_config.hf_text_config)
    built.model_config.hf_text_config.index_topk = 2048
    gate.apply(built)
    declines(lines, built, "sparse_mla", "index_topk")


def test_a_vllm_outside_the_window_declines_unless_forced(
    config: Build, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat_config, "vllm_version", lambda: "0.34.0rc1")
    declines(lines, config(additional_config=ON), "vllm_version", "0.34.0rc1")
    forced = {"aiter_mla": {"enabled": True, "debug": {"untested_vllm": True}}}
    assert isinstance(pass_of(config(additional_config=forced)), AiterMLAPipeline)


def test_a_failed_registration_step_declines(config: Build, lines: Lines) -> None:
    patches.run("torch ops", lambda: (_ for _ in ()).throw(OSError("no such library")))
    declines(lines, config(additional_config=ON), "capability", "the plugin could not do what it needs: torch ops: ")


def test_an_optional_patch_that_failed_does_not_decline(config: Build) -> None:
    patches.run("patch pass_config", lambda: (_ for _ in ()).throw(OSError("changed")), required=False)
    assert isinstance(pass_of(config(additional_config=ON)), AiterMLAPipeline)


def test_strict_mode_makes_a_decline_an_error_that_names_the_knob(config: Build) -> None:
    with pytest.raises(ValidationError, match=r"enforce_eager.*strict"):
        config(additional_config={"aiter_mla": PASSES["aiter_mla"] | {"strict": True}}, enforce_eager=True)
