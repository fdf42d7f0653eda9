"""``make demo``, or ``python -m tests.sandbox``: ``check`` on this CPU. With options, the comparisons of ``demo``."""

from __future__ import annotations

import sys

from tests.sandbox import check, demo

if __name__ == "__main__":
    sys.exit(demo.main(demo.parse(sys.argv[1:])) if sys.argv[1:] else check.main())
