"""With this folder on PYTHONPATH, a Python process and its children behave as on a machine with AVX2 and no AVX-512.

vLLM then loads the library that it ships for such machines, and ATen, oneDNN, MKL and Inductor use AVX2. Loading one of
vLLM's AVX-512 libraries ends the process with SIGILL, as it does there. Python imports this module when it starts.
"""

import os
import signal
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

os.environ |= {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
AVX512_LIBRARIES = ("vllm._C", "vllm._C_AVX512")
QUESTIONS = ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_vnni_supported", "_is_amx_tile_supported")


class AsOnAvx2:
    """Answer ``torch.cpu``'s questions about AVX-512 with False, and let no AVX-512 library load."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name in AVX512_LIBRARIES:
            return ModuleSpec(name, IllegalInstruction())
        spec = PathFinder.find_spec(name, path) if name == "torch.cpu" else None
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                vars(module).update({question: lambda: False for question in QUESTIONS if hasattr(module, question)})

            spec.loader.exec_module = exec_module
        return spec


class IllegalInstruction:
    """End the process as the first AVX-512 instruction would."""

    def create_module(self, spec: ModuleSpec) -> None:
        os.kill(os.getpid(), signal.SIGILL)

    def exec_module(self, module: ModuleType) -> None:
        raise AssertionError("the process outlived SIGILL")


sys.meta_path.insert(0, AsOnAvx2)
