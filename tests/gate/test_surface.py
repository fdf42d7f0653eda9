"""Claims about the schemas of vLLM's MLA ops: another one declines the engine, before any graph, by the argument."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.gate import gate_support as support
from tests.gate.gate_support import ON, Lines
from tests.gate.test_gate import Build, pass_of
from tests.gate.test_gate_declines import declines
from vllm_aiter_mla.compat import surface
from vllm_aiter_mla.passes.pipeline import AiterMLAPipeline

ATTENTION, UPDATE, FUSED = surface.ATTENTION, surface.KV_UPDATE, surface.FUSED
# What a later vLLM could bring: the op, a part of its schema, what stands there instead, and what the user reads.
OTHERS = {
    "an argument more": (ATTENTION, ") -> ()", ", Tensor? attn_sink=None) -> ()", "attn_sink"),
    "an argument more of the KV update": (UPDATE, ") -> T", ", bool skip_scale=False) -> T", "skip_scale"),
    "an argument more of the fused op": (FUSED, ") -> T", ", bool inverse=False) -> T", "inverse"),
    "an argument less": (ATTENTION, ", Tensor? q_dcp_replicated=None", "", "q_dcp_replicated"),
    "another type": (ATTENTION, "SymInt? quant_group_size", "float? quant_group_size", "quant_group_size"),
    "another default": (ATTENTION, "bool? quant_col_major=None", "bool? quant_col_major=True", "quant_col_major"),
    "an argument that is written now": (UPDATE, "Tensor k_pe", "Tensor(a1!) k_pe", "k_pe"),
    "another order": (UPDATE, "Tensor kv_c_normed, Tensor k_pe", "Tensor k_pe, Tensor kv_c_normed", "k_pe"),
    "another result": (UPDATE, "-> Tensor", "-> (Tensor, Tensor)", "returns"),
}


def plant(monkeypatch: pytest.MonkeyPatch, other: str) -> str:
    """Give an op another schema, as torch would print it; returns the words that must name it."""
    surface.op_differences()  # imports the modules that define the ops
    op, old, new, word = OTHERS[other]
    text = f"vllm::{op}{surface.SCHEMAS[op]}".replace("LayerName", "PyObject")
    assert old in text
    changed = SimpleNamespace(default=SimpleNamespace(_schema=text.replace(old, new)))
    monkeypatch.setattr(torch.ops.vllm, op, changed)
    return word


def assert_declined_by_name(config: Build, lines: Lines, monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    word = plant(monkeypatch, other)
    built = config(additional_config=ON)
    declines(lines, built, "op_schema", word)
    assert f"vllm::{OTHERS[other][0]}" in lines.at(logging.WARNING)[0]


@pytest.mark.parametrize("other", OTHERS)
def test_unknown_argument_of_an_op_declines_the_engine_by_name(
    config: Build, lines: Lines, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    assert_declined_by_name(config, lines, monkeypatch, other)


def test_unknown_argument_is_not_forced_by_trying_an_untested_vllm(
    config: Build, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, "an argument more")
    forced = {"aiter_mla": {"enabled": True, "debug": {"untested_vllm": True}}}
    declines(lines, config(additional_config=forced), "op_schema", "attn_sink")


@pytest.mark.parametrize("op", surface.SCHEMAS)
def test_an_op_that_is_not_there_declines_the_engine(
    config: Build, lines: Lines, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    surface.op_differences()
    monkeypatch.setattr(torch.ops.vllm, op, SimpleNamespace())
    declines(lines, config(additional_config=ON), "op_schema", f"vllm::{op} cannot be found")


def test_a_module_that_cannot_be_imported_declines_the_engine(
    config: Build, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surface, "FUSED_MODULE", "vllm.moved.elsewhere")
    declines(lines, config(additional_config=ON), "op_schema", "vllm.moved")


def test_the_installed_ops_are_those_that_are_known(config: Build) -> None:
    assert surface.op_differences() == ()
    assert isinstance(pass_of(config(additional_config=ON)), AiterMLAPipeline)


def test_layer_names_may_be_objects_or_strings() -> None:
    """VLLM_USE_LAYERNAME=0 makes them strings."""
    for spelled in ("PyObject", "str"):
        found = surface.plain(f"vllm::{UPDATE}{surface.SCHEMAS[UPDATE]}".replace("LayerName", spelled))
        assert surface.differences(surface.SCHEMAS[UPDATE], found) == []


def test_with_the_flag_off_no_op_is_looked_at(
    registered: None, mla_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surface, "op_differences", lambda: pytest.fail("asked with the flag off"))
    support.vllm_config(mla_model)


def test_with_the_flag_off_vllms_attention_is_not_imported() -> None:
    code = (
        "import sys, vllm.engine.arg_utils; from vllm.config import VllmConfig; from vllm.plugins import *;"
        f"load_general_plugins(); VllmConfig(); print('{surface.ATTENTION_MODULE}' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"


@pytest.mark.mutation("I11")
@pytest.mark.parametrize("other", ["an argument more", "another type"])
def test_mutation_unknown_argument_of_an_op_is_dropped_from_the_comparison(
    config: Build, lines: Lines, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    word, parsed = OTHERS[other][3], surface._parsed

    def forgetful(schema: str) -> Any:
        arguments, returns = parsed(schema)
        return {name: text for name, text in arguments.items() if name != word}, returns

    monkeypatch.setattr(surface, "_parsed", forgetful)
    with pytest.raises(AssertionError):
        assert_declined_by_name(config, lines, monkeypatch, other)
