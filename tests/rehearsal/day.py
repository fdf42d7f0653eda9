"""One operator's machine for a day: a folder, an environment with the rehearsal card, commands as they are typed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.sandbox import plugin, rehearsal_card
from tests.sandbox.model import TinyDeepseek, save_config
from tests.sandbox.rehearsal_card import Scenario
from tests.sandbox.simulated_aiter import write_tree
from vllm_aiter_mla import status

PATH = Path(rehearsal_card.__file__).parent / "rehearsal_path"
COMMAND = Path(sys.executable).with_name("vllm-aiter-mla")
TIMEOUT_S = 900
# AITER's op wants a latent of 512 and a rope part of 64; its class wants 16 heads.
MODEL: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 16, "yarn": False}


class Day:
    """What stays on the machine from one command to the next.

    Args:
        folder: everything that is written.
        scenario: what the card is and how fast its kernels are.
        inductor: compiled C++ kernels, shared between days: they are found again by their source.
    """

    def __init__(self, folder: Path, scenario: Scenario | None = None, inductor: Path | None = None) -> None:
        self.folder, self.scenario = folder, scenario or Scenario()
        self.inductor = inductor or folder / "inductor"
        self.model = save_config(TinyDeepseek(**MODEL).config(), folder / "model")
        self.aiter = write_tree(folder / "aiter")
        self.cache = folder / "cache"
        self.extra: dict[str, str] = {}

    @property
    def environment(self) -> dict[str, str]:
        """The variables of each process."""
        path = (PATH, plugin.FOLDER, self.aiter, plugin.CHECKOUT)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "AITER_"))}
        kept.pop(status.RUN, None)
        return kept | {
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            rehearsal_card.VARIABLE: json.dumps(asdict(self.scenario)),
            "SIMULATED_AITER_ARCH": self.scenario.arch,
            "SIMULATED_AITER_ATTENTION": "1",
            "TRITON_INTERPRET": "1",
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
        } | self.extra  # fmt: skip

    def run(self, *typed: str) -> subprocess.CompletedProcess[str]:
        """Run ``vllm-aiter-mla`` with what was typed; standard error goes into the output."""
        return subprocess.run(
            [str(COMMAND), *typed], env=self.environment, cwd=self.folder, text=True, errors="replace",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
