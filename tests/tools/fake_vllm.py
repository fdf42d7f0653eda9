"""Act as the `vllm` and `lm_eval` commands without a model: FAKE_SERVER and FAKE_CLIENT say how it goes.

Each call appends a line of JSON to the file FAKE_CALLS.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

SERVER, CLIENT = os.environ.get("FAKE_SERVER", ""), os.environ.get("FAKE_CLIENT", "")
GIVEN = {name: value for name, value in pairwise(sys.argv) if name.startswith("--")}
# Milliseconds by side and run: means 10.0 and 8.0, standard errors 0.1 and 0.2.
TPOT = {"off": [9.8268, 10.0, 10.1732], "on": [7.6536, 8.0, 8.3464]}
TTFT = {"off": [90.0, 100.0, 110.0], "on": [89.0, 99.0, 112.0]}


def note(**call: object) -> None:
    with open(os.environ["FAKE_CALLS"], "a") as calls:
        calls.write(json.dumps(call) + "\n")


def sweep() -> None:
    served = shlex.split(GIVEN["--serve-cmd"])
    on = "--additional-config.aiter_mla.strict=true" in served
    note(server="on" if on else "off", argv=served)
    if SERVER == "dies" and on:
        sys.exit("aiter_mla: additional_config.aiter_mla.strict=true: fp8_bmm: the absorb weight is fp8")
    if SERVER == "hangs":
        try:
            time.sleep(600)
        except KeyboardInterrupt:
            note(stopped=True)
            sys.exit(1)
    if (on and SERVER != "silent") or SERVER == "all-engage":
        print("(Worker) INFO aiter-mla: 4/4 MLA layers engaged (reference, bf16 KV, decode limit 1..16)", flush=True)
    folder = Path(GIVEN["--output-dir"], GIVEN["--experiment-name"])
    for point in json.loads(Path(GIVEN["--bench-params"]).read_text()):
        at = folder / f"BENCH--{point['_benchmark_name']}"
        at.mkdir(parents=True)
        changes = [word for name, value in point.items() if name[0] != "_" for word in (f"--{name}", str(value))]
        saved = ["--save-result", "--result-dir", str(at), "--result-filename", "run=0.json"]
        subprocess.run([*shlex.split(GIVEN["--bench-cmd"]), *changes, *saved], check=True)
        one = json.loads((at / "run=0.json").read_text()) | point
        (at / "summary.json").write_text(json.dumps([one]))


def place(path: str) -> tuple[str, int]:
    """Side and run of a result: ``.../SIDE-.../BENCH--RUN-POINT/...``."""
    at = next(index for index, part in enumerate(Path(path).parts) if part.startswith("BENCH--"))
    return Path(path).parts[at - 1].partition("-")[0], int(Path(path).parts[at].split("-")[2])


def bench() -> None:
    side, run = place(GIVEN["--result-dir"])
    note(bench=GIVEN, side=side, run=run)
    prompts = int(GIVEN["--num-prompts"])
    failed = 3 if CLIENT == "failed" and (side, run) == ("on", 1) else 0
    tokens = prompts * int(GIVEN["--random-output-len"]) - (CLIENT == "short")
    times = {"mean_ttft_ms": TTFT[side][run], "mean_tpot_ms": 0.0 if CLIENT == "no-tpot" else TPOT[side][run]}
    times["output_throughput"] = 1000 / TPOT[side][run]
    found = {"completed": prompts - failed, "failed": failed, "total_output_tokens": tokens, **times}
    Path(GIVEN["--result-dir"], GIVEN["--result-filename"]).write_text(json.dumps(found))


def lm_eval() -> None:
    side, run = place(GIVEN["--output_path"])
    note(ask=GIVEN, side=side, run=run, process=os.getpid())
    if CLIENT == "hangs":
        time.sleep(600)
    lines = []
    for number in range(10):
        right = number < 5 or (CLIENT == "better" and side == "on")
        prompt = f"{GIVEN['--seed']} {number} {side if CLIENT == 'other-prompts' else ''}"
        one = {"doc_id": number, "prompt_hash": prompt, "resps": [[f"{right} {number}"]], "exact_match": float(right)}
        lines += [json.dumps(one | {"filter": name}) for name in ("strict-match", "flexible-extract")]
    folder = Path(GIVEN["--output_path"], "model")
    folder.mkdir(parents=True)
    for task in ("gsm8k", "gsm8k_platinum") if CLIENT == "two-tasks" else ("gsm8k",):
        (folder / f"samples_{task}_2026.jsonl").write_text("\n".join(lines))


if __name__ == "__main__":
    command = [Path(sys.argv[0]).name, *sys.argv[1:4]]
    if command[0] == "lm_eval":
        lm_eval()
    elif command[1:] == ["bench", "sweep", "serve"]:
        sweep()
    else:
        bench()
