"""The gate under vLLM's own ROCm and CUDA platform classes; only the driver's answers are made up."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.gate.gate_support import wrongly_changed
from tests.sandbox import child, plugin
from tests.sandbox.model import TinyDeepseek
from tests.sandbox.spec import Emulation, EngineSpec, PluginOptions, VllmOptions
from vllm_aiter_mla.admission import ATTENTION_OPS

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
OFF = {"max_num_seqs": 256}
FUSION = "pass_config.fuse_rope_kvcache_cat_mla"
COMPILE_OPTIONS = {
    "default": {},
    **{f"O{level}": {"optimization_level": level} for level in (0, 1, 3)},  # 2 is the default
    **{f"mode {mode}": {"compilation_config": {"mode": mode}} for mode in range(4)},
    **{mode: {"compilation_config": {"cudagraph_mode": mode}}
       for mode in ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")},
    "rotary op": {"compilation_config": {"custom_ops": ["+rotary_embedding"]}},
    "rotary op, fusions": {"compilation_config": {"custom_ops": ["+rotary_embedding"], "pass_config": {
        "fuse_rope_kvcache": True}}},
    "partition": {"compilation_config": PARTITION},
    "partition, O1": {"compilation_config": PARTITION, "optimization_level": 1},
    "partition, no fusion": {"compilation_config": {**PARTITION, "pass_config": {"fuse_rope_kvcache_cat_mla": False}}},
    "partition, fusion": {"compilation_config": {**PARTITION, "pass_config": {"fuse_rope_kvcache_cat_mla": True}}},
    "nothing splits": {"compilation_config": {"splitting_ops": []}},
    "output quantised": {"compilation_config": {"pass_config": {"fuse_attn_quant": True}}},
    "eager": {"enforce_eager": True},
}  # fmt: skip
WITH_AITER = {
    **{f"{name}, off": {**OFF, **options} for name, options in COMPILE_OPTIONS.items()},
    **{f"{name}, on": {**ON, **options} for name, options in COMPILE_OPTIONS.items()},
    "other attention": ON | {"attention_backend": "TRITON_MLA"},
    "other attention, off": OFF | {"attention_backend": "TRITON_MLA"},
    "aiter by name": ON | {"attention_backend": "ROCM_AITER_MLA"},
    "triton": {"max_num_seqs": 256, "attention_backend": "TRITON_MLA",
               "additional_config": {"aiter_mla": {"enabled": True, "kernel": "triton"}}},
}  # fmt: skip
STRICT = ON | {"additional_config": {"aiter_mla": {"enabled": True, "strict": True}}}
WITHOUT_AITER = {
    "flag": ON, "strict": STRICT, "off": OFF,
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


def test_on_vllms_rocm_platform_one_flag_engages_the_module_and_keeps_full_graphs(with_aiter):
    found = with_aiter["default, on"]
    assert found["gate"] == {"limit": 256, "integration": "module"}
    assert found["options"]["use_inductor_graph_partition"] is False
    assert "FULL_AND_PIECEWISE" in str(found["options"]["cudagraph_mode"])
    assert {*ATTENTION_OPS, "vllm::unified_mla_attention_with_output"} <= set(found["options"]["splitting_ops"])
    assert any("decode limit 256" in line for _, line in found["said"])


def test_on_vllms_rocm_platform_the_passes_run_where_the_user_switches_partition_on(with_aiter):
    found = with_aiter["partition, on"]
    assert found["gate"] == {"limit": 256, "integration": "passes"}
    assert found["ranges"][0] == [1, 256]


def test_on_vllms_rocm_platform_without_the_flag_nothing_of_ours_is_in_the_config(with_aiter):
    found = with_aiter["default, off"]
    assert (found["gate"], found["said"]) == (None, [])
    assert not set(ATTENTION_OPS) & set(found["options"]["splitting_ops"])


@pytest.mark.parametrize("name", COMPILE_OPTIONS)
def test_i18_on_vllms_rocm_platform_no_compile_option_changes_by_the_flag_but_its_own(with_aiter, name):
    off, on = with_aiter[f"{name}, off"], with_aiter[f"{name}, on"]
    assert on["slot"]["limit"] == 256
    off, on = ({**one["options"], "slot": SimpleNamespace(**one["slot"])} for one in (off, on))
    assert wrongly_changed(off, on) == {}


def assert_added_nothing(found, off, code, remedy):
    """One warning with code and remedy, no line that says "on", and the config is that without the flag."""
    ((level, line),) = found["said"]
    assert level == logging.WARNING
    assert code in line
    assert remedy in line
    assert found["gate"] is None
    assert found["options"] == off["options"]


@pytest.mark.wide  # tests/gate/test_admission.py, and tests/plan/test_plan.py on vLLM's ROCm platform
def test_platform_skip_with_aiter_off(without_aiter):
    assert_added_nothing(without_aiter["flag"], without_aiter["off"], "aiter_off", "VLLM_ROCM_USE_AITER=1")


@pytest.mark.wide  # tests/gate/test_gate_skips.py
def test_platform_skip_ends_the_start_in_strict_mode(without_aiter):
    assert "aiter_off" in without_aiter["strict"]["error"]


@pytest.mark.parametrize("switch", ["with_aiter", pytest.param("without_aiter", marks=pytest.mark.wide)])
def test_platform_skip_spares_aiters_attention_by_name_as_vllm_takes_it(request, switch):
    found = request.getfixturevalue(switch)["aiter by name"]
    assert found["backend"] == "AiterMLAImpl"
    assert (found["gate"]["limit"], found["gate"]["integration"]) == (256, "module")


def test_platform_skip_with_another_attention(with_aiter):
    off = with_aiter["other attention, off"]
    assert_added_nothing(with_aiter["other attention"], off, "attention_backend", "--attention-backend")


def test_platform_skip_leaves_out_a_kernel_by_name_and_says_so(with_aiter):
    found = with_aiter["triton"]
    assert found["gate"]["limit"] == 256
    assert any("kernel triton" in line and "attention_backend" in line for _, line in found["said"])
    assert not any("attention_backend" in line for _, line in with_aiter["default, on"]["said"])


@pytest.mark.wide
def test_platform_skip_with_aiters_mla_off(model):
    options = {"flag": ON, "off": OFF}
    found = build_all(model, options, VLLM_ROCM_USE_AITER="1", VLLM_ROCM_USE_AITER_MLA="0")
    assert_added_nothing(found["flag"], found["off"], "aiter_off", "VLLM_ROCM_USE_AITER_MLA")


@pytest.mark.wide
def test_platform_skip_on_cuda(model):
    build(model, "cpu", "", [{}])  # vLLM keeps what it finds out about a model class
    found = build_all(model, {"flag": ON, "off": OFF}, "cuda")
    assert_added_nothing(found["flag"], found["off"], "platform", "kernel=triton")


# The founding prerequisite: vLLM's own table switches its fusion on where the user switches partition on.


@pytest.mark.parametrize(
    ("name", "fusion"), [("partition", True), ("partition, fusion", True), ("partition, no fusion", False),
                         ("partition, O1", False), ("default", False)],
)  # fmt: skip
def test_prerequisite_is_what_vllm_gives_and_is_said_in_one_line(with_aiter, name, fusion):
    off, on = with_aiter[f"{name}, off"], with_aiter[f"{name}, on"]
    assert off["options"][FUSION] is on["options"][FUSION] is fusion
    lines = [line for _, line in on["said"] if "fuse_rope_kvcache_cat_mla" in line]
    assert len(lines) == (name != "default"), "said where the passes run"
    assert not lines or f"is {'on' if fusion else 'off'}: " in lines[0]


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
