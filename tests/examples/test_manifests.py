"""The files for Docker Compose and Kubernetes: their own schemas take them, and they name what is there."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_aiter_mla.commands.main import app

ROOT = Path(__file__).parents[2]
COMPOSE, KUBERNETES = ROOT / "examples" / "compose.yaml", ROOT / "examples" / "kubernetes.yaml"
JIT = "/usr/local/lib/python3.12/dist-packages/aiter/jit"
"""Where vLLM's image has AITER's folder, as others report it."""


def needs(package: str) -> pytest.MarkDecorator:
    """Skip a test without a package of requirements/extra.lock; in CI it fails."""
    there = importlib.util.find_spec(package) is not None or "CI" in os.environ
    return pytest.mark.skipif(not there, reason=f"{package} is not installed; install it with: make extras")


def told(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=os.environ | environment, text=True, capture_output=True, check=False)


def schema_of_compose(path: Path) -> subprocess.CompletedProcess[str]:
    return told(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path))


def schema_of_kubernetes(path: Path) -> subprocess.CompletedProcess[str]:
    return told(sys.executable, "-m", "kubernetes_validate", "--strict", str(path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "path", "right", "wrong"),
    [
        pytest.param(schema_of_compose, COMPOSE, "shm_size:", "shm_sise:", marks=needs("check_jsonschema")),
        pytest.param(
            schema_of_kubernetes, KUBERNETES, "timeoutSeconds:", "timeout:", marks=needs("kubernetes_validate")
        ),
    ],
    ids=["compose", "kubernetes"],
)
def test_the_schema_takes_the_file_and_no_misspelt_key(
    check: Any, path: Path, right: str, wrong: str, tmp_path: Path
) -> None:
    done = check(path)
    assert done.returncode == 0, done.stdout + done.stderr
    spoilt = tmp_path / path.name
    spoilt.write_text(path.read_text().replace(right, wrong))
    done = check(spoilt)
    assert done.returncode == 1, "a misspelt key passes"
    assert wrong.rstrip(":") in done.stdout + done.stderr


@pytest.mark.skipif(
    shutil.which("docker") is None or told("docker", "compose", "version").returncode != 0,
    reason="Docker's plugin compose is not installed; the schema of compose files is compared in its place",
)
def test_docker_compose_reads_the_file() -> None:
    done = told("docker", "compose", "--file", str(COMPOSE), "config", "--quiet", TAG="v0.32.0")
    assert done.returncode == 0, done.stderr


def objects(kind: str) -> dict[str, dict[str, Any]]:
    found = [one for one in yaml.safe_load_all(KUBERNETES.read_text()) if one["kind"] == kind]
    return {one["metadata"]["name"]: one for one in found}


def test_every_name_in_the_manifest_leads_to_an_object() -> None:
    claims, services = objects("PersistentVolumeClaim"), objects("Service")
    used = set()
    for deployment in objects("Deployment").values():
        template = deployment["spec"]["template"]
        labels, pod = template["metadata"]["labels"], template["spec"]
        assert deployment["spec"]["selector"]["matchLabels"] == labels
        assert services["r1"]["spec"]["selector"].items() <= labels.items()
        volumes = {one["name"]: one for one in pod["volumes"]}
        used |= {one["persistentVolumeClaim"]["claimName"] for one in volumes.values() if "emptyDir" not in one}
        for container in (*pod["initContainers"], *pod["containers"]):
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys()
        (server,) = pod["containers"]
        ports = {port["name"] for port in server["ports"]}
        assert server["startupProbe"]["httpGet"]["port"] in ports
        assert services["r1"]["spec"]["ports"][0]["targetPort"] in ports
    assert used == claims.keys()


def differing(one: Any, other: Any, path: str = "") -> set[str]:
    """The paths of what differs between two manifests; of a list by the names of its entries, if they have some."""
    if isinstance(one, list) and isinstance(other, list) and all("name" in each for each in (*one, *other)):
        one, other = ({each["name"]: each for each in entries} for entries in (one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        names = one.keys() | other.keys()
        return set().union(*(differing(one.get(name), other.get(name), f"{path}.{name}") for name in names))
    return set() if one == other else {path}


def test_the_canary_differs_in_names_strict_mode_the_count_of_nan_and_when_it_is_ready() -> None:
    stable, canary = objects("Deployment").values()
    pod = ".spec.template.spec"
    server = f"{pod}.containers.vllm"
    assert differing(stable, canary) == {
        ".metadata.name", ".metadata.labels.track", ".spec.selector.matchLabels.track",
        ".spec.template.metadata.labels.track", f"{pod}.hostname",
        f"{pod}.volumes.cache.persistentVolumeClaim.claimName",
        f"{server}.args", f"{server}.env.VLLM_COMPUTE_NANS_IN_LOGITS", f"{server}.readinessProbe.httpGet",
        f"{server}.readinessProbe.exec", f"{server}.readinessProbe.periodSeconds",
        f"{server}.readinessProbe.timeoutSeconds",
    }  # fmt: skip


def test_the_canary_is_ready_by_a_command_that_there_is() -> None:
    """Its exit statuses: tests/cli/test_cli_status.py."""
    probe = objects("Deployment")["r1-canary"]["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]
    name, command = probe["exec"]["command"]
    assert name == "vllm-aiter-mla"
    assert command in {one.name or one.callback.__name__ for one in app.registered_commands}


def test_caches_outlive_a_container_in_both_files() -> None:
    """``VLLM_CACHE_ROOT``, Triton's, the models, and the folder into which AITER builds."""
    service = yaml.safe_load(COMPOSE.read_text())["services"]["r1"]
    mounted = [volume.split(":")[1] for volume in service["volumes"]]
    there = [(service["environment"], mounted)]
    for deployment in objects("Deployment").values():
        (server,) = deployment["spec"]["template"]["spec"]["containers"]
        variables = {one["name"]: one["value"] for one in server["env"]}
        there.append((variables, [mount["mountPath"] for mount in server["volumeMounts"]]))
    for variables, mounts in there:
        for folder in (*(variables[name] for name in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "HF_HOME")), JIT):
            assert any(Path(folder).is_relative_to(mount) for mount in mounts), folder
