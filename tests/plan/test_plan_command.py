"""Claims about the command: what it prints, where it stops, and that it is the same for a program."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_aiter_mla.commands.plan import command

R1 = ["deepseek-r1", "--max-num-seqs", "256", "-tp", "8"]
TRITON = ["--additional-config", '{"aiter_mla": {"kernel": "triton"}}']
DCP = ["--decode-context-parallel-size", "2"]
MTP = ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}']


def invoke(*arguments: str) -> tuple[int, str, str]:
    import typer

    app = typer.Typer()
    app.command("plan", **command.COMMAND)(command.plan)
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.stdout, done.stderr


def test_the_page_holds_the_decode_limit_the_reason_and_the_way_out() -> None:
    status, out, _ = invoke(*R1, *MTP, *DCP)
    assert status == command.DOES_NOT
    assert "L = 512" in out
    assert "dcp: decode_context_parallel_size is 2; the fast path needs 1" in " ".join(out.split())
    status, out, _ = invoke(*R1, *MTP)
    assert status == command.ENGAGES
    assert "62/62 MLA layers would engage" in out
    assert "61 attentions with MLA in 61 layers, and 1 in the draft" in out


def test_json_holds_the_same_facts() -> None:
    status, out, _ = invoke(*R1, *DCP, "--json", "--arch", "gfx950")
    plan = json.loads(out)
    assert (status, plan["outcome"], plan["limit"], plan["arch"]) == (1, "skipped", 256, "gfx950")


def test_options_of_the_server_itself_are_known() -> None:
    assert invoke(*R1, "--port", "8001", "--api-key", "k")[0] == command.ENGAGES


def test_a_wrong_option_of_ours_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["--additional-config", '{"aiter_mla": {"kernl": "auto"}}']
    assert command.main(R1[0], wrong, "gfx942", []) == command.WRONG
    assert "did you mean 'kernel'?" in capsys.readouterr().err


def test_an_unknown_model_names_the_examples() -> None:
    status, _, err = invoke("no/such-model")
    assert status == command.WRONG
    assert "kimi-k2.5" in err


def test_a_hub_name_is_read_from_the_local_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    from vllm_aiter_mla.commands.plan import model

    snapshot = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(model.examples()["kimi-k2"]["config"]))
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    found = model.find("some/model")
    assert (found.origin, found.file) == ("local Hugging Face cache", snapshot / "config.json")


def test_a_plan_opens_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it try: an attempt whose failure is caught counts too."""
    attempts: list[tuple[object, ...]] = []

    def refuse(*arguments: object, **options: object) -> None:
        attempts.append(arguments)
        raise OSError("no network here")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert invoke(*R1)[0] == command.ENGAGES
    assert invoke("no/such-model")[0] == command.WRONG
    assert attempts == []


def test_missing_vllm_is_a_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "vllm.utils.argparse_utils", None)
    assert command.main(R1[0], [], "gfx942", []) == command.WRONG
    assert "vLLM's own parser" in capsys.readouterr().err


def test_page_of_every_example_renders() -> None:
    from tests.plan.plan_support import planned
    from vllm_aiter_mla.commands.plan import model, printout

    for name in model.examples():
        assert name in printout.text(planned(name, "-tp", "4", env=()))
