"""Other models, schedulers and topologies: tokens are vLLM's own, layers engage, and the engine really ran that way."""

import socket
import subprocess
import sys

import pytest

from tests.engine.engine_checks import assert_all_engaged, assert_parity
from tests.engine.specs_common import EAGER_MODE, NO_YARN, PLAIN
from tests.sandbox import engine, plugin
from tests.sandbox.spec import EngineSpec, VllmOptions, save
from vllm_aiter_mla import files
from vllm_aiter_mla.status import liveness, metrics, status_files
from vllm_aiter_mla.status.record import RankRecord


@pytest.mark.engine("schedule-off", "schedule-on")
@pytest.mark.parametrize(
    ("topology", "counter"),
    [("prefix caching with partial hits", "vllm:prefix_cache_hits"), ("preemption", "vllm:num_preemptions")],
)
def test_topology_of_the_scheduler_gives_the_tokens_of_vllm(engines, topology, counter):
    """Both with asynchronous scheduling and chunked prompts."""
    found = engines("schedule-on")
    assert found.counters[counter] > 0, f"{topology} did not happen"
    assert found.counters[counter] == engines("schedule-off").counters[counter]
    assert_all_engaged(found)
    assert_parity(engines("schedule-off"), found)


@pytest.mark.engine("schedule-off", "schedule-on")
def test_topology_reloaded_weights_are_those_that_the_fast_path_multiplies_by(engines):
    """vLLM's reload_weights puts other values into existing tensors; vLLM reads them, and so must we."""
    vllm_own, ours = engines("schedule-off").scenarios, engines("schedule-on").scenarios
    assert ours["prefixes, reloaded"] == vllm_own["prefixes, reloaded"]
    assert ours["prefixes, reloaded"] != ours["prefixes"], "the weights did not change"


@pytest.mark.engine("schedule-off", "schedule-on")
def test_topology_a_weight_transfer_ends_in_vllms_tokens_and_a_status_that_is_true(engines):
    """In chunks, as a trainer sends them: in between vLLM's layers have no absorbed weight."""
    off, on = engines("schedule-off"), engines("schedule-on")
    assert on.scenarios["prefixes, transferred"] == off.scenarios["prefixes, transferred"]
    assert on.scenarios["prefixes, transferred"] != on.scenarios["prefixes, reloaded"], "the weights did not change"
    assert_all_engaged(on)
    assert [line for line in on.log if "since weights were loaded again" in line] == []


@pytest.mark.wide
@pytest.mark.parametrize(
    ("off", "on", "ranks", "logged"),
    [
        pytest.param(off, on, ranks, logged, marks=pytest.mark.engine(off, on), id=topology)
        for topology, off, on, ranks, logged in (
            ("wide heads and experts, GLM", "glm-off", "glm-on", 1, ""),
            ("two ranks, each with its experts", "ep-off", "ep-on", 2, ""),
            ("an EAGLE-3 draft, whose layer engages too", "eagle-off", "eagle-on", 1, "4/4 MLA layers engaged"),
            ("workers in Ray's actors", "fp32-off", "ray-on", 2, "RayWorkerProc"),
        )
    ],
)
def test_topology_of_layers_and_workers_gives_the_tokens_of_vllm(engines, off, on, ranks, logged):
    found = engines(on)
    assert_all_engaged(found, ranks)
    assert_parity(engines(off), found)
    assert any(logged in line for line in found.log)


@pytest.mark.wide
@pytest.mark.engine("eager-off", "lora-off", "lora-on")
def test_topology_of_a_lora_adapter_for_every_second_request(engines):
    vllm_own, ours = engines("lora-off"), engines("lora-on")
    assert_all_engaged(ours)
    assert_parity(vllm_own, ours)
    plain = engines("eager-off").scenarios["mixed"]
    changed = [one != other for one, other in zip(vllm_own.scenarios["mixed"], plain, strict=True)]
    assert all(changed[1::2]), "the adapter did not do anything"


@pytest.mark.wide
@pytest.mark.engine("pp2-off", "pp2-on")
def test_topology_of_two_pipeline_stages_has_one_outcome_for_both(engines):
    found = engines("pp2-on")
    assert_all_engaged(found, ranks=2)
    assert_parity(engines("pp2-off"), found)
    (outcome,) = [line for line in found.log if "MLA layers engaged" in line]
    assert "2/2 MLA layers engaged on 2 of 2 ranks (reference, bf16 KV, decode limit 16)" in outcome


@pytest.mark.engine("class-gfx950-off", "mutation-rank-1-falls-back")
@pytest.mark.mutation("I8", "I12")
def test_ranks_that_fell_back_are_in_the_line_the_files_and_the_gauge(engines, tmp_path, monkeypatch):
    found = engines("mutation-rank-1-falls-back")
    (line,) = [line for line in found.log if "MLA layers engaged" in line]
    assert "WARNING" in line
    assert "1/1 MLA layers engaged on 1 of 2 ranks (aiter" in line
    assert "rank 1 fell back: kernel_shape: " in line
    engaged = {record["rank"]: len(record["engaged"]) for record in found.status}
    assert engaged == {0: 1, 1: 0}
    monkeypatch.setenv(liveness.RUN_VARIABLE, found.status[0]["run"])
    liveness.ensure_run_lock(tmp_path)  # this process is the front end and the workers
    for record in found.status:
        status_files.write_status(tmp_path, files.parse_unstamped(RankRecord, tmp_path, record))
    samples = metrics.read_samples(tmp_path)
    assert {labels[-1]: layers for labels, layers in samples[metrics.LAYERS].items()} == {"engaged": 0, "skipped": 1}
    ranks = {labels[-1]: count for labels, count in samples["aiter_mla_ranks"].items()}
    assert ranks == {"agreeing": 1, "fell_back": 1, "differing": 0, "silent": 0}
    assert_parity(engines("class-gfx950-off"), found)


@pytest.mark.wide
@pytest.mark.engine("kv-off", "kv-on")
def test_topology_of_a_kv_connector_reads_the_rows_that_vllm_has_written(engines):
    """A prompt whose rows are loaded is computed in another split than a whole one: tokens are compared."""
    vllm_own, ours = engines("kv-off"), engines("kv-on")
    assert ours.counters["vllm:external_prefix_cache_hits"] > vllm_own.counters["vllm:external_prefix_cache_hits"]
    assert_all_engaged(ours)
    assert_parity(vllm_own, ours, 0.1)


@pytest.mark.wide
@pytest.mark.engine
@pytest.mark.parametrize("has_plugin", [True, False], ids=["", "the other node is without the plugin"])
def test_topology_nodes_that_decide_otherwise_all_run_vllms_own_kernels_and_none_waits(has_plugin, tmp_path):
    """By torchrun's launcher, where each process builds its config, as each node does with ``--nnodes``."""
    options = VllmOptions(
        model=NO_YARN, tensor_parallel_size=2, extra=EAGER_MODE | {"distributed_executor_backend": "external_launcher"}
    )
    spec = EngineSpec(("mixed",), options, emulation=PLAIN)
    save(spec, tmp_path / "spec")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes, logs = [], [tmp_path / f"log{rank}" for rank in range(2)]
    for rank, log in enumerate(logs):
        environment = engine.environment_for(spec, tmp_path / f"cache{rank}", tmp_path / f"inductor{rank}")
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if rank == 1 and not has_plugin:
            environment["VLLM_PLUGINS"] = plugin.NAME
        command = [sys.executable, "-m", "tests.engine.node_child", str(tmp_path / "spec"), str(tmp_path / f"{rank}")]
        with log.open("w") as out:
            nodes.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out))
    try:
        ended = [node.wait(engine.TIMEOUT_S) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    head = logs[0].read_text()
    assert ended == [0, 0], head[-3000:]
    assert ("2/2 MLA layers engaged on 2 of 2 ranks" in head) == has_plugin
    assert ("rank(s) 1 have decided otherwise" in head) == (not has_plugin)
