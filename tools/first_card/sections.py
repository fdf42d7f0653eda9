"""The sections, one after the other; each returns what its JSON file holds. The longer ones have files of their own.

``ok`` says whether all comparisons held; ``planted`` has each planted fault and whether it was caught.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tools.first_card import contenders, dry, small_kernels
from tools.first_card.asked import Asked, seen_as_nothing, shape_of
from tools.first_card.harness import churn, verify
from tools.first_card.prefill import prefill
from vllm_aiter_mla import files
from vllm_aiter_mla.kernels import reference, stopwatch
from vllm_aiter_mla.kernels.backend import Binding, KernelBackend
from vllm_aiter_mla.kernels.device import card
from vllm_aiter_mla.kernels.inputs import DecodeInputs, LayerShape, synthetic_inputs
from vllm_aiter_mla.kernels.platform import detect_platform
from vllm_aiter_mla.kernels.triton import kernel, launcher
from vllm_aiter_mla.kernels.triton.backend import TritonBackend

TOKENS, HEADS = (1, 16, 64, 256, 512), (16, 128, 8, 32)
WRONG = 0.06  # ||result - reference|| / ||reference|| of a contender from which on it is not timed


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
        "ok": read == ("decode_prep_kernel",),
    }  # fmt: skip


def clocks() -> str:
    """Return the driver, the clocks in MHz and the power in W as nvidia-smi prints them; "" without it."""
    query = "name,driver_version,clocks.sm,clocks.mem,power.draw"
    line = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        return subprocess.run(line, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


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
    off = error_of(Doubled(), shape_of(2, "fp8", "bf16", act))
    planted = {"a kernel that scales wrongly": isinstance(off, float) and not is_right(off)}  # else it did not run
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


# -- hypotheses


def order(asked: Asked) -> dict[str, Any]:
    """Time the kernel with its rope and KV programs first in the grid against last, as it is."""
    since, counts = time.monotonic(), (1,) if asked.dry == dry.VALUES else TOKENS
    able = {"last": TritonBackend(), "first": Turned()}
    errors, rows, stopped = {}, [], ""
    for heads in (2,) if asked.dry == dry.VALUES else (16, 128):
        made = shape_of(heads, "fp8", "bf16")
        errors[f"N{heads}"] = {name: error_of(one, made) for name, one in able.items()}
        if asked.dry == dry.LAUNCHES:
            launch(able, made, counts)
            continue
        for tokens in counts:
            if not asked.left(since):
                stopped = f"stopped after {asked.seconds:.0f} s"
                break
            us, _ = medians(able, made, tokens)
            rows.append({"T": tokens, "N": heads, "us": us, "first / last": us["first"] / us["last"]})
    wrong = [name for one in errors.values() for name, error in one.items() if not is_right(error)]
    found = {"rows": rows, "errors": errors, "stopped": stopped, "failures": wrong, "ok": not wrong}
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
    """Time the tiles: is a tile that is not in the table faster?"""
    from vllm_aiter_mla.commands.check.timing import tune as command
    from vllm_aiter_mla.commands.check.timing.child import TimingRequest

    heads, counts = (2, [1]) if asked.dry == dry.VALUES else (16, [*TOKENS])
    with tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, {"VLLM_CACHE_ROOT": cache}):
        record, failure = command.tune_tiles(TimingRequest(tuple(counts), (heads,), ("fp8",)))
    table = {str(tokens): command.table_tile(tokens, heads) for tokens in counts}
    found = {"chosen": files.to_plain(record.chosen), "us": record.us, "table": table, "ok": failure is None}
    return seen_as_nothing(found, failure is not None) if asked.dry == dry.LAUNCHES else found


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
            for name in contenders.NAMES
        ]
        yield [str(row["N"]), str(row["T"]), row["cache"], row["weights"], *us, least]
