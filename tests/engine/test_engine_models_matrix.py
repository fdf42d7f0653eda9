"""Every dense MLA architecture in the sandbox, flag off and on: all layers engage, or the expected reason is given.

By both integrations, each with two engines in about two minutes; ``pytest -m wide -k models_matrix``, ``-k`` with a
model's name for one row.
"""

import re

import pytest
import torch

from tests.engine.engine_checks import assert_integration
from tests.sandbox import compare, engine, runs
from tests.sandbox.spec import by_passes, flag_off
from tests.support.model_configs import ROWS, spec_of
from vllm_aiter_mla.commands.compat.llm_engine import draw_weight


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.mark.wide
@pytest.mark.engine
@pytest.mark.parametrize("through", [pytest.param(lambda spec: spec, id="default_options"), by_passes])
@pytest.mark.parametrize("name", ROWS)
def test_model_engages_or_gives_the_reason_and_keeps_the_tokens_of_vllm(name, through, shared):
    row = ROWS[name]
    spec = through(spec_of(row))
    off = flag_off(spec)
    if row.vllm_fails:
        with pytest.raises(engine.EngineFailedError) as failure:
            engine.run(off, inductor=shared)
        assert re.search(row.vllm_fails, failure.value.log, re.DOTALL), failure.value.log
        return
    vllm_own, ours = engine.run(off, inductor=shared), engine.run(spec, inductor=shared)
    codes = {skip["code"] for record in ours.status for skip in record["skipped"].values()}
    assert_integration(spec, ours)
    engaged = sum(len(record["engaged"]) for record in ours.status)
    if row.reason:
        assert codes == {row.reason}
    else:
        expected_codes = {"not_mla"} if row.not_mla else set()
        layers = sum(record["num_layers"] for record in ours.status)
        assert (engaged, layers, codes) == (row.layers, row.layers, expected_codes)
    assert any(" not_mla: " in line for line in ours.log) is bool(row.not_mla)
    for scenario, figures in compare.compare(vllm_own, ours).items():
        assert runs.EXACT.holds(figures), scenario


def test_weights_are_the_same_in_every_process_and_wide_enough_to_tell_tokens_apart():
    once, again, other = (torch.empty(64, 256) for _ in range(3))
    draw_weight("lm_head.weight", once)
    draw_weight("lm_head.weight", again)
    draw_weight("model.layers.0.mlp.down_proj.weight", other)
    assert torch.equal(once, again)
    assert not torch.equal(once, other)
    logits = once @ torch.ones(256)
    assert logits.std() > 1
    norm = torch.empty(256)
    draw_weight("model.norm.weight", norm)
    assert 0.5 < norm.min() < norm.max() < 1.5
