"""A stub of vLLM's compiled ops, for a torch that vLLM's libraries were not built for: `make test-torch`.

It lies in the place of ``vllm/_C*.so`` and declares the ops that vLLM's Python and the tests without an engine name,
with their own schemas. It has no kernels: a call raises. ``tests.sandbox.gpu_ops`` adds that of ``rotary_embedding``.
"""

import torch

SCHEMAS = (
    "rotary_embedding(Tensor positions, Tensor! query, Tensor!? key, int head_size, Tensor cos_sin_cache, bool is_neox,"
    " int rope_dim_offset=0, bool inverse=False) -> ()",
    "rms_norm(Tensor! out, Tensor input, Tensor? weight, float epsilon) -> ()",
    "fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor? weight, float epsilon) -> ()",
    "silu_and_mul(Tensor! out, Tensor input) -> ()",
    # vLLM 0.33 looks up these names; its library for CPUs declares them without arguments.
    "static_scaled_fp8_quant() -> ()",
    "dynamic_scaled_fp8_quant() -> ()",
    "dynamic_per_token_scaled_fp8_quant() -> ()",
    "init_cpu_memory_env(SymInt[] node_ids) -> ()",
)
# vLLM imports one of three names by the machine's vector unit, and some code a second one.
LIBRARY = torch.library.Library("_C", "FRAGMENT")
for schema in SCHEMAS:
    if not hasattr(torch.ops._C, schema.partition("(")[0]):
        LIBRARY.define(schema)
# A worker for CPUs asks where its memory is; in an engine without one of these libraries that is everywhere.
LIBRARY.impl("init_cpu_memory_env", lambda node_ids: None, "CompositeExplicitAutograd")
