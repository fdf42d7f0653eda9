"""The protocol of the back ends is whole, and the selector alone remembers what they answer."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import vllm_aiter_mla.kernels
from vllm_aiter_mla.kernels import absorb, select
from vllm_aiter_mla.kernels.backend import Binding, KernelBackend
from vllm_aiter_mla.kernels.inputs import DecodeInputs, KernelInputError, LayerShape, call_key, synthetic_inputs
from vllm_aiter_mla.kernels.platform import CARDS, Platform
from vllm_aiter_mla.kernels.reference import ReferenceBackend
from vllm_aiter_mla.kernels.selfcheck import self_check

ROOT = Path(vllm_aiter_mla.kernels.__file__).parent
SMALL = LayerShape(2, 8, torch.bfloat16, torch.bfloat16, 4, False, latent=16, rope=8)


class Counting(ReferenceBackend):
    """The reference, counting how often it is asked."""

    asked = 0

    def bind(self, inputs: DecodeInputs) -> Binding | str:
        self.asked += 1
        return super().bind(inputs)


def test_a_back_end_without_bind_cannot_be_made() -> None:
    class Half(KernelBackend):
        name = "half"

    with pytest.raises(TypeError, match="bind"):
        Half()  # type: ignore[abstract]


def test_every_answer_follows_from_bind() -> None:
    class Refusing(KernelBackend):
        name = "refusing"

        def bind(self, inputs: DecodeInputs) -> Binding | str:
            return "never"

    operands = synthetic_inputs(SMALL)
    assert Refusing().refuse(operands) == "never"
    assert Refusing().kernel_of(operands) is None
    with pytest.raises(KernelInputError, match="refusing: never"):
        Refusing().prepare(operands)
    assert not self_check(Refusing(), SMALL).ok
    assert self_check(ReferenceBackend(), SMALL).ok


def test_a_back_end_is_asked_once_per_key_and_the_key_is_computed_once_per_call(monkeypatch) -> None:
    backend, keys = Counting(), []
    monkeypatch.setattr(select, "call_key", lambda inputs: keys.append(1) or call_key(inputs))
    chosen = select.Selector("reference", Platform("cpu"), {"reference": lambda platform: backend})
    for _ in range(3):
        chosen.choose(synthetic_inputs(SMALL))
    chosen.choose(synthetic_inputs(SMALL, tokens=5))
    assert (backend.asked, len(keys)) == (2, 4)


def test_each_file_of_absorb_is_a_form_that_is_registered() -> None:
    files = {path.stem for path in (ROOT / "absorb").glob("*.py")} - {"__init__", "form", "gemm"}
    assert {form.form for form in absorb.FORMS} == files


def test_the_types_of_cards_stand_in_one_file() -> None:
    """``torch.float8_*`` beside an architecture's name is a second table."""
    for path in ROOT.rglob("*.py"):
        tables = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Dict)]
        for table in tables:
            names = {key.value for key in table.keys if isinstance(key, ast.Constant)}
            assert path.name == "platform.py" or not (names & set(CARDS) and "float8" in ast.dump(table)), path


def test_synthetic_operands_on_meta_take_no_memory_whatever_their_number() -> None:
    ghost = synthetic_inputs(LayerShape(2, 8, torch.bfloat16, torch.bfloat16, 4, False, device="meta"), 1 << 32)
    assert ghost.num_tokens == 1 << 32
    assert {tensor.device.type for _, tensor in ghost.tensors} == {"meta"}
