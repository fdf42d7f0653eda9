"""AMD's AITER, simulated for machines without an AMD card. It ends the process where AITER would.

``install(arch, version)`` writes a package ``aiter`` with the real file layout into a directory and puts it first on
the import path, for child processes too. Its one op runs in plain PyTorch and reads memory as AITER's kernels do
(addresses, not shapes).

``trees`` writes the packages, good and broken; ``op`` validates and dispatches; ``execute`` is the arithmetic;
``gemm`` and ``gemm_fp4`` the batched GEMMs over fp8 and mxfp4 weights; ``mla`` the attention kernels; ``memory`` the
raw reads and the ways to die.
"""

from tests.sandbox.simulated_aiter.trees import VERSIONS, install, write_tree

__all__ = ["ROCM", "VERSIONS", "install", "write_tree"]

ROCM = (7, 0)
"""The ROCm release that the tests pretend to have."""
