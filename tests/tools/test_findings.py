"""The scripts of findings/ keep to their form, and their runner tells their ends apart."""

import re
import subprocess

import pytest

from tests.support.pages import PAGES, ROOT

FOLDER = ROOT / "findings"
SCRIPTS = sorted(FOLDER.glob("*.sh"))


def ran(*scripts):
    return subprocess.run([FOLDER / "run", *scripts], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("ends", "said", "status"),
    [
        ("true", "held", 0),
        ("exit 77", "not shown here", 0),
        ("false", "changed", 1),
        ("exit 3", "could not install", 1),
        # A command line that a pinned parser no longer takes.
        ("python3 -c 'import argparse; argparse.ArgumentParser().parse_args([\"--gone\"])' || exit", "changed", 1),
    ],
)
def test_the_runner_tells_how_each_script_ended(tmp_path, ends, said, status):
    (tmp_path / "fine.sh").write_text("echo fine\n")
    (tmp_path / "one.sh").write_text(f"echo seen $((6 * 7))\n{ends}\n")
    done = ran(tmp_path / "one.sh", tmp_path / "fine.sh")
    rows = re.findall(r"^\| (\w+) \| \d+ \| (.*) \|$", done.stdout, re.MULTILINE)
    assert rows == [("one", said), ("fine", "held")], "it goes on behind a script that does not hold"
    assert (done.returncode, "seen 42" in done.stdout) == (status, said != "held")


def test_the_page_lists_each_script():
    assert re.findall(r"^\| `([\w-]+\.sh)` \|", PAGES["findings/README.md"], re.MULTILINE) == [
        one.name for one in SCRIPTS
    ]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_pins_what_it_installs_and_says_when_it_cannot(script):
    text = script.read_text(encoding="utf-8").replace("\\\n", " ")
    installs = re.findall(r"/pip\" install (.*)", text)
    assert installs, "public packages, and not those of this environment"
    for line in installs:
        packages, _, otherwise = line.partition(" || ")
        words = re.sub(r"--target \S+", "", packages).replace('"', "").split()
        assert [word for word in words if not re.fullmatch(r"-q|--no-deps|[\w-]+==[\w.$]+", word)] == []
        assert otherwise == "exit 3"
    assert "vllm_aiter_mla" not in text
    assert "# A guess: " in text
    assert "\n# Seen" in text
