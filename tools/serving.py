#!/usr/bin/env python
"""Compare your server with the flag off and on: its times, or its answers. Write a Markdown page.

    python tools/serving.py speed deepseek-ai/DeepSeek-R1 --out r1.md --json r1.json -- -tp 8 --kv-cache-dtype fp8
    python tools/serving.py accuracy deepseek-ai/DeepSeek-R1 --out gsm8k.md -- -tp 8 --kv-cache-dtype fp8

`vllm bench sweep serve` starts each server and runs the client: `vllm bench serve` for times, `lm_eval` for answers.
Both commands have to be on PATH. Options after ``--`` go to every server. The server with the flag on runs in strict
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
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.common import Parser, RunError, UsageError, escaped, folders, guarded, positive, table, writable
from vllm_aiter_mla import files
from vllm_aiter_mla.commands import outputs
from vllm_aiter_mla.commands.report.serving_record import LENGTHS, METRICS, OFF, ON, Estimate, PointResult, Serving
from vllm_aiter_mla.settings import FLAG_FIELD, NAMESPACE

FEWEST_RUNS, SEEDS_PER_RUN, LAST_LINES = 3, 1000, 25
SIGMAS = 2.0
"""Two means differ if they are at least this many combined standard errors apart."""
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
Point = dict[str, Any]
"""A row of the table of times: tokens of ``LENGTHS``, and ``rate`` in requests per second."""
Results = dict[str, dict[int, list[dict[str, Any]]]]
"""By side and run: what the client saved for each point."""


def read(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the options. Add ``points`` and ``serve``, the options after ``--``. Raise UsageError."""
    split = list(argv).index("--") if "--" in argv else len(argv)
    parser = Parser(__doc__, "serving.py {speed,accuracy} MODEL [options] [-- SERVE_OPTION ...]")
    parser.add_argument("what", choices=("speed", "accuracy"))
    parser.add_argument("model", metavar="MODEL", help="name or folder, as for `vllm serve`")
    parser.add_argument("--runs", type=int, default=FEWEST_RUNS, help=f"runs per side, at least {FEWEST_RUNS}")
    parser.add_argument("--servers", choices=("per-run", "per-side"), default="per-run", help="how often a side starts")
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
    if "," in given.task:
        raise UsageError(f"--task {given.task}: one task at a time; lm-eval numbers the questions of each from 0")
    writable({"--out": given.out, "--json": given.json})
    folders({"--work": given.work, "--include-path": given.include_path})
    lengths = [_lengths(text) for text in given.lengths or ["1024/0/256"]]
    given.points = [{**of, "rate": rate} for of in lengths for rate in _rates(given)] if given.what == "speed" else [{}]
    given.serve = [_serve_option(option) for option in argv[split + 1 :]]
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
    if f"{NAMESPACE}.enabled" in name or FLAG_FIELD in name:
        raise UsageError(f"{option} after --: the tool sets it")
    return re.sub(r"^--compilation[-_]config\.", "-cc.", option)


def visits(runs: int, servers: str) -> list[tuple[str, list[int]]]:
    """Return side and runs of each server, in order.

    The flag is on first: if nothing engages, no time goes into vLLM. With a server per run the order alternates, so
    that machine drift favours no side.
    """
    sides = (ON, OFF)
    if servers == "per-side":
        return [(side, list(range(runs))) for side in sides]
    return [(side, [run]) for run in range(runs) for side in (sides if run % 2 == 0 else sides[::-1])]


def server(given: argparse.Namespace, side: str) -> list[str]:
    """Return the server's command, without host and port."""
    flag = [f"--additional-config.{NAMESPACE}.{name}=true" for name in ("enabled", "strict")]
    return ["vllm", "serve", given.model, *given.serve, *(flag if side == ON else ())]


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

    All sides get the same seeds. Each run and point has another one: the same prompts would come from the prefix
    cache.
    """
    found = []
    for number, point in enumerate(given.points):
        one = {f"random-{name}-len": point[name] for name in LENGTHS} | {"request-rate": point["rate"]} if point else {}
        seed = given.seed + SEEDS_PER_RUN * run + number
        found.append({"_benchmark_name": f"{run}-{number}", "seed": seed, **one})
    return found


def compare(given: argparse.Namespace) -> tuple[Results, dict[str, list[str]]]:
    """Run every visit. Return the results, and what the servers say of engaged layers and fusions.

    Raises:
        RunError: a server or client failed, or a side is not what it is called.
    """
    work = given.work or Path(tempfile.mkdtemp(prefix="aiter-mla-serving-"))
    folder = work.resolve() / f"{given.what}-{datetime.now():%Y%m%d-%H%M%S-%f}"
    folder.mkdir(parents=True)
    print(f"logs and results: {folder}", file=sys.stderr)
    results: Results = {OFF: {}, ON: {}}
    said: dict[str, list[str]] = {side: [] for side in results}
    for side, runs in visits(given.runs, given.servers):
        name = "-".join([side, *(str(run + 1) for run in runs)])
        print(f"flag {side}, run {', '.join(str(run + 1) for run in runs)}", file=sys.stderr, flush=True)
        log = _sweep(given, server(given, side), runs, folder, name)
        engaged = ENGAGED.findall(log)
        if bool(engaged) is not (side == ON):
            raise RunError(f"flag {side}: {len(engaged)} lines about engaged layers in {folder / name}.log")
        said[side] += [line for line in [*engaged, *FUSIONS.findall(log)] if line not in said[side]]
        for path in (folder / name).rglob("summary.json"):
            for one in json.loads(path.read_text()):
                run, number = map(int, one["_benchmark_name"].split("-"))
                results[side].setdefault(run, [{}] * len(given.points))[number] = one
    return {side: dict(sorted(runs.items())) for side, runs in results.items()}, said


def _sweep(given: argparse.Namespace, command: Sequence[str], runs: Sequence[int], folder: Path, name: str) -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = ["--host", "127.0.0.1", "--port", str(probe.getsockname()[1])]
    params, log = folder / f"{name}.json", folder / f"{name}.log"
    params.write_text(json.dumps([point for run in runs for point in points_of(given, run)]))
    command = ["vllm", "bench", "sweep", "serve", "--serve-cmd", shlex.join([*command, *address])]
    command += ["--bench-cmd", shlex.join(client(given, f"http://127.0.0.1:{address[-1]}")), "--show-stdout"]
    command += ["--bench-params", str(params), "--num-runs", "1", "--server-ready-timeout", str(given.start_timeout)]
    command += ["--output-dir", str(folder), "--experiment-name", name]
    # A proxy for the outside must not be asked for this machine.
    environment = os.environ | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
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
            with suppress(ProcessLookupError):  # vLLM kills its client, and not what that has started
                os.killpg(running.pid, signal.SIGKILL)
            raise
    text = log.read_text(errors="replace")
    if status:
        last = "\n".join(f"  {line}" for line in text.splitlines()[-LAST_LINES:])
        raise RunError(f"{name}: vLLM's sweep ended with status {status}; the last lines of {log}:\n{last}")
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
    saved = sorted(folder.rglob("samples_*.jsonl"))
    if len(saved) > 1:
        sys.exit(f"--task names a group of {len(saved)} tasks, each with questions from 0; name one of them")
    for path in saved:
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
        values = {side: [run[number] for run in runs.values()] for side, runs in results.items()}
        why = _invalid(values, point, given)
        row = PointResult(point, {}, why)
        rows.append(row)
        for metric, saved in METRICS.items() if not why else ():
            found = {side: estimate([one[saved] for one in runs]) for side, runs in values.items()}
            row.estimates[metric] = found
            start += [one.show(2) for one in found.values()]
            slow, fast = (ON, OFF) if metric == "throughput" else (OFF, ON)
            start += _ratio(found[slow], found[fast])
        lines.append([*start, f"**invalid**: {why}"] if why else start)
    head = ["input-len", "prefix-len", "output-len", "rr"]
    for metric in METRICS:
        unit, ratio = ("tokens/s", f"{ON}/{OFF}") if metric == "throughput" else ("ms", f"{OFF}/{ON}")
        head += [f"{side}_{metric} {unit}" for side in results]
        head += [f"{metric} {ratio}", f"{metric}: outcome"]
    return table(head, lines), {"rows": tuple(rows), "results": results}, not any(row.invalid for row in rows)


def _ratio(off: Estimate, on: Estimate) -> tuple[str, str]:
    """Return the ratio of two times, or of two rates the other way round, with its error, and which side is faster."""
    ratio = off.mean / on.mean
    error = ratio * math.hypot(off.stderr / off.mean, on.stderr / on.mean)
    differ = distinguishable(off.mean - on.mean, math.hypot(off.stderr, on.stderr))
    outcome = f"{ON} {'faster' if ratio > 1 else 'slower'}" if differ else "not distinguishable"
    return Estimate(ratio, error).show(3), outcome


def _invalid(values: dict[str, list[dict[str, Any]]], point: Point, given: argparse.Namespace) -> str | None:
    wanted = {"failed": 0, "completed": given.prompts, "total_output_tokens": given.prompts * point["output"]}
    for side, runs in values.items():
        for run, one in enumerate(runs):
            found = {name: one.get(name) for name in wanted}
            if found != wanted or not all(one.get(saved, 0) > 0 for saved in METRICS.values()):
                return f"flag {side}, run {run + 1}: {found}, {wanted} expected, with {', '.join(METRICS)}"
    return None


def accuracy(given: argparse.Namespace, results: Results) -> tuple[list[str], dict[str, Any], bool]:
    """Return the tables of answers, the record, and True. Raise RunError where the sides were asked other prompts."""
    record: dict[str, Any] = {side: {} for side in results}
    each = []
    for run in results[OFF]:
        answers = {side: runs[run][0]["answers"] for side, runs in results.items()}
        prompts = [{question: one["prompt"] for question, one in of.items()} for of in answers.values()]
        if not prompts[0] or any(of != prompts[0] for of in prompts):
            raise RunError(f"run {run + 1}: the sides were not asked the same questions")
        for name in sorted(next(iter(answers[OFF].values()))["right"]):
            shares = {side: estimate([float(a["right"][name]) for a in of.values()]) for side, of in answers.items()}
            each.append([run + 1, name, *(one.show(4) for one in shares.values())])
            for side, share in shares.items():
                found = record[side].setdefault(str(run), {"figures": {}, "answers": answers[side]})
                found["figures"][name] = {"mean": share.mean, "stderr": share.stderr}
    lines = table(["run", "filter", *results], each)
    return [*lines, "", *_paired(results)], {"answers": record}, True


def _paired(results: Results) -> list[str]:
    """Return the table that pairs both sides, question by question, and how many texts differ."""
    changes: dict[str, list[list[int]]] = {}
    differ = asked = 0
    for run in results[OFF]:
        old, new = (results[side][run][0]["answers"] for side in (OFF, ON))
        differ += sum(old[question]["text"] != new[question]["text"] for question in old)
        asked += len(old)
        for name in next(iter(old.values()))["right"]:
            change = [new[question]["right"][name] - old[question]["right"][name] for question in old]
            changes.setdefault(name, []).append(change)
    rows = []
    for name, runs in sorted(changes.items()):
        # The runs ask the same questions, so they are no independent sample: average over the runs first.
        one = estimate([statistics.fmean(of) for of in zip(*runs, strict=True)])
        higher = f"{ON} {'higher' if one.mean > 0 else 'lower'}"
        outcome = higher if distinguishable(one.mean, one.stderr) else "not distinguishable"
        lost, won = (sum(change.count(by) for change in runs) for by in (-1, 1))
        rows.append([name, one.show(4), outcome, lost, won])
    heads = ["filter", f"{ON} - {OFF}, paired", "outcome", f"right with flag {OFF} only", f"right with flag {ON} only"]
    return [*table(heads, rows), "", f"Texts: {differ} of {asked} answers differ between flag {OFF} and {ON}."]


def about() -> dict[str, str]:
    """Return versions and the card. Torch runs in another process: a CUDA context would take the servers' memory."""
    done = subprocess.run([sys.executable, "-c", CARD], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        torch, card = json.loads(done.stdout)
    else:
        torch, card = f"unknown: {(done.stderr.strip().splitlines() or ['no error was printed'])[-1]}", "unknown"
    stamp = files.stamp("serving")
    versions = {name: str(getattr(stamp, name)) for name in ("vllm", "aiter", "plugin", "time")}
    steering = " ".join(f"{name}={value}" for name, value in sorted(os.environ.items()) if STEERING.match(name))
    return {"card": card, "torch": torch, **versions, "environment of the servers": steering or "none set"}


def page(given: argparse.Namespace, tables: Sequence[str], said: dict[str, list[str]], facts: dict[str, str]) -> str:
    lines = [f"# {given.what.capitalize()}, flag off and on: {escaped(given.model)}", "", *tables, ""]
    lines += [f"Flag {side}: {escaped(line)}" for side in said for line in said[side]]
    lines += ["", "## What ran", "", _code(["python", "tools/serving.py", *given.argv]), ""]
    lines += [_code(server(given, side)) for side in said]
    lines += ["", *(f"- {name}: {escaped(value)}" for name, value in facts.items())]
    lines += [f"- {given.runs} runs per side, servers {given.servers}"]
    if given.what == "accuracy" and given.limit:
        lines += [f"- **partial**: the first {given.limit} questions"]
    lines += ["", "tools/serving.md says how this was measured and what it does not show."]
    return "\n".join(lines) + "\n"


def _code(words: Sequence[str]) -> str:
    return "    " + outputs.one_line(shlex.join(words))  # a line end would leave the code block


def run(argv: Sequence[str]) -> int:
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
            raise RunError(f"the sweep left no result for some runs of {side}")
    tables, measured, valid = (speed if given.what == "speed" else accuracy)(given, results)
    text = page(given, tables, said, facts)
    print(text)
    if given.out:
        files.write_text(given.out, text)
    if given.json:
        record = Serving(f"serving {given.what}", given.model, facts, "; ".join(said[ON]), **measured)
        files.write_record(given.json, record)
    return 0 if valid else 1


main = partial(guarded, "serving", run)

if __name__ == "__main__":
    sys.exit(main())
