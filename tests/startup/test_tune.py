"""``check --only timing --tune`` on a rehearsal card: the file that it keeps, and what a start does with it."""

import logging
from contextlib import nullcontext
from dataclasses import replace
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.passes.stubs import Sizes, StubLayer
from tests.rehearsal import faults
from tests.sandbox.interpreter import Recorded
from tests.sandbox.rehearsal_card import RehearsalCard, Scenario, TritonLaunch
from tests.support import in_process, worker
from tests.support.decisions import spans
from tests.support.opcalls import NAME
from tests.support.planted import raising
from tests.support.statuses import record_with
from tests.support.worker import Worker, layer_in, ours
from vllm_aiter_mla import files
from vllm_aiter_mla.commands import outputs, process
from vllm_aiter_mla.commands.check.record import CheckRun
from vllm_aiter_mla.commands.check.timing import tune as step
from vllm_aiter_mla.commands.check.timing.child import TimingRequest
from vllm_aiter_mla.commands.main import app
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.kernels import device, stopwatch
from vllm_aiter_mla.kernels.inputs import meta_inputs, synthetic_inputs
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.kernels.triton import backend as triton_backend
from vllm_aiter_mla.kernels.triton import launcher, tiles, tuning
from vllm_aiter_mla.kernels.triton.backend import TritonBackend
from vllm_aiter_mla.serving import backends, decision
from vllm_aiter_mla.status.line import status_line

BEST, TABLE = faults.TILE, "16x64/4w"
US = {"vllm": [(1, 10.0)], "triton": [(1, 9.0)], f"triton {BEST}": [(1, 5.0)]}
LIMIT = 16


@pytest.fixture
def card(monkeypatch, said):
    """An MI300X on which one tile that is not in the table is the fastest; AITER is not installed."""
    monkeypatch.setattr(launcher, "decode_prep_kernel", Recorded(TritonLaunch()))
    monkeypatch.setattr(launcher, "_compiled", set())
    monkeypatch.setattr(compat_config, "as_current", lambda config=None: nullcontext())
    monkeypatch.setattr(backends, "detect_platform", lambda: Platform("gfx942"))
    for name in backends.AITER_KERNELS:
        monkeypatch.setitem(backends.FACTORIES, name, lambda *_: "not installed")
    sizes = Sizes(p=128, r=64, latent=512)  # as `timing` has them
    monkeypatch.setattr(worker, "layer_of", lambda: StubLayer(NAME, sizes, torch.bfloat16))
    in_process.install(monkeypatch)
    return RehearsalCard(Scenario(us=US)).install(monkeypatch)


def wrong_tile(monkeypatch):
    monkeypatch.setattr(TritonLaunch, "run", staticmethod(TritonLaunch.run))
    faults.a_tile_is_wrong()


def tune(*options):
    line = ["--tune", "--heads", "2", "--tokens", "1", "--tokens", "16"]
    return CliRunner().invoke(app, ["check", "--only", "timing", *line, *options])


def start(kernel="triton"):
    """A worker whose layer has two heads and a bf16 cache; a kernel by name is checked and not timed."""
    one = Worker(ours(LIMIT), kernel=kernel)
    one.vllm_config.device_config = SimpleNamespace(device_type="cpu")
    one.load_model()
    return one


def tile_of(one, tokens=4):
    layer = layer_in(one)
    bound = layer.backends.bind("triton", synthetic_inputs(layer.shape(), tokens))
    return bound.kernel


def key_of_two():
    """Of the layer of ``start``, which is that of ``--heads 2 --type bf16``."""
    return tuning.key_of(meta_inputs(TimingRequest((), (), (), "bf16").shape("bf16", 2)))


def tuned(folder):
    """The file that tuning leaves, with figures that are made up."""
    name, triton, units = "AMD Instinct MI300X", stopwatch.machine()["triton"], device.card().units()
    path = tuning.path_of(folder, name, triton, units)
    files.write_record(path, tuning.TunedTiles(name, triton, units, {key_of_two(): spans((1, 16, BEST))}, {}))
    return path


def record(one):
    return record_with(layer_in(one), "triton", LIMIT, card="gfx942")


def line(one):
    return status_line(record(one))


@pytest.mark.slow
def test_tune_keeps_the_fastest_tile_and_the_next_start_times_and_serves_it(card, tmp_path, said):
    one = start("auto")
    assert tile_of(one) == TABLE
    assert "tuned" not in line(one)
    done = tune("--type", "bf16", "--json", str(tmp_path / "sent.json"))
    assert (done.exit_code, f"1..16 tokens  {BEST}: 5.0" in done.output) == (0, True), done.output
    (kept,) = tmp_path.glob("tuned-*.json")
    found = files.read_record(tuning.TunedTiles, kept)
    (sent,) = files.read_record(CheckRun, tmp_path / "sent.json").steps
    assert replace(files.parse_unstamped(tuning.TunedTiles, tmp_path, sent.data), evidence=found.evidence) == found
    assert found.card == "AMD Instinct MI300X"
    assert [*found.chosen.values()] == [spans((1, 16, BEST))]
    one = start("auto")
    assert tile_of(one) == BEST
    assert "5.0 us a layer at 16 tokens against vLLM's own 10.0" in line(one)
    assert f"; tuned tiles {BEST} 1..16)" in line(one)
    assert record(one).tuned_tiles.popitem()[1] == f"{BEST} 1..16"
    assert said.at(logging.WARNING) == []


def test_tune_whose_tiles_cannot_be_kept_tells_the_times_and_fails(card, monkeypatch, tmp_path):
    """As in a pod whose cache is read-only: the card's minutes are not lost."""
    monkeypatch.setattr(step, "save_tiles", raising(OSError(30, "Read-only file system")))
    done = tune("--type", "bf16", "--json", str(tmp_path / "sent.json"))
    (sent,) = files.read_record(CheckRun, tmp_path / "sent.json").steps
    found = files.parse_unstamped(tuning.TunedTiles, tmp_path, sent.data)
    assert (done.exit_code, [*found.chosen.values()]) == (outputs.EXIT_FAILED, [spans((1, 16, BEST))])
    assert "Read-only file system" in sent.detail
    assert f"1..16 tokens  {BEST}: 5.0" in done.output


def test_tune_adds_to_what_was_tuned_before(card, tmp_path):
    assert tune("--type", "bf16").exit_code == tune("--type", "fp8").exit_code == 0
    (kept,) = tmp_path.glob("tuned-*.json")
    assert len(files.read_record(tuning.TunedTiles, kept).chosen) == 2


def test_tune_at_few_counts_keeps_what_was_tuned_beyond_them(card, tmp_path):
    assert tune("--type", "bf16", "--tokens", "64").exit_code == 0
    (kept,) = tmp_path.glob("tuned-*.json")
    old = files.read_record(tuning.TunedTiles, kept)
    ((key, tuned),) = old.chosen.items()
    files.write_record(kept, replace(old, chosen={key: (*tuned, *spans((65, 96, TABLE)))}))
    assert tune("--type", "bf16").exit_code == 0
    found = files.read_record(tuning.TunedTiles, kept)
    assert found.chosen[key] == spans((1, 64, BEST), (65, 96, TABLE))
    assert [*found.us[key]] == [1, 16, 64]


def tune_at(tokens):
    done = CliRunner().invoke(
        app, ["check", "--only", "timing", "--tune", "--heads", "2", "--type", "bf16", "--tokens", str(tokens)]
    )
    assert done.exit_code == 0, done.output
    return done.output


def chosen_in(folder):
    (path,) = folder.glob("tuned-*.json")
    (chosen,) = files.read_record(tuning.TunedTiles, path).chosen.values()
    return chosen


@pytest.mark.slow
def test_a_count_decides_down_to_where_the_table_changes_its_tile(card, tmp_path):
    """The table has one tile for up to 256 tokens of two heads, which was not compared with any."""
    said = tune_at(272)
    assert chosen_in(tmp_path) == spans((1, 256, TABLE), (257, 272, BEST))
    assert f"1..256 tokens  {TABLE}: not timed" in said


OTHER = "32x64/4w"


@pytest.mark.parametrize(
    ("tokens", "chosen"),
    [
        (16, ((1, 4, OTHER), (5, 8, TABLE), (9, 16, BEST), (17, 64, OTHER))),
        (12, ((1, 4, OTHER), (5, 8, TABLE), (9, 12, BEST), (13, 16, TABLE), (17, 64, OTHER))),
        (80, ((1, 4, OTHER), (5, 16, TABLE), (17, 64, OTHER), (65, 80, BEST))),
    ],
)
def test_a_count_decides_down_to_the_one_timed_before_and_all_else_stays(card, tmp_path, tokens, chosen):
    path = tuned(tmp_path)
    old = files.read_record(tuning.TunedTiles, path)
    (key,) = old.chosen
    us = {count: {TABLE: 9.0} for count in (1, 4, 8, 16, 64)}
    tiles = spans((1, 4, OTHER), (5, 16, TABLE), (17, 64, OTHER))
    files.write_record(path, replace(old, chosen={key: tiles}, us={key: us}))
    tune_at(tokens)
    assert chosen_in(tmp_path) == spans(*chosen)


@pytest.mark.mutation
def test_mutation_counts_that_earlier_runs_timed_and_nobody_looks_at_are_caught(card, monkeypatch, tmp_path):
    spliced = step.splice_spans
    monkeypatch.setattr(step, "splice_spans", lambda new, timed, old, before: spliced(new, timed, old, ()))
    with pytest.raises(AssertionError, match=rf"first=5, last=16, kernel='{BEST}'"):
        test_a_count_decides_down_to_the_one_timed_before_and_all_else_stays(
            card, tmp_path, 16, ((1, 4, OTHER), (5, 8, TABLE), (9, 16, BEST), (17, 64, OTHER))
        )


def test_a_tuned_tile_serves_no_more_tokens_than_were_timed(card, tmp_path):
    tuned(tmp_path)
    one = start()
    assert [tile_of(one, tokens) for tokens in (16, 17)] == [BEST, TABLE]


def test_tune_leaves_a_wrong_tile_out(card, monkeypatch, tmp_path):
    wrong_tile(monkeypatch)
    done = tune("--type", "bf16")
    assert done.exit_code == outputs.EXIT_FAILED
    assert done.output.count(f"WRONG, not timed: {BEST} at 2 heads") == 1
    (kept,) = tmp_path.glob("tuned-*.json")
    assert [*files.read_record(tuning.TunedTiles, kept).chosen.values()] == [spans((1, 16, TABLE))]


TOLD = ("kept in ", "fnuz cache:", f"{BEST}: 5.0", "bfloat16 cache:", f"{BEST}: 5.0")
"""What tuning of a layer with each type of cache tells, in order."""


@pytest.mark.slow
@pytest.mark.parametrize("told", range(len(TOLD)))
def test_tune_whose_process_ends_fails_and_nothing_that_it_told_is_lost(card, monkeypatch, tmp_path, told):
    in_process.install(monkeypatch, ends={process.import_path_of(step.tune_tiles): told})
    assert tune("--type", "both", "--json", str(tmp_path / "sent.json")).exit_code == outputs.EXIT_FAILED
    (found,) = files.read_record(CheckRun, tmp_path / "sent.json").steps
    assert (found.status, found.detail) == ("failed", in_process.ENDED.sentence())
    *lines, last = found.lines
    assert last == in_process.ENDED.lines[-1]
    assert [part in line for part, line in zip(TOLD[:told], lines, strict=True)] == [True] * told
    kept = [files.read_record(tuning.TunedTiles, path) for path in tmp_path.glob("tuned-*.json")]
    assert sum(len(record.chosen) for record in kept) == (0 if told < 1 else 1 if told < 4 else 2)


@pytest.mark.mutation
def test_mutation_tiles_that_are_kept_at_the_end_only_are_caught(card, monkeypatch, tmp_path):
    monkeypatch.setattr(step, "save_tiles", lambda record: tmp_path)
    with pytest.raises(AssertionError, match="0 == 1"):
        test_tune_whose_process_ends_fails_and_nothing_that_it_told_is_lost(card, monkeypatch, tmp_path, 3)


def save_for(heads):
    key, spans_of = f"{heads} heads, and the rest", spans((1, 16, BEST))
    return step.save_tiles(tuning.TunedTiles("AMD Instinct MI300X", "3.7.1", 304, {key: spans_of}, {key: {}}))


def assert_two_runs_at_once_keep_the_tiles_of_both(monkeypatch, tmp_path, seconds):
    """The second run saves between the first one's look at the file and its writing, if it can within ``seconds``."""
    monkeypatch.setattr(compat_config, "cache_folder", lambda: tmp_path)
    second, write = Thread(target=save_for, args=(32,)), files.write_record

    def write_later(*given):
        monkeypatch.setattr(files, "write_record", write)
        second.start()
        second.join(seconds)
        write(*given)

    monkeypatch.setattr(files, "write_record", write_later)
    path = save_for(16)
    second.join()
    kept = files.read_record(tuning.TunedTiles, path).chosen
    assert [key.split(" heads")[0] for key in sorted(kept)] == ["16", "32"]


def test_two_runs_that_tune_at_once_keep_the_tiles_of_both(monkeypatch, tmp_path):
    assert_two_runs_at_once_keep_the_tiles_of_both(monkeypatch, tmp_path, 0.5)


@pytest.mark.mutation
def test_mutation_tiles_that_are_saved_without_a_lock_are_caught(monkeypatch, tmp_path):
    monkeypatch.setattr(step, "FileLock", lambda path: nullcontext())
    with pytest.raises(AssertionError, match=r"\['16'\] == \['16', '32'\]"):
        assert_two_runs_at_once_keep_the_tiles_of_both(monkeypatch, tmp_path, 60)


def test_tune_without_a_card_looks_at_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    assert tune().exit_code == outputs.EXIT_INCOMPLETE
    assert not list(tmp_path.rglob("tuned-*.json"))


def test_a_tuned_tile_that_fails_its_check_is_left_out_and_the_tables_serves(card, monkeypatch, tmp_path, said):
    tuned(tmp_path)
    wrong_tile(monkeypatch)
    one = start()
    assert tile_of(one) == TABLE
    (left_out,) = said.at(logging.WARNING)
    assert f"the tuned tiles {BEST} 1..16 are left out" in left_out
    assert "tuned" not in line(one)


@pytest.fixture
def two_results():
    """Calls of a target and of its draft, of which only the second one's decode kernel reads more heads."""
    shape = replace(TimingRequest((), (), (), "bf16").shape("bf16", 16), device="meta")
    target, draft = (synthetic_inputs(replace(shape, out_heads=heads)) for heads in (0, 32))
    return TritonBackend({tuning.key_of(target): spans((1, 16, BEST))}), target, draft


def assert_only_the_draft_is_untuned(backend, target, draft):
    """Check that a failed check of the draft's tile leaves the target the tile that passed its own."""
    assert {backend.tile(call, 4).label for call in (target, draft)} == {BEST}
    backend.untune(draft)
    assert [backend.tile(call, 4).label for call in (target, draft)] == [BEST, TABLE]
    assert (backend.tuned(target), backend.tuned(draft)) == (f"{BEST} 1..16", "")


def test_a_tuned_tile_that_fails_for_one_shape_stays_with_another(card, two_results):
    assert_only_the_draft_is_untuned(*two_results)


@pytest.mark.parametrize("other", [{"nope_dim": 192}, {"out_dtype": torch.float8_e4m3fnuz}, {"act": torch.float16}])
def test_a_choice_of_tiles_is_of_the_widths_and_types_that_were_timed(card, other):
    shape = replace(
        TimingRequest((), (), (), "bf16").shape("bf16", 16), device="meta", cache_dtype=torch.float8_e4m3fnuz
    )
    timed, another = map(synthetic_inputs, (shape, replace(shape, **other)))
    backend = TritonBackend({tuning.key_of(timed): spans((1, 16, BEST))})
    assert [backend.tile(call, 4).label for call in (timed, another)] == [BEST, TABLE]


def test_tiles_of_the_whole_card_do_not_serve_its_partitions(card, monkeypatch, tmp_path, said):
    """A partition may have the card's name."""
    tuned(tmp_path)
    assert tile_of(start()) == BEST
    monkeypatch.setattr(type(device.card()), "units", lambda self: 38)
    assert tile_of(start()) == TABLE
    (left_out,) = said.at(logging.WARNING)
    assert "38 units" in left_out


@pytest.mark.mutation
def test_mutation_a_tile_that_is_left_out_by_heads_is_caught(card, two_results, monkeypatch):
    monkeypatch.setattr(triton_backend, "_shape", tuning.key_of)
    with pytest.raises(AssertionError, match=f"'{TABLE}', '{TABLE}'"):
        assert_only_the_draft_is_untuned(*two_results)


def other_card(kept):
    files.write_record(kept, replace(files.read_record(tuning.TunedTiles, kept), card="AMD Instinct MI355X"))


def other_triton(kept):
    kept.rename(kept.with_name(kept.name.replace("triton-", "triton-0.")))


def cut_off(kept):
    kept.write_text(kept.read_text()[:-40])


def strange_tile(kept):
    found = files.read_record(tuning.TunedTiles, kept)
    chosen = {key: spans((1, 4, "8x8/1w"), (5, 16, BEST)) for key in found.chosen}
    files.write_record(kept, replace(found, chosen=chosen))


def gap(kept):
    kept.write_text(
        kept.read_text().replace(
            '"chosen"', '"chosen": {"a call": [{"first": 2, "last": 4, "kernel": "16x64/4w"}]}, "was"'
        )
    )


@pytest.mark.parametrize("harm", [other_card, other_triton, cut_off, strange_tile, gap])
def test_a_tuned_file_that_is_not_for_this_start_is_left_out_with_one_line(card, tmp_path, said, harm):
    harm(tuned(tmp_path))
    one = start()
    assert tile_of(one) == TABLE
    (left_out,) = said.at(logging.WARNING)
    assert "tuned-AMD-Instinct-MI300X-304-triton-" in left_out
    assert "tuned" not in line(one)


def test_a_tuned_file_of_another_card_on_the_same_volume_is_no_news(card, tmp_path, said):
    kept = tuned(tmp_path)
    kept.with_name(kept.name.replace("MI300X", "MI355X")).write_text("{")
    assert tile_of(start()) == BEST
    assert said.at(logging.WARNING) == []


def test_a_tuned_file_that_came_with_the_plugin_serves_where_the_machine_has_none(card, monkeypatch, tmp_path):
    kept, shipped = tuned(tmp_path), tmp_path / "shipped"
    shipped.mkdir()
    kept.rename(shipped / kept.name)
    monkeypatch.setattr(tuning, "SHIPPED", shipped)
    assert tile_of(start()) == BEST


@pytest.mark.parametrize("arch", [*tiles.TABLE, "sm80"])
@given(st.lists(st.integers(1, 300), min_size=1, max_size=4, unique=True), st.data())
def test_every_tuned_tile_that_may_serve_is_tried_by_the_check(arch, lasts, data):
    known = tiles.allowed(arch)
    firsts = [1, *(last + 1 for last in sorted(lasts)[:-1])]
    chosen = [(a, b, data.draw(st.sampled_from([*known]))) for a, b in zip(firsts, sorted(lasts), strict=True)]
    inputs = synthetic_inputs(replace(TimingRequest((), (), (), "bf16").shape("bf16", 16), device="meta"), tokens=1)
    backend = TritonBackend({tuning.key_of(inputs): spans(*chosen)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TritonBackend, "arch", arch)
        counts = backend.tried_counts(inputs)
        tried = {backend.tile(inputs, count).label for count in counts}
        assert tried == {backend.tile(inputs, count).label for count in (*range(1, 302), *(1 << n for n in range(21)))}
        assert max(counts) > backend.tile(inputs, 1 << 20).block_t, "a second block of the last"


@pytest.mark.parametrize("arch", tiles.TABLE)
def test_a_tuned_tile_has_a_name_of_its_own_and_blocks_that_the_kernel_can_address(arch):
    table = {entry.tile for entry in tiles.TABLE[arch]}
    known = tiles.allowed(arch)
    assert {tile.label: tile for tile in table} == {label: known[label] for label in (tile.label for tile in table)}
    assert len({tile.label for tile in tiles.MORE}) == len(tiles.MORE)
    assert not {tile.label for tile in tiles.MORE} & {tile.label for tile in table if tile not in tiles.MORE}
    assert max(tile.block_t for tile in known.values()) <= 128


def test_tune_takes_another_tile_only_where_it_is_clearly_faster():
    rounds = {1: {"a": [10.0] * 5, "b": [9.9] * 5}, 8: {"a": [10.0] * 5, "b": [9.0] * 5}}
    assert decision.fastest_spans(rounds, ["a", "b"], lambda tokens: "a") == spans((1, 1, "a"), (2, 8, "b"))
    assert decision.fastest_spans(rounds, ["a", "b"], lambda tokens: "b") == spans((1, 8, "b"))
