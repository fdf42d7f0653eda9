"""vLLM's interface of post-grad passes. Importing this imports torch's compiler: only a run with the flag on does."""

from vllm.compilation.passes.inductor_pass import InductorPass, get_pass_context

__all__ = ["InductorPass", "get_pass_context"]
