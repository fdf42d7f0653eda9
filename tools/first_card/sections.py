"""What is asked of the card, one section after the other. Each returns what its JSON file holds.

``ok`` says whether all comparisons held; ``planted`` has each planted fault and whether it was caught.
"""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tools.first_card import contenders, dry, small_kernels
from vllm_aiter_mla.commands import outputs
from vllm_aiter_mla.kernels import reference, stopwatch
from vllm_aiter_mla.kernels.backend import Binding, KernelBackend
from vllm_aiter_mla.kernels.device import card
from vllm_aiter_mla.kernels.inputs import DecodeInputs, LayerShape, synthetic_inputs
from vllm_aiter_mla.kernels.platform import detect_platform
from vllm_aiter_mla.kernels.triton import kernel, launcher
from vllm_aiter_mla.kernels.triton.backend import TritonBackend
from vllm_aiter_mla.startup.selfcheck import ordinals

TOKENS, HEADS = (1, 16, 64, 256, 512), (16, 128, 8, 32)
NOPE, ROPE, LATENT, Q_LORA, BLOCK = 128, 64, 512, 1536, 64
WRONG = 0.06  # ||result - reference|| / ||reference|| of a contender from which on it is not timed


@dataclass(frozen=True)
class Asked:
    """What a section may use."""

    aiter: Path | None  # the folder of AITER's Triton files
    dry: str  # "", or a kind of ``dry.ENVIRONMENT``
    seconds: float  # after which it starts nothing more

    def left(self, since: float) -> bool:
        """Return whether there is time for one thing more."""
        return time.monotonic() - since < self.seconds


def shape_of(heads: int, kind: str, weights: str, act: torch.dtype = torch.bfloat16) -> LayerShape:
    """Return a layer of DeepSeek's widths: ``kind`` of query and cache and ``weights``, "bf16" or "fp8"."""
    fp8 = detect_platform().fp8
    stored, weight = fp8 if kind == "fp8" else act, ("fp8", fp8) if weights == "fp8" else ("plain",)
    return LayerShape(heads, NOPE, stored, stored, BLOCK, False, act, card().torch_device, LATENT, ROPE, weight)


# -- facts


def facts(asked: Asked) -> dict[str, Any]:
    """Card, versions and clocks; copy bandwidth and an empty launch; what is read of one graph's DOT dump."""
    from vllm_aiter_mla.verify import launches

    size = 1 << (20 if asked.dry else 30)
    one, two = (torch.zeros(size, dtype=torch.uint8, device=card().torch_device) for _ in range(2))
    copies = [card().time_us(lambda: two.copy_(one)) for _ in range(12)][3:]
    inputs = synthetic_inputs(shape_of(16, "fp8", "bf16"))
    run = TritonBackend().bind(inputs).run  # type: ignore[union-attr]
    run(inputs)
    small_kernels.empty_kernel[(1,)](one)
    empty = card().record(lambda: [small_kernels.empty_kernel[(1,)](one) for _ in range(10 if asked.dry else 1000)])
    graph = card().capture(lambda: run(inputs), card().new_pool(), False)
    text, read = "", None
    try:
        text = launches.graph_dot(graph)
        read = launches.of_dot(text)
    except Exception as error:  # it has seen hand-written dumps only, and the rest of the card's time is worth more
        read = f"{type(error).__name__}: {error}"
    return stopwatch.machine() | {
        "clocks": clocks(), "units": card().units(), "cache_bytes": card().cache_bytes(),
        "copy_tb_s": 2 * size / 1e6 / max(statistics.median(copies), 1e-9), "dot": read, "dot_dump": text,
        "empty_launch_us": statistics.median(card().time_us(empty) / 1000 for _ in range(9)),
        "ok": bool(asked.dry) or read == ("decode_prep_kernel",),
    }  # fmt: skip


def clocks() -> str:
    """Return the driver, the clocks in MHz and the power in W as nvidia-smi prints them; "" without it."""
    query = "name,driver_version,clocks.sm,clocks.mem,power.draw"
    line = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        return subprocess.run(line, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


# -- the harness


def verify(asked: Asked) -> dict[str, Any]:
    """Run ``verify`` with every back end that is here: both ends of a decode limit of 1024, and all quick cases."""
    from vllm_aiter_mla.verify.cases import SMALL
    from vllm_aiter_mla.verify.session import Session

    since, counts, failed = time.monotonic(), {"passed": 0, "failed": 0, "skipped": 0, "not run": 0}, list[str]()
    oracles = set[str]()
    ends = {"only": ("both-ends-0-drafts",), "variant": ("fp8",)}
    if asked.dry == dry.VALUES:
        sessions = [Session(**ends, limit=8, geometry=SMALL)]
    elif asked.dry:
        sessions = [
            Session(("triton",), **ends, limit=1024),
            Session(("triton",), ("shared-pool",), quick=True, limit=128),
        ]
    else:
        sessions = [Session(only=("kernel-status",), limit=16), Session(**ends, limit=1024)]
        # What runs last is what a slow host leaves out.
        names = sorted({item.backend for item in sessions[0].items}, reverse=True)
        sessions += [Session((name,), quick=True, limit=128) for name in names]
    for session in sessions:
        run = session.run()
        for _ in session.items:
            if not asked.left(since):
                counts["not run"] += 1
                continue
            result = next(run)
            counts[result.status] += 1
            oracles |= {one.oracle for one in result.findings}
            found = [f"{one.oracle}: {one.message} at {one.step}" for one in result.findings[:2]]
            failed += [f"{session.command(result)}: {'; '.join(found)}"] * (result.status == "failed")
    found = {
        "counts": counts,
        "missing": sessions[0].missing,
        "failures": failed,
        "ok": not failed and counts["passed"] > 0,
    }
    values = {"finite", "query-nope", "query-rope", "cache-rows"}
    return seen_as_nothing(found, bool(oracles & values)) if asked.dry == dry.LAUNCHES else found


def seen_as_nothing(found: dict[str, Any], caught: bool) -> dict[str, Any]:
    """Return the result of a section where nothing is computed: right is that the comparisons failed."""
    return found | {
        "failures": [],
        "caught": found.get("failures"),
        "planted": {"nothing is computed": caught},
        "ok": True,
    }


HELD = {"slot_mapping": "cache", "q_scale": "latent", "weight": "latent"}
"""Planted faults: an operand whose value at the capture the graph keeps, and the part of the result that shows it."""


def churn(asked: Asked) -> dict[str, Any]:
    """Replay one graph 10,000 times with all operands changed between the replays; compare each result on the card."""
    # Replays, and the share of the seconds.
    cases = {(16, "fp8", "bf16", 64): (10_000, 0.5), (16, "bf16", "bf16", 64): (2000, 0.2),
             (128, "fp8", "fp8", 16): (2000, 0.2)}  # fmt: skip
    if asked.dry == dry.LAUNCHES:
        cases = dict.fromkeys(cases, (1, 0.3))
    elif asked.dry:  # what an interpreter does in seconds
        cases = {(2, "fp8", "bf16", 9): (4, 0.5)}
    found, early = dict[str, Any](), list[str]()
    for (heads, kind, weights, tokens), (times, part) in cases.items():
        name = f"{kind} cache, {weights} weights, N{heads}, T{tokens}"
        share = replace(asked, seconds=asked.seconds * part)
        found[name] = replayed(share, shape_of(heads, kind, weights), tokens, times)
        early += [f"{name}: {found[name]['replays']} replays of {times}"] * (found[name]["replays"] < times)
    wrong = any(one["wrong"] for one in found.values())
    if asked.dry == dry.LAUNCHES:
        return seen_as_nothing(found, wrong)
    share, small = replace(asked, seconds=asked.seconds / 30), shape_of(2, "fp8", "bf16")
    few = 4 if asked.dry else 400
    caught = {
        f"a graph keeps {name}": part in replayed(share, small, 9, few, name)["wrong"] for name, part in HELD.items()
    }
    return found | {"planted": caught, "stopped": "; ".join(early), "ok": not wrong}


def replayed(asked: Asked, shape: LayerShape, tokens: int, times: int, held: str = "") -> dict[str, Any]:
    """Replay a graph of one call; return how many values differ in which part of the result, over all replays.

    The counts stay on the device, so no replay waits for the host. ``held`` names an operand that the graph keeps.
    """
    since, home = time.monotonic(), shape.device
    inputs = synthetic_inputs(shape, tokens, padded=None)
    blocks = max(4, -(-4 * tokens // BLOCK))  # more slots than rows, so that a stale write lands where it shows
    cache = inputs.kv_cache.new_empty((blocks, *inputs.kv_cache.shape[1:]))
    cache.view(torch.uint8).fill_(0x35)
    inputs = replace(inputs, kv_cache=cache)
    kept: list[torch.Tensor] = []
    bound = TritonBackend().bind(captured := _held(inputs, held))
    assert not isinstance(bound, str), bound
    bound.run(captured)
    card().synchronize()
    twin = replace(inputs, kv_cache=cache.clone())
    graph = card().capture(lambda: kept.append(bound.run(captured)), card().new_pool(), False)
    graph.instantiate()
    names = ("cache", "rotated", "latent", "nan")
    counts = dict.fromkeys(names, torch.zeros((), dtype=torch.int64, device=home))
    done, query = 0, kept[-1]
    for done in range(1, times + 1):
        _change(inputs, done, every=2 if asked.dry else 100)
        query.view(torch.uint8).fill_(0xFF)  # a NaN in each type: a row that nobody writes shows
        graph.replay()
        wanted = reference.prepare(twin, reference.TRITON)
        pairs = {
            "cache": (cache, twin.kv_cache), "rotated": (query[..., LATENT:], wanted[..., LATENT:]),
            "latent": (query[..., :LATENT], wanted[..., :LATENT]),
        }  # fmt: skip
        for name, (got, right) in pairs.items():
            counts[name] = counts[name] + _far(got, right, TritonBackend.bounds.slack * (name == "latent"))
        counts["nan"] = counts["nan"] + query.float().isnan().sum()
        if not asked.left(since):
            break
    card().synchronize()
    figures = {name: int(count) for name, count in counts.items()}
    return figures | {"replays": done, "wrong": [name for name in names if figures[name]]}


def _held(inputs: DecodeInputs, name: str) -> DecodeInputs:
    if name == "weight":
        return replace(inputs, weight=replace(inputs.weight, values=inputs.weight.values.clone()))
    return replace(inputs, **{name: getattr(inputs, name).clone()}) if name else inputs


def _change(inputs: DecodeInputs, step: int, every: int) -> None:
    """Give every operand new values in place; weights, scales and the rotary table at each ``every``th step."""
    for rows in (inputs.q, inputs.k_pe, inputs.kv_c):
        rows.normal_()
    slots = torch.randperm(inputs.kv_cache.shape[0] * BLOCK, device=inputs.q.device)[: inputs.num_tokens]
    inputs.slot_mapping.copy_(torch.where(torch.rand_like(slots, dtype=torch.float32) < 0.1, -1, slots))
    inputs.positions.random_(0, inputs.cos_sin_cache.shape[0])
    if step % every == 0:
        weight = inputs.weight.values.view(torch.uint8 if inputs.weight.scale is not None else inputs.q.dtype)
        weight.copy_(weight.roll(1, dims=0) if weight.shape[0] > 1 else weight.flip(-1))
        inputs.cos_sin_cache.copy_(inputs.cos_sin_cache.flip(0))
        for scale in (inputs.k_scale, inputs.q_scale):
            scale.mul_(1.25 if step // every % 2 else 0.8)


def _far(got: torch.Tensor, wanted: torch.Tensor, slack: float) -> torch.Tensor:
    """Return how many values lie more than one representable step from the wanted one, and beyond ``slack``."""
    far = (ordinals(got) - ordinals(wanted)).abs() > 1
    if slack:
        far &= ~((got.float() - wanted.float()).abs() <= slack * wanted.float().abs().max())
    return far.sum()


# -- times


def times(asked: Asked) -> dict[str, Any]:
    """Return medians in replayed graphs with cold weights, the ratio to ours, and the least that any kernel takes."""
    since, sizes = time.monotonic(), product(HEADS, ("fp8", "bf16"), ("bf16", "fp8"))
    act, counts = torch.bfloat16, TOKENS
    if asked.dry == dry.VALUES:  # AITER's kernels are wrong in bf16 in the interpreter
        act, counts, sizes = torch.float16, (1,), product((2,), ("fp8",), ("bf16", "fp8"))
    able, absent = contenders.contenders(detect_platform(), asked.aiter)
    rows, errors, stopped = list[dict[str, Any]](), dict[str, dict[str, Any]](), ""
    for heads, kind, weights in sizes:
        made = shape_of(heads, kind, weights, act)
        key = f"N{heads} {kind} cache, {weights} weights"
        errors[key] = {name: error_of(one, made) for name, one in able.items()}
        if asked.dry == dry.LAUNCHES:
            launch(able, made, counts)
        right = {name: one for name, one in able.items() if is_right(errors[key][name])}
        for tokens in counts if right else ():
            if not asked.left(since):
                stopped = f"stopped after {asked.seconds:.0f} s"
                break
            us, spread = medians(right, made, tokens)
            ratio = {name: one / us[contenders.OURS] for name, one in us.items() if us.get(contenders.OURS)}
            rows.append({"T": tokens, "N": heads, "cache": kind, "weights": weights, "us": us, "spread_us": spread,
                         "ratio": ratio, "least_bytes": least_bytes(made, tokens)})  # fmt: skip
    wrong = [key for key, found in errors.items() if not is_right(found[contenders.OURS])]
    planted = {"a kernel that scales wrongly": not is_right(error_of(Doubled(), shape_of(2, "fp8", "bf16", act)))}
    found = {"rows": rows, "errors": errors, "absent": absent, "clocks": clocks(), "stopped": stopped,
             "failures": wrong, "planted": planted, "ok": not wrong}  # fmt: skip
    ran = all(isinstance(one[contenders.OURS], float) for one in errors.values())
    return seen_as_nothing(found, ran and len(wrong) == len(errors)) if asked.dry == dry.LAUNCHES else found


def medians(
    able: dict[str, KernelBackend], made: LayerShape, tokens: int
) -> tuple[dict[str, float], dict[str, float]]:  # fmt: skip
    """Return the median microseconds of each, all in the same rounds of replays with cold weights, and the spread."""
    budget = stopwatch.Budget(float("inf"))
    found = stopwatch.time_shape(able, made, synthetic_inputs(made).weight, [tokens], budget)[tokens]
    card().give_back()
    middle = {name: statistics.median(one) for name, one in found.items()}
    return middle, {name: max(one) - min(one) for name, one in found.items()}


def is_right(error: float | str) -> bool:
    """Return whether a contender may be timed: it ran, and its result is near the reference."""
    return not isinstance(error, str) and error < WRONG


def error_of(backend: KernelBackend, made: LayerShape) -> Any:
    """Return ||result - reference|| / ||reference|| of query or cache, the larger, or why there is none.

    The scale of the query is 1, which AITER's kernels take for granted.
    """
    inputs = synthetic_inputs(made, 5, padded=None, large=True)
    inputs = replace(inputs, q_scale=torch.ones_like(inputs.q_scale))
    twin = replace(inputs, kv_cache=inputs.kv_cache.clone())
    try:
        given = replace(inputs, q=inputs.q.clone(), k_pe=inputs.k_pe.clone())  # vLLM's kernel rotates in place
        bound = backend.bind(given)
        if isinstance(bound, str):
            return bound
        wanted, got = (reference.prepare(twin, reference.TRITON), twin.kv_cache), (bound.run(given), given.kv_cache)
        card().synchronize()
        return max(
            float((one.float() - right.float()).norm() / right.float().norm())
            for one, right in zip(got, wanted, strict=True)
        )
    except Exception as error:  # somebody else's kernel may raise anything
        return f"{type(error).__name__}: {str(error)[:200]}"


class Doubled(TritonBackend):
    """A planted fault: our kernel over twice the query."""

    def bind(self, inputs: DecodeInputs) -> Binding | str:
        """See the base class."""
        bound = super().bind(inputs)
        if isinstance(bound, str):
            return bound
        return Binding(lambda given: bound.run(replace(given, q=given.q * 2)))


def launch(able: dict[str, KernelBackend], made: LayerShape, counts: tuple[int, ...]) -> None:
    """Launch each contender once at each token count: what is not in Triton's cache is compiled."""
    for tokens in counts:
        inputs = synthetic_inputs(made, tokens, padded=None, large=True)  # as it is timed
        for backend in able.values():
            bound = backend.bind(inputs)
            if not isinstance(bound, str):
                bound.run(inputs)


def least_bytes(made: LayerShape, tokens: int) -> int:
    """Return the bytes that any kernel moves: each operand and each result once."""
    act, width = made.act.itemsize, made.latent + made.rope
    weight = made.heads * made.nope_dim * made.latent * (act if made.weight[0] == "plain" else 1)
    query = made.heads * ((made.nope_dim + made.rope) * act + width * made.out_dtype.itemsize)
    return weight + tokens * (query + width * (act + made.cache_dtype.itemsize))


# -- prefill rows


def prefill(asked: Asked) -> dict[str, Any]:
    """Compare the rotation that Inductor compiles with the layer and vLLM's rotary kernel behind it; stand-ins both.

    ``native`` is written as vLLM's ``forward_native`` of DeepSeek's rotary class; vLLM's kernel is ``rotate_kernel``.
    """
    since, home, heads, act = time.monotonic(), card().torch_device, 2 if asked.dry else 16, torch.bfloat16
    sizes = (1, 8) if asked.dry else (1, 8, 64, 512, 2048, 8192)
    lora = 64 if asked.dry else Q_LORA
    norm = torch.randn((lora,), device=home).to(act)
    matrix = (torch.randn((heads * (NOPE + ROPE), lora), device=home) * lora**-0.5).to(act)
    table = synthetic_inputs(shape_of(heads, "bf16", "bf16"), 2048).cos_sin_cache
    whole, front = (torch.compile(one, dynamic=True) for one in (native, project))
    rows, runs = list[dict[str, Any]](), []
    for tokens in sizes:
        if not asked.left(since):
            break
        x, k_pe = (torch.randn((tokens, width), device=home).to(act) for width in (lora, ROPE))
        positions = torch.randint(0, table.shape[0], (tokens,), device=home)

        def separate(x: Any = x, k_pe: Any = k_pe, positions: Any = positions) -> tuple[torch.Tensor, torch.Tensor]:
            q, k = front(x, norm, matrix, heads), k_pe.clone().unsqueeze(1)
            small_kernels.rotate_in_place(positions, q[..., NOPE:], k, table, False)
            return q, k

        def together(x: Any = x, k_pe: Any = k_pe, positions: Any = positions) -> tuple[torch.Tensor, torch.Tensor]:
            return whole(x, k_pe, norm, matrix, positions, table, heads)

        if asked.dry == dry.LAUNCHES:
            small_kernels.rotate_in_place(
                positions, project(x, norm, matrix, heads)[..., NOPE:], k_pe[:, None], table, False
            )
            continue
        wanted, got = together(), separate()
        thrice = rotated(front(x, norm, matrix, heads), k_pe.unsqueeze(1), positions, table)
        rows.append({"T": tokens, "eager_differs": compared(thrice, wanted)["bytes_differ"]} | compared(got, wanted))
        runs.append((together, separate))
    for row, (together, separate) in zip(rows, runs, strict=True):  # a rehearsal's recording ends all compiling
        row |= {"together_us": timed(together), "separate_us": timed(separate)}
    differ = sum(row["eager_differs"] for row in rows)
    planted = {} if asked.dry == dry.LAUNCHES else {"rounded after each operation": differ > 0}
    return {"rows": rows, "stand-in": "both sides", "planted": planted,
            "ok": all(row["largest_step"] <= 1 for row in rows)}  # fmt: skip


def project(x: torch.Tensor, norm: torch.Tensor, matrix: torch.Tensor, heads: int) -> torch.Tensor:
    """RMS norm and projection: q [T, N, P+R]."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    return torch.nn.functional.linear(y.to(x.dtype) * norm, matrix).view(x.shape[0], heads, NOPE + ROPE)


def native(
    x: torch.Tensor, k_pe: torch.Tensor, norm: torch.Tensor, matrix: torch.Tensor, positions: torch.Tensor,
    table: torch.Tensor, heads: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The same and the rotation: q [T, N, P+R] and k_pe [T, 1, R]."""
    return rotated(project(x, norm, matrix, heads), k_pe.unsqueeze(1), positions, table)


def rotated(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate as vLLM's ``forward_native`` does, in torch's own ops: rounded once by Inductor, three times eagerly."""
    cos, sin = (half.repeat_interleave(2, dim=-1).unsqueeze(-2) for half in table[positions].chunk(2, dim=-1))

    def turned(rows: torch.Tensor) -> torch.Tensor:
        return rows * cos + torch.stack((-rows[..., 1::2], rows[..., ::2]), dim=-1).flatten(-2) * sin

    return torch.cat((q[..., :NOPE], turned(q[..., NOPE:])), dim=-1), turned(k)


def compared(got: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> dict[str, int]:
    """Return how many bytes differ and the largest distance in representable values."""
    steps = [(ordinals(one) - ordinals(right)).abs() for one, right in zip(got, wanted, strict=True)]
    raw = [
        one.contiguous().view(torch.uint8) != right.contiguous().view(torch.uint8)
        for one, right in zip(got, wanted, strict=True)
    ]
    return {"bytes_differ": sum(int(one.sum()) for one in raw), "largest_step": max(int(one.max()) for one in steps)}


def timed(run: Callable[[], object], calls: int = 8) -> float:
    """Return the median microseconds of a call in a replayed graph."""
    replay = card().record(lambda: [run() for _ in range(calls)])
    replay()
    return statistics.median(card().time_us(replay) / calls for _ in range(9))


# -- hypotheses


def order(asked: Asked) -> dict[str, Any]:
    """Time the kernel with its rope and KV programs first in the grid against last, as it is."""
    since, counts = time.monotonic(), (1,) if asked.dry == dry.VALUES else TOKENS
    able = {"last": TritonBackend(), "first": Turned()}
    errors, rows = {}, []
    for heads in (2,) if asked.dry == dry.VALUES else (16, 128):
        made = shape_of(heads, "fp8", "bf16")
        errors[f"N{heads}"] = {name: error_of(one, made) for name, one in able.items()}
        if asked.dry == dry.LAUNCHES:
            launch(able, made, counts)
            continue
        for tokens in counts if asked.left(since) else ():
            us, _ = medians(able, made, tokens)
            rows.append({"T": tokens, "N": heads, "us": us, "first / last": us["first"] / us["last"]})
    wrong = [name for one in errors.values() for name, error in one.items() if not is_right(error)]
    found = {"rows": rows, "errors": errors, "failures": wrong, "ok": not wrong}
    ran = all(isinstance(error, float) for one in errors.values() for error in one.values())
    return seen_as_nothing(found, ran and bool(wrong)) if asked.dry == dry.LAUNCHES else found


class Turned(TritonBackend):
    """Our kernel with its grid the other way round: the programs of the query tiles come last."""

    def __init__(self) -> None:
        super().__init__()
        source = Path(str(kernel.__file__)).read_text()
        line = "pid = tl.program_id(0)"
        assert source.count(line) == 1
        path = (
            Path(tempfile.mkdtemp(prefix="aiter-mla-")) / "turned_kernel.py"
        )  # Triton reads a kernel's source from its file
        path.write_text(source.replace(line, "pid = tl.num_programs(0) - 1 - tl.program_id(0)"))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self._kernel = dry.recorded(module.decode_prep_kernel)

    def bind(self, inputs: DecodeInputs) -> Binding | str:
        """See the base class. Triton's dispatch is asked for this kernel; what it compiles is launched directly."""
        bound = super().bind(inputs)
        if isinstance(bound, str):
            return bound

        def run(given: DecodeInputs) -> torch.Tensor:
            with mock.patch.object(launcher, "decode_prep_kernel", self._kernel):
                return bound.run(given)

        return replace(bound, run=run)


def tune(asked: Asked) -> dict[str, Any]:
    """Run ``measure --tune``: is a tile that is not in the table faster?"""
    from vllm_aiter_mla.commands import tune as command

    heads, counts = (2, [1]) if asked.dry == dry.VALUES else (16, [*TOKENS])
    record, status = command.run(counts, [shape_of(heads, "fp8", "bf16")])
    table = {str(tokens): command.default(tokens, heads) for tokens in counts}
    found = {"chosen": record.chosen, "us": record.us, "table": table, "ok": status == outputs.FINE}
    return seen_as_nothing(found, status == outputs.FINDING) if asked.dry == dry.LAUNCHES else found


SECTIONS: dict[str, Callable[[Asked], dict[str, Any]]] = {
    one.__name__: one for one in (facts, verify, churn, times, prefill, order, tune)
}


def shown(found: dict[str, dict[str, Any]]) -> Iterator[list[str]]:
    """Yield the rows of the table of times: microseconds, then the ratio to ours."""
    for row in found.get("times", {}).get("rows", ()):
        bandwidth = found.get("facts", {}).get("copy_tb_s") or 0
        least = f"{row['least_bytes'] / bandwidth / 1e6:.2f}" if bandwidth else "-"
        us = [
            f"{row['us'][name]:.2f} ({row['ratio'].get(name, 0):.2f})" if name in row["us"] else "-"
            for name in (contenders.OURS, contenders.UNFUSED, contenders.PAIR, contenders.ONE)
        ]
        yield [str(row["N"]), str(row["T"]), row["cache"], row["weights"], *us, least]
