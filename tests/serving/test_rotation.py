"""Batches that no kernel of ours takes keep flag off's bytes: its rotation, with its roundings, and its KV write."""

import copy
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
from vllm.model_executor import custom_op
from vllm.model_executor.layers.rotary_embedding import base, get_rope

from tests.passes.rotary import aiter_op
from tests.passes.stubs import forward
from tests.sandbox import gpu_ops
from tests.support.opcalls import OPS, SIZES, arguments, batch_of, layer_of
from tests.support.planted import raising
from vllm_aiter_mla.compat.layer import FUSED_ROPE, ROTARY_EMB, ROTARY_KERNEL
from vllm_aiter_mla.kernels.reference import gather_cos_sin, rotate
from vllm_aiter_mla.serving import module, ops
from vllm_aiter_mla.serving.layer import Layer

NOPE, WIDTH, HEADS, TOKENS, POSITIONS = 16, 64, 3, 33, 512
YARN = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
CLASSES = {
    "plain": {"rope_theta": 1e4},
    "yarn": YARN | {"rope_type": "yarn"},
    "deepseek": YARN | {"rope_type": "deepseek_yarn"},
}
# Rotary class; custom op; AITER's RoPE on ROCm -> what rotates where Inductor compiles the layer, and how often that
# rounds; the same elsewhere (no compilation, or back end "eager").
TABLE = {
    ("plain", False, False): (ROTARY_KERNEL, 1, ROTARY_EMB, 3),
    ("plain", True, False): (ROTARY_EMB, 1, ROTARY_EMB, 1),
    ("plain", True, True): (ROTARY_EMB, "AITER's", ROTARY_EMB, "AITER's"),
    ("yarn", False, False): (ROTARY_KERNEL, 1, ROTARY_EMB, 3),
    ("yarn", True, False): (ROTARY_EMB, 1, ROTARY_EMB, 1),
    ("yarn", True, True): (ROTARY_EMB, "AITER's", ROTARY_EMB, "AITER's"),
    ("deepseek", False, False): (ROTARY_KERNEL, 1, ROTARY_EMB, 3),
    ("deepseek", True, False): (ROTARY_KERNEL, 1, ROTARY_EMB, 3),
    ("deepseek", True, True): (ROTARY_KERNEL, 1, ROTARY_EMB, 3),
}
ROWS = [(*row, is_neox) for row in TABLE for is_neox in (False, True)]


def aiter_rotation(positions, query, key, head_size, table, is_neox, offsets=None):
    """AITER's kernel, in whose place any function serves that rounds otherwise than the others."""
    cos, sin = (half.unsqueeze(1) for half in gather_cos_sin(table, positions))
    for x in (query, key):
        x.copy_(rotate(x, cos, sin, is_neox) * 1.01)


@pytest.fixture(scope="module", autouse=True)
def aiters_kernel():
    aiter_op()
    library = torch.library.Library("vllm", "IMPL")
    library.impl("rocm_aiter_triton_rotary_embedding", aiter_rotation, "CPU")
    yield
    library._destroy()


def config_of(custom, backend="inductor"):
    ops_on = ["none", "+rotary_embedding"] if custom else ["none"]
    return CompilationConfig(mode=CompilationMode.VLLM_COMPILE, custom_ops=ops_on, backend=backend)


def embedding_of(kind, custom, aiter, is_neox):
    """vLLM's module, as it dispatches itself: on ROCm with AITER's RoPE, else on this platform."""
    with ExitStack() as stack:
        stack.enter_context(set_current_vllm_config(VllmConfig(compilation_config=config_of(custom))))
        if aiter:
            platform = mock.patch.object(type(custom_op.current_platform), "is_rocm", return_value=True)
            enabled = mock.patch.object(base.rocm_aiter_ops, "is_triton_rotary_embed_enabled", return_value=True)
            op = torch.ops.vllm.rocm_aiter_triton_rotary_embedding
            found = mock.patch.object(base.rocm_aiter_ops, "get_triton_rotary_embedding_op", return_value=op)
            for patch in (platform, enabled, found):
                stack.enter_context(patch)
        # vLLM keeps one module for equal arguments: another length of the table makes another one.
        length = POSITIONS + 2 * custom + 4 * aiter
        made = get_rope(WIDTH, length, is_neox_style=is_neox, rope_parameters=CLASSES[kind], dtype=torch.bfloat16)
        return copy.deepcopy(made)


def operands():
    draw = torch.Generator().manual_seed(1)
    q, k = (torch.randn(TOKENS, heads, width, generator=draw).bfloat16() for heads, width in
            ((HEADS, NOPE + WIDTH), (1, WIDTH)))  # fmt: skip
    return torch.randint(0, 128, (TOKENS,), generator=draw), q, k


def vllms_way(embedding, positions, q, k):
    """The lines of vLLM's wrapper."""
    q = q.clone()
    q[..., NOPE:], k = embedding(positions, q[..., NOPE:], k.clone())
    return q, k


def ours(rotation, embedding, positions, q, k):
    """The op's rotation of a batch that no kernel takes."""
    q, k, layer = q.clone(), k.clone(), SimpleNamespace(rotary_emb=embedding)
    rope = ops.Rope(positions, embedding.cos_sin_cache, torch.ones(()), embedding.is_neox_style, rotation)
    return q, Layer.rotate(layer, q[..., NOPE:], k, rope)


def rounded(times, embedding, positions, q, k):
    """The reference with one rounding, or with one for each product and each sum."""
    cos, sin = (half.unsqueeze(1) for half in gather_cos_sin(embedding.cos_sin_cache, positions))
    dtype = torch.float32 if times == 1 else torch.bfloat16
    q_pe, k = (rotate(x, cos, sin, embedding.is_neox_style, dtype).bfloat16() for x in (q[..., NOPE:], k))
    return torch.cat([q[..., :NOPE], q_pe], -1), k


@pytest.fixture(scope="module")
def found():
    """By row: the embedding, and what vLLM computes in one graph of Inductor's, in one of "eager", and uncompiled."""
    embeddings = {row: embedding_of(*row) for row in ROWS}

    def every(positions, q, k):
        return [vllms_way(one, positions, q, k) for one in embeddings.values()]

    torch._dynamo.reset()
    with torch.inference_mode():
        ways = [torch.compile(every, backend=backend, fullgraph=True) for backend in ("inductor", "eager")]
        results = [way(*operands()) for way in (*ways, every)]
    torch._dynamo.reset()
    return {row: (embeddings[row], *each) for row, *each in zip(ROWS, *results, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row)))
def test_todays_rounding_is_what_vllms_module_does_under_these_options(found, row):
    """By class, compilation mode, custom op and AITER's RoPE: the table, found by asking vLLM."""
    embedding, compiled, by_eager_backend, uncompiled = found[row]
    in_graph, times, elsewhere, times_elsewhere = TABLE[row[:3]]
    for backend, wanted in (("inductor", in_graph), ("eager", elsewhere)):
        attention = SimpleNamespace(_vllm_config=SimpleNamespace(compilation_config=config_of(row[1], backend)))
        assert module.compiled_rotation(SimpleNamespace(rotary_emb=embedding, mla_attn=attention)) == wanted
    for theirs, rotation, count in (
        (compiled, in_graph, times), (by_eager_backend, elsewhere, times_elsewhere),
        (uncompiled, elsewhere, times_elsewhere),
    ):  # fmt: skip
        assert_same(ours(rotation, embedding, *operands()), theirs)
        for known in (1, 3):
            is_this = all(map(torch.equal, rounded(known, embedding, *operands()), theirs))
            assert is_this is (known == count), f"vLLM rounds {count} times here"


def assert_same(ours, theirs):
    for name, a, b in zip(("q", "k_pe"), ours, theirs, strict=True):
        assert torch.equal(a, b), f"{name}: {(a != b).float().mean():.1%} of the bytes' values differ"


CUT = ["vllm::unified_mla_attention_with_output", "vllm::unified_mla_kv_cache_update"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fuses", "partition", "splitting_ops", "wanted"),
    [
        (True, True, CUT[:1], FUSED_ROPE),
        (True, False, [], FUSED_ROPE),
        (True, False, CUT, ROTARY_KERNEL),
        (False, True, CUT[:1], ROTARY_KERNEL),
    ],
)
def test_todays_rounding_is_that_of_vllms_own_fusion_where_it_runs(found, fuses, partition, splitting_ops, wanted):
    """The module by name over the user's graph partition, where vLLM's pass fuses with the flag off."""
    config = config_of(custom=False)
    config.pass_config.fuse_rope_kvcache_cat_mla = fuses
    config.use_inductor_graph_partition, config.splitting_ops = partition, splitting_ops
    attention = SimpleNamespace(_vllm_config=SimpleNamespace(compilation_config=config))
    embedding = next(embedding for row, (embedding, *_) in found.items() if not row[1])
    assert module.compiled_rotation(SimpleNamespace(rotary_emb=embedding, mla_attn=attention)) == wanted


@pytest.mark.slow
@pytest.mark.mutation("I5")
@pytest.mark.parametrize("always", [ROTARY_KERNEL, ROTARY_EMB])
def test_mutation_one_rotation_for_all_options_is_seen(found, always):
    others = 0
    for row in ROWS:
        embedding, compiled, _, uncompiled = found[row]
        _, times, _, times_elsewhere = TABLE[row[:3]]
        rounded_by_always = 1 if always == ROTARY_KERNEL else times_elsewhere
        for theirs, count in ((compiled, times), (uncompiled, times_elsewhere)):
            differs = "of the bytes' values differ"
            with nullcontext() if count == rounded_by_always else pytest.raises(AssertionError, match=differs):
                assert_same(ours(always, embedding, *operands()), theirs)
            others += count != rounded_by_always
    assert others


# -- whole batches, through the op

LIMIT = 4
BATCHES = {
    "prefill": batch_of(6, decodes=0, prefills=6),
    "mixed": batch_of(6, decodes=3, prefills=2),
    "above the limit": batch_of(LIMIT + 1),
    "a kernel that raises": batch_of(LIMIT),
    "vLLM's own at this count": batch_of(LIMIT),
}
ROPE = "mla_attention_with_rope"


def flag_off(layer, batch, args, times):
    """vLLM's own pieces: a rotation of all rows with so many roundings, the KV update, attention."""
    q, k_pe, kv_c, positions, table, k_scale, output, is_neox, *_ = args
    cos, sin = gather_cos_sin(table, positions)
    dtype = torch.float32 if times == 1 else q.dtype
    q[..., SIZES.p :] = rotate(q[..., SIZES.p :], cos.unsqueeze(1), sin.unsqueeze(1), is_neox, dtype).to(q.dtype)
    k_pe.copy_(rotate(k_pe, cos, sin, is_neox, dtype).to(q.dtype))
    gpu_ops.write_kv_rows(kv_c, k_pe, layer.kv_cache, batch.slot_mapping(), k_scale)
    layer.forward_impl(q, kv_c, k_pe.unsqueeze(1), layer.kv_cache, batch.metadata(), output)


def outcomes(monkeypatch, kind, cache, rotation, times):
    """(output, cache) of the batch's real rows, of ours and of flag off."""
    batch, both = BATCHES[kind], []
    for side in ("on", "off"):
        layer = layer_of(cache)
        args = list(arguments(ROPE, layer, batch.rows))
        args[8], args[4] = rotation, torch.randn(9, SIZES.r, generator=torch.Generator().manual_seed(2)).to(layer.act)
        one = Layer.of(layer)
        one.limit, one.rotary_emb = LIMIT, eager_embedding(args[4])
        run = raising(RuntimeError("planted")) if kind == "a kernel that raises" else None
        monkeypatch.setattr(Layer, "_bind", lambda self, inputs, run=run: ("planted", run))
        with forward([layer], batch):
            OPS[ROPE](*args) if side == "on" else flag_off(layer, batch, args, times)
        both.append((args[6][: batch.real], layer.kv_cache))
    return both


def eager_embedding(table):
    """vLLM's own module over this table, outside a compiled graph."""
    made = embedding_of("deepseek", False, False, True)
    made.head_size = made.rotary_dim = table.shape[1]
    made.cos_sin_cache = table
    return made


CASES = [(ROTARY_KERNEL, 1), (ROTARY_EMB, 3), (FUSED_ROPE, 3)]
each_batch = pytest.mark.parametrize("kind", BATCHES)


@each_batch
@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize(("rotation", "times"), CASES)
def test_todays_rounding_is_kept_in_every_byte_of_output_and_cache(monkeypatch, kind, cache, rotation, times):
    (output, rows), (their_output, their_rows) = outcomes(monkeypatch, kind, cache, rotation, times)
    assert torch.equal(output, their_output)
    assert torch.equal(rows, their_rows)


@pytest.mark.mutation("I5")
@each_batch
def test_mutation_todays_rounding_is_lost_with_vllms_fused_op_for_all(monkeypatch, kind):
    """Planted: what the op did before."""
    inner, ran = ops.rotate_and_write, []

    def fused(step, q, k_pe, kv_c, rope):
        ran.append(rope.rotation)
        return inner(step, q, k_pe, kv_c, rope._replace(rotation=FUSED_ROPE))

    monkeypatch.setattr(ops, "rotate_and_write", fused)
    (output, rows), (their_output, their_rows) = outcomes(monkeypatch, kind, "auto", ROTARY_KERNEL, 1)
    assert ran == [ROTARY_KERNEL]
    assert not torch.equal(rows, their_rows)
    assert not torch.equal(output, their_output)


def test_the_emulated_fused_op_rounds_and_skips_as_vllms_kernel_does():
    """Both products and their sum in the activation dtype; a row without a slot stays as it is."""
    layer, batch = layer_of(), batch_of(6)
    q, k_pe, kv_c, positions, table, k_scale, *_ = arguments(ROPE, layer, 6)
    slots = batch.slot_mapping().clone()
    slots[1] = -1
    q_pe, before_q, before_k, cache = q[..., SIZES.p :], q.clone(), k_pe.clone(), layer.kv_cache
    x, y = before_q[..., SIZES.p :].chunk(2, -1)
    cos, sin = (half.unsqueeze(1) for half in table[positions].chunk(2, -1))
    torch.ops._C_cache_ops.concat_and_cache_mla_rope_fused(
        positions, q_pe, k_pe, kv_c, table, True, slots, cache, "auto", k_scale
    )
    rotated = torch.cat([x * cos - y * sin, y * cos + x * sin], -1)
    assert torch.equal(q_pe[slots >= 0], rotated[slots >= 0]), "of bf16, each step rounds"
    for now, before in ((q_pe.flatten(1), before_q[..., SIZES.p :].flatten(1)), (k_pe, before_k)):
        assert (now != before).any(-1).tolist() == [True, False, True, True, True, True]
    written = (cache != layer.initial).any(-1).flatten().nonzero().flatten().tolist()
    assert written == sorted(slots[slots >= 0].tolist())
    with pytest.raises(ValueError, match="slots expected"):
        torch.ops._C_cache_ops.concat_and_cache_mla_rope_fused(
            positions, q_pe, k_pe, kv_c, table, True, slots[:5], cache, "auto", k_scale
        )


def test_the_emulated_kv_write_divides_saturates_and_keeps_nan_as_vllms_kernel_does():
    """Half-way between two codes a reciprocal may fall to the other side."""
    fp8, scale = torch.float8_e4m3fn, torch.tensor(7 / 16)
    half_way = torch.cat([(17 + 2 * torch.arange(8)) / 16 * 2.0**k for k in range(-3, 5)])
    rows = torch.cat([half_way * scale, torch.tensor([float("nan"), 3e38, -3e38, 0.0])]).bfloat16().expand(2, -1)
    cache = torch.zeros(1, 2, rows.shape[1], dtype=torch.uint8)
    gpu_ops.write_kv_rows(rows[:, :60], rows[:, None, 60:], cache, torch.tensor([1, -1]), scale)
    (other, got) = cache[0].view(fp8).float()
    assert not other.any(), "no slot"
    assert torch.equal(got[:64], half_way.to(fp8).float())
    assert not torch.equal(got[:64], (half_way * scale * scale.reciprocal()).to(fp8).float())
    assert got[64].isnan()
    assert got[65:].tolist() == [448.0, -448.0, 0.0]
