"""The protocol of the back ends, the table of cards, and synthetic operands."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import vllm_aiter_mla.kernels
from vllm_aiter_mla.kernels.backend import Binding, KernelBackend
from vllm_aiter_mla.kernels.inputs import DecodeInputs, KernelInputError, LayerShape, synthetic_inputs
from vllm_aiter_mla.kernels.platform import CARDS
from vllm_aiter_mla.kernels.reference import ReferenceBackend
from vllm_aiter_mla.kernels.selfcheck import self_check

ROOT = Path(vllm_aiter_mla.kernels.__file__).parent
SMALL = LayerShape(2, 8, torch.bfloat16, torch.bfloat16, 4, False, latent=16, rope=8)


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


def test_the_types_of_cards_stand_in_one_file() -> None:
    """A ``torch.float8_*`` in a dict with an architecture's name is a second table."""
    for path in ROOT.rglob("*.py"):
        tables = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Dict)]
        for table in tables:
            names = {key.value for key in table.keys if isinstance(key, ast.Constant)}
            assert path.name == "platform.py" or not (names & set(CARDS) and "float8" in ast.dump(table)), path


def test_synthetic_operands_on_meta_take_no_memory_whatever_their_number() -> None:
    ghost = synthetic_inputs(LayerShape(2, 8, torch.bfloat16, torch.bfloat16, 4, False, device="meta"), 1 << 32)
    assert ghost.num_tokens == 1 << 32
    assert {tensor.device.type for _, tensor in ghost.tensors} == {"meta"}
