"""The fused forward over vLLM's own wrapper, norms and rotation: what it hands on is what vLLM's forward hands on."""

import copy

import pytest
import torch
import vllm.model_executor.layers.mla as vllm_mla
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.utils.torch_utils import _resolve_layer_name

from tests.passes.stubs import Sizes, StubLayer
from vllm_aiter_mla.admission import Skip
from vllm_aiter_mla.compat import wrapper as compat_wrapper
from vllm_aiter_mla.compat.layer import ROTARY_EMB, ROTARY_KERNEL
from vllm_aiter_mla.serving import module
from vllm_aiter_mla.serving.decision import PASSED
from vllm_aiter_mla.serving.layer import Layer

HIDDEN, HEADS, NOPE, ROPE, LATENT, LORA, VALUE = 24, 3, 8, 4, 16, 12, 6
SIZES = Sizes(HEADS, NOPE, ROPE, LATENT, VALUE)
TOKENS = 5


class Projection(torch.nn.Linear):
    """Returns a bias besides, as vLLM's, which need a tensor-parallel group."""

    def forward(self, x):
        return super().forward(x), None


class Attention(torch.nn.Module, StubLayer):
    """Stands where vLLM's ``MLAAttention`` does, whose forward vLLM's wrapper calls and the plugin's op does not."""

    def __init__(self, prefix, **_):
        torch.nn.Module.__init__(self)
        StubLayer.__init__(self, prefix, SIZES, torch.float32, kernel="reference")
        self.given = []

    def forward(self, q, kv_c, k_pe, output_shape, q_dcp_replicated):
        assert q_dcp_replicated is None
        self.given.append((q.clone(), kv_c, k_pe))
        return attended(q, kv_c).view(output_shape)


def attended(q, kv_c):
    return q[..., :VALUE].flatten(1) * kv_c.sum(-1, keepdim=True)


def fused_norms(q_c, kv_c, q_weight, kv_weight, eps):
    """vLLM's ``fused_q_kv_rmsnorm``, a Triton kernel, on a CPU."""
    return (torch.nn.functional.rms_norm(x, x.shape[-1:], w, eps) for x, w in ((q_c, q_weight), (kv_c, kv_weight)))


@pytest.fixture
def wrapper_with(monkeypatch):
    """Return a wrapper of the fused class, as vLLM's models build it inside ``module.installed``."""
    for place in (vllm_mla, compat_wrapper):
        monkeypatch.setattr(place, "MLAAttention", Attention)
        monkeypatch.setattr(place, "fused_q_kv_rmsnorm", fused_norms)

    def projection(width_in, width_out):
        return Projection(width_in, width_out, bias=False)

    def norm(width):
        made = RMSNorm(width, eps=1e-2)
        torch.nn.init.normal_(made.weight)
        return made

    def wrapper(lora=LORA, gated=False, fuse_norms=False, is_neox=False, number=7):
        torch.manual_seed(0)
        query, kv = HEADS * (NOPE + ROPE), LATENT + ROPE
        modules = vllm_mla.MLAModules(
            kv_a_layernorm=norm(LATENT), kv_b_proj=projection(LATENT, HEADS * (NOPE + VALUE)),
            rotary_emb=copy.deepcopy(get_rope(ROPE, 64, is_neox, {"rope_theta": 100.0}, torch.float32)),
            o_proj=projection(HEADS * VALUE, HIDDEN), g_proj=projection(HIDDEN, HEADS * VALUE) if gated else None,
            fused_qkv_a_proj=projection(HIDDEN, lora + kv) if lora else None,
            kv_a_proj_with_mqa=None if lora else projection(HIDDEN, kv), q_a_layernorm=norm(lora) if lora else None,
            q_b_proj=projection(lora, query) if lora else None, q_proj=None if lora else projection(HIDDEN, query),
            indexer=None, is_sparse=False, topk_indices_buffer=None,
        )  # fmt: skip
        return vllm_mla.MultiHeadLatentAttentionWrapper(
            HIDDEN, HEADS, 1.0, NOPE, ROPE, VALUE, lora, LATENT, modules, prefix=f"model.layers.{number}.self_attn",
            fuse_qkv_rmsnorm=fuse_norms,
        )  # fmt: skip

    with set_current_vllm_config(VllmConfig()), module.installed():
        yield wrapper


def text_config(wrapper):
    return wrapper.mla_attn._vllm_config.model_config.hf_text_config


@pytest.fixture
def op_calls(monkeypatch):
    """The arguments of each call of the op, which here only fills ``output``."""
    calls = []

    def mla_attention_with_rope(q, k_pe, kv_c, positions, table, k_scale, output, is_neox, rotation, name):
        calls.append((q.clone(), k_pe, kv_c, positions, table, k_scale, is_neox, rotation, _resolve_layer_name(name)))
        assert output.is_contiguous()
        output.copy_(attended(q, kv_c))

    monkeypatch.setattr(torch.ops.vllm_aiter_mla, "mla_attention_with_rope", mla_attention_with_rope)
    return calls


@pytest.mark.parametrize(
    "model",
    [{}, {"lora": None}, {"gated": True}, {"fuse_norms": True}, {"is_neox": True}, {"lora": None, "gated": True}],
    ids=lambda model: ",".join(model) or "plain",
)
def test_the_fused_forward_hands_on_what_vllms_does_before_its_rotation(wrapper_with, op_calls, model):
    one = wrapper_with(**model)
    assert module.wrapper_of(one.mla_attn) is one
    positions, hidden = torch.tensor([9, 0, 3, 63, 1]), torch.randn(TOKENS, HIDDEN)
    with torch.inference_mode():
        theirs = one(positions, hidden)
        assert not op_calls, "a layer that nobody has admitted runs vLLM's own forward"
        one.is_neox = bool(model.get("is_neox"))
        ours = one(positions, hidden)
        ((q, k_pe, kv_c, *rest),) = op_calls
        ((their_q, their_kv_c, their_k_pe),) = one.mla_attn.given
        q_pe, rotated_k = one.rotary_emb(positions, q[..., NOPE:], k_pe.unsqueeze(1))
    assert torch.equal(torch.cat([q[..., :NOPE], q_pe], -1), their_q)
    assert torch.equal(rotated_k, their_k_pe)
    assert torch.equal(kv_c, their_kv_c)
    assert torch.equal(ours, theirs)
    given_positions, table, k_scale, is_neox, rotation, name = rest
    assert given_positions is positions
    assert table is one.rotary_emb.cos_sin_cache
    assert k_scale is one.mla_attn._k_scale
    assert is_neox is one.is_neox
    assert rotation == ROTARY_EMB, "nothing is being compiled"
    assert name == one.mla_attn.layer_name


@pytest.mark.mutation
def test_mutation_a_key_that_changes_places_with_a_query_is_caught(wrapper_with, op_calls, monkeypatch):
    project = module._project

    def swapped(one, hidden):
        q, kv_c, k_pe = project(one, hidden)
        other = q.clone()
        other[:, 0, NOPE:] = k_pe
        return other, kv_c, q[:, 0, NOPE:]

    monkeypatch.setattr(module, "_project", swapped)
    with pytest.raises(AssertionError, match="where False"):
        test_the_fused_forward_hands_on_what_vllms_does_before_its_rotation(wrapper_with, op_calls, {})


def assert_own_scales(wrappers, op_calls):
    """Check that the op is given the k_scale of each wrapper's layer."""
    own = [(float(one.mla_attn._k_scale), one.mla_attn.layer_name) for one in wrappers]
    for one in wrappers:
        one.is_neox = False
        one(torch.arange(TOKENS), torch.randn(TOKENS, HIDDEN))
    assert [(float(k_scale), name) for *_, k_scale, _, _, name in op_calls] == own
    assert len({scale for scale, _ in own}) == len(own)


def test_own_scales_go_from_each_wrapper_to_the_op(wrapper_with, op_calls):
    assert_own_scales([wrapper_with(number=number) for number in range(3)], op_calls)


@pytest.mark.mutation
def test_mutation_own_scales_that_are_those_of_the_first_wrapper_are_caught(wrapper_with, op_calls, monkeypatch):
    wrappers, forward = [wrapper_with(number=number) for number in range(3)], module._forward

    def with_the_first_scale(one, *given):
        one.mla_attn._k_scale = wrappers[0].mla_attn._k_scale
        return forward(one, *given)

    monkeypatch.setattr(module, "_forward", with_the_first_scale)
    with pytest.raises(AssertionError, match=r"0\.25, 'model\.layers\.1\."):
        assert_own_scales(wrappers, op_calls)


@pytest.mark.parametrize("is_neox", [False, True])
def test_emit_lets_an_admitted_layer_call_the_op_with_the_pairing_of_its_rotation(wrapper_with, is_neox):
    one = wrapper_with(is_neox=is_neox)
    Layer.of(one.mla_attn).checked({"reference": PASSED})
    assert module.emit({"a": one.mla_attn}) == (f"a: module, rotated by {ROTARY_KERNEL}",)
    assert Layer.of(one.mla_attn).rotary_emb is one.rotary_emb
    assert one.is_neox is is_neox
    assert Layer.of(one.mla_attn).graph_skip is None


def test_emit_gives_each_layer_its_own_rotation(wrapper_with):
    wrappers = [wrapper_with(number=number, is_neox=bool(number)) for number in range(2)]
    for one in wrappers:
        Layer.of(one.mla_attn).checked({"reference": PASSED})
    module.emit({one.mla_attn.layer_name: one.mla_attn for one in wrappers})
    assert [one.is_neox for one in wrappers] == [False, True]
    assert all(Layer.of(one.mla_attn).rotary_emb is one.rotary_emb for one in wrappers)


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("unknown_forward", lambda one: one.mla_attn.register_forward_hook(print)),
        ("no_rope", lambda one: setattr(one, "rotary_emb", None)),
        ("cos_sin_dtype", lambda one: one.rotary_emb.to(torch.bfloat16)),
        ("sliding_window", lambda one: setattr(one.mla_attn, "sliding_window", 128)),
        ("query_scaled", lambda one: setattr(text_config(one), "llama_4_scaling", {"beta": 0.1})),
        ("kernel_shape", lambda one: Layer.of(one.mla_attn).stop("planted")),
    ],
)
def test_emit_leaves_a_layer_to_vllm_that_cannot_be_admitted_now(wrapper_with, code, change):
    one = wrapper_with()
    Layer.of(one.mla_attn).checked({"reference": PASSED})
    module.emit({"a": one.mla_attn})
    change(one)
    assert module.emit({"a": one.mla_attn}) == (f"a: {code}",)
    assert one.is_neox is None, "what was emitted before is taken back"
    assert Layer.of(one.mla_attn).graph_skip.code == code


def test_emit_leaves_every_layer_to_vllm_whose_forwards_are_not_known(wrapper_with, monkeypatch):
    one = wrapper_with()
    Layer.of(one.mla_attn).checked({"reference": PASSED})
    unknown = Skip("unknown_forward", "planted")
    monkeypatch.setattr(compat_wrapper, "why_forwards_unknown", lambda: unknown)
    assert module.emit({"a": one.mla_attn}) == ("a: unknown_forward",)
    assert Layer.of(one.mla_attn).graph_skip is unknown
