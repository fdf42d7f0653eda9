#!/usr/bin/env python
"""Compare GSM8K with the plugin's flag off and on by lm-eval, question by question, and write a Markdown table.

Starts the servers itself, one at a time; what stands after ``--`` goes to both as it would to `vllm serve`:

    python tools/accuracy.py deepseek-ai/DeepSeek-R1 --out gsm8k.md --json gsm8k.json -- -tp 8 --kv-cache-dtype fp8
    python tools/accuracy.py MODEL --questions test.jsonl --examples train.jsonl -- ...   # without the hub
    python tools/accuracy.py --small-model                                                # shows the chain on a CPU

Needs the `[accuracy]` extra. All 1,319 questions, 5 examples before each, greedy. Both sides are asked the same
prompts; each run draws other examples. See docs/benchmarks.md for the protocol and its limits.

Exit status 0; 1 when a server or client failed or nothing engaged; 2 for a wrong option or without lm-eval.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.common import UsageError, guarded, positive
from tools.serving import options, page, questions, small, sweep

TOOL = "accuracy"
SMALL_QUESTIONS = Path(__file__).parents[1] / "tests" / "tools" / "serving" / "questions.jsonl"
DEFAULTS = {"concurrency": 32, "max_gen_toks": 256}
# One at a time: a batch of another size may round another way, and here both sides must give the same text.
SMALL = {"concurrency": 1, "max_gen_toks": 16}
NOT_CLAIMED = (
    "Anything about speed: see tools/serve_bench.py.",
    "Anything about other tasks, chat templates, sampling, or longer answers than max_gen_toks.",
    "That unequal texts are a fault: batches of other sizes round another way, in vLLM too. Compare two runs of "
    "unmodified vLLM, or ask with --concurrency 1.",
)


def read(argv: Sequence[str]) -> argparse.Namespace:
    """The options, checked; adds ``asked_rows`` and ``example_rows`` of local questions. Raises ``UsageError``."""
    made = options.parser(__doc__)
    made.add_argument("--questions", type=Path, metavar="FILE.jsonl", help="ask these: question, answer with `#### n`")
    made.add_argument(
        "--examples", type=Path, metavar="FILE.jsonl", help="few-shot examples (default: the first of --questions)"
    )
    made.add_argument("--fewshot", type=int, default=5, help="examples before each question (default 5)")
    made.add_argument("--limit", type=int, help="ask only so many; the table says that it is partial")
    made.add_argument("--concurrency", type=int, help="requests at a time (default 32)")
    made.add_argument("--max-gen-toks", type=int, help="tokens of an answer (default 256, as lm-eval's)")
    made.add_argument("--request-timeout", type=int, default=600, metavar="S", help="for one answer (default 600)")
    given = options.read(made, argv, DEFAULTS, SMALL)
    given.tool = TOOL
    for option in ("concurrency", "max_gen_toks", "request_timeout", *(["limit"] if given.limit is not None else [])):
        positive(f"--{option.replace('_', '-')}", getattr(given, option))
    if given.fewshot < 0:
        raise UsageError(f"--fewshot {given.fewshot}: must not be negative")
    _read_files(given)
    return given


def _read_files(given: argparse.Namespace) -> None:
    if given.small_model and given.questions is None:
        given.questions = SMALL_QUESTIONS
    if given.questions is None:
        if given.examples:
            raise UsageError(f"--examples {given.examples}: only with --questions")
        given.asked_rows = given.example_rows = None
        return
    rows = questions.read_questions("--questions", given.questions)
    if given.examples:
        given.asked_rows, given.example_rows = rows, questions.read_questions("--examples", given.examples)
    else:
        # An example that is also asked would give its answer away.
        given.example_rows, given.asked_rows = rows[: given.fewshot], rows[given.fewshot :]
    # lm-eval draws one more than it shows where both come from one split; a standard error needs two questions.
    if len(given.asked_rows) < 2 or len(given.example_rows) < given.fewshot:
        raise UsageError(f"--questions {given.questions}: {len(rows)} questions are too few beside --fewshot")


def protocol(given: argparse.Namespace, count: int) -> list[str]:
    """What was asked, in words."""
    task, source = questions.TASK, f"GSM8K's test split, {questions.ALL_QUESTIONS:,} questions"
    if given.asked_rows is not None:
        task = questions.LOCAL_TASK
        source = f"{given.questions.name}, {len(given.asked_rows)} questions, in GSM8K's prompt (not GSM8K)"
    whole = "all of them" if given.limit is None else f"**partial**: --limit {given.limit}"
    seed = questions.FEWSHOT_SEED + given.seed
    return [
        f"client: lm-eval's local-completions over /v1/completions, task {task}",
        f"{source}; {count} asked, {whole}",
        f"{given.fewshot} examples before each question, drawn with seed {seed} + run - 1 on both sides; greedy; "
        f"up to {given.max_gen_toks} tokens; {given.concurrency} requests at a time",
        "± of a run is lm-eval's standard error over questions; off only and on only are questions that one side alone "
        "answers rightly, p is McNemar's exact test on them, two-sided",
        "the paired difference averages each question over runs first, its ± is over questions; below two of them it "
        "is called not distinguishable",
    ]


def run(argv: Sequence[str]) -> int:
    """Ask, write, and return the exit status."""
    given = read(argv)
    questions.require_lm_eval()
    sweep.check(given)
    work = options.work_folder(given)
    fixed = questions.fixed(given, work)
    about = page.machine() | {"lm-eval": page.distribution("lm-eval")}
    model = small.prepare(given, work)
    compared = sweep.compare(given, model, work, sweep.ASK, fixed, questions.asked(given))
    answers = questions.answers_of(compared.results)
    name = "the small random model" if given.small_model else given.model
    title = f"{'Arithmetic questions' if given.asked_rows else 'GSM8K'} with the fast path off and on: {name}"
    said, tables = protocol(given, questions.asked_in(answers)), questions.tables(answers)
    page.finish(title, compared, about, said, tables, NOT_CLAIMED, {"answers": answers})
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    return guarded(TOOL, lambda: run(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
