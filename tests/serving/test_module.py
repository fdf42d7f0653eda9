"""Claims about the module integration without an engine: what it replaces, and which layers it skips."""

import copy
import functools
import inspect
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.rotary_embedding import get_rope

from tests.support.opcalls import layer_of
from tests.support.planted import raising
from vllm_aiter_mla.compat import wrapper as compat_wrapper
from vllm_aiter_mla.serving import module
from vllm_aiter_mla.serving.layer import Layer

WIDTH = 64
NAME = "MultiHeadLatentAttentionWrapper"
YARN = {
    "rope_type": "deepseek_yarn", "factor": 4.0, "original_max_position_embeddings": 256, "beta_fast": 32,
    "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 10000.0,
}  # fmt: skip


def test_the_installed_vllms_forwards_are_known():
    assert compat_wrapper.why_forwards_unknown() is None


@pytest.mark.mutation
@pytest.mark.parametrize("cls", list(compat_wrapper.KNOWN_FORWARDS), ids=lambda cls: cls.__name__)
def test_a_forward_that_somebody_has_wrapped_is_not_known(cls, monkeypatch):
    inner = cls.forward
    monkeypatch.setattr(cls, "forward", functools.wraps(inner)(lambda *args: inner(*args)))
    skip = compat_wrapper.why_forwards_unknown()
    assert skip is not None
    assert cls.__name__ in skip.message
    with module.installed():
        assert NAME not in op_registry_oot, "nothing of an unknown vLLM is replaced"


PLAIN = """
class C:
    def f(self, a, b=None, *, c: "int" = 1):
        x = [1, *a, {"k": 0, **b}]
        return lambda: (yield f"{x!r:>{c}} and") if a[1:] is not b"" else -1.5
"""
COMMENTED = """
    class C:
      '''A class.'''
      # A comment.
      def f(self, a, b=None, *, c: 'int' = 1):
        '''Return

        something.'''

        x = [1, *a,
             {'k': 0, **b}]
        return (lambda: (yield f"{x!r:>{c}} and") if a[1:] is not b"" else -1.5)
"""
PLAIN_DIGEST = "6e685ac826e2e40dfa01cfd9f6b0adc2693bd79311328655dc6a1d5dc1adffa8"
CHANGES = [
    ("a, b=None", "b, a=None"), ("b=None", "b=0"), ('"int"', '"str"'), ("c: ", "d: "), ("0, **b", "1, **b"),
    ("*a,", "a,"), ("is not", "is"), ("!r", "!s"), (" and", " or"), ("-1.5", "1.5"), ('b""', '""'), ("yield ", ""),
    ("        return", "        'a string'\n        return"), ("    def f", "    @staticmethod\n    def f"),
]  # fmt: skip


def test_a_source_is_known_by_its_code_and_not_by_docstrings_comments_or_layout():
    assert compat_wrapper.source_digest(COMMENTED) == compat_wrapper.source_digest(PLAIN) == PLAIN_DIGEST
    assert all(old in PLAIN for old, _ in CHANGES)
    found = [compat_wrapper.source_digest(PLAIN.replace(old, new)) for old, new in CHANGES]
    assert len({PLAIN_DIGEST, *found}) == 1 + len(CHANGES)
    assert compat_wrapper.digest(len) == "", "no source"


def test_the_sources_are_parsed_once_and_not_for_each_layer(monkeypatch):
    compat_wrapper._digest_of.cache_clear()
    parsed = []
    inner = compat_wrapper.source_digest
    monkeypatch.setattr(compat_wrapper, "source_digest", lambda source: parsed.append(source) or inner(source))
    for _ in range(61):
        assert compat_wrapper.why_forwards_unknown() is None
    assert len(parsed) == len(compat_wrapper.KNOWN_FORWARDS)


PROGRAM = f"""
from __future__ import annotations
import ast, hashlib, sys, textwrap
from typing import Any
{inspect.getsource(compat_wrapper.source_digest)}
{inspect.getsource(compat_wrapper._spelt)}
print(*(source_digest(source) for source in sys.argv[1:]))
"""


def interpreters():
    """Return those of Python 3.11 to 3.14 that this machine has."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    minors = range(11, 15)
    found = {str(path) for minor in minors for path in versions.glob(f"3.{minor}.*/bin/python")}
    found |= {path for minor in minors if (path := shutil.which(f"python3.{minor}"))}
    # A shim of a version manager may name a Python that is not there.
    starts = [path for path in sorted(found) if not subprocess.run([path, "-c", ""], capture_output=True).returncode]
    return [sys.executable, *starts]


def test_the_digest_is_the_same_on_every_python():
    sources = [PLAIN, *(inspect.getsource(cls.forward.__code__) for cls in compat_wrapper.KNOWN_FORWARDS)]
    known = [PLAIN_DIGEST, *(next(iter(digests)) for digests in compat_wrapper.KNOWN_FORWARDS.values())]
    for python in interpreters():
        command = [python, "-c", PROGRAM, *sources]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == known, python


def test_our_class_is_in_vllms_registry_only_inside_the_block():
    def load():
        with module.installed():
            assert op_registry_oot[NAME] is module.fused_class()
            raise RuntimeError("loading failed")

    with pytest.raises(RuntimeError, match="loading failed"):
        load()
    assert NAME not in op_registry_oot


def test_another_plugins_replacement_stays():
    class Theirs:
        pass

    op_registry_oot[NAME] = Theirs
    try:
        with module.installed():
            assert op_registry_oot[NAME] is Theirs
        assert op_registry_oot[NAME] is Theirs
    finally:
        del op_registry_oot[NAME]


def test_a_wrapper_that_nobody_has_admitted_runs_vllms_own_forward(monkeypatch):
    cls = module.fused_class()
    monkeypatch.setattr(compat_wrapper.MultiHeadLatentAttentionWrapper, "forward", lambda self, *args: args)
    one = cls.__new__(cls)
    torch.nn.Module.__init__(one)
    positions, hidden = torch.arange(3), torch.zeros(3, 8)
    assert one(positions, hidden) == (positions, hidden, None)
    one.is_neox = False
    factors = torch.ones(3, 1, 1)
    assert one(positions, hidden, factors) == (positions, hidden, factors), "a query that is scaled is vLLM's"
    assert one(positions.expand(3, 3), hidden)[0].dim() == 2, "so are positions with more than one axis"


def code_of(skip):
    return "" if skip is None else str(skip.code)


def stub(embedding):
    """What of a wrapper tells how it rotates."""
    return SimpleNamespace(rotary_emb=embedding, qk_rope_head_dim=WIDTH)


@pytest.fixture
def embedding():
    with set_current_vllm_config(VllmConfig()):
        # vLLM keeps one module for equal arguments.
        yield lambda is_neox=False, dtype=torch.bfloat16, **scaling: copy.deepcopy(
            get_rope(WIDTH, 512, is_neox_style=is_neox, rope_parameters=scaling or {"rope_theta": 1e4}, dtype=dtype)
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("is_neox", [False, True])
@pytest.mark.parametrize("scaling", [{}, YARN], ids=["plain", "yarn"])
def test_vllms_rotations_by_a_table_are_admitted(embedding, is_neox, dtype, scaling):
    assert module.why_not_rope(stub(embedding(is_neox, dtype, **scaling))) is None


def swapped(q, k):
    return k.expand_as(q).contiguous(), q[:, : k.shape[1]].contiguous()


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (lambda rotate, positions, q, k: rotate(positions, q, k), ""),
        (lambda rotate, positions, q, k: rotate((positions + 1) % 512, q, k), "query_not_rope"),
        (lambda rotate, positions, q, k: swapped(*rotate(positions, q, k)), "query_not_rope"),
        (lambda rotate, positions, q, k: (rotate(positions, q, k.clone())[0], k), "query_not_rope"),
        (lambda rotate, positions, q, k: (q, rotate(positions, q.clone(), k)[1]), "query_not_rope"),
        (lambda rotate, positions, q, k: tuple(1.1 * x for x in rotate(positions, q, k)), "query_not_rope"),
        (lambda rotate, positions, q, k: (q * float("nan"), rotate(positions, q, k)[1]), "query_not_rope"),
        (lambda rotate, positions, q, k: (rotate(positions, q, k)[0], k * float("nan")), "query_not_rope"),
    ],
    ids=["nothing", "the next row", "q and k swapped", "k not rotated", "q not rotated", "scaled", "q is NaN",
         "k is NaN"],
)  # fmt: skip
def test_a_known_class_that_rotates_otherwise_is_skipped(embedding, wrong, code):
    one = embedding(True, torch.float32)
    one.forward = partial(wrong, one.forward)
    assert code_of(module.why_not_rope(stub(one))) == code


def test_unknown_and_partial_rotations_and_the_other_pairing_are_skipped(embedding):
    class Unheard(type(embedding())):
        pass

    other, narrow, paired = embedding(dtype=torch.float32), embedding(dtype=torch.float16), embedding(True)
    other.__class__, narrow.rotary_dim = Unheard, 32
    paired.is_neox_style, paired.forward = False, embedding(True).forward
    codes = [code_of(module.why_not_rope(stub(one))) for one in (None, other, narrow, paired)]
    assert codes == ["no_rope", "rope_other_operand", "partial_rotary", "query_not_rope"]


def test_a_layer_that_cannot_be_looked_at_is_left_to_vllm_and_the_others_are_asked(monkeypatch):
    asked = []

    def wrapper_of(attention):
        asked.append(attention)
        raise OSError("no source")

    layer = layer_of()
    assert module.emit({"elsewhere": layer}) == ("elsewhere: unknown_forward",), "outside vLLM's wrapper"
    assert Layer.of(layer).graph_skip.code == "unknown_forward"
    monkeypatch.setattr(module, "wrapper_of", wrapper_of)
    found = module.emit({"a": torch.nn.Module(), "b": torch.nn.Module()})
    assert found == ("a: not_evaluated", "b: not_evaluated")
    assert len(asked) == 2


def test_a_layer_whose_rotation_cannot_be_found_out_calls_no_op(monkeypatch):
    """The card may have no memory left. A wrapper calls the op by ``is_neox``, and the op needs all of the others."""
    layer = layer_of()
    found = SimpleNamespace(
        is_neox=True,
        rotary_emb=SimpleNamespace(cos_sin_cache=torch.empty(1), is_neox_style=True),
    )
    for name in ("why_not_wrapped", "why_not_rope"):
        monkeypatch.setattr(module, name, lambda asked: None)
    monkeypatch.setattr(module, "wrapper_of", lambda attention: found)
    monkeypatch.setattr(Layer, "why_skipped", lambda self, table_dtype: None)
    monkeypatch.setattr(module, "compiled_rotation", raising(torch.OutOfMemoryError("planted")))
    assert module.emit({"a": layer}) == ("a: not_evaluated",)
    assert found.is_neox is None


def test_an_attention_module_that_something_hooks_is_left_to_vllm():
    attention = MLAAttention.__new__(MLAAttention)
    torch.nn.Module.__init__(attention)
    one = SimpleNamespace(mla_attn=attention)
    assert compat_wrapper.why_wrapper_unknown(one) is None
    assert "Identity" in str(compat_wrapper.why_wrapper_unknown(SimpleNamespace(mla_attn=torch.nn.Identity())))
    handle = one.mla_attn.register_forward_hook(lambda *args: None)
    assert code_of(compat_wrapper.why_wrapper_unknown(one)) == "unknown_forward"
    handle.remove()
    assert compat_wrapper.why_wrapper_unknown(one) is None
    one.mla_attn.forward = lambda q: q
    assert compat_wrapper.why_wrapper_unknown(one) is not None


@pytest.mark.parametrize(("mode", "flag", "skipped"), [("VLLM_COMPILE", True, True), ("NONE", True, False),
                                                       ("VLLM_COMPILE", False, False)])  # fmt: skip
def test_a_layer_whose_output_vllm_would_quantise_is_left_to_vllm(mode, flag, skipped, monkeypatch):
    compilation = SimpleNamespace(mode=SimpleNamespace(name=mode), pass_config=SimpleNamespace(fuse_attn_quant=flag))
    found = SimpleNamespace(
        is_neox=True, mla_attn=SimpleNamespace(_vllm_config=SimpleNamespace(compilation_config=compilation))
    )
    monkeypatch.setattr(module, "wrapper_of", lambda attention: found)
    (key,) = module.emit({"a": torch.nn.Module()})
    assert (key == "a: fused_output_quant") is skipped
    assert found.is_neox is None, "what was emitted before is taken back"
