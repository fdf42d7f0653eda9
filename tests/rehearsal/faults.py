"""What breaks in a rehearsal: each is called at the start of each process, before anything of vLLM is imported."""

import errno
import os
import pkgutil
import time
from pathlib import Path
from typing import Any

import torch

from tests.sandbox import plugin, rehearsal_card
from tests.sandbox.rehearsal_card import RehearsalCard, TritonLaunch
from tests.sandbox.simulated_aiter import op
from vllm_aiter_mla import files

TOLD = "raise-now"
"""A file in the day's folder; while it is there, AITER's kernel raises."""
TILE = "16x128/8w"
"""One that the table of tiles does not have."""
PLANTED = "planted by the rehearsal"


def aiter_aborts() -> None:
    """AITER's op ends the process in its first call, as its C++ checks do."""

    def call(*given: Any) -> None:
        print(PLANTED, flush=True)
        os.abort()

    op.call = call


def aiter_compiles_for_minutes() -> None:
    """AITER's op says so and waits in its first call, as for its compiler."""

    def call(*given: Any) -> None:
        print(PLANTED, flush=True)
        time.sleep(600)

    op.call = call


def plans_take_minutes() -> None:
    """A process that was called for a plan waits instead."""
    from vllm_aiter_mla.commands.plan.planner import make_plans_in_child
    from vllm_aiter_mla.commands.process import import_path_of

    inner = pkgutil.resolve_name

    def resolve_name(name: str) -> Any:
        return (lambda *given: time.sleep(600)) if name == import_path_of(make_plans_in_child) else inner(name)

    pkgutil.resolve_name = resolve_name


def aiter_raises_when_told() -> None:
    inner = op.call

    def call(*given: Any) -> None:
        if Path(TOLD).exists():
            raise RuntimeError(PLANTED)
        inner(*given)

    op.call = call


def aiter_is_wrong_on_rank_1() -> None:
    inner = op.call

    def call(*given: Any) -> None:
        inner(*given)
        if rehearsal_card.rank() == 1:
            given[5].fill_(1)  # the query

    op.call = call


def triton_aborts() -> None:
    """Our Triton kernel ends the process in its first launch, as a fault of the card does."""

    def run(*given: Any, **named: Any) -> None:
        print(PLANTED, flush=True)
        os.abort()

    TritonLaunch.run = staticmethod(run)


def triton_does_not_compile() -> None:
    def run(*given: Any, **named: Any) -> None:
        raise RuntimeError(PLANTED)

    TritonLaunch.run = staticmethod(run)


def a_tile_is_wrong() -> None:
    """The Triton kernel rotates by the wrong pairing on one tile."""
    inner = TritonLaunch.run

    def run(*given: Any, **named: Any) -> None:
        wrong = rehearsal_card.label_of(named) == TILE
        inner(*given, **(named | {"IS_NEOX": named["IS_NEOX"] != wrong}))

    TritonLaunch.run = staticmethod(run)


def timing_has_no_memory() -> None:
    def time_us(self: Any, run: Any) -> float:
        raise torch.OutOfMemoryError(PLANTED)

    RehearsalCard.time_us = time_us


def the_disk_is_full() -> None:
    def write_text(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, PLANTED, str(path))

    files.write_text = write_text


def rank_1_cannot_load() -> None:
    """vLLM's loader is planted by the sandbox's plugin: nothing of vLLM is imported here."""
    os.environ[plugin.MUTATION] = f"{__name__}:_loader_raises"


def _loader_raises() -> None:
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    def load_model(*given: Any, **named: Any) -> Any:
        if rehearsal_card.rank() == 1:
            raise RuntimeError(PLANTED)
        return inner(*given, **named)

    inner = BaseModelLoader.load_model
    BaseModelLoader.load_model = load_model


def name_of(fault: Any) -> str:
    """Return a fault as ``Scenario`` takes it."""
    return f"{fault.__module__}:{fault.__name__}"
