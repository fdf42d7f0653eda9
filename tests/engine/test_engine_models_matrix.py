"""Every dense MLA architecture in the sandbox, flag off and on: all layers engage, or the expected reason is given.

Two engines and about two minutes a row; ``pytest -m wide -k models_matrix``, ``-k`` with a model's name for one row.
"""

import pytest
import torch

from tests.sandbox import compare, engine, runs
from tests.support.model_configs import ROWS, spec_of
from vllm_aiter_mla.commands.compat.engine import fill

# A plugin that is off cuts no range: vLLM without the sandbox's cut, which rounds differently.
UNCUT = {"use_inductor_graph_partition": False, "compile_ranges_endpoints": []}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.mark.wide
@pytest.mark.engine
@pytest.mark.parametrize("name", ROWS)
def test_model_engages_or_gives_the_reason_and_keeps_the_tokens_of_vllm(name, shared):
    row = ROWS[name]
    spec = spec_of(row)
    off = runs.control(spec_of(row, compilation=UNCUT if row.not_mla else {}))
    if row.vllm_fails:
        with pytest.raises(engine.EngineFailedError):
            engine.run(off, inductor=shared)
        return
    vllm_own, ours = engine.run(off, inductor=shared), engine.run(spec, inductor=shared)
    codes = {why[0] for record in ours.status for why in record["skipped"].values()}
    engaged = sum(len(record["engaged"]) for record in ours.status)
    if row.reason:
        assert codes == {row.reason}
    else:
        assert (engaged, sum(record["total"] for record in ours.status), codes) == (row.layers, row.layers, set())
    assert any(" not_mla: " in line for line in ours.log) is bool(row.not_mla)
    for scenario, figures in compare.compare(vllm_own, ours).items():
        assert runs.EXACT.holds(figures), scenario


def test_weights_are_the_same_in_every_process_and_wide_enough_to_tell_tokens_apart():
    once, again, other = (torch.empty(64, 256) for _ in range(3))
    fill("lm_head.weight", once)
    fill("lm_head.weight", again)
    fill("model.layers.0.mlp.down_proj.weight", other)
    assert torch.equal(once, again)
    assert not torch.equal(once, other)
    logits = once @ torch.ones(256)
    assert logits.std() > 1
    norm = torch.empty(256)
    fill("model.norm.weight", norm)
    assert 0.5 < norm.min() < norm.max() < 1.5
