"""What lies in deploy/ speaks of things that exist: flags, paths, metrics."""

from __future__ import annotations

import argparse
import configparser
import json
import pathlib
import re
import shlex
from typing import Any

import pytest
import yaml

import trireme
from trireme.api.operation.metrics import Metrics
from trireme.cli.serve import add_arguments
from trireme.command.flags import config_from
from trireme.config import ServeOptions, resolve
from trireme.errors import BadConfig
from trireme.ipc.switchboard import Switchboard
from trireme.serve.client import State
from trireme.serve.replica import Replica

DEPLOY = pathlib.Path(__file__).parents[2] / "deploy"
PROBES = {"/live", "/ready", "/health"}


def served(words: list[str]) -> ServeOptions:
    """What `trireme serve` makes of these words; an unknown flag ends the test."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    return config_from(parser.parse_args(words)).serve


@pytest.fixture(scope="module")
def exported() -> str:
    metrics = Metrics("trireme", "m")
    for name, labels in (("request_success", ("stop",)), ("request_aborted", ("error",)), ("request_rejected", ("overload",))):
        metrics.count(name, 1, *labels)
    metrics.generated(0.0, 1, 0.01)
    for name in ("prompt_tokens", "prompt_tokens_cached"):
        metrics.count(name, 1)
    numbers = ("running", "waiting", "pages_total", "pages_owned", "cache_queries", "cache_hits", "steps", "tokens_scheduled")
    return metrics.exposition(dict.fromkeys(numbers, 1), State("ready", ages={"router": 0.1})).decode()


def expressions(node: Any) -> list[str]:
    """Every query in a dashboard."""
    if isinstance(node, dict):
        return [value for key, value in node.items() if key == "expr"] + [e for value in node.values() for e in expressions(value)]
    return [e for value in node for e in expressions(value)] if isinstance(node, list) else []


def test_grafana_asks_for_metrics_and_labels_that_are_exported(exported: str) -> None:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    queries = expressions(dashboard["panels"])
    assert len(queries) > 20
    for query in queries:
        names = re.findall(r"\$\{prefix\}:(\w+)", query)
        assert names, query
        for name in names:
            lines = re.findall(rf"^trireme:{name}(?:{{(.*)}})? ", exported, re.M)
            assert lines, f"nothing is exported as {name}: {query}"
            wanted = [label for label in re.findall(r"by \((\w+)\)", query) if label != "le"]
            wanted += ["le"] if name.endswith("_bucket") else []
            wanted += ["model_name"] if "model_name" in query else []
            assert all(f'{label}="' in lines[0] for label in wanted), (query, lines[0])


def test_documented_metrics_are_exported(exported: str) -> None:
    text = (DEPLOY.parent / "docs" / "metrics.md").read_text()
    for name in re.findall(r"trireme:(\w+)", text):
        assert re.search(rf"^trireme:{name}[{{ ]", exported, re.M), name


def test_every_number_that_is_documented_is_exported_even_while_the_model_is_unloaded() -> None:
    replica = Replica(resolve({}, environ={}), Switchboard(), lambda path, heard: None, DEPLOY)  # type: ignore[arg-type,return-value]
    metrics = Metrics("trireme", "m")
    metrics.count("http_requests", 1, "/v1/chat/completions", "200")
    exported = metrics.exposition(replica.stats(), State("sleeping"), backend="cpu", dtype="float32").decode()
    table = (DEPLOY.parent / "docs" / "metrics.md").read_text().partition("| name |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`[^|]*) \| (gauge|counter|histogram) ", table, re.M)
    assert len(rows) > 20
    for cell, kind in rows:
        first, *others = re.findall(r"`(\w+)", cell)
        names = [first, *(first.rpartition("_")[0] + name if name.startswith("_") else name for name in others)]
        for name in names:
            family = name.removesuffix("_total") if kind == "counter" else name
            assert re.search(rf"^# TYPE trireme:{family}(_total)? {kind}$", exported, re.M), name
    assert re.search(r'^trireme:http_requests_total{.*route="/v1/chat/completions",status="200"} 1', exported, re.M)
    assert "_created" not in exported
    build = re.search(r'^trireme:build_info{.*backend="cpu".*} 1', exported, re.M)
    assert build and f'version="{trireme.__version__}"' in build[0]
    assert "trireme:worker_restarts_total" in exported and "trireme:num_requests_running{" in exported


def test_kubernetes_starts_what_exists() -> None:
    claim, deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    args = served(["--host", "0.0.0.0", *container["args"]])
    assert pod["terminationGracePeriodSeconds"] > args.drain_timeout
    assert {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")} <= PROBES
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready", "a pod that loads takes no traffic"
    assert container["livenessProbe"]["httpGet"]["path"] == "/live", "a pod that loads is not killed for it"
    assert service["spec"]["selector"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert pod["enableServiceLinks"] is False and container["imagePullPolicy"] == "IfNotPresent"
    patch = yaml.safe_load((DEPLOY / "kubernetes-gpu.yaml").read_text())["spec"]["template"]["spec"]["containers"][0]
    assert patch["name"] == container["name"] and "nvidia.com/gpu" in patch["resources"]["limits"]


def test_the_variables_that_kubernetes_sets_are_no_settings(capsys: pytest.CaptureFixture[str]) -> None:
    links = {
        "TRIREME_PORT": "tcp://10.0.0.1:80",
        "TRIREME_SERVICE_HOST": "10.0.0.1",
        "TRIREME_SERVICE_PORT": "80",
        "TRIREME_SERVICE_PORT_HTTP": "80",
        "TRIREME_PORT_80_TCP": "tcp://10.0.0.1:80",
        "TRIREME_PORT_80_TCP_PROTO": "tcp",
        "TRIREME_PORT_80_TCP_PORT": "80",
        "TRIREME_PORT_80_TCP_ADDR": "10.0.0.1",
        "TRIREME_GPU_SERVICE_HOST": "10.0.0.2",
        "TRIREME_GPU_PORT": "tcp://10.0.0.2:80",
    }
    assert resolve({}, environ={**links, "TRIREME_MAX_RUNNING": "7"}).schedule.max_running == 7
    assert capsys.readouterr().err.count("\n") == 1
    assert resolve({}, environ={"TRIREME_PORT": "9000"}).serve.port == 9000
    with pytest.raises(BadConfig, match="Unknown setting 'ports'"):
        resolve({}, environ={"TRIREME_PORTS": "80"})


def test_compose_starts_what_exists() -> None:
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["trireme"]
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).exists()
    args = served(["--host", "0.0.0.0", *service["command"]])
    assert int(service["stop_grace_period"].removesuffix("s")) > args.drain_timeout
    assert service["ports"] == [f"127.0.0.1:{args.port}:{args.port}"]


def test_systemd_starts_what_exists() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string((DEPLOY / "trireme.service").read_text())
    _, command, *words = shlex.split(unit["Service"]["ExecStart"])
    assert command == "serve"
    assert int(unit["Service"]["TimeoutStopSec"]) > served(words).drain_timeout
    assert unit["Service"]["Type"] == "notify"
    port = configparser.ConfigParser(interpolation=None)
    port.read_string((DEPLOY / "trireme.socket").read_text())
    assert int(port["Socket"]["ListenStream"]) == served(words).port


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_docker_starts_what_exists(name: str) -> None:
    text = (DEPLOY / name).read_text()
    lists = {word: json.loads(found) for word, found in re.findall(r"^(ENTRYPOINT|CMD) (\[.*\])$", text, re.M)}
    assert lists["ENTRYPOINT"][:2] == ["trireme", "serve"]
    args = served([*lists["ENTRYPOINT"][2:], *lists["CMD"]])
    assert f"EXPOSE {args.port}" in text and re.search(rf"127\.0\.0\.1:{args.port}(/\w+)", text)[1] in PROBES  # type: ignore[index]
    for line in re.findall(r"^COPY (.*) \S+$", text, re.M):
        assert all((DEPLOY.parent / copied).exists() for copied in line.split()), line
