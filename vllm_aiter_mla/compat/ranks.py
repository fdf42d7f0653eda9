"""The ranks of one engine: its tensor-parallel and pipeline groups. Ranks of other data-parallel engines are not among
them: those start when they like, and waiting for one would hang.
"""

from __future__ import annotations

from typing import Any

import torch


def exchange(mine: str) -> tuple[int, list[str]]:
    """(place of this rank, what each rank of the engine has handed over, in the order of ranks).

    Every rank of the engine has to call it. Over vLLM's CPU groups: no device is touched. Alone, where vLLM has made no
    groups, ``(0, [mine])``.
    """
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return 0, [mine]
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return 0, [mine]
    tensor, pipeline = parallel_state.get_tp_group(), parallel_state.get_pp_group()
    stages = _gathered(_gathered(mine, tensor), pipeline)
    return pipeline.rank_in_group * tensor.world_size + tensor.rank_in_group, [text for one in stages for text in one]


def _gathered(mine: Any, group: Any) -> list[Any]:
    if group.world_size == 1:
        return [mine]
    found: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(found, mine, group=group.cpu_group)
    return found
