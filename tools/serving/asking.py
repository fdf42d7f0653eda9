"""The process of lm-eval: ``python -m serving.asking SPEC.json``.

The file says which server, which task and which runs (see ``questions.plan``); each run's answers are written down by
question, so that both arms can be compared pairwise. Seeds choose the few-shot examples; decoding is greedy.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(path: str) -> None:
    """Ask all runs of the file."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    spec = json.loads(Path(path).read_text())
    manager = TaskManager(include_path=spec["include_path"])
    for run in spec["runs"]:
        found = simple_evaluate(
            model="local-completions",
            model_args=model_arguments(spec),
            tasks=[spec["task"]],
            num_fewshot=spec["fewshot"],
            limit=spec["limit"],
            task_manager=manager,
            log_samples=True,
            fewshot_random_seed=run["seed"],
        )
        Path(run["out"]).write_text(json.dumps(record(found, spec["task"]), indent=1))


def model_arguments(spec: dict[str, Any]) -> dict[str, Any]:
    """lm-eval's ``local-completions``: prompts go over as text, the server tokenises; nothing is cut off here."""
    return {
        "model": spec["model"],
        "base_url": f"{spec['url']}/v1/completions",
        "tokenizer_backend": "none",
        "tokenized_requests": False,
        "num_concurrent": spec["concurrency"],
        "max_gen_toks": spec["max_gen_toks"],
        "max_retries": 3,
        "timeout": spec["request_timeout"],
        "eos_string": "</s>",
    }


def record(found: dict[str, Any], task: str) -> dict[str, Any]:
    """Figures by filter, and per question its prompt's hash, the text, and whether each filter finds it right.

    ``stderr`` is lm-eval's: the sample deviation over the root of the number of questions.
    """
    figures, answers = found["results"][task], {}
    filters = sorted({sample["filter"] for sample in found["samples"][task]})
    for sample in found["samples"][task]:
        one = answers.setdefault(
            sample["doc_id"], {"prompt": sample["prompt_hash"], "text": sample["resps"][0][0], "right": {}}
        )
        one["right"][sample["filter"]] = bool(sample["exact_match"])
    return {
        "figures": {
            name: {"value": figures[f"exact_match,{name}"], "stderr": figures[f"exact_match_stderr,{name}"]}
            for name in filters
        },
        "answers": answers,
    }


if __name__ == "__main__":
    main(sys.argv[1])
