"""Claims about `accuracy.py` from option to table, with fakes in place of vLLM and lm-eval."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tools.serving.serving_runs import QUESTIONS, accuracy_run
from tools import accuracy
from tools.common import RunError
from tools.serving import questions


def test_accuracy_pairs_the_sides_question_by_question(fakes: SimpleNamespace) -> None:
    fakes.set(ask="better")
    assert accuracy_run(fakes) == 0
    page = fakes.out.read_text()
    assert "| 1 | strict-match | 0.5000 ± 0.1000 | 1.0000 ± 0.1000 | 0 | 5 | 0.0625 | 5 |" in page
    assert "| strict-match | 0.5000 | 1.0000 | +0.5000 ± 0.1667 | on higher |" in page
    assert "Texts: 15 of 30 answers differ" in page
    assert "Flag on: 4/4 MLA layers engaged" in page
    assert "9 questions, in GSM8K's prompt (not GSM8K)" in page


def test_equal_answers_are_not_distinguishable(fakes: SimpleNamespace) -> None:
    assert accuracy_run(fakes) == 0
    page = fakes.out.read_text()
    assert "| strict-match | 0.5000 | 0.5000 | +0.0000 ± 0.0000 | not distinguishable |" in page
    assert "Texts: 0 of 30" in page


def test_runs_draw_other_examples_and_both_sides_the_same(fakes: SimpleNamespace) -> None:
    assert accuracy_run(fakes) == 0
    asked = [(call["side"], call["ask"]["--seed"]) for call in fakes.calls("ask")]
    assert asked == [(side, str(1234 + run)) for side in ("on", "off") for run in range(3)]


def test_a_limit_is_called_partial_and_all_of_gsm8k_is_the_default(fakes: SimpleNamespace) -> None:
    assert accuracy.main(["MODEL", "--out", str(fakes.out), "--work", str(fakes.work), "--limit", "10"]) == 0
    assert "1,319 questions; 10 asked, **partial**: --limit 10" in fakes.out.read_text()
    assert json.loads(fakes.calls("ask")[0]["ask"]["--asked"])["task"] == "gsm8k"
    assert accuracy.read(["MODEL"]).limit is None


def test_sides_that_were_asked_other_prompts_give_no_table(
    fakes: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    fakes.set(ask="other-prompts")
    assert accuracy_run(fakes) == 1
    assert "not asked the same questions" in capsys.readouterr().err
    assert not fakes.out.exists()


def test_without_lm_eval_the_extra_is_named(
    fakes: SimpleNamespace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions.importlib.util, "find_spec", lambda name: None)
    assert accuracy_run(fakes) == 2
    assert "pip install '.[accuracy]'" in capsys.readouterr().err
    assert fakes.calls() == []


def test_an_example_is_never_asked() -> None:
    given = accuracy.read(["MODEL", "--questions", str(QUESTIONS), "--fewshot", "5"])
    assert len(given.example_rows) == 5
    assert not [row for row in given.asked_rows if row in given.example_rows]


def test_local_task_keeps_the_standard_prompt_and_filters(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    rows = questions.read_questions("--questions", QUESTIONS)
    questions.local_task(tmp_path, questions.require_lm_eval(), rows[5:], rows[:5])
    written = json.loads((tmp_path / f"{questions.LOCAL_TASK}.yaml").read_text())
    assert not {"doc_to_text", "doc_to_target", "filter_list", "metric_list", "generation_kwargs"} & written.keys()
    assert Path(written["include"]).is_file()


def test_prompts_of_both_sides_must_be_equal_in_every_run() -> None:
    def side(prompt: str) -> dict:
        return {0: [{"figures": {}, "answers": {"0": {"prompt": prompt}}}]}

    assert questions.answers_of({"off": side("a"), "on": side("a")})["on"][0]["answers"]
    with pytest.raises(RunError, match="run 1: the sides were not asked the same"):
        questions.answers_of({"off": side("a"), "on": side("b")})


@pytest.mark.parametrize("content", ["[" * 100_000, '{"question": 1, "answer": "#### 2"}', "null"])
def test_hostile_questions_are_named_before_a_server_starts(
    fakes: SimpleNamespace, capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str
) -> None:
    path = tmp_path / "bad\x1b[2J.jsonl"
    path.write_text(content)
    assert accuracy.main(["MODEL", "--questions", str(path)]) == 2
    said = capsys.readouterr().err
    assert "--questions" in said
    assert "\x1b" not in said
