"""``make demo``, or ``python -m tests.sandbox``: ``check`` on this CPU; ``--html FILE`` writes the page of ``report``.

With other options, the comparisons of ``demo``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.sandbox import check, demo

if __name__ == "__main__":
    words = sys.argv[1:]
    if not words or (words[0] == "--html" and len(words) == 2):
        sys.exit(check.main(*map(Path, words[1:])))
    sys.exit(demo.main(demo.parse(words)))
