"""Claims about wrong options: named, exit status 2, before a server starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tools.serving.serving_runs import HERE, QUESTIONS
from tools import accuracy, serve_bench
from tools.serving import sweep

BAD = [
    (["MODEL", "--runs", "2"], "--runs 2: at least 3"),
    (["MODEL", "--seed", "-1"], "--seed -1"),
    (["MODEL", "--seed", "4294967296"], "--seed 4294967296: from 0 to below 2147483648"),
    (["MODEL", "--start-timeout", "0"], "--start-timeout 0"),
    (["MODEL", "--out", "no/such/folder/x.md"], "--out no/such/folder/x.md: its folder does not exist"),
    (["MODEL", "--out", "."], "--out .: is a folder"),
    (["MODEL", "--json", "no/such/x.json"], "--json no/such/x.json: its folder does not exist"),
    (["MODEL", "--work", str(QUESTIONS)], "questions.jsonl: is not a folder"),
    (["MODEL", "--work", str(QUESTIONS / "below")], "questions.jsonl is not a folder"),
    (["MODEL", "--off-url", "http://127.0.0.1:1"], "give both or none"),
    (["MODEL", "--off-url", "localhost", "--on-url", "http://127.0.0.1:1"], "--off-url localhost"),
    (["MODEL", "--off-url", "http://h:port", "--on-url", "http://h:1"], "--off-url http://h:port: http://HOST:PORT"),
    (["MODEL", "--off-url", "http://[", "--on-url", "http://h:1"], "--off-url http://[: http://HOST:PORT"),
    (["MODEL", "--off-url", "http://h:1", "--on-url", "http://h:1/"], "--on-url http://h:1/"),
    (["MODEL", "--off-url", "https://h:1", "--on-url", "http://h:2"], "--off-url https://h:1: http://HOST:PORT"),
    (["MODEL", "--off-url", "http://h:1", "--on-url", "http://h:2", "--", "-tp", "8"], "-tp after --"),
    (["MODEL", "--on-env", "NAME"], "--on-env NAME: NAME=VALUE"),
    (["MODEL", "--off-env", "A=1", "--off-url", "http://h:1", "--on-url", "http://h:2"], "--off-env, --on-env ['A=1']"),
    (["MODEL", "--baseline", "none"], "--baseline"),
    (["MODEL", "--", "--port", "8000"], "--port after --"),
    (["MODEL", "--small-model"], "--small-model beside MODEL MODEL"),
    (["--small-model", "--baseline", "vllm-fused"], "--baseline unmodified vLLM-fused with --small-model"),
    ([], "MODEL is missing"),
]
BAD_BENCH = [
    (["MODEL", "--rates", "1,x"], "--rates 1,x"),
    (["MODEL", "--rates", "0"], "--rates 0"),
    (["MODEL", "--rates", "1,inf"], "--rates 1,inf: finite numbers"),
    (["MODEL", "--rates", "nan"], "--rates nan"),
    (["MODEL", "--lengths", "1024/256"], "--lengths 1024/256"),
    (["MODEL", "--lengths", "1024/0/1"], "--lengths 1024/0/1"),
    (["MODEL", "--prompts", "0"], "--prompts 0"),
]
BAD_ACCURACY = [
    (["MODEL", "--limit", "0"], "--limit 0"),
    (["MODEL", "--fewshot", "-1"], "--fewshot -1"),
    (["MODEL", "--max-gen-toks", "0"], "--max-gen-toks 0"),
    (["MODEL", "--examples", "x.jsonl"], "--examples x.jsonl: only with --questions"),
    (["MODEL", "--questions", "none.jsonl"], "--questions none.jsonl"),
    (["MODEL", "--questions", str(QUESTIONS), "--fewshot", "13"], "too few"),
]


@pytest.mark.parametrize(
    ("tool", "argv", "said"),
    [
        *((tool, *case) for tool in (serve_bench, accuracy) for case in BAD),
        *((serve_bench, *case) for case in BAD_BENCH),
        *((accuracy, *case) for case in BAD_ACCURACY),
    ],
)
def test_a_wrong_option_is_named_before_a_server_starts(
    fakes: SimpleNamespace, capsys: pytest.CaptureFixture[str], tool: object, argv: list[str], said: str
) -> None:
    assert tool.main(argv) == 2
    assert said in capsys.readouterr().err
    assert fakes.calls() == []


@pytest.mark.parametrize("dead", ["--off-url", "--on-url"])
def test_a_server_that_does_not_answer_is_named_before_the_other_is_measured(
    fakes: SimpleNamespace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, dead: str
) -> None:
    urls = {"--off-url": "http://127.0.0.1:1", "--on-url": "http://127.0.0.1:2/"}
    monkeypatch.setattr(sweep, "get", lambda url: None if url == f"{urls[dead].rstrip('/')}/health" else "")
    argv = ["MODEL", *(part for given in urls.items() for part in given), "--work", str(fakes.work)]
    assert serve_bench.main(argv) == 2
    assert capsys.readouterr().err.endswith(
        f"serve_bench: {dead} {urls[dead].rstrip('/')}: its /health does not answer\n"
    )
    assert fakes.calls() == []


def test_a_work_folder_that_the_system_refuses_is_named(
    fakes: SimpleNamespace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert serve_bench.main(["MODEL", "--work", str(fakes.work)]) == 2
    assert capsys.readouterr().err == f"serve_bench: --work {fakes.work}: Permission denied\n"


@pytest.mark.parametrize("tool", ["serve_bench", "accuracy"])
def test_help_needs_neither_vllm_nor_lm_eval_nor_torch(tool: str) -> None:
    blocked = "import sys, runpy; sys.modules.update(dict.fromkeys(['vllm', 'torch', 'lm_eval', 'transformers']))"
    path = HERE.parents[1] / "tools" / f"{tool}.py"
    code = f"{blocked}; sys.argv = ['x', '--help']; runpy.run_path({str(path)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "SERVE_OPTION" in done.stdout
