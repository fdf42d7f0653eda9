# SPDX-License-Identifier: Apache-2.0
"""Time the kernels at start-up on the user's card: one choice for all ranks of an engine, kept for the next start.

Kernels that cannot be timed keep the static order, and one line says so. That is not an error in strict mode either,
because nothing is wrong then. Only the settings and the device's type decide whether the ranks exchange their figures:
a rank that waits for another one that never comes would hang.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vllm_aiter_mla import files, status
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import layer as compat_layer
from vllm_aiter_mla.compat import log
from vllm_aiter_mla.kernels import measure
from vllm_aiter_mla.kernels.device import card
from vllm_aiter_mla.kernels.inputs import LayerShape
from vllm_aiter_mla.layer import Layer

STATIC = "the static order of kernels stands"


@dataclass(slots=True)
class _Kind:
    """Layers of one shape in this process."""

    shape: LayerShape  # theirs; the pairing of the rotation does not matter for the time it takes
    layers: list[Layer] = field(default_factory=list)  # all of them
    key: dict[str, Any] = field(default_factory=dict)  # what its figures are kept by; empty if nothing is to be timed
    # The figures of earlier starts; those of some token counts if the budget ran out
    kept: measure.Rounds = field(default_factory=dict)
    since: str = ""  # when the last of them were taken; empty if this start timed something


def choose(config: Any, layers: Sequence[Layer], limit: int | None) -> None:
    """Time the kernels of this rank's layers, agree with the other ranks, and let each layer run the fastest.

    Never raises, and takes part in the exchange whatever happens here.

    Args:
        config: the worker's ``VllmConfig``.
        layers: the MLA layers of this rank.
        limit: the decode limit; None if this rank's kernels could not be checked.
    """
    if not _is_asked_for(config):
        return
    found: dict[str, _Kind] = {}
    answer = _timed(config, layers, limit, found)
    try:
        place, answers = log.exchange(answer)
    except Exception as error:
        answers = [{"kinds": {}, "why": f"the ranks could not exchange their figures: {_line(error)}"}]
        place = 0
    figures: dict[str, measure.Rounds] = {}
    try:
        figures, troubles = agree(answers)
        for text, kind in found.items():
            _apply(text, kind, figures.get(text, {}))
    except Exception as error:
        troubles = [f"rank {place}: {_line(error)}"]
        log.say_once(logging.WARNING, f"the measured choice could not be used: {_line(error)}; {STATIC}")
    if place == 0:
        _say(troubles, answer, len(figures))


def _is_asked_for(config: Any) -> bool:
    """Whether to time at all, from facts that every rank of the engine reads alike."""
    try:
        return compat_config.settings_of(config).measures and config.device_config.device_type == card().torch_device
    except Exception:
        return False  # the check of the kernels has said what is wrong with them


def _timed(config: Any, layers: Sequence[Layer], limit: int | None, found: dict[str, _Kind]) -> dict[str, Any]:
    """What this rank hands over: "kinds" {shape: {"rounds" or "why"}}, "why" of the whole rank, "seconds", "timed"."""
    answer: dict[str, Any] = {"kinds": {}, "why": None, "seconds": 0.0, "timed": 0}
    if limit is None:
        return answer | {"why": "its kernels could not be checked"}
    budget = measure.Budget()
    try:
        counts = measure.token_counts(limit)
        for layer in layers:
            if layer.state == "trusted":
                shape = layer.shape()
                found.setdefault(_described(shape), _Kind(shape)).layers.append(layer)
        for text, kind in found.items():
            answer["kinds"][text] = _figures(config, kind, counts, budget)
        answer["seconds"] = measure.BUDGET_S - budget.left
    except Exception as error:
        answer["why"] = _line(error)
    answer["timed"] = sum(bool(kind.key) and not kind.since for kind in found.values())
    # Only here: an exception's traceback holds what was allocated until it has been handled.
    if answer["timed"]:
        with log.warned("the memory of the timing could not be given back"):
            card().give_back()
    return answer


def _described(shape: LayerShape) -> str:
    """The shape in the same words on every rank: without the device, whose index differs, and the rotary style."""
    act, cache, query = (str(t).removeprefix("torch.") for t in (shape.act, shape.cache_dtype, shape.out_dtype))
    weight = " ".join(str(part).removeprefix("torch.") for part in shape.weight)
    heads = f"{shape.heads} of {shape.out_heads}" if shape.out_heads else f"{shape.heads}"
    return (
        f"{heads} heads, widths {shape.nope_dim}+{shape.rope} and {shape.latent}, {act}, {weight} weight, "
        f"{query} query, {cache} cache in blocks of {shape.block_size}"
    )


def _figures(config: Any, kind: _Kind, counts: Sequence[int], budget: measure.Budget) -> dict[str, Any]:
    """Return one shape's figures, from an earlier start or timed now; none if there is nothing to choose between."""
    backends = kind.layers[0].contenders()
    if len(backends) < 2 or measure.VLLM not in backends:
        return {"rounds": {}}
    about = measure.about() | {"code": files.fingerprint(), "shape": _described(kind.shape)}
    # What vLLM compiles decides what its own sequence costs.
    settings, graphs = compat_config.settings_of(config), bool(compat_config.full_graphs(config.compilation_config))
    options = {"vllm": compat_config.compiled_as(config), "graphs": graphs}
    kind.key = about | options | {"counts": list(counts), "candidates": list(backends)}
    if settings.measure != "again":
        kind.kept, kind.since = measure.read(compat_config.cache_folder(), kind.key)
    left = [count for count in counts if count not in kind.kept]
    if not left:
        return {"rounds": kind.kept}
    since, kind.since = kind.since, ""
    try:
        with card().fork_rng(), compat_config.as_current(config):
            layer = kind.layers[0]
            pad = partial(compat_layer.pad_query, layer.module) if layer.out_heads else None
            timed = measure.time_shape(backends, kind.shape, layer.weight(), left, budget, graphs, pad)
            return {"rounds": kind.kept | timed}
    except measure.OverBudgetError as error:
        kind.since = since
        return {"rounds": kind.kept} if kind.kept else {"why": _line(error)}
    except Exception as error:
        return {"why": _line(error)}


def agree(answers: Sequence[dict[str, Any]]) -> tuple[dict[str, measure.Rounds], list[str]]:
    """Return one table per layer shape for all ranks, and why others have none. Pure, so every rank gets the same.

    A shape has no table if one of its ranks could not time it. No shape has one if a rank does not know its shapes.
    A rank without layers of a shape, as in a pipeline, does not count for it.
    """
    troubles = [f"rank {rank}: {answer['why']}" for rank, answer in enumerate(answers) if answer["why"]]
    tables: dict[str, list[measure.Rounds]] = {}
    for rank, answer in enumerate(answers):
        for text, one in answer["kinds"].items():
            if "why" in one:
                troubles.append(f"rank {rank}: {one['why']}")
            tables.setdefault(text, []).append(one.get("rounds", {}))
    if any(answer["why"] for answer in answers):
        return {}, troubles
    merged = {text: measure.slowest(found) for text, found in tables.items()}
    return {text: rounds for text, rounds in merged.items() if rounds}, troubles


def _apply(text: str, kind: _Kind, rounds: measure.Rounds) -> None:
    """Let the layers of a shape run what the figures say; without figures the static order."""
    chosen = measure.ranges(rounds, kind.layers[0].backends.contenders)
    for layer in kind.layers:
        layer.prefer(chosen)
    if not chosen:
        return
    figures, names = measure.medians(rounds), [layer.name for layer in kind.layers]
    status.current().measured.append(
        {"shape": text, "layers": names, "chosen": [list(one) for one in chosen], "us": figures, "since": kind.since}
    )
    if rounds != kind.kept:
        with log.warned("the measured figures could not be kept"):
            measure.write(compat_config.cache_folder(), kind.key, rounds)


def _say(troubles: Sequence[str], answer: dict[str, Any], figures: int) -> None:
    if troubles:
        more = f" (and {len(troubles) - 1} more)" if len(troubles) > 1 else ""
        timed = f" but for {figures} layer shape(s)" if figures else ""
        log.say_once(logging.WARNING, f"the kernels could not be timed: {troubles[0]}{more}; {STATIC}{timed}")
    elif answer["timed"]:
        spent = f"{answer['seconds']:.1f} s of at most {measure.BUDGET_S:g} s"
        log.say(logging.INFO, f"kernels timed on this card in {spent}: {answer['timed']} layer shape(s)")


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
