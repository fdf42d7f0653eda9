"""Other engines on a rehearsal card: drafts, the module integration, a kernel by name, gfx950, several engines."""

import pytest

from tests.rehearsal.day import FLAG
from tests.sandbox.rehearsal_card import Scenario

pytestmark = [pytest.mark.rehearsal, pytest.mark.slow, pytest.mark.wide]
EAGER = (FLAG, "--enforce-eager")
OWN = "--additional-config.aiter_mla"


def test_the_module_integration_serves_by_its_option(day):
    with day.server(FLAG, f"{OWN}.integration=module") as server:
        assert len(server.burst(["abcd", "e", "fg"])) == 3
        assert "(triton 1..4" in server.line("MLA layers engaged")


@pytest.mark.parametrize("kernel", ["triton", "aiter", "reference"])
def test_a_kernel_by_name_runs_and_nothing_is_timed(day, kernel):
    with day.server(*EAGER, f"{OWN}.kernel={kernel}") as server:
        assert server.ask("abcd")
        assert f"({kernel}" in server.line("MLA layers engaged")
    assert not [line for line in server.lines() if line.startswith("kernels timed")]


def test_a_kernel_by_name_that_overflows_runs_with_a_warning(day):
    with day.server(*EAGER, f"{OWN}.kernel=aiter", "--kv-cache-dtype", "fp8") as server:
        assert server.ask("abcd")
        assert "(aiter" in server.line("MLA layers engaged")
        assert "NaN" in server.line("kernel=auto leaves it out")


def test_gfx950_serves_as_gfx942_does(made):
    day = made(Scenario(arch="gfx950", name="AMD Instinct MI355X"))
    with day.server(*EAGER, "--kv-cache-dtype", "fp8") as server:
        assert server.ask("abcd")
        assert "(triton 1..4" in server.line("MLA layers engaged")


def test_drafts_of_the_models_own_layer_are_engaged_too(made):
    day = made(model={"num_nextn_predict_layers": 1})
    with day.server(FLAG, "--speculative-config.method=mtp", "--speculative-config.num_speculative_tokens=2") as server:
        assert len(server.burst(["abcd", "e", "fg"])) == 3
        said = server.line("MLA layers engaged")
    assert said.startswith("3/3 ")
    assert "1..12" in said


def test_check_over_a_checkpoint_loads_its_weights(day):
    check = day.run("check", str(day.model), "--checkpoint", "--max-num-seqs", "4", "--max-model-len", "128", FLAG)
    assert (check.returncode, "Traceback" in check.stdout) == (0, False), check.stdout


def test_two_servers_on_one_volume_keep_their_own_status(day):
    """Each front end is process 1 of a container of its own."""
    with day.server(*EAGER, container=True) as one, day.server(*EAGER, container=True) as two:
        assert one.ask("abcd") == two.ask("abcd")
        assert one.gauge() == two.gauge() == {"engaged": 2, "skipped": 0}
        assert not [line for line in two.lines() if "left out" in line]
        status = day.run("status")
        assert status.stdout.count("2/2 MLA layers engaged") == 2, status.stdout


def test_two_data_parallel_engines_serve_and_the_idle_one_decides_nothing(day):
    with day.server(FLAG, "--data-parallel-size", "2") as server:
        assert server.ask("abcd")
        assert len(server.burst(["abcd", "e", "fg"])) == 3
        said = [line for line in server.lines() if "MLA layers engaged" in line]
        assert len(said) == 2, server.lines()
        assert sum(server.gauge().values()) in (2, 4)
