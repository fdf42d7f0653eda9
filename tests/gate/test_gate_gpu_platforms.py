"""The gate under vLLM's own ROCm and CUDA platform classes; only the driver's answers are made up."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sandbox import child, plugin
from tests.sandbox.model import TinyDeepseek
from tests.sandbox.spec import EngineSpec
from vllm_aiter_mla.admission import ATTENTION_OPS

pytestmark = pytest.mark.slow

CHILD = Path(__file__).with_name("gpu_platform_child.py")
ON = {"additional_config": {"aiter_mla": {"enabled": True}}, "max_num_seqs": 256}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of one layer; vLLM's cache root lies in its folder."""
    return str(TinyDeepseek(num_hidden_layers=1).save(tmp_path_factory.mktemp("model")))


def build(model, platform, arch, options, **environment):
    """(what the child says, what it logged)."""
    environment["VLLM_CACHE_ROOT"] = str(Path(model) / "cache")
    request = {"platform": platform, "arch": arch, "model": model, "options": options}
    command = [sys.executable, str(CHILD), json.dumps(request)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1]), run.stdout + run.stderr


@pytest.mark.parametrize("arch", [pytest.param("gfx942", marks=pytest.mark.wide), "gfx950"])
def test_on_vllms_rocm_platform_one_flag_opens_the_decode_limit_and_keeps_full_graphs(model, arch):
    options = ON | {"kv_cache_dtype": "fp8"}
    found, log = build(model, "rocm", arch, options, VLLM_ROCM_USE_AITER="1")
    assert found["gate"] == {"limit": 256, "integration": "passes"}
    assert found["ranges"][0] == [1, 256]
    assert found["graph_partition"] is True
    assert found["cudagraph_mode"] == "FULL_AND_PIECEWISE"
    assert {*ATTENTION_OPS, "vllm::unified_mla_attention_with_output"} <= set(found["splitting_ops"])
    assert "decode limit 256" in log


def test_on_vllms_rocm_platform_without_the_flag_nothing_of_ours_is_in_the_config(model):
    found, log = build(model, "rocm", "gfx942", {"kv_cache_dtype": "fp8", "max_num_seqs": 256})
    assert found["gate"] is None
    assert not set(ATTENTION_OPS) & set(found["splitting_ops"])
    assert "aiter-mla" not in log


@pytest.mark.wide
@pytest.mark.parametrize(
    ("platform", "arch", "cache"), [("cuda", "9.0", "auto"), ("cuda", "9.0", "fp8"), ("rocm", "gfx942", "fp8")]
)
def test_the_demo_on_a_gpu_gets_its_attention_and_its_decode_limit_from_vllm(model, platform, arch, cache):
    if platform == "cuda":
        # vLLM keeps what it finds out about a model class. For CUDA the class would import kernels of that build.
        build(model, "cpu", "", {})
    spec = EngineSpec(device="gpu", kernel="triton", kv_cache_dtype=cache)
    options = child.on_device(spec) | {
        "additional_config": child.additional(spec),
        "compilation_config": child.compilation(spec),
        "kv_cache_dtype": cache,
        "max_num_seqs": spec.max_num_seqs,
    }
    path = os.pathsep.join(filter(None, [str(plugin.FOLDER), str(plugin.CHECKOUT), os.environ.get("PYTHONPATH")]))
    found, log = build(model, platform, arch, options, PYTHONPATH=path)
    assert found["gate"]["limit"] == spec.max_num_seqs
    assert found["backend"] == plugin.GPU_ATTENTION[1]
    assert "kernel triton" in log
