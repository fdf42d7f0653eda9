"""A worker over stub layers: as much of vLLM's as start-up touches."""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode, VllmConfig
from vllm.platforms import current_platform

from tests.support.opcalls import NAME, layer_of
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.engine import Engine, attach
from vllm_aiter_mla.passes.pipeline import AiterMLAPipeline
from vllm_aiter_mla.serving.layer import Layer
from vllm_aiter_mla.settings import Settings

CONFIG = VllmConfig()


class Worker:
    """As much of vLLM's as the hook touches."""

    rank = 0

    def __init__(self, pass_: Any, num_ranks: int = 1, num_engines: int = 1, **options: Any) -> None:
        layer = layer_of()
        compilation = layer._vllm_config.compilation_config
        compilation.inductor_compile_config = {} if pass_ is None else {current_platform.pass_key: pass_}
        compilation.static_forward_context = {NAME: layer}
        compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = [1, 8, 64], 64
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        compilation.mode, compilation.custom_ops = CompilationMode.VLLM_COMPILE, ["none"]
        self.vllm_config = layer._vllm_config
        self.vllm_config.cache_config.cache_dtype = "auto"
        self.vllm_config.model_config = SimpleNamespace(
            dtype="torch.bfloat16", hf_text_config=SimpleNamespace(), is_hybrid=False
        )
        self.vllm_config.device_config = SimpleNamespace(device_type="cuda")
        self.vllm_config.scheduler_config = SimpleNamespace(max_num_batched_tokens=2048, max_num_seqs=64)
        self.vllm_config.parallel_config = SimpleNamespace(
            world_size=num_ranks, data_parallel_size=num_engines, enable_elastic_ep=False
        )
        served_by(self.vllm_config)
        self.vllm_config.compute_hash = lambda: "k" * 64
        self.vllm_config.additional_config = {"aiter_mla": {"enabled": True} | options}
        self.steps = 0
        if isinstance(pass_, AiterMLAPipeline):  # as the gate makes it
            pass_.settings = compat_config.settings_of(self.vllm_config)
        self.engine: Any = attach(self)  # an ``Engine`` where the fast path is on

    def init_device(self) -> None:
        """Where vLLM makes its process groups."""

    def load_model(self) -> str:
        return "loaded"

    def compile_or_warm_up_model(self) -> str:
        return "warm"

    @property
    def model_runner(self) -> "Worker":
        """Its own: the hook asks it for one decode step only."""
        return self

    def _dummy_run(self, tokens: int, *, uniform_decode: bool, force_attention: bool) -> None:
        self.steps += 1
        layer_in(self).ran_kernel = "reference"


def served_by(config: Any, is_v2: bool = False, drafts: int = 0) -> None:
    """Let vLLM's first or second model runner serve a config, with so many drafts."""
    speculative = SimpleNamespace(enable_adaptive_verification=False, uses_dynamic_speculative_decoding=lambda: False)
    vars(config).update(speculative_config=speculative, num_speculative_tokens=drafts, use_v2_model_runner=is_v2)


def layer_in(one: Worker) -> Layer:
    return Layer.of(compat_config.mla_modules(one.vllm_config)[NAME])


def ours(limit: int = 16, **options: Any) -> AiterMLAPipeline:
    return AiterMLAPipeline(CONFIG, limit=limit, settings=Settings(**{"enabled": True} | options))


def check(layers: Iterable[Layer], *, strict: bool, capture_sizes: Sequence[int] = (), **served: Any) -> Engine:
    """Check the kernels of layers as a start does; return their engine. ``served``: see ``served_by``."""
    compilation = CompilationConfig(
        cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=list(capture_sizes),
        max_cudagraph_capture_size=max(capture_sizes, default=0),
    )  # fmt: skip
    config = SimpleNamespace(
        compilation_config=compilation, scheduler_config=SimpleNamespace(max_num_seqs=64),
        parallel_config=SimpleNamespace(world_size=1, data_parallel_size=1),
    )  # fmt: skip
    served_by(config, **served)
    engine = Engine(SimpleNamespace(vllm_config=config, rank=0), ours(1 << 20, strict=strict))
    engine.layers = list(layers)
    engine.check_layers()
    return engine
