"""Packages named ``aiter`` on disk: the good one, the old ones, and those that only look like it.

The source of ``aiter/ops/cache.py`` is written as text, because the probe reads it as text; what the op does is
``tests.sandbox.simulated_aiter.op``.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VERSIONS = ("0.1.20", "0.1.19", "0.1.7", "0.1.20+future", "broken", "namespace", "pypi")

CODE = "amdgcn-amd-amdhsa--gfx942 amdgcn-amd-amdhsa--gfx950"
"""What a compiled module holds for the step machine: the names of the architectures whose code is in it."""
_TENSORS = (
    "q_nope", "q_pe", "kv_c", "k_pe", "kv_cache", "q_out", "slot_mapping", "k_scale", "q_scale", "positions",
    "cos_cache", "sin_cache",
)  # fmt: skip
_SOURCE = '''"""AITER's cache ops, simulated; written by tests.sandbox.simulated_aiter."""

from torch import Tensor

from ..jit.core import compile_ops


@compile_ops("module_cache", develop=True)
def concat_and_cache_mla(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor) -> None: ...

{op}'''
_OP = """
@compile_ops("module_cache", develop=True)
def fused_qk_rope_concat_and_cache_mla(
    {arguments},
) -> None: ...
"""
_TRITON = '''"""One of AITER's Triton functions, simulated."""

from tests.sandbox.simulated_aiter.{module} import {function} as {name}
'''
_MLA = '''"""AITER's MLA decode, simulated."""

from tests.sandbox.simulated_aiter.mla import mla_decode_fwd
'''
_GLUON = '''"""AITER's MLA decode of few heads, simulated."""

from tests.sandbox.simulated_aiter.mla import mla_gluon
'''
_DTYPES = '''"""AITER's names of dtypes."""

import torch

from tests.sandbox.simulated_aiter import op

fp8, fp16, bf16 = op.FP8[op.arch()], torch.float16, torch.bfloat16
'''
_INIT = """from tests.sandbox.simulated_aiter.mla import (  # noqa
    flash_attn_varlen_func,
    get_mla_metadata_info_v1,
    get_mla_metadata_v1,
)

from . import dtypes  # noqa
from .ops.cache import *  # noqa
"""
_FP8_GEMM = "batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_quant"
# Module and function below aiter.ops.triton, and the function here that replaces it.
_TRITON_FUNCTIONS = (
    (_FP8_GEMM, _FP8_GEMM, "gemm", "batched_gemm"),
    ("batched_gemm_a16wfp4", "batched_gemm_a16wfp4", "gemm_fp4", "batched_gemm"),
    ("quant", "dynamic_mxfp4_quant", "gemm_fp4", "dynamic_mxfp4_quant"),
)
_CORE = '''"""AITER's just-in-time layer, simulated: registers the one op."""

from tests.sandbox.simulated_aiter import op


def compile_ops(_md_name: str, **_options: object):
    """Decorate an op's stub."""

    def decorate(source):
        return op.register(source) if source.__name__ == op.NAME else source

    return decorate
'''


def write_tree(root: Path, version: str = "0.1.20", prebuilt: bool = True) -> Path:
    """Write one of ``VERSIONS`` under ``root`` and return ``root``.

    "0.1.20" is what the plugin needs, "0.1.19" the last release before ROCm/aiter#4342 (14 arguments), "0.1.7" has no
    such op, "0.1.20+future" has a mandatory argument nobody knows yet, "broken" lost its ops, "namespace" lost its
    ``__init__``, and "pypi" is another project's package of the same name.
    """
    package = root / "aiter"
    package.mkdir(parents=True, exist_ok=True)
    if version == "pypi":
        _write(package / "__init__.py", '"""Another project altogether."""\n')
        _write_metadata(root, "aiter", "0.13.20191203")
        return root
    _write(package / "jit" / "__init__.py", "")
    _write(package / "jit" / "core.py", _CORE)
    _write(package / "ops" / "__init__.py", "")
    if version != "broken":
        _write(package / "ops" / "cache.py", _SOURCE.format(op=_op_source(version)))
        for file, name, module, function in _TRITON_FUNCTIONS:
            source = _TRITON.format(module=module, function=function, name=name)
            _write(package / "ops" / "triton" / f"{file}.py", source)
    _write(package / "mla.py", _MLA)
    _write(package / "dtypes.py", _DTYPES)
    for folder in ("gluon", ""):
        _write(package / "ops" / "triton" / folder / "__init__.py", "")
    _write(package / "ops" / "triton" / "gluon" / "mla_gluon.py", _GLUON)
    if version != "namespace":
        _write(package / "__init__.py", _INIT)
    if prebuilt:
        _write(package / "jit" / "module_cache.so", CODE)
    _write_metadata(root, "amd-aiter", version if version[0].isdigit() else "0.1.20")
    return root


def _op_source(version: str) -> str:
    if version == "0.1.7":
        return ""
    arguments = [f"{name}: Tensor" for name in _TENSORS] + ["is_neox: bool", "is_nope_first: bool"]
    if version.startswith("0.1.20"):
        arguments.append("compute_all_q_rope: bool" + ("" if version.endswith("future") else " = False"))
    if version.endswith("future"):
        arguments.append("unheard_of: bool")
    return _OP.format(arguments=",\n    ".join(arguments))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _write_metadata(root: Path, name: str, version: str) -> None:
    info = root / f"{name.replace('-', '_')}-{version}.dist-info"
    _write(info / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    _write(info / "top_level.txt", "aiter\n")


@contextmanager
def install(arch: str = "gfx942", version: str = "0.1.20", root: Path | None = None) -> Iterator[Path]:
    """Put the simulated ``aiter`` for ``arch`` ("gfx942" or "gfx950") first on the import path, children included.

    A context manager: on leaving, path, environment and ``sys.modules`` are as before. The registered op stays, as a
    torch op cannot be unregistered safely; it obeys the ``arch`` of the latest ``install``. Yields the directory.
    """
    with tempfile.TemporaryDirectory(prefix="simulated-aiter-") as temporary:
        root = write_tree(root or Path(temporary), version)
        saved = {name: os.environ.get(name) for name in ("PYTHONPATH", "SIMULATED_AITER_ARCH")}
        os.environ["SIMULATED_AITER_ARCH"] = arch
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), saved["PYTHONPATH"])))
        hidden = _take_out()
        sys.path.insert(0, str(root))
        importlib.invalidate_caches()
        try:
            yield root
        finally:
            sys.path.remove(str(root))
            _take_out()
            sys.modules.update(hidden)
            for name, value in saved.items():
                os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
            importlib.invalidate_caches()


def _take_out() -> dict:
    names = [name for name in sys.modules if name == "aiter" or name.startswith("aiter.")]
    return {name: sys.modules.pop(name) for name in names}
