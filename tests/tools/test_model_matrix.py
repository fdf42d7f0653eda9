"""What the tool makes of two engines, and the weights that its models are drawn with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.sandbox import model
from tests.sandbox.engine import EngineFailedError
from tests.sandbox.spec import EngineResult, EngineSpec
from tools import model_matrix
from tools.model_configs import ROWS, Row

STEP = (7, {7: -0.1, 8: -2.0})
OTHER = (8, {7: -2.0, 8: -0.1})
NO_MLA, DECLINED = "this vLLM does not give it MLA", "vllm_aiter_mla: declined: not_mla: the model has no MLA layer"


def run_of(tokens: Any = STEP, engaged: int = 2, reason: str = "", total: int = 2, log: str = "") -> Any:
    skipped = {"layer": [reason, "why"]} if reason else {}
    record = {"engaged": {f"layer {i}": "reference" for i in range(engaged)}, "skipped": skipped, "total": total}

    def run(spec: EngineSpec) -> EngineResult:
        steps = [[tokens if spec.enabled else STEP]]
        return EngineResult({"short": steps}, [record] if spec.enabled else [], [], {}, [log], {}, 0.0)

    return run


def failing(spec: EngineSpec) -> EngineResult:
    raise EngineFailedError("INFO started\n[rank0]: RuntimeError: no such kernel\nINFO ended")


@pytest.mark.parametrize(
    ("row", "run", "good"),
    [
        (Row({}), run_of(), True),
        (Row({}), run_of(tokens=OTHER), False),
        (Row({}), run_of(engaged=1), False),
        (Row({}, layers=3), run_of(), False),
        (Row({}), run_of(engaged=1, reason="no_rope"), False),
        (Row({}, 0, "no_rope"), run_of(engaged=0, reason="no_rope"), True),
        (Row({}, 0, "no_rope"), run_of(engaged=0, reason="positions"), False),
        (Row({}, 0, not_mla=NO_MLA), run_of(engaged=0, total=0, log=DECLINED), True),
        (Row({}, 0, not_mla=NO_MLA), run_of(engaged=0, total=0), False),
        (Row({}, 0, not_mla=NO_MLA), run_of(log=DECLINED), False),
        (Row({}, 0, not_mla=NO_MLA), run_of(engaged=0, total=0, log=DECLINED, tokens=OTHER), False),
        (Row({}), failing, False),
        (Row({}, vllm_fails="no kernel of it on a CPU"), failing, True),
        (Row({}, vllm_fails="no kernel of it on a CPU"), run_of(), False),
    ],
)
def test_a_row_is_good_where_it_gives_what_it_says(row: Row, run: Any, good: bool) -> None:
    assert model_matrix.outcome("model", row, run).good is good


def test_an_engine_that_fails_leaves_its_last_exception() -> None:
    assert model_matrix.outcome("model", Row({}), failing).reason == "[rank0]: RuntimeError: no such kernel"


def test_an_unknown_model_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["model_matrix.py", "--only", "gpt"])
    with pytest.raises(ValueError, match="--only: no model is called like 'gpt'"):
        model_matrix.main()


def test_every_row_says_what_should_come_out() -> None:
    for name, row in ROWS.items():
        assert row.vllm_fails or (row.layers > 0) is not bool(row.reason or row.not_mla), name


def test_weights_are_the_same_in_every_process_and_wide_enough_to_tell_tokens_apart() -> None:
    once, again, other = (torch.empty(64, 256) for _ in range(3))
    model.fill("lm_head.weight", once)
    model.fill("lm_head.weight", again)
    model.fill("model.layers.0.mlp.down_proj.weight", other)
    assert torch.equal(once, again)
    assert not torch.equal(once, other)
    logits = once @ torch.ones(256)
    assert logits.std() > 1
    norm = torch.empty(256)
    model.fill("model.norm.weight", norm)
    assert 0.5 < norm.min() < norm.max() < 1.5
