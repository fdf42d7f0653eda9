"""Two engines, one after the other, in one process: ``python -m tests.engine.two_engines_child SPEC FOLDER``.

The first engine's kernel fails its check; the second one's passes.
"""

import gc
import json
import sys
from pathlib import Path

from tests.sandbox import child, knobs
from tests.sandbox.spec import EngineSpec, load


def main(spec_path: str, folder: str) -> None:
    """Start both and write what each one's status file says."""
    spec: EngineSpec = load(Path(spec_path))
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    knobs.apply(spec)
    from vllm_aiter_mla.compat.config import cache_folder
    from vllm_aiter_mla.startup import checks
    from vllm_aiter_mla.startup.comparison import Comparison
    from vllm_aiter_mla.status.liveness import ServerLocks
    from vllm_aiter_mla.status.status_files import read_records

    found, check = [], checks.check_kernel
    planted = Comparison(False, "self-check FAILED: planted", {}, 0)
    for fails in (True, False):
        checks.check_kernel = (lambda *args: planted) if fails else check
        llm = child.build(spec, Path(folder) / "model")
        (record,) = read_records(cache_folder(), "*", sys.exit)
        if not ServerLocks(cache_folder(), [record]).is_engine_alive([record]):
            sys.exit("the engine does not live")
        found.append({"engaged": record.engaged, "skipped": {name: skip.code for name, skip in record.skipped.items()}})
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        if ServerLocks(cache_folder(), [record]).is_engine_alive([record]) is not False:
            sys.exit("the engine still lives")
    (Path(folder) / "status.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
