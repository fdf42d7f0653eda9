"""The templates, filled. jinja2 is imported here and nowhere else: it comes with the extra ``report``.

Tags come from the templates alone. Every value is escaped when it is put in, and a value is never marked as safe:
what runs wrote (names of layers and files, messages, paths) may hold anything.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STYLE = "page.css"


class NoTemplateEngineError(RuntimeError):
    """jinja2 is not installed; the message says how to get it."""


def html_of(paths: Sequence[Path]) -> str:
    """The page for these inputs.

    Raises:
        InputError: an input cannot be shown.
        NoTemplateEngineError: jinja2 is missing.
    """
    from vllm_aiter_mla.commands.report.inputs import read
    from vllm_aiter_mla.commands.report.sections import build

    templates = environment()
    return fill("page.html.j2", build(read(paths)), templates)


def fill(template: str, values: dict[str, Any], templates: Any = None) -> str:
    """A template of this folder with these values; ``csp`` is the policy for a page that includes ``page.css``.

    Raises:
        NoTemplateEngineError: jinja2 is missing.
    """
    templates = templates or environment()
    return str(templates.get_template(template).render(csp=policy(templates), **values)) + "\n"


def policy(templates: Any) -> str:
    """The page's Content-Security-Policy: nothing is loaded, no script runs, the one style is known by its hash."""
    digest = hashlib.sha256(templates.get_template(STYLE).render().encode()).digest()
    style = f"'sha256-{base64.b64encode(digest).decode()}'"
    return f"default-src 'none'; style-src {style}; img-src data:; base-uri 'none'; form-action 'none'"


def environment() -> Any:
    """jinja2's environment over this folder: everything is escaped, and a missing value is an error."""
    try:
        import jinja2
    except ImportError as error:
        raise NoTemplateEngineError("jinja2 is not installed; in a checkout: pip install '.[report]'") from error
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
