"""The sweep's server command: becomes one side's server, with that side's variables, its output in a file of its own.

For a server that runs already nothing is started: this process waits to be ended by the sweep.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

STOP_S = 60.0


def wait_for_end(group: int, limit_s: float = STOP_S) -> None:
    """Until no process of ``group`` runs: the sweep kills a server and does not wait, and it still holds its memory."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end and any(_group(path) == group for path in Path("/proc").glob("[0-9]*/stat")):
        time.sleep(0.1)


def _group(stat: Path) -> int | None:
    try:
        state, _, group, *_ = stat.read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if state == "Z" else int(group)


def main() -> None:
    """Note which side is up in ``current.json``, for the clients, and become its server."""
    parser = argparse.ArgumentParser()
    parser.add_argument("spec", type=Path)
    for name in ("--side", "--host", "--port"):
        parser.add_argument(name)
    parser.add_argument("--run", type=int)
    given = parser.parse_args()
    spec = json.loads(given.spec.read_text())
    side, folder = spec["sides"][given.side], given.spec.parent
    log = folder / f"server-{given.side}{'' if given.run is None else f'-{given.run + 1}'}.log"
    url = side["url"] or f"http://{given.host}:{given.port}"
    current = {"side": given.side, "url": url, "log": None if side["url"] else str(log), "pid": os.getpid()}
    if (folder / "current.json").is_file():
        wait_for_end(json.loads((folder / "current.json").read_text())["pid"])
    (folder / "current.json").write_text(json.dumps(current))
    print(
        f"flag {given.side}: {'used as it is' if side['url'] else 'server starting'}, {url}",
        file=sys.stderr,
        flush=True,
    )
    while side["url"]:
        signal.pause()
    with log.open("wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    own = {name: value for name, value in side["environment"].items() if value is not None}
    kept = {name: value for name, value in os.environ.items() if name not in side["environment"]}
    command = [*spec["server"], *side["options"], "--host", given.host, "--port", given.port]
    os.execve(command[0], command, kept | own)


if __name__ == "__main__":
    main()
