"""``offline.py`` as a user runs it, on a rehearsal card: only the model and what follows from its size are others."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rehearsal.day import TIMEOUT_S, Day

EXAMPLES = Path(__file__).parents[2] / "examples"
RUN = """
import json, sys, offline
offline.ARGUMENTS |= json.loads(sys.argv[1])
offline.main(["abc"])
"""

pytestmark = [pytest.mark.rehearsal, pytest.mark.slow, pytest.mark.wide]


def test_offline_answers_and_every_layer_engages(tmp_path: Path) -> None:
    day = Day(tmp_path)
    tokenizer = day.model / "tokenizer_config.json"
    template = {"chat_template": "{% for one in messages %}{{ one['content'] }}{% endfor %}"}
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | template))
    small = {"model": str(day.model), "tensor_parallel_size": 1, "max_model_len": 128, "max_num_seqs": 4}
    path = os.pathsep.join([str(EXAMPLES), day.environment["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(small)], env=day.environment | {"PYTHONPATH": path}, cwd=tmp_path,
        text=True, capture_output=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2/2 MLA layers engaged (triton 1..4" in done.stdout + done.stderr
