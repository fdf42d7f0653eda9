"""The demo on a GPU, as far as a machine without one can show: what would be started, and when it says why not."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from tests.demo.test_demo import result
from tests.sandbox import child, demo, engine, plugin, runs
from tests.sandbox.runs import Options
from tests.sandbox.spec import EngineSpec
from vllm_aiter_mla import status
from vllm_aiter_mla.compat import layer as compat_layer

GPU = EngineSpec(device="gpu", kernel="triton")


@pytest.fixture
def a_gpu(monkeypatch):
    """torch sees two GPUs; vLLM's platform is CUDA."""
    import vllm.platforms

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    platform = SimpleNamespace(is_cuda_alike=lambda: True, is_cpu=lambda: False, device_type="cuda")
    monkeypatch.setattr(vllm.platforms, "_current_platform", platform)
    monkeypatch.setattr(compat_layer, "KNOWN_IMPLS", set(compat_layer.KNOWN_IMPLS))
    return platform


def test_on_a_gpu_the_triton_kernel_meets_vllm_over_both_caches_and_every_scenario(a_gpu):
    assert runs.why_not(Options(kernel="triton", tensor_parallel_size=2)) is None
    bf16, fp8 = runs.runs(Options(kernel="triton", full=True))
    assert [run.spec.kv_cache_dtype for run in (bf16, fp8)] == ["auto", "fp8"]
    for run in (bf16, fp8):
        assert (run.spec.device, run.spec.kernel, run.spec.enabled) == ("gpu", "triton", True)
        assert (run.base.device, run.base.enabled) == ("gpu", False)
        assert run.spec.scenarios == runs.BF16_SCENARIOS
    assert (bf16.bound, fp8.bound) == (runs.SUM_ORDER, None)


def test_the_engine_on_a_gpu_runs_on_vllms_own_platform(tmp_path):
    environment = engine.environment_for(GPU, tmp_path, tmp_path)
    assert not {"VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND"} & (environment.keys() - os.environ.keys())
    # With fp8 absorb weights there would be no W_UK_T for the kernel.
    assert environment["VLLM_ROCM_USE_AITER_FP8BMM"] == "0"


def test_an_engine_does_not_inherit_the_gauge_of_the_process_that_starts_it(monkeypatch, tmp_path):
    monkeypatch.setenv(status.RUN, str(tmp_path))
    assert status.RUN not in engine.environment_for(EngineSpec(), tmp_path, tmp_path)


def test_the_options_for_a_gpu_are_options_of_this_vllm(tmp_path):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    arguments = EngineArgs(model=str(tmp_path), **child.on_device(GPU))
    assert arguments.kv_cache_memory_bytes == child.GPU_KV_BYTES
    backend, implementation = plugin.GPU_ATTENTION
    assert AttentionBackendEnum[arguments.attention_backend].name == backend
    assert AttentionBackendEnum[backend].get_class().get_impl_cls().__name__ == implementation
    assert child.on_device(EngineSpec()) == {}


def test_only_the_gpu_sandbox_admits_vllms_triton_attention(a_gpu):
    assert plugin.GPU_ATTENTION[1] not in compat_layer.KNOWN_IMPLS
    plugin.activate()
    assert plugin.GPU_ATTENTION[1] in compat_layer.KNOWN_IMPLS


def test_an_engine_for_a_gpu_on_a_cpu_build_is_an_error():
    with pytest.raises(RuntimeError, match="for a GPU, vLLM's platform is cpu"):
        plugin.check_device("gpu")


def test_an_engine_for_a_cpu_on_a_gpu_build_is_an_error(a_gpu):
    with pytest.raises(RuntimeError, match="for a CPU, vLLM's platform is cuda"):
        plugin.check_device("cpu")


def test_a_gpu_beside_a_vllm_built_for_cpus_is_named(a_gpu, monkeypatch):
    monkeypatch.setattr(a_gpu, "is_cuda_alike", lambda: False)
    monkeypatch.setattr(a_gpu, "device_type", "cpu")
    assert "platform is 'cpu', although torch sees a GPU" in runs.why_not(Options(kernel="triton"))


def test_more_workers_than_gpus_are_refused_with_both_numbers(a_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    why = runs.why_not(Options(kernel="triton", tensor_parallel_size=2))
    assert why == "demo: --tensor-parallel-size 2: torch sees 1 GPU here"


def test_the_demo_on_a_gpu_prints_the_card_and_its_bound(a_gpu, monkeypatch):
    on = result(runs.SHORT_SCENARIOS)
    on.versions["device"] = "A Card"
    monkeypatch.setattr(engine, "run", lambda spec, **_: on)
    console = Console(record=True, width=160, file=open("/dev/null", "w"))  # noqa: SIM115
    assert demo.main(Options(kernel="triton"), console) == 0
    text = console.export_text()
    assert "device: A Card" in text
    assert "bf16 KV: top-1 >= 95%, max |dlogprob| <= 0.5" in text
