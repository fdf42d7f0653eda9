"""Prefill, mixed and above-limit batches of a real engine keep the roundings that vLLM has with the same options."""

import pytest

from tests.engine.engine_checks import assert_all_engaged, assert_parity, figures


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("default", marks=pytest.mark.engine("default-off", "default-on")),
        pytest.param("rotation-eager", marks=pytest.mark.engine("rotation-eager-off", "rotation-eager-on")),
    ],
)
def test_todays_rounding_is_kept_by_the_module(engines, name):
    """The emulated kernels round as a card's: the fused op would show."""
    found = engines(f"{name}-on")
    assert_parity(engines(f"{name}-off"), found, 0.0)
    assert_all_engaged(found)
    assert min(found.branches["prepared_query"], found.branches["rotate_and_write"]) > 0


@pytest.mark.engine("default-off", "mutation-fused-rotation")
@pytest.mark.mutation("I5")
def test_mutation_todays_rounding_is_lost_with_vllms_fused_op_for_all(engines):
    found = engines("mutation-fused-rotation")
    assert_all_engaged(found)
    (compared,) = figures(engines("default-off"), found).values()
    assert compared.max_abs_dlogprob > 0.01
