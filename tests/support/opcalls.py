"""Arguments for the three ops, and the checks that the claims and their mutations share."""

from collections.abc import Callable
from typing import Any

import torch
import vllm._custom_ops  # noqa: F401  loads vLLM's own library before the sandbox fills its gaps
from vllm.config import CUDAGraphMode
from vllm.utils.torch_utils import _encode_layer_name

from tests.passes.stubs import BLOCKS, Batch, Sizes, StubLayer, forward
from tests.sandbox import gpu_ops
from vllm_aiter_mla import plugin
from vllm_aiter_mla.compat.layer import ROTARY_KERNEL
from vllm_aiter_mla.kernels.device import card
from vllm_aiter_mla.kernels.formats import is_fp8
from vllm_aiter_mla.serving import ops

plugin.register()
ops.register()
gpu_ops.register()
NAME = "model.layers.0.attn"
SIZES = Sizes()
Q_PREP, ATTENTION = "mla_decode_q_prep", ("mla_attention_with_prepared_q", "mla_attention_with_rope")
OPS: dict[str, Any] = {name: getattr(torch.ops.vllm_aiter_mla, name).default for name in (Q_PREP, *ATTENTION)}
FAKES: dict[str, Callable[..., Any]] = {Q_PREP: ops.mla_decode_q_prep_fake} | dict.fromkeys(ATTENTION, ops._no_result)


def batch_of(rows: int, **changes: Any) -> Batch:
    return Batch("drawn", **{"rows": rows, "decodes": rows} | changes)


def layer_of(cache: str = "auto", dtype: torch.dtype = torch.bfloat16, blocks: int = BLOCKS) -> StubLayer:
    return StubLayer(NAME, SIZES, dtype, cache, blocks)


def arguments(op: str, layer: StubLayer, rows: int) -> tuple[Any, ...]:
    """Real arguments; q and k_pe are strided views of wider buffers, as they are behind GEMMs."""
    z, act = SIZES, layer.act
    generator = torch.Generator().manual_seed(rows)
    out_dtype = torch.float8_e4m3fn if layer.kv_cache_dtype == "fp8" else act

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(act)

    q = rand(rows, z.n * (z.p + z.r) + 8)[:, : z.n * (z.p + z.r)].view(rows, z.n, z.p + z.r)
    kv = rand(rows, z.latent + z.r)
    kv_c, k_pe = kv[:, : z.latent], kv[:, z.latent :]
    if rows == 0:
        kv_c, k_pe = kv_c.contiguous(), k_pe.contiguous()  # opcheck cannot copy a strided view of nothing
    positions, table = torch.arange(rows) % 7, rand(9, z.r)
    name = _encode_layer_name(NAME)
    if op == "mla_decode_q_prep":
        return q, z.latent, z.r, out_dtype, name
    output = rand(rows, z.n * z.v)
    if op == "mla_attention_with_rope":
        return q, k_pe, kv_c, positions, table, layer._k_scale, output, True, ROTARY_KERNEL, name
    prepared = rand(rows, z.n, z.latent + z.r).to(out_dtype)
    return q, kv_c, k_pe.unsqueeze(1), prepared, output, name, None


# What must not be captured, by a word of the error: the batch, and vLLM's graph mode.
NOT_CAPTURED = {
    "slot mapping": (batch_of(3, profiling=True), CUDAGraphMode.FULL),
    "prefill": (Batch("mixed", rows=3, decodes=2, prefills=1), CUDAGraphMode.FULL),
    "splitting_ops": (batch_of(3), CUDAGraphMode.PIECEWISE),
}


def assert_raises_while_capturing(what: str, op: str, layer: StubLayer) -> None:
    """I2: a replay would lack the KV write, or send every later batch through the branch of the captured one."""
    batch, mode = NOT_CAPTURED[what]
    args, error = arguments(op, layer, 3), ""
    with forward([layer], batch, mode):
        try:
            OPS[op](*args)
        except RuntimeError as raised:
            error = str(raised)
    assert what in error, f"captured: {what}"


class Opaque:
    """A layer name that does not let itself be looked at."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"the fake looked at {name} of the layer's name")

    def __eq__(self, other: object) -> bool:
        raise AssertionError("the fake compared the layer's name")

    __hash__ = None  # type: ignore[assignment]


def assert_fake_is_blind(fake: Callable[..., Any], op: str, cache: str = "auto") -> None:
    """I7: a fake answers from tensors and scalars alone, outside any forward context."""
    layer = layer_of(cache)
    args = arguments(op, layer, 3)
    at = next(i for i, arg in enumerate(OPS[op]._schema.arguments) if arg.name == "layer_name")
    meta = [arg.to("meta") if isinstance(arg, torch.Tensor) else arg for arg in args]
    blind = fake(*meta[:at], Opaque(), *meta[at + 1 :])
    if op not in ATTENTION:
        assert tuple(blind.shape) == (3, SIZES.n, SIZES.latent + SIZES.r)
        assert is_fp8(blind.dtype) == (cache == "fp8")
    else:
        assert blind is None


def capturing(monkeypatch: Any, yes: bool = True) -> None:
    monkeypatch.setattr(card(), "is_capturing", lambda: yes)
