"""What a correction of an engine's status changes: the layers that it is told of, and nothing else."""

from dataclasses import replace

import pytest

from vllm_aiter_mla import files
from vllm_aiter_mla.status import NOT_RUN, EngineStatus, Outcome
from vllm_aiter_mla.status.record import Decided, RankStatus

WINDOW, ROPE = ("sliding_window", "the layer has a sliding window"), ("no_rope", "found in a graph")
KERNELS = ((1, 512, "aiter"),)
RAN = Outcome(ran="aiter", decided=(KERNELS, ()))
FELL = Outcome(skip=WINDOW, decided=((), (("aiter", "why"),)))
NOTHING = Outcome()
DRAFT = Outcome(would_run=("aiter",))


def status_of(**layers):
    """The status of an engine whose line was said."""
    status = EngineStatus()
    status.record = status.record_of(layers, 512, "fp8", 0, "passes", "cpu")
    return status


def after(before, **layers):
    """(fallen, again, what is engaged, what is skipped)."""
    fallen, again = before.update(layers)
    return fallen, again, before.record.engaged, before.record.skipped


def test_nothing_is_corrected_before_the_line_was_said():
    status = EngineStatus()
    assert status.update({"a": FELL}) == ({}, [])
    assert status.record is None


def test_a_layer_that_stays_engaged_has_neither_fallen_nor_come_again():
    assert after(status_of(a=RAN, b=RAN), a=RAN) == ({}, [], {"a": "aiter", "b": "aiter"}, {})


def test_a_layer_falls_and_comes_again_alone():
    status = status_of(a=RAN, b=RAN)
    assert after(status, a=FELL) == ({"a": WINDOW}, [], {"b": "aiter"}, {"a": WINDOW})
    assert after(status, a=FELL) == ({}, [], {"b": "aiter"}, {"a": WINDOW}), "said once"
    assert after(status, a=RAN) == ({}, ["a"], {"a": "aiter", "b": "aiter"}, {})


def test_a_layer_that_runs_for_the_first_time_has_not_come_again():
    assert after(status_of(a=NOTHING, b=RAN), a=RAN) == ({}, [], {"a": "aiter", "b": "aiter"}, {})


def test_a_layer_of_a_draft_stays_engaged_by_the_kernel_of_a_layer_that_the_correction_leaves_out():
    assert after(status_of(a=RAN, draft=DRAFT), draft=DRAFT) == ({}, [], {"a": "aiter", "draft": "aiter"}, {})


def test_a_reason_that_only_a_graph_of_an_earlier_start_knew_still_holds():
    status = status_of(a=NOTHING, b=RAN)
    status.record = replace(status.record, skipped={"a": ROPE})
    assert after(status, a=NOTHING) == ({}, [], {"b": "aiter"}, {"a": ROPE})
    assert after(status, new=NOTHING) == ({}, [], {"b": "aiter"}, {"a": ROPE, "new": NOT_RUN})


def test_what_is_decided_changes_for_the_layers_of_the_correction():
    status = status_of(a=RAN, b=RAN, c=FELL)
    status.update({"a": FELL})
    assert set(status.record.decided) == {
        Decided(("b",), KERNELS, ()), *(Decided((name,), *FELL.decided) for name in "ac"),
    }  # fmt: skip


@pytest.mark.parametrize("found", ["mine", "missing", "no JSON", "another engine's"])
def test_the_file_is_written_again_unless_it_is_another_engines(tmp_path, found):
    status, path = status_of(a=RAN), tmp_path / "status.json"
    status.path = path
    if found == "no JSON":
        path.write_text("{")
    elif found != "missing":
        files.write(path, replace(status.record, writer=found if found != "mine" else ""))
    status.update({"a": FELL})
    status.rewrite()
    told = files.read(RankStatus, path).skipped
    assert told == ({} if found == "another engine's" else {"a": WINDOW})
