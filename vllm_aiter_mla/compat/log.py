# SPDX-License-Identifier: Apache-2.0
"""The plugin's log lines, and messages between the ranks of one engine.

The lines go through a child of the logger "vllm", the only name for which vLLM configures handlers. The ranks are those
of the engine's tensor-parallel and pipeline groups: another data-parallel engine may not start, and waiting would hang.
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

logger = logging.getLogger("vllm.aiter_mla")
PREFIX = "aiter-mla: "

_said: set[tuple[int, str]] = set()


def say_once(level: int, message: str, key: str | None = None) -> None:
    """Log ``message`` unless this process has already logged it, or another one with the same ``key``.

    vLLM's ``replace()`` rebuilds configs often, and each is read again.
    """
    said = (level, key or message)
    if said not in _said:
        _said.add(said)
        say(level, message, stacklevel=3)


def say(level: int, message: str, stacklevel: int = 2) -> None:
    """Log ``message`` at ``level``; vLLM prints the file and line, and they should be the caller's."""
    logger.log(level, "%s%s", PREFIX, message, stacklevel=stacklevel)


@contextlib.contextmanager
def warned(what: str) -> Iterator[None]:
    """Turn an exception of the block into one warning that begins with ``what``; for steps that nothing depends on."""
    try:
        yield
    except Exception as error:
        say_once(logging.WARNING, f"{what}: {type(error).__name__}: {error}")


def exchange(mine: Any) -> tuple[int, list[Any]]:
    """Return this rank's place and what each rank of the engine handed over, in the order of ranks.

    Every rank of the engine has to call it. It uses vLLM's CPU groups, no device. Without groups: ``(0, [mine])``.
    """
    import torch

    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return 0, [mine]
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return 0, [mine]
    pipeline, tensor = parallel_state.get_pp_group(), parallel_state.get_tp_group()
    stages = _gathered(_gathered(mine, tensor), pipeline)
    return pipeline.rank_in_group * tensor.world_size + tensor.rank_in_group, [one for stage in stages for one in stage]


def _gathered(mine: Any, group: Any) -> list[Any]:
    if group.world_size == 1:
        return [mine]
    import torch

    found: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(found, mine, group=group.cpu_group)
    return found
