"""One operator's machine for a day: a folder, an environment with the rehearsal card, commands as they are typed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import openai

from tests.sandbox import plugin, rehearsal_card
from tests.sandbox.model import TinyDeepseek
from tests.sandbox.rehearsal_card import Scenario
from tests.sandbox.simulated_aiter import write_tree
from tests.support.signals import heard
from tests.support.waiting import happened
from tests.tools import serving_model
from vllm_aiter_mla.status import liveness, metrics

PATH = Path(rehearsal_card.__file__).parent / "rehearsal_path"
COMMAND = Path(sys.executable).with_name("vllm-aiter-mla")
TIMEOUT_S = 1800
# AITER's op wants a latent of 512 and a rope part of 64; its class wants 16 heads.
MODEL: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 16, "yarn": False, "vocab_size": 512}
FLAG = "-cc.pass_config.fuse_aiter_qk_rope_kvcache_mla=true"


class Day:
    """What stays on the machine from one command to the next.

    Args:
        folder: everything that is written.
        scenario: what the card is, how fast its kernels are and what is wrong with it.
        inductor: compiled C++ kernels, shared between days: they are found again by their source.
        aiter: the AITER that is installed, as ``simulated_aiter.write_tree`` has it; "" for none.
        variables: more environment variables of each process.
        model: fields of the model's config.
    """

    def __init__(
        self, folder: Path, scenario: Scenario | None = None, inductor: Path | None = None, *,
        aiter: str = "0.1.20", variables: Mapping[str, str] | None = None, model: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.scenario, self.variables = folder, scenario or Scenario(), dict(variables or {})
        self.inductor = inductor or folder / "inductor"
        self.model = TinyDeepseek(**{**MODEL, **(model or {})}).save(folder / "model")
        serving_model.save_tokenizer(self.model)
        self.aiter = write_tree(folder / "aiter", aiter) if aiter else folder
        self.cache = folder / "cache"

    @property
    def environment(self) -> dict[str, str]:
        """The variables of each process."""
        path = (PATH, plugin.FOLDER, self.aiter, plugin.CHECKOUT)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "AITER_"))}
        kept.pop(liveness.RUN_VARIABLE, None)
        return kept | {
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            rehearsal_card.VARIABLE: json.dumps(asdict(self.scenario)),
            "SIMULATED_AITER_ARCH": self.scenario.arch,
            "SIMULATED_AITER_ATTENTION": "1",
            "VLLM_ROCM_USE_AITER": "1",
            "VLLM_PLUGINS": f"aiter_mla,{plugin.NAME}",
            "VLLM_CACHE_ROOT": str(self.cache),
            "TORCHINDUCTOR_CACHE_DIR": str(self.inductor),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0|1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "COLUMNS": "200",
            **self.variables,
        }

    def run(self, *typed: str) -> subprocess.CompletedProcess[str]:
        """Run ``vllm-aiter-mla`` with what was typed; standard error goes into the output. A check draws a page too."""
        page = self.folder / "check.html"
        command = [str(COMMAND), *typed, *(("--html", str(page)) if typed[0] == "check" else ())]
        done = subprocess.run(
            command, env=self.environment, cwd=self.folder, text=True, errors="replace",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        assert typed[0] != "check" or page.is_file(), done.stdout
        return done

    def _start(
        self, typed: Sequence[str], container: bool = False, **how: Any
    ) -> tuple[subprocess.Popen[bytes], Server]:
        """Start vLLM's API server for the model, with what was typed after it."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        log = self.folder / f"server-{port}.log"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "128", "--max-num-seqs", "4"]
        command += ["--served-model-name", "tiny", *typed]
        if container:
            command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *command]
        with log.open("w") as out:
            process = subprocess.Popen(command, env=self.environment, cwd=self.folder, stdout=out, stderr=out, **how)
        return process, Server(f"http://127.0.0.1:{port}", log)

    @contextmanager
    def server(self, *typed: str, container: bool = False) -> Iterator[Server]:
        """Serve the model until the block ends; in a ``container`` its front end is process 1.

        Its log has no traceback by then.
        """
        process, server = self._start(typed, container)
        try:
            server.wait(process)
            yield server
            # Before the end: vLLM's front end prints one of its own if its engine ends first.
            assert not server.tracebacks(), server.tracebacks()[0]
        finally:
            process.kill() if container else process.terminate()  # a shell of process 1 passes no signal on
            process.wait(120)

    def server_that_ends(self, *typed: str) -> Server:
        """Start a server that cannot start; return it once it has ended by itself, with an exit status above 0."""
        process, server = self._start(typed)
        try:
            assert process.wait(TIMEOUT_S) > 0, server.log.read_text()[-3000:]
        finally:
            process.kill()
        return server

    @contextmanager
    def server_at(self, at: str, *typed: str) -> Iterator[tuple[Server, Callable[[], None]]]:
        """Start a server; once its log holds ``at`` yield it, and what tells all its processes to end, by SIGTERM.

        So does systemd, and a terminal by SIGINT. A container's runtime tells the front end only, and kills the others.
        vLLM's front end does not end at once while its engine starts: what is left is killed when the block ends.
        """
        process, server = self._start(typed, start_new_session=True, preexec_fn=heard)
        try:
            assert happened(lambda: at in server.log.read_text() or process.poll() is not None, TIMEOUT_S)
            assert process.poll() is None, server.log.read_text()[-3000:]
            yield server, partial(os.killpg, process.pid, signal.SIGTERM)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(120)


@dataclass(frozen=True)
class Server:
    """A running API server, and its log."""

    address: str
    log: Path

    def wait(self, process: subprocess.Popen[bytes]) -> None:
        """Return once it answers; raise AssertionError with the end of its log if it ends before."""
        assert happened(lambda: self.is_up() or process.poll() is not None, TIMEOUT_S), self.log.read_text()[-3000:]
        assert process.poll() is None, self.log.read_text()[-3000:]

    def is_up(self) -> bool:
        """Return whether it answers."""
        with suppress(OSError):
            urllib.request.urlopen(f"{self.address}/health", timeout=5).read()
            return True
        return False

    def ask(self, prompt: str) -> str:
        """Return what the model answers to a prompt."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.address}/v1/completions", json.dumps(body).encode(), headers)
        answer = json.loads(urllib.request.urlopen(request, timeout=300).read())
        return str(answer["choices"][0]["text"])

    def burst(self, prompts: Sequence[str]) -> list[str]:
        """Return the answers to prompts that arrive at once, by the ``openai`` client."""
        with openai.OpenAI(base_url=f"{self.address}/v1", api_key="none") as client, ThreadPoolExecutor(8) as pool:
            made = partial(client.completions.create, model="tiny", max_tokens=8, temperature=0)
            return [one.choices[0].text for one in pool.map(lambda prompt: made(prompt=prompt), prompts)]

    def gauge(self) -> dict[str, float]:
        """Return the plugin's gauge by state, as /metrics serves it."""
        text = urllib.request.urlopen(f"{self.address}/metrics", timeout=60).read().decode()
        lines = [line for line in text.splitlines() if line.startswith(f"{metrics.LAYERS}{{")]
        return {line.split('state="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}

    def line(self, part: str) -> str:
        """Return the one line of the plugin's that holds ``part``."""
        found = [line for line in self.lines() if part in line]
        assert len(found) == 1, (part, found, self.log.read_text()[-3000:])
        return found[0]

    def tracebacks(self) -> list[str]:
        """Return each traceback in the log, but that of a destructor of vLLM's CPU build, which it ignores itself."""
        before, *found = self.log.read_text().split("Traceback (most recent call last)")
        heads = [text.splitlines()[-1:] for text in (before, *found)]
        return [text for head, text in zip(heads, found, strict=False) if "CPUDNNLGEMMHandler" not in str(head)]

    def lines(self) -> list[str]:
        """Return the plugin's lines in the log, without what vLLM puts before them."""
        return [line.partition("aiter-mla: ")[2] for line in self.log.read_text().splitlines() if "aiter-mla: " in line]
