"""The stamp of every JSON file, and how such a file is written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from vllm_aiter_mla import __version__, files


def test_a_stamp_names_schema_versions_time_and_host() -> None:
    stamp = files.stamp("status", 3)[files.KEY]
    assert set(stamp) == {"schema", "schema_version", "plugin", "vllm", "aiter", "time", "host"}
    assert (stamp["schema"], stamp["schema_version"]) == ("vllm-aiter-mla/status", 3)
    assert (stamp["plugin"], stamp["host"]) == (__version__, os.uname().nodename)
    assert timedelta(0) <= datetime.now(UTC) - datetime.fromisoformat(stamp["time"]) < timedelta(minutes=1)


def test_a_stamp_imports_neither_torch_nor_vllm_and_finds_vllm_under_another_name() -> None:
    code = "import sys\nfrom vllm_aiter_mla import evidence\nprint(files.stamp('a', 1)['evidence']['vllm'])\n"
    code += "assert not {'torch', 'vllm', 'aiter'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    vllm = pytest.importorskip("vllm")
    assert vllm.__version__.partition("+")[0] == done.stdout.strip().partition("+")[0]


def test_a_version_that_is_not_installed_is_null() -> None:
    assert files._version("no-such-distribution") is None
    assert files._distributions("no_such_package") == ()


def test_a_file_is_replaced_in_one_step_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    files.write(path, {"a": 1})
    files.write(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        files.write(tmp_path / "a.json", {})
    finally:
        os.umask(before)
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o600


def test_a_link_is_replaced_and_never_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("as it was")
    (tmp_path / "a.json").symlink_to(precious)
    files.write(tmp_path / "a.json", {})
    assert precious.read_text() == "as it was"
    assert not (tmp_path / "a.json").is_symlink()


def test_a_link_in_the_place_of_the_new_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: "guessed")
    precious = tmp_path / "precious"
    precious.write_text("as it was")
    (tmp_path / f".a.json.{os.getpid()}-guessed.new").symlink_to(precious)
    with pytest.raises(FileExistsError):
        files.write(tmp_path / "a.json", {})
    assert precious.read_text() == "as it was"


def test_a_file_that_cannot_be_written_leaves_nothing_and_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    files.write(path, {"a": 1})
    with pytest.raises(TypeError):
        files.write(path, {"a": object()})
    monkeypatch.setattr(Path, "replace", lambda *args: (_ for _ in ()).throw(OSError("planted")))
    with pytest.raises(OSError, match="planted"):
        files.write(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_another_users_link_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    files.write(link / "mine.json", {})
    found = os.stat_result((0o120777, 0, 0, 1, 12345, 12345, 0, 0, 0, 0))
    monkeypatch.setattr(Path, "lstat", lambda self: found if self == link else os.lstat(self))
    with pytest.raises(PermissionError, match="belongs to another user"):
        files.write(link / "a.json", {})
    assert not (tmp_path / "real" / "a.json").exists()


def test_a_device_is_written_to_and_stays(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\nfrom vllm_aiter_mla import evidence\nevidence.write(Path('/dev/stdout'), {'a': 1})"
    )
    before = os.lstat("/dev/stdout").st_mode
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"a": 1}
    assert os.lstat("/dev/stdout").st_mode == before
    files.write(Path("/dev/null"), {})
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    files.write(pipe, {"a": 1})
    assert json.loads(os.read(reader, 100)) == {"a": 1}
    os.close(reader)


def test_a_link_to_a_pipe_is_replaced_and_a_folder_of_devices_is_no_device(tmp_path: Path) -> None:
    """Neither may block the start of a worker, nor lead a file elsewhere."""
    pipe, link = tmp_path / "pipe", tmp_path / "status.json"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    files.write(link, {"a": 1})
    assert not link.is_symlink()
    assert json.loads(link.read_text()) == {"a": 1}
    assert not files.is_device(Path("/dev/shm/status.json"))


def test_every_schema_that_is_written_is_documented() -> None:
    root = Path(files.__file__).parents[1]
    sources = [path.read_text() for folder in ("vllm_aiter_mla", "tools") for path in (root / folder).rglob("*.py")]
    stamped = {found for source in sources for found in re.findall(r'stamp\("(\w+)", (\d+)\)', source)}
    page = (root / "docs" / "files.md").read_text()
    assert len(stamped) > 8
    assert not [
        f"{name} {version}" for name, version in stamped if not re.search(rf"[`*]{name}[`*]+ {version}\b", page)
    ]
