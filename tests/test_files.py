"""The stamp of every JSON file, how such a file is written, and the fingerprint of the sources (I9)."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.planted import raising
from tests.support.statuses import record_of
from vllm_aiter_mla import __version__, files, packages
from vllm_aiter_mla.kernels.triton.tiles import TUNED_SCHEMA
from vllm_aiter_mla.status import status_files
from vllm_aiter_mla.status.record import RankRecord
from vllm_aiter_mla.status.skips import KeptSkips

PACKAGE = Path(files.__file__).parent


def test_a_stamp_names_schema_versions_time_and_host():
    stamp = files.stamp("status")
    assert set(vars(stamp)) == {"schema", "schema_version", "plugin", "vllm", "aiter", "time", "host"}
    assert (stamp.schema, stamp.schema_version) == ("vllm-aiter-mla/status", 7)
    assert (stamp.plugin, stamp.host) == (__version__, os.uname().nodename)
    now = datetime.now(UTC)
    assert timedelta(0) <= now - datetime.fromisoformat(stamp.time) < timedelta(minutes=1)
    vllm = pytest.importorskip("vllm")
    assert stamp.vllm.partition("+")[0] == vllm.__version__.partition("+")[0], "under another distribution's name"
    assert packages.distribution_version("no-such-distribution") is None
    assert packages._distributions("no_such_package") == ()


def test_a_stamp_asks_the_vllm_that_is_imported_before_it_searches_every_distribution(monkeypatch):
    """The search takes 0.3 s of each start."""
    monkeypatch.setattr(packages, "distribution_version", lambda *names: None)
    monkeypatch.setattr(packages, "_distributions", raising(AssertionError("it searched")))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="9.9"))
    assert files.stamp("status").vllm == "9.9"


def test_a_file_is_replaced_in_one_step_with_the_mode_of_the_umask(tmp_path):
    path = tmp_path / "a.json"
    before = os.umask(0o077)
    try:
        files.write_record(path, {"a": 1})
        files.write_record(path, {"a": 2})
    finally:
        os.umask(before)
    assert files.load(path) == {"a": 2}
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_symlink_is_replaced_and_never_followed(tmp_path, monkeypatch):
    precious, pipe = tmp_path / "precious", tmp_path / "pipe"
    precious.write_text("{}")
    os.mkfifo(pipe)
    for target in (precious, pipe):
        link = tmp_path / "a.json"
        link.symlink_to(target)
        with pytest.raises(OSError):
            files.load(link)
        files.write_record(link, {"a": 1})
        assert not link.is_symlink()
        assert files.load(link) == {"a": 1}
        link.unlink()
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: "guessed")
    (tmp_path / ".aiter-mla-guessed.new").symlink_to(precious)
    with pytest.raises(FileExistsError):
        files.write_record(tmp_path / "a.json", {"a": 1})
    assert precious.read_text() == "{}"


@pytest.mark.parametrize("name", ["\u5c64" * 80, "a" * 250], ids=["three bytes a letter", "one"])
def test_a_file_whose_name_is_as_long_as_the_file_system_takes_is_written(tmp_path, name):
    files.write_record(path := tmp_path / f"{name}.json", {"a": 1})
    assert list(tmp_path.iterdir()) == [path]


def killed_while_writing(folder):
    """A process that is killed after it has begun to write a file into ``folder``; return what it has left."""
    code = (
        "import os, sys; from pathlib import Path; from vllm_aiter_mla import files\n"
        "Path.replace = lambda *given: os._exit(9); files.write_record(Path(sys.argv[1], 'a.json'), {'a': 1})"
    )
    assert subprocess.run([sys.executable, "-c", code, str(folder)], check=False).returncode == 9
    (left,) = folder.iterdir()
    return left


@pytest.mark.parametrize(("seconds", "stays"), [(0, True), (2 * status_files.MAX_UNFINISHED_SECONDS, False)])
def test_a_file_of_a_process_that_was_killed_while_it_wrote_goes_with_a_later_status(tmp_path, seconds, stays):
    left = killed_while_writing(tmp_path)
    then = time.time() - seconds
    os.utime(left, (then, then))
    status_files.write_status(tmp_path, record_of([]))
    assert left.exists() is stays


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({}, "no stamp"),
        ([], "no stamp"),
        ({files.STAMP_KEY: {}}, "no stamp"),
        ({files.STAMP_KEY: {"schema": "vllm-aiter-mla/skips"}}, "skips of no version"),
        ({files.STAMP_KEY: {"schema": "vllm-aiter-mla/status", "schema_version": 2}}, "status 2"),
    ],
)
def test_a_file_of_another_kind_or_version_is_named_by_what_its_stamp_says(tmp_path, data, told):
    files.write_record(path := tmp_path / "x.json", data)
    with pytest.raises(ValueError, match=rf"x\.json: {told}; this version reads skips \d+$"):
        files.read_record(KeptSkips, path)


def test_a_number_that_json_lacks_is_named(tmp_path):
    (path := tmp_path / "x.json").write_text('{"a": NaN}')
    with pytest.raises(ValueError, match=r"no JSON: NaN is not a JSON value$"):
        files.load(path)


def test_a_file_that_cannot_be_written_leaves_nothing_and_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    files.write_record(path, {"a": 1})
    with pytest.raises(TypeError):
        files.write_record(path, {"a": object()})
    monkeypatch.setattr(Path, "replace", lambda *args: (_ for _ in ()).throw(OSError("planted")))
    with pytest.raises(OSError, match="planted"):
        files.write_record(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_device_is_written_to_and_stays(tmp_path):
    """Nothing is written in /dev: code that is broken would replace the machine's own devices."""
    imports = "from pathlib import Path\nfrom vllm_aiter_mla.files import write_record\n"
    code = f"{imports}write_record(Path('/proc/self/fd/1'), {{'a': 1}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"a": 1}
    assert all(files.is_stream(Path("/dev", name)) for name in ("stdout", "stderr", "null", "fd/1"))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    files.write_record(pipe, {"a": 1})
    assert json.loads(os.read(reader, 100)) == {"a": 1}
    os.close(reader)
    assert not files.is_stream(Path("/dev/shm/status.json"))


def test_every_schema_is_written_and_every_one_that_is_written_has_its_fields():
    sources = [path.read_text() for path in PACKAGE.rglob("*.py")]
    written = {name for source in sources for name in re.findall(r'stamp(?:_field)?\("([\w-]+)"\)', source)}
    assert written | {TUNED_SCHEMA} == set(files.schemas())
    with pytest.raises(KeyError):
        files.stamp("no-such-schema")


def test_the_fields_of_the_status_file_are_those_that_are_written(tmp_path):
    status_files.write_status(tmp_path, record_of([], 16, "fp8", 0))
    record = json.loads(next(tmp_path.glob("status-*.json")).read_text())
    listed = {name for names in files.schemas()["status"]["fields"] for name in names.split(", ")}
    assert listed | {files.STAMP_KEY} == {*record, "model_name", "dp_index"}, (
        "startup adds the last two, as vLLM names them"
    )


@pytest.fixture
def copy(tmp_path):
    return Path(shutil.copytree(PACKAGE, tmp_path / "elsewhere", ignore=shutil.ignore_patterns("__pycache__")))


def test_the_fingerprint_depends_on_the_version_and_not_on_the_place(copy):
    here = packages.fingerprint_of(PACKAGE, __version__)
    assert packages.fingerprint_of(copy, __version__) == here
    assert packages.fingerprint_of(copy, "9.9") != here
    packages.fingerprint.cache_clear()
    assert packages.fingerprint() == here
    assert here.startswith(f"{__version__}-")


def test_changing_one_source_changes_the_fingerprint(copy):
    """Each source that may change a graph or a number: all but what reports, what a user types, and what tests."""
    parts = [path for path in sorted(copy.rglob("*.py")) if not {"status", "commands", "verify"} & {*path.parts}]
    assert {path.stem for path in parts} >= {"pipeline", "absorb", "layer", "ops", "gate", "admission", "settings"}
    seen = {packages.fingerprint_of(copy, __version__)}
    for part in parts:
        with part.open("a") as source:
            source.write("# changed\n")
        seen.add(packages.fingerprint_of(copy, __version__))
    assert len(seen) == 1 + len(parts)


@pytest.mark.parametrize("part", sorted(packages.PARTS_OUTSIDE_CACHE_KEY))
def test_a_change_that_decides_no_graph_and_no_number_keeps_the_fingerprint(copy, part):
    before = packages.fingerprint_of(copy, __version__)
    for new in (copy / part / "new.py", copy / f"{part}.py"):
        new.parent.mkdir(exist_ok=True)
        new.write_text("x = 1\n")
    assert packages.fingerprint_of(copy, __version__) == before


def test_adding_renaming_or_moving_bytes_between_files_changes_the_fingerprint(tmp_path):
    seen = set()
    trees = ({"a.py": "ab", "b.py": "c"}, {"a.py": "a", "b.py": "bc"}, {"a.py": "ab", "c.py": "c"}, {"a.py": "ab"})
    for tree in trees:
        root = tmp_path / str(len(seen))
        root.mkdir()
        for name, text in tree.items():
            (root / name).write_text(text)
        seen.add(packages.fingerprint_of(root, "1"))
    assert len(seen) == len(trees)


def test_a_field_that_is_wrong_is_named_by_its_place_in_the_file(tmp_path):
    record = files.to_plain(record_of(["a", "b"]))
    record["skipped"]["b"] = {"code": "a code", "message": 3}
    with pytest.raises(ValueError, match=r"in\.json: skipped\.b\.message: [^\n]+$"):
        files.parse_unstamped(RankRecord, tmp_path / "in.json", record)


def test_the_first_distribution_that_is_installed_is_named_with_its_version():
    assert packages.installed_distribution("no-such-distribution", "pytest", "torch") == f"pytest {pytest.__version__}"
    assert packages.installed_distribution("no-such-distribution") is None


def test_a_folder_without_metadata_is_no_installed_distribution(tmp_path, monkeypatch):
    """As an interrupted removal leaves it."""
    (tmp_path / "no_such_distribution-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert packages.installed_distribution("no-such-distribution") is None


@pytest.mark.parametrize(
    ("error", "package"),
    [
        (ModuleNotFoundError("planted", name="hip"), "hip"),
        (ModuleNotFoundError("planted", name="hip.hiprtc"), None),
        (ModuleNotFoundError("planted"), None),
        (ImportError("planted", name="hip"), None),
    ],
)
def test_a_package_is_missing_only_if_its_own_import_did_not_find_it(error, package):
    assert packages.missing_package(error) == package


class Kept:
    """A folder with one file that a start keeps now, and one that the last start used some seconds ago."""

    def __init__(self, folder):
        self.folder, self.old = folder, folder / "skips-old-0.json"
        files.write_record(self.old, KeptSkips({}))

    def after(self, seconds, used=False):
        """Whether the old file is still there once another start has kept its own, so many seconds later."""
        os.utime(self.old, (time.time() - seconds,) * 2)
        if used:
            files.read_from_earlier_start(KeptSkips, self.old)
        files.write_for_later_starts(self.folder / "skips-new-0.json", KeptSkips({}), "skips-*.json")
        return self.old.exists()


@pytest.mark.parametrize(
    ("seconds", "used", "stays"),
    [
        (files.MAX_UNUSED_SECONDS - 60, False, True),
        (files.MAX_UNUSED_SECONDS + 60, False, False),
        (files.MAX_UNUSED_SECONDS + 60, True, True),
    ],
    ids=["not so old", "old", "old, and used by a start"],
)
def test_a_kept_file_goes_once_no_start_has_used_it_for_long(tmp_path, seconds, used, stays):
    assert Kept(tmp_path).after(seconds, used) is stays
    assert (tmp_path / "skips-new-0.json").exists()


def test_only_files_of_the_same_kind_go(tmp_path):
    other = tmp_path / "tuned-a-card.json"
    other.write_text("{}")
    os.utime(other, (0, 0))
    Kept(tmp_path).after(2 * files.MAX_UNUSED_SECONDS)
    assert other.exists()


def test_a_kept_file_that_cannot_be_removed_costs_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "unlink", raising(PermissionError("planted")))
    assert Kept(tmp_path).after(2 * files.MAX_UNUSED_SECONDS), "it is there yet, and nothing was raised"


@pytest.mark.mutation
def test_mutation_a_reader_that_does_not_note_the_use_is_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "read_from_earlier_start", files.read_record)
    assert not Kept(tmp_path).after(files.MAX_UNUSED_SECONDS + 60, used=True)


def test_a_file_is_closed_before_it_takes_the_place_of_the_old_one(tmp_path, monkeypatch):
    """NFS may say only then that the disk is full."""
    path, opened = tmp_path / "kept.json", Path.open

    class Full(io.StringIO):
        def close(self):
            if not self.closed:
                super().close()
                raise OSError("no space left")

    path.write_text("old")
    monkeypatch.setattr(
        Path, "open", lambda self, mode="r", **how: Full() if mode == "x" else opened(self, mode, **how)
    )
    with pytest.raises(OSError, match="no space"):
        files.write_text(path, "new")
    assert path.read_text() == "old"


def test_standard_output_that_is_a_file_is_appended_to(tmp_path):
    code = "from pathlib import Path; from vllm_aiter_mla import files; files.write_text(Path('/dev/stdout'), 'new')"
    (tmp_path / "log").write_text("old ")
    with (tmp_path / "log").open("a") as log:
        subprocess.run([sys.executable, "-c", code], stdout=log, check=True)
    assert (tmp_path / "log").read_text() == "old new"
