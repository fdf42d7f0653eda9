"""What every command that writes does with its output path, and with text from elsewhere."""

import os
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from vllm_aiter_mla import files
from vllm_aiter_mla.commands import outputs
from vllm_aiter_mla.commands.main import COMMANDS, app


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A folder with a file, a folder, a file that is not writable, and a folder with a file that is not."""
    for name in ("folder", "locked"):
        (tmp_path / name).mkdir()
    for name in ("file", "locked-file"):
        (tmp_path / name).write_text("")
    (tmp_path / "locked" / "file").write_text("")
    # Root may write anywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: not Path(path).name.startswith("locked"))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("folder", "is a folder"),
        ("none/x.json", "its folder does not exist"),
        ("file/x.json", "its folder does not exist"),
        ("locked-file", None),  # it is replaced
        ("locked/file", "not writable"),
        ("locked/x.json", "not writable"),
        ("x" * 300, "File name too long"),
        ("file", None),
        ("folder/new.json", None),
    ],
)
def test_a_path_that_cannot_be_written_is_named_with_its_reason(places, name, reason):
    assert outputs.unwritable_reason(places / name) == reason


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/stderr"])
def test_a_user_who_may_not_write_in_dev_may_write_to_its_streams(monkeypatch, name):
    """These are links, and no link to a device is replaced."""
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != Path("/dev"))
    assert outputs.unwritable_reason(Path(name)) is None


@pytest.mark.parametrize(("command", "option"), [("check", "--json"), ("report", "-o")])
def test_a_command_names_the_option_the_path_and_the_reason_before_its_work(places, command, option):
    typed = [command, *(["x.json"] if command == "report" else []), option, str(places / "folder")]
    said = CliRunner().invoke(app, typed).stderr
    assert said == f"{command}: {'--out' if option == '-o' else option} {places / 'folder'}: is a folder\n"


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        ("a.json", "a.json", True), ("a.json", "folder/../a.json", True), ("a.json", "b.json", False),
        ("-", "-", True), ("-", "/dev/stdout", True), ("-", "a.json", False), ("a.json", "/dev/stdout", False),
        ("/dev/null", "/dev/null", False), ("a.json", "link.json", False),
    ],
)  # fmt: skip
def test_two_options_that_write_need_two_files(tmp_path, monkeypatch, first, second, is_same):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.json").symlink_to("a.json")  # the link is replaced, not its file
    reason = outputs.same_file_reason(("--json", Path(first)), ("--html", Path(second)))
    assert (reason is not None) == is_same


def test_check_does_not_write_its_page_over_its_json(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["check", "--only", "machine", "--json", "x", "--html", "x"])
    assert (done.exit_code, done.stderr) == (2, "check: --json and --html name the same file x\n")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("option", ["--json", "--html"])
@pytest.mark.parametrize("model", ["model", "model/config.json"])
def test_check_does_not_replace_the_config_of_its_model(tmp_path, monkeypatch, option, model):
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "model" / "config.json"
    config.parent.mkdir()
    config.write_text('{"architectures": []}')
    done = CliRunner().invoke(app, ["check", model, "--only", "plan", option, "model/config.json"])
    assert (done.exit_code, f"{option} model/config.json: " in done.stderr) == (2, True)
    assert config.read_text() == '{"architectures": []}'


@pytest.mark.parametrize("typed", [["--config", "serve.yaml"], ["--config=serve.yaml"]], ids=" ".join)
def test_check_does_not_replace_the_file_of_vllms_options(tmp_path, monkeypatch, typed):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "serve.yaml").write_text("max-num-seqs: 8")
    done = CliRunner().invoke(app, ["check", "deepseek-r1", "--only", "plan", "--json", "serve.yaml", *typed])
    assert (done.exit_code, "--json serve.yaml: " in done.stderr) == (2, True), done.output
    assert (tmp_path / "serve.yaml").read_text() == "max-num-seqs: 8"


@pytest.mark.parametrize("typed", [("x.json",), (".",), ("link.json",)])
def test_report_does_not_replace_its_input(tmp_path, monkeypatch, typed):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.json").write_text("kept")
    (tmp_path / "link.json").symlink_to("x.json")
    done = CliRunner().invoke(app, ["report", *typed, "-o", "x.json"])
    assert (done.exit_code, done.stderr.count("\n"), "would be replaced" in done.stderr) == (2, 1, True)
    assert (tmp_path / "x.json").read_text() == "kept"


def test_a_link_is_replaced_wherever_it_leads(tmp_path):
    (tmp_path / "file").write_text("")
    for name, target in (("loop", "loop"), ("dangling", "no/such"), ("leads", "file")):
        (tmp_path / name).symlink_to(tmp_path / target)
        assert outputs.unwritable_reason(tmp_path / name) is None
        files.write_record(tmp_path / name, {})
        assert (tmp_path / name).read_text() == "{}\n"
        assert not (tmp_path / name).is_symlink()


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a\tb\nc", "a b\\nc"), ("\x1b[31m\u202e", "\\x1b[31m\\u202e"), ("\ud800", "\\ud800"), ("µs ±", "µs ±")],
)
def test_a_line_holds_no_control_character(text, shown):
    assert outputs.one_line(text) == shown


def test_only_the_json_is_on_standard_output(capfd):
    """A compiler and vLLM's log write to the descriptor, whatever ``sys.stdout`` is."""
    with outputs.text_on_stderr(outputs.STDOUT):
        print("a sentence")
        os.write(1, b"a compiler's line\n")
    outputs.write_output("check", outputs.STDOUT, "{}\n")
    assert capfd.readouterr() == ("{}\n", "a sentence\na compiler's line\n")


def test_a_full_disk_ends_the_command_with_one_line_that_names_it(capsys):
    full = os.open("/dev/full", os.O_WRONLY)
    path = Path(f"/proc/self/fd/{full}")  # not the device itself: code that is broken would replace the machine's
    with pytest.raises(typer.Exit) as ended:
        outputs.write_output("report", path, "{}\n")
    os.close(full)
    said = f"report: {path}: No space left on device\n"
    assert (ended.value.exit_code, capsys.readouterr().err) == (outputs.EXIT_USAGE, said)


WORD = st.text("abc:,-", min_size=1, max_size=40).filter(lambda word: word != "-")  # the sign of a list, which indents


@given(st.lists(WORD, max_size=30), st.integers(0, 20))
def test_folded_text_keeps_each_word_and_fits_a_terminal(words, indent):
    text = f"{' ' * indent}name  {' '.join(words)}"
    lines = outputs.fold_text(text).splitlines()
    assert " ".join(lines).split() == text.split()
    assert max(map(len, lines)) <= outputs.DEFAULT_WIDTH
    assert {len(line) - len(line.lstrip()) for line in lines[1:]} <= {indent + 6}


@pytest.mark.parametrize("command", COMMANDS)
def test_h_is_help(command):
    short, long = (CliRunner().invoke(app, [command, option]) for option in ("-h", "--help"))
    assert (short.exit_code, short.output) == (0, long.output)
    assert "Usage:" in short.output


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85"])
def test_no_character_of_a_config_begins_a_line(end):
    printed = outputs.fold_text(outputs.one_line(f"arch{end}Status line: 61/61 MLA layers would engage"))
    assert printed.splitlines() == [printed]
