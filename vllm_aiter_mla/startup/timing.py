# SPDX-License-Identifier: Apache-2.0
"""Time the kernels at start-up on the user's card: one choice for all ranks of an engine, kept for the next start.

Where no kernel could be timed vLLM's own run, code ``not_timed``, and one line says so: that ours are never slower is a
promise that only figures can keep. Only the settings and the device's type decide whether the ranks exchange their
figures: a rank that waits for another one that never comes would hang.
"""

import contextlib
import hashlib
import json
import logging
import os
import statistics
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
from vllm_aiter_mla.serving import decision
from vllm_aiter_mla.serving.decision import VLLM
from vllm_aiter_mla.serving.layer import Layer
from vllm_aiter_mla.status.record import Timed

VLLMS = "vLLM's own kernels run"
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

    kinds: dict[str, Taken] = field(default_factory=dict)  # by layer shape, in words
    why: str = ""  # the rank could not time at all
    seconds: float = 0.0  # that the timing took

    @property
    def timed(self) -> int:
        """How many layer shapes this start has timed."""
        return sum(bool(one.key) and not one.since for one in self.kinds.values())


def time_kernels(config: Any, layers: Sequence[Layer], limit: int | None) -> None:
    """Time the kernels of this rank's layers, agree with the other ranks, and let each layer run the fastest.

    Never raises, and takes part in the exchange whatever happens here.

    Args:
        config: the worker's ``VllmConfig``.
        layers: the MLA layers of this rank.
        limit: the decode limit; None if this rank's kernels could not be checked.
    """
    try:
        if not _is_asked_for(config):
            return
    except Exception as error:  # alike on every rank: nobody waits
        log.say_once(logging.WARNING, f"the kernels could not be timed: {_line(error)}; {VLLMS}")
        _leave_untimed(layers, _line(error))
        return
    groups: dict[str, list[Layer]] = {}
    answer = _timed(config, layers, limit, groups)
    try:
        place, answers = ranks.exchange(answer)
    except Exception as error:
        place, answers = 0, [Answer(why=f"the ranks could not exchange their figures: {_line(error)}")]
    tables: dict[str, Rounds] = {}
    try:
        tables, troubles = agree(answers)
        for text, group in groups.items():
            _apply(text, group, answer.kinds.get(text, Taken()), tables.get(text, {}))
    except Exception as error:
        troubles = [f"rank {place}: {_line(error)}"]
        log.say_once(logging.WARNING, f"the measured choice could not be used: {_line(error)}; {VLLMS}")
    _leave_untimed(layers, next(iter(troubles), "vLLM's own kernels cannot be timed here"))
    if place == 0:
        _say(troubles, answer, len(tables))


def _leave_untimed(layers: Sequence[Layer], why: str) -> None:
    """Tell the layers whose kernels were to be timed, and were not, that there are no figures."""
    for layer in layers:
        if layer.backends.settings.measures and VLLM in layer.backends.names and not layer.is_timed:
            layer.timed(decision.Figures(why=why))


def hand_over_nothing(config: Any) -> None:
    """Take part in the exchange of ``time_kernels`` for a rank whose model could not be loaded."""
    if _is_asked_for(config):
        ranks.exchange(Answer(why="its model could not be loaded"))


def _is_asked_for(config: Any) -> bool:
    """Whether to time at all, from facts that every rank of the engine reads alike."""
    return compat_config.settings_of(config).measures and config.device_config.device_type == card().torch_device


def _timed(config: Any, layers: Sequence[Layer], limit: int | None, groups: dict[str, list[Layer]]) -> Answer:
    """Return what this rank hands over; fill ``groups`` with its layers by shape, also if the timing raises."""
    if limit is None:
        return Answer(why="its kernels could not be checked")
    budget, kinds, why = stopwatch.Budget(), dict[str, Taken](), ""
    try:
        # No batch is larger, whatever limit the user has set.
        counts = stopwatch.token_counts(min(limit, config.scheduler_config.max_num_batched_tokens))
        for layer in layers:
            if layer.usable():
                groups.setdefault(layer.shape().in_words(), []).append(layer)
        for text, group in groups.items():
            kinds[text] = _figures(config, group[0], counts, budget)
    except Exception as error:
        why = _line(error)
    answer = Answer(kinds, why, stopwatch.BUDGET_S - budget.left)
    # Only here: an exception's traceback holds what was allocated until it has been handled.
    if answer.timed:
        with log.warned("the memory of the timing could not be given back"):
            card().give_back()
    return answer


def _figures(config: Any, layer: Layer, counts: Sequence[int], budget: stopwatch.Budget) -> Taken:
    """Return the figures of a layer's shape, of earlier starts or timed now; none if there is nothing to choose."""
    backends, shape = layer.usable(), layer.shape()
    if len(backends) < 2 or VLLM not in backends:
        return Taken()
    machine = about() | {"code": files.fingerprint(), "shape": shape.in_words()}
    # What vLLM compiles decides what its own sequence costs.
    settings, graphs = compat_config.settings_of(config), bool(compat_config.full_graphs(config.compilation_config))
    options = {"vllm": compat_config.compiled_as(config), "graphs": graphs}
    # Which variants are timed: another tile of a kernel has other figures.
    calls = [meta_inputs(shape, count) for count in counts]
    kernels = {name: [backend.kernel_of(call) for call in calls] for name, backend in backends.items()}
    key = machine | options | {"counts": list(counts), "candidates": kernels}
    kept, since = Rounds(), ""
    if settings.measure != "again":
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
    found = kept | timed
    return Taken(found, "" if found else why, key, kept, "" if timed else since)


def agree(answers: Sequence[Answer]) -> tuple[dict[str, Rounds], list[str]]:
    """Return one table per layer shape for all ranks, and why others have none. Pure, so every rank gets the same.

    A shape has no table if one of its ranks could not time it. No shape has one if a rank does not know its shapes.
    A rank without layers of a shape, as in a pipeline, does not count for it.
    """
    troubles = [f"rank {rank}: {answer.why}" for rank, answer in enumerate(answers) if answer.why]
    tables: dict[str, list[Rounds]] = {}
    for rank, answer in enumerate(answers):
        for text, one in answer.kinds.items():
            if one.why:
                troubles.append(f"rank {rank}: {one.why}")
            tables.setdefault(text, []).append(one.rounds)
    if any(answer.why for answer in answers):
        return {}, troubles
    merged = {text: slowest(found) for text, found in tables.items()}
    return {text: rounds for text, rounds in merged.items() if rounds}, troubles


def slowest(tables: Sequence[Rounds]) -> Rounds:
    """Merge the figures of all ranks: what all of them have timed, each figure from the rank that is slowest there.

    Ranks of a tensor-parallel group wait for one another, so the slowest decides how long a layer takes.
    """
    first, *others = tables
    merged: Rounds = {}
    for tokens in sorted(set(first).intersection(*others)):
        names = [name for name in first[tokens] if all(name in table[tokens] for table in others)]
        merged[tokens] = {name: max((t[tokens][name] for t in tables), key=statistics.median) for name in names}
    return merged


def _apply(text: str, group: Sequence[Layer], own: Taken, rounds: Rounds) -> None:
    """Let the layers of a shape run what the figures say."""
    if not rounds:
        return
    for layer in group:
        layer.timed(decision.Figures(rounds))
    names = tuple(layer.name for layer in group)
    chosen = group[0].decision.kernels or ((1, max(rounds), VLLM),)
    group[0].engine_status.measured.append(Timed(text, names, chosen, stopwatch.medians(rounds), own.since))
    if rounds != own.kept:
        with log.warned("the measured figures could not be kept"):
            write(compat_config.cache_folder(), own.key, rounds)


def _say(troubles: Sequence[str], answer: Answer, num_timed_shapes: int) -> None:
    if troubles:
        more = f" (and {len(troubles) - 1} more)" if len(troubles) > 1 else ""
        rest = f" but for {num_timed_shapes} layer shape(s)" if num_timed_shapes else ""
        log.say_once(logging.WARNING, f"the kernels could not be timed: {troubles[0]}{more}; {VLLMS}{rest}")
    elif answer.timed:
        spent = f"{answer.seconds:.1f} s of at most {stopwatch.BUDGET_S:g} s"
        log.say(logging.INFO, f"kernels timed on this card in {spent}: {answer.timed} layer shape(s)")


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
