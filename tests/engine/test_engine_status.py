"""What operators see of an engine: the status of each engine of a process, and the gauge of a real server."""

import json
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from tests.sandbox import engine, plugin
from tests.sandbox.model import TinyDeepseek
from tests.sandbox.spec import Emulation, EngineSpec, PluginOptions, VllmOptions, save
from tests.tools import serving_model
from vllm_aiter_mla.status import gauge

pytestmark = pytest.mark.engine
MODEL = {"num_hidden_layers": 2, "yarn": False}


def test_i15_two_engines_in_one_process_the_second_engages_after_a_failed_check_of_the_first(tmp_path):
    spec = EngineSpec(
        vllm=VllmOptions(model=MODEL, extra={"enforce_eager": True}),
        plugin=PluginOptions(kernel="aiter"),
        emulation=Emulation(arch="gfx942"),
    )
    save(spec, tmp_path / "spec")
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.two_engines_child", str(tmp_path / "spec"), str(tmp_path)],
        env=engine.environment_for(spec, tmp_path / "cache", tmp_path / "inductor"), capture_output=True, text=True,
        timeout=engine.TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    first, second = json.loads((tmp_path / "status.json").read_text())
    assert (first["engaged"], set(first["skipped"].values())) == ({}, {"kernel_shape"})
    assert (len(second["engaged"]), second["skipped"]) == (2, {})
    lines = [line for line in done.stdout.splitlines() + done.stderr.splitlines() if "aiter-mla: " in line]
    assert len([line for line in lines if "0/2: kernel_shape" in line]) == 1
    assert len([line for line in lines if "2/2 MLA layers engaged" in line]) == 1


@pytest.fixture
def server(tmp_path):
    """A real server on loopback over the sandbox: its address, and a file whose presence lets the kernels raise."""
    model = TinyDeepseek(**MODEL, vocab_size=512).save(tmp_path / "model")
    serving_model.save_tokenizer(model)
    trigger, log = tmp_path / "raise", tmp_path / "log"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spec = EngineSpec(vllm=VllmOptions(spawn=True))
    environment = engine.environment_for(spec, tmp_path / "cache", tmp_path / "inductor") | {
        plugin.MUTATION: "tests.engine.engine_mutations:raise_when_told",
        "AITER_MLA_TEST_TRIGGER": str(trigger),
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--enforce-eager"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "128", "--max-num-seqs", "4"]
    command += ["--served-model-name", "tiny", "--additional-config", json.dumps({"aiter_mla": {"enabled": True}})]
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(f"{address}/health", process, log)
        yield address, trigger
    finally:
        process.terminate()
        process.wait(60)


def wait_for(address, process, log):
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            urllib.request.urlopen(address, timeout=5).read()
            return
        except OSError:
            time.sleep(1)
    raise AssertionError(f"no server after 600 s: {log.read_text()[-3000:]}")


def ask(address):
    body = json.dumps({"model": "tiny", "prompt": "abcd", "max_tokens": 4, "temperature": 0, "ignore_eos": True})
    request = urllib.request.Request(
        f"{address}/v1/completions", body.encode(), headers={"Content-Type": "application/json"}
    )
    answer = json.loads(urllib.request.urlopen(request, timeout=300).read())
    return str(answer["choices"][0]["text"])


def scraped(address):
    text = urllib.request.urlopen(f"{address}/metrics", timeout=60).read().decode()
    lines = [line for line in text.splitlines() if line.startswith(f"{gauge.NAME}{{")]
    return {line.split('state="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}


def test_a_scrape_of_metrics_sees_a_kernel_fail_while_serving(server):
    address, trigger = server
    before = ask(address)
    assert scraped(address) == {"engaged": 2, "skipped": 0}
    trigger.touch()
    assert ask(address) == before, "vLLM's own attention serves on, with the same tokens"
    assert scraped(address) == {"engaged": 0, "skipped": 2}
