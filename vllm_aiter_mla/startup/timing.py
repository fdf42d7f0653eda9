# SPDX-License-Identifier: Apache-2.0
"""Time the kernels at start-up on the user's card: each rank chooses by its own figures, kept for its next start.

A kernel of ours runs where all ranks of the engine have chosen it. ``decision`` chooses; the ranks exchange choices.

Where no kernel could be timed vLLM's own run, code ``not_timed``, and one line says so: that ours are never slower is a
promise that only figures can keep. Only the settings and the device's type decide whether the ranks exchange anything:
a rank that waits for another one that never comes would hang.
"""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue

from vllm_aiter_mla import files
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import layer as compat_layer
from vllm_aiter_mla.compat import log, ranks
from vllm_aiter_mla.kernels import stopwatch
from vllm_aiter_mla.kernels.device import card
from vllm_aiter_mla.kernels.inputs import meta_inputs
from vllm_aiter_mla.kernels.stopwatch import Rounds
from vllm_aiter_mla.serving.decision import VLLM, Figures, Span, decide
from vllm_aiter_mla.serving.layer import Layer
from vllm_aiter_mla.settings import Settings
from vllm_aiter_mla.status.record import Timed

VLLMS = "vLLM's own kernels run"
Choice = tuple[Span, ...]
"""What a rank runs on layers of a shape by its own figures."""
DRIVERS = (Path("/sys/module/amdgpu/version"), Path("/sys/module/nvidia/version"))


@dataclass(frozen=True, slots=True)
class Taken:
    """What a rank has timed of one layer shape."""

    rounds: Rounds = field(default_factory=dict)  # empty if nothing could be timed, or is to be chosen
    why: str = ""  # it could not be timed
    key: Mapping[str, Any] = field(default_factory=dict)  # what its figures are kept by; empty if nothing is to choose
    kept: Rounds = field(default_factory=dict)  # those of ``rounds`` that earlier starts have taken
    since: str = ""  # when the last of them were taken; empty if this start timed something


@dataclass(frozen=True, slots=True)
class Answer:
    """What one rank hands over to the others."""

    chosen: dict[str, Choice] = field(default_factory=dict)  # by layer shape, in words; () if it was not timed
    troubles: tuple[str, ...] = ()  # why shapes could not be timed
    why: str = ""  # the rank could not time at all


def time_kernels(config: Any, settings: Settings, layers: Sequence[Layer], limit: int | None, rank: int) -> None:
    """Time the kernels of this rank's layers, and let each layer run what all ranks of the engine have chosen.

    Never raises, and takes part in the exchange whatever happens here.

    Args:
        config: the worker's ``VllmConfig``.
        settings: the engine's options.
        layers: the MLA layers of this rank.
        limit: the decode limit; None if this rank's kernels could not be checked.
        rank: of this worker.
    """
    try:
        if not _is_asked_for(config, settings):
            return
    except Exception as error:  # alike on every rank: nobody waits
        log.say_once(logging.WARNING, f"the kernels could not be timed: {_line(error)}; {VLLMS}")
        _leave_untimed(layers, _line(error))
        return
    budget, groups, taken = stopwatch.Budget(), dict[str, list[Layer]](), dict[str, Taken]()
    answer, chosen, place = Answer(why="its kernels could not be checked"), dict[str, tuple[Choice, ...]](), 0
    try:
        if limit is not None:
            # No batch is larger, whatever limit the user has set.
            counts = stopwatch.token_counts(min(limit, config.scheduler_config.max_num_batched_tokens))
            for layer in layers:
                if layer.usable():
                    groups.setdefault(layer.shape().in_words(), []).append(layer)
            for text, (first, *_) in groups.items():
                taken[text] = _figures(config, first, counts, budget, rank)
            answer = _answer(groups, taken)
    except Exception as error:
        answer = Answer(why=_line(error))
    try:
        place, answers = ranks.exchange(answer)
        chosen, troubles = agree(answers)
        for text in groups.keys() & chosen.keys():
            _apply(text, groups[text], taken[text], chosen[text])
    except Exception as error:
        troubles, place = [f"rank {rank}: {_line(error)}"], 0  # which says so, whichever rank it is
    _leave_untimed(layers, next(iter(troubles), "vLLM's own kernels cannot be timed here"))
    num_timed = sum(bool(one.key) and not one.since for one in taken.values())
    # Only here: an exception's traceback holds what was allocated until it has been handled.
    if num_timed:
        with log.warned("the memory of the timing could not be given back"):
            card().give_back()
    if place == 0:
        _say(troubles, num_timed, stopwatch.BUDGET_S - budget.left, len(chosen))


def _leave_untimed(layers: Sequence[Layer], why: str) -> None:
    """Tell the layers whose kernels were to be timed, and were not, that there are no figures."""
    for layer in layers:
        if layer.backends.settings.measures and VLLM in layer.backends.names and not layer.is_timed:
            layer.timed(Figures(why=why))


def hand_over_nothing(config: Any, settings: Settings) -> None:
    """Take part in the exchange of ``time_kernels`` for a rank whose model could not be loaded."""
    if _is_asked_for(config, settings):
        ranks.exchange(Answer(why="its model could not be loaded"))


def _is_asked_for(config: Any, settings: Settings) -> bool:
    """Whether to time at all, from facts that every rank of the engine reads alike."""
    return settings.measures and config.device_config.device_type == card().torch_device


def _answer(groups: Mapping[str, Sequence[Layer]], taken: Mapping[str, Taken]) -> Answer:
    """Return what this rank chooses by its own figures."""
    chosen = dict[str, Choice]()
    for text, (first, *_) in groups.items():
        rounds, chosen[text] = taken[text].rounds, ()
        if rounds:
            decided = decide(first.facts(), first.checks, Figures(rounds), first.backends.settings)
            chosen[text] = decided.kernels or _vllms(rounds)
    return Answer(chosen, tuple(one.why for one in taken.values() if one.why))


def _figures(config: Any, layer: Layer, counts: Sequence[int], budget: stopwatch.Budget, rank: int) -> Taken:
    """Return the figures of a layer's shape, of earlier starts or timed now; none if there is nothing to choose."""
    backends, shape = layer.usable(), layer.shape()
    if len(backends) < 2 or VLLM not in backends:
        return Taken()
    machine = about() | {"code": files.fingerprint(), "shape": shape.in_words()}
    # What vLLM compiles decides what its own sequence costs.
    graphs = bool(compat_config.graph_sizes(config).full)
    options = {"vllm": compat_config.compiled_as(config), "graphs": graphs}
    # Each rank has a card, and figures, of its own.
    place = {"engine": compat_config.metric_labels(config)["engine"], "rank": rank}
    # Which variants are timed: another tile of a kernel has other figures.
    calls = [meta_inputs(shape, count) for count in counts]
    kernels = {name: [backend.kernel_of(call) for call in calls] for name, backend in backends.items()}
    key = machine | options | place | {"counts": list(counts), "candidates": kernels}
    kept, since = Rounds(), ""
    if layer.backends.settings.measure != "again":
        with log.warned("the kept figures could not be read"):
            kept, since = read(compat_config.cache_folder(), key)
    left = [count for count in counts if count not in kept]
    if not left:
        return Taken(kept, "", key, kept, since)
    timed, why = Rounds(), ""
    try:
        with card().fork_rng(), compat_config.as_current(config):
            pad = partial(compat_layer.pad_query, layer.module) if layer.out_heads else None
            stopwatch.time_shape(backends, shape, layer.weight(), left, budget, graphs, pad, timed)
    except (stopwatch.OverBudgetError, torch.OutOfMemoryError) as error:  # says nothing against what was timed
        why = _line(error)
    except Exception as error:
        return Taken({}, _line(error), key, kept)
    found = dict(sorted((kept | timed).items()))
    return Taken(found, "" if found else why, key, kept, "" if timed else since)


def _vllms(rounds: Rounds) -> Choice:
    return (Span(1, max(rounds), VLLM),)


def agree(answers: Sequence[Answer]) -> tuple[dict[str, tuple[Choice, ...]], list[str]]:
    """Return what each rank has chosen by layer shape, and why shapes are missing. Pure, so every rank gets the same.

    A shape is missing if one of its ranks could not time it. All are if a rank does not know its shapes. A rank without
    layers of a shape, as in a pipeline, does not count for it.
    """
    told = ((rank, why) for rank, answer in enumerate(answers) for why in (answer.why, *answer.troubles))
    troubles = [f"rank {rank}: {why}" for rank, why in told if why]
    if any(answer.why for answer in answers):
        return {}, troubles
    shapes = dict.fromkeys(text for answer in answers for text in answer.chosen)
    chosen = {text: tuple(answer.chosen[text] for answer in answers if text in answer.chosen) for text in shapes}
    return {text: choices for text, choices in chosen.items() if all(choices)}, troubles


def _apply(text: str, group: Sequence[Layer], own: Taken, chosen: tuple[Choice, ...]) -> None:
    """Let the layers of a shape run what this rank's figures and the choices of all ranks say."""
    for layer in group:
        layer.timed(Figures(own.rounds, ranks=chosen))
    names = tuple(layer.name for layer in group)
    runs = group[0].decision.kernels or _vllms(own.rounds)
    group[0].engine_status.measured.append(Timed(text, names, runs, stopwatch.medians(own.rounds), own.since))
    if own.rounds != own.kept:
        with log.warned("the measured figures could not be kept"):
            write(compat_config.cache_folder(), own.key, own.rounds)


def _say(troubles: Sequence[str], num_timed: int, seconds: float, num_usable: int) -> None:
    if troubles:
        more = f" (and {len(troubles) - 1} more)" if len(troubles) > 1 else ""
        rest = f" but for {num_usable} layer shape(s)" if num_usable else ""
        log.say_once(logging.WARNING, f"the kernels could not be timed: {troubles[0]}{more}; {VLLMS}{rest}")
    elif num_timed:
        spent = f"{seconds:.1f} s of at most {stopwatch.BUDGET_S:g} s"
        log.say(logging.INFO, f"kernels timed on this card in {spent}: {num_timed} layer shape(s)")


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:300]


# What is kept for the next start.


@dataclass(frozen=True)
class Measured:
    """The figures that a start keeps for the next one.

    Raises:
        ValueError: a count lacks vLLM's figures, or its candidates have not been timed equally often.
    """

    key: dict[str, JsonValue]  # of card, driver, versions and layer shape
    rounds: Rounds
    evidence: files.Stamp = files.stamped("measured")

    def __post_init__(self) -> None:
        for tokens, by in self.rounds.items():
            if VLLM not in by or len({len(figures) for figures in by.values()}) != 1 or not by[VLLM]:
                raise ValueError(f"figures are missing at {tokens} tokens")


def path_of(folder: Path, key: Mapping[str, Any]) -> Path:
    """Return the file for what ``key`` says of card, driver, versions and layer shape."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / f"measured-{digest[:16]}.json"


def read(folder: Path, key: Mapping[str, Any]) -> tuple[Rounds, str]:
    """Return the figures kept for ``key`` and when they were taken; none without a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else.
    """
    try:
        found = files.read(Measured, path_of(folder, key))
    except FileNotFoundError:
        return {}, ""
    return (found.rounds, found.evidence.time) if found.key == dict(key) else ({}, "")


def write(folder: Path, key: Mapping[str, Any], rounds: Rounds) -> None:
    """Keep ``rounds`` for ``key``, in one step.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files.write(path_of(folder, key), Measured(dict(key), rounds))


def about() -> dict[str, str | None]:
    """Return ``machine`` with units, driver, plugin, vLLM, AITER and host: if one differs, the figures may differ."""
    stamp = files.stamp("measured")
    versions = {name: getattr(stamp, name) for name in ("plugin", "vllm", "aiter", "host")}
    # A partition of a card has fewer units, and may have the name of the whole.
    return stopwatch.machine() | {"units": str(card().units()), "driver": _driver()} | versions


def _driver() -> str:
    """The driver's version; the kernel's for one that came with it."""
    for path in DRIVERS:
        with contextlib.suppress(OSError):
            return path.read_text().strip()
    return os.uname().release
