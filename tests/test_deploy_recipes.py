"""The recipes of docs/deploy: each is parsed, and what it says to this program is what this program knows."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.cli.commands import load
from orchestrator.domain.retention import Retention
from orchestrator.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "docs" / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))
GRACE = 20.0
INSTRUCTIONS = {
    *("FROM", "RUN", "CMD", "LABEL", "EXPOSE", "ENV", "ADD", "COPY", "ENTRYPOINT", "VOLUME", "USER", "WORKDIR", "ARG"),
    *("STOPSIGNAL", "HEALTHCHECK", "SHELL"),
}


def understood(command: list[str]) -> dict[str, Any]:
    """What the program makes of the arguments; a usage error for those that it does not know."""
    name, *args = command
    if name == "db":
        assert args == ["upgrade"]
        return {}
    return dict(load(name).make_context(name, args).params)


def port(text: str) -> int:
    """The number of ``[HOST:]PORT``."""
    return int(text.rpartition(":")[2])


def needed(given: dict[str, Any]) -> float:
    """The seconds that a supervisor has to give a process with these options."""
    return float(given.get("grace") or 0) + 10


# -- systemd ------------------------------------------------------------------------------------------------------


def unit(path: Path) -> dict[str, dict[str, list[str]]]:
    """The sections of a unit: each key with all its values."""
    sections: dict[str, dict[str, list[str]]] = {}
    current: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith("["):
            current = sections.setdefault(line.strip("[]"), {})
            continue
        key, equals, value = line.partition("=")
        assert equals, line
        assert key.isalnum(), line
        current.setdefault(key, []).append(value)
    return sections


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_units(path: Path) -> None:
    """Options that exist, time enough to drain, a home that outlives the process, and no restart that cannot help."""
    found = unit(path)
    assert set(found) == {"Unit", "Service", "Install"}
    service = found["Service"]
    env, program, *args = shlex.split(service["ExecStart"][0])
    assert (env, program) == ("/usr/bin/env", "orchestrator")
    given = understood(args)
    stop = float(service["TimeoutStopSec"][0])
    assert stop >= needed(given)
    assert set(service["RestartPreventExitStatus"][0].split()) == {"2", "6"}
    homes = [value for value in service["Environment"] if value.startswith("ORCHESTRATOR_HOME=")]
    assert homes == [f"ORCHESTRATOR_HOME=/var/lib/{service['StateDirectory'][0]}"]
    assert "ORCHESTRATOR_DATABASE_URL=" not in path.read_text(), "a URL has a password in it"


def test_the_units_of_one_host_share_no_port() -> None:
    """A worker and a watchdog run side by side as they stand."""
    ports = [
        port(value)
        for path in UNITS
        for key, value in understood(shlex.split(unit(path)["Service"]["ExecStart"][0])[2:]).items()
        if key in ("metrics_port", "health_port")
    ]
    assert len(ports) == len(set(ports)) == 4


def test_systemd_takes_the_units(test_folder: Path) -> None:
    """Its own check finds nothing to say; where it is not installed, there is nobody to ask."""
    program = shutil.which("systemd-analyze")
    if program is None:
        return
    for path in UNITS:
        copy = test_folder / path.name
        # The user and the environment file of the real host are not here.
        copy.write_text(re.sub(r"(?m)^(User|Group|EnvironmentFile)=.*\n", "", path.read_text()))
        answer = subprocess.run(
            [program, "verify", "--man=no", str(copy)], capture_output=True, text=True, timeout=60, check=False
        )
        assert (answer.returncode, path.name in answer.stderr) == (0, False), answer.stderr


# -- containers ---------------------------------------------------------------------------------------------------


def dockerfile() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, continued lines joined."""
    text = re.sub(r"(?m)^\s*#.*\n", "", (DEPLOY / "Dockerfile").read_text()).replace("\\\n", " ")
    pairs = [line.strip().partition(" ") for line in text.splitlines() if line.strip()]
    return [(word, rest.strip()) for word, _, rest in pairs]


def test_the_dockerfile() -> None:
    """Known instructions, no root at the end, files that exist, a command and a health check that belong together."""
    found = dockerfile()
    assert found[0][0] == "FROM"
    assert {word for word, _ in found} <= INSTRUCTIONS
    last = dict(found)
    assert last["USER"] == "orchestrator"
    given = understood(json.loads(last["CMD"]))
    assert json.loads(last["ENTRYPOINT"])[-1] == "orchestrator"
    assert f"127.0.0.1:{port(given['health_port'])}/live" in last["HEALTHCHECK"]
    assert last["EXPOSE"].split() == [str(port(given[key])) for key in ("metrics_port", "health_port")]
    for name in re.findall(r"-r (\S+)", (DEPLOY / "Dockerfile").read_text()):
        assert (ROOT / name).exists()
    stages = re.findall(r"(?m)^FROM \S+ AS (\w+)$", (DEPLOY / "Dockerfile").read_text())
    assert re.findall(r"--from=(\w+)", (DEPLOY / "Dockerfile").read_text()) == stages


def test_compose() -> None:
    """Workers wait for the upgrade, and that for the database; commands are known; nothing is lost at the end."""
    found = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = found["services"]
    assert set(services) == {"db", "upgrade", "watchdog", "worker"}
    assert services["upgrade"]["depends_on"]["db"]["condition"] == "service_healthy"
    for name in ("watchdog", "worker"):
        assert services[name]["depends_on"]["upgrade"]["condition"] == "service_completed_successfully"
        assert float(services[name]["stop_grace_period"].rstrip("s")) >= GRACE + 10
    for service in services.values():
        if "command" in service:
            understood(service["command"])
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in found["volumes"]
    build = services["worker"]["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).exists()


# -- Kubernetes ---------------------------------------------------------------------------------------------------

MANIFESTS = {
    "Job": "batch/v1",
    "StatefulSet": "apps/v1",
    "Deployment": "apps/v1",
    "Service": "v1",
}


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def pods() -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Every object that has pods: itself, the pod's spec, its one container."""
    for each in manifests():
        if each["kind"] != "Service":
            pod = each["spec"]["template"]["spec"]
            (container,) = pod["containers"]
            yield each, pod, container


def test_kubernetes_objects() -> None:
    """Known kinds in their versions, named, and selectors that find the pods that they are for."""
    found = manifests()
    assert len({(each["kind"], each["metadata"]["name"]) for each in found}) == len(found)
    labels = [each["spec"]["template"]["metadata"]["labels"] for each in found if "template" in each["spec"]]
    for each in found:
        assert MANIFESTS[each["kind"]] == each["apiVersion"]
        selector = each["spec"].get("selector")
        if each["kind"] in ("StatefulSet", "Deployment"):
            assert selector["matchLabels"] == each["spec"]["template"]["metadata"]["labels"]
        elif each["kind"] == "Service":
            assert selector in labels
    (sets,) = (each for each in found if each["kind"] == "StatefulSet")
    assert sets["spec"]["serviceName"] in {each["metadata"]["name"] for each in found if each["kind"] == "Service"}


def test_kubernetes_pods() -> None:
    """Known options, probes at the port that is served, time to drain, mounts with volumes, and no needless rights."""
    for each, pod, container in pods():
        given = understood(container["args"])
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        assert "limits" in container["resources"]
        (url,) = (entry for entry in container["env"] if entry["name"] == "ORCHESTRATOR_DATABASE_URL")
        assert "secretKeyRef" in url["valueFrom"]
        if not given:
            assert pod["restartPolicy"] == "Never"
            continue
        assert pod["terminationGracePeriodSeconds"] >= needed(given)
        ports = {entry["name"]: entry["containerPort"] for entry in container["ports"]}
        assert ports == {"metrics": port(given["metrics_port"]), "health": port(given["health_port"])}
        assert given["health_port"].startswith("0.0.0.0:"), "a kubelet asks from outside"
        paths = {"livenessProbe": "/live", "readinessProbe": "/ready", "startupProbe": "/live"}
        for probe, path in paths.items():
            if probe in container:
                assert container[probe]["httpGet"] == {"path": path, "port": "health"}
        assert {"livenessProbe", "readinessProbe"} <= set(container)
        volumes = {volume["name"] for volume in pod["volumes"]}
        volumes |= {claim["metadata"]["name"] for claim in each["spec"].get("volumeClaimTemplates", ())}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        scraped = each["spec"]["template"]["metadata"]["annotations"]
        assert scraped["prometheus.io/port"] == str(ports["metrics"])


# -- all of them --------------------------------------------------------------------------------------------------


def test_the_configuration_is_valid() -> None:
    """The shared file is read as it stands, and its retention keeps failures longest and transcripts shortest."""
    settings = Settings.load(DEPLOY / "orchestrator.toml", env={})
    kept = Retention.read(settings.retention)
    assert (kept.transcripts or 0) < (kept.done or 0) < (kept.failed or 0)
    assert "database_url" not in tomllib.loads((DEPLOY / "orchestrator.toml").read_text())


def test_every_recipe_is_listed_and_linked() -> None:
    """The list names each file and no other; README and operations lead to it."""
    listed = set(re.findall(r"\]\(([\w.-]+)\)", (DEPLOY / "README.md").read_text()))
    assert listed == {path.name for path in DEPLOY.iterdir()} - {"README.md"}
    assert "docs/deploy" in (ROOT / "README.md").read_text()
    assert "deploy/README.md" in (ROOT / "docs" / "operations.md").read_text()
