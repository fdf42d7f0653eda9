# SPDX-License-Identifier: Apache-2.0
"""``vllm-aiter-mla measure``: time the kernels on this machine's GPU, as start-up does."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from vllm_aiter_mla import files
from vllm_aiter_mla.admission import OVERFLOW
from vllm_aiter_mla.commands import outputs

if TYPE_CHECKING:
    from vllm_aiter_mla.kernels.inputs import LayerShape
    from vllm_aiter_mla.serving.backends import Backends

TOKENS = (1, 8, 64, 256, 512)
HEADS = (8, 16, 128)
# A larger operand fills a card by itself.
MOST_TOKENS, MOST_HEADS = 65536, 1024
VLLM, STAND_IN = "vllm", "vllm-stand-in"
RIVALS = (VLLM, STAND_IN, "aiter-decode-tile", "aiter-one-launch")


class Kind(StrEnum):
    """Types of the query and the cache."""

    fp8 = "fp8"
    bf16 = "bf16"
    both = "both"


class Weights(StrEnum):
    """Formats of the absorb weights."""

    bf16 = "bf16"
    fp8 = "fp8"
    mxfp4 = "mxfp4"

    def key(self, fp8: Any) -> tuple[Any, ...]:
        """Return the format as ``AbsorbWeight.key`` names it; ``fp8`` is the card's type."""
        return {"bf16": ("plain",), "fp8": ("fp8", fp8), "mxfp4": ("mxfp4",)}[self.value]


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
    """A run of ``measure`` without ``--tune``; ``schemas.json`` says what the fields mean."""

    machine: dict[str, str]
    weights: str
    rows: tuple[Row, ...]
    wrong: dict[str, str]
    stopped: str
    evidence: files.Stamp = files.stamped("measure")


def measure(
    tokens: Annotated[
        list[int] | None, typer.Option("--tokens", "-t", min=1, max=MOST_TOKENS, help="Tokens; may be repeated.")
    ] = None,
    heads: Annotated[
        list[int] | None, typer.Option("--heads", "-n", min=1, max=MOST_HEADS, help="Heads; may be repeated.")
    ] = None,
    kind: Annotated[Kind, typer.Option("--type", help="Type of the query and the cache.")] = Kind.both,
    weights: Annotated[Weights, typer.Option(help="Format of the absorb weights.")] = Weights.bf16,
    tune: Annotated[
        bool, typer.Option("--tune", help="Time the Triton kernel's tiles; starts take the fastest.")
    ] = False,
    json: outputs.Json = None,
) -> None:
    """Time AITER's kernels, ours and vLLM's own on this GPU.

    Start-up does the same to choose between them. Each kernel is first compared with the reference; a wrong one is not
    timed. The table shows median microseconds per call in a replayed graph, and how much faster than the fastest rival
    our fastest kernel is. Rivals are vLLM's own kernels and two that never serve: AITER's single launch, and its op
    behind an fp8 product on tiles for few rows. On a card without vLLM's kernels and AITER the rival is a stand-in for
    vLLM's three launches, and the table says so. A kernel that overflows to NaN is timed, and does not count as ours.

    With --tune: the tiles of the Triton kernel, at 1, 2, 4 ... 1024 tokens unless -t says others. What is fastest goes
    to a file of this card and release of Triton, which the next start reads, checks and names in its status line.

    Exit status: 0; 1 if a kernel was wrong or the run stopped early; 2 if an option is wrong; 3 without a GPU.
    """
    import torch

    from vllm_aiter_mla.kernels.device import card

    kinds = [Kind.fp8, Kind.bf16] if kind is Kind.both else [kind]
    if not card().is_there():
        outputs.fail(
            f"measure: a GPU is needed, torch {torch.__version__} sees none; nothing was timed", outputs.NOT_LOOKED
        )
    with outputs.text_apart(json):
        if tune:
            from vllm_aiter_mla.commands import tune as tuning

            sizes = product(kinds, heads or HEADS)
            tiles, status = tuning.run(tokens, (shape_of(count, one.value, weights.value) for one, count in sizes))
            text = files.text_of(tiles)
        else:
            record = run(tokens or TOKENS, heads or HEADS, [one.value for one in kinds], weights.value)
            show(record)
            text, status = files.text_of(record), int(bool(record.stopped or record.wrong))
    if json is not None:
        outputs.write(json, text)
    raise typer.Exit(status)


def run(tokens: Sequence[int], heads: Sequence[int], kinds: Sequence[str], weights: str, **widths: Any) -> Measurement:
    """Time every size; return the record.

    A size that raises ends the run, and ``stopped`` says which and why. What was timed before is kept. ``wrong`` says
    of each kernel that failed its self-check where it did.

    Args:
        tokens: token counts of each layer.
        heads: of a rank.
        kinds: as ``Row.kind``.
        weights: the format of the absorb weights.
        widths: of the layers and their activation dtype, as ``shape_of`` takes them.
    """
    from vllm_aiter_mla.commands.compat.offline import load_plugins
    from vllm_aiter_mla.compat import config as compat_config
    from vllm_aiter_mla.kernels import stopwatch
    from vllm_aiter_mla.serving.backends import Backends, current_platform
    from vllm_aiter_mla.settings import Settings

    load_plugins()  # as in a server: they may bring the platform, or kernels
    machine, rows, wrong, stopped = stopwatch.machine(), list[Row](), dict[str, str](), ""
    backends = Backends(Settings(enabled=True), current_platform())
    with compat_config.as_current():
        for kind, count in product(kinds, heads):
            try:
                for row in rows_of(backends, shape_of(count, kind, weights, **widths), tokens, wrong):
                    rows.append(row)
            except Exception as error:  # out of memory for a large size, or a build that fails
                stopped = f"{count} heads, {kind}: {type(error).__name__}: {error}"
                break
    return Measurement(machine, weights, tuple(rows), wrong, stopped)


def rows_of(backends: Backends, shape: LayerShape, tokens: Sequence[int], wrong: dict[str, str]) -> Iterator[Row]:
    """Check and time the contenders on one layer shape; a kernel that fails its check goes to ``wrong``."""
    from vllm_aiter_mla.commands import rivals
    from vllm_aiter_mla.compat import layer as compat_layer
    from vllm_aiter_mla.kernels import stopwatch
    from vllm_aiter_mla.kernels.device import card
    from vllm_aiter_mla.kernels.inputs import synthetic_inputs
    from vllm_aiter_mla.serving import decision
    from vllm_aiter_mla.serving.decision import Checked
    from vllm_aiter_mla.startup import checks

    kind, overflows = kind_of(shape), dict[str, Checked]()
    found = {name: backends.get(name) for name in backends.names}
    for name, backend in found.items():
        if isinstance(backend, str) or backend.trusted:
            continue
        if (why := backend.refuse(synthetic_inputs(shape, 1))) is not None:
            found[name] = why
        elif not (checked := checks.self_check(name, backend, shape, (), max(tokens))).ok:
            found[name], wrong[name] = checked.message, f"{shape.heads} heads, {kind}: {checked.message}"
        elif checked.writes_nan:
            overflows[name] = Checked(writes_nan=True)
    facts = decision.LayerFacts(None, dict.fromkeys(overflows, decision.Offer()))
    served = decision.usable(facts, overflows, backends.settings)
    left_out = [name for name in overflows if name not in served]
    found |= rivals.checked(backends.platform, shape, max(tokens), not isinstance(found.get(VLLM, ""), str))
    able = {name: backend for name, backend in found.items() if not isinstance(backend, str)}
    untimed = {name: why for name, why in found.items() if isinstance(why, str)}
    helper = compat_layer.padding_helper() if shape.out_heads else None
    pad = helper and partial(helper.get_mla_padded_q, shape.heads)
    for count in tokens:
        calls = synthetic_inputs(shape, count)
        skipped = {name: why for name, backend in able.items() if (why := backend.refuse(calls)) is not None}
        weight, budget = synthetic_inputs(shape).weight, stopwatch.Budget(float("inf"))
        rounds = stopwatch.time_shape(able, shape, weight, [count], budget, pad=pad)[count]
        us = {name: statistics.median(one) for name, one in rounds.items()}
        yield row_of(count, shape.heads, kind, us, untimed | skipped, left_out)
        card().give_back()


def row_of(
    tokens: int, heads: int, kind: str, us: Mapping[str, float], untimed: Mapping[str, str],
    left_out: Sequence[str] = (),
) -> Row:  # fmt: skip
    """Return the figures of one size with their ratio, which is None without one of ours, or vLLM's or a stand-in."""
    ours = [one for name, one in us.items() if name not in (*RIVALS, *left_out)]
    theirs = [one for name, one in us.items() if name in RIVALS]
    ratio = min(theirs) / min(ours) if ours and {VLLM, STAND_IN} & us.keys() else None
    return Row(tokens, heads, kind, dict(us), dict(untimed), ratio, tuple(name for name in left_out if name in us))


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


def show(record: Measurement) -> None:
    """Print the table, and why kernels were not timed."""
    console = Console(markup=False, highlight=False, soft_wrap=True)
    rows, wrong = record.rows, record.wrong
    names = list(dict.fromkeys(name for row in rows for name in row.us))
    title = f"{', '.join(record.machine.values())}; {record.weights} weights"
    rival = "stand-in" if STAND_IN in names else "rival"
    table = Table("T", "N", "type", *(f"{name}, us" for name in names), f"{rival} / ours", title=title)
    for row in rows:
        us = [f"{row.us[name]:.2f}" if name in row.us else "-" for name in names]
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}{' (slower)' if row.ratio < 1 else ''}"
        table.add_row(str(row.tokens), str(row.heads), row.kind, *us, ratio)
    console.print(table)
    if STAND_IN in names:
        console.print(f"{STAND_IN}: in the place of vLLM's kernels, which are not here: as many launches, other code")
    for name, why in dict.fromkeys(one for row in rows for one in row.untimed.items() if one[0] not in wrong):
        console.print(f"{name}: not timed: {why}")
    for name in dict.fromkeys(name for row in rows for name in row.left_out):
        console.print(f"{name}: it {OVERFLOW}; kernel=auto leaves it out, and the last column too")
    for name, why in wrong.items():
        console.print(f"WRONG, not timed: {name} at {why}")
    if record.stopped:
        console.print(f"STOPPED at {record.stopped}")
