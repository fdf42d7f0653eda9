# SPDX-License-Identifier: Apache-2.0
"""Messages between the ranks of one engine: those of its tensor-parallel and pipeline groups.

Another data-parallel engine is not asked: it may not start, and waiting would hang.
"""

import time
from datetime import timedelta
from typing import Any

import torch

WAIT_S = 120.0
"""How long ``apart`` waits for the other ranks. vLLM's groups are new then, so all ranks are at the same step."""


def apart(mine: str, world_size: int, wait_s: float = WAIT_S) -> list[int]:
    """Return the ranks of this engine that have said something else than ``mine``, or nothing within ``wait_s``.

    This is no collective, and nobody waits for a rank that does not call it: each rank leaves its word in the store by
    which torch's process groups met. Ask before the first ``exchange``.

    Args:
        mine: what this rank has decided.
        world_size: ranks of one engine, which are numbered one after the other.
        wait_s: seconds.
    """
    store = torch.distributed.distributed_c10d._get_default_store()
    rank = torch.distributed.get_rank()
    first = rank // world_size * world_size
    store.set(f"aiter_mla/{rank}", mine)
    found, end = list[int](), time.monotonic() + wait_s
    for other in range(first, first + world_size):
        key = f"aiter_mla/{other}"
        try:
            store.wait([key], timedelta(seconds=max(end - time.monotonic(), 0.01)))
            is_same = store.get(key).decode() == mine
        except RuntimeError:  # torch's error of a wait that is over
            is_same = False
        if not is_same:
            found.append(other)
    return found


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
