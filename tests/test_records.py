"""Every JSON file of ours reads back as it was written (I16); a bad one is one line that names it."""

import json
import math
import os
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic import JsonValue

from tests.support.bad_files import BAD
from tests.support.decisions import spans
from tests.support.statuses import record_of
from vllm_aiter_mla import files
from vllm_aiter_mla.admission import Skip
from vllm_aiter_mla.commands.check.record import CheckRun
from vllm_aiter_mla.commands.check.timing.record import Measurement, TimingRow
from vllm_aiter_mla.commands.plan.record import Plan
from vllm_aiter_mla.commands.report.serving_record import Serving
from vllm_aiter_mla.commands.status import Engines
from vllm_aiter_mla.decided import ShapeTiming, Span
from vllm_aiter_mla.kernels.triton.tuning import TunedTiles
from vllm_aiter_mla.settings import KERNELS, Settings
from vllm_aiter_mla.startup import first_call
from vllm_aiter_mla.startup.kept_figures import KeptFigures
from vllm_aiter_mla.status.line import status_line
from vllm_aiter_mla.status.record import RankRecord
from vllm_aiter_mla.status.skips import KeptSkips
from vllm_aiter_mla.verify.results import Verification

VERSIONS = files.schemas()
TEXT = st.text(max_size=8)
NUMBERS = st.floats(allow_nan=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | TEXT | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=4,
)
COUNTS = st.lists(st.integers(1, 2**20), min_size=1, max_size=3, unique=True).map(sorted)


@st.composite
def timed(draw):
    counts = draw(COUNTS)
    spans = [Span(before + 1, last, draw(TEXT)) for before, last in zip([0, *counts], counts, strict=False)]
    us = {span.last: {"vllm": draw(NUMBERS), span.kernel: draw(NUMBERS)} for span in spans}
    return ShapeTiming(draw(TEXT), tuple(draw(st.lists(TEXT, max_size=2))), tuple(spans), us, draw(TEXT))


@st.composite
def rounds(draw):
    number = draw(st.integers(1, 3))
    figures = st.lists(NUMBERS, min_size=number, max_size=number)
    return {tokens: {"vllm": draw(figures), draw(TEXT): draw(figures)} for tokens in draw(COUNTS)}


SETTINGS = st.builds(
    Settings, enabled=st.booleans(), max_token_num=st.none() | st.integers(1, 99), strict=st.booleans(),
    measure=st.sampled_from([True, False, "again"]), kernel=st.sampled_from(KERNELS),
)  # fmt: skip


def values_of(kind):
    own = {str: TEXT, float: NUMBERS, int: st.integers(), bool: st.booleans(), type(None): st.none(),
           JsonValue: JSON, Any: JSON, ShapeTiming: timed(), Settings: SETTINGS}  # fmt: skip
    if kind in own:
        return own[kind]
    if is_dataclass(kind):
        return records(kind)
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    origin, inner = get_origin(kind), [values_of(one) for one in get_args(kind) if one is not ...]
    if origin is dict:
        return st.dictionaries(*inner, max_size=3)
    if origin is tuple and ... not in get_args(kind):
        return st.tuples(*inner)
    return st.lists(*inner, max_size=3).map(origin) if origin in (list, tuple) else st.one_of(inner)


def records(cls, **made):
    """Any record of the class: every field is made, also one that has a default."""
    if files.STAMP_KEY in (one.name for one in fields(cls)):
        schema = files.schema_of(cls)
        known = {"schema": st.just(f"vllm-aiter-mla/{schema}"), "schema_version": st.just(VERSIONS[schema]["version"])}
        made[files.STAMP_KEY] = records(files.Stamp, **known)
    others = {name: values_of(kind) for name, kind in get_type_hints(cls).items() if name not in made}
    return st.builds(cls, **others, **made)


JSON_BY_NAME = st.dictionaries(TEXT, JSON, max_size=3)
RECORDS = {
    "status": records(RankRecord, rank=st.integers(0, 99), num_ranks=st.integers(0, 99)),
    "skips": records(KeptSkips),
    "measured": records(KeptFigures, key=JSON_BY_NAME, rounds=rounds()),
    "tuned": records(
        TunedTiles, chosen=st.dictionaries(TEXT, TEXT.map(lambda tile: spans((1, 4, tile), (5, 9, tile))))
    ),
    "first-call": records(first_call.FirstCall),
    "check": records(CheckRun),
    "kernels": records(Verification),
    "timing": records(Measurement),
    "plan": records(Plan),
    "serving": records(Serving),
    "engines": records(Engines),
}


def read_back(folder, record):
    path = folder / "record.json"
    files.write_record(path, record)
    return files.read_record(type(record), path)


def test_records_of_every_schema_that_the_package_reads_are_in_the_table():
    assert set(RECORDS) == set(files.schemas())


def assert_read_back(kind, tmp_path, **options):
    @settings(suppress_health_check=[HealthCheck.too_slow], max_examples=40, **options)
    @given(RECORDS[kind])
    def holds(record):
        assert read_back(tmp_path, record) == record

    holds()


@pytest.mark.parametrize("kind", RECORDS)
def test_i16_records_read_back_as_they_were_written(kind, tmp_path):
    assert_read_back(kind, tmp_path)


def test_i16_the_line_of_records_from_a_file_is_that_of_the_record(tmp_path):
    @settings(suppress_health_check=[HealthCheck.too_slow], max_examples=40)
    @given(RECORDS["status"])
    def holds(record):
        assert status_line(read_back(tmp_path, record)) == status_line(record)

    holds()


def keys_stay_strings(cls, path, data, part=files.parse_unstamped):
    """What ``json.load`` makes of token counts."""
    found = part(cls, path, data)
    for one in getattr(found, "shape_timings", ()):
        object.__setattr__(one, "medians_us", {str(tokens): by for tokens, by in one.medians_us.items()})
    return found


@pytest.mark.mutation("I16")
@pytest.mark.parametrize(
    ("name", "plant", "seen"),
    [
        ("parse_unstamped", keys_stay_strings, r"Differing attributes:\s+\['shape_timings'\]"),
        ("to_plain", lambda value, plain=files.to_plain: json.loads(json.dumps(plain(value)), parse_int=str),
         ": status 7; this version reads status 7"),
        ("schema_of", lambda cls: "skips", ": status 7; this version reads skips "),
    ],
)  # fmt: skip
def test_mutation_i16_records_that_change_on_the_way_are_caught(tmp_path, monkeypatch, name, plant, seen):
    us = {64: {"triton": 5.0, "vllm": 10.0}}
    timing = ShapeTiming("s", ("a",), spans((1, 64, "triton")), us)
    found = replace(record_of(["a"], 64, "fp8", 0), shape_timings=(timing,))
    assert read_back(tmp_path, found) == found
    monkeypatch.setattr(files, name, plant)
    with pytest.raises((AssertionError, ValueError), match=seen):
        assert read_back(tmp_path, found) == found
    with pytest.raises((AssertionError, ValueError), match=seen):
        assert_read_back("status", tmp_path, phases=[Phase.generate])  # nobody needs the smallest one: half a minute


def test_records_hold_infinities_as_json_that_others_can_read(tmp_path):
    found = Measurement({}, "fp8", (), {}, "")
    found = replace(found, rows=(TimingRow(1, 16, "fp8", {"vllm": math.inf}, {}, -math.inf),))
    path = tmp_path / "record.json"
    files.write_record(path, found)
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert files.read_record(Measurement, path) == found


@pytest.mark.parametrize("spoil", BAD.values(), ids=BAD)
@pytest.mark.parametrize(
    "record",
    [record_of(["a"], 16, "fp8", 0), KeptSkips({"a": Skip("dtype", "x")}), first_call.FirstCall("1-a"),
     KeptFigures({"card": "x"}, {1: {"vllm": [1.0]}}), Measurement({}, "fp8", (), {}, ""), CheckRun("m", 0, ()),
     Verification(0, {}, "x", None, {}, ())],
    ids=lambda record: type(record).__name__,
)  # fmt: skip
def test_bad_records_are_one_line_that_names_the_file(tmp_path, record, spoil):
    path = tmp_path / "record.json"
    files.write_record(path, record)
    assert files.read_record(type(record), path) == record
    spoil(path)
    with pytest.raises((OSError, ValueError)) as caught:
        files.read_record(type(record), path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    if path.is_fifo():
        os.unlink(path)


@pytest.mark.parametrize(
    "timed",
    [
        {"medians_us": {}},
        {"medians_us": {8: {"vllm": 1.0}}},
        {"medians_us": {8: {"triton": 1.0}}},
        {"chosen_spans": ()},
    ],
    ids=["nothing timed", "the chosen one", "vllm", "nothing chosen"],
)
def test_records_that_lack_a_figure_are_not_made(timed):
    whole = {"medians_us": {8: {"vllm": 2.0, "triton": 1.0}}, "chosen_spans": spans((1, 8, "triton"))}
    ShapeTiming("s", (), **whole)
    with pytest.raises(ValueError):
        ShapeTiming("s", (), **whole | timed)
