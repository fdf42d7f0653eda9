# SPDX-License-Identifier: Apache-2.0
"""The step ``timing``: time AITER's kernels, ours and vLLM's own on this machine's GPU, as start-up does.

Each kernel is first compared with the reference; a wrong one is not timed. A row has median microseconds per call in a
replayed graph, and how much faster than the fastest rival our fastest kernel is. Rivals are vLLM's own kernels and two
that never serve: AITER's single launch, and its op behind an fp8 product on tiles for few rows. On a card without
vLLM's kernels and AITER the rival is a stand-in for vLLM's three launches. A kernel that overflows to NaN is timed, and
does not count as ours.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console
from rich.table import Table

from vllm_aiter_mla import files
from vllm_aiter_mla.admission import OVERFLOW
from vllm_aiter_mla.commands import process
from vllm_aiter_mla.commands.check.context import NO_GPU, Context, Kind, Weights
from vllm_aiter_mla.commands.check.kernels import weights_of
from vllm_aiter_mla.commands.check.record import Step
from vllm_aiter_mla.commands.plan.issues import has_fp8_cache

if TYPE_CHECKING:
    from vllm_aiter_mla.kernels.backend import KernelBackend
    from vllm_aiter_mla.kernels.inputs import LayerShape
    from vllm_aiter_mla.serving.backends import Backends

TOKENS, HEADS = (1, 8, 64, 256, 512), (8, 16, 128)
"""What is timed without a model, if nothing else is asked for."""
TOKENS_OF_A_MODEL = (1, 8, 64, 256)
"""Those below its decode limit, and the limit itself, are timed for a model."""
MOST_TOKENS = 65536
"""More fill a card by themselves."""
VLLM, STAND_IN = "vllm", "vllm-stand-in"
RIVALS = (VLLM, STAND_IN, "aiter-decode-tile", "aiter-one-launch")


@dataclass(frozen=True)
class Row:
    """The figures of one size."""

    tokens: int
    heads: int
    kind: str  # "fp8", "bf16" or "fp16": the type of the query and the cache
    us: dict[str, float]  # median microseconds a call by kernel, among them ``RIVALS``, which never serve
    untimed: dict[str, str]  # why a kernel was not timed: it does not take the call, cannot run here, or is wrong
    # The fastest rival's time over that of our fastest kernel: above 1 ours is faster. Where a stand-in for vLLM's
    # kernels was timed, the ratio is to no kernel that serves.
    ratio: float | None
    left_out: tuple[str, ...] = ()  # kernels that were timed and do not count as ours: ``kernel=auto`` leaves them out


@dataclass(frozen=True)
class Measurement:
    """What was timed without ``--tune``; ``schemas.json`` says what the fields mean."""

    machine: dict[str, str]
    weights: str
    rows: tuple[Row, ...]
    wrong: dict[str, str]
    stopped: str
    evidence: files.Stamp = files.stamped("timing")


@dataclass(frozen=True)
class Doing:
    """What a process that times is about to do; ``kernel`` is empty if several run."""

    kernel: str
    text: str


def time_kernels(context: Context) -> Step:
    """Time every kernel and rival on this card: of a model its layer, else DeepSeek's at several numbers of heads.

    It fails if a kernel is wrong, or if nothing of ours was timed for the model. What has nothing to be compared with
    is unknown. With ``tune`` the Triton kernel's tiles are timed, and the fastest are kept for its starts.
    """
    if not context.options.on_a_card:
        return Step("skipped", NO_GPU)
    asked = _asked(context)
    if context.options.timing.tune:
        return _tuned(context, asked)
    left_out = dict[str, str]()
    while (measurement := _measured(context, asked, left_out)) is None:
        pass  # a kernel more is left out
    return _judged(context, measurement)


def _measured(context: Context, asked: Mapping[str, Any], left_out: dict[str, str]) -> Measurement | None:
    """Return what ``run`` returns in a process of its own, or what it had when it ended before.

    None if it ended in the check of a kernel, which is in ``left_out`` then.
    """
    record = Measurement({}, asked["weights"], (), dict(left_out), "")
    doing = Doing("", "its start")

    def heard(told: Measurement | Row | Doing) -> None:
        nonlocal record, doing
        if isinstance(told, Measurement):  # what its rows share
            record = told
        elif isinstance(told, Doing):
            doing = told
            context.progress.doing(told.text)
        else:
            record = replace(record, rows=(*record.rows, told))
            so_far = replace(record, stopped="cut off")
            context.progress.so_far(Step("cut off", f"{len(record.rows)} sizes", data=so_far))

    environment = context.options.environment()
    try:
        answer = process.call(
            f"{__name__}:run", {**asked, "left_out": dict(left_out)}, environment=environment, heard=heard
        )
        return cast(Measurement, answer)
    except process.EndedError as error:
        if doing.kernel and doing.kernel not in left_out:
            left_out[doing.kernel] = error.said(doing.text)
            return None
        return replace(record, stopped=error.said(doing.text))


def _asked(context: Context) -> dict[str, Any]:
    """Return what ``run`` takes, by name: of the plan's layer where there is one."""
    options, layer, plan = context.options.timing, context.options.layer, context.plan
    asked: dict[str, Any]
    usual: tuple[int, ...]
    if plan is None:
        kinds = [Kind.fp8, Kind.bf16] if options.kind is Kind.both else [options.kind]
        asked = {
            "heads": layer.heads or HEADS, "kinds": [kind.value for kind in kinds],
            "weights": (layer.weights or Weights.bf16).value, **({} if layer.nope is None else {"nope": layer.nope}),
        }  # fmt: skip
        usual = TOKENS
    else:
        sizes = plan.model.kinds[0]
        asked = {
            "heads": [plan.heads_per_rank], "kinds": ["fp8" if has_fp8_cache(plan) else "bf16"],
            "weights": weights_of(plan), "act": plan.model.dtype,
            **{name: getattr(sizes, name) for name in ("nope", "rope", "latent")},
        }  # fmt: skip
        usual = (*(count for count in TOKENS_OF_A_MODEL if count < plan.limit), min(plan.limit, MOST_TOKENS))
    return asked | {"tokens": options.tokens or (() if options.tune else usual)}


def _judged(context: Context, record: Measurement) -> Step:
    """Return how the step ended; see ``time_kernels``. It also fails if a size raised."""
    lines = tuple(
        f"{row.tokens} tokens: " + ", ".join(f"{name} {us:.2f} us" for name, us in sorted(row.us.items()))
        for row in record.rows
    )
    lines += tuple(f"{name}: {why}" for name, why in record.wrong.items())
    ratios = [(row.tokens, row.ratio) for row in record.rows if row.ratio is not None]
    ours = any(_ours(row.us, row.left_out) for row in record.rows)
    if record.wrong or record.stopped or (context.plan and not ours):
        return Step("failed", record.stopped or "a kernel is wrong, or none of ours was timed", lines, record)
    if not ratios:
        missing = "neither vLLM's kernels nor a stand-in" if ours else "none of ours"
        return Step("unknown", f"nothing to compare: {missing} was timed", lines, record)
    slower = sorted({tokens for tokens, ratio in ratios if ratio < 1})
    which = f"vLLM or a rival is faster at {slower}" if slower else "one of ours is the fastest at each"
    return Step("passed", f"{len(ratios)} sizes; {which}", lines, record)


def _tuned(context: Context, asked: Mapping[str, Any]) -> Step:
    """Tune, and return the lines that were said."""
    lines = list[str]()

    def heard(text: str) -> None:
        lines.append(text)
        context.progress.doing(text)
        context.progress.so_far(Step("cut off", "tiles of the Triton kernel", tuple(lines)))

    tune, environment = "vllm_aiter_mla.commands.check.tune:tune", context.options.environment()
    try:
        record, wrong = process.call(tune, asked, environment=environment, heard=heard)
    except process.EndedError as error:
        return Step("failed", error.said(), (*lines, *error.lines))
    kept = f"tiles are kept for {len(record.chosen)} shapes"
    return Step("failed" if wrong else "passed", wrong or kept, tuple(lines), record)


def run(asked: Mapping[str, Any]) -> Measurement:
    """Time every size; return the record.

    A size that raises ends the run, and ``stopped`` says which and why. What was timed before is kept. ``wrong`` says
    of each kernel that failed its self-check where it did. The record without rows is told first, then each row.

    Args:
        asked: ``tokens`` and ``heads`` of a rank, numbers; ``kinds``, as ``Row.kind``; ``weights``, the format of the
            absorb weights; ``left_out``, why kernels are not called, by name; what else ``shape_of`` takes.
    """
    from vllm_aiter_mla.commands.compat.offline import load_plugins
    from vllm_aiter_mla.compat import config as compat_config
    from vllm_aiter_mla.kernels import stopwatch
    from vllm_aiter_mla.serving.backends import Backends, current_platform
    from vllm_aiter_mla.settings import Settings

    load_plugins()  # as in a server: they may bring the platform, or kernels
    given = dict(asked)
    tokens, heads, kinds, weights = (given.pop(name) for name in ("tokens", "heads", "kinds", "weights"))
    left_out: dict[str, str] = given.pop("left_out", {})
    machine, rows, wrong, stopped = stopwatch.machine(), list[Row](), dict(left_out), ""
    process.tell(Measurement(machine, weights, (), dict(wrong), ""))
    backends = Backends(Settings(enabled=True), current_platform())
    with compat_config.as_current():
        for kind, count in product(kinds, heads):
            try:
                for row in rows_of(backends, shape_of(count, kind, weights, **given), tokens, wrong, left_out):
                    rows.append(row)
                    process.tell(row)
            except Exception as error:  # out of memory for a large size, or a build that fails
                stopped = f"{count} heads, {kind}: {type(error).__name__}: {error}"
                break
    return Measurement(machine, weights, tuple(rows), wrong, stopped)


def rows_of(
    backends: Backends, shape: LayerShape, tokens: Sequence[int], wrong: dict[str, str], left_out: Mapping[str, str]
) -> Iterator[Row]:
    """Check the contenders on one layer shape, then time those that are right.

    A kernel that fails its check goes to ``wrong``; one that is ``left_out`` is not called.
    """
    from vllm_aiter_mla.compat import layer as compat_layer
    from vllm_aiter_mla.kernels import stopwatch
    from vllm_aiter_mla.kernels.device import card
    from vllm_aiter_mla.kernels.inputs import synthetic_inputs

    where = f"{shape.heads} heads, {kind_of(shape)}"
    contenders, not_ours = checked_contenders(backends, shape, max(tokens), where, wrong, left_out)
    able = {name: backend for name, backend in contenders.items() if not isinstance(backend, str)}
    untimed = {name: why for name, why in contenders.items() if isinstance(why, str)}
    helper = compat_layer.padding_helper() if shape.out_heads else None
    pad = helper and partial(helper.get_mla_padded_q, shape.heads)
    for count in tokens:
        process.tell(Doing("", f"the timing of {', '.join(able)} at {count} tokens, {where}"))
        calls = synthetic_inputs(shape, count)
        skipped = {name: why for name, backend in able.items() if (why := backend.refuse(calls)) is not None}
        weight, budget = synthetic_inputs(shape).weight, stopwatch.Budget(float("inf"))
        rounds = stopwatch.time_shape(able, shape, weight, [count], budget, pad=pad)[count]
        us = {name: statistics.median(times) for name, times in rounds.items()}
        yield row_of(count, shape.heads, kind_of(shape), us, untimed | skipped, not_ours)
        card().give_back()


def checked_contenders(
    backends: Backends, shape: LayerShape, most: int, where: str, wrong: dict[str, str], left_out: Mapping[str, str]
) -> tuple[dict[str, KernelBackend | str], list[str]]:
    """Check the kernels and the rivals with up to ``most`` tokens.

    Returns:
        Each back end, or why it is not timed, by name; the names that do not count as ours, because an fp8 overflow
        becomes NaN and ``kernel=auto`` leaves them out.
    """
    from vllm_aiter_mla.commands.check import rivals
    from vllm_aiter_mla.kernels.inputs import synthetic_inputs
    from vllm_aiter_mla.serving import decision
    from vllm_aiter_mla.serving.decision import Checked
    from vllm_aiter_mla.startup import checks

    contenders, overflows = dict[str, Any](), dict[str, Checked]()
    for name in backends.names:
        process.tell(Doing(name, f"the check of {name} at {where}"))
        backend = contenders[name] = left_out.get(name) or backends.get(name)
        if isinstance(backend, str) or backend.trusted:
            continue
        if (why := backend.refuse(synthetic_inputs(shape, 1))) is not None:
            contenders[name] = why
        elif not (checked := checks.self_check(name, backend, shape, (), most)).ok:
            contenders[name], wrong[name] = checked.message, f"{where}: {checked.message}"
        elif checked.writes_nan:
            overflows[name] = Checked(writes_nan=True)
    facts = decision.LayerFacts(None, dict.fromkeys(overflows, decision.Offer()))
    served = decision.usable(facts, overflows, backends.settings)
    process.tell(Doing("", f"the checks of the rivals at {where}"))
    vllm_is_here = not isinstance(contenders.get(VLLM, ""), str)
    contenders |= rivals.checked(backends.platform, shape, most, vllm_is_here)
    return contenders, [name for name in overflows if name not in served]


def row_of(
    tokens: int, heads: int, kind: str, us: Mapping[str, float], untimed: Mapping[str, str],
    left_out: Sequence[str] = (),
) -> Row:  # fmt: skip
    """Return the figures of one size with their ratio, which is None without one of ours, or vLLM's or a stand-in."""
    ours = _ours(us, left_out)
    theirs = [time for name, time in us.items() if name in RIVALS]
    ratio = min(theirs) / min(ours) if ours and {VLLM, STAND_IN} & us.keys() else None
    return Row(tokens, heads, kind, dict(us), dict(untimed), ratio, tuple(name for name in left_out if name in us))


def _ours(us: Mapping[str, float], left_out: Sequence[str]) -> list[float]:
    """Return the times of the kernels that count as ours."""
    return [time for name, time in us.items() if name not in (*RIVALS, *left_out)]


def shape_of(
    heads: int, kind: str, weights: str, *, nope: int = 128, rope: int = 64, latent: int = 512, act: str = "bfloat16"
) -> LayerShape:
    """Return a layer of so many heads on this GPU, in blocks of 64 rows; of DeepSeek's widths unless others are given.

    Where vLLM pads the heads for AITER's decode kernels, a kernel may lay the query out for as many.
    """
    import torch

    from vllm_aiter_mla.compat import layer as compat_layer
    from vllm_aiter_mla.kernels.aiter.contract import ARCHITECTURES
    from vllm_aiter_mla.kernels.device import card
    from vllm_aiter_mla.kernels.inputs import LayerShape
    from vllm_aiter_mla.kernels.platform import detect_platform
    from vllm_aiter_mla.kernels.vllm_own import may_take_parts

    fp8, arch, padded = detect_platform().fp8, card().arch, heads
    stored = fp8 if kind == "fp8" else getattr(torch, act)
    helper = compat_layer.padding_helper()
    if helper and arch in ARCHITECTURES and not may_take_parts(arch, heads, kind == "fp8"):
        padded = helper.get_actual_mla_num_heads(heads)
    return LayerShape(
        heads, nope, stored, stored, 64, False, getattr(torch, act), card().torch_device, latent, rope,
        Weights(weights).key(fp8), padded if padded != heads else 0,
    )  # fmt: skip


def kind_of(shape: LayerShape) -> str:
    """Return the type of the query and the cache, as a ``Row`` has it."""
    name = str(shape.cache_dtype).removeprefix("torch.")
    return {"bfloat16": "bf16", "float16": "fp16"}.get(name, "fp8")


def show(record: Measurement, console: Console) -> None:
    """Print the table, and why kernels were not timed."""
    rows, wrong = record.rows, record.wrong
    names = list(dict.fromkeys(name for row in rows for name in row.us))
    title = "; ".join(filter(None, (", ".join(record.machine.values()), f"{record.weights} weights")))
    rival = "stand-in" if STAND_IN in names else "rival"
    table = Table("T", "N", "type", *(f"{name}, us" for name in names), f"{rival} / ours", title=title)
    for row in rows:
        us = [f"{row.us[name]:.2f}" if name in row.us else "-" for name in names]
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}{' (slower)' if row.ratio < 1 else ''}"
        table.add_row(str(row.tokens), str(row.heads), row.kind, *us, ratio)
    console.print(table)
    if STAND_IN in names:
        _say(console, f"{STAND_IN}: in the place of vLLM's kernels, which are not here: as many launches, other code")
    for name, why in dict.fromkeys(untimed for row in rows for untimed in row.untimed.items()):
        if name not in wrong:
            _say(console, f"{name}: not timed: {why}")
    for name in dict.fromkeys(name for row in rows for name in row.left_out):
        _say(console, f"{name}: it {OVERFLOW}; kernel=auto leaves it out, and the last column too")
    for name, why in wrong.items():
        _say(console, f"WRONG, not timed: {name}: {why}")
    if record.stopped:
        _say(console, f"STOPPED: {record.stopped}")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)
