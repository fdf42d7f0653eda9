"""The client of `accuracy.py`: lm-eval asks one run's questions, and the answers are saved by question.

Its options are those that ``proof`` and vLLM's sweep give every client; decoding is greedy, the seed chooses examples.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any


def main() -> None:
    """Ask, and write ``RESULT_DIR/RESULT_FILENAME``."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--base-url", "--model", "--seed", "--asked", "--result-dir", "--result-filename"):
        parser.add_argument(name, required=True)
    given, _ = parser.parse_known_args()
    asked = json.loads(given.asked)
    if asked["include_path"]:
        # Local questions need no hub, and without one each look-up would wait for its time limit.
        os.environ |= {"HF_DATASETS_CACHE": f"{asked['include_path']}/datasets", "HF_HUB_OFFLINE": "1"}
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    found = simple_evaluate(
        model="local-completions",
        # Prompts go over as text and the server tokenises; nothing is cut off here.
        model_args={
            "model": given.model,
            "base_url": f"{given.base_url}/v1/completions",
            "tokenizer_backend": "none",
            "tokenized_requests": False,
            "num_concurrent": asked["concurrency"],
            "max_gen_toks": asked["max_gen_toks"],
            "max_retries": 3,
            "timeout": asked["request_timeout"],
            "eos_string": "</s>",
        },
        tasks=[asked["task"]],
        num_fewshot=asked["fewshot"],
        limit=asked["limit"],
        task_manager=TaskManager(include_path=asked["include_path"]),
        log_samples=True,
        fewshot_random_seed=int(given.seed),
    )
    Path(given.result_dir, given.result_filename).write_text(json.dumps(record(found, asked["task"])))


def record(found: dict[str, Any], task: str) -> dict[str, Any]:
    """Figures by filter, and per question its prompt's hash, the text, and whether each filter finds it right.

    ``stderr`` is lm-eval's: the sample deviation over the root of the number of questions.
    """
    figures: dict[str, Any] = {}
    answers: dict[str, Any] = {}
    whole = found["results"][task]
    for sample in found["samples"][task]:
        name = sample["filter"]
        figures[name] = {"value": whole[f"exact_match,{name}"], "stderr": whole[f"exact_match_stderr,{name}"]}
        one = {"prompt": sample["prompt_hash"], "text": sample["resps"][0][0], "right": {}}
        answers.setdefault(sample["doc_id"], one)["right"][name] = bool(sample["exact_match"])
    return {"figures": figures, "answers": answers}


if __name__ == "__main__":
    main()
