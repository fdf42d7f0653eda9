"""Claims about output paths: whatever cannot be written is named before a run starts, by every command that writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from vllm_aiter_mla import files
from vllm_aiter_mla.commands import outputs


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """A folder with a file, a folder, and a file and a folder that are not writable."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "locked-file").write_text("")
    (tmp_path / "locked").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    return tmp_path


@pytest.fixture
def locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write anywhere: what the names say is what the system is made to say."""
    monkeypatch.setattr(os, "access", lambda path, mode: not Path(path).name.startswith("locked"))


@pytest.mark.usefixtures("locks")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("folder", "is a folder"),
        ("none/x.json", "its folder does not exist"),
        ("file/x.json", "its folder does not exist"),
        ("locked-file", "not writable"),
        ("locked/x.json", "its folder is not writable"),
        ("x" * 300, "File name too long"),
        ("file", None),
        ("folder/new.json", None),
    ],
)
def test_a_file_that_cannot_be_written_says_why(places: Path, name: str, said: str | None) -> None:
    if said is None:
        outputs.check({"--json": places / name, "--html": None})
        return
    with pytest.raises(outputs.OutputError) as caught:
        outputs.check({"--json": places / name})
    assert str(caught.value) == f"--json {places / name}: {said}"


@pytest.mark.usefixtures("locks")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("file", "is not a folder"),
        ("file/below", "file is not a folder"),
        ("locked", "not writable"),
        ("locked/a/b", "locked is not writable"),
        ("folder", None),
        ("new/and/deep", None),
    ],
)
def test_a_folder_that_cannot_be_made_says_why(places: Path, name: str, said: str | None) -> None:
    if said is None:
        outputs.check({}, {"--work": places / name})
        return
    with pytest.raises(outputs.OutputError) as caught:
        outputs.check({}, {"--work": places / name})
    assert str(caught.value).startswith(f"--work {places / name}: ")
    assert str(caught.value).endswith(said)


def test_a_link_is_replaced_wherever_it_leads(places: Path) -> None:
    """In a circle, to nothing, or to a file: what is checked is what is done."""
    (places / "dangling").symlink_to(places / "no" / "such")
    (places / "leads").symlink_to(places / "file")
    for name in ("loop", "dangling", "leads"):
        outputs.check({"--json": places / name})
        files.write(places / name, {})
        assert (places / name).read_text() == "{}\n"
        assert not (places / name).is_symlink()


WRONG = [
    ("verify", ["--json", "no/such/x.json"], "verify: --json no/such/x.json: its folder does not exist"),
    ("verify", ["--limit", "8193"], "verify: --limit 8193: between 8 and 8192 tokens expected"),
    ("verify", ["--limit", "7"], "verify: --limit 7: between 8 and 8192 tokens expected"),
    ("verify", ["--only", "nonsense"], "verify: no case called 'nonsense'"),
    ("verify", ["--list", "--json", "x.json", "-b", "aiter"], "verify: --list: --backend, --json would have no effect"),
    ("demo", ["--json", "no/such/x.json"], "demo: --json no/such/x.json: its folder does not exist"),
    ("demo", ["--keep", __file__], f"demo: --keep {__file__}: is not a folder"),
    ("demo", ["--arch", "gfx950"], "demo: --arch gfx950: only with --kernel simulated-aiter; --kernel is reference"),
    ("demo", ["--kernel", "nonsense"], "demo: --kernel: expected reference, simulated-aiter or triton, got 'nonsense'"),
    ("demo", ["--kernel", "simulated-aiter", "--arch", "x"], "demo: --arch: expected gfx942 or gfx950, got 'x'"),
    (
        "demo",
        ["--attention", "aiter"],
        "demo: --attention aiter: only with --kernel simulated-aiter; --kernel is reference",
    ),
    (
        "demo",
        ["--kernel", "simulated-aiter", "--attention", "x"],
        "demo: --attention: expected aiter or sandbox, got 'x'",
    ),
    ("bench", ["--json", "."], "bench: --json .: is a folder"),
    ("bench", ["--rounds", "-3"], "bench: --rounds -3: between 1 and 100000 expected"),
]


@pytest.mark.parametrize(("command", "arguments", "said"), WRONG)
def test_a_wrong_option_is_one_line_on_stderr_and_exits_2(command: str, arguments: list[str], said: str) -> None:
    from vllm_aiter_mla.commands.main import app

    assert isinstance(app, typer.Typer)
    done = CliRunner().invoke(app, [command, *arguments])
    # A progress bar that never began leaves an empty line.
    assert (done.exit_code, done.stdout.strip()) == (2, "")
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1
