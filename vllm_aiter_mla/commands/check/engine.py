# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine on two sides, over a small random model or a checkpoint, and the distances between them.

``off`` has the user's options and the flag off, ``on`` has the same options and the flag on.
"""

from __future__ import annotations

import math
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_aiter_mla import files
from vllm_aiter_mla.commands import process
from vllm_aiter_mla.commands.check.context import Side
from vllm_aiter_mla.settings import FLAG_FIELD, NAMESPACE
from vllm_aiter_mla.status import status_files

if TYPE_CHECKING:
    from vllm_aiter_mla.commands.compat.engine import Request, Step

SIDES: tuple[Side, ...] = ("on", "off")
"""In the order in which they run: what is new is the first to fail."""
TOP1, MAX_DLOGPROB = 0.95, 0.5
"""What rounding explains: kernels that add up in another order give other tokens where two are nearly as likely.

Through Triton's interpreter a random model gave 97.6 % of equal tokens and at most 0.15; with the RoPE of prefill rows
lost, at most 81 % and at least 1.7. Over an fp8 cache the reference with another rounding gave 90 % and 0.94. The
request that was most apart had a mean of 0.11 where ``decode_against_prefill`` was 0.18; of 0.36 or more with the query
scaled twice, and of 0.41 or more with one wrong row in each decode step."""
DECODE_AGAINST_PREFILL = 0.5
"""Largest mean difference of log-probabilities between the steps that generated tokens and prefill of the same text.

On a CPU a small random model gave 0.02 (bf16 cache) and 0.17 (fp8), and 8.4 with mixed up channels in decode."""

ABOVE, MIXED = "above the decode limit", "prompts among decodes"
PREFILLS = (ABOVE, MIXED)
"""Steps with prefill rows: more tokens than the decode limit, and decode rows with prompts that it can hold."""
DECODING, ROUNDS, SHORTEST = 4, 11, 3
"""Requests that decode in a step of both; how often each step is timed; tokens of the prompts, if there may be enough.

A prompt of three tokens has a log-probability behind one rotated row of each layer. Behind many rows, and in deep
models, one other bit moves all that follows: over 23 tokens of two layers, another rounding of one value of q_pe and
k_pe in 4096 gave a mean |dlogprob| of 0.016, and three roundings of each value 0.025 (CPU engine, 2026-11-27)."""
MOST_UNEQUAL, SLOWER = 0.5, 1.02
"""Share of the prompts whose bytes may differ; ratio of times, on to off, above which ``check`` warns on a card.

What rounds q_pe and k_pe once gives the same bytes, whether or not it contracts multiply and add: the product of two
values of 16 bits is exact in float32. With a table in float32, which admission skips, 2 in 100,000 values differ; a
prompt has 8,256 of them in a layer of 128 heads, so about half of the prompts of four such layers would. Three
roundings change 32 % of the values. Of 8 prompts in the sandbox's engine, 8 had the same bytes with one rounding, 7
with another rounding of one value in 4096, and none with two or three roundings of each value."""


def prompts(seed: int, lengths: Sequence[int], new_tokens: int, arrivals: Sequence[int] = ()) -> list[Request]:
    """Return requests with random prompts of these lengths; all arrive at once by default."""
    rng = random.Random(seed)
    return [
        (f"{seed}-{i}", [rng.randrange(2, 512) for _ in range(length)], new_tokens, arrival)
        for i, (length, arrival) in enumerate(zip(lengths, arrivals or [0] * len(lengths), strict=True))
    ]


SCENARIOS = {
    # Prompts shorter than the decode limit, one at a time: prefill rows inside it.
    "short": prompts(2, [3, 11, 1, 7], 12, [0, 20, 40, 60]),
    # Requests that arrive while others decode: mixed batches within the decode limit.
    "mixed": prompts(3, [6, 4, 5, 3, 7, 2, 5, 4], 24, [0, 0, 4, 6, 6, 9, 12, 15]),
    # Prompts longer than a small decode limit: their prefill runs vLLM's own graph, their decode ours.
    "long": prompts(4, [60, 17, 33, 48], 12),
    # Sixteen requests that decode together.
    "concurrent": prompts(1, [5 + i % 4 for i in range(16)], 20),
}


@dataclass(slots=True)
class Figures:
    """One scenario of one run against its baseline."""

    tokens: int = 0  # generated tokens of the baseline
    tokens_equal: int = 0  # how many are the same, up to each request's first difference
    compared: int = 0  # positions whose context is the same in both runs
    agreed: int = 0  # of these, positions with the same likeliest token
    max_abs_dlogprob: float = 0.0  # largest difference of log-probability over the common top 5 of these positions
    mean_abs_dlogprob: float = 0.0  # their mean in the request where it is largest: others would hide a wrong row

    @property
    def top1_agreement(self) -> float:
        """Share of positions with the same context whose likeliest token is the same."""
        return self.agreed / self.compared if self.compared else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return asdict(self) | {"top1_agreement": self.top1_agreement}


def figures(base: Sequence[Sequence[Step]], other: Sequence[Sequence[Step]]) -> Figures:
    """Compare the requests of one scenario with those of the baseline."""
    found = Figures()
    for one, two in zip(base, other, strict=True):
        total, entries = 0.0, 0
        found.tokens += len(one)
        for (token, probs), (token2, probs2) in zip(one, two, strict=True):
            differences = [distance(probs[key], probs2[key]) for key in probs.keys() & probs2.keys()] or [math.inf]
            found.compared += 1
            found.max_abs_dlogprob = max([found.max_abs_dlogprob, *differences])
            total, entries = total + sum(differences), entries + len(differences)
            if token != token2:
                break  # from here on the two runs answer different questions
            found.agreed += 1
            found.tokens_equal += 1
        found.mean_abs_dlogprob = max(found.mean_abs_dlogprob, total / entries if entries else 0.0)
    return found


def explained(found: Figures, noise: float = 0.0) -> bool:
    """Return whether rounding explains what is apart.

    Over an fp8 cache another kernel's rounding before the cast moves a value by a step of fp8. There each request's
    mean difference must stay below ``noise``: what the cast does to vLLM's own decode, see ``decode_against_prefill``.
    A noise that fails that step explains nothing more.
    """
    if noise:
        return found.tokens > 0 and found.mean_abs_dlogprob <= min(noise, DECODE_AGAINST_PREFILL)
    return found.tokens > 0 and found.top1_agreement >= TOP1 and found.max_abs_dlogprob <= MAX_DLOGPROB


def distance(one: float, two: float) -> float:
    """Return the difference; infinite where one is not a number: ``max`` would pass over it."""
    found = abs(one - two)
    return math.inf if math.isnan(found) else found


def decode_against_prefill(answer: Mapping[str, Any]) -> float:
    """Return the mean difference between a token's log-probability when it was generated and in prefill."""
    found = []
    for name, requests in answer["scenarios"].items():
        for steps, prefilled in zip(requests, answer["prefill"][name], strict=True):
            for (token, probs), other in zip(steps, prefilled[-len(steps) :], strict=True):
                found.append(distance(probs[token], other))
    return sum(found) / len(found) if found else math.inf


def short_prompts(total: int, requests: int, longest: int) -> list[int]:
    """Return lengths of prompts with ``total`` tokens, as short as that number of requests allows; none if none fit."""
    count = min(total // SHORTEST, requests)
    if count < 1 or total > count * longest:
        return []
    return [total // count + (number < total % count) for number in range(count)]


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """One step with prefill rows, with the flag off and on."""

    prompts: int
    equal: int  # how many of them have the same bytes with the flag off and on
    repeated: int  # how many have them in two such steps with the flag off
    max_abs_dlogprob: float  # between off and on
    off_ms: float  # median time of such a step
    on_ms: float

    @property
    def explained(self) -> bool:
        """Return whether one rounding of q_pe and k_pe, or vLLM's own noise, explains what differs."""
        unequal, noise = self.prompts - self.equal, self.prompts - self.repeated
        return unequal <= MOST_UNEQUAL * self.prompts + noise and self.max_abs_dlogprob <= MAX_DLOGPROB

    @property
    def ratio(self) -> float:
        """Time with the flag on to that with the flag off."""
        return self.on_ms / self.off_ms

    def shown(self) -> str:
        """Return the figures in one line."""
        apart = f", max |dlogprob| {self.max_abs_dlogprob:.2g}" * (self.equal < self.prompts)
        again = f" (off, repeated: {self.repeated})" * (self.repeated < self.prompts)
        return (
            f"{self.equal} of {self.prompts} prompts have the same bytes{again}{apart}; "
            f"{self.off_ms:.2f} ms off, {self.on_ms:.2f} ms on, ratio {self.ratio:.3f}"
        )


def prefill_rows(answers: Mapping[Side, Any], name: str) -> PrefillRows | None:
    """Compare the steps of one name of ``PREFILLS``; None if no such batch fits."""
    (off, again), (on, _) = (answers[side]["batches"][name] for side in ("off", "on"))
    if not off:
        return None
    apart, noise = ([max(map(distance, *pair)) for pair in zip(off, other, strict=True)] for other in (on, again))
    off_ms, on_ms = (1e3 * statistics.median(answers[side]["seconds"][name]) for side in ("off", "on"))
    return PrefillRows(len(apart), apart.count(0), noise.count(0), max(apart), off_ms, on_ms)


def run(
    folder: Path, arguments: Sequence[str], side: Side, environment: Mapping[str, str],
    random_layers: int | None, limit: int,
) -> Any:  # fmt: skip
    """Run one engine in a process of its own.

    Args:
        folder: holds ``config.json``, and the checkpoint if it is to be loaded.
        arguments: of ``vllm serve``.
        side: whether the flag is off or on.
        environment: its variables.
        random_layers: how many layers of random weights to draw; None loads the checkpoint.
        limit: the decode limit in tokens, for batches on both sides of it.

    Returns:
        ``scenarios`` {name: requests of steps}, ``prefill`` {name: requests of log-probabilities}, ``batches`` {name of
        ``PREFILLS``: the log-probabilities of two equal prefills}, ``seconds`` {the same name: of each timed step},
        ``launches`` of a decode step, 0 on a CPU, ``status``: a ``RankStatus`` of each rank, ``left_out``: options of a
        deployment.

    Raises:
        EndedError: the engine's process ended without an answer.
        RuntimeError: a status file cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="aiter-mla-check-") as work:
        # A status file of another server must not be taken for this one's, and no graph of a broken run be kept.
        cache = Path(work)
        _share_model_notes(cache, environment)
        own = {"VLLM_CACHE_ROOT": str(cache), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        full = {**environment, **own}
        full.pop(status_files.RUN, None)
        asked = (str(folder), arguments, side, random_layers, limit)
        try:
            found = process.call(f"{__name__}:answer", *asked, environment=full)
        except process.EndedError as error:
            raise process.EndedError(f"of vLLM's engine, flag {side}, {error.how}", *error.lines) from error
        bad = list[str]()
        found["status"] = status_files.read_all(cache / "aiter_mla", "*", bad.append)
    if bad:
        raise RuntimeError("; ".join(bad))
    return found


def _share_model_notes(cache: Path, environment: Mapping[str, str]) -> None:
    """Let an engine find vLLM's notes on model classes: without them it spends ten seconds on inspecting one."""
    notes = files.cache_folder(environment).with_name("modelinfos")
    with suppress(OSError):  # a home that takes no file: the engine inspects for itself
        notes.mkdir(parents=True, exist_ok=True)
        (cache / notes.name).symlink_to(notes.resolve(), target_is_directory=True)


def answer(folder: str, arguments: Sequence[str], side: Side, random_layers: int | None, limit: int) -> dict[str, Any]:
    """Run one engine in this process; return what ``run`` returns, but for ``status``."""
    from vllm_aiter_mla.commands.compat import engine as compat_engine
    from vllm_aiter_mla.commands.compat.offline import load_plugins, serve_options

    load_plugins()
    parsed = serve_options([folder, *arguments])
    setattr(parsed.compilation_config.pass_config, FLAG_FIELD, side == "on")
    own = dict((parsed.additional_config or {}).get(NAMESPACE, {}))
    own.pop("enabled", None)
    parsed.additional_config = {**(parsed.additional_config or {}), NAMESPACE: own}
    left_out = compat_engine.leave_out(parsed)
    parsed.model = folder
    engine = compat_engine.start(parsed, random_layers)
    scenarios = {name: compat_engine.generate(engine, requests) for name, requests in SCENARIOS.items()}
    prefill = {}
    for name, requests in SCENARIOS.items():
        pairs = zip(requests, scenarios[name], strict=True)
        texts = [prompt + [token for token, _ in steps] for (_, prompt, *_), steps in pairs]
        prefill[name] = compat_engine.prompt_logprobs(engine, texts)
    batches, seconds = _prefill_rows(engine, limit)
    launches = compat_engine.launches_of_a_step(engine, SCENARIOS["concurrent"])
    return {
        "scenarios": scenarios, "prefill": prefill, "batches": batches, "seconds": seconds, "launches": launches,
        "left_out": left_out,
    }  # fmt: skip


def _prefill_rows(engine: Any, limit: int) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Return ``batches`` and ``seconds`` of an answer; see ``run``."""
    from vllm_aiter_mla.commands.compat import engine as compat_engine

    scheduler, longest = engine.vllm_config.scheduler_config, engine.model_config.max_model_len - 8
    budget, requests = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    decoding = min(requests // 2, DECODING)
    room = min(limit, budget) - decoding * (1 + engine.vllm_config.num_speculative_tokens)
    above = limit + 8 if limit + 8 <= budget else 0
    lengths = {
        ABOVE: short_prompts(above, requests, longest), MIXED: short_prompts(room, requests - decoding, longest)
    }  # fmt: skip
    batches, seconds = {}, {}
    for name in PREFILLS:
        others = SCENARIOS["concurrent"][: decoding if name == MIXED else 0]
        text, *timed = [[words for _, words, *_ in prompts(8 + turn, lengths[name], 1)] for turn in range(1 + ROUNDS)]
        with compat_engine.decoding(engine, others):
            batches[name] = [compat_engine.prompt_logprobs(engine, text) for _ in range(2)]
            seconds[name] = [compat_engine.seconds_of_prefill(engine, one) for one in timed if one]
    return batches, seconds
