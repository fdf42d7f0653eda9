"""What only Model Runner V2 has; every other engine test runs it as well, unless its engine names V1."""

import pytest

from tests.engine.engine_checks import assert_all_engaged, assert_parity
from tests.sandbox.engine import EngineFailedError


@pytest.mark.engine("class-gfx942-off", "class-gfx942-on")
def test_runner_v2_replays_full_graphs_of_its_draft(engines):
    """Its prefill has three rows a request, as the target's decode rows, and its decode steps have one."""
    off, on = engines("class-gfx942-off"), engines("class-gfx942-on")
    assert on.draft_replays == off.draft_replays
    assert {12, 48} <= on.draft_replays.keys()


@pytest.mark.engine("schedule-on")
def test_runner_v2_runs_under_vllms_asynchronous_scheduler(engines):
    assert engines("schedule-on").scheduler == "AsyncScheduler"


@pytest.mark.wide
@pytest.mark.parametrize(
    "drafts", [pytest.param(n, marks=pytest.mark.engine(f"mtp-{n}-off", f"mtp-{n}-on")) for n in (1, 3)]
)
def test_default_options_runner_v2_with_drafts_of_the_model_in_graphs(engines, drafts):
    off, on = engines(f"mtp-{drafts}-off"), engines(f"mtp-{drafts}-on")
    assert_all_engaged(on)
    assert on.status[0]["decode_limit"] == 16 * (1 + drafts)
    assert_parity(off, on)
    assert (on.captured, on.replays, on.draft_replays) == (off.captured, off.replays, off.draft_replays)
    assert {rows % (1 + drafts) for _, rows in on.replays} == {0}
    assert sum(on.draft_replays.values()) > 0


@pytest.mark.wide
@pytest.mark.engine("mutation-kept-pieces")
@pytest.mark.mutation("I10")
def test_mutation_runner_v2_pieces_that_were_captured_over_the_thrown_away_cache_are_noticed(engines):
    with pytest.raises(EngineFailedError, match="what a captured piece reads has moved"):
        engines("mutation-kept-pieces")


@pytest.mark.wide
@pytest.mark.engine("mutation-dropped-option")
@pytest.mark.mutation
def test_mutation_runner_v2_an_option_that_vllms_cpu_platform_drops_ends_the_start(engines):
    with pytest.raises(EngineFailedError, match=r"scheduler_config\.async_scheduling"):
        engines("mutation-dropped-option")
