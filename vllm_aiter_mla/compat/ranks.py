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
    pipeline = _pipeline()
    if pipeline is None:
        return 0, [mine]
    from vllm.distributed import parallel_state

    tensor = parallel_state.get_tp_group()
    stages = _gathered(_gathered(mine, tensor), pipeline)
    return pipeline.rank_in_group * tensor.world_size + tensor.rank_in_group, [text for one in stages for text in one]


def of_stages(mine: Any) -> list[Any]:
    """What each pipeline stage has handed over, in their order; every rank of the engine has to call it."""
    stages = _pipeline()
    return [mine] if stages is None else _gathered(mine, stages)


def _pipeline() -> Any | None:
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    from vllm.distributed import parallel_state

    return parallel_state.get_pp_group() if parallel_state.model_parallel_is_initialized() else None


def _gathered(mine: Any, group: Any) -> list[Any]:
    if group.world_size == 1:
        return [mine]
    found: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(found, mine, group=group.cpu_group)
    return found
