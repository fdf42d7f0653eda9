"""A process with TRITON_INTERPRET=1: reads one JSON request per line, answers one JSON line each.

It exists because a process that interprets kernels cannot compile them, and the other way round. Requests name an
operation below and its arguments.
"""

import importlib
import json
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl

from tests.kernels.triton.triton_mutations import MUTATIONS
from tests.sandbox import interpreter
from tests.support import triton_cases as cases
from tests.support.aiter_results import LATENT, fp4_call, fp8_call, fused_call
from vllm_aiter_mla.commands.check.timing import stand_in
from vllm_aiter_mla.kernels import formats, reference
from vllm_aiter_mla.kernels.distance import difference
from vllm_aiter_mla.kernels.inputs import LayerShape
from vllm_aiter_mla.kernels.triton import kernel, launcher
from vllm_aiter_mla.kernels.triton.backend import TritonBackend
from vllm_aiter_mla.kernels.triton.tiles import TABLE
from vllm_aiter_mla.startup.comparison import compare_with_reference

BACKEND = TritonBackend()
HEADS = 32  # of the layer that the start-up check is tried on
_LAUNCH = launcher.Launch
_FOLDER = tempfile.TemporaryDirectory()
sys.path.append(_FOLDER.name)


def main() -> None:
    interpreter.install()
    torch.set_num_threads(1)
    operations = {operation.__name__: operation for operation in OPERATIONS}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = operations[request.pop("op")](**request)
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


def compare(case: dict[str, Any], mutation: str | None = None) -> dict[str, Any]:
    """The kernel, or a mutant of it, against the reference on one case."""
    inputs, storage = cases.build(cases.Case(**case))
    with planted(mutation):
        return cases.compare(inputs, storage, BACKEND.prepare)


def compare_tile(arch: str, index: int, weight: str, mutation: str | None = None) -> dict[str, Any]:
    """One tile of an architecture's table, forced on a call that crosses its token blocks."""
    tile = list(dict.fromkeys(entry.tile for entry in TABLE[arch]))[index]
    inputs, storage = cases.build(cases.Case(tokens=tile.block_t + 3, heads=1, weight=weight))
    with planted(mutation):
        return cases.compare(inputs, storage, lambda given: launcher.Launch(given, tile)(given))


def odd_rows(cache: str = "bfloat16", weight: str = "float8_e4m3fn", mutation: str | None = None) -> dict[str, Any]:
    """Rows of zeros, of numbers below the floor of fp8 weights, and with a NaN or an infinity among ordinary ones.

    NaN in kv_c: the lowest fp8 value as in the reference, and the very bits in a bf16 cache. In what is rotated: NaN.
    """
    inputs, storage = cases.build(cases.Case(weight=weight, w_major="P", cache=cache))
    inputs.q[0] = 0.0
    inputs.q[1] *= 1e-13
    inputs.q[2, :, 5] = float("nan")
    inputs.q[3, 0, 6] = float("inf") if weight == "plain" else 1.0
    inputs.q[3, :, 130] = inputs.k_pe[3, 2] = float("nan")
    inputs.kv_c.view(torch.int16)[0, :4] = torch.tensor([0x7FC1, -1, 0x7F81, 0x7F80], dtype=torch.int16)
    with planted(mutation):
        return cases.compare(inputs, storage, BACKEND.prepare)


@triton.jit
def _store_sums(x_ptr, scale_ptr, out_ptr, SIZE: tl.constexpr, LIMIT: tl.constexpr):  # noqa: N803
    at, scale = tl.arange(0, SIZE), tl.load(scale_ptr)
    inverse, limit = kernel._inverse_and_limit(scale, True, tl.bfloat16, tl.float8e4b8, LIMIT)
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, kernel._absorbed_form(x, scale, inverse, limit, tl.bfloat16, tl.float8e4b8, LIMIT))


def stored_sums(scale: float, clamped: bool = True) -> dict[str, Any]:
    """Sums on gfx942, of every upper half of float32: how many are stored as others than by a rounding and a clamp,
    and how many as NaN.
    """
    upper, dtype = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16, torch.float8_e4m3fnuz
    held, limit, different, nans = torch.tensor([scale]), torch.finfo(torch.float8_e4m3fnuz).max, 0, 0
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        x, out = (upper | lower).view(torch.float32), torch.empty(1 << 16, dtype=dtype)
        with nullcontext() if clamped else mock.patch.object(tl, "clamp", lambda x, *bounds: x):
            _store_sums[(1,)](x, held, out, x.numel(), limit)
        rounded = (x.to(torch.bfloat16).float() * (1 / held)).nan_to_num(-limit).clamp(-limit, limit)
        different += int((out.view(torch.uint8) != rounded.to(dtype).view(torch.uint8)).sum())
        nans += int(out.float().isnan().sum())
    return {"different": different, "nans": nans}


def odd_groups() -> dict[str, Any]:
    """mxfp4 weights under rows of zeros, of the smallest and the largest numbers, and of ties alone."""
    inputs, storage = cases.build(cases.Case(weight="mxfp4", cache="bfloat16", latent=64, tokens=16))
    draw, q = torch.Generator().manual_seed(3), inputs.q
    steps = torch.randint(-28, 29, (16, 2, 128), generator=draw) * 0.25  # on the values, and halfway between them
    q[..., :128] = steps * 2.0 ** torch.randint(-140, 100, (16, 2, 1), generator=draw)
    q[0, :, :128], q[1, :, :32], q[2, :, 0] = 0.0, -0.0, 1.7 * 2.0**127
    q[3, :, :128] = torch.finfo(torch.bfloat16).smallest_normal / 64
    found = cases.compare(inputs, storage, BACKEND.prepare)
    names = ("wrong_rope", "nope_steps", "nope_different")
    return {name: found[name] for name in names} | {"distinct": bool(q[..., :128].unique().numel() > 500)}


def self_checked(arch, limit, weight, bad=None, mutation=None, cache="bfloat16"):
    """The start-up check on a small layer as on a card of ``arch``: its status, and the T of every call it compared.

    ``bad``: label of a tile that writes one value of the query wrong.
    """
    launched = []

    def bound(inputs: Any, tile: Any) -> Any:
        run = _LAUNCH(inputs, tile)

        def launch(inputs: Any) -> torch.Tensor:
            launched.append((inputs.num_tokens, tile.label))
            out = run(inputs)
            if tile.label == bad:
                out[-1, 0, 0] = -out[-1, 0, 0] - 8
            return out

        return launch

    key = (weight,) if weight in ("plain", "mxfp4") else ("fp8", getattr(torch, weight))
    stored = getattr(torch, cache)
    shape = LayerShape(HEADS, 128, stored, stored, 1, False, latent=64, rope=16, weight=key)
    launcher.Launch = bound
    try:
        with planted(mutation), mock.patch.object(type(BACKEND), "arch", arch):
            found = compare_with_reference(BACKEND, shape, limit)
    finally:
        launcher.Launch = _LAUNCH
    figures = {"ok": found.has_passed, "message": found.message, "writes_nan": found.writes_nan}
    return figures | {"launched": launched[1:]}


def aiter_vector(index: int) -> dict[str, Any]:
    """The kernel, over an identity for W_UK, against what AITER's own fused op left: bytes that differ, by part."""
    call = fused_call(index)
    query, cache = BACKEND.prepare(call.inputs)[call.rows], call.inputs.kv_cache
    pairs = {
        "q nope": (query[..., :LATENT], call.query[call.rows][..., :LATENT]),
        "q rope": (query[..., LATENT:], call.query[call.rows][..., LATENT:]),
        "kv nope": (cache[..., :LATENT], call.cache[..., :LATENT]),
        "kv rope": (cache[..., LATENT:], call.cache[..., LATENT:]),
    }
    return {name: cases.wrong_values(*_saturated(*pair)) for name, pair in pairs.items()}


def _saturated(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both; where an overflow is NaN in AITER's and the largest value in ours, ours in both."""
    if not formats.is_fp8(ours.dtype):
        return ours, theirs
    largest = ours.float().abs() == torch.finfo(ours.dtype).max
    return ours, torch.where(theirs.float().isnan() & largest, ours.view(torch.uint8), theirs.view(torch.uint8))


def aiter_product(form: str, call: str) -> dict[str, Any]:
    """The query's absorbed part against what AITER's batched GEMM gave, in steps and in norm."""
    done = {"fp8": fp8_call, "mxfp4": fp4_call}[form](call)
    (tokens, heads, nope), act = done.x.shape, str(done.x.dtype).removeprefix("torch.")
    case = cases.Case(tokens=tokens, heads=heads, nope=nope, latent=16, act=act, cache=act)
    inputs = cases.build(case)[0]
    inputs = replace(inputs, q=torch.cat([done.x, inputs.q[..., nope:]], -1), weight=done.weight)
    found = BACKEND.prepare(inputs)[..., :16].float()
    if done.y_scale is not None:
        found = found / done.y_scale
    deviation = (found - done.y.float()).norm() / done.y.float().norm()
    steps = difference(found.to(done.y.dtype), done.y).steps
    return {"steps": steps, "deviation": float(deviation)}


def far_cache(cache: str, mutation: str | None = None) -> dict[str, Any]:
    """Rows beyond 2 GiB and 4 GiB of a sparse cache: right there, and nothing where a 32-bit offset would land."""
    dtype = getattr(torch, cache)
    inputs, _ = cases.build(cases.Case(tokens=4, heads=1, cache=cache, no_slot="none"))
    block, width = 64, 576
    bytes_per_row = width * dtype.itemsize
    blocks = (5 << 30) // (block * bytes_per_row)
    # A 32-bit offset may come out negative: 2 GiB before the cache belong to it too.
    lead = 2 << 30
    whole = cases.sparse_bytes(lead + blocks * block * bytes_per_row)
    raw = whole[lead:]
    rows = [3, (2 << 30) // bytes_per_row + 5, (4 << 30) // bytes_per_row + 7, blocks * block - 1]
    inputs = replace(
        inputs, kv_cache=raw.view(dtype).view(blocks, block, width), slot_mapping=torch.tensor(rows, dtype=torch.int64)
    )
    cos, sin = reference.gather_cos_sin(inputs.cos_sin_cache, inputs.positions)
    expected = reference.kv_rows(inputs, cos, sin, reference.TRITON)
    with planted(mutation):
        BACKEND.prepare(inputs)
    written = inputs.kv_cache.view(-1, width)
    wrong = cases.wrong_values(written[rows], expected)
    offsets = [row * bytes_per_row for row in rows if row * bytes_per_row >= 1 << 31]
    aliases = [(offset + (1 << 31)) % (1 << 32) - (1 << 31) + lead for offset in offsets]  # wrapped as an int32 is
    aliased = sum(int(whole[at : at + bytes_per_row].count_nonzero()) for at in aliases)
    return {"wrong": wrong, "aliased": aliased, "bytes": raw.numel()}


def far_query() -> dict[str, Any]:
    """Rows of q whose first element lies beyond 2**31 elements: the block's base is 64-bit."""
    inputs, storage = cases.build(cases.Case(tokens=160, heads=1))
    stride = 1 << 24
    raw = cases.sparse_bytes((inputs.num_tokens * stride) * 2).view(torch.bfloat16)
    q = raw.as_strided(inputs.q.shape, (stride, 192, 1))
    q.copy_(inputs.q)
    return cases.compare(replace(inputs, q=q), storage, BACKEND.prepare)


class OtherScale(stand_in.StandInBackend):
    """Planted: the query is quantised by another scale."""

    def _run(self, inputs):
        return super()._run(replace(inputs, q_scale=inputs.q_scale * 2))


def checked_stand_in(heads, cache, planted=False):
    """``measure``'s stand-in for vLLM's kernels against the reference, under both pairings."""
    backend, dtype = OtherScale() if planted else stand_in.StandInBackend(), getattr(torch, cache)
    shapes = [LayerShape(heads, 128, dtype, dtype, 64, is_neox, device="cpu") for is_neox in (False, True)]
    results = [compare_with_reference(backend, shape, sys.maxsize) for shape in shapes]
    first = results[0]
    return {"ok": [result.has_passed for result in results], "wrong": first.failed_parts, "said": first.message}


@contextmanager
def planted(mutation: str | None) -> Iterator[None]:
    """Let the launcher run a mutant of the kernel, made from its source text."""
    if mutation is not None:
        launcher.decode_prep_kernel = mutant(mutation)
    try:
        yield
    finally:
        launcher.decode_prep_kernel = kernel.decode_prep_kernel


def mutant(name: str) -> Any:
    old, new, times, *_ = MUTATIONS[name]
    source = Path(kernel.__file__).read_text()
    found = source.count(old)
    assert found == times, f"{name}: {old!r} stands {found} times in the kernel, not {times}"
    (Path(_FOLDER.name) / f"kernel_{name}.py").write_text(source.replace(old, new))
    importlib.invalidate_caches()
    return importlib.import_module(f"kernel_{name}").decode_prep_kernel


OPERATIONS = [
    compare, compare_tile, odd_rows, stored_sums, odd_groups, self_checked, aiter_vector,
    aiter_product, far_cache, far_query, checked_stand_in,
]  # fmt: skip

if __name__ == "__main__":
    main()
