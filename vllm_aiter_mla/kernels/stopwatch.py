# SPDX-License-Identifier: Apache-2.0
"""Time the back ends on the card they run on.

``serving.decision`` chooses by the figures, and ``startup.timing`` keeps them for the next start.
"""

import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice

import torch

from vllm_aiter_mla import packages
from vllm_aiter_mla.kernels.absorb import AbsorbWeight
from vllm_aiter_mla.kernels.backend import KernelBackend, Run
from vllm_aiter_mla.kernels.device import card
from vllm_aiter_mla.kernels.inputs import DecodeInputs, LayerShape, synthetic_inputs

BUDGET_S = 3.0
"""Seconds of timing per rank, for all its layer shapes. Loading and compiling kernels does not count, because the
kernels that serve have to be loaded in any case."""
ROUNDS = 11
DISCARDED = 2  # rounds before the first that counts: they meet cold instruction caches and a slow clock
MIN_CALLS = 32  # calls in a graph, at least, so that the two events weigh nothing
FEW_CALLS = 128  # a graph of fewer is replayed once ahead of the first event: its launch would count by 1 % and more
QUERIES = 8  # of one measurement, in turn: a step's query has just been written, and lies in no cache of every die
FIRST_TIMED = (1, 8, 64, 256)  # what a budget that runs out has covered
MAX_TIMED_TOKENS = 1024  # between this and the last token count nothing is timed
# Operand sets of one measurement: as many as do not fit in the caches, and no more than a graph can hold comfortably.
MIN_SETS, MAX_SETS = 8, 400
MOST_RESULTS = 256 << 20  # bytes that results of calls beyond the sets needed may add, and copies of the query

Replay = Callable[[], float]
"""Runs what was recorded once; microseconds per call."""
Rounds = dict[int, dict[str, list[float]]]
"""Microseconds per call by token count and candidate, one figure per round; rounds of one count are interleaved."""


class OverBudgetError(RuntimeError):
    """The budget is spent; the message says how far the timing came."""


@dataclass(slots=True)
class Budget:
    """Seconds of timing that are left to a rank."""

    left: float = BUDGET_S


# How a figure is taken.


def record(run: Run, calls: Sequence[DecodeInputs]) -> Replay:
    """Capture a graph of one call per element of ``calls``; ``run`` has run before, so that nothing compiles here.

    The results are kept so that each call has its own query buffer: one buffer for all would stay in the cache.
    """
    kept: list[torch.Tensor] = []

    def make() -> None:
        kept[:] = [run(inputs) for inputs in calls]

    replay = card().record(make)

    def timed() -> float:
        if len(kept) < FEW_CALLS:
            replay()  # keeps the device busy while the host launches what is timed
        return card().time_us(replay) / len(kept)

    return timed


def looped(run: Run, calls: Sequence[DecodeInputs]) -> Replay:
    """Make the calls one by one without a graph, as a step does that is not captured: the host's time counts."""
    return lambda: card().time_us(lambda: [run(inputs) for inputs in calls]) / len(calls)


def interleaved(
    runs: Mapping[str, Run], calls: Sequence[DecodeInputs], timed: Callable[[Run, Sequence[DecodeInputs]], Replay],
    budget: Budget,
) -> dict[str, list[float]] | None:  # fmt: skip
    """Return microseconds per call by name, one figure a round; None once the budget is spent.

    Each round replays each once, so a drift meets all. ``timed`` is ``record`` or ``looped``; its work costs no budget.
    """
    replays = {name: timed(run, calls) for name, run in runs.items()}
    samples: dict[str, list[float]] = {name: [] for name in replays}
    started = card().now()
    try:
        for _ in range(DISCARDED + ROUNDS):
            if card().now() - started > budget.left:
                return None
            for name, replay in replays.items():
                samples[name].append(replay())
    finally:
        budget.left -= card().now() - started
    return {name: values[DISCARDED:] for name, values in samples.items()}


# What is timed. In a real step a layer's weight comes from memory and its query from the cache.


def sets_needed(bytes_once: int, resident: int) -> int:
    """Return how many operand sets are at least twice what the caches hold, so that none is found there again.

    At most ``MAX_SETS``: sets of less than 1.3 MiB may stay in a cache of 256 MiB. Reading one from there instead of
    from memory saves a fraction of a microsecond, in every kernel alike.
    """
    return max(MIN_SETS, min(MAX_SETS, -(-2 * resident // max(bytes_once, 1))))


def bytes_of(weight: AbsorbWeight) -> int:
    """Return the bytes of everything that the product reads of the weight."""
    return sum(tensor.numel() * tensor.itemsize for _, tensor in weight.tensors)


def cold_weights(weight: AbsorbWeight, resident: int) -> list[AbsorbWeight]:
    """Return ``weight`` and copies of it, strides kept, together too large for caches of ``resident`` bytes."""

    def copied() -> AbsorbWeight:
        scale, values = weight.scale, weight.values
        # A clone closes gaps, as vLLM's 16-bit W_UK_T has them between its heads: W_UV lies there.
        spread = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device=values.device)
        return replace(weight, values=spread.copy_(values), scale=None if scale is None else scale.clone())

    return [weight, *(copied() for _ in range(sets_needed(bytes_of(weight), resident) - 1))]


def calls_of(shape: LayerShape, weights: Sequence[AbsorbWeight], tokens: int, resident: int) -> list[DecodeInputs]:
    """Return calls with cold weights, one after the other; ``QUERIES`` queries take turns, the other rows are shared.

    Draws from its own generator on the device.
    """
    generator = torch.Generator(device=shape.device).manual_seed(tokens)
    # A kernel that has a variant for large caches is timed by it: the slower one, and the one of most servers.
    one = synthetic_inputs(shape, tokens, padded=None, generator=generator, large=True)
    # A query of hundreds of MiB lies in no cache anyway, and the card may have little memory left.
    queries = [one.q, *(one.q.clone() for _ in range(min(QUERIES - 1, MOST_RESULTS // one.q.nbytes)))]
    count = calls_needed(shape, bytes_of(weights[0]), tokens, resident)
    pairs = islice(zip(cycle(weights), cycle(queries), strict=False), count)
    return [replace(one, weight=weight, q=query) for weight, query in pairs]


def calls_needed(shape: LayerShape, weight_bytes: int, tokens: int, resident: int) -> int:
    """Return how many calls one measurement makes, so that neither weights nor results stay in the caches."""
    result = tokens * shape.heads * (shape.latent + shape.rope) * shape.out_dtype.itemsize
    return max(sets_needed(weight_bytes + result, resident), min(MIN_CALLS, MOST_RESULTS // result))


def token_counts(limit: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... up to 1024, below ``limit``, and ``limit`` itself: 11 for 1024, 12 for more."""
    powers = (1 << power for power in range(MAX_TIMED_TOKENS.bit_length()))
    return (*(tokens for tokens in powers if tokens < limit), limit)


def time_shape(
    backends: Mapping[str, KernelBackend],
    shape: LayerShape,
    weight: AbsorbWeight,
    counts: Sequence[int],
    budget: Budget,
    graphs: bool = True,
    pad: Callable[[torch.Tensor], torch.Tensor] | None = None,
    rounds: Rounds | None = None,
) -> Rounds:
    """Time ``backends`` on layers of ``shape``, as many token counts as the budget allows, ``FIRST_TIMED`` first.

    A back end is left out at a token count that it does not take. Loading, compiling and capturing cost no budget.

    Args:
        backends: by name; checked already.
        shape: the layer.
        weight: a layer's own, so that its strides are those of serving.
        counts: token counts.
        budget: of this rank; what is spent here is taken from it.
        graphs: whether decode steps are captured; otherwise the calls are made one by one, as in serving.
        pad: what vLLM does to a query whose heads its decode kernel does not take; it belongs to a call's time.
        rounds: takes the figures of each count at once, so that a count that raises costs none of those before it.

    Raises:
        OverBudgetError: the budget was spent before one token count was timed.
        Exception: whatever a kernel or the device raises.
    """
    resident = card().cache_bytes()
    weights = cold_weights(weight, resident)
    rounds = {} if rounds is None else rounds

    for tokens in sorted(counts, key=lambda count: (count not in FIRST_TIMED, count)):
        calls = calls_of(shape, weights, tokens, resident)
        found = interleaved(_loaded(backends, calls, pad), calls, record if graphs else looped, budget)
        if found is not None:
            rounds[tokens] = found
        elif rounds:
            break
        else:
            raise OverBudgetError(f"more than the {BUDGET_S:g} s that it may take, before one token count was timed")
    return dict(sorted(rounds.items()))


def _loaded(
    backends: Mapping[str, KernelBackend],
    calls: Sequence[DecodeInputs],
    pad: Callable[[torch.Tensor], torch.Tensor] | None,
) -> dict[str, Run]:
    """What runs such calls, by name; it has run once over each weight, so that nothing is compiled in a capture.

    Each weight has a binding of its own, as each layer has in serving: another weight would be read anew in each call.
    """
    first_calls = {id(call.weight): call for call in reversed(calls)}

    def padded(runs: Mapping[int, Run], inputs: DecodeInputs) -> torch.Tensor:
        query = runs[id(inputs.weight)](inputs)
        return query if pad is None or query.shape[1] == inputs.out_heads else pad(query)

    runs = dict[str, Run]()
    for name, backend in backends.items():
        bound = {weight: backend.bind(call) for weight, call in first_calls.items()}
        found = {weight: binding.run for weight, binding in bound.items() if not isinstance(binding, str)}
        if len(found) == len(bound):
            runs[name] = partial(padded, found)
    for run in runs.values():
        for call in first_calls.values():
            run(call)
    card().synchronize()
    return runs


def medians(rounds: Rounds) -> dict[int, dict[str, float]]:
    """Return microseconds per call by token count and candidate."""
    return {tokens: {name: statistics.median(v) for name, v in by.items()} for tokens, by in rounds.items()}


def triton_release() -> str:
    """Return the release of Triton that is installed, "none", or why it cannot be imported."""
    try:  # ROCm's builds have their own distribution names, so the module is asked
        import triton

        return str(triton.__version__)
    except Exception as error:
        broken = f"not importable: {type(error).__name__}: {error}"
        return "none" if packages.missing_package(error) == "triton" else broken


def machine() -> dict[str, str]:
    """Return card and versions, which belong to any figure. Needs a GPU."""
    return {
        "card": card().name(),
        "torch": str(torch.__version__),
        "triton": triton_release(),
        "runtime": card().built_for,
        "python": platform.python_version(),
    }
