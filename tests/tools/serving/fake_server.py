"""Stands in for vLLM's API server: answers the pages that the tools read, or fails as FAKE_SERVER says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

HOW = os.environ.get("FAKE_SERVER", "")


def option(name: str, default: str = "") -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


ON = json.loads(option("--additional-config", "{}")).get("aiter_mla", {}).get("enabled", False)
PAGES = {"/health": "", "/v1/models": json.dumps({"data": [{"id": "served"}]})}
PAGES["/version"] = json.dumps({"version": "0.99" if HOW == "other-version" and ON else "0.32.0"})
if HOW == "hostile-version":
    PAGES["/version"] = json.dumps({"version": "<script>alert(1)</script>\x1b|"})
PAGES["/metrics"] = "# TYPE vllm:aiter_mla_layers gauge\n"
REFUSED = HOW == "skipped"
if (ON and HOW != "silent") or HOW == "off-is-on":
    states = {"engaged": 0 if REFUSED else 4, "skipped": 4 if REFUSED else 0}
    PAGES["/metrics"] += "".join(f'vllm:aiter_mla_layers{{state="{s}"}} {n}.0\n' for s, n in states.items())


class Pages(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = PAGES.get(self.path)
        self.send_response(200 if body is not None else 404)
        self.end_headers()
        self.wfile.write((body or "").encode())

    def log_message(self, *args: object) -> None:
        return


def main() -> None:
    with open(os.environ["FAKE_CALLS"], "a") as calls:
        start = {"server": "on" if ON else "off", "argv": sys.argv[1:], "pid": os.getpid()}
        calls.write(json.dumps(start | {"fp8bmm": os.environ.get("VLLM_ROCM_USE_AITER_FP8BMM")}) + "\n")
    if HOW in ("leaves-worker", "dies-with-worker"):
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
        worker = subprocess.Popen([sys.executable, "-c", code])
        with open(os.environ["FAKE_CALLS"], "a") as calls:
            calls.write(json.dumps({"worker": worker.pid}) + "\n")
    if HOW.startswith("dies") and ON:
        sys.exit("torch.OutOfMemoryError: HIP out of memory")
    if HOW == "hangs":
        time.sleep(60)
    if ON and HOW not in ("silent", "skipped"):
        print("(Worker) INFO aiter-mla: 4/4 MLA layers engaged (reference, bf16 KV, decode limit 1..16)", flush=True)
    if ON and HOW == "skipped":
        print("(Worker) WARNING aiter-mla: 0/4: fp8_bmm: the absorb weight is fp8 (run: doctor)", flush=True)
    HTTPServer(("127.0.0.1", int(option("--port"))), Pages).serve_forever()


if __name__ == "__main__":
    main()
