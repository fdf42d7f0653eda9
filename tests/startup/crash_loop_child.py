"""One start of a worker on a made-up MI300X whose AITER ends the process, or works: prints what its layer runs on."""

import os
import socket
import sys
from pathlib import Path
from typing import Any

from tests.support.made_up_clock import Named
from tests.support.worker import Worker, layer_in, ours
from vllm_aiter_mla.compat import config as compat_config
from vllm_aiter_mla.kernels.backend import Binding
from vllm_aiter_mla.kernels.platform import Platform
from vllm_aiter_mla.serving import backends


class Aborting(Named):
    """Ends the process as AITER's C++ checks do."""

    def bind(self, inputs: Any) -> Binding | str:
        return Binding(lambda inputs: os.abort())


folder, kind, name, host = sys.argv[1:]
socket.gethostname = lambda: host
for one in ("aiter", "triton"):
    backend = Aborting(one) if kind == "aborts" and one == name else Named(one)
    backends.FACTORIES[one] = lambda platform, settings, backend=backend: backend
backends.detect_platform = lambda: Platform("gfx942")  # type: ignore[attr-defined]
compat_config.cache_folder = lambda: Path(folder)
worker = Worker(ours(), kernel=name)
worker.load_model()
decided = layer_in(worker).decision
print("runs", decided.skip or decided.our_first_kernel)
