"""Claims about the command: what it prints, where it stops, and that it is the same for a program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.plan.plan_support import ROOT, planned
from vllm_aiter_mla.commands.plan import command, model, printout

R1 = ["deepseek-r1", "--max-num-seqs", "256", "-tp", "8"]
MTP = ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}']
# Of a process that ends with an error at each attempt to connect.
NO_NETWORK = """
import socket
def refuse(*arguments, **options):
    open({log!r}, "a").write(repr(arguments))
    raise OSError("no network here")
socket.getaddrinfo = socket.socket.connect = refuse
"""


def invoke(*arguments: str) -> tuple[int, str, str]:
    app = typer.Typer()
    app.command("plan", **command.COMMAND)(command.plan)
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.stdout, done.stderr


def test_a_plan_in_a_process_of_its_own_opens_no_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """An attempt whose failure is caught counts too. vLLM's log does not reach the reader."""
    log = tmp_path / "attempts"
    (tmp_path / "sitecustomize.py").write_text(NO_NETWORK.format(log=str(log)))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    status, out, _ = invoke(*R1, *MTP, "--json")
    plan = json.loads(out)
    assert (status, plan["outcome"], plan["limit"], plan["arch"]) == (command.ENGAGES, "engaged", 512, "gfx942")
    assert plan["layers"] == {"mla": 62, "drafts": 1, "total": 61, "engaged": 62}
    assert not log.exists()
    assert "amdsmi" not in capfd.readouterr().err


def test_the_page_holds_the_decode_limit_the_reason_and_the_way_out(shared: None) -> None:
    status, out, _ = invoke(*R1, *MTP, "-dcp", "2")
    assert status == command.DOES_NOT
    assert "L = 512" in out
    assert "dcp: decode_context_parallel_size is 2; the fast path needs 1" in " ".join(out.split())
    status, out, _ = invoke(*R1, *MTP, "--port", "8001", "--api-key", "k")
    assert status == command.ENGAGES, "options of the server itself are known"
    assert "62/62 MLA layers would engage" in out
    assert "61 attentions with MLA in 61 layers, and 1 in the draft" in out


def test_an_answer_that_stops_at_the_layers_is_not_known_and_names_the_line(shared: None, tmp_path: Path) -> None:
    config = model.examples()["deepseek-r1"]["config"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_act": "no such function"}))
    status, out, _ = invoke(str(tmp_path), "-tp", "8")
    assert status == command.WRONG
    assert "Status line: not known" in out
    assert ".py:" in out


@pytest.mark.slow
@pytest.mark.parametrize("name", model.examples())
def test_page_of_every_example_renders(name: str) -> None:
    assert name in printout.text(planned(name, "-tp", "4"))


def test_examples_carry_what_they_rest_on() -> None:
    bundled = model.examples()
    assert {"deepseek-r1", "deepseek-v2-lite", "kimi-k2", "kimi-k2.5", "kimi-k3", "glm-4.7-flash"} <= set(bundled)
    for name, entry in bundled.items():
        assert entry["example"]["basis"]
        assert isinstance(entry["example"]["assumed"], list)
        assert model.find(name).origin == "bundled example"
        assert model.find(entry["example"]["hub_name"]).config == model.find(name).config
    assert "base" not in json.dumps([entry["config"] for entry in bundled.values()])


def test_a_hub_name_is_read_from_the_local_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    snapshot = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(model.examples()["kimi-k2"]["config"]))
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    found = model.find("some/model")
    assert (found.origin, found.file) == ("local Hugging Face cache", snapshot / "config.json")


@pytest.mark.parametrize("broken", ["raise ImportError('no vllm here')", "import os; os._exit(3)"])
def test_a_vllm_that_is_missing_or_ends_is_a_message(
    broken: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(broken)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    assert command.main(R1[0], [], "gfx942", []) == command.WRONG
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("plan: ")
    assert "no vllm here" in said or "status 3" in said


def test_what_serves_does_not_import_what_is_made_up() -> None:
    package = Path(ROOT) / "vllm_aiter_mla"
    found = {path.relative_to(package).parts[0] for path in package.rglob("*.py") if "rocm_config" in path.read_text()}
    own = {path.name for path in (package / "compat").rglob("*.py") if "rocm_config" in path.read_text()}
    assert (found, own) == ({"commands", "compat"}, {"rocm_config.py"})
