"""The three ops: what they return, what their fakes look at, and when they refuse to run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from passes.stubs import BATCHES, Batch, forward
from torch.testing._internal.optests import generate_tests
from vllm.config import CUDAGraphMode
from vllm.platforms import current_platform

from ops import opcalls
from ops.opcalls import FAKES, FUNCTIONAL, OPS, SIZES, arguments, batch_of, layer_of
from vllm_aiter_mla.compat import context
from vllm_aiter_mla.compat import kernels as vllm_kernels
from vllm_aiter_mla.kernels.absorb import PlainWeight
from vllm_aiter_mla.kernels.inputs import DecodeInputs
from vllm_aiter_mla.kernels.reference import store_nope
from vllm_aiter_mla.kernels.stock import StockBackend

each_op = pytest.mark.parametrize("op", OPS)
each_cache = pytest.mark.parametrize("cache", ["auto", "fp8"])


@each_op
@each_cache
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_opcheck_passes(monkeypatch: pytest.MonkeyPatch, op: str, cache: str, rows: int) -> None:
    if rows == 0:  # torch 2.13's own copy of an empty vector asks for a negative size
        monkeypatch.setattr(generate_tests, "clone_input", torch.clone)
    layer = layer_of(cache)
    with forward([layer], batch_of(rows)):
        utils = ("test_schema", "test_faketensor") if rows else ("test_faketensor",)
        args = arguments(op, layer, rows)
        if cache == "fp8":
            # opcheck compares with allclose, which CPU builds do not implement for fp8: the fake alone is checked.
            utils = ("test_faketensor",)
        torch.library.opcheck(OPS[op], args, test_utils=utils)


@pytest.mark.parametrize("op", FUNCTIONAL)
@each_cache
@pytest.mark.parametrize("rows", [0, 1, 2, 7])
def test_i1_real_result_has_the_declared_shape_dtype_and_strides(op: str, cache: str, rows: int) -> None:
    opcalls.assert_real_matches_fake(op, layer_of(cache), batch_of(rows))


@pytest.mark.parametrize("op", FUNCTIONAL)
@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: batch.name)
def test_i1_padded_rows_and_every_kind_of_batch_are_declared_alike(op: str, batch: Batch) -> None:
    opcalls.assert_real_matches_fake(op, layer_of(), batch)


def test_i1_fewer_slots_than_rows_still_prepare_every_row() -> None:
    layer = layer_of()
    batch = batch_of(6, decodes=4, slots=4)
    opcalls.assert_real_matches_fake("fused_qk_rope_kv_cache_q_prep", layer, batch)
    changed = (layer.kv_cache != layer.initial).any(-1).sum()
    assert changed == 4


def test_fused_op_mutates_no_argument() -> None:
    layer = layer_of()
    args = arguments("fused_qk_rope_kv_cache_q_prep", layer, 4)
    before = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    with forward([layer], batch_of(4)):
        OPS["fused_qk_rope_kv_cache_q_prep"](*args)
    for a, b in zip(args, before, strict=True):
        assert not isinstance(a, torch.Tensor) or torch.equal(a, b)


def test_fused_op_looks_at_no_metadata() -> None:
    """The same rows and the same cache whether the batch is said to hold decodes or prefills."""
    layer, seen = layer_of(), []
    for batch in (batch_of(4), batch_of(4, decodes=0, prefills=4)):
        with forward([layer], batch):
            result = OPS["fused_qk_rope_kv_cache_q_prep"](*arguments("fused_qk_rope_kv_cache_q_prep", layer, 4))
            seen.append((result, layer.kv_cache.clone()))
    assert torch.equal(seen[0][0], seen[1][0])
    assert torch.equal(seen[0][1], seen[1][1])


def test_i2_fused_op_raises_when_captured_without_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    opcalls.capturing(monkeypatch)
    opcalls.assert_raises_while_capturing_without_slots(layer_of())


def test_i2_fused_op_raises_when_captured_before_the_cache_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    opcalls.capturing(monkeypatch)
    layer = layer_of()
    with forward([layer], batch_of(3)):
        layer.kv_cache = torch.empty(0)
        with pytest.raises(RuntimeError, match="without a KV cache"):
            OPS["fused_qk_rope_kv_cache_q_prep"](*arguments("fused_qk_rope_kv_cache_q_prep", layer, 3))


def test_i2_fused_op_is_captured_with_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    opcalls.capturing(monkeypatch)
    opcalls.assert_real_matches_fake("fused_qk_rope_kv_cache_q_prep", layer_of(), batch_of(3))


def test_attention_refuses_a_piecewise_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    opcalls.capturing(monkeypatch)
    opcalls.assert_refuses_a_piecewise_capture(layer_of())


@pytest.mark.parametrize(
    ("capturing", "mode"),
    [(True, CUDAGraphMode.FULL), (False, CUDAGraphMode.PIECEWISE), (False, CUDAGraphMode.NONE)],
)
def test_attention_runs_in_full_captures_and_beside_piecewise_graphs(
    monkeypatch: pytest.MonkeyPatch, capturing: bool, mode: Any
) -> None:
    opcalls.capturing(monkeypatch, capturing)
    layer = layer_of()
    args = arguments("mla_attention_with_prepared_q", layer, 3)
    with forward([layer], batch_of(3), mode):
        before = args[4].clone()
        OPS["mla_attention_with_prepared_q"](*args)
    assert not torch.equal(args[4], before)


@each_op
@each_cache
def test_i7_fake_looks_at_tensors_and_scalars_only(op: str, cache: str) -> None:
    opcalls.assert_fake_is_blind(FAKES[op], op, cache)


@each_op
def test_i7_registered_fake_runs_outside_any_forward_context(op: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    args = arguments(op, layer_of(), 3)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        result = OPS[op](*fake)
    assert result is None or tuple(result.shape[:2]) == tuple(args[0].shape[:2])


@pytest.mark.parametrize("flavour", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_uint8_storage_is_viewed_as_the_cards_flavour_without_a_copy(
    flavour: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AITER ends the process on uint8: "kv cache data type is not supported"."""
    monkeypatch.setattr(type(current_platform), "fp8_dtype", classmethod(lambda cls: flavour))
    raw = torch.zeros(2, 16, 576, dtype=torch.uint8)
    view = context.fp8_view(raw)
    assert (view.dtype, view.shape, view.data_ptr()) == (flavour, raw.shape, raw.data_ptr())
    other = torch.zeros(2, 16, 576)
    assert context.fp8_view(other) is other


class VLLMsKernels:
    """What vLLM's kernels do, by the reference's parts; a CPU build has none of them."""

    def __init__(self, out_dtype: torch.dtype) -> None:
        self.out_dtype, self.given = out_dtype, []

    def rope_and_write(self, positions: Any, q_pe: Any, k_pe: Any, kv_c: Any, *rest: Any) -> None:
        self.given += [q_pe, k_pe]
        q_pe.neg_()
        k_pe.neg_()

    def concat_quantise_fp8(self, absorbed: torch.Tensor, q_pe: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return store_nope(torch.cat([absorbed, q_pe], -1), 1 / scale, self.out_dtype)


@pytest.mark.parametrize("tokens", [0, 3])
def test_stock_rotates_in_place_and_copies_nothing_before_its_last_kernel(tokens: int) -> None:
    layer = layer_of("fp8")
    q, k_pe, kv_c, positions, table, k_scale, is_neox, out_dtype, _ = arguments(
        "fused_qk_rope_kv_cache_q_prep", layer, tokens
    )
    given = DecodeInputs(
        q, k_pe, kv_c, PlainWeight(layer.W_UK_T), context.fp8_view(layer.kv_cache), torch.arange(tokens), positions,
        table, k_scale, layer._q_scale, is_neox, out_dtype,
    )  # fmt: skip
    vllms, before = VLLMsKernels(out_dtype), q.clone()
    backend = StockBackend(vllms)
    assert backend.refuse(given) is None
    query = backend.prepare(given)
    assert (query.shape, query.dtype) == ((tokens, SIZES.n, SIZES.latent + SIZES.r), out_dtype)
    assert [one.data_ptr() for one in vllms.given] == [q[..., SIZES.p :].data_ptr(), k_pe.data_ptr()][
        : 2 * bool(tokens)
    ]
    assert torch.equal(q[..., SIZES.p :], -before[..., SIZES.p :])
    assert torch.equal(q[..., : SIZES.p], before[..., : SIZES.p])


def test_the_last_kernel_of_stock_is_the_one_that_vllms_layers_call() -> None:
    from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config

    absorbed, q_pe, scale = torch.randn(3, 2, 32).bfloat16(), torch.randn(3, 2, 16).bfloat16(), torch.tensor(0.5)
    with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.NONE))):
        query = vllm_kernels.concat_quantise_fp8(absorbed, q_pe, scale)
    expected = store_nope(torch.cat([absorbed, q_pe], -1), 1 / scale, torch.float8_e4m3fn)
    assert torch.equal(query.view(torch.uint8), expected.view(torch.uint8))
