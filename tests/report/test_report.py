"""What the page shows of each kind of file, on the command line and in a real browser."""

from __future__ import annotations

import contextlib
import html
import json
import os
import re
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import jinja2
import pytest
from typer.testing import CliRunner, Result

from tests.report import made_files
from tests.report import report_chromium as chromium
from tests.sandbox.rehearsal_card import RehearsalCard
from tests.support.planted import break_import
from vllm_aiter_mla import commands
from vllm_aiter_mla import files as our_files
from vllm_aiter_mla.commands.check import steps
from vllm_aiter_mla.commands.check.record import CheckRun, Step
from vllm_aiter_mla.commands.main import app
from vllm_aiter_mla.commands.report.page import SECTIONS, html_of
from vllm_aiter_mla.commands.report.readers import VERSIONS
from vllm_aiter_mla.kernels import device, stopwatch
from vllm_aiter_mla.startup.first_call import marked

Write = Callable[[str, Any], Path]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One input of every kind, by name."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "status-1-0.json").write_text(json.dumps(made_files.status(measured=[made_files.measured()])))
    made_files.living(folder)
    return {
        "status": folder / "status-1-0.json",
        "kernels": made_files.run_kernels(folder),
        "plan": made_files.write_plan(folder),
        "timing": made_files.write_timing(folder),
        "serving": made_files.write_serving(folder),
    }


@pytest.fixture(scope="module")
def page(files: dict[str, Path]) -> str:
    return html_of([*files.values()])


@pytest.fixture
def written(tmp_path: Path) -> Write:
    def write(name: str, data: Any) -> Path:
        path = tmp_path / name
        path.write_text(data if isinstance(data, str) else json.dumps(data))
        return path

    return write


def rows_of(page: str) -> list[list[str]]:
    """The text of every table row."""
    rows = re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)
    cells = [re.findall(r"<t[dh]>(.*?)</t[dh]>", row, re.DOTALL) for row in rows]
    return [[html.unescape(re.sub(r"<[^>]+>", "", cell)) for cell in row] for row in cells]


def filled(page: str) -> set[str]:
    """Titles of the sections with content."""
    return {title for title, rest in re.findall(r"<h2>([\w ]+)</h2>(.*?)</section>", page, re.DOTALL)
            if "Not measured" not in rest}  # fmt: skip


def test_each_chart_of_the_whole_page_is_named(page: str) -> None:
    charts = re.findall(r"<svg [^>]*>", page)
    assert len(charts) >= 6
    assert all('role="img"' in chart and re.search(r'aria-label="[^"]+"', chart) for chart in charts)


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("status", {"Status", "Compile ranges", "Versions"}),
        ("plan", {"Check", "Plan", "Compile ranges", "Launches", "Versions"}),
        ("kernels", {"Check", "Launches", "Kernels", "Versions"}),
        ("timing", {"Check", "Launches", "Timing", "Versions"}),
        ("serving", {"Serving", "Versions"}),
    ],
)
def test_a_file_fills_its_own_sections(files: dict[str, Path], name: str, sections: set[str]) -> None:
    assert filled(html_of([files[name]])) == sections


def test_a_page_without_a_check_says_what_its_empty_sections_need(files: dict[str, Path]) -> None:
    page = html_of([files["status"]])
    assert page.count("Not measured. Give the report") == len(SECTIONS) - len(filled(page))


def glances(page: str) -> list[tuple[str, str, dict[str, str]]]:
    """The first screen: outcome, what was done, and the facts of each input."""
    found = re.findall(r'<section class="glance[^"]*"><h2>(.*?)</h2>\s*<dl>(.*?)</dl>', page, re.DOTALL)
    facts = [dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text, re.DOTALL)) for _, text in found]
    heads = [re.fullmatch(r"<span[^>]*>(.*?)</span> (.*)", head, re.DOTALL) for head, _ in found]
    return [(head[1], head[2], facts) for head, facts in zip(heads, facts, strict=True) if head]


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
    page = html_of([files[name]])
    ((said, _, facts),) = glances(page)
    assert (said, facts["Card"].startswith(card)) == (word, True)
    stamp = json.loads(files[name].read_text())["evidence"]
    assert stamp["host"] in facts["When"]
    assert f"vLLM {stamp['vllm']}" in facts["Versions"]
    assert facts["Means"]
    assert facts["Skipped"]
    assert page.index('class="glance') < page.index("<nav"), "before everything else"


def test_field_o14_a_promise_never_looks_like_what_ran(files: dict[str, Path]) -> None:
    page = html_of([files["plan"]])
    assert "badge" not in page
    plans = page.partition("<h2>Plan</h2>")[2].partition("</section>")[0]
    assert "planned, nothing ran" in plans
    assert "<h2>Status</h2>" not in page, "a plan is no status"
    assert not re.search(r'class="word good', page), "nothing that a plan says is green"


@pytest.mark.parametrize(
    ("status", "word"), [(0, "passed"), (1, "failed"), (3, "skipped"), (4, "no gain"), (None, "cut off")]
)
def test_field_o14_a_check_says_passed_or_not_and_what_was_skipped(
    written: Write, status: int | None, word: str
) -> None:
    looked = [{"name": "gpu", "status": "ok", "detail": "gfx942"}]
    done = (
        Step("passed", "", data=looked, name="machine"),
        Step("passed", "61/61", name="plan"),
        Step("passed", "61/61", name="plan, fp8 cache"),
        Step("skipped", "no GPU", name="timing"),
    )
    page = html_of([written("check.json", check_run(*done, status=status))])
    ((said, what, facts),) = glances(page)
    assert (said, what, facts["Card"], facts["Skipped"]) == (word, "check of a-model", "gfx942", "timing: no GPU")
    for plan in ("plan", "plan, fp8 cache"):
        assert [plan, "planned, nothing ran"] in [row[:2] for row in rows_of(page)]
        assert plan not in facts["Means"]


@pytest.mark.parametrize(
    ("lives", "host", "card", "word"),
    [
        (True, None, "gfx942", "engaged"),
        (False, None, "gfx942", "ended"),
        (True, "another", "gfx942", "unknown"),
        (True, None, "cpu", "engaged on a CPU"),
    ],
)
def test_only_a_server_that_lives_and_has_a_card_is_green(
    written: Write, tmp_path: Path, lives: bool, host: str | None, card: str, word: str
) -> None:
    data = made_files.status(card=card)
    data["evidence"]["host"] = host or data["evidence"]["host"]
    if lives:
        made_files.living(tmp_path)
    page = html_of([written("status-1-a-0-0.json", data)])
    ((said, _, facts),) = glances(page)
    assert (said, "4/4 MLA layers engaged" in facts["Means"]) == (word, True)
    assert ('class="glance good' in page) is (word == "engaged")


@pytest.mark.parametrize("on_a_card", [True, False])
def test_what_passed_on_a_cpu_never_looks_like_what_passed_on_a_card(written: Write, on_a_card: bool) -> None:
    done = CheckRun("a-model", 0, (Step("passed", "", name="engine"),), on_a_card)
    page = html_of([written("check.json", json.loads(our_files.text_of(done)))])
    assert (">passed</span>" in page, ">passed on a CPU</span>" in page) == (on_a_card, not on_a_card)
    assert ('class="word good' in page) is on_a_card


def test_served_times_are_drawn_with_their_errors(files: dict[str, Path]) -> None:
    page = html_of([files["serving"]])
    assert ["1024", "0", "256", "5", *["10.00 ± 0.20", "8.00 ± 0.10"] * 3] in rows_of(page)
    drawn = re.findall(r'<svg [^>]*aria-label="([^"]+)"', page)
    assert [title.partition(", lengths ")[0] for title in drawn] == [
        "serving.json: ms per output token", "serving.json: output tokens per second",
    ]  # fmt: skip
    ((_, what, facts),) = glances(page)
    assert what == "serving speed of a/model"
    assert "1.250 to 1.250 over 2 rates" in facts["Means"]


def test_a_served_point_that_is_invalid_is_named_and_not_drawn(files: dict[str, Path], written: Write) -> None:
    data = json.loads(files["serving"].read_text())
    data["rows"][0] |= {"invalid": "200 failed", "estimates": {}}
    page = html_of([written("serving.json", data)])
    assert (glances(page)[0][0], "rate 1: invalid: 200 failed" in page) == ("failed", True)
    assert "over 1 rates" in page


def test_one_layer_is_drawn_launch_after_launch_by_formula_and_as_timed(files: dict[str, Path]) -> None:
    titles = {name: [title for title, _ in tables(html_of([files[name]]))] for name in ("plan", "timing")}
    assert [title for title in titles["plan"] if title.startswith("One layer at 64 tokens by formula")]
    assert [title for title in titles["timing"] if "one layer at 64 tokens as timed" in title]
    launches = dict(tables(html_of([files["plan"]])))
    (rows,) = (rows for title, rows in launches.items() if title.startswith("One layer at 64 tokens by formula"))
    assert [row[0] for row in rows].count("triton") == 1
    assert len([row for row in rows if row[0] == "vLLM, unfused"]) == 4


def test_the_ranks_that_run_the_same_kernels_share_a_strip(written: Write) -> None:
    other = [{"layers": made_files.LAYERS, "kernels": [[1, 256, "aiter"]], "passed_over": []}]
    changes: list[dict[str, Any]] = [{"rank": 0}, {"rank": 1}, {"rank": 2, "decided": other}]
    page = html_of([written(f"{one['rank']}.json", made_files.status(**one)) for one in changes])
    strips = {
        title: text for title, text in re.findall(r"<h3>(Which kernel runs[^<]*?)\s*</h3>(.*?)<table>", page, re.DOTALL)
    }
    assert [*strips] == ["Which kernel runs: triton 1..64, vllm 65..256", "Which kernel runs: aiter 1..256"]
    assert [[f"rank {rank}: " in text for rank in range(3)] for text in strips.values()] == [
        [True, True, False], [False, False, True],
    ]  # fmt: skip


def test_the_page_loads_nothing_and_ids_are_not_repeated(page: str) -> None:
    assert not re.search(r"<(script|iframe|object|embed|img|image)\b", page)
    loads = re.findall(r"""\b(?:src|href|srcset)\s*=\s*["']?([^"'\s>]*)""", page)
    assert loads
    assert all(load.startswith("#") or load == "data:," for load in loads)
    ids = re.findall(r"""\sid=["']?([^"'\s>]+)""", page)
    assert len(ids) == len(set(ids)) > 6
    assert "default-src 'none'" in page
    assert "@import" not in page


def test_a_status_names_each_reason_and_its_layers(written: Write) -> None:
    skipped = {made_files.LAYERS[3]: ["sparse_mla", "<b>sparse</b> MLA"]}
    engaged = dict.fromkeys(made_files.LAYERS[:3], "triton")
    page = html_of([written("status-1-0.json", made_files.status(engaged=engaged, skipped=skipped))])
    (row,) = (row for row in rows_of(page) if "3/4" in row)
    assert row[5].strip().endswith(f"sparse_mla: <b>sparse</b> MLA (1): {made_files.LAYERS[3]}")


def test_ranks_that_measured_the_same_share_one_table(written: Write) -> None:
    paths = [
        written(f"status-{rank}-{rank}.json", made_files.status(rank=rank, measured=[made_files.measured()]))
        for rank in range(2)
    ]
    page = html_of(paths)
    assert page.count("<h3>Timed at start-up") == 1
    assert "rank 0: 4 layers" in page
    assert "rank 1: 4 layers" in page
    assert [row for row in rows_of(page) if row[0] == "64"] == [["64", "4.27", "2.91", "6.56", "triton"]]


def data_of(read: Any) -> Any:
    """The record in the only step of a check."""
    (step,) = read["steps"]
    return step["data"]


def twins(files: dict[str, Path]) -> dict[str, tuple[Any, Any]]:
    """Two inputs of each kind that say much the same, as two cards, servers or sets of options do."""
    read = {kind: json.loads(path.read_text()) for kind, path in files.items()}
    other = {kind: json.loads(json.dumps(data)) for kind, data in read.items()}
    other["status"] |= {"run": "2-b", "capture_sizes": [3]}
    other["status"]["decided"][0]["kernels"][0][2] = "aiter"
    other["status"]["measured"][0]["us"]["64"]["triton"] = 1.0
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
    steps = [[Step("passed", "", data=data, name=name) for name, data in part.items()] for part in parts]
    return found | {"check": (check_run(*steps[0], status=0), check_run(*steps[1], status=0))}


def tables(page: str) -> list[tuple[str, list[list[str]]]]:
    """Title and rows of each table, its head first."""
    parts = [part.partition("</h3>") for part in page.split("<h3>")[1:]]
    return [(html.unescape(re.sub(r"<[^>]+>", "", title)), rows_of(text)) for title, _, text in parts]


@pytest.mark.parametrize("kind", ["status", "kernels", "timing", "plan", "check", "serving"])
def test_two_inputs_of_a_kind_are_shown_as_each_is_alone(files: dict[str, Path], tmp_path: Path, kind: str) -> None:
    paths = [tmp_path / folder / "v.json" for folder in "ab"]
    for path, data in zip(paths, twins(files)[kind], strict=True):
        path.parent.mkdir()
        path.write_text(json.dumps(data))
    page = html_of(paths)
    titles = [title for title, _ in tables(page)]
    charts = re.findall(r'<svg [^>]*aria-label="([^"]+)"', page)
    assert (len(titles), len(charts)) == (len(set(titles)), len(set(charts)))
    shown = [rows for _, rows in tables(page.replace("v.json (2)", "v.json"))]
    of_inputs = [row for rows in shown if rows[:1] and rows[0][0] == "input" for row in rows]
    for path in paths:
        alone = html_of([path])
        for title, rows in tables(alone):
            of_all = rows[:1] and rows[0][0] == "input"
            assert [row for row in rows if row not in of_inputs] == [] if of_all else rows in shown, title
        assert glances(alone)[0] in glances(page.replace("v.json (2)", "v.json"))
    assert [facts["Input"] for _, _, facts in glances(page)] == ["v.json", "v.json (2)"]
    assert len(re.findall(r"<svg ", page)) == sum(html_of([path]).count("<svg ") for path in paths)


def test_two_plans_of_a_model_are_told_apart_by_their_options(files: dict[str, Path], written: Write) -> None:
    options = {"a.json": "a model on gfx942, TP 8, fp8_e5m2 cache", "b.json": "a model on gfx950, TP 16, auto cache"}
    page = html_of([written(*one) for one in zip(options, twins(files)["plan"], strict=True)])
    for name, words in options.items():
        (what,) = (what for _, what, facts in glances(page) if facts["Input"] == name)
        assert words in what
        assert [title for title, _ in tables(page) if "Launches by formula" in title and words in title]
        assert len([row for row in rows_of(page) if row[0] == f"{name}: {words}"]) == 2, "layers and a known issue"


def test_the_ranks_of_a_server_share_a_glance_that_says_what_each_says(written: Write, tmp_path: Path) -> None:
    skipped = {made_files.LAYERS[3]: ["sparse_mla", "sparse"]}
    some = {"engaged": dict.fromkeys(made_files.LAYERS[:3], "triton"), "skipped": skipped}
    changes: list[dict[str, Any]] = [{}, {"rank": 1}, {"rank": 2} | some, {"run": "2-b"}]
    for run in ("1-a", "2-b"):
        made_files.living(tmp_path, run)
    made = (made_files.status(**{"run": "1-a"} | one) for one in changes)
    page = html_of([written(f"{number}.json", data) for number, data in enumerate(made)])
    assert [(word, facts["Input"]) for word, _, facts in glances(page)] == [
        ("engaged", "0.json; 1.json"), ("partly", "2.json"), ("engaged", "3.json"),
    ]  # fmt: skip


def test_a_plan_shows_every_reason_its_ranges_and_its_launches(files: dict[str, Path]) -> None:
    plan = data_of(json.loads(files["plan"].read_text()))
    page = html_of([files["plan"]])
    codes = {reason["code"] for reason in plan["reasons"]}
    assert len(codes) > 1
    assert all(f"{code}: " in page for code in codes)
    assert "nothing was run" in page
    assert ["1-4681", "vLLM's own"] in [row[:2] for row in rows_of(page)]
    launches = {row[1]: row[2] for row in rows_of(page) if row[0] == "256"}
    assert (launches["aiter"], launches["triton"]) == ("2", "1")


def test_timing_shows_ratios_what_was_slower_and_what_was_not_timed(files: dict[str, Path]) -> None:
    page = html_of([files["timing"]])
    assert ["64", "6.13", "8.00", "1.00", "1.30"] in rows_of(page)
    for text in (
        "at 256 tokens",
        "aiter: not timed: self-check",
        "aiter-opt does not count as ours: it turns",
        "aiter: 16 heads, fp8",
        "stopped at 16 heads, bf16",
    ):
        assert text in page


def test_kernels_on_a_cpu_claim_no_launches_and_repeat_a_failure(files: dict[str, Path], written: Write) -> None:
    read = json.loads(files["kernels"].read_text())
    data = data_of(read)
    data["results"][0] |= {"status": "failed", "findings": [{"oracle": "runs", "message": "broke", "step": "replay 2"}]}
    page = html_of([written("kernels.json", read)])
    assert "No graph was captured" in page
    assert "PyTorch ops of a replayed step, no GPU" in page
    assert "Launches in captured graphs" not in page
    assert "runs at replay 2: broke" in page
    assert data["results"][0]["command"] in page


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


def check_run(*done: Step, status: int | None) -> Any:
    return json.loads(our_files.text_of(CheckRun("a-model", status, done)))


def test_a_check_that_was_cut_off_shows_the_steps_that_ended(written: Write) -> None:
    done = Step("failed", "a reason", name="plan")
    page = html_of([written("check.json", check_run(Step("passed", "a card", name="machine"), done, status=None))])
    assert "The run was cut off after the step plan." in page
    assert "plan FAILED: a reason" in page
    assert html_of([written("none.json", check_run(status=None))])
    assert "was cut off" not in html_of([written("whole.json", check_run(done, status=1))])


@pytest.mark.parametrize(("status", "word"), [(None, "cut off"), (1, "failed"), (0, "planned, nothing ran")])
def test_a_check_of_promises_that_was_cut_off_or_failed_says_so(
    files: dict[str, Path], written: Write, status: int | None, word: str
) -> None:
    plan = Step("passed", "61/61", data=data_of(json.loads(files["plan"].read_text())), name="plan")
    machine = Step("failed" if status == 1 else "passed", "a card", name="machine")
    page = html_of([written("check.json", check_run(machine, plan, status=status))])
    assert [said for said, *_ in glances(page)] == [word]


def test_a_check_without_a_gain_says_so(written: Write) -> None:
    page = html_of([written("check.json", check_run(Step("no gain", "faster", name="engine"), status=4))])
    assert "engine: no gain: faster" in page


def test_hostile_strings_stay_text(hostile: list[Path]) -> None:
    page = html_of(hostile)
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
    assert "<script" in strays(html_of(hostile))


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
            html_of([path])
            continue
        with pytest.raises(ValueError) as caught:
            html_of([path])
        messages.append(str(caught.value))
    assert messages
    assert all(message.startswith(f"{path}: ") for message in messages)


def test_a_folder_with_what_a_crash_leaves_and_other_records_shows_its_status(
    files: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "status-1-0.json").write_bytes(files["status"].read_bytes())
    alone = html_of([tmp_path])
    marking = marked(tmp_path, "first-call-1")
    marking.__enter__()  # and the process is no more
    assert len(list(tmp_path.glob("*first-call*"))) == 2, "its lock is there too"
    our_files.write(tmp_path / "engines.json", {our_files.KEY: our_files.stamp("engines")})
    assert html_of([tmp_path]) == alone
    marking.__exit__(None, None, None)


def report(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_report_writes_one_file(files: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    done = report(files["status"].parent, files["timing"], "--out", out)
    assert (done.exit_code, str(out) in done.output) == (0, True), done.output
    assert out.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("list.json", [1, 2], "not recognised"),
        ("other.json", {"evidence": {"schema": "vllm-aiter-mla/apples"}}, "not recognised (apples)"),
        ("old.json", {"evidence": {"schema": "vllm-aiter-mla/check"}, "steps": []}, "of no version"),
        ("broken.json", "{", "no JSON"),
        ("deep.json", "[" * 200_000, "no JSON"),
        ("nan.json", '{"a": NaN}', "no JSON"),
        ("bad\x1b[2J\n.json", "{", "bad\\x1b[2J\\n.json: no JSON"),
        ("gone.json", None, "gone.json: No such file"),
        (".", None, "no JSON file in this folder"),
        ("pipe.json", os.mkfifo, "pipe.json: not a regular file"),
    ],
)
def test_a_file_that_cannot_be_shown_is_one_line_and_2(
    written: Any, tmp_path: Path, name: str, content: Any, reason: str
) -> None:
    path = tmp_path / name if content is None or callable(content) else written(name, content)
    if callable(content):
        content(path)
    done = report(path, "--out", tmp_path / "page.html")
    assert done.exit_code == 2
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1
    assert "\x1b" not in done.stderr
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_without_its_packages_the_command_names_the_extra(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    # The import below puts another package in the place of this one.
    monkeypatch.setattr(commands, "report", commands.report)
    for name in [name for name in sys.modules if name.startswith("vllm_aiter_mla.commands.report")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    done = report(files["timing"], "--out", tmp_path / "page.html")
    assert (done.exit_code, f"{package} is not installed" in done.output) == (2, True), done.output
    assert "'.[report]'" in done.output


@pytest.mark.parametrize(
    "error",
    [ImportError("numpy.core.multiarray failed to import"), AttributeError("_ARRAY_API not found"),
     ModuleNotFoundError("No module named 'jinja2._x'", name="jinja2._x")],
)  # fmt: skip
@pytest.mark.parametrize("command", ["report", "check"])
def test_packages_of_the_page_that_cannot_be_imported_are_named_with_their_versions(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, command: str
) -> None:
    monkeypatch.setattr(steps, "STEPS", {})
    break_import(monkeypatch, "jinja2", error)
    monkeypatch.delitem(sys.modules, html_of.__module__)
    given = {
        "report": ["report", str(files["timing"]), "--out", str(tmp_path / "page.html")],
        "check": ["check", "deepseek-r1", "--html", str(tmp_path / "page.html")],
    }
    done = CliRunner().invoke(app, given[command])
    assert done.exit_code == 2, done.output
    assert str(error) in done.output
    assert metadata.version("matplotlib") in done.output
    assert "not installed" not in done.output


BROWSER = pytest.mark.skipif(chromium.BINARY is None, reason=chromium.MISSING)


@BROWSER
@pytest.mark.parametrize("width", [375, 1200])
def test_report_fits_its_window(page: str, tmp_path: Path, width: int) -> None:
    found = chromium.measure(page, tmp_path, width)
    assert found["width"] == width
    assert found["scroll"] <= width
    assert found["cut"] == []
    assert found["drawn"] == found["charts"] >= 6
    assert found["loads"] == []
    assert found["console"] == []


@BROWSER
def test_report_overflow_is_something_the_browser_test_sees(page: str, tmp_path: Path) -> None:
    wide = page.replace("<h1>", '<svg width="900" height="9"></svg><h1>', 1)
    found = chromium.measure(wide, tmp_path, 375)
    assert found["scroll"] > 375
    assert found["cut"]


def test_the_first_screen_asks_for_versions_that_a_run_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "installed", RehearsalCard())
    assert VERSIONS.keys() <= stopwatch.machine().keys()
