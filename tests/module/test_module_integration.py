"""Claims about the module integration without an engine: what it replaces, and which layers
it leaves alone."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.rotary_embedding import get_rope

from vllm_aiter_mla import module
from vllm_aiter_mla import status as state
from vllm_aiter_mla.compat import wrapper as compat_wrapper
from vllm_aiter_mla.module import emission, rope, wrapper

WIDTH = 64
NAME = "MultiHeadLatentAttentionWrapper"
YARN = {
    "rope_type": "deepseek_yarn", "factor": 4.0, "original_max_position_embeddings": 256, "beta_fast": 32,
    "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 10000.0,
}  # fmt: skip


# -- the wrapper


def test_the_installed_vllms_forwards_are_known() -> None:
    assert compat_wrapper.why_unknown_code() is None


@pytest.mark.mutation
@pytest.mark.parametrize("cls", list(compat_wrapper.KNOWN_FORWARDS), ids=lambda cls: cls.__name__)
def test_a_forward_that_somebody_has_wrapped_is_not_known(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = cls.forward  # type: ignore[attr-defined]
    monkeypatch.setattr(cls, "forward", functools.wraps(inner)(lambda *args: inner(*args)))
    skip = compat_wrapper.why_unknown_code()
    assert skip is not None
    assert cls.__name__ in skip.message
    with module.installed():
        assert NAME not in op_registry_oot, "nothing of an unknown vLLM is replaced"


def test_a_source_is_known_by_its_code_and_not_by_its_comments_or_layout(tmp_path: Any) -> None:
    sources = {
        "plain": "def f(a, b):\n    return a + b\n",
        "said": "def f(a,  b):\n    # a sum\n\n    return (a\n        + b)\n".replace("(a\n        + b)", "a + b"),
        "other": "def f(a, b):\n    return b + a\n",
        "indented": "if True:\n    def f(a, b):\n        return a + b\n",
    }
    found = {}
    for name, source in sources.items():
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        scope: dict[str, Any] = {}
        exec(compile(source, str(path), "exec"), scope)
        found[name] = compat_wrapper.digest(scope["f"])
    assert found["plain"] == found["said"] == found["indented"] != found["other"]
    assert compat_wrapper.digest(len) == ""


def test_our_class_is_in_vllms_registry_inside_the_block_alone() -> None:
    def load() -> None:
        with module.installed():
            assert op_registry_oot[NAME] is wrapper.fused_class()
            raise RuntimeError("loading failed")

    with pytest.raises(RuntimeError, match="loading failed"):
        load()
    assert NAME not in op_registry_oot


def test_another_plugins_replacement_stays() -> None:
    class Theirs:
        pass

    op_registry_oot[NAME] = Theirs  # type: ignore[assignment]
    try:
        with module.installed():
            assert op_registry_oot[NAME] is Theirs
        assert op_registry_oot[NAME] is Theirs
    finally:
        del op_registry_oot[NAME]


def test_a_wrapper_that_nobody_has_admitted_runs_vllms_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    cls = wrapper.fused_class()
    monkeypatch.setattr(compat_wrapper.vllm_class(), "forward", lambda self, *args: args)
    one = cls.__new__(cls)
    torch.nn.Module.__init__(one)
    positions, hidden = torch.arange(3), torch.zeros(3, 8)
    assert one(positions, hidden) == (positions, hidden, None)
    one.is_neox = False
    scaling = torch.ones(3, 1, 1)
    assert one(positions, hidden, scaling) == (positions, hidden, scaling), "a scaled query is vLLM's"
    assert one(positions.expand(3, 3), hidden)[0].dim() == 2, "so are positions with more than one axis"


# -- the rotation


def stub(embedding: Any, **config: Any) -> Any:
    """What of a wrapper tells how it rotates."""
    model = SimpleNamespace(hf_text_config=SimpleNamespace(**config))
    attention = SimpleNamespace(_vllm_config=SimpleNamespace(model_config=model))
    return SimpleNamespace(rotary_emb=embedding, qk_rope_head_dim=WIDTH, mla_attn=attention)


@pytest.fixture
def embedding() -> Iterator[Callable[..., Any]]:
    with set_current_vllm_config(VllmConfig()):
        # vLLM keeps one module for equal arguments.
        yield lambda is_neox=False, dtype=torch.bfloat16, **scaling: copy.deepcopy(
            get_rope(WIDTH, 512, is_neox_style=is_neox, rope_parameters=scaling or {"rope_theta": 1e4}, dtype=dtype)
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("is_neox", [False, True])
@pytest.mark.parametrize("scaling", [{}, YARN], ids=["plain", "yarn"])
def test_vllms_rotations_by_a_table_are_admitted(
    embedding: Callable[..., Any], is_neox: bool, dtype: torch.dtype, scaling: dict[str, Any]
) -> None:
    assert rope.why_not(stub(embedding(is_neox, dtype, **scaling))) is None


@pytest.mark.mutation
@pytest.mark.parametrize(
    "wrong",
    [
        lambda inner: lambda positions, q, k: inner(positions + 1, q, k),
        lambda inner: lambda positions, q, k: inner(positions, q, k)[::-1],
        lambda inner: lambda positions, q, k: (inner(positions, q, k)[0], k),
        lambda inner: lambda positions, q, k: tuple(1.1 * x for x in inner(positions, q, k)),
        lambda inner: lambda positions, q, k: (inner(positions, q, k)[0] * float("nan"), inner(positions, q, k)[1]),
        lambda inner: lambda positions, q, k: (inner(positions, q, k)[0], k * float("nan")),
    ],
    ids=["the next row", "q and k swapped", "k not rotated", "scaled", "q is NaN", "k is NaN"],
)
def test_a_known_class_that_rotates_otherwise_is_refused(embedding: Callable[..., Any], wrong: Any) -> None:
    one = embedding(True, torch.float32)
    inner = one.forward
    one.forward = lambda positions, q, k: wrong(inner)(positions.clamp(max=510), q[:, :1], k)
    skip = rope.why_not(stub(one))
    assert skip is not None
    assert skip.code == "query_not_rope"


def test_the_other_pairing_is_refused(embedding: Callable[..., Any]) -> None:
    one = embedding(True)
    one.is_neox_style = False
    one.forward = embedding(True).forward
    skip = rope.why_not(stub(one))
    assert skip is not None
    assert skip.code == "query_not_rope"


def test_unknown_partial_and_scaled_rotations_are_refused(embedding: Callable[..., Any]) -> None:
    class Unheard(type(embedding())):  # type: ignore[misc]
        pass

    other = embedding(dtype=torch.float32)
    other.__class__ = Unheard
    narrow = embedding(dtype=torch.float16)
    narrow.rotary_dim = 32
    cases = {
        "no_rope": stub(None),
        "rope_other_operand": stub(other),
        "partial_rotary": stub(narrow),
    }
    for code, one in cases.items():
        skip = rope.why_not(one)
        assert skip is not None
        assert skip.code == code
    scaled = rope.why_not(stub(embedding(True, torch.float16), llama_4_scaling={"beta": 0.1}))
    assert scaled is not None
    assert "llama_4_scaling" in scaled.message


# -- the layers


def test_a_layer_outside_vllms_wrapper_is_left_to_vllm_with_its_reason() -> None:
    state.reset()
    emission.emit({"model.layers.0.attn": torch.nn.Module()})
    assert state.current().skipped["model.layers.0.attn"][0] == "unknown_forward"


def test_a_layer_that_cannot_be_looked_at_is_left_to_vllm_and_the_others_are_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def wrapper_of(attention: Any) -> Any:
        asked.append(attention)
        raise OSError("no source")

    state.reset()
    monkeypatch.setattr(wrapper, "wrapper_of", wrapper_of)
    emission.emit({"a": torch.nn.Module(), "b": torch.nn.Module()})
    assert {name: code for name, (code, _) in state.current().skipped.items()} == dict.fromkeys("ab", "not_evaluated")
    assert len(asked) == 2


def test_an_attention_module_that_something_hooks_is_left_to_vllm() -> None:
    attention = MLAAttention.__new__(MLAAttention)
    torch.nn.Module.__init__(attention)
    one = SimpleNamespace(mla_attn=attention)
    assert compat_wrapper.why_unknown(one) is None
    other = compat_wrapper.why_unknown(SimpleNamespace(mla_attn=torch.nn.Identity()))
    assert other is not None
    assert "Identity" in other.message
    handle = one.mla_attn.register_forward_hook(lambda *args: None)
    skip = compat_wrapper.why_unknown(one)
    assert skip is not None
    assert skip.code == "unknown_forward"
    handle.remove()
    assert compat_wrapper.why_unknown(one) is None
    one.mla_attn.forward = lambda q: q
    assert compat_wrapper.why_unknown(one) is not None


@pytest.mark.parametrize(("mode", "flag", "skipped"), [("VLLM_COMPILE", True, True), ("NONE", True, False),
                                                       ("VLLM_COMPILE", False, False)])  # fmt: skip
def test_a_layer_whose_output_vllm_would_quantise_is_left_to_vllm(
    mode: str, flag: bool, skipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilation = SimpleNamespace(
        mode=SimpleNamespace(name=mode), pass_config=SimpleNamespace(fuse_attn_quant=flag)
    )  # fmt: skip
    found = SimpleNamespace(
        is_neox=True, mla_attn=SimpleNamespace(_vllm_config=SimpleNamespace(compilation_config=compilation))
    )
    state.reset()
    monkeypatch.setattr(wrapper, "wrapper_of", lambda attention: found)
    (key,) = emission.emit({"a": torch.nn.Module()})
    assert (key == "a: fused_output_quant") is skipped
    assert found.is_neox is None, "what was emitted before is taken back"
