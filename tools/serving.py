#!/usr/bin/env python
"""Compare a server with the plugin's flag off and on: its times, or its answers. Write a Markdown page.

    python tools/serving.py speed deepseek-ai/DeepSeek-R1 --out r1.md --json r1.json -- -tp 8 --kv-cache-dtype fp8
    python tools/serving.py accuracy deepseek-ai/DeepSeek-R1 --out gsm8k.md -- -tp 8 --kv-cache-dtype fp8

`vllm bench sweep serve` starts each server and runs the client: `vllm bench serve` for times, `lm_eval` for answers.
Both commands have to be on PATH. Options after ``--`` go to both servers. The server with the flag on runs in strict
mode, so it does not start if nothing engages. tools/serving.md describes the protocol.

Exit status 0; 1 if a server or client failed, nothing engaged, or an answer is missing; 2 for a wrong option.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.common import Parser, RunError, UsageError, escaped, guarded, positive, table, writable
from vllm_aiter_mla import files
from vllm_aiter_mla.commands import outputs
from vllm_aiter_mla.settings import FLAG_FIELD, NAMESPACE

OFF, ON = "off", "on"
VLLM_PASS = "fuse_rope_kvcache_cat_mla"
FEWEST_RUNS, SEEDS_PER_RUN, LAST_LINES = 3, 1000, 25
SIGMAS = 2.0
"""Two means differ if they are at least this many combined standard errors apart."""
METRICS = ("ttft", "tpot")
# The tool gives these itself, or a JSON value would replace the dotted ones that it gives.
TAKEN: tuple[str, ...] = ("--model", "--host", "--port", "--uds", "--config", "--api-key", "--served-model-name")
TAKEN += ("--additional-config", "--compilation-config", "-cc")
ENGAGED = re.compile(r"aiter-mla: (.*MLA layers engaged.*)")
FUSIONS = re.compile(r"Enabled custom fusions: .*")
STEERING = re.compile(r"VLLM_ROCM_|AITER_|\w+_VISIBLE_DEVICES")
CARD = (
    "import json, torch; n = torch.cuda.device_count(); name = torch.cuda.get_device_name(0) if n else 'CPU'"
    "; print(json.dumps([torch.__version__, f'{n} x {name}' if n else name]))"
)
LENGTHS = ("input", "prefix", "output")
Point = dict[str, Any]
"""A row of the table of times: tokens of ``LENGTHS``, and ``rate`` in requests per second."""
Results = dict[str, dict[int, list[dict[str, Any]]]]
"""By side and run: what the client saved for each point."""


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error."""

    mean: float
    stderr: float

    def show(self, digits: int) -> str:
        """Return ``mean ± stderr``."""
        return f"{self.mean:.{digits}f} ± {self.stderr:.{digits}f}"


def read(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the options. Add ``points`` and ``serve``, the options after ``--``. Raise UsageError."""
    split = list(argv).index("--") if "--" in argv else len(argv)
    parser = Parser(__doc__, "serving.py {speed,accuracy} MODEL [options] [-- SERVE_OPTION ...]")
    parser.add_argument("what", choices=("speed", "accuracy"))
    parser.add_argument("model", metavar="MODEL", help="name or folder, as for `vllm serve`")
    parser.add_argument("--runs", type=int, default=FEWEST_RUNS, help=f"runs per side, at least {FEWEST_RUNS}")
    parser.add_argument("--servers", choices=("per-run", "per-side"), default="per-run", help="how often a side starts")
    parser.add_argument("--baseline", choices=("vllm-fused", "vllm"), default="vllm-fused", help="vLLM's own pass on?")
    for side in (OFF, ON):
        parser.add_argument(f"--{side}-env", action="append", default=[], metavar="NAME=VALUE", help="of that server")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--start-timeout", type=int, default=3600, metavar="S", help="for the start of a server")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="write the page here too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every raw figure here")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="for logs and results (default: a new one)")
    speed, answers = parser.add_argument_group("speed"), parser.add_argument_group("accuracy")
    speed.add_argument("--rates", default="1,2.5,5,10,25,50", help="requests per second, separated by commas")
    speed.add_argument("--lengths", action="append", metavar="INPUT/PREFIX/OUTPUT", help="tokens; repeatable")
    speed.add_argument("--prompts", type=int, default=200, help="requests per point")
    speed.add_argument("--warmups", type=int, default=16, help="requests before each point")
    answers.add_argument("--task", default="gsm8k", help="an lm-eval task that is scored by exact_match")
    answers.add_argument("--include-path", type=Path, metavar="FOLDER", help="of lm-eval tasks of your own")
    answers.add_argument("--limit", type=int, help="ask only so many questions")
    answers.add_argument("--fewshot", type=int, default=5, help="examples before each question")
    answers.add_argument("--concurrency", type=int, default=32, help="requests at a time")
    answers.add_argument("--max-gen-toks", type=int, default=256, help="tokens of an answer")
    given = parser.parse_args(list(argv[:split]))
    if given.runs < FEWEST_RUNS:
        raise UsageError(f"--runs {given.runs}: at least {FEWEST_RUNS}; fewer give no useful standard error")
    for name in ("start_timeout", "prompts", "warmups", "concurrency", "max_gen_toks"):
        positive(f"--{name.replace('_', '-')}", getattr(given, name))
    if given.limit is not None and given.limit < 2:
        raise UsageError(f"--limit {given.limit}: at least 2; a standard error over questions needs two")
    writable({"--out": given.out, "--json": given.json})
    lengths = [_lengths(text) for text in given.lengths or ["1024/0/256"]]
    given.points = [{**of, "rate": rate} for of in lengths for rate in _rates(given)] if given.what == "speed" else [{}]
    given.serve = [_serve_option(option) for option in argv[split + 1 :]]
    given.environment = {side: _variables(side, getattr(given, f"{side}_env")) for side in (OFF, ON)}
    return given


def _rates(given: argparse.Namespace) -> list[float]:
    try:
        rates = [float(part) for part in given.rates.split(",")]
    except ValueError:
        rates = [0.0]
    if not all(math.isfinite(rate) and rate > 0 for rate in rates):
        raise UsageError(f"--rates {given.rates}: finite numbers above 0, separated by commas, expected")
    return rates


def _lengths(text: str) -> Point:
    # TPOT needs two tokens of output.
    parts = [int(part) if part.isdecimal() else -1 for part in text.split("/")]
    if len(parts) != 3 or any(part < least for part, least in zip(parts, (1, 0, 2), strict=True)):
        raise UsageError(f"--lengths {text}: INPUT/PREFIX/OUTPUT in tokens, at least 1/0/2")
    return dict(zip(LENGTHS, parts, strict=True))


def _serve_option(option: str) -> str:
    """Return the option as vLLM merges it with ours: its parser keeps ``-cc`` and the long name apart."""
    name = option.partition("=")[0]
    if (name.replace("_", "-") if name.startswith("--") else name) in TAKEN:
        raise UsageError(f"{option} after --: the tool gives it, or needs it dotted (-cc.NAME=VALUE)")
    if f"{NAMESPACE}.enabled" in name or FLAG_FIELD in name or VLLM_PASS in name:
        raise UsageError(f"{option} after --: the tool sets it; for vLLM's own pass use --baseline")
    return re.sub(r"^--compilation[-_]config\.", "-cc.", option)


def _variables(side: str, given: Sequence[str]) -> dict[str, str]:
    for text in given:
        if not re.match(r"\w+=", text):
            raise UsageError(f"--{side}-env {text}: NAME=VALUE expected")
    return dict(text.split("=", 1) for text in given)


def visits(runs: int, servers: str) -> list[tuple[str, list[int]]]:
    """Return side and runs of each server, in order.

    On comes first: if nothing engages, no time goes into vLLM. With a server per run the order alternates (on off, off
    on, on off), so that machine drift favours neither side.
    """
    if servers == "per-side":
        return [(ON, list(range(runs))), (OFF, list(range(runs)))]
    return [(side, [run]) for run in range(runs) for side in ((ON, OFF) if run % 2 == 0 else (OFF, ON))]


def server(given: argparse.Namespace, side: str) -> list[str]:
    """Return the server's command, without host and port."""
    fused = json.dumps(given.baseline == "vllm-fused")
    both = ["-cc.use_inductor_graph_partition=true", f"-cc.pass_config.{VLLM_PASS}={fused}", *given.serve]
    flag = [f"--additional-config.{NAMESPACE}.{name}=true" for name in ("enabled", "strict")]
    return ["vllm", "serve", given.model, *both, *(flag if side == ON else [])]


def client(given: argparse.Namespace, url: str) -> list[str]:
    """Return the client's command, without what differs between points."""
    if given.what == "speed":
        command = ["vllm", "bench", "serve", "--base-url", url, "--model", given.model, "--backend", "openai"]
        command += ["--endpoint", "/v1/completions", "--dataset-name", "random", "--ignore-eos", "--temperature", "0"]
        return [*command, "--num-prompts", str(given.prompts), "--num-warmups", str(given.warmups), "--disable-tqdm"]
    # The server tokenises, so that nothing is cut off here.
    model = {"model": given.model, "base_url": f"{url}/v1/completions", "num_concurrent": given.concurrency}
    model |= {"tokenizer_backend": "none", "tokenized_requests": False, "max_gen_toks": given.max_gen_toks}
    model |= {"max_retries": 3, "timeout": 600, "eos_string": "</s>"}
    command = ["lm_eval", "--model", "local-completions", "--model_args", json.dumps(model), "--tasks", given.task]
    command += ["--num_fewshot", str(given.fewshot), "--log_samples"]
    command += ["--limit", str(given.limit)] if given.limit else []
    command += ["--include_path", str(given.include_path.resolve())] if given.include_path else []
    return [sys.executable, str(Path(__file__).resolve()), "ask", json.dumps(command)]


def points_of(given: argparse.Namespace, run: int) -> list[dict[str, Any]]:
    """Return the client's options for each point of a run.

    Both sides get the same seeds. Each run and point has another one: the same prompts would come from the prefix
    cache.
    """
    found = []
    for number, point in enumerate(given.points):
        one = {f"random-{name}-len": point[name] for name in LENGTHS} | {"request-rate": point["rate"]} if point else {}
        seed = given.seed + SEEDS_PER_RUN * run + number
        found.append({"_benchmark_name": f"{run}-{number}", "seed": seed, **one})
    return found


def compare(given: argparse.Namespace) -> tuple[Results, dict[str, list[str]]]:
    """Run every visit. Return the results, and by side the lines in which the servers say what engaged or fused.

    Raises:
        RunError: a server or client failed, or a side is not what it is called.
    """
    work = given.work or Path(tempfile.mkdtemp(prefix="aiter-mla-serving-"))
    folder = work.resolve() / f"{given.what}-{datetime.now():%Y%m%d-%H%M%S-%f}"
    folder.mkdir(parents=True)
    print(f"logs and results: {folder}", file=sys.stderr)
    results: Results = {OFF: {}, ON: {}}
    said: dict[str, list[str]] = {OFF: [], ON: []}
    for side, runs in visits(given.runs, given.servers):
        name = "-".join([side, *(str(run + 1) for run in runs)])
        print(f"flag {side}, run {', '.join(str(run + 1) for run in runs)}", file=sys.stderr, flush=True)
        log = _sweep(given, side, runs, folder, name)
        engaged = ENGAGED.findall(log)
        if bool(engaged) is not (side == ON):
            raise RunError(f"flag {side}: {len(engaged)} lines about engaged layers in {folder / name}.log")
        said[side] += [line for line in [*engaged, *FUSIONS.findall(log)] if line not in said[side]]
        for path in (folder / name).rglob("summary.json"):
            for one in json.loads(path.read_text()):
                run, number = map(int, one["_benchmark_name"].split("-"))
                results[side].setdefault(run, [{}] * len(given.points))[number] = one
    return {side: dict(sorted(runs.items())) for side, runs in results.items()}, said


def _sweep(given: argparse.Namespace, side: str, runs: Sequence[int], folder: Path, name: str) -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = ["--host", "127.0.0.1", "--port", str(probe.getsockname()[1])]
    params, log = folder / f"{name}.json", folder / f"{name}.log"
    params.write_text(json.dumps([point for run in runs for point in points_of(given, run)]))
    command = ["vllm", "bench", "sweep", "serve", "--serve-cmd", shlex.join([*server(given, side), *address])]
    command += ["--bench-cmd", shlex.join(client(given, f"http://127.0.0.1:{address[-1]}")), "--show-stdout"]
    command += ["--bench-params", str(params), "--num-runs", "1", "--server-ready-timeout", str(given.start_timeout)]
    command += ["--output-dir", str(folder), "--experiment-name", name]
    # A proxy for the outside must not be asked for this machine.
    environment = os.environ | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"} | given.environment[side]
    # A run in the background of a shell ignores SIGINT, and so would what it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with log.open("wb") as out:
        # In a session of its own: Ctrl-C reaches it once, from here, and it ends its server.
        running = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
        try:
            status = running.wait()
        except BaseException:
            running.send_signal(signal.SIGINT)
            running.wait()
            raise
    text = log.read_text(errors="replace")
    if status:
        last = "\n".join(f"  {line}" for line in text.splitlines()[-LAST_LINES:])
        raise RunError(f"flag {side}: vLLM's sweep ended with status {status}; the last lines of {log}:\n{last}")
    return text


def ask(argv: Sequence[str]) -> int:
    """Run lm-eval as the sweep's client, and save for each question its prompt's hash, its text and its scores."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("command", "--seed", "--result-dir", "--result-filename"):
        parser.add_argument(name)
    given, _ = parser.parse_known_args(argv)
    folder = Path(given.result_dir) / "lm_eval"
    # lm-eval's own seeds; the last one draws the examples.
    seeds = f"0,1234,1234,{1234 + int(given.seed)}"
    subprocess.run([*json.loads(given.command), "--seed", seeds, "--output_path", str(folder)], check=True)
    answers: dict[str, Any] = {}
    for path in folder.rglob("samples_*.jsonl"):
        for one in map(json.loads, path.read_text().splitlines()):
            answer = {"prompt": one["prompt_hash"], "text": one["resps"][0][0], "right": {}}
            answers.setdefault(str(one["doc_id"]), answer)["right"][one["filter"]] = bool(one["exact_match"])
    Path(given.result_dir, given.result_filename).write_text(json.dumps({"answers": answers}))
    return 0


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of at least two values and the standard error of that mean."""
    return Estimate(statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)))


def distinguishable(difference: float, stderr: float) -> bool:
    """Return whether a difference is at least ``SIGMAS`` standard errors; no difference never is."""
    return difference != 0 and abs(difference) >= SIGMAS * stderr


def speed(given: argparse.Namespace, results: Results) -> tuple[list[str], dict[str, Any], bool]:
    """Return the table of times, the record, and whether every row is valid."""
    rows, lines = [], []
    for number, point in enumerate(given.points):
        start = [*(point[name] for name in LENGTHS), f"{point['rate']:g}"]
        values = {side: [run[number] for run in results[side].values()] for side in (OFF, ON)}
        why = _invalid(values, point, given)
        rows.append({"point": point, "estimates": {}, "invalid": why})
        for metric in METRICS if not why else ():
            off, on = (estimate([one[f"mean_{metric}_ms"] for one in values[side]]) for side in (OFF, ON))
            rows[-1]["estimates"][metric] = [asdict(off), asdict(on)]
            ratio = off.mean / on.mean
            error = ratio * math.hypot(off.stderr / off.mean, on.stderr / on.mean)
            differ = distinguishable(off.mean - on.mean, math.hypot(off.stderr, on.stderr))
            faster = f"{ON if on.mean < off.mean else OFF} faster" if differ else "not distinguishable"
            start += [off.show(2), on.show(2), Estimate(ratio, error).show(3), faster]
        lines.append([*start, f"**invalid**: {why}"] if why else start)
    head = ["input-len", "prefix-len", "output-len", "rr"]
    head += [text for m in METRICS for text in (f"off_{m} ms", f"on_{m} ms", f"{m} off/on", f"{m}: outcome")]
    return table(head, lines), {"rows": rows, "results": results}, not any(row["invalid"] for row in rows)


def _invalid(values: dict[str, list[dict[str, Any]]], point: Point, given: argparse.Namespace) -> str | None:
    wanted = {"failed": 0, "completed": given.prompts, "total_output_tokens": given.prompts * point["output"]}
    for side, runs in values.items():
        for run, one in enumerate(runs):
            found = {name: one.get(name) for name in wanted}
            if found != wanted or not all(one.get(f"mean_{metric}_ms", 0) > 0 for metric in METRICS):
                return f"{side}, run {run + 1}: {found}, {wanted} expected, with ttft and tpot"
    return None


def accuracy(given: argparse.Namespace, results: Results) -> tuple[list[str], dict[str, Any], bool]:
    """Return the tables of answers, the record, and True. Raise RunError where the sides were asked other prompts."""
    record: dict[str, Any] = {OFF: {}, ON: {}}
    changes: dict[str, list[list[int]]] = {}
    each, differ = [], 0
    for run in results[OFF]:
        off, on = (results[side][run][0]["answers"] for side in (OFF, ON))
        if not off or {q: a["prompt"] for q, a in off.items()} != {q: a["prompt"] for q, a in on.items()}:
            raise RunError(f"run {run + 1}: the sides were not asked the same questions")
        differ += sum(off[q]["text"] != on[q]["text"] for q in off)
        for side, answers in ((OFF, off), (ON, on)):
            record[side][str(run)] = {"figures": {}, "answers": answers}
        for name in sorted(next(iter(off.values()))["right"]):
            change = [on[q]["right"][name] - off[q]["right"][name] for q in off]
            changes.setdefault(name, []).append(change)
            shares = [estimate([float(one["right"][name]) for one in answers.values()]) for answers in (off, on)]
            for side, share in zip((OFF, ON), shares, strict=True):
                record[side][str(run)]["figures"][name] = {"value": share.mean, "stderr": share.stderr}
            each.append([run + 1, name, *(one.show(4) for one in shares), change.count(-1), change.count(1)])
    over = []
    for name, runs in changes.items():
        # The runs ask the same questions, so they are no independent sample: average over the runs first.
        one = estimate([statistics.fmean(of) for of in zip(*runs, strict=True)])
        higher = f"on {'higher' if one.mean > 0 else 'lower'}"
        over.append([name, one.show(4), higher if distinguishable(one.mean, one.stderr) else "not distinguishable"])
    lines = table(["run", "filter", "off", "on", "right off only", "right on only"], each)
    lines += ["", *table(["filter", "on - off, paired", "outcome"], over), ""]
    lines += [f"Texts: {differ} of {len(off) * len(results[OFF])} answers differ between the sides."]
    return lines, {"answers": record}, True


def about() -> dict[str, str]:
    """Return versions and the card. Torch runs in another process: a CUDA context would take the servers' memory."""
    done = subprocess.run([sys.executable, "-c", CARD], capture_output=True, text=True, check=False)
    torch, card = json.loads(done.stdout) if done.returncode == 0 else ("not installed", "unknown")
    stamp = files.stamp("serving")[files.KEY]
    versions = {name: str(stamp[name]) for name in ("vllm", "aiter", "plugin", "time")}
    steering = " ".join(f"{name}={value}" for name, value in sorted(os.environ.items()) if STEERING.match(name))
    return {"card": card, "torch": torch, **versions, "environment of both servers": steering or "none set"}


def page(given: argparse.Namespace, tables: Sequence[str], said: dict[str, list[str]], facts: dict[str, str]) -> str:
    """Return the whole page."""
    lines = [f"# {given.what.capitalize()} with the flag off and on: {escaped(given.model)}", "", *tables, ""]
    lines += [f"Flag {side}: {escaped(line)}" for side in (ON, OFF) for line in said[side]]
    lines += ["", "## What ran", "", _code(["python", "tools/serving.py", *given.argv]), ""]
    lines += [_code([*getattr(given, f"{side}_env"), *server(given, side)]) for side in (OFF, ON)]
    lines += ["", *(f"- {name}: {escaped(value)}" for name, value in facts.items())]
    lines += [f"- {given.runs} runs per side, servers {given.servers}, baseline {given.baseline}"]
    if given.what == "accuracy" and given.limit:
        lines += [f"- **partial**: the first {given.limit} questions"]
    lines += ["", "tools/serving.md says how this was measured and what it does not show."]
    return "\n".join(lines) + "\n"


def _code(words: Sequence[str]) -> str:
    return "    " + outputs.line(shlex.join(words))  # a line end would leave the code block


def run(argv: Sequence[str]) -> int:
    """Compare, print, write, and return the exit status."""
    if argv[:1] == ["ask"]:
        return ask(argv[1:])
    given = read(argv)
    given.argv = list(argv)
    needed = ("vllm",) if given.what == "speed" else ("vllm", "lm_eval")
    missing = [name for name in needed if shutil.which(name) is None]
    if missing:
        raise UsageError(f"{', '.join(missing)}: not on PATH (pip install 'vllm[bench]', '.[accuracy]')")
    facts = about()
    results, said = compare(given)
    for side, runs in results.items():
        if sorted(runs) != list(range(given.runs)) or not all(all(points) for points in runs.values()):
            raise RunError(f"the sweep left no result for some runs with the flag {side}")
    tables, measured, valid = (speed if given.what == "speed" else accuracy)(given, results)
    text = page(given, tables, said, facts)
    print(text)
    if given.out:
        files.write_text(given.out, text)
    if given.json:
        record = {"tool": f"serving {given.what}", "about": facts, "status": "; ".join(said[ON])}
        record |= {"baseline": given.baseline, **measured}
        files.write(given.json, record | files.stamp("serving"))
    return 0 if valid else 1


main = partial(guarded, "serving", run)

if __name__ == "__main__":
    sys.exit(main())
