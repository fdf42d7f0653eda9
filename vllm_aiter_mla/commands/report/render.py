"""The template, filled. jinja2 is imported here and nowhere else: it comes with the extra ``report``."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from vllm_aiter_mla.commands.report.inputs import InputError, Inputs, read
from vllm_aiter_mla.commands.report.sections import build

TEMPLATE = "page.html.j2"


class NoTemplateEngineError(RuntimeError):
    """jinja2 is not installed; the message says how to get it."""


def html_of(paths: Sequence[Path]) -> str:
    """The page for these inputs.

    Raises:
        InputError: an input cannot be shown.
        NoTemplateEngineError: jinja2 is missing.
    """
    template = _template()
    inputs = read(paths)
    try:
        return _render(template, inputs)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if isinstance(error, InputError):
            raise
        raise _blame(template, inputs, error) from error


def _render(template: Any, inputs: Inputs) -> str:
    return str(template.render(**build(inputs))) + "\n"


def _blame(template: Any, inputs: Inputs, error: Exception) -> InputError:
    """Name the file that is known by its first keys but does not hold what its kind holds: render each alone."""
    for record, alone in inputs.one_by_one():
        try:
            _render(template, alone)
        except Exception as own:
            return InputError(
                f"{record.path}: not as this version writes it ({type(own).__name__}: {own}); write it anew"
            )
    return InputError(f"the inputs do not fit together ({type(error).__name__}: {error})")


def _template() -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise NoTemplateEngineError(
            "jinja2 is not installed; it comes with the extra: pip install 'vllm-aiter-mla[report]'"
        ) from error
    # What runs wrote (layer names, messages, paths of kernels) is escaped; only our own SVG is marked safe.
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text = resources.files("vllm_aiter_mla.commands.report").joinpath(TEMPLATE).read_text(encoding="utf-8")
    return environment.from_string(text)
