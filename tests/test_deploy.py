"""The files of deploy/: what an operator relies on is in them, since neither Docker, nor a cluster,
nor systemd runs here.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxpage import __version__
from jaxpage.cli.parsers import make_parser
from jaxpage.serving.settings.server_config import ServerConfig

DEPLOY = Path(__file__).parents[1] / "deploy"
ROOT = DEPLOY.parent
OBJECTS: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
GRACE_SECONDS = ServerConfig().shutdown_timeout_seconds


def workloads() -> Iterator[tuple[str, dict[str, Any]]]:
    for each in OBJECTS:
        if each["kind"] in ("Deployment", "StatefulSet"):
            yield each["metadata"]["name"], each["spec"]


@pytest.mark.parametrize(("name", "spec"), [*workloads()], ids=lambda value: str(value)[:12])
def test_each_workload_of_the_cluster_has_what_an_operator_relies_on(name, spec):
    pod = spec["template"]["spec"]
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    [container] = pod["containers"]
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    resources = container["resources"]
    assert {*resources["requests"]} == {"cpu", "memory"} and "memory" in resources["limits"]
    assert "gpu" not in str(resources), "nodes have no GPU by default"
    ports = {port["name"] for port in container["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] in ports, f"{probe} of {name}"
    [sleep, seconds] = container["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    assert int(seconds) + GRACE_SECONDS < pod["terminationGracePeriodSeconds"]
    assert "pip install" not in str(container), "an image has its programs"
    claims = {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", [])}
    volumes = claims | {volume["name"] for volume in pod["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert {*mounts} == volumes and mounts["tmp"] == "/tmp"


def test_the_servers_of_the_cluster_keep_their_caches_and_are_found():
    specs = dict(workloads())
    spec = specs["jaxpage"]
    [container] = spec["template"]["spec"]["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert variables["XDG_CACHE_HOME"] == mounts["cache"]
    assert variables["HF_HOME"].startswith(mounts["cache"])
    parsed = make_parser().parse_args(container["command"][1:])
    assert parsed.port == container["ports"][0]["containerPort"]
    services = {
        each["metadata"]["name"]: each["spec"] for each in OBJECTS if each["kind"] == "Service"
    }
    assert services[spec["serviceName"]]["selector"] == spec["selector"]["matchLabels"]
    [router] = specs["vllm-router"]["template"]["spec"]["containers"]
    words = dict(zip(router["command"], router["command"][1:], strict=False))
    label, _, value = words["--selector"].partition("=")
    assert spec["template"]["metadata"]["labels"][label] == value
    assert words["--service-discovery-port"] == str(parsed.port)
    assert services["jaxpage"]["selector"] == specs["vllm-router"]["selector"]["matchLabels"]


def test_images_have_pinned_versions_and_say_their_own():
    text = (DEPLOY / "Dockerfile").read_text()
    assert f"ARG VERSION={__version__}\n" in text
    assert 'org.opencontainers.image.version="$VERSION"' in text
    copied = re.findall(r"^COPY (?!--from)(\S+) (\S+)$", text, re.M)
    assert all((ROOT / source).exists() for source, _ in copied)
    [constraints] = [path for source, path in copied if source == "constraints/py312.txt"]
    installs = [line for line in text.splitlines() if "pip install" in line and line[0] != "#"]
    assert len(installs) == 1 and f"-c {constraints} " in installs[0]
    router = (DEPLOY / "router.Dockerfile").read_text()
    [packages] = re.findall(r"^RUN pip install --no-cache-dir (.*?) &&", router, re.M)
    assert all("==" in package for package in packages.split())
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    build = services["router"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
    assert "pip" not in str(services["router"])


SERVER = """
import http.server, socket, sys

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(int(sys.argv[1]) if self.path == "/health" else 404)
        self.end_headers()

events = socket.create_server(("127.0.0.1", 0))  # nobody accepts there, as long as it lives
server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
print("ready", flush=True)
server.serve_forever()
"""


@pytest.mark.parametrize(("status", "expected"), [(200, 0), (503, 1)])
def test_the_health_check_finds_the_port_of_the_server(status, expected):
    """The port may be any, and the process may listen on others."""
    text = (DEPLOY / "Dockerfile").read_text()
    [place] = re.findall(r"^COPY deploy/healthcheck.py (\S+)$", text, re.M)
    assert re.search(rf'^HEALTHCHECK .* CMD \["python", "{place}"\]$', text, re.M)
    command = [sys.executable, "-c", SERVER, str(status)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        assert server.stdout is not None and server.stdout.readline() == b"ready\n"
        check = [sys.executable, str(DEPLOY / "healthcheck.py"), str(server.pid)]
        assert subprocess.run(check, check=False, timeout=60).returncode == expected
        server.kill()


def unit() -> ConfigParser:
    parser = ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "jaxpage.service")
    return parser


def test_the_unit_starts_the_server_and_keeps_its_caches():
    service = unit()["Service"]
    start = shlex.split(service["ExecStart"])
    parsed = make_parser().parse_args(start[1:])
    assert parsed.config in shlex.split(service["ExecStartPre"])
    assert int(service["TimeoutStopSec"]) > GRACE_SECONDS
    variables = dict(pair.split("=", 1) for pair in service["Environment"].split())
    assert variables["JAXPAGE_CACHE_DIR"] == f"/var/cache/{service['CacheDirectory']}"
    assert service["DynamicUser"] == service["NoNewPrivileges"] == "yes"
    assert "MemoryDenyWriteExecute" not in service, "XLA writes code and runs it"


def test_systemd_understands_the_unit(tmp_path):
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not here")
    path = tmp_path / "jaxpage.service"
    text = (DEPLOY / "jaxpage.service").read_text()
    path.write_text(text.replace("/opt/jaxpage/bin/jaxpage", "/bin/true"))
    done = subprocess.run(
        [program, "verify", path], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0 and "jaxpage.service" not in done.stderr, done.stderr
    path.write_text(path.read_text().replace("CacheDirectory=", "CashDirectory="))
    done = subprocess.run(
        [program, "verify", path], capture_output=True, text=True, check=False, timeout=60
    )
    assert "CashDirectory" in done.stderr, "a mistake would be seen"
