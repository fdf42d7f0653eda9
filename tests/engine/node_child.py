"""One of two ranks whose configs are built apart, as on two nodes: ``python -m tests.engine.node_child SPEC RESULT``.

torch's variables say which rank it is.
"""

import functools
import sys
from pathlib import Path

from tests.sandbox import child
from tests.sandbox.spec import load


def main(spec: str, result: str) -> None:
    from vllm.plugins import load_general_plugins

    from vllm_aiter_mla.compat import ranks

    load_general_plugins()
    ranks.apart = functools.partial(ranks.apart, wait_s=20)  # both are on this machine
    child.main(load(Path(spec)), Path(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
