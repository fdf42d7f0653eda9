"""The second integration: the forward of vLLM's MLA wrapper calls the one op itself. It needs no compiled graph.

``installed`` is around the loading of a model, so that its wrappers are of our class; ``emit`` then decides, layer by
layer, which of them call the op. What is decided about a layer does not depend on who emits (``layers``).
"""

from vllm_aiter_mla.module.emission import emit
from vllm_aiter_mla.module.wrapper import installed

__all__ = ["emit", "installed"]
