"""Real clients, unchanged, in conversations with tools against a model that follows a script.

Each is a program of `tests/clients/`: five questions, eight calls of a tool, twelve answers of the
model, whole and streamed. OpenAI's, Anthropic's and Ollama's clients run here; the others have
environments of their own, which `install_agent_clients` of `.ci/common.sh` makes in the directory
that `AGENT_CLIENTS` names: `.ci/nightly` runs them all.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.conversation import CALLS, REASONING, TEXTS
from tests.support.agent_server import AgentServer, agent_server

DRIVERS = Path(__file__).parent / "clients"
DIRECTORY = os.environ.get("AGENT_CLIENTS")
PATHS = {
    "chat": "/v1/chat/completions",
    "compatible": "/v1/chat/completions",
    "responses": "/v1/responses",
    "responses-stored": "/v1/responses",
    "messages": "/v1/messages",
    "ollama": "/api/chat",
}


@dataclass(frozen=True)
class Client:
    """A driver, its environment below `DIRECTORY` ("" for the one of the tests), and its routes."""

    driver: str
    environment: str
    routes: tuple[str, ...]
    has_stable_prompts: bool = True  # what it sends back does not depend on how an answer came

    def command(self, directory: Path) -> list[str]:
        """Returns the beginning of the command line; it skips the test if that cannot run.

        Args:
            directory: An empty directory for what the command needs.
        """
        if not self.environment:
            return [sys.executable, str(DRIVERS / self.driver)]
        if DIRECTORY is None:
            pytest.skip("AGENT_CLIENTS names no directory with environments of agents' clients")
        there = Path(DIRECTORY) / self.environment
        if not there.is_dir():
            pytest.skip(f"there is no {self.environment} in {DIRECTORY}")
        if self.environment != "node":
            return [str(there / "bin" / "python"), str(DRIVERS / self.driver)]
        if shutil.which("node") is None:
            pytest.skip("there is no node")
        # A module finds packages from its own place upwards.
        (directory / "node_modules").symlink_to(there / "node_modules")
        for name in ("conversation.mjs", self.driver):
            shutil.copy(DRIVERS / name, directory)
        return ["node", str(directory / self.driver)]


CLIENTS = [
    Client("drive_openai.py", "", ("chat", "responses", "responses-stored")),
    Client("drive_anthropic.py", "", ("messages",)),
    Client("drive_ollama.py", "", ("ollama",)),
    Client("drive_litellm.py", "litellm", ("chat", "messages", "ollama")),
    Client("drive_openai_agents.py", "openai-agents", ("chat", "responses")),
    Client("drive_pydantic_ai.py", "pydantic-ai-slim", ("chat", "responses", "messages")),
    # It reads no reasoning in streams of responses.
    Client("drive_langchain.py", "langchain", ("chat", "responses", "messages", "ollama"), False),
    # A tool of a stream has another name.
    Client("drive_instructor.py", "instructor", ("chat", "responses", "messages"), False),
    # It orders results by the ids of their calls.
    Client("drive_smolagents.py", "smolagents", ("chat",), False),
    Client("drive_llama_index.py", "llama-index-core", ("chat", "messages", "ollama")),
    Client("drive_ai_sdk.mjs", "node", ("chat", "compatible", "responses", "messages", "ollama")),
    Client("drive_openai.mjs", "node", ("chat", "responses")),
    Client("drive_anthropic.mjs", "node", ("messages",)),
    Client("drive_ollama.mjs", "node", ("ollama",)),
]
CASES = [
    pytest.param(client, route, stream, id=f"{client.driver} {route} {stream}")
    for client in CLIENTS
    for route in client.routes
    for stream in ("whole", "streamed")
]
# ChatOllama streams even where its whole answer is asked for.
ALWAYS_STREAMS = {("drive_langchain.py", "ollama")}


@dataclass
class Outcome:
    """Holds what a client had in the end, and what came to the server meanwhile."""

    printed: dict[str, Any]
    prompts: list[str]
    paths: list[tuple[str, bool]]


class Runs:
    """Runs each client once by each of its routes; both tests of a route look at the same run."""

    def __init__(self, server: AgentServer, directory: Path) -> None:
        self.server = server
        self._directory = directory
        self._runs: dict[tuple[Client, str], dict[str, Outcome]] = {}

    def outcome(self, client: Client, route: str, stream: str) -> Outcome:
        """Returns how it went, without or with streaming."""
        if (client, route) not in self._runs:
            directory = self._directory / f"{len(self._runs)}"
            directory.mkdir(exist_ok=True)
            self._runs[client, route] = self._run(client, route, client.command(directory))
        return self._runs[client, route][stream]

    def _run(self, client: Client, route: str, command: list[str]) -> dict[str, Outcome]:
        num_prompts, num_seen = len(self.server.device.prompts), len(self.server.seen)
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        finished = subprocess.run(
            [*command, self.server.address, route],
            capture_output=True,
            text=True,
            timeout=300,
            env=variables,
        )
        lines = [line for line in finished.stdout.splitlines() if line.startswith('{"stream"')]
        assert len(lines) == 2, finished.stdout[-2000:] + finished.stderr[-2000:]
        prompts = self.server.device.prompts[num_prompts:]
        seen = [seen for seen in self.server.seen[num_seen:] if seen.path == PATHS[route]]
        outcomes = {}
        for name, line in zip(("whole", "streamed"), lines, strict=True):
            streams = name == "streamed"
            half = slice(len(prompts) // 2, None) if streams else slice(len(prompts) // 2)
            paths = [(each.path, each.streams) for each in seen if each.streams == streams]
            outcomes[name] = Outcome(json.loads(line), prompts[half], paths)
        return outcomes


@pytest.fixture(scope="module")
def runs(tmp_path_factory, compiled_when_used):
    directory = tmp_path_factory.mktemp("clients")
    with agent_server(tmp_path_factory.mktemp("models") / "demo") as server:
        yield Runs(server, directory)
        assert server.errors == []


@pytest.mark.parametrize(("client", "route", "stream"), CASES)
def test_a_conversation_with_tools(runs, client, route, stream):
    """All calls run with their arguments, all texts come, and the model sees the same prompts in
    both ways.
    """
    outcome = runs.outcome(client, route, stream)
    assert "error" not in outcome.printed, outcome.printed["error"]
    # Some clients run the calls of one answer at the same time.
    assert sorted(map(str, outcome.printed["calls"])) == sorted(map(str, CALLS))
    forces_calls = client.driver == "drive_instructor.py"  # each answer is a call
    assert outcome.printed["texts"] == ([] if forces_calls else TEXTS)
    if "reasoning" in outcome.printed:
        assert outcome.printed["reasoning"] == REASONING
    num_answers = len(CALLS) if forces_calls else len(REASONING)
    if (client.driver, route) not in ALWAYS_STREAMS:
        assert outcome.paths == [(PATHS[route], stream == "streamed")] * num_answers
    if client.has_stable_prompts:
        assert outcome.prompts == runs.outcome(client, route, "whole").prompts


# Requests of the programs themselves, recorded with `agent_server --log` and shortened: the first
# one, that which follows the call, and others.
RECORDED = {
    "claude_code_exec_first": "Bash",
    "claude_code_exec_turn": None,
    "codex_exec_first": "exec_command",
    "continue_first": "Bash",
    "continue_turn": None,
    "copilot_first": "bash",
    "copilot_turn": None,
    "opencode_title": None,
    "opencode_first": "bash",
    "opencode_turn": None,
    "qwen_code_first": "run_shell_command",
    "qwen_code_turn": None,
}


@pytest.mark.parametrize(("name", "called"), RECORDED.items(), ids=RECORDED)
def test_a_recorded_request_of_an_agent(runs, name, called):
    """A template that takes one message of the system, at the beginning, shows it, and the answer
    has the call or no call.
    """
    recorded = json.loads(
        (DRIVERS.parent / "support" / "recorded_requests" / f"{name}.json").read_text()
    )
    prompts = runs.server.device.prompts
    num_prompts = len(prompts)
    answer = httpx.post(
        runs.server.address + recorded["path"],
        headers=recorded["headers"],
        json=recorded["body"],
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    assert len(prompts) == num_prompts + 1 and "note.txt" in prompts[-1]
    calls = re.findall(r'"name": ?"(\w+)"', re.sub(r'"response": ?\{.*', "", answer.text))
    assert set(calls) == ({called} if called else set())
