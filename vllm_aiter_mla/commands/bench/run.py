"""Compare the paths of every point with plain PyTorch, then time them in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from vllm_aiter_mla.commands.bench.points import Point, operands
from vllm_aiter_mla.kernels import absorb, formats, reference
from vllm_aiter_mla.kernels.inputs import DecodeInputs
from vllm_aiter_mla.kernels.measure import MIN_CALLS, cache_bytes, interleaved, machine, record, sets_needed
from vllm_aiter_mla.kernels.platform import CARDS, detect_platform
from vllm_aiter_mla.kernels.selfcheck import deviation, norm_bound, steps_of
from vllm_aiter_mla.settings import Settings

Prepare = Callable[[DecodeInputs], torch.Tensor]
OURS, UNFUSED, VLLM, TORCH, AITER = PATHS = ("one launch", "unfused", "vllm", "torch", "aiter")
# Paths differ by one rounding of the rope half and by summation order: one fp8 step, or a bf16 step, in few values.
MAX_DIFFERENT = 0.10


class NoGpuError(RuntimeError):
    """There is nothing to measure on; the message is one line for the user."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds per call: median, lowest and highest of the rounds; ``launches`` counts kernels per call."""

    median_us: float
    min_us: float
    max_us: float
    launches: int


@dataclass(frozen=True, slots=True)
class Row:
    """One point's timings by path, and the reasons of paths that could not run or were wrong."""

    point: Point
    sets: int
    timings: dict[str, Timing]
    missing: dict[str, str]
    wrong: dict[str, str]

    @property
    def rival(self) -> str | None:
        """The fastest path other than ours; None if none was timed."""
        others = {name: one.median_us for name, one in self.timings.items() if name != OURS}
        return min(others, key=others.__getitem__) if others else None

    @property
    def ratio(self) -> float | None:
        """The rival's time over ours: above 1 the one launch is faster. None if either was not timed."""
        rival = self.rival
        return None if rival is None or OURS not in self.timings else self._us(rival) / self._us(OURS)

    def _us(self, name: str) -> float:
        return self.timings[name].median_us

    def as_dict(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return asdict(self) | {"label": self.point.label, "rival": self.rival, "ratio": self.ratio}


@dataclass(slots=True)
class Report:
    """A whole run on one card; ``stopped`` says at which point and why it ended early."""

    machine: dict[str, str]
    arch: str
    rounds: int
    rows: list[Row] = field(default_factory=list)
    stopped: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the run for JSON."""
        return asdict(self) | {"rows": [row.as_dict() for row in self.rows]}


def run(points: list[Point], rounds: int, progress: Callable[[str], None] = lambda text: None) -> Report:
    """Measure ``points`` on the current GPU. Keep what was measured if a later point fails.

    Raises:
        NoGpuError: torch sees no GPU, or Triton's back end has no hardware fp8 type for this one.
    """
    require_gpu()
    from vllm_aiter_mla.kernels.triton.launcher import current_arch

    arch = current_arch()
    native = CARDS.get(arch)
    if native is None and any(point.quantised or point.fp8_weight for point in points):
        raise NoGpuError(f"{arch} has no fp8 conversion in hardware; ask for bf16 only")
    report = Report(machine(), arch, rounds)
    for point in points:
        at = f"T={point.tokens} N={point.heads} {point.label}"
        try:
            report.rows.append(_row(point, native or torch.float8_e4m3fn, rounds))
        except Exception as error:  # out of memory for a large point, or a build that fails
            report.stopped = f"{at}: {_short(error)}"
            break
        progress(at)
    return report


def require_gpu() -> None:
    """Raise NoGpuError unless torch sees a GPU."""
    if not torch.cuda.is_available():
        raise NoGpuError(f"a GPU is needed, torch {torch.__version__} sees none; nothing was measured")


def _row(point: Point, native: torch.dtype, rounds: int) -> Row:
    sets = operands(point, native, sets_needed(point.bytes_once, cache_bytes()))
    able, missing = available(sets[0])
    wrong = disagreements(able, sets[0])
    right = {name: prepare for name, prepare in able.items() if name not in wrong}
    return Row(point, len(sets), measure(right, sets, rounds), missing, wrong)


def available(sample: DecodeInputs) -> tuple[dict[str, Prepare], dict[str, str]]:
    """Return the paths that can take ``sample``, by name, and the reasons of the others."""
    from vllm_aiter_mla.commands.bench import baselines
    from vllm_aiter_mla.kernels.triton.launcher import entry, launch

    aiter = _aiter(sample)
    # Over codes both unfused sequences multiply by vLLM's own call, which needs AITER.
    product = sample.weight.format == "plain" or sample.weight.format in absorb.GEMMS
    without = "" if product else f"vLLM multiplies by {sample.weight.format} weights on an AMD card only"
    found: dict[str, Prepare | str] = {
        # Without the measured cap: this benchmark finds the size from which the kernel is slower.
        OURS: lambda inputs: launch(inputs, entry(inputs).tile),
        UNFUSED: without or baselines.unfused,
        VLLM: without or _vllm(),
        TORCH: lambda inputs: reference.prepare(inputs, reference.TWO_ROUNDING),
        AITER: aiter,
    }
    able = {name: one for name, one in found.items() if not isinstance(one, str)}
    return able, {name: one for name, one in found.items() if isinstance(one, str)}


def _vllm() -> Prepare | str:
    """Return the unfused sequence with vLLM's own fused RoPE + KV-write op, or why it cannot run."""
    from vllm_aiter_mla.commands.bench import baselines
    from vllm_aiter_mla.compat import offline

    op = offline.fused_rope_kv_write()
    if isinstance(op, str):
        return op

    def prepare(inputs: DecodeInputs) -> torch.Tensor:
        absorbed = inputs.weight.product(inputs.q_nope)
        q_pe = inputs.q[..., inputs.nope_dim :]
        quantised = formats.is_fp8(inputs.kv_cache.dtype)
        # The op rotates q_pe and k_pe in place: a replay rotates what the last one left, which costs the same.
        op(
            inputs.positions, q_pe, inputs.k_pe, inputs.kv_c, inputs.cos_sin_cache, inputs.is_neox,
            inputs.slot_mapping, inputs.kv_cache.view(torch.uint8) if quantised else inputs.kv_cache,
            "fp8" if quantised else "auto", inputs.k_scale,
        )  # fmt: skip
        return baselines.concat_quant(inputs, absorbed, q_pe)

    return prepare


def _aiter(sample: DecodeInputs) -> Prepare | str:
    try:
        from vllm_aiter_mla.backends import Backends

        bound = Backends(Settings(), detect_platform()).bind("aiter", sample)
    except Exception as error:
        return _short(error)
    return bound if isinstance(bound, str) else bound.run


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def disagreements(able: Mapping[str, Prepare], inputs: DecodeInputs) -> dict[str, str]:
    """Return the paths whose query or cache is not that of plain PyTorch, with the figures."""
    expected = _parts(able[TORCH], inputs)
    wrong = {}
    for name, prepare in able.items():
        try:
            got = _parts(prepare, inputs)
        except Exception as error:  # a build of AITER that fails, or no memory
            wrong[name] = f"it raised {_short(error)}"
            continue
        for what in expected:
            different, far = _difference(got[what], expected[what])
            if far or different > MAX_DIFFERENT:
                product = inputs.weight.product_bound if what == "query, un-rotated" else 0.0
                # Where the product rounds its operand to codes, one other code moves a whole row of it.
                if product and deviation(got[what], expected[what]) <= norm_bound(product, got[what].dtype):
                    continue
                wrong[name] = f"{what}: {different:.1%} of the values differ, {far} by more than one step"
    return wrong


def _parts(prepare: Prepare, inputs: DecodeInputs) -> dict[str, torch.Tensor]:
    """Return the query's two halves and the cache after one call on copies."""
    copy = replace(inputs, **{name: getattr(inputs, name).clone() for name in ("q", "k_pe", "kv_cache")})
    halves = prepare(copy).split([inputs.latent_dim, inputs.rope_dim], dim=-1)
    rotated = {"query, un-rotated": halves[0].contiguous(), "query, rotated": halves[1].contiguous()}
    return rotated | {"cache": copy.kv_cache}


def _difference(got: torch.Tensor, expected: torch.Tensor) -> tuple[float, int]:
    """Return the share of values that differ, and how many differ by more than an fp8 step (bfloat16: 1/64)."""
    if formats.is_fp8(got.dtype):
        steps = (steps_of(got) - steps_of(expected)).abs()
        return float((steps > 0).double().mean()), int((steps > 1).sum())
    a, b = got.double(), expected.double()
    return float((a != b).double().mean()), int(((a - b).abs() > b.abs() / 64 + 1e-2).sum())


def measure(paths: Mapping[str, Prepare], sets: Sequence[DecodeInputs], rounds: int) -> dict[str, Timing]:
    """Time every path over all operand sets. A round replays each path once, so a drifting clock meets them all."""
    calls = list(sets) * -(-MIN_CALLS // len(sets))
    launches = {name: count_launches(prepare, sets[0]) for name, prepare in paths.items()}
    kept = interleaved({name: record(prepare, calls) for name, prepare in paths.items()}, rounds)
    return {name: Timing(statistics.median(us), min(us), max(us), launches[name]) for name, us in kept.items()}


def count_launches(prepare: Prepare, inputs: DecodeInputs) -> int:
    """Count the kernels that one call launches, copies and fills included. Compiles the path first."""
    for _ in range(2):
        prepare(inputs)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        prepare(inputs)
        torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA
    return sum(1 for event in profile.events() if event.device_type == device)
