"""The run: every point, its paths checked against one another before they are timed, and what the figures call for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from vllm_aiter_mla.commands.bench import paths, timing
from vllm_aiter_mla.commands.bench.points import Point, operands
from vllm_aiter_mla.kernels import formats as fp8
from vllm_aiter_mla.kernels.inputs import DecodeInputs
from vllm_aiter_mla.kernels.measure import cache_bytes, machine, sets_needed
from vllm_aiter_mla.kernels.selfcheck import deviation, norm_bound

# Paths differ by one rounding of the rope half and by summation order: one fp8 step, or a bf16 step, in few values.
MAX_DIFFERENT = 0.10


class NoGpuError(RuntimeError):
    """There is nothing to measure on; the message is one line for the user."""


@dataclass(frozen=True, slots=True)
class Row:
    """One point's result. ``timings`` by path name, ``missing`` the reasons of the others."""

    point: Point
    sets: int
    timings: dict[str, timing.Timing]
    missing: dict[str, str]
    wrong: dict[str, str]

    @property
    def ratio(self) -> float | None:
        """The best unfused sequence over the one launch: above 1 the one launch is faster. None: not measured."""
        rivals = [self.timings[name].median_us for name in (paths.UNFUSED, paths.VLLM) if name in self.timings]
        ours = self.timings.get(paths.OURS)
        return min(rivals) / ours.median_us if ours and rivals else None

    @property
    def gbps(self) -> float | None:
        """Bytes of the point, each counted once, over the time of the one launch."""
        ours = self.timings.get(paths.OURS)
        return self.point.bytes_once / ours.median_us * 1e-3 if ours else None


@dataclass(slots=True)
class Report:
    """A whole run on one card; ``stopped`` says at which point and why it ended early."""

    machine: dict[str, str]
    arch: str
    copy_gbps: float
    rounds: int
    rows: list[Row] = field(default_factory=list)
    stopped: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with the derived figures of each row."""
        rows = [
            asdict(row) | {"ratio": row.ratio, "gbps": row.gbps, "bytes_once": row.point.bytes_once}
            for row in self.rows
        ]
        return asdict(self) | {"rows": rows, "bounds": [asdict(b) for b in bounds(self)], "caps": caps(self)}


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound of the project, what was measured against it, and whether it holds; None: not measured."""

    text: str
    measured: float | None
    holds: bool | None


def run(points: list[Point], rounds: int, progress: Callable[[str], None] = lambda text: None) -> Report:
    """Measure ``points`` on the current GPU.

    Raises:
        NoGpuError: torch sees no GPU, or Triton's back end has no hardware fp8 type for this one.
    """
    require_gpu()
    from vllm_aiter_mla.kernels.platform import hardware_fp8
    from vllm_aiter_mla.kernels.triton.launcher import current_arch

    arch = current_arch()
    native = hardware_fp8(arch)
    if native is None and any(point.quantised or point.fp8_weight for point in points):
        raise NoGpuError(f"{arch} has no fp8 conversion in hardware; ask for bf16 only")
    report = Report(machine(), arch, timing.copy_gbps(), rounds)
    for point in points:
        at = f"T={point.tokens} N={point.heads} {point.label}"
        try:
            report.rows.append(_row(point, native or torch.float8_e4m3fn, rounds))
        # What was measured before is kept: no memory for a large point, a build that fails.
        except Exception as error:
            report.stopped = f"{at}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            break
        progress(at)
    return report


def require_gpu() -> None:
    """Raise NoGpuError, with a line to show, unless torch sees a GPU."""
    if not torch.cuda.is_available():
        raise NoGpuError(f"a GPU is needed, torch {torch.__version__} sees none; nothing was measured")


def _row(point: Point, native: torch.dtype, rounds: int) -> Row:
    count = sets_needed(point.bytes_once, cache_bytes())
    sets = operands(point, native, count)
    available = paths.available(sets[0])
    wrong = disagreements(available, sets[0])
    timed = [path for path in available if path.name not in wrong]
    missing = {path.name: path.reason or "" for path in available if path.prepare is None}
    return Row(point, count, timing.measure(timed, sets, rounds), missing, wrong)


def disagreements(found: list[paths.Path], inputs: DecodeInputs) -> dict[str, str]:
    """Paths whose query or cache is not that of plain PyTorch, with the figures; they are not timed."""
    prepared = {path.name: path.prepare for path in found if path.prepare is not None}
    expected = _parts(prepared[paths.TORCH], inputs)
    wrong = {}
    for name, prepare in prepared.items():
        try:
            got = _parts(prepare, inputs)
        # A build of AITER that fails, or no memory: the others are measured all the same.
        except Exception as error:
            wrong[name] = f"it raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"
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


def _parts(prepare: paths.Prepare, inputs: DecodeInputs) -> dict[str, torch.Tensor]:
    """The query's two halves and the cache after one call on copies."""
    query, cache = _outputs(prepare, inputs)
    halves = query.split([inputs.latent_dim, inputs.rope_dim], dim=-1)
    return {"query, un-rotated": halves[0].contiguous(), "query, rotated": halves[1].contiguous(), "cache": cache}


def _outputs(prepare: paths.Prepare, inputs: DecodeInputs) -> tuple[torch.Tensor, torch.Tensor]:
    own = {name: getattr(inputs, name).clone() for name in ("q", "k_pe", "kv_cache")}
    copy = replace(inputs, **own)
    return prepare(copy), copy.kv_cache


def _difference(got: torch.Tensor, expected: torch.Tensor) -> tuple[float, int]:
    """Fraction of values that differ, and how many by more than one fp8 step (1/64 of the magnitude for bfloat16)."""
    if fp8.is_fp8(got.dtype):
        steps = fp8.step_distance(got, expected)
        return float((steps > 0).double().mean()), int((steps > 1).sum())
    a, b = got.double(), expected.double()
    far = (a - b).abs() > b.abs() / 64 + 1e-2
    return float((a != b).double().mean()), int(far.sum())


def caps(report: Report) -> list[str]:
    """The entries for ``tiles.CAPS`` that the figures call for: per heads and type, the first T that was slower."""
    slower: dict[tuple[int, bool], list[int]] = {}
    for row in report.rows:
        # A cap holds for every form of the weight, so only the largest form calls for one.
        if row.ratio is not None and row.ratio < 1 and not row.point.fp8_weight:
            slower.setdefault((row.point.heads, row.point.quantised), []).append(row.point.tokens)
    source = ", ".join(report.machine.values())
    return [
        f'Cap("{report.arch}", {heads}, {kind}, {min(tokens)}, "{source}")'
        for (heads, kind), tokens in sorted(slower.items())
    ]


def bounds(report: Report) -> list[Bound]:
    """The project's bounds against this run; a point that was not measured leaves its bound open."""
    rows = [(row, row.point) for row in report.rows]
    few = [row.ratio for row, at in rows if at.heads == 16 and at.quantised and at.tokens <= 64]
    middle = [row.ratio for row, at in rows if at.heads == 16 and at.tokens == 256]
    engaged = [row.ratio for row, at in rows if not at.fp8_weight]
    wide = [row.gbps / report.copy_gbps for row, at in rows if at == Point(256, 128, True) and row.gbps is not None]
    return [
        _bound("ratio >= 2.0 for T <= 64, N = 16, fp8", few, 2.0),
        _bound("ratio >= 1.3 for T = 256, N = 16", middle, 1.3),
        _bound("ratio >= 1.0 wherever the back end engages, plain weights", engaged, 1.0),
        _bound("share of the copy bandwidth >= 0.70 for N = 128, T = 256, fp8", wide, 0.7),
    ]


def _bound(text: str, values: Sequence[float | None], least: float) -> Bound:
    known = [value for value in values if value is not None]
    return Bound(text, min(known), min(known) >= least) if known else Bound(text, None, None)
