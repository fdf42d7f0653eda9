"""The tool's arithmetic and exit status over made-up figures; what a process counts; and, wide, every process of it."""

import sys
from types import SimpleNamespace

import pytest

from tools import start_cost
from tools.common import guarded
from tools.counting import start
from tools.counting.start import CHECK, GATE, IMPORTS, PHASES, REGISTRATION, REST, TIMING, Phases
from tools.start_cost import Least, Starts


def record(rest, **phases):
    """An engine's start that takes so many seconds outside the phases named."""
    return {"phases": dict.fromkeys(PHASES, 0.0) | phases | {REST: rest}, "children": 1.0, "loaded": 1, "status": []}


def starts(on=(20.0, 20.1), off=(20.0, 20.1), registration_ms=(10.0, 10.1), timing=0.0, imports=0.1):
    """What the tool measures, by seconds of the warm starts."""
    warm = {"off": [record(s) for s in off], "on": [record(s, **{TIMING: timing}) for s in on]}
    fresh = {kind: [{REGISTRATION: ms / 1e3, IMPORTS: imports} for ms in registration_ms] for kind in start.KINDS}
    return Starts({side: record(50.0) for side in warm}, warm, fresh)


CASES = {
    "met": (starts(), 0),
    "the timing's budget is apart": (starts(timing=3.0), 0),
    "a slow warm start": (starts(on=(22.0, 22.1)), 1),
    "slow imports of the flag": (starts(imports=0.5), 1),
    "a slow registration": (starts(registration_ms=(25.0, 25.1)), 1),
    "a slow registration, and a ratio that is open": (starts(off=(20.0, 22.0), registration_ms=(25.0, 25.1)), 1),
    "a wide spread with the flag off": (starts(off=(20.0, 22.0)), 2),
    "a wide spread with the flag on": (starts(on=(21.5, 23.0)), 2),
    "a wide spread of the registration": (starts(registration_ms=(21.0, 24.0)), 2),
}


@pytest.mark.parametrize(("found", "status"), CASES.values(), ids=CASES)
def test_the_exit_status_says_whether_the_goals_are_met_missed_or_open(monkeypatch, capsys, found, status):
    monkeypatch.setattr(start_cost, "measure", lambda *counts: found)
    assert start_cost.run([]) == status
    printed = capsys.readouterr().out
    assert (start_cost.MISSED in printed) == (status == 1)
    assert status != 2 or start_cost.OPEN in printed
    assert all(name in printed for name in PHASES)


@pytest.mark.parametrize("option", ["--starts", "--registrations"])
def test_one_figure_of_a_side_tells_no_spread(option):
    assert guarded("start_cost", start_cost.run, [option, "1"]) == 2


def test_the_least_counts_and_may_be_too_high_by_the_distance_to_the_second():
    assert Least.of([5.0, 4.5, 4.0]) == Least(4.0, 3.5)
    assert Least(4.4, 4.2) / Least(4.0, 2.0) == Least(2.2, 1.05)


def test_phases_add_up_and_one_inside_another_is_taken_out_of_it():
    now = [2.0]  # of the process, when the phases begin
    phases = Phases(lambda: now[0])

    def check():
        now[0] += 3.0

    owner = SimpleNamespace(check=check)
    phases.watch(owner, "check", CHECK)
    with phases.inside(GATE):
        now[0] += 1.0
        owner.check()
        now[0] += 1.0
    now[0] += 0.5
    phases.turn()
    assert {name: spent for name, spent in phases.spent.items() if spent} == {GATE: 2.0, CHECK: 3.0, REST: 2.5}


@pytest.fixture
def vllm_loads(monkeypatch):
    """Let vLLM load one general plugin, again, as ``aiter_mla``; its module is the one given."""
    from importlib import metadata

    from vllm import plugins

    def load(module):
        monkeypatch.setattr(plugins, "plugins_loaded", False)
        monkeypatch.setitem(sys.modules, "aiter_mla_timed", module)
        point = metadata.EntryPoint(start.PLUGIN, "aiter_mla_timed:register", plugins.DEFAULT_PLUGINS_GROUP)
        monkeypatch.setattr(metadata, "entry_points", lambda group: metadata.EntryPoints([point]))
        return start.registration()

    monkeypatch.setenv("VLLM_PLUGINS", start.PLUGIN)
    return load


def busy(seconds):
    import time

    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


@pytest.mark.mutation
def test_mutation_a_slow_registration_is_noticed(vllm_loads):
    quick, slow = (vllm_loads(SimpleNamespace(register=lambda s=seconds: busy(s))) for seconds in (0.0, 0.05))
    assert quick < 0.02 < 0.05 <= slow
    figures = [1e3 * slow] * 2
    said = start_cost.verdicts(starts(registration_ms=figures))
    assert {verdict for line, verdict in said.items() if "registration" in line} == {start_cost.MISSED}


def test_a_process_that_does_not_load_the_plugin_is_no_measurement(vllm_loads, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    with pytest.raises(RuntimeError, match="0 of 2"):
        vllm_loads(SimpleNamespace(register=lambda: None))


def test_a_warm_start_that_compiles_again_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(start_cost, "child", lambda *_: {REGISTRATION: 0.01, IMPORTS: 0.1})
    monkeypatch.setattr(start_cost, "start", lambda work, side: record(20.0) | {"loaded": 0})
    assert guarded("start_cost", start_cost.run, []) == 1
    assert "no warm start" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.wide
def test_every_process_counts_what_it_should():
    """No bound on time: the machine of a test has other work."""
    found = start_cost.measure(starts=2, registrations=2)
    assert {kind: len(figures) for kind, figures in found.fresh.items()} == dict.fromkeys(start.KINDS, 2)
    assert all(0 < one[REGISTRATION] < 1 and one[IMPORTS] > 0 for figures in found.fresh.values() for one in figures)
    ours = (GATE, CHECK, TIMING, start.STATUS)
    assert all(found.first["on"]["phases"][name] > 0 for name in PHASES)
    assert {name for name in ours if found.first["off"]["phases"][name] > 0} <= {GATE}
    for side in start_cost.SIDES:
        cold, *warm = (one["phases"][start.COMPILE] for one in (found.first[side], *found.warm[side]))
        assert max(warm) < cold
    assert max(one["phases"][TIMING] for one in found.warm["on"]) < found.first["on"]["phases"][TIMING]
