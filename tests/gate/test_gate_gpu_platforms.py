"""The gate under vLLM's own ROCm and CUDA platform classes; only the driver's answers are made up."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sandbox import child, plugin
from tests.sandbox.model import TinyDeepseek
from tests.sandbox.spec import Emulation, EngineSpec, PluginOptions, VllmOptions
from vllm_aiter_mla.admission import ATTENTION_OPS
from vllm_aiter_mla.compat.config import VLLMS_FUSION

pytestmark = pytest.mark.slow

CHILD = Path(__file__).with_name("gpu_platform_child.py")
ON = {"additional_config": {"aiter_mla": {"enabled": True}}, "max_num_seqs": 256}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of one layer; vLLM's cache root lies in its folder."""
    return str(TinyDeepseek(num_hidden_layers=1).save(tmp_path_factory.mktemp("model")))


def build(model, platform, arch, options, **environment):
    """(what the child says of each of ``options``, what it logged)."""
    environment["VLLM_CACHE_ROOT"] = str(Path(model) / "cache")
    request = {"platform": platform, "arch": arch, "model": model, "options": options}
    command = [sys.executable, str(CHILD), json.dumps(request)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1]), run.stdout + run.stderr


PARTITION = {"use_inductor_graph_partition": True}
FUSED = {"pass_config": {"fuse_rope_kvcache_cat_mla": True}}
UNFUSED = {"pass_config": {"fuse_rope_kvcache_cat_mla": False}}
WITH_AITER = {
    "flag": ON,
    "partition without the flag": {"max_num_seqs": 256, "compilation_config": PARTITION},
    "the user's False": ON | {"compilation_config": UNFUSED},
    "the user's True": ON | {"compilation_config": FUSED},
    "level 1": ON | {"optimization_level": 1},
    "level 1 without the flag": {"max_num_seqs": 256, "optimization_level": 1, "compilation_config": PARTITION},
    "other attention": ON | {"attention_backend": "TRITON_MLA"},
    "aiter by name": ON | {"attention_backend": "ROCM_AITER_MLA"},
    "triton": {"max_num_seqs": 256, "attention_backend": "TRITON_MLA",
               "additional_config": {"aiter_mla": {"enabled": True, "kernel": "triton"}}},
    "off": {"max_num_seqs": 256},
}  # fmt: skip
STRICT = ON | {"additional_config": {"aiter_mla": {"enabled": True, "strict": True}}}
WITHOUT_AITER = {
    "flag": ON, "strict": STRICT, "off": {"max_num_seqs": 256},
    "aiter by name": ON | {"attention_backend": "ROCM_AITER_MLA"},
}  # fmt: skip


def build_all(model, options, platform="rocm", **environment):
    found, _ = build(model, platform, "9.0" if platform == "cuda" else "gfx950", list(options.values()), **environment)
    return dict(zip(options, found, strict=True))


@pytest.fixture(scope="module")
def with_aiter(model):
    return build_all(model, WITH_AITER, VLLM_ROCM_USE_AITER="1")


@pytest.fixture(scope="module")
def without_aiter(model):
    """Unset, as by vLLM's default."""
    return build_all(model, WITHOUT_AITER, VLLM_ROCM_USE_AITER="0")


def test_on_vllms_rocm_platform_one_flag_opens_the_decode_limit_and_keeps_full_graphs(with_aiter):
    found = with_aiter["flag"]
    added = {"use_inductor_graph_partition": True, "compile_ranges_endpoints": [256], VLLMS_FUSION: True}
    assert found["gate"] == {"limit": 256, "integration": "passes", "added": added}
    assert found["ranges"][0] == [1, 256]
    assert found["graph_partition"] is found["fusion"] is True
    assert found["cudagraph_mode"] == "FULL_AND_PIECEWISE"
    assert {*ATTENTION_OPS, "vllm::unified_mla_attention_with_output"} <= set(found["splitting_ops"])
    assert any("decode limit 256" in line for _, line in found["said"])


def test_on_vllms_rocm_platform_without_the_flag_nothing_of_ours_is_in_the_config(with_aiter):
    found = with_aiter["off"]
    assert (found["gate"], found["said"]) == (None, [])
    assert not set(ATTENTION_OPS) & set(found["splitting_ops"])


MAY_CHANGE = ("ranges", "graph_partition", "fusion", "splitting_ops", "cudagraph_mode")


def assert_added_nothing(found, off, code, remedy):
    """One warning with code and remedy, no line that says "on", and the config is that without the flag."""
    ((level, line),) = found["said"]
    assert level == logging.WARNING
    assert code in line
    assert remedy in line
    assert found["gate"] is None
    assert [name for name in MAY_CHANGE if found[name] != off[name]] == []


def test_platform_skip_with_aiter_off(without_aiter):
    assert_added_nothing(without_aiter["flag"], without_aiter["off"], "aiter_off", "VLLM_ROCM_USE_AITER=1")


def test_platform_skip_ends_the_start_in_strict_mode(without_aiter):
    assert "aiter_off" in without_aiter["strict"]["error"]


def test_platform_skip_spares_aiters_attention_by_name_as_vllm_takes_it(without_aiter, with_aiter):
    for found in (without_aiter["aiter by name"], with_aiter["aiter by name"]):
        assert found["backend"] == "AiterMLAImpl"
        assert (found["gate"]["limit"], found["gate"]["integration"]) == (256, "passes")


def test_platform_skip_with_another_attention(with_aiter):
    assert_added_nothing(with_aiter["other attention"], with_aiter["off"], "attention_backend", "--attention-backend")


def test_platform_skip_leaves_out_a_kernel_by_name_and_says_so(with_aiter):
    found = with_aiter["triton"]
    assert found["gate"]["limit"] == 256
    assert any("kernel triton" in line and "attention_backend" in line for _, line in found["said"])
    assert not any("attention_backend" in line for _, line in with_aiter["flag"]["said"])


@pytest.mark.wide
def test_platform_skip_with_aiters_mla_off(model):
    options = {"flag": ON, "off": {"max_num_seqs": 256}}
    found = build_all(model, options, VLLM_ROCM_USE_AITER="1", VLLM_ROCM_USE_AITER_MLA="0")
    assert_added_nothing(found["flag"], found["off"], "aiter_off", "VLLM_ROCM_USE_AITER_MLA")


@pytest.mark.wide
def test_platform_skip_on_cuda(model):
    build(model, "cpu", "", [{}])  # vLLM keeps what it finds out about a model class
    found = build_all(model, {"flag": ON, "off": {"max_num_seqs": 256}}, "cuda")
    assert_added_nothing(found["flag"], found["off"], "platform", "kernel=triton")


def assert_prerequisite(found, control):
    """The flag gives vLLM's own fusion what vLLM gives it where the user switches partition on."""
    given = [(one["graph_partition"], one["fusion"]) for one in (found, control)]
    assert given == [(True, control["fusion"])] * 2


def test_prerequisite_is_what_vllms_defaults_give_with_partition(with_aiter):
    assert_prerequisite(with_aiter["flag"], with_aiter["partition without the flag"])
    assert with_aiter["flag"]["fusion"] is True
    assert [line for level, line in with_aiter["flag"]["said"] if f"-cc.{VLLMS_FUSION}=true" in line]
    assert with_aiter["off"]["fusion"] is False


def test_prerequisite_follows_the_optimization_level(with_aiter):
    assert_prerequisite(with_aiter["level 1"], with_aiter["level 1 without the flag"])
    assert with_aiter["level 1"]["fusion"] is False


@pytest.mark.parametrize(("given", "kept"), [("the user's False", False), ("the user's True", True)])
def test_prerequisite_that_the_user_gave_is_kept_without_a_line(with_aiter, given, kept):
    assert with_aiter[given]["graph_partition"] is True
    assert with_aiter[given]["fusion"] is kept
    assert not [line for _, line in with_aiter[given]["said"] if "fuse_rope_kvcache_cat_mla" in line]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("platform", "arch", "cache"), [("cuda", "9.0", "auto"), ("cuda", "9.0", "fp8"), ("rocm", "gfx942", "fp8")]
)
def test_the_demo_on_a_gpu_gets_its_attention_and_its_decode_limit_from_vllm(model, platform, arch, cache):
    if platform == "cuda":
        # vLLM keeps what it finds out about a model class. For CUDA the class would import kernels of that build.
        build(model, "cpu", "", [{}])
    spec = EngineSpec(
        vllm=VllmOptions(kv_cache_dtype=cache), plugin=PluginOptions(kernel="triton"), emulation=Emulation(device="gpu")
    )
    options = child.on_device(spec) | {
        "additional_config": child.additional(spec),
        "compilation_config": child.compilation(spec),
        "kv_cache_dtype": cache,
        "max_num_seqs": spec.vllm.max_num_seqs,
    }
    path = os.pathsep.join(filter(None, [str(plugin.FOLDER), str(plugin.CHECKOUT), os.environ.get("PYTHONPATH")]))
    (found,), log = build(model, platform, arch, [options], PYTHONPATH=path)
    assert found["gate"]["limit"] == spec.vllm.max_num_seqs
    assert found["backend"] == plugin.GPU_ATTENTION[1]
    assert "kernel triton" in log
