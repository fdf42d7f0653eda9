"""Fixtures for tests on real vLLM configs: the plugin registered, vLLM's compile mode kept on the CPU platform."""

import base64
import copy
import functools
import json
import os
import pickle
import subprocess
import sys
from typing import Any

import pytest
from vllm.config import PassConfig

from tests.gate import gate_support
from tests.sandbox import platform
from tests.sandbox.model import TinyDeepseek, save_config
from vllm_aiter_mla import plugin
from vllm_aiter_mla.commands.compat import rocm_config
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.compat import patches
from vllm_aiter_mla.settings import FLAG_FIELD, LIMIT_FIELD

platform.see_no_amx()
plugin.register()
# vLLM would start a process of its own to look at a model class.
rocm_config.inspect_models_in_process()


@pytest.fixture(autouse=True)
def cache_root(tmp_path, monkeypatch):
    """A skipped config writes its status under vLLM's cache root: not under the developer's."""
    root = tmp_path / "vllm-cache"
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(root))
    return root


@pytest.fixture(scope="session")
def without_plugin():
    """What a process without the plugin sees: a flag-off config of its own, and our PassConfig unpickled."""
    pickled = base64.b64encode(pickle.dumps(PassConfig(**{FLAG_FIELD: True, LIMIT_FIELD: 64}))).decode()
    done = subprocess.run(
        [sys.executable, gate_support.__file__, pickled], env={**os.environ, "VLLM_PLUGINS": ""}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.fixture(scope="session")
def mla_model(tmp_path_factory):
    return save_config(TinyDeepseek(num_hidden_layers=2).config(), tmp_path_factory.mktemp("mla"))


@pytest.fixture
def dense_model(mla_model):
    """The ``ModelConfig`` of a model without MLA; a bidirectional one, which vLLM runs without it."""
    model = copy.copy(gate_support.vllm_config(mla_model).model_config)
    model.hf_text_config = copy.copy(model.hf_text_config)
    model.hf_text_config.is_causal = False
    assert not model.use_mla
    return model


REAL_FACTS = compat_config.platform_facts


@pytest.fixture
def real_facts():
    """What the gate asks vLLM's platform, where no fixture replaces it."""
    return REAL_FACTS


@pytest.fixture
def registered(monkeypatch):
    """Registration as it went without a failure, whatever an earlier test has planted; on a card with AITER."""
    monkeypatch.setattr(patches, "_failed", {})
    monkeypatch.setattr(compat_config, "platform_facts", lambda vllm_config: {})


@pytest.fixture
def compiling(monkeypatch, registered):
    """The CPU platform as a GPU's: VLLM_COMPILE stays. Wrapped around the hook, which then goes around it in turn."""
    gate_support.keep_compile_mode(monkeypatch)


@pytest.fixture
def config(compiling, mla_model):
    """Builds a ``VllmConfig`` of an MLA model that compiles; keyword arguments go to ``EngineArgs``."""
    return functools.partial(gate_support.vllm_config, mla_model)
