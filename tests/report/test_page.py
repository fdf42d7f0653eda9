"""What every page holds, whatever its inputs: no markup of theirs, and none that hides another."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import jinja2
import pytest

from tests.report import made_files
from tests.report import report_chromium as chromium
from tests.report.pages import Write, check_run, data_of, rows_of, sections_of, summaries, tables
from vllm_aiter_mla import files as our_files
from vllm_aiter_mla.commands.check.record import StepResult
from vllm_aiter_mla.commands.report import page as page_module
from vllm_aiter_mla.commands.report.page import render_page
from vllm_aiter_mla.startup.first_call import first_call_marker


@pytest.mark.slow
def test_each_chart_of_the_whole_page_is_named(page: str) -> None:
    charts = re.findall(r"<svg [^>]*>", page)
    assert len(charts) >= 5
    assert all('role="img"' in chart and re.search(r'aria-label="[^"]+"', chart) for chart in charts)


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("status", ["Status"]),
        ("plan", ["Check", "Plan"]),
        ("kernels", ["Check", "Kernels"]),
        ("timing", ["Check", "Timing"]),
        ("serving", ["Serving"]),
    ],
)
def test_a_file_fills_its_own_sections(files: dict[str, Path], name: str, sections: list[str]) -> None:
    assert sections_of(render_page([files[name]])) == sections


@pytest.mark.parametrize(
    ("name", "word", "card"),
    [
        ("status", "engaged", "gfx942"),
        ("plan", "planned, nothing ran", "none"),
        ("kernels", "passed on a CPU", "none"),
        ("timing", "failed", "made up for a test"),
        ("serving", "compared", "8 x made up for a test"),
    ],
)
def test_field_o14_the_first_screen_answers(files: dict[str, Path], name: str, word: str, card: str) -> None:
    page = render_page([files[name]])
    ((said, _, facts),) = summaries(page)
    assert (said, facts["Card"].startswith(card)) == (word, True)
    stamp = json.loads(files[name].read_text())["evidence"]
    assert stamp["host"] in facts["When"]
    assert f"vLLM {stamp['vllm']}" in facts["Versions"]
    assert facts["Means"]
    assert facts["Skipped"]
    assert page.index('class="input-summary') < page.index("<nav"), "before everything else"


def test_the_page_loads_nothing_and_ids_are_not_repeated(page: str) -> None:
    assert not re.search(r"<(script|iframe|object|embed|img|image)\b", page)
    loads = re.findall(r"""\b(?:src|href|srcset)\s*=\s*["']?([^"'\s>]*)""", page)
    assert loads
    assert all(load.startswith("#") or load == "data:," for load in loads)
    ids = re.findall(r"""\sid=["']?([^"'\s>]+)""", page)
    assert len(ids) == len(set(ids)) > 6
    assert "default-src 'none'" in page
    assert "@import" not in page


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (558 / 560, "0.9964"), (0.997, "0.997"), (1.0, "1"), (0.0, "0"), (0.99999, "0.99999"), (1.00001, "1.00001"),
        (0.0004, "0.0004"), (12.345, "12.35"), (123456.7, "123457"), (9999.7, "10000"), (float("inf"), "inf"),
        (-1.0, "-1"), (1 - 2**-53, "0.9999999999999999"),
    ],
)  # fmt: skip
def test_no_number_looks_like_0_or_1_unless_it_is(written: Write, value: float, shown: str) -> None:
    read = check_run(StepResult("passed", "", data={"mixed": {"x": value}}, name="prefill"), status=0, on_a_card=True)
    if value != float("inf"):  # JSON has none
        assert ["mixed", shown] in rows_of(render_page([written("check.json", read)]))
    assert page_module._cell_text(value) == shown


def twins(files: dict[str, Path]) -> dict[str, tuple[Any, Any]]:
    """Two inputs of each kind that say much the same, as two cards, servers or sets of options do."""
    read = {kind: json.loads(path.read_text()) for kind, path in files.items()}
    other = {kind: json.loads(json.dumps(data)) for kind, data in read.items()}
    other["status"] |= {"run": "2-b", "capture_sizes": [3]}
    other["status"]["decision_groups"][0]["decision"]["kernel_spans"][0]["kernel"] = "aiter"
    other["status"]["shape_timings"][0]["medians_us"]["64"]["triton"] = 1.0
    data_of(other["timing"])["machine"]["card"], data_of(other["timing"])["rows"][0]["us"]["triton"] = (
        "another card",
        1.0,
    )
    data_of(other["kernels"])["results"][0]["replays"] += 1
    other["serving"]["rows"][0]["estimates"]["tpot"]["on"]["mean"] = 7.0
    issue = dict.fromkeys(("effect", "state", "remedy", "link"), "v")
    for one, known in ((read, "v#1"), (other, "v#2")):
        data_of(one["plan"])["known_issues"] = [issue | {"id": known}]
    data_of(other["plan"]).update(arch="gfx950", limit=128)
    data_of(other["plan"])["options"] |= {"tp": 16, "kv_cache_dtype": "auto"}
    found = {kind: (read[kind], other[kind]) for kind in read}
    parts = [
        {**{name: data_of(one[name]) for name in ("plan", "kernels", "timing")}, "launches": {"off": count},
         "engine": {"distances": {"short": {"tokens": count}}}, "prefill": {"mixed": {"tokens": count}}}
        for one, count in ((read, 7), (other, 8))
    ]  # fmt: skip
    runs = [[StepResult("passed", "", data=data, name=name) for name, data in part.items()] for part in parts]
    one, two = (check_run(*run, status=0, on_a_card=True) for run in runs)
    return found | {"check": (one, two)}


def test_a_link_that_the_user_names_is_read_and_one_in_a_folder_is_not(files: dict[str, Path], tmp_path: Path) -> None:
    """A mounted config map has nothing but links; another user may have put one into the plugin's folder."""
    (tmp_path / "latest.json").symlink_to(files["plan"])
    assert "latest.json" in render_page([tmp_path / "latest.json"])
    with pytest.raises(OSError, match="symbolic links"):
        render_page([tmp_path])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["status", "kernels", "timing", "plan", "check", "serving"])
def test_two_inputs_of_a_kind_are_shown_as_each_is_alone(files: dict[str, Path], tmp_path: Path, kind: str) -> None:
    paths = [tmp_path / folder / "v.json" for folder in "ab"]
    for path, data in zip(paths, twins(files)[kind], strict=True):
        path.parent.mkdir()
        path.write_text(json.dumps(data))
    page = render_page(paths)
    titles = [title for title, _ in tables(page)]
    charts = re.findall(r'<svg [^>]*aria-label="([^"]+)"', page)
    assert (len(titles), len(charts)) == (len(set(titles)), len(set(charts)))
    shown = [rows for _, rows in tables(page.replace("v.json (2)", "v.json"))]
    of_inputs = [row for rows in shown if rows[:1] and rows[0][0] == "input" for row in rows]
    for path in paths:
        alone = render_page([path])
        for title, rows in tables(alone):
            of_all = rows[:1] and rows[0][0] == "input"
            assert [row for row in rows if row not in of_inputs] == [] if of_all else rows in shown, title
        assert summaries(alone)[0] in summaries(page.replace("v.json (2)", "v.json"))
    assert [facts["Input"] for _, _, facts in summaries(page)] == ["v.json", "v.json (2)"]
    assert len(re.findall(r"<svg ", page)) == sum(render_page([path]).count("<svg ") for path in paths)


def test_two_plans_of_a_model_are_told_apart_by_their_options(files: dict[str, Path], written: Write) -> None:
    options = {"a.json": "a model on gfx942, TP 8, fp8_e5m2 cache", "b.json": "a model on gfx950, TP 16, auto cache"}
    page = render_page([written(*one) for one in zip(options, twins(files)["plan"], strict=True)])
    for name, words in options.items():
        (what,) = (what for _, what, facts in summaries(page) if facts["Input"] == name)
        assert words in what
        assert [title for title, _ in tables(page) if "by formula" in title and words in title]
        assert len([row for row in rows_of(page) if row[0] == f"{name}: {words}"]) == 2, "layers and a known issue"


HOSTILE = "\"'><script>alert(1)</script><img src=x onerror=x()> $x^2$ {{ 7 * 7 }} \x1b[31m\u202e\ud800</style>"


def poisoned(value: Any) -> Any:
    """Every string outside the stamp, and every key that names a layer or a kernel of ours, with a hostile tail."""
    if isinstance(value, dict):
        names = {"reference", *made_files.LAYERS, "aiter", "triton"}
        return {
            key + HOSTILE * (key in names): one if key == "evidence" else poisoned(one) for key, one in value.items()
        }
    if isinstance(value, list):
        return [poisoned(one) for one in value]
    kept = {"passed", "skipped", "failed", "auto", "single"}  # one of a few words, or the file is not ours
    return value + HOSTILE if isinstance(value, str) and value not in kept else value


def strays(page: str) -> list[str]:
    """Markup and control characters that came out of a file."""
    return re.findall(r"<script|<img|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]", page)


@pytest.fixture
def hostile(files: dict[str, Path], written: Write) -> list[Path]:
    return [written(f"<img>{path.name}", poisoned(json.loads(path.read_text()))) for path in files.values()]


def test_hostile_strings_stay_text(hostile: list[Path]) -> None:
    page = render_page(hostile)
    assert strays(page) == []
    assert page.count("&lt;script&gt;") > 20
    assert "{{ 7 * 7 }}" in page
    assert "\\x1b[31m\\u202e\\ud800" in page
    page.encode()


@pytest.mark.mutation
def test_mutation_without_escaping_hostile_strings_are_seen(
    hostile: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = jinja2.Environment
    monkeypatch.setattr(jinja2, "Environment", lambda **options: real(**options | {"autoescape": False}))
    assert "<script" in strays(render_page(hostile))


@pytest.mark.parametrize("kind", ["status", "kernels", "timing"])
@pytest.mark.parametrize("value", [None, "8", 10**400], ids=["null", "text", "huge"])
def test_a_value_of_a_wrong_type_is_shown_or_names_its_file(
    files: dict[str, Path], written: Write, kind: str, value: Any
) -> None:
    data, messages = json.loads(files[kind].read_text()), []
    path = written("wrong.json", data)
    for field in data:
        path.write_text(json.dumps(data | {field: value}))
        with contextlib.suppress(ValueError):
            render_page([path])
            continue
        with pytest.raises(ValueError) as caught:
            render_page([path])
        messages.append(str(caught.value))
    assert messages
    assert all(message.startswith(f"{path}: ") for message in messages)


def test_a_folder_with_what_a_crash_leaves_and_other_records_shows_its_status(
    files: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "status-1-0.json").write_bytes(files["status"].read_bytes())
    alone = render_page([tmp_path])
    marking = first_call_marker(tmp_path, "first-call-1")
    marking.__enter__()  # and the process is no more
    assert len(list(tmp_path.glob("*first-call*"))) == 2, "its lock is there too"
    our_files.write_record(tmp_path / "engines.json", {our_files.STAMP_KEY: our_files.stamp("engines")})
    assert render_page([tmp_path]) == alone
    marking.__exit__(None, None, None)


BROWSER = pytest.mark.skipif(chromium.BINARY is None, reason=chromium.MISSING)


@BROWSER
@pytest.mark.parametrize("width", [375, 1200])
def test_report_fits_its_window(page: str, tmp_path: Path, width: int) -> None:
    found = chromium.measure(page, tmp_path, width)
    assert found["width"] == width
    assert found["scroll"] <= width
    assert found["cut"] == []
    assert found["drawn"] == found["charts"] >= 5
    assert found["loads"] == []
    assert found["console"] == []


@BROWSER
def test_report_overflow_is_something_the_browser_test_sees(page: str, tmp_path: Path) -> None:
    wide = page.replace("<h1>", '<svg width="900" height="9"></svg><h1>', 1)
    found = chromium.measure(wide, tmp_path, 375)
    assert found["scroll"] > 375
    assert found["cut"]
