"""The alerts and the dashboard: each reads what vLLM and the plugin export, and Prometheus's own tools take it."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import Any, NamedTuple

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
RULES = EXAMPLES / "prometheus-rules.yaml"
DASHBOARD = json.loads((EXAMPLES / "grafana-dashboard.json").read_text())
# In CI a missing tool fails: .ci/run, or the workflow, installs it.
PROMETHEUS = pytest.mark.skipif(
    shutil.which("promtool") is None and "CI" not in os.environ,
    reason="Prometheus is not installed; install it with: apt-get install prometheus",
)
CHILD = (sys.executable, "-m", "tests.examples.metrics_child")


class Served(NamedTuple):
    """A server's metrics: what they say, by scenario, and where they are."""

    scrapes: dict[str, str]
    port: int


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("metrics")
    with (folder / "log").open("w") as log:
        child = subprocess.Popen([*CHILD, str(folder)], cwd=ROOT, text=True, stdout=PIPE, stderr=log)
    try:
        assert child.stdout
        line = next((line for line in child.stdout if line.startswith("{")), "")  # vLLM logs there too
        assert line, (folder / "log").read_text()[-3000:]
        yield Served(**json.loads(line))
    finally:
        child.kill()
        child.communicate()


@pytest.fixture(scope="module")
def scrapes(served: Served) -> dict[str, str]:
    """What /metrics says, by scenario."""
    return served.scrapes


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return group["rules"]


def queries() -> dict[str, str]:
    """The dashboard's queries, with values in the place of its variables."""
    found = {
        f"{panel['title']} {one['refId']}": one["expr"] for panel in DASHBOARD["panels"] for one in panel["targets"]
    }
    return {
        name: expr.replace("$__rate_interval", "5s").replace("$model", "tiny|other") for name, expr in found.items()
    }


def names_in(expr: str) -> set[str]:
    """The metrics that an expression reads; vLLM's as vLLM names them."""
    of_vllm = {f"vllm:{name}" for name in re.findall(r'__name__=~"vllm\[:_\](\w+)"', expr)}
    return of_vllm | set(re.findall(r"(?:vllm|aiter_mla_|up\b)\w*", re.sub(r'"[^"]*"', "", expr)))


def exported(text: str) -> set[str]:
    families = text_string_to_metric_families(text)
    return {"up"} | {sample.name for family in families for sample in family.samples}


def promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_every_metric_is_one_that_vllm_or_the_plugin_exports(scrapes: dict[str, str]) -> None:
    """And the plugin exports none that nobody reads."""
    read = set().union(*map(names_in, [*queries().values(), *(rule["expr"] for rule in rules())]))
    there = exported(scrapes["all at once"])
    assert len(read) > 8
    assert {name for name in read if name.startswith("vllm:")} > {"vllm:corrupted_requests_total"}
    assert read - there == set()
    assert {name for name in there if name.startswith("aiter_mla_")} - read == set()


@PROMETHEUS
def test_promtool_takes_the_rules_and_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    promtool("check", "rules", str(RULES))
    asked = [{"record": f"asked:{number}", "expr": expr} for number, expr in enumerate(queries().values())]
    (tmp_path / "queries.yaml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": asked}]}))
    promtool("check", "rules", str(tmp_path / "queries.yaml"))


FIRES = {
    "without the plugin": {"AiterMlaMissing"},
    "healthy": set(),
    "a skipped layer": {"AiterMlaLayersSkipped"},
    "a skipped engine": {"AiterMlaLayersSkipped"},
    "an aborted kernel": {"AiterMlaKernelAborted"},
    "a rank that fell back": {"AiterMlaLayersSkipped", "AiterMlaRankFellBack"},
    "a rank with another kernel": {"AiterMlaRankFellBack"},
    "corrupted": {"VllmCorruptedRequests"},
    "all at once": {"AiterMlaLayersSkipped", "AiterMlaKernelAborted", "AiterMlaRankFellBack", "VllmCorruptedRequests"},
}


def series(text: str) -> Iterator[dict[str, str]]:
    """What Prometheus keeps of a server that says the same for half an hour, as promtool's tests spell it."""
    target = {"job": "vllm", "instance": "r1:8000"}
    yield {"series": "up" + labelled(target), "values": "1x30"}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield {"series": sample.name + labelled(sample.labels | target), "values": f"{sample.value}x30"}


def labelled(labels: dict[str, str]) -> str:
    return "{" + ",".join(f"{name}={json.dumps(value)}" for name, value in labels.items()) + "}"


def fires(scrapes: dict[str, str], folder: Path) -> None:
    """In each scenario its alerts fire, and no other, after twenty minutes."""
    tests = [
        {
            "name": name,
            "interval": "1m",
            "input_series": list(series(scrapes[name])),
            "promql_expr_test": [
                {
                    "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                    "eval_time": "20m",
                    "exp_samples": [{"labels": f'{{alertname="{one}"}}', "value": 1} for one in sorted(alerts)],
                }
            ],
        }
        for name, alerts in FIRES.items()
    ]
    path = folder / "test.yaml"
    path.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    promtool("test", "rules", str(path))


@pytest.mark.slow
@PROMETHEUS
@pytest.mark.parametrize("prefix", ["vllm:", "vllm_"])
def test_each_alert_fires_for_its_cause_and_for_no_other(scrapes: dict[str, str], tmp_path: Path, prefix: str) -> None:
    """Also where prometheus_client answers Prometheus 2, which names vLLM's metrics otherwise."""
    assert FIRES.keys() == scrapes.keys()
    assert set().union(*FIRES.values()) == {rule["alert"] for rule in rules()}
    fires({name: text.replace("vllm:", prefix) for name, text in scrapes.items()}, tmp_path)


@pytest.mark.slow
@PROMETHEUS
@pytest.mark.mutation
def test_mutation_a_metric_under_another_name_fires_no_alert_and_is_caught(
    scrapes: dict[str, str], tmp_path: Path
) -> None:
    renamed = {name: text.replace("aiter_mla_ranks", "aiter_mla_workers") for name, text in scrapes.items()}
    with pytest.raises(AssertionError, match="AiterMlaRankFellBack"):
        fires(renamed, tmp_path)


class Prometheus:
    """A running Prometheus, by its port."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, path: str, **query: str) -> Any:
        address = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        return json.loads(urllib.request.urlopen(address, timeout=10).read())["data"]

    def wait(self, why: str, found: Any) -> Any:
        """Return what ``found()`` returns once that is anything."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with suppress(OSError):
                if got := found():
                    return got
            time.sleep(0.5)
        raise AssertionError(why)


@pytest.fixture(scope="module")
def prometheus(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus, which scrapes vLLM's and the plugin's metrics, and itself: a server without the plugin."""
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    targets = [{"targets": [f"127.0.0.1:{served.port}", f"127.0.0.1:{port}"]}]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "vllm", "static_configs": targets}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        yield Prometheus(port)
    finally:
        process.terminate()
        process.wait(60)


@PROMETHEUS
@pytest.mark.slow
def test_prometheus_finds_a_value_for_every_query_of_the_dashboard(prometheus: Prometheus) -> None:
    def found(expr: str) -> bool:
        result = prometheus.ask("query", query=expr)["result"]
        return bool(result) and {one["value"][1] for one in result}.isdisjoint({"NaN", "+Inf"})

    for name, expr in queries().items():
        prometheus.wait(name, partial(found, expr))


@PROMETHEUS
@pytest.mark.slow
def test_prometheus_sees_every_alert_and_its_words_name_only_labels_that_it_has(prometheus: Prometheus) -> None:
    names = {rule["alert"] for rule in rules()}
    alerts: dict[str, dict[str, Any]] = {}

    def all_seen() -> bool:
        alerts.update({one["labels"]["alertname"]: one for one in prometheus.ask("alerts")["alerts"]})
        return alerts.keys() == names

    prometheus.wait(f"of {names} only {alerts.keys()}", all_seen)
    for rule in rules():
        words = " ".join(rule["annotations"].values())
        assert set(re.findall(r"\$labels\.(\w+)", words)) <= alerts[rule["alert"]]["labels"].keys()


def test_the_dashboard_is_whole() -> None:
    """Grafana cannot be installed here: this is what it would trip over."""
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert {panel["type"] for panel in panels} <= {"timeseries", "table"}
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells), "two panels lie on each other"
    assert max(x for x, _ in cells) < 24
    known = {f"${one['name']}" for one in DASHBOARD["templating"]["list"]} | {"$__rate_interval"}
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(DASHBOARD)))
    assert {f"${name}" for name in used} == known
    for panel in panels:
        assert panel["description"]
        assert len({one["refId"] for one in panel["targets"]}) == len(panel["targets"])
        assert {one["datasource"]["uid"] for one in (panel, *panel["targets"])} == {"${datasource}"}
