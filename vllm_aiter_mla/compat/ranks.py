# SPDX-License-Identifier: Apache-2.0
"""Messages between ranks.

Those of one engine, its tensor-parallel and pipeline groups, exchange values. Other data-parallel engines are only
looked at: one of them may not start, and waiting would hang.
"""

import json
import time
from datetime import timedelta
from typing import Any

import torch

WAIT_S = 120.0
"""How long ``apart`` waits for the other ranks. vLLM's groups are new then, so all ranks are at the same step."""
APART = "apart, "
"""Comes before the word of a rank whose engine is apart."""


def say(mine: str) -> int:
    """Leave what this rank has decided in the store by which torch's process groups met; nobody waits for it.

    Say it once an engine: a process may have several, one after the other, over one store. Return which one this is.
    """
    store, rank = _store(), torch.distributed.get_rank()
    engine: int = store.add(_engines_key(rank), 1)
    store.set(_key(engine, rank), mine)
    return engine


def apart(mine: str, world_size: int, wait_s: float = WAIT_S) -> list[int]:
    """Return the ranks of this engine that have said something else than ``mine``, or nothing within ``wait_s``.

    This is no collective, and nobody waits for a rank that does not call it. Ask before the first ``exchange``. All
    ranks that ask get an empty list, or none of them does: a rank that comes late sees the word of one that has stopped
    waiting for it. So the first one that knows decides for all. What such a rank has said no longer counts as ``mine``:
    another data-parallel engine must not take the ranks for agreed.

    Args:
        mine: what this rank has decided.
        world_size: ranks of one engine, which are numbered one after the other.
        wait_s: seconds.
    """
    engine, store = say(mine), _store()
    first = torch.distributed.get_rank() // world_size * world_size
    found, end = list[int](), time.monotonic() + wait_s
    for other in range(first, first + world_size):
        key = _key(engine, other)
        try:
            store.wait([key], timedelta(seconds=max(end - time.monotonic(), 0.01)))
            is_same = store.get(key).decode().removeprefix(APART) == mine
        except RuntimeError:  # torch's error of a wait that is over
            is_same = False
        if not is_same:
            found.append(other)
    decided: list[int] = json.loads(store.compare_set(f"{_key(engine, first)}/apart", "", json.dumps(found)))
    if not decided:
        return []
    store.set(_key(engine, torch.distributed.get_rank()), f"{APART}{mine}")
    return found or decided


def all_say(mine: str) -> bool:
    """Return whether every rank of every data-parallel engine has said ``mine`` by now."""
    store = _store()
    engine = store.add(_engines_key(torch.distributed.get_rank()), 0)
    keys = [_key(engine, rank) for rank in range(torch.distributed.get_world_size())]
    return store.check(keys) and all(store.get(key).decode() == mine for key in keys)


def _store() -> Any:
    return torch.distributed.distributed_c10d._get_default_store()


def _engines_key(rank: int) -> str:
    """Return where the store counts the engines that a rank has started."""
    return f"aiter_mla/engines/{rank}"


def _key(engine: int, rank: int) -> str:
    return f"aiter_mla/{engine}/{rank}"


def exchange(mine: Any) -> tuple[int, list[Any]]:
    """Return this rank's place and what each rank of the engine handed over, in the order of ranks.

    Every rank of the engine has to call it. It uses vLLM's CPU groups, no device. Without groups: ``(0, [mine])``.
    """
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return 0, [mine]
    pipeline, tensor = parallel_state.get_pp_group(), parallel_state.get_tp_group()
    stages = _gathered(_gathered(mine, tensor), pipeline)
    return pipeline.rank_in_group * tensor.world_size + tensor.rank_in_group, [one for stage in stages for one in stage]


def _gathered(mine: Any, group: Any) -> list[Any]:
    if group.world_size == 1:
        return [mine]
    found: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(found, mine, group=group.cpu_group)
    return found
