"""Results as files: JSON, and JUnit XML for CI."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from vllm_aiter_mla import evidence
from vllm_aiter_mla.harness.runner import Result
from vllm_aiter_mla.harness.session import Session, command

# XML 1.0 has no way to write these.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]")


def write_json(session: Session, path: Path) -> None:
    """The session as JSON: status, machine, missing back ends, results with their findings and commands."""
    evidence.write(path, session.as_dict() | evidence.stamp("verify", 1))


def write_junit(session: Session, path: Path) -> None:
    """JUnit XML: a suite per back end, a test case per case and variant; a missing back end is a skipped test."""
    root = ElementTree.Element("testsuites", name="vllm-aiter-mla verify")
    by_backend: dict[str, list[Result]] = {}
    for result in session.results:
        by_backend.setdefault(result.backend, []).append(result)
    for backend, results in by_backend.items():
        suite = _suite(root, backend, results)
        for name, value in session.machine.items():
            ElementTree.SubElement(_properties(suite), "property", name=name, value=_clean(value))
        for result in results:
            _case(suite, result, session)
    for backend, reason in session.missing.items():
        suite = ElementTree.SubElement(root, "testsuite", name=backend, tests="1", failures="0", skipped="1")
        case = ElementTree.SubElement(suite, "testcase", classname=f"verify.{backend}", name="available")
        ElementTree.SubElement(case, "skipped", message=_clean(reason))
    ElementTree.indent(root)
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _suite(root: ElementTree.Element, backend: str, results: list[Result]) -> ElementTree.Element:
    return ElementTree.SubElement(
        root,
        "testsuite",
        name=backend,
        tests=str(len(results)),
        failures=str(sum(result.status == "failed" for result in results)),
        skipped=str(sum(result.status == "skipped" for result in results)),
        time=f"{sum(result.seconds for result in results):.3f}",
    )


def _properties(suite: ElementTree.Element) -> ElementTree.Element:
    found = suite.find("properties")
    return ElementTree.SubElement(suite, "properties") if found is None else found


def _case(suite: ElementTree.Element, result: Result, session: Session) -> None:
    name = f"{result.case}[{result.variant}-seed{result.seed}]"
    case = ElementTree.SubElement(
        suite, "testcase", classname=f"verify.{result.backend}", name=name, time=f"{result.seconds:.3f}"
    )
    if result.status == "skipped":
        ElementTree.SubElement(case, "skipped", message=_clean(result.reason))
    if result.status == "failed":
        first = result.findings[0]
        failure = ElementTree.SubElement(
            case, "failure", type=first["oracle"], message=_clean(f"{first['oracle']}: {first['message']}")
        )
        lines = [f"{f['step']}: {f['oracle']}: {f['message']}" for f in result.findings]
        failure.text = _clean("\n".join([*lines, f"reproduce: {command(result, session.request)}"]))


def _clean(text: str) -> str:
    return _UNPRINTABLE.sub("?", text)
