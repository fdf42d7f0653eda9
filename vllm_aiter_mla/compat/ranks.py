# SPDX-License-Identifier: Apache-2.0
"""Messages between the ranks of one engine: those of its tensor-parallel and pipeline groups.

Another data-parallel engine is not asked: it may not start, and waiting would hang.
"""

from typing import Any

import torch


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
