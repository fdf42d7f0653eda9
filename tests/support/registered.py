"""The plugin's ops and those that only GPU builds of vLLM register; the sandbox itself stays off."""

import vllm._custom_ops  # noqa: F401  loads vLLM's own library before the sandbox fills its gaps

from tests.sandbox import gpu_ops
from tests.support.one_thread import one_thread as one_thread
from vllm_aiter_mla import plugin
from vllm_aiter_mla.serving import ops

plugin.register()
ops.register()
gpu_ops.register()
