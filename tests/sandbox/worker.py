"""Let vLLM's CPU worker make, warm up and capture Model Runner V2 as its GPU worker does.

vLLM takes V2 wherever Triton is installed, so on every ROCm server. Its CPU worker can make V2; input batch, block
tables, metadata, sampler and speculator are those of a GPU, their Triton kernels run by Triton's interpreter.
"""

from __future__ import annotations

import os
from functools import cache
from types import SimpleNamespace
from typing import Any

TRITON = "TRITON_INTERPRET"
"""Environment variable of Triton's own: "1" lets its kernels run on CPU tensors, and vLLM take V2."""
OURS = "AITER_MLA_SANDBOX_TRITON"
"""Environment variable: "1" offers the plugin's own Triton kernel too."""


def show_triton() -> None:
    """Let vLLM find Triton's back end for CPUs, which no wheel has; before it imports ``vllm.triton_utils``."""
    if os.environ.get(TRITON) == "1":
        from triton.backends import backends

        backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)


@cache
def engage() -> None:
    """Let this process run what V2 needs of Triton and of a GPU's worker, where Triton was shown. Idempotent."""
    from vllm.v1.worker.worker_base import WorkerBase

    WorkerBase.runner_module = lambda worker: type(worker.model_runner).__module__
    if os.environ.get(TRITON) != "1":
        return
    import vllm.triton_utils  # noqa: F401
    from triton.backends import backends

    from tests.sandbox import interpreter
    from vllm_aiter_mla.kernels import triton as ours

    backends.pop("cpu", None)  # Inductor would ask it for its version
    interpreter.install()
    if os.environ.get(OURS) != "1":
        ours.interpreted = lambda: False
        interpreter.trust_integers()
    _start_as_on_a_gpu()


def _start_as_on_a_gpu() -> None:
    """Warm V2 up by the GPU worker's own method. The KV cache and the memory stay the CPU worker's."""
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker import cpu_worker, gpu_worker, workspace  # the first brings vLLM's stand-ins for torch.cuda

    warm_up = cpu_worker.CPUWorker.compile_or_warm_up_model

    def compile_or_warm_up_model(worker: Any) -> Any:
        if not worker.use_v2_model_runner:
            return warm_up(worker)
        workspace.init_workspace_manager(worker.device, 1)
        return gpu_worker.Worker.compile_or_warm_up_model(worker)

    cpu_worker.CPUWorker.compile_or_warm_up_model = compile_or_warm_up_model
    # It compiles kernels of other models ahead, and imports one that needs torchvision.
    gpu_worker.kernel_warmup = lambda worker, **_: None
    # Its kernel calls a method of a loop's variable, which is a plain number in the interpreter; torch does the same.
    topk_topp_sampler.HAS_TRITON = False
