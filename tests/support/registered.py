"""The plugin's ops and those that only GPU builds of vLLM register; the sandbox itself stays off."""

import pytest
import torch
import vllm._custom_ops  # noqa: F401  loads vLLM's own library before the sandbox fills its gaps

from tests.sandbox import gpu_ops
from vllm_aiter_mla import plugin

plugin.register()
gpu_ops.register()


@pytest.fixture(autouse=True)
def fresh():
    """One thread."""
    threads = torch.get_num_threads()
    # The tensors are tiny, and a machine that tests may have few cores.
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
