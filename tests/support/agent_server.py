"""A server whose model is a script that answers as an agent's model would: it calls tools, reads
their results, and then speaks.

Everything but the device is real: the HTTP server, the translation of each dialect, the chat
template, tokenizing, scheduling, the grammars, the detokenizer and the readers of calls. Only the
tokens that the device would draw are those of the script.

    python -m tests.support.agent_server --port 8123    # for trying a program by hand
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxpage.assembly import Built, build_engine
from jaxpage.decoding.grammars import matcher_of, source_of, tokenizer_of
from jaxpage.engine.engine import Engine
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.step.plan import StepPlan, StepResult
from tests.support.chat_templates import STRICT_QWEN
from tests.support.executables import SharedExecutables, when_used
from tests.support.running import Running, demo_with_template, serving

_MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", re.DOTALL)
_PLACES = re.compile(r"What is the weather in (.+?)\?")
_REPORT = re.compile(r"[A-Z][a-z]+: \w+ and \d+ degrees")
_REQUESTED_CALL = re.compile(r"Call the tool (\S+) with (\{.*?\})\.(?:\s|$)", re.DOTALL)
_REQUESTED_TEXT = re.compile(r"Answer with \[\[\[\n?(.*?)\]\]\]", re.DOTALL)
_THOUGHT = "<think>\n{}\n</think>\n\n"


@dataclass(frozen=True)
class Answer:
    """Holds what the model says: its thoughts, some words, and calls as (name, arguments)."""

    thought: str = ""
    words: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()

    @property
    def written_calls(self) -> list[str]:
        """Returns the calls in the model's form."""
        objects = [
            json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
            for name, arguments in self.calls
        ]
        return [f"<tool_call>\n{text}\n</tool_call>" for text in objects]

    def forms(self, *, thinks: bool) -> list[str]:
        """Returns the text in the forms that a grammar may ask for, the fullest first."""
        thought = _THOUGHT.format(self.thought) if thinks and self.thought else ""
        calls = self.written_calls
        whole = thought + "\n".join(filter(None, (self.words, *calls)))
        return [whole, thought + "\n".join(calls), "\n".join(calls), "".join(calls)]


def answer_to(prompt: str) -> Answer:
    """Returns what the model says next in the conversation that a prompt shows.

    It looks at the last message of the user that asks for something it knows, and at the results of
    tools since then:

    * "What is the weather in Rome and Oslo, then Lima?": it calls `get_weather` for Rome and Oslo
    in one answer, for Lima in the next, and then says what the results were. * "How many places was
    that?": it counts the results of the whole conversation. * "Call the tool Bash with {"command":
    "ls"}.": it calls it once, and then says what came back. * "Answer with [[[text]]]": it says the
    text.

    A tool `final_answer`, which some agents want called at the end, is called with what it would
    say.
    """
    messages = [(match[1], match[2]) for match in _MESSAGE.finditer(prompt)]
    tools = _tools_of(next((text for role, text in messages if role == "tools"), ""))
    place = max(
        (at for at, (role, text) in enumerate(messages) if role == "user" and _is_known(text)),
        default=None,
    )
    if place is None:
        return _close(Answer("Nothing is asked.", "Hello from the script."), tools)
    requested = messages[place][1]
    results = [
        text
        for role, text in messages[place + 1 :]
        if role == "tool" or (role == "user" and _REPORT.search(text))
    ]
    if match := _last(_PLACES, requested):
        return _weather(match[1], results, tools)
    if match := _last(_REQUESTED_CALL, requested):
        if not results and match[1] in tools:
            # Some programs quote what they are asked.
            arguments = match[2].replace('\\"', '"')
            return Answer(f"I need {match[1]}.", "I call it.", ((match[1], json.loads(arguments)),))
        said = f"{match[1]} said: {results[-1].strip()[:300]}" if results else f"no {match[1]} here"
        return _close(Answer("That is all.", said), tools)
    if match := _last(_REQUESTED_TEXT, requested):
        return _close(Answer("I know that.", match[1]), tools)
    num_places = len({report for _, text in messages for report in _REPORT.findall(text)})
    return _close(Answer("I count them.", f"Voilà: {num_places} places ✓"), tools)


def _is_known(text: str) -> bool:
    asks = (_PLACES, _REQUESTED_CALL, _REQUESTED_TEXT)
    return "How many places" in text or any(pattern.search(text) for pattern in asks)


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(reversed(list(pattern.finditer(text))), None)


def _tools_of(listed: str) -> dict[str, Any]:
    tools = [json.loads(line) for line in listed.splitlines() if line]
    functions = [tool.get("function", tool) for tool in tools]
    return {function["name"]: function for function in functions}


def _weather(places: str, results: list[str], tools: dict[str, Any]) -> Answer:
    """Returns the calls that are still to be made, or the reports."""
    reports = [report for text in results for report in _REPORT.findall(text)]
    num_known = 0
    for together in places.split(", then "):
        names = together.split(" and ")
        if num_known == len(reports):
            tool = next((name for name in tools if name.endswith("get_weather")), None)
            calls = tuple((tool, {"city": name}) for name in names if tool)
            return Answer(f"{together} first.", "Let me look.", calls)
        num_known += len(names)
    # Some clients send the results of one answer in an order of their own.
    reports.sort(key=lambda report: places.index(report.partition(":")[0]))
    return _close(Answer("I have them all.", f"Voilà: {'; '.join(reports)} ✓"), tools)


def _close(answer: Answer, tools: dict[str, Any]) -> Answer:
    if "final_answer" not in tools:
        return answer
    return Answer(answer.thought, calls=(("final_answer", {"answer": answer.words}),))


class ScriptedDevice:
    """Draws the tokens of the script in place of a device.

    Attributes:
        prompts: The text of each prompt that was answered, in order.
    """

    def __init__(self, engine: Engine) -> None:
        assert engine.tokenizer is not None
        self.prompts: list[str] = []
        self._engine = engine
        self._tokenizer = engine.tokenizer
        self._for_grammars, _ = tokenizer_of(engine.tokenizer.backend_tokenizer.to_str())
        self._answers: dict[int, list[int]] = {}

    def run(self, plan: StepPlan) -> StepResult:
        """Returns the tokens that a step draws; it stands for `Runner.run`."""
        num_draws = len(plan.samples)
        drawn = np.zeros(num_draws, np.int32)
        for index, sample in enumerate(plan.samples):
            request = self._engine._groups[sample.sequence_id].request
            number = sample.position - len(request.prompt_token_ids)
            if number == 0:
                self._answers[sample.sequence_id] = self._token_ids(request)
            drawn[index] = self._answers[sample.sequence_id][number]
        nothing = np.zeros((num_draws, 0))
        return StepResult(
            token_ids=drawn,
            logprobs=np.zeros(num_draws, np.float32),
            ranks=np.ones(num_draws, np.int32),
            top_token_ids=nothing.astype(np.int32),
            top_logprobs=nothing.astype(np.float32),
        )

    def _token_ids(self, request: Any) -> list[int]:
        prompt = request.prompt or self._tokenizer.decode(list(request.prompt_token_ids))
        self.prompts.append(prompt)
        forms = answer_to(prompt).forms(thinks=not prompt.endswith("</think>\n\n"))
        grammar = request.params.structured_outputs
        fitting = (
            forms if grammar is None else [text for text in forms if self._fits(text, grammar)]
        )
        if not fitting:
            raise AssertionError(f"no answer of the script fits {grammar}: {forms}")
        return [*self._tokenizer(fitting[0])["input_ids"], self._tokenizer.eos_token_id]

    def _fits(self, text: str, grammar: tuple[str, str]) -> bool:
        matcher = matcher_of(self._for_grammars, source_of(*grammar))
        token_ids = self._tokenizer(text)["input_ids"]
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@dataclass
class Seen:
    """One request as it came in, and how it was answered."""

    path: str
    body: bytes = b""
    status: int = 0
    content_type: str = ""
    answer: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def streams(self) -> bool:
        """Returns whether the answer was a stream."""
        return self.content_type.startswith(("text/event-stream", "application/x-ndjson"))


class Recording:
    """A middleware that keeps each request and its answer."""

    def __init__(self, app: Any, seen: list[Seen]) -> None:
        self._app = app
        self._seen = seen

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Passes a request on, and keeps what passes."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        seen = Seen(scope["path"], headers=headers)
        self._seen.append(seen)

        async def receiving() -> Any:
            message = await receive()
            seen.body += message.get("body", b"")
            return message

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                seen.status = message["status"]
                seen.content_type = dict(message["headers"]).get(b"content-type", b"").decode()
            seen.answer += message.get("body", b"")
            await send(message)

        await self._app(scope, receiving, sending)


@dataclass
class AgentServer:
    """A server of the scripted model.

    Attributes:
        address: The server's URL, without a path.
        device: The script.
        seen: The requests, in order.
        errors: What the server logged as an error.
    """

    address: str
    device: ScriptedDevice
    seen: list[Seen]
    errors: list[str]


def build_scripted(directory: Path, max_model_len: int) -> Built:
    """Builds the engine: the packaged model's tokenizer, and no step that is ever compiled."""
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(
        json.dumps({**config, "max_position_embeddings": max_model_len})
    )
    settings = _settings(str(directory), max_model_len)
    with when_used():
        return build_engine(settings)


# LlamaIndex takes the size of an Anthropic model from its name.
NAMES = ("demo", "claude-sonnet-4-5")


def _settings(model: str, max_model_len: int) -> EngineConfig:
    return EngineConfig(
        model=model,
        max_model_len=max_model_len,
        max_num_seqs=4,
        max_num_batched_tokens=4096,
        num_blocks=2 * max_model_len // 16 + 1,
        block_size=16,
    )


@contextlib.contextmanager
def agent_server(
    directory: Path, *, max_model_len: int = 16_384, **settings: Any
) -> Iterator[AgentServer]:
    """Runs the server.

    Args:
        directory: The new directory of the model, which is called "demo".
        max_model_len: The most tokens of a conversation.
        settings: Settings of the server.
    """
    model = demo_with_template(directory, STRICT_QWEN)
    built = build_scripted(directory, max_model_len)
    device = ScriptedDevice(built.engine)
    built.engine.builder.build = lambda plan, *_: plan
    built.engine.runner.run = device.run
    seen: list[Seen] = []
    engine = _settings(model, max_model_len)
    with serving(built, engine=engine, served_model_name=NAMES, **settings) as server:
        server.app.add_middleware(Recording, seen=seen)
        try:
            yield AgentServer(server.address, device, seen, server.errors)
        finally:
            _close_engine(server, built)


def _close_engine(server: Running, built: Built) -> None:
    server.loop.turns.close_engine = built.engine.close  # type: ignore[method-assign]


def main() -> None:
    """Serves until it is interrupted, and writes each request with its answer to a directory."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--max-model-len", type=int, default=131_072)
    parser.add_argument("--log", type=Path, help="a directory for the requests and their answers")
    arguments = parser.parse_args()
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", tempfile.gettempdir())  # nothing is compiled
    with (
        tempfile.TemporaryDirectory() as parent,
        SharedExecutables().in_use(optimized=False),
        agent_server(
            Path(parent) / "demo", max_model_len=arguments.max_model_len, port=arguments.port
        ) as server,
    ):
        print(server.address, flush=True)
        num_written = 0
        while not threading.Event().wait(0.5):
            while server.errors:
                print(server.errors.pop(0), flush=True)
            for number in range(num_written, len(server.seen) if arguments.log else 0):
                seen = server.seen[number]
                if not seen.status:
                    break
                name = seen.path.strip("/").replace("/", "_")
                text = f"{seen.path} {seen.status}\n{seen.headers}\n{seen.body.decode()}\n\n"
                (arguments.log / f"{number:03}_{name}.txt").write_text(text + seen.answer.decode())
                num_written = number + 1


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
