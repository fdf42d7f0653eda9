"""With this folder on PYTHONPATH, a Python process and its children behave as on another processor.

AITER_MLA_PROCESSOR names it:

- "avx2" has AVX2 and no AVX-512. vLLM loads the library that it ships for such machines, and ATen, oneDNN, MKL and
  Inductor use AVX2. Loading one of vLLM's AVX-512 libraries ends the process with SIGILL, as it does there.
  It keeps its own compile cache: Inductor (torch 2.13.0) finds another machine's graph there and compiles it for this
  one, which leaves values unwritten. See findings/inductor-cache-of-another-cpu.sh.
- "amx" and "no-amx": torch says that AMX tiles are there, or that they are not. No kernel changes: what vLLM decides by
  the answer does, so a test that runs a kernel for AMX fails on a machine without it.

Python imports this module when it starts.
"""

import os
import signal
import sys
import tempfile
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

PROCESSOR = os.environ["AITER_MLA_PROCESSOR"]
AMX = ("_is_amx_tile_supported", "_is_amx_fp16_supported")
AVX512 = ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_vnni_supported")
ANSWERS: dict[str, dict[str, bool]] = {
    "avx2": dict.fromkeys((*AVX512, *AMX), False),
    "amx": dict.fromkeys(AMX, True),
    "no-amx": dict.fromkeys(AMX, False),
}
"""What ``torch.cpu`` answers, by processor."""
AVX512_LIBRARIES = ("vllm._C", "vllm._C_AVX512")


class Processor:
    """Answer ``torch.cpu``'s questions for the processor, and let no library load that it cannot run."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name in AVX512_LIBRARIES and PROCESSOR == "avx2":
            return ModuleSpec(name, IllegalInstruction())
        spec = PathFinder.find_spec(name, path) if name == "torch.cpu" else None
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                for question, answer in ANSWERS[PROCESSOR].items():
                    if hasattr(module, question):
                        setattr(module, question, lambda answer=answer: answer)

            spec.loader.exec_module = exec_module
        return spec


class IllegalInstruction:
    """End the process as the first AVX-512 instruction would."""

    def create_module(self, spec: ModuleSpec) -> None:
        os.kill(os.getpid(), signal.SIGILL)

    def exec_module(self, module: ModuleType) -> None:
        raise AssertionError("the process outlived SIGILL")


if PROCESSOR == "avx2":
    os.environ |= {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor-avx2-{os.getuid()}")
sys.meta_path.insert(0, Processor)
