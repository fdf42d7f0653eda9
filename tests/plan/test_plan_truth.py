"""Claims about plan's status on configs after published checkpoints: what vLLM's own functions say, asked here anew.

Here the model is not built. vLLM's ``ModelConfig`` reads the config, its quantisation config is asked for ``kv_b_proj``
under the name that the checkpoint's layers have, its own functions tell which layers have MLA.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from vllm import _aiter_ops
from vllm._aiter_ops import rocm_aiter_ops
from vllm.config import CacheConfig, CompilationConfig, DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.model_executor.layers.quantization.base_config import resolve_quant_method
from vllm.model_executor.model_loader.utils import configure_quant_config, get_model_architecture
from vllm.platforms import current_platform
from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

from tests.plan.plan_support import planned
from tests.plan.truth_configs import ROWS, Row
from vllm_aiter_mla.commands.plan import printout
from vllm_aiter_mla.compat import dry_model, offline, offline_model

ROCM = offline_model._rocm("gfx950")
WITHOUT_A_CLASS = ("bailing_hybrid", "pangu_ultra_moe", "sarvam_mla", "minicpm3")
"""Model types whose config class is code of the checkpoint."""
ON = ("VLLM_ROCM_USE_AITER_FP8BMM=1", "VLLM_ROCM_USE_AITER_FP4BMM=1")


@pytest.fixture(autouse=True)
def _environment_of_its_own() -> Iterator[None]:
    """vLLM's config sets variables of the process for some models."""
    with mock.patch.dict(os.environ):
        yield


@dataclass(frozen=True)
class Truth:
    """What vLLM says: reason codes, MLA layers by the form of their weight, and the dtype of the KV cache."""

    reasons: frozenset[str]
    forms: dict[str, int]
    cache: str


def truth(folder: Path, row: Row) -> Truth:
    """Ask vLLM; the two BMMs of the card gfx950 are on."""
    model = _model_config(folder, row)
    asked = offline.serve_options([str(folder), *row.arguments]).kv_cache_dtype
    cache = resolve_kv_cache_dtype_string(asked, model)
    if not model.use_mla:
        return Truth(frozenset({"not_mla"}), {}, cache)
    reasons = set()
    if model.quantization is not None:
        try:
            ROCM.RocmPlatform.verify_quantization(model.quantization)
        except ValueError:
            reasons.add("vllm_refuses")
    text = model.hf_text_config
    # The second is plan's word on the class that vLLM picks for a sparse model.
    reasons |= {"sparse_mla", "impl"} if getattr(text, "index_topk", None) else set()
    reasons |= {"no_rope"} if getattr(text, "mla_use_nope", False) else set()
    try:
        config = VllmConfig(
            model_config=model, cache_config=CacheConfig(enable_prefix_caching=False),
            device_config=DeviceConfig(device="cpu"), compilation_config=CompilationConfig(mode=0),
        )  # fmt: skip
    except ValueError:
        return Truth(frozenset({*reasons, "vllm_refuses"}), {}, cache)
    names = [name.format(i=i) for i in _mla_numbers(model) for name in row.names]
    with set_current_vllm_config(config), dry_model._one_rank(), torch.device("meta"):
        return Truth(frozenset(reasons), dict(Counter(_form(config, name) for name in names)), cache)


def _model_config(folder: Path, row: Row) -> Any:
    parsed = offline.serve_options([str(folder), *row.arguments])
    read_as = offline_model._as_it_stands() if row.config["model_type"] in WITHOUT_A_CLASS else "auto"
    with mock.patch.object(type(current_platform), "verify_quantization", return_value=None):
        return ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype=parsed.dtype, hf_overrides=parsed.hf_overrides,
            quantization=parsed.quantization, config_format=read_as,
        )  # fmt: skip


def _mla_numbers(model: Any) -> list[int]:
    """Numbers of the layers with MLA, by the function that vLLM's model class of a hybrid calls."""
    text, numbers = model.hf_text_config, list(range(model.get_total_num_hidden_layers()))
    if text.model_type == "kimi_linear":
        return [i for i in numbers if not text.is_kda_layer(i)]
    if text.model_type == "bailing_hybrid":
        from vllm.model_executor.models.bailing_moe_linear import is_linear_layer

        return [i for i in numbers if not is_linear_layer(i, text.layer_group_size)]
    return numbers


def _form(config: Any, name: str) -> str:
    """Form of the absorbed weight of one layer: the questions of ``MLAAttention``, put to what it puts them to."""
    quant, model_class = config.quant_config, get_model_architecture(config.model_config)[0]
    dtype = config.model_config.dtype
    if quant is not None:
        if not getattr(quant, "asked_before", False):
            configure_quant_config(quant, model_class)
            mapper = getattr(model_class, "hf_to_vllm_mapper", None)
            if mapper is not None:
                quant.apply_vllm_mapper(mapper)
            quant.asked_before = True
        dtype = _weight_dtype(quant, name, dtype)
    flags = {"_AITER_ENABLED": True, "_FP8BMM_ENABLED": True, "_FP4BMM_ENABLED": True}
    with (
        mock.patch.multiple(rocm_aiter_ops, **flags),
        mock.patch.object(_aiter_ops, "is_aiter_found_and_supported", return_value=True),
        mock.patch.object(ROCM, "get_cdna_version", return_value=4),
    ):
        if rocm_aiter_ops.is_fp4bmm_enabled() and dtype is torch.bfloat16:
            return "mxfp4"
        return "fp8" if rocm_aiter_ops.is_fp8bmm_enabled() else "plain"


def _weight_dtype(quant: Any, name: str, dtype: torch.dtype) -> torch.dtype | None:
    """Dtype of the weight that vLLM's method for this layer makes; None where it makes none of that name."""
    layer = ColumnParallelLinear.__new__(ColumnParallelLinear)
    torch.nn.Module.__init__(layer)
    layer.prefix, layer.quant_config, layer.has_bias = name, quant, False
    method = resolve_quant_method(quant, layer, prefix=name)
    try:
        method.create_weights(layer, 512, [4096], 512, 4096, dtype, weight_loader=lambda *_: None)
    except ValueError as error:
        # Of this machine, not of the checkpoint; the weight is there.
        if "Failed to find a kernel" not in str(error):
            raise
    weight = getattr(layer, "weight", None)
    return None if weight is None else weight.dtype


# vLLM takes seconds for each: a few of them in `make test`, the others beside the engines.
NAMES = [name if at % 5 == 0 else pytest.param(name, marks=pytest.mark.slow) for at, name in enumerate(ROWS)]


@pytest.mark.parametrize("name", NAMES)
def test_plan_prints_what_vllm_says(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    for file, content in row.written().items():
        (tmp_path / file).write_text(json.dumps(content))
    plan = planned(str(tmp_path), "-tp", "4", *row.arguments, arch="gfx950", env=ON)
    page, true = printout.text(plan), truth(tmp_path, row)
    total = sum(true.forms.values())
    codes = {reason["code"] for reason in plan["reasons"]}
    # AITER's GEMMs do not take every width: that is the plugin's own word, and its tests are elsewhere.
    shape = codes & {"kernel_shape"}
    assert codes - shape == true.reasons
    assert f"Status line: {0 if codes else total}/{total} MLA layers would engage" in page
    for form, count in true.forms.items():
        assert f"W_UK, W_UV   {printout.WEIGHTS[form]}" in page
        assert plan["absorb_weights"][form] == count
    assert set(plan["absorb_weights"]) == set(true.forms)
    assert f"KV cache     {true.cache}, activations {str(_model_config(tmp_path, row).dtype)[6:]}" in page


def test_the_table_has_more_than_forty_checkpoints() -> None:
    assert len(ROWS) >= 40


@pytest.mark.mutation
def test_a_plan_that_does_not_ask_the_quantisation_config_is_caught(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(dry_model, "_method", lambda projection: type(projection.quant_method).__name__)
    with pytest.raises(AssertionError):
        test_plan_prints_what_vllm_says("amd/DeepSeek-R1-MXFP4-Preview", tmp_path)
