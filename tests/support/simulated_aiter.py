"""Inputs of the simulated AITER, and a way to watch a process die."""

import faulthandler
import os
import resource
import signal
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial

import torch

from tests.sandbox.simulated_aiter import ROCM
from tests.sandbox.simulated_aiter.op import FP8
from vllm_aiter_mla.kernels.aiter.backend import AiterBackend
from vllm_aiter_mla.kernels.aiter.route import Route, kernel_for
from vllm_aiter_mla.kernels.backend import Binding, Numerics
from vllm_aiter_mla.kernels.inputs import DecodeInputs, LayerShape, synthetic_inputs
from vllm_aiter_mla.kernels.platform import Platform


def backend(arch: str = "gfx942", **options) -> AiterBackend:
    """The real back end; call it inside ``install(arch)``."""
    return AiterBackend(Platform(arch, ROCM), **options)


class Unchecked(AiterBackend):
    """The back end of gfx942 with its contract torn out; the cache goes over as it is."""

    def __init__(self) -> None:
        super().__init__(Platform("gfx942", ROCM))

    def bind(self, operands: DecodeInputs) -> Binding:
        cache = operands.kv_cache if operands.kv_cache.dim() == 3 else operands.kv_cache.squeeze(1)
        kernel = kernel_for(cache.shape[1], 512, 64, operands.num_heads, operands.slot_mapping.shape[0])
        route = Route(kernel, None, Numerics("aiter"))
        return Binding(partial(self._run, route, [operands.nope_dim, operands.rope_dim], 0, {}))


def inputs(
    arch: str = "gfx942", tokens: int = 7, heads: int = 4, block_size: int = 16, cache: str = "fp8", query: str = "fp8",
    is_neox: bool = False, nope: int = 16, act: torch.dtype = torch.bfloat16,
) -> DecodeInputs:  # fmt: skip
    """Synthetic operands; ``cache`` and ``query`` are "fp8" (the card's) or "act"."""
    kinds = {"fp8": FP8[arch], "act": act}
    shape = LayerShape(heads, nope, kinds[cache], kinds[query], block_size, is_neox, act)
    return synthetic_inputs(shape, tokens)


def twin(operands: DecodeInputs) -> DecodeInputs:
    """The same operands over a copy of the cache, bytes and strides alike."""
    return replace(operands, kv_cache=deepcopy(operands.kv_cache))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape are the same, bit by bit."""
    return a.dtype == b.dtype and torch.equal(raw(a), raw(b))


def fate(action: Callable[[], object]) -> str:
    """What becomes of a process that does ``action``: "SIGABRT: <stderr>", "SIGFPE", "raised <error>" or its value.

    It runs in a forked child: an abort of the simulated op, like that of the real one, ends the whole process.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.disable()
        os.dup2(writer, 2)
        try:
            torch.set_num_threads(1)
            outcome = str(action())
        except BaseException as error:
            outcome = f"raised {type(error).__name__}: {error}"
        os.write(writer, outcome.encode()[:4000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, errors="replace") as pipe:
        text = pipe.read()
    status = os.waitpid(child, 0)[1]
    died = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else ""
    return f"{died}: {text}" if died else text
