"""Corrects the float casts of Triton's interpreter, and lets ``verify`` record a launch of the kernel as one call.

Symptom: as shipped (3.6 to 3.9) its casts round half up, drop mantissa carries and truncate float32 to bfloat16, its
dot product of bfloat16 (up to 3.8 that of fp8 too) multiplies the bit patterns, it takes no mask that joins a number's
comparison with a block's, and after a launch it copies every argument's whole storage onto itself. Remove each patch
when Triton's own interpreter passes tests/kernels/triton without it, and that for masks when an engine starts.

``TRITON_INTERPRET=1`` must be in the environment before the kernel's module is imported, and a process that has it
cannot cross-compile: this module checks the first and the tests give each use a process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from vllm_aiter_mla.verify.engine import Recording

_STORAGE = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def install() -> None:
    """Replace the interpreter's float casts, bfloat16 dot, masks and argument write-back. Once in a process.

    Raises:
        RuntimeError: the process was started without TRITON_INTERPRET=1.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("set TRITON_INTERPRET=1 before the first import of the kernel")
    from triton.runtime import interpreter

    interpreter._convert_float = convert_float
    builder = interpreter.InterpreterBuilder
    builder.create_dot = _dot
    load, store = builder.create_masked_load, builder.create_masked_store
    builder.create_masked_load = lambda self, at, mask, *rest: load(self, at, _as_bool(mask), *rest)
    builder.create_masked_store = lambda self, at, value, mask, *rest: store(self, at, value, _as_bool(mask), *rest)
    interpreter.GridExecutor._restore_args_dev = _restore_nothing
    interpreter._patch_lang = _patched_once(interpreter._patch_lang)


def trust_integers() -> None:
    """Add without a check for overflow, as compiled kernels do: in 64 bits besides, it took a quarter of a launch."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def _patched_once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Let the language stay patched: each launch, and each call of a function inside it, looked at all its members."""
    patched = set()

    def patch_lang(fn: Any) -> Any:
        if id(fn.__globals__) not in patched:
            patched.add(id(fn.__globals__))
            patch(fn)
        return SimpleNamespace(restore=lambda: None)

    return patch_lang


def record_launches() -> None:
    """Let an eager replay repeat a launch of our kernel as one call, without the calls inside it."""
    from vllm_aiter_mla.kernels.triton import launcher

    launcher.decode_prep_kernel = Recorded(launcher.decode_prep_kernel)


class Recorded:
    """A kernel whose launches are recorded."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return one_launch("decode_prep_kernel", self._kernel[grid])


def one_launch(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a recording see one call of ``function``, and none of the calls inside it."""

    def call(*given: Any, **named: Any) -> Any:
        mode = _get_current_dispatch_mode()
        if not isinstance(mode, Recording):
            return function(*given, **named)
        with _disable_current_modes():
            result = function(*given, **named)
        mode.add(name, function, given, named, result)
        return result

    return call


def convert_float(data: np.ndarray, source: Any, target: Any, rounding: object = None) -> np.ndarray:
    """Cast through torch, to nearest even; bit patterns in (any dtype of the right width), bit patterns out.

    Args:
        data: values of ``source`` as numpy holds them in the interpreter.
        source: Triton scalar type.
        target: Triton scalar type.
        rounding: ignored: the kernel asks for the default only.
    """
    raw = torch.from_numpy(np.ascontiguousarray(data).view(_STORAGE[source.primitive_bitwidth // 8]).copy())
    cast = raw.view(_torch_dtype(source)).to(torch.float32).to(_torch_dtype(target))
    bits = cast.view(getattr(torch, f"uint{target.primitive_bitwidth}"))
    return bits.numpy().reshape(np.shape(data))


def _torch_dtype(dtype: Any) -> torch.dtype:
    names = {
        "fp32": torch.float32,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "fp8e4nv": torch.float8_e4m3fn,
        "fp8e4b8": torch.float8_e4m3fnuz,
    }
    return names[dtype.name]


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: object, max_num_imprecise_acc: object) -> Any:
    """float32 dot of bfloat16, float16 or fp8 operands, accumulated onto ``d``; every product is exact."""
    from triton.runtime import interpreter

    left, right = (_as_float32(operand) for operand in (a, b))
    return interpreter.TensorHandle(np.matmul(left, right) + d.data, d.dtype.scalar)


def _as_float32(operand: Any) -> np.ndarray:
    """The values behind the bit patterns in which the interpreter holds bfloat16 and fp8."""
    raw = torch.from_numpy(np.ascontiguousarray(operand.data))
    return raw.view(_torch_dtype(operand.dtype.scalar)).float().numpy()


def _as_bool(mask: Any) -> Any:
    if mask.data.dtype != np.bool_:
        mask.data = mask.data.astype(np.bool_)
    return mask


def _restore_nothing(self: Any, args_dev: object, args_hst: object, kwargs: object, kwargs_hst: object) -> None:
    """The arguments are CPU tensors: the kernel wrote into them, there is nothing to bring back.

    The original copies each storage onto itself, which would touch every page of a sparse 5 GiB cache.
    """
