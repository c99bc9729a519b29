"""ServerConfig, where it comes from, the API keys, and what the start says before there is a
server.
"""

from __future__ import annotations

import gc
import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from jaxpage import cli
from jaxpage.cli.parsers import make_parser
from jaxpage.cli.setting_flags import ENGINE_FLAGS, SERVER_FLAGS
from jaxpage.errors import ConfigError, ModelNotFoundError
from jaxpage.serving import startup
from jaxpage.serving.http.listening import address_of, bind_socket
from jaxpage.serving.settings.key_sources import read_api_keys
from jaxpage.serving.settings.resolving import resolve_both
from jaxpage.serving.settings.server_config import ServerConfig
from jaxpage.serving.startup import StartUp, how_to_ask, model_names
from jaxpage.serving.wire.context import ModelContext
from jaxpage.settings.checked_settings import nearest_name
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.settings.sources import resolve_config

NO_COORDINATOR = (
    "coordinator: must be HOST:PORT with a port from 1 to 65534 (PORT + 1 is used too), or auto"
)
CONFIGS = Path(__file__).parents[1] / "configs"


def write(directory: Path, text: str) -> Path:
    path = directory / "server.yaml"
    path.write_text(text)
    return path


def resolve(
    path: Path | None = None, environment: dict[str, str] | None = None, **settings: Any
) -> ServerConfig:
    return resolve_both(path, {}, settings, environment=environment or {})[1].config


# ---- values


def test_it_is_closed_unless_somebody_opens_it():
    config = ServerConfig()
    assert (config.host, config.is_local, config.ui, config.log_requests) == (
        "127.0.0.1",
        True,
        False,
        False,
    )
    assert config.profile_directory is None and config.max_body_bytes == 4 * 2**20


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("port", 65536, "port: must be less than 65536, got 65536"),
        ("port", -1, "port: must be greater than or equal to 0, got -1"),
        ("port", "80", "port: must be a valid integer, got '80'"),
        ("port", True, "port: must be a valid integer, got True"),
        ("host", "", "host: must have at least 1 character, got ''"),
        ("served_model_name", ["a", "b c"], "served_model_name.1: must match pattern"),
        ("served_model_name", [], "served_model_name: must have a name"),
        ("served_model_name", ["a", "a"], "served_model_name: a name is given twice: a, a"),
        ("served_model_name", 5, "served_model_name: must be a valid tuple, got 5"),
        (
            "max_queued_requests",
            0,
            "max_queued_requests: must be greater than or equal to 1, got 0",
        ),
        ("request_timeout_seconds", 0, "request_timeout_seconds: must be greater than 0, got 0"),
        (
            "request_timeout_seconds",
            float("inf"),
            "request_timeout_seconds: must be a finite number, got inf",
        ),
        (
            "shutdown_timeout_seconds",
            -1.0,
            "shutdown_timeout_seconds: must be greater than or equal to 0, got -1.0",
        ),
        ("max_body_bytes", 2**40, "max_body_bytes: must be less than or equal to 1073741824"),
        (
            "tool_parser",
            "xml",
            (
                "tool_parser: must be 'auto', 'none', 'hermes', 'llama3_json', 'lfm2', 'granite' "
                "or 'minicpm5', got 'xml'"
            ),
        ),
        (
            "log_level",
            "loud",
            "log_level: must be 'debug', 'info', 'warning' or 'error', got 'loud'",
        ),
        ("log_json", "yes", "log_json: must be a valid boolean, got 'yes'"),
        (
            "max_body_bytes",
            4,
            "max_body_bytes: must be at least 1000 bytes, or an amount with a unit",
        ),
        (
            "max_body_bytes",
            "512B",
            "max_body_bytes: must be greater than or equal to 1024, got '512B'",
        ),
        ("ui_show_prompts", True, "ui_show_prompts: cannot be true while ui is false"),
        ("prot", 80, "prot: unknown setting; did you mean 'port'?"),
        ("kv_events", "localhost:5557", "kv_events: must be tcp://HOST:PORT, got 'localhost:5557'"),
        (
            "kv_events_replay",
            "tcp://a:65536",
            "kv_events_replay: must be tcp://HOST:PORT, got 'tcp://a:65536'",
        ),
        *(
            (
                "otlp_traces_endpoint",
                value,
                "otlp_traces_endpoint: must be the URL of OTLP over HTTP",
            )
            for value in (
                "http://localhost:4317",
                "grpc://localhost:4317/v1/traces",
                "localhost:4318/v1/traces",
                "http://user:secret@localhost:4318/v1/traces",
                "http://localhost:4318/v1/traces?a=b",
            )
        ),
        *(
            ("coordinator", value, f"{NO_COORDINATOR}, got {value!r}")
            for value in ("foo", ":1", "a:0", "a:65535")
        ),
    ],
)
def test_a_bad_value_is_refused_with_name_and_value(name, value, message):
    with pytest.raises(ConfigError) as error:
        ServerConfig(**{name: value})
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("host", "local"),
    [
        *(("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True)),
        *(("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("example.org", False)),
    ],
)
def test_which_addresses_are_this_machine_s_own(host, local):
    assert ServerConfig(host=host).is_local is local


@pytest.mark.parametrize("level", ["warning", "error"])
def test_what_no_log_would_show_is_not_asked_for(level):
    with pytest.raises(
        ConfigError, match=f"log_requests: cannot be true while log_level is '{level}'"
    ):
        ServerConfig(log_requests=True, log_level=level)
    assert ServerConfig(log_requests=True, log_level="debug").log_requests


# ---- sources


def test_a_wrong_setting_is_one_error_and_a_missing_one_has_no_origin():
    with pytest.raises(ConfigError) as wrong:
        resolve(num_hosts=2, coordinator="foo")
    assert str(wrong.value) == f"argument: {NO_COORDINATOR}, got 'foo'"
    with pytest.raises(ConfigError) as missing:
        resolve(num_hosts=2)
    assert str(missing.value) == "coordinator: is needed with num_hosts = 2: HOST:PORT of rank 0"
    assert ServerConfig(num_hosts=2, coordinator="[::1]:65534").coordinator == "[::1]:65534"


def test_precedence_and_origins(tmp_path):
    path = write(
        tmp_path,
        "model: demo\nserver:\n  port: 1\n  host: a.example\n  served_model_name: [x, y]\n  ui: true\n",
    )
    environment = {
        "JAXPAGE_PORT": "2",
        "JAXPAGE_HOST": "1e3",
        "JAXPAGE_LOG_JSON": "true",
        "JAXPAGE_API_KEY": "secret",
    }
    engine, server = resolve_both(
        path, {"seed": 5}, {"port": 3}, environment=environment, overrides_origin="by hand"
    )
    assert (server.config.port, server.origins["port"]) == (3, "by hand")
    assert (server.config.host, server.origins["host"]) == ("1e3", "JAXPAGE_HOST"), (
        "text settings are not parsed"
    )
    assert (server.config.ui, server.origins["ui"]) == (True, f"{path}:6")
    assert server.config.log_json and server.config.served_model_name == ("x", "y")
    assert server.origins["log_level"] == "built-in"
    assert engine.origins["model"] == f"{path}:1" and engine.config.seed == 5


def test_the_engine_leaves_the_server_s_section_to_the_server(tmp_path, monkeypatch):
    path = write(tmp_path, "max_num_seqs: 2\nserver:\n  port: 1\n")
    monkeypatch.setenv("JAXPAGE_PORT", "2")
    assert resolve_config(path).config == EngineConfig(max_num_seqs=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "port: 80\n",
            "server.yaml:1: port: this setting is the server's: write it below 'server:'",
        ),
        (
            "server:\n  model: demo\n",
            "server.yaml:2: model: this setting is the engine's: write it at the top level",
        ),
        ("server:\n  prot: 80\n", "server.yaml:2: prot: unknown setting; did you mean 'port'?"),
        (
            "server:\n\n  port: eighty\n",
            "server.yaml:3: port: must be a valid integer, got 'eighty'",
        ),
        ("server: 80\n", "server.yaml:1: server must be a mapping, not a single value"),
        ("server:\n  - port\n", "server.yaml:2: server must be a mapping, not a list"),
        (
            "server:\n  port: 1\n  port: 2\n",
            "server.yaml:3: 'port' is given twice, first in line 2",
        ),
        ("servers:\n  port: 1\n", "server.yaml:1: servers: unknown setting"),
    ],
)
def test_a_file_s_mistakes_are_reported_with_their_line(tmp_path, text, message):
    with pytest.raises(ConfigError) as error:
        resolve(write(tmp_path, text))
    assert message in str(error.value) and str(error.value).count("\n") == 0


def test_mistakes_in_the_environment():
    with pytest.raises(ConfigError, match="JAXPAGE_PORT: port: must be a valid integer, got 'abc'"):
        resolve(environment={"JAXPAGE_PORT": "abc"})
    with pytest.raises(
        ConfigError, match="JAXPAGE_LOG_LEVL: unknown setting; did you mean 'log_level'"
    ):
        resolve(environment={"JAXPAGE_LOG_LEVL": "info"})


def test_what_kubernetes_says_of_a_service_called_jaxpage_is_no_setting():
    environment = {
        "JAXPAGE_PORT": "tcp://10.0.0.1:8000",
        "JAXPAGE_SERVICE_HOST": "10.0.0.1",
        "JAXPAGE_SERVICE_PORT": "8000",
        "JAXPAGE_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "JAXPAGE_PORT_8000_TCP_PROTO": "tcp",
        "JAXPAGE_PORT_8000_TCP_PORT": "8000",
        "JAXPAGE_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    assert resolve(environment=environment) == ServerConfig()


def test_no_setting_of_one_is_taken_for_a_misspelt_one_of_the_other():
    """Both read the same variables, each its own."""
    for names, others in (
        (EngineConfig.model_fields, ServerConfig.model_fields),
        (ServerConfig.model_fields, EngineConfig.model_fields),
    ):
        assert not [name for name in names if nearest_name(name, others, cutoff=0.8)]


def test_flags_cover_every_setting():
    assert {flag.setting for flag in SERVER_FLAGS} == set(ServerConfig.model_fields)
    assert not {flag.setting for flag in SERVER_FLAGS} & {flag.setting for flag in ENGINE_FLAGS}


def test_config_show_is_a_file_that_loads_to_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAXPAGE_API_KEY", "do-not-show-me")
    words = [
        "--served-model-name",
        "a",
        "b",
        "--request-timeout-seconds",
        "none",
        "--max-body-bytes",
        "1MiB",
        "--ui",
    ]
    assert cli.main(["config", "show", "--block-size", "8", *words]) == 0
    shown = capsys.readouterr().out
    assert "do-not-show-me" not in shown
    engine, server = resolve_both(write(tmp_path, shown), {}, {}, environment={})
    assert engine.config == EngineConfig(block_size=8)
    assert server.config == ServerConfig(
        served_model_name=("a", "b"), request_timeout_seconds=None, max_body_bytes=2**20, ui=True
    )


def test_config_validate_tells_everything_at_once(tmp_path, monkeypatch, capsys):
    """The problems are in the file, in variables and in flags, of the engine and of the server."""
    lines = [
        "dtype: int3",
        "block_size: 13",
        "attention_backend: cuda",
        "port: 80",
        "server:",
        "  prot: 80",
    ]
    lines += ["  ui_show_prompts: true", "  model: demo"]
    path = write(tmp_path, "\n".join(lines) + "\n")
    monkeypatch.setenv("JAXPAGE_LOG_LEVL", "info")
    monkeypatch.setenv("JAXPAGE_SEED", "[")
    assert cli.main(["config", "validate", str(path), "--max-num-seqs", "0"]) == 2
    errors = capsys.readouterr().err.removeprefix("jaxpage: error: ").splitlines()
    assert sorted(line.partition(": ")[2].split(":")[0] for line in errors) == [
        *(
            "attention_backend",
            "block_size",
            "cannot be read as a value",
            "dtype",
            "max_num_seqs",
            "model",
            "port",
        ),
        *("prot", "ui_show_prompts", "unknown setting; did you mean 'log_level'?"),
    ]
    assert {line.split(": ")[0] for line in errors if line.startswith(str(path))} == {
        f"{path}:{number}" for number in (1, 2, 3, 4, 6, 7, 8)
    }


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_the_configs_of_the_repository_are_valid(path):
    resolve(path)
    assert path.read_text().startswith("# "), "a line on what it is for"


# ---- API keys


def test_keys_come_from_the_file_and_from_the_environment(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# of the team\nfirst\n\n  second  \nfirst\n")
    config = ServerConfig(api_key_file=str(path))
    assert read_api_keys(config, {"JAXPAGE_API_KEY": "third, second"}) == (
        "third",
        "second",
        "first",
    )
    assert read_api_keys(config, {}) == ("first", "second")
    assert read_api_keys(ServerConfig(), {}) == ()


@pytest.mark.parametrize(
    "content", ["", "\n# none\n", "two words\n", "ümlaut\n", "a\x00b\n", "\x7f\n", "k" * 2**17]
)
def test_a_source_without_a_usable_key_is_no_open_door(tmp_path, content):
    path = tmp_path / "keys"
    path.write_text(content)
    with pytest.raises(ConfigError) as error:
        read_api_keys(ServerConfig(api_key_file=str(path)), {})
    assert content.strip() == "" or content not in str(error.value), "keys are not told"
    if "\n# " not in content and len(content) < 100:
        with pytest.raises(ConfigError, match="JAXPAGE_API_KEY"):
            read_api_keys(ServerConfig(), {"JAXPAGE_API_KEY": content})


def test_a_key_file_that_cannot_be_read(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    os.mkfifo(tmp_path / "pipe")
    for name in ("missing", "", "binary", "pipe"):
        with pytest.raises(ConfigError, match="api_key_file"):
            read_api_keys(ServerConfig(api_key_file=str(tmp_path / name)), {})


# ---- before there is a server


def test_an_address_that_is_taken_is_known_before_a_model_is_loaded():
    with bind_socket(ServerConfig(port=0)) as listener:
        port = listener.getsockname()[1]
        assert address_of(listener) == f"http://127.0.0.1:{port}"
        with (
            pytest.raises(ConnectionRefusedError),
            socket.create_connection(("127.0.0.1", port), timeout=5),
        ):
            pass
        with (
            # by one that is starting as well
            pytest.raises(ConfigError, match="Address already in use"),
            bind_socket(ServerConfig(port=port)),
        ):
            pass
        listener.listen()
        program = (
            f"import sys; from jaxpage.cli import main; status = main(['serve', 'demo', '--port', '{port}'])\n"
            "print(sorted({'jax', 'numpy', 'transformers', 'starlette'} & set(sys.modules))); "
            "sys.exit(status)"
        )
        result = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
        )
    assert result.returncode == 2 and result.stdout == "[]\n", (
        "at once: before what takes seconds to import"
    )
    assert (
        result.stderr
        == f"jaxpage: error: cannot listen on 127.0.0.1 port {port}: Address already in use\n"
    )
    with (
        pytest.raises(ConfigError, match="cannot listen on 192.0.2.1 port 0: "),
        bind_socket(ServerConfig(host="192.0.2.1", port=0)),
    ):
        pass


def test_an_address_can_be_had_again_at_once():
    """A server closed its connections itself, which the system remembers for a while."""
    with bind_socket(ServerConfig(port=0)) as listener:
        port = listener.getsockname()[1]
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as `run_app` does
        listener.listen()
        with socket.create_connection(("127.0.0.1", port)) as client:
            listener.accept()[0].close()
            assert client.recv(1) == b""
    with bind_socket(ServerConfig(port=port)):
        pass


def test_a_unix_socket_that_was_left_is_replaced_and_nothing_else_is(tmp_path):
    path = tmp_path / "socket"

    def refusal(path: Path) -> str:
        with pytest.raises(ConfigError) as refused, bind_socket(ServerConfig(uds=str(path))):
            pass
        return str(refused.value).removeprefix(f"cannot listen on the Unix socket {path}: ")

    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        assert refusal(path) == "another program listens there"
    with bind_socket(ServerConfig(uds=str(path))) as listener:
        assert address_of(listener) == f"unix:{path}"
        assert refusal(path) == "another server uses it", "one that is starting"
    assert not path.exists()
    path.write_text("notes")
    assert refusal(path) == "it is a file of another kind" and path.read_text() == "notes"
    assert refusal(tmp_path / "no" / "socket") == "No such file or directory"
    long = tmp_path / ("x" * 120)
    assert refusal(long) == f"AF_UNIX path too long; the path has {len(str(long))} bytes"
    config = ServerConfig(uds=str(path))
    assert config.is_local
    for name, value in (("host", "0.0.0.0"), ("port", 1)):
        with pytest.raises(ConfigError, match=f"{name}: does not go with uds"):
            ServerConfig(uds=str(path), **{name: value})


@pytest.mark.parametrize("prefix", ["llm", "/", "/llm/", "//llm", "/l lm", "/a?b", "/%61", "/\n"])
def test_a_prefix_that_no_path_has_is_refused(prefix):
    with pytest.raises(ConfigError, match="root_path: must begin with / and not end with it"):
        ServerConfig(root_path=prefix)


@pytest.mark.parametrize("host", ["x" * 64 + ".example", "a..b"])
def test_a_host_that_is_no_name_is_one_line(host):
    with (
        pytest.raises(ConfigError, match="the host name cannot be resolved"),
        bind_socket(ServerConfig(host=host)),
    ):
        pass


def test_every_address_is_reported_as_one_that_can_be_asked():
    with bind_socket(ServerConfig(host="0.0.0.0", port=0)) as listener:
        assert address_of(listener).startswith("http://127.0.0.1:")


@pytest.mark.parametrize(
    ("host", "key", "warned"),
    [("0.0.0.0", None, True), ("0.0.0.0", "k", False), ("127.0.0.1", None, False)],
)
def test_a_door_that_is_open_to_everybody_is_reported(host, key, warned, monkeypatch, tmp_path):
    said: list[str] = []
    monkeypatch.setattr(startup.logs, "configure", lambda config: None)
    monkeypatch.setattr(
        startup.logger, "warning", lambda text, *arguments: said.append(text % arguments)
    )
    if key is not None:
        monkeypatch.setenv("JAXPAGE_API_KEY", key)
    with socket.socket() as listener, pytest.raises(ModelNotFoundError):
        startup.start(
            EngineConfig(model=str(tmp_path / "nowhere")), ServerConfig(host=host, port=0), listener
        )
    assert [text.split(":")[0] for text in said] == (["no API key"] if warned else [])


def test_garbage_collections_leave_out_what_the_start_has_made():
    """Otherwise a request with many lists makes Python look through 360,000 objects of imports,
    while all streams wait.
    """
    made_by_the_start = [[] for _ in range(1000)]
    before = gc.get_threshold()
    try:
        StartUp(as_records=True).ready("", "http://127.0.0.1:8000")
        assert gc.get_freeze_count() > len(made_by_the_start)
        assert not any(made is made_by_the_start[0] for made in gc.get_objects())
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


def test_what_clients_call_the_model(tmp_path):
    (tmp_path / "my-model").mkdir()
    assert model_names(EngineConfig(), ServerConfig()) == ("demo",)
    assert model_names(EngineConfig(model="organisation/name"), ServerConfig()) == (
        "organisation/name",
    )
    assert model_names(EngineConfig(model=f"{tmp_path}/my-model/"), ServerConfig()) == ("my-model",)
    assert model_names(EngineConfig(), ServerConfig(served_model_name=("a", "b"))) == ("a", "b")


def test_a_model_without_a_template_is_sent_completions():
    """It takes text where there is a tokenizer, and token ids where there is none.

    The body that is shown is JSON in a shell's quotes.
    """
    for tokenizer, prompt in ((SimpleNamespace(), "Once upon a time"), (None, [1, 2, 3])):
        context = ModelContext(
            model_names=("it's",), max_model_len=9, vocab_size=9, tokenizer=tokenizer
        )
        text = how_to_ask("http://h:1", context, has_keys=False, has_page=True)
        [curl] = [line for line in text.splitlines() if line.startswith("  curl")]
        words = shlex.split(curl)
        assert words[1] == "http://h:1/v1/completions" and "Bearer" not in curl
        assert json.loads(words[-1]) == {"model": "it's", "max_tokens": 32, "prompt": prompt}
        assert "http://h:1/ui/" in text and "client.completions.create(" in text
        text = how_to_ask("unix:/run/a b", context, has_keys=False, has_page=False)
        [curl] = [line for line in text.splitlines() if line.startswith("  curl")]
        words = shlex.split(curl)
        assert words[1:4] == ["--unix-socket", "/run/a b", "http://localhost/v1/completions"]
        assert "http_client=httpx.Client(transport=httpx.HTTPTransport(uds='/run/a b'))" in text


def test_the_image_has_the_kernels_for_cpus_and_the_servers_of_the_compose_file_use_it():
    """The image is not built here: its commands are read.

    An image without a compiler needs the kernels in the wheel.
    """
    root = Path(__file__).parents[1]
    dockerfile = (root / "deploy" / "Dockerfile").read_text()
    making, running = dockerfile.split("FROM python:3.12-slim")[1:]
    compiler, wheel = (
        making.index("apt-get install -y --no-install-recommends g++"),
        making.index("pip wheel"),
    )
    assert compiler < making.index("RUN JAXPAGE_BUILD_KERNELS=1") < wheel
    assert (
        "COPY --from=wheel /wheels /wheels" in running
        and '"$(ls /wheels/*.whl)[$EXTRAS]"' in running
    )
    entry = json.loads(
        next(line for line in running.splitlines() if line.startswith("ENTRYPOINT ")).partition(
            " "
        )[2]
    )
    services = yaml.safe_load((root / "deploy" / "compose.yaml").read_text())["services"]
    servers = [service for name, service in services.items() if name.startswith("server")]
    assert len(servers) == 2
    for server in servers:
        parsed = make_parser().parse_args([*entry[1:], *shlex.split(server["command"])])
        assert (parsed.host, parsed.kv_events) == ("0.0.0.0", "tcp://0.0.0.0:5557")
        assert (root / "deploy" / server["build"]["context"]).resolve() == root
        assert server["build"]["dockerfile"] == "deploy/Dockerfile"
