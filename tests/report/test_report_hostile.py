"""Files that try to put markup, scripts or control characters on the page or the terminal, of every kind."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jinja2
import pytest
from typer.testing import CliRunner

import vllm_aiter_mla
from tests.report import report_chromium as chromium
from tests.report.report_support import every_kind
from vllm_aiter_mla.commands.main import app
from vllm_aiter_mla.commands.report import inputs, render, shapes
from vllm_aiter_mla.commands.report.render import html_of

KINDS = {kind: shape for kind, _, shape in inputs._KINDS}
FILES = every_kind()
SCRIPT = "<script>document.title='owned'</script>"
IMAGE = "<img src=x onerror=\"document.title='owned'\">"
HOSTILE = f"\"'>{SCRIPT}{IMAGE}' onload='x()' \x00\x1b[31m\u202e</style>{{{{ 7 * 7 }}}}"
# In an FX node's target: without a bracket and a dot, which end it.
HOSTILE_OP = "\"'><script>name=1</script><img src=x onerror=name=1> onload='x' \x1b"
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]")
VALUES = (HOSTILE, None, True, -1, 0, 1.5, 1e308, 10**400, [], [HOSTILE], {}, {HOSTILE: HOSTILE}, {"1": {}})

TABLE = {"tabindex", "role", "aria-label", "class"}
SVG = {"viewbox", "width", "height", "role", "aria-label", "aria-describedby", "xmlns", "class"}
PLAIN = [
    "head",
    "header",
    "main",
    "footer",
    "body",
    "style",
    "h1",
    "h3",
    "summary",
    "details",
    "tr",
    "code",
    "br",
    "figcaption",
    "li",
]
WITH_CLASS = ["table", "strong", "p", "ul", "figure", "span", "th"]
ALLOWED = {name: set() for name in PLAIN} | {name: {"class"} for name in WITH_CLASS} | {
    "html": {"lang"}, "meta": {"charset", "http-equiv", "content", "name"}, "link": {"rel", "href"}, "title": {"id"},
    "nav": {"aria-label"}, "a": {"href"}, "section": {"id", "aria-labelledby"}, "h2": {"id"}, "div": TABLE,
    "td": {"class", "data-label", "colspan"}, "svg": SVG, "desc": {"id"}, "polyline": {"class", "points"},
    "rect": {"class", "x", "y", "width", "height", "rx"}, "text": {"class", "x", "y", "text-anchor"},
}  # fmt: skip


class Dom(HTMLParser):
    """Collects what is on no allow-list."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.strays: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.strays += [] if tag in ALLOWED else [tag]
        for name, value in attrs:
            known = name in ALLOWED.get(tag, ())
            if name in ("class", "id"):
                known &= re.fullmatch(r"[a-z0-9 -]*", value or "") is not None
            if name == "href":
                known &= re.fullmatch(r"#[a-z]+|data:,", value or "") is not None
            self.strays += [] if known else [f"{tag} {name}={value}"]

    def handle_comment(self, data: str) -> None:
        self.strays.append(f"comment {data}")


def strays(page: str) -> list[str]:
    """What a page holds that no page of ours should."""
    return [
        *Dom(page).strays,
        *CONTROLS.findall(page),
        *(["49"] if "{{ 7 * 7 }}" not in page and ">49" in page else []),
    ]


def poisoned(value: Any, shape: Any) -> Any:
    """The value with a hostile text behind every string and every key that is data."""
    if isinstance(shape, shapes.Maybe | shapes.Given):
        return None if value is None else poisoned(value, shape.shape)
    if isinstance(shape, shapes.Map):
        free = re.fullmatch(shape.key, HOSTILE) is not None
        return {key + HOSTILE if free else key: poisoned(one, shape.value) for key, one in value.items()}
    if isinstance(shape, dict):
        return {key: poisoned(one, shape[key]) if key in shape else one for key, one in value.items()}
    if isinstance(shape, list | tuple):
        parts = shape if isinstance(shape, tuple) else shape * len(value)
        return [poisoned(one, part) for one, part in zip(value, parts, strict=True)]
    if shape is str and "call_function" in value:
        attention = (
            f"%x : [num_users=1] = call_function[target=torch.ops.vllm.unified_mla_attention{HOSTILE_OP}.default]"
        )
        return (
            value.replace("torch.ops.aten.neg.", f"torch.ops.aten.neg{HOSTILE_OP}.") + f"\n    {attention}(args = ())"
        )
    return value + HOSTILE if shape is str else value


def places(value: Any, shape: Any, field: str = "") -> Iterator[tuple[list[Any], str, Any]]:
    """(keys down to it, its name in a message, its shape) of everything a shape names; of a list the first only."""
    if isinstance(shape, shapes.Maybe | shapes.Given):
        shape = shape.shape
    if field:
        yield [], field, shape
    if value is None:
        return
    below: list[tuple[Any, Any, str]] = []
    if isinstance(shape, shapes.Map):
        below = [(key, shape.value, f"{field}[{key!r}]") for key in list(value)[:1]]
    elif isinstance(shape, dict):
        below = [(key, part, f"{field}.{key}".removeprefix(".")) for key, part in shape.items() if key in value]
    elif isinstance(shape, list | tuple):
        below = [(n, part, f"{field}[{n}]") for n, part in enumerate(shape[: len(value)])]
    for key, part, name in below:
        for keys, found, leaf in places(value[key], part, name):
            yield [key, *keys], found, leaf


def put(data: Any, keys: list[Any], value: Any) -> Any:
    """A copy of ``data`` with another value at one place."""
    out = json.loads(json.dumps(data))  # the made-up files share parts
    at = out
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    return out


@pytest.fixture(scope="module")
def hostile_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One of every kind, under names that are hostile too."""
    folder = tmp_path_factory.mktemp("hostile")
    for kind, data in FILES.items():
        name = f"{kind} \"'>{IMAGE} \x1b[31m.json"
        (folder / name).write_text(json.dumps(poisoned(data, KINDS[kind])))
    return sorted(folder.iterdir())


def test_hostile_file_of_every_kind_is_there() -> None:
    assert set(FILES) == set(KINDS) == set(inputs.read([]))
    for kind, data in FILES.items():
        assert inputs._kind_of(data)[0] == kind


@pytest.mark.parametrize("kind", FILES)
def test_hostile_strings_and_keys_stay_text(kind: str, hostile_files: list[Path]) -> None:
    (path,) = (one for one in hostile_files if one.name.startswith(kind))
    page = html_of([path])
    assert strays(page) == []
    assert "&lt;script&gt;" in page
    assert "\\x1b" in page


def test_hostile_files_together_stay_text(hostile_files: list[Path]) -> None:
    assert strays(html_of(hostile_files)) == []


def test_hostile_check_knows_every_element_of_an_ordinary_page(page: str) -> None:
    assert strays(page) == []


@pytest.mark.parametrize(
    "kind", [kind if at == 0 else pytest.param(kind, marks=pytest.mark.slow) for at, kind in enumerate(FILES)]
)
def test_hostile_types_give_an_error_that_names_file_field_and_value(
    kind: str, written: Callable[[str, Any], Path]
) -> None:
    """Whatever stands in a field: the page is safe, or one line says which field of which file is wrong."""
    numbers = 0
    for keys, field, shape in places(FILES[kind], KINDS[kind]):
        for value in VALUES:
            path = written("hostile.json", put(FILES[kind], keys, value))
            try:
                assert strays(html_of([path])) == []
                skipped = ""
            except inputs.InputError as error:
                skipped = str(error)
                assert skipped.startswith(f"{path}: ")
                assert not CONTROLS.search(skipped)
            if shape in (int, float) and isinstance(value, str):
                numbers += 1
                assert f"{path}: {field}: a{' whole' if shape is int else ''} number expected, found " in skipped
                assert "<script>" in skipped
            if shape is int and value is True:
                assert "a whole number expected, found True" in skipped
    assert numbers


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[" * 200_000, "no JSON"),
        (b'{"a": ' * 5_000 + b"1" + b"}" * 5_000, "no"),
        (json.dumps(FILES["benches"]).replace("1000.0", "NaN").encode(), "NaN is no number of JSON"),
        (json.dumps(FILES["benches"]).replace("1000.0", "1e999").encode(), "copy_gbps: a number of at most"),
        (json.dumps(FILES["benches"]).replace("1000.0", "9" * 5000).encode(), "no JSON"),
        (b"\xff\xfe{}", "no JSON"),
        (json.dumps({HOSTILE: 1}).encode(), "not recognised (found: "),
        (json.dumps(FILES["benches"]).replace('"tokens": 1,', '"tokens": "<script>\x7f</script>",', 1).encode(),
         "rows[0].point.tokens: a whole number expected, found '<script>\\x7f</script>'"),
    ],
)  # fmt: skip
def test_hostile_file_ends_the_command_with_2_and_one_line(tmp_path: Path, content: bytes, reason: str) -> None:
    path, out = tmp_path / "bench\x1b[2J\n.json", tmp_path / "page.html"
    path.write_bytes(content)
    done = CliRunner().invoke(app, ["report", str(path), "--out", str(out)])
    assert done.exit_code == 2
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert "bench\\x1b[2J\\n.json: " in done.output
    assert reason in done.output
    assert not CONTROLS.search(done.output)
    assert done.output.count("\n") == 1
    assert not out.exists()


def test_hostile_half_of_a_character_is_shown_not_written(written: Callable[[str, Any], Path]) -> None:
    """JSON can hold a lone surrogate; no file in UTF-8 can."""
    bench = FILES["benches"] | {"machine": {"card": "\ud800"}}
    html_of([written("hostile.json", json.dumps(bench))]).encode()


def test_hostile_markup_has_no_way_round_the_escaping() -> None:
    """Values are never marked as safe, and markup is written in templates alone."""
    folder = Path(render.__file__).parent
    sources = {path.name: path.read_text() for path in folder.iterdir() if path.suffix in (".py", ".j2", ".css")}
    assert {"page.html.j2", "parts.j2", "render.py"} <= set(sources)
    for name, text in sources.items():
        assert not re.search(r"\bMarkup\(|import Markup|\|\s*safe\b|autoescape\s+false|autoescape=False", text), name
        if name.endswith(".py"):
            assert not re.search(r"</|<(svg|rect|text|div|p|g)\b", text), name
    assert render.environment().autoescape is True


def test_hostile_policy_names_the_hash_of_the_pages_one_style(page: str) -> None:
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="(.*?)">', page)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    allowed = ["default-src 'none'", f"style-src 'sha256-{digest}'", "img-src data:", "base-uri 'none'"]
    assert html.unescape(policy).split("; ") == [*allowed, "form-action 'none'"]
    assert "style=" not in page


def unescaped(monkeypatch: pytest.MonkeyPatch, expression: str | None) -> None:
    """Take the escaping away: of everything, or of one expression of the templates."""
    real = render.environment

    def planted() -> jinja2.Environment:
        environment = real()
        if expression is None:
            environment.autoescape = False
            return environment
        sources = {name: environment.loader.get_source(environment, name)[0] for name in environment.list_templates()}
        assert any(expression in text for text in sources.values())
        changed = {name: text.replace(expression, expression[:-3] + "|safe }}") for name, text in sources.items()}
        return environment.overlay(loader=jinja2.DictLoader(changed))

    monkeypatch.setattr(render, "environment", planted)


@pytest.mark.mutation
@pytest.mark.parametrize(
    "expression",
    [None, "{{ cell }}", "{{ chart.title }}", "{{ mark.text }}", "{{ mark.tip }}", "{{ row.name }}", "{{ label }}",
     "{{ why }}", "{{ f.message }}", "{{ result.command }}", "{{ op }}", "{{ run.status }}", "{{ bound.text }}"],
)  # fmt: skip
def test_hostile_mutation_an_unescaped_field_is_caught(
    expression: str | None, hostile_files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    unescaped(monkeypatch, expression)
    assert any("script" in stray for stray in strays(html_of(hostile_files)))


@pytest.mark.skipif(chromium.BINARY is None, reason=chromium.MISSING)
def test_hostile_files_run_no_script_in_chromium(
    hostile_files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither escaping nor policy lets a script run alone; without both it does run, so that the test can see it."""

    def title(page: str) -> str:
        path = tmp_path / "page.html"
        path.write_text(page)
        dom, _ = chromium.run(path, "--dump-dom")
        return re.findall(r"<title>(.*?)</title>", dom)[0]

    ours = "vllm-aiter-mla report"
    assert title(html_of(hostile_files)) == ours
    unescaped(monkeypatch, None)
    open_page = html_of(hostile_files)
    assert title(open_page) == ours, "the policy alone stops it"
    assert title(open_page.replace("Content-Security-Policy", "nothing")) == "owned"


def test_hostile_names_in_a_models_config_are_one_printable_line_of_the_plan(tmp_path: Path) -> None:
    example = Path(vllm_aiter_mla.__file__).parent
    (source,) = example.rglob("models/deepseek-v2-lite.json")
    config = json.loads(source.read_text())["config"]
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"model_type": "deepseek_v2\x1b[2J\r\nStatus line: fine"})
    )
    done = CliRunner().invoke(app, ["plan", str(tmp_path)])
    assert "Status line: fine" in done.output
    assert not CONTROLS.search(done.output)
    assert not re.search(r"^Status line: fine", done.output, re.MULTILINE)


def test_hostile_brackets_are_no_markup_in_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    """rich would colour by [red], and end in an error at a [/closing] that nothing opened."""
    from rich.table import Table

    from tests.sandbox import demo

    table = Table("skipped")
    table.add_row("sparse: [red]no[/closing]")
    console = demo._console()
    console.print(table)
    console.print("a layer: [red]no[/closing]")
    assert capsys.readouterr().out.count("[red]no[/closing]") == 2
