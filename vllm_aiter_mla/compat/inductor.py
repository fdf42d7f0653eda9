# SPDX-License-Identifier: Apache-2.0
"""vLLM's base classes for post-grad passes.

Importing this imports torch's compiler, so it is imported late: a run with the flag off does not pay for it.
"""

from vllm.compilation.passes.inductor_pass import InductorPass, get_pass_context
from vllm.compilation.passes.vllm_inductor_pass import VllmInductorPass, VllmPatternMatcherPass

__all__ = ["InductorPass", "VllmInductorPass", "VllmPatternMatcherPass", "get_pass_context"]
