"""The gauge in a front end's registry, from what workers left: in subprocesses, as metrics are global state."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from vllm_aiter_mla.compat.patches import gauge as patch
from vllm_aiter_mla.status import gauge

pytest.importorskip("prometheus_client")

# vLLM's own logger needs an engine's config; what matters of it is where it is imported from, that it clears vllm:
# metrics first, and the class it makes gauges with.
STAND_IN = """
    from types import SimpleNamespace
    from prometheus_client import Gauge
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics
    class PrometheusStatLogger:
        _gauge_cls = Gauge
        def __init__(self, engine_indexes=(0,)):
            self.engine_indexes = engine_indexes
            self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(served_model_name="served"))
            unregister_vllm_metrics()
            Gauge(name="vllm:other", documentation="d")
"""
RECORDS = """
    one = {"rank": 0, "engaged": {"a": "aiter", "b": "aiter"}, "refused": {"c": ["x", "y"]}}
    two = {"rank": 1, "engaged": {"a": "aiter"}, "refused": {"b": ["x", "y"], "c": ["x", "y"]}}
"""
SHOWN = """
    from vllm.v1.metrics.prometheus import get_prometheus_registry
    from prometheus_client import generate_latest
    print("\\n".join(l for l in generate_latest(get_prometheus_registry()).decode().splitlines() if "aiter" in l))
"""


@pytest.fixture
def vllm_like(tmp_path: Path) -> Path:
    """A package of vLLM's module names and its real ``prometheus`` module's two functions."""
    folder = tmp_path / "vllm" / "v1" / "metrics"
    folder.mkdir(parents=True)
    for parent in (folder, folder.parent, folder.parent.parent):
        (parent / "__init__.py").write_text("")
    (folder / "loggers.py").write_text(textwrap.dedent(STAND_IN))
    (folder / "prometheus.py").write_text(
        textwrap.dedent("""
            import os
            from prometheus_client import REGISTRY, CollectorRegistry, multiprocess
            def get_prometheus_registry():
                if os.getenv("PROMETHEUS_MULTIPROC_DIR") is None:
                    return REGISTRY
                registry = CollectorRegistry()
                multiprocess.MultiProcessCollector(registry)
                return registry
            def unregister_vllm_metrics():
                for collector in list(REGISTRY._collector_to_names):
                    if getattr(collector, "_name", "").startswith("vllm:"):
                        REGISTRY.unregister(collector)
        """)
    )
    return tmp_path


def run(script: str, path: Path, **environment: str) -> str:
    env = {k: v for k, v in os.environ.items() if k not in (gauge.FOLDER, "PROMETHEUS_MULTIPROC_DIR")} | environment
    root = str(Path(gauge.__file__).parents[2])
    env["PYTHONPATH"] = os.pathsep.join([str(path), root])
    start = "import sys, os, subprocess\nfrom vllm_aiter_mla import gate\nfrom vllm_aiter_mla.status import gauge\n"
    done = subprocess.run(
        [sys.executable, "-c", start + textwrap.dedent(script)], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


WORKER = """
    code = "from vllm_aiter_mla.status import gauge\\n" + RECORDS_TEXT
    code += "gauge.publish(one); gauge.publish(two)"
    code += "\\nprint(flush=True); input()"
    worker = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    worker.stdout.readline()
"""
# A worker lives as long as its engine; this one ends when its standard input does.
SHUT_DOWN = "worker.communicate(b'\\n')\n"


def with_worker() -> str:
    return f"RECORDS_TEXT = {textwrap.dedent(RECORDS)!r}\n" + textwrap.dedent(WORKER)


def test_gauge_of_worker_processes_is_in_the_front_ends_registry(vllm_like: Path) -> None:
    script = "gate._show_gauge()\n" + with_worker()
    script += "from vllm.v1.metrics import loggers\nloggers.PrometheusStatLogger()\nloggers.PrometheusStatLogger()\n"
    shown = run(script + textwrap.dedent(SHOWN), vllm_like)
    assert 'vllm:aiter_mla_layers{engine="0",model_name="served",state="engaged"} 1.0' in shown
    assert 'vllm:aiter_mla_layers{engine="0",model_name="served",state="refused"} 2.0' in shown


def test_gauge_counts_no_worker_of_an_engine_that_was_shut_down(vllm_like: Path) -> None:
    """One process may build several engines, one after the other; workers of the first leave their files behind."""
    script = "gate._show_gauge()\n" + with_worker() + SHUT_DOWN
    script += "gauge.publish({'rank': 0, 'engaged': {'a': 'aiter'}, 'refused': {}})\n"
    script += "from vllm.v1.metrics import loggers\nloggers.PrometheusStatLogger()\n"
    shown = run(script + textwrap.dedent(SHOWN), vllm_like)
    assert 'vllm:aiter_mla_layers{engine="0",model_name="served",state="engaged"} 1.0' in shown
    assert 'vllm:aiter_mla_layers{engine="0",model_name="served",state="refused"} 0.0' in shown


def test_gauge_reaches_the_multiprocess_folder_of_several_api_servers(vllm_like: Path, tmp_path: Path) -> None:
    folder = tmp_path / "multi"
    folder.mkdir()
    script = "gate._show_gauge()\n" + with_worker()
    server = "from vllm_aiter_mla import gate; gate._show_gauge()\nfrom vllm.v1.metrics import loggers\n"
    server += "loggers.PrometheusStatLogger()"
    script += f"for _ in range(2): subprocess.run([sys.executable, '-c', {server!r}], check=True)\n"
    shown = run(script + textwrap.dedent(SHOWN), vllm_like, PROMETHEUS_MULTIPROC_DIR=str(folder))
    assert 'vllm:aiter_mla_layers{engine="0",model_name="served",state="engaged"} 1.0' in shown
    assert 'vllm:aiter_mla_layers{engine="0",model_name="served",state="refused"} 2.0' in shown


def test_gauge_with_metrics_off_imports_no_prometheus_client(vllm_like: Path) -> None:
    script = (
        textwrap.dedent(RECORDS) + "gate._show_gauge()\ngauge.publish(one)\nprint('prometheus_client' in sys.modules)"
    )
    assert run(script, vllm_like).strip() == "False"


def test_gauge_is_absent_where_no_worker_wrote(vllm_like: Path) -> None:
    script = "gate._show_gauge()\nfrom vllm.v1.metrics import loggers\nloggers.PrometheusStatLogger()\n"
    assert run(script + textwrap.dedent(SHOWN), vllm_like).strip() == ""


def test_gauge_hooks_a_module_that_is_loaded_already_and_only_once(vllm_like: Path) -> None:
    script = "from vllm.v1.metrics import loggers\ngate._show_gauge()\ngate._show_gauge()\n" + textwrap.dedent(RECORDS)
    script += "gauge.publish(one)\nloggers.PrometheusStatLogger()\n"
    assert 'state="engaged"} 2.0' in run(script + textwrap.dedent(SHOWN), vllm_like)


def test_gauge_of_a_declined_config_gives_way_to_the_workers_of_the_next_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(gauge.FOLDER, str(tmp_path))
    gauge.publish(
        {"rank": 0, "engaged": {}, "skipped": {"layer 0": ["dcp", ""], "layer 1": ["dcp", ""]}}, declined=True
    )
    assert gauge.layers_of("0") == {"engaged": 0, "skipped": 2}
    gauge.publish({"rank": 0, "engaged": {"a": "aiter", "b": "aiter"}, "skipped": {}})
    assert gauge.layers_of("0") == {"engaged": 2, "skipped": 0}


def test_gauge_of_several_engines_has_the_figures_of_each(vllm_like: Path) -> None:
    """Data-parallel engines: each is labelled as vLLM labels it, and one that wrote nothing has no figure."""
    script = "gate._show_gauge()\n" + textwrap.dedent(RECORDS)
    script += "gauge.publish(one | {'engine': '0'}); gauge.publish(two | {'engine': '1'})\n"
    script += "from vllm.v1.metrics import loggers\nloggers.PrometheusStatLogger((0, 1, 2))\n"
    shown = run(script + textwrap.dedent(SHOWN), vllm_like)
    figures = dict(re.findall(r'engine="(\d)",model_name="served",state="engaged"} (\S+)', shown))
    assert figures == {"0": "2.0", "1": "1.0"}


def test_gauge_of_what_a_step_saves_counts_each_layer_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ranks of a tensor-parallel group hold the same layers; what is not engaged saves nothing."""
    us = {1: {"vllm": 5.0, "aiter": 3.0}, 64: {"vllm": 6.5, "aiter": 7.0}}
    chosen = [[1, 1, "aiter"], [2, 64, "vllm"]]
    measured = [{"shape": "made up", "layers": ["a", "b", "c"], "chosen": chosen, "us": us}]
    monkeypatch.setenv(gauge.FOLDER, str(tmp_path))
    for rank in range(2):
        gauge.publish({"rank": rank, "engaged": {"a": "aiter", "b": "aiter"}, "skipped": {}, "measured": measured})
    assert gauge.saved_of("0") == {"1": 4.0, "64": 0.0}
    assert gauge.saved_of("1") == {}


@pytest.mark.parametrize(
    "wrong",
    [
        "no JSON",
        *(
            pytest.param(wrong, marks=pytest.mark.slow)
            for wrong in ("[]", '{"engaged": ["a"]}', '{"engaged": [], "refused": [], "engine": "0", "process": {}}')
        ),
    ],
)
def test_gauge_never_raises_into_vllm(vllm_like: Path, wrong: str) -> None:
    script = "gate._show_gauge()\nfrom pathlib import Path\n"
    script += f"(Path(os.environ[gauge.FOLDER]) / '1-0.json').write_text({wrong!r})\n"
    script += "from vllm.v1.metrics import loggers\nloggers.PrometheusStatLogger()\nprint('alive')\n"
    assert run(script + textwrap.dedent(SHOWN), vllm_like).strip() == "alive"


def test_gauge_leaves_no_half_file_of_a_status_that_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(gauge.FOLDER, str(tmp_path))
    for wrong in ({}, {"rank": 0, "engaged": [object()], "skipped": {}}):
        with pytest.raises((KeyError, TypeError)):
            gauge.publish(wrong)
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv(gauge.FOLDER, str(tmp_path / "gone"))
    gauge.publish({"rank": 0, "engaged": {}, "skipped": {}})
    assert not (tmp_path / "gone").exists()


def test_gauge_folder_goes_with_the_process_that_made_it(vllm_like: Path) -> None:
    folder = run("gate._show_gauge()\nprint(os.environ[gauge.FOLDER])", vllm_like).strip()
    assert not Path(folder).exists()


def test_gauge_hook_fits_the_installed_vllm() -> None:
    pytest.importorskip("vllm")
    from vllm.v1.metrics import loggers, ray_wrappers

    cls = loggers.PrometheusStatLogger
    # The module that the finder waits for, the method that is wrapped, and the class that gauges are made with.
    assert cls.__module__ == patch._LOGGERS
    assert "__init__" in vars(cls)
    assert {"name", "documentation", "labelnames", "multiprocess_mode"} <= set(_parameters(cls._gauge_cls))
    # What the labels are read from.
    for name in ("self.engine_indexes = ", 'labelnames = ["model_name", "engine"]', "model_config.served_model_name"):
        assert name in inspect.getsource(cls.__init__), name
    ray = ray_wrappers.RayPrometheusStatLogger
    assert "__init__" not in vars(ray)
    assert {"name", "documentation", "labelnames", "multiprocess_mode"} <= set(_parameters(ray._gauge_cls))


def _parameters(cls: type) -> tuple[str, ...]:
    return tuple(inspect.signature(cls).parameters)
