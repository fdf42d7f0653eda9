"""A layer that only chooses and remembers kernels: without a model, an engine or weights of its own."""

from collections.abc import Mapping
from types import SimpleNamespace

from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.serving.backends import Backends, Factory
from vllm_aiter_mla.serving.decision import PASSED, LayerFacts, Offer
from vllm_aiter_mla.serving.layer import Layer
from vllm_aiter_mla.settings import Settings


def bare_layer(kernel: str, platform: Platform, factories: Mapping[str, Factory] | None = None) -> Layer:
    """A layer, its kernels checked, of an engine with the option ``kernel`` on ``platform``."""
    module = SimpleNamespace(layer_name="bare", _vllm_config=SimpleNamespace())
    made = Layer(module, Backends(Settings(enabled=True, kernel=kernel), platform, factories))
    # Without a model there is nothing to admit, and no size to ask a back end about.
    made.facts = lambda: LayerFacts(None, dict.fromkeys(made.backends.names, Offer()))  # type: ignore[method-assign]
    made.checked(dict.fromkeys(made.backends.names, PASSED))
    return made
