"""``make demo``, or ``python -m tests.sandbox``: the vLLM engine with the fast path off and on, side by side."""

from __future__ import annotations

import sys

from tests.sandbox import demo

if __name__ == "__main__":
    sys.exit(demo.main(demo.parse(sys.argv[1:])))
