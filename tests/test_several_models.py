"""Several models in one server, over HTTP: no request is lost under changing load, and the texts
are those of plain engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from jaxpage import SamplingParams
from jaxpage.cli import main
from jaxpage.errors import ConfigError, UnsupportedError
from jaxpage.serving.app import guard
from jaxpage.serving.http.listening import address_of, bind_socket
from jaxpage.serving.metrics.tracing import open_tracing
from jaxpage.serving.requests.response_store import StoredResponse
from jaxpage.serving.server import Serving
from jaxpage.serving.settings.server_config import ServerConfig
from jaxpage.serving.several.all_models import Models
from jaxpage.serving.several.models_file import check_sizes, read_models_file
from jaxpage.serving.several.starting import open_table
from tests.support.engines import BLOCKS_OF_16, LLAMA, make_llm
from tests.support.executables import when_used
from tests.support.random_checkpoints import random_checkpoint
from tests.support.running import SMALL, WAIT_SECONDS, wait_until

ROOM_FOR_ONE = "100MiB"
PROMPTS = [[7, 8, 9], [1, 2, 3, 4] * 8, list(range(20, 60))]
DRAWN = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 5}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("several") / "model", LLAMA, seed=3)


def models_of(directory: Path) -> list[dict[str, Any]]:
    """Returns the packaged model, one of another shape with other settings, and one whose files are
    gone.
    """
    other = {**BLOCKS_OF_16, "dtype": "float32", "scheduling_policy": "fair"}
    return [
        {"name": "demo", "model": "demo", "settings": SMALL},
        {"name": "other", "model": str(directory), "settings": other},
        {"name": "gone", "model": str(directory.parent / "gone")},
    ]


class Running:
    """A server of several models on a thread."""

    def __init__(self, path: Path, config: ServerConfig, listener: socket.socket) -> None:
        board, self.table, self.opener = open_table(*read_models_file(path, config), config)
        self.driver = Models(self.table)
        self.address = address_of(listener)
        self.status: int | None = None
        self._signalled = False
        self._ready = threading.Event()
        self.board = board
        app = guard(board, board.routes, config, (), open_tracing(config))
        self._serving = Serving(app, self.driver, config, listener, self._ready.set)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._ready.wait(WAIT_SECONDS), "the server does not start"

    async def _run(self) -> None:
        self._home = asyncio.get_running_loop()
        self.status = await self._serving.run()

    def signal(self) -> None:
        self._signalled = True
        self._home.call_soon_threadsafe(self._serving.signal)

    def end(self) -> None:
        if not self._signalled:
            self.signal()
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive(), "the server does not end"
        assert self.driver.stop(WAIT_SECONDS), "an engine does not end"
        self.opener.close()


@contextlib.contextmanager
def serving(path: Path, models: list[dict[str, Any]], **settings: Any) -> Iterator[Running]:
    path.write_text(yaml.safe_dump({"memory": ROOM_FOR_ONE, "models": models}))
    config = ServerConfig(port=0, models_file=str(path), **settings)
    with when_used(), bind_socket(config) as listener:
        server = Running(path, config, listener)
        try:
            yield server
        finally:
            server.end()


@pytest.fixture(scope="module")
def running(directory, tmp_path_factory):
    kept_directory = tmp_path_factory.mktemp("kept")
    models = models_of(directory)
    with serving(
        kept_directory / "models.yaml", models, batch_directory=str(kept_directory / "batches")
    ) as server:
        yield server
    assert server.status == 0


@pytest.fixture
def client(running):
    with httpx.Client(base_url=running.address, timeout=300) as client:
        yield client


def request(model: str, prompt: int, drawn: int, **more: Any) -> dict[str, Any]:
    about = {"model": model, "prompt": PROMPTS[prompt], "max_tokens": 8, "ignore_eos": True}
    return {**about, "return_token_ids": True, **DRAWN[drawn], **more}


@pytest.fixture(scope="module")
def expected(directory):
    """Returns the tokens of engines that do nothing else, one request after the other."""
    tokens = {}
    for name, model, settings in (("demo", "demo", SMALL), ("other", directory, BLOCKS_OF_16)):
        with make_llm(model, **settings) as llm:
            for prompt, ids in enumerate(PROMPTS):
                for drawn, sampling in enumerate(DRAWN):
                    params = SamplingParams(max_tokens=8, ignore_eos=True, **sampling)
                    output = llm.generate(ids, params, use_tqdm=False)[0].outputs[0]
                    tokens[name, prompt, drawn] = list(output.token_ids)
    return tokens


async def answer_of(client: httpx.AsyncClient, body: dict[str, Any]) -> list[int]:
    """Returns the tokens of an answer, which comes whole or as a stream."""
    if not body.get("stream"):
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["choices"][0]["token_ids"])
    token_ids: list[int] = []
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    token_ids += choice["token_ids"]
    return token_ids


def test_no_request_is_lost_under_changing_load_with_room_for_one(running, expected):
    loads: list[str] = []
    load = running.table._load

    async def note(name: str) -> Any:
        running.table.check()
        loads.append(name)
        return await load(name)

    async def ask_at_random(client: httpx.AsyncClient, rng: random.Random) -> None:
        case = rng.choice(sorted(expected))
        body = request(*case, stream=rng.random() < 0.5)
        if rng.random() < 0.2:  # this client leaves, while it waits or is answered
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(answer_of(client, body), rng.random() / 10)
        else:
            assert await answer_of(client, body) == expected[case], case

    async def load_it() -> None:
        async with httpx.AsyncClient(base_url=running.address, timeout=300) as client:
            for number, num_at_once in enumerate((2, 8, 1)):
                rng = random.Random(number)
                places = asyncio.Semaphore(num_at_once)

                async def in_turn(rng: random.Random, places: asyncio.Semaphore) -> None:
                    async with places:
                        await ask_at_random(client, rng)

                await asyncio.gather(*(in_turn(rng, places) for _ in range(3 * num_at_once)))

    running.table._load = note
    try:
        asyncio.run(load_it())
    finally:
        running.table._load = load
    assert set(loads) == {"demo", "other"} and len(loads) >= 4, loads
    wait_until(lambda: not any(slot.num_leases for slot in running.table.slots.values()))


def test_a_model_that_is_gone_answers_so_and_the_rest_goes_on(client, expected):
    before = client.post("/v1/completions", json=request("demo", 0, 0)).json()
    answer = client.post("/v1/completions", json=request("gone", 0, 0))
    error = answer.json()["error"]
    assert answer.status_code == 500 and "retry-after" not in answer.headers
    assert error["code"] == "model_not_loaded" and error["param"] == "model"
    assert "'gone' cannot be loaded" in error["message"] and "/" not in error["message"]
    states = {card["id"]: card["state"] for card in client.get("/v1/models").json()["data"]}
    assert states == {"demo": "loaded", "other": "unloaded", "gone": "unloaded"}
    after = client.post("/v1/completions", json=request("demo", 0, 0)).json()
    assert after["choices"] == before["choices"]
    assert before["choices"][0]["token_ids"] == expected["demo", 0, 0]
    for name in ("nobody", "/models/nobody"):
        answer = client.post("/v1/completions", json=request(name, 0, 0))
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
        assert f"The model '{name}' does not exist" in answer.text  # a name is no path of ours


@pytest.mark.parametrize("level", [1, 2])
def test_a_model_sleeps_and_wakes_for_a_request(client, level):
    body = request("other", 1, 1)
    before = client.post("/v1/completions", json=body).json()["choices"]
    num_compiled = metric(client, "jaxpage_compile_total", "other")
    for path, state in (("/sleep", "asleep"), ("/wake_up", "loaded"), ("/sleep", "asleep")):
        order = {"model": "other"} if path == "/wake_up" else {"model": "other", "level": level}
        assert client.post(path, json=order).json() == {"model": "other", "state": state}
        sleeping = client.get("/is_sleeping", params={"model": "other"}).json()
        assert sleeping == {"is_sleeping": state == "asleep"}
    assert client.post("/v1/completions", json=body).json()["choices"] == before
    assert metric(client, "jaxpage_compile_total", "other") == num_compiled
    for order in ({"model": "other", "level": 3}, {"model": "nobody"}, {"level": 1}, {"mode": 1}):
        assert client.post("/sleep", json=order).status_code in (400, 404), order
    twice = client.post("/sleep?level=1", json={"model": "other", "level": 2})
    assert twice.status_code == 400 and "in the body and in the query" in twice.text
    assert "this server has 'demo, other, gone'" in client.post("/sleep").text


def test_a_model_is_paused(
    running: Running, client: httpx.Client, expected: dict[tuple[str, int, int], list[int]]
) -> None:
    client.post("/wake_up", json={"model": "demo"})
    assert client.post("/pause", json={"model": "demo"}).json() == {"status": "paused"}
    paused = client.get("/is_paused", params={"model": "demo"}).json()
    assert paused == {"is_paused": True}
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(client.post, "/v1/completions", json=request("demo", 0, 0))
        model = running.table.slots["demo"].model
        assert model is not None
        wait_until(lambda: model.driver.engine.has_unfinished, "the request is there")
        assert client.post("/sleep", json={"model": "demo"}).status_code == 409
        assert not held.done()
        assert client.post("/resume?model=demo").json() == {"status": "resumed"}
        assert held.result().json()["choices"][0]["token_ids"] == expected["demo", 0, 0]
    assert client.post("/resume", json={"model": "demo"}).status_code == 409
    unloaded = client.post("/pause", json={"model": "gone"})
    assert unloaded.status_code == 409 and "'gone' is not loaded" in unloaded.text
    for order in ({"model": "nobody"}, {}, {"model": "demo", "mode": "abort"}, {"level": 1}):
        assert client.post("/pause", json=order).status_code in (400, 404), order


def test_requests_that_come_while_their_model_falls_asleep_wait_and_wake_it(
    running, client, expected
):
    asks = {
        "/v1/completions": request("demo", 0, 0),
        "/v1/embeddings": {"model": "demo", "input": [1, 2, 3]},
    }
    before = {path: client.post(path, json=body).json() for path, body in asks.items()}
    assert before["/v1/completions"]["choices"][0]["token_ids"] == expected["demo", 0, 0]
    model = running.table.slots["demo"].model
    assert model is not None
    sleep = model.sleep
    sleeps = threading.Event()

    async def slow(level: int) -> None:
        await sleep(level)
        sleeps.set()
        await asyncio.sleep(0.3)

    def ask(path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{running.address}{path}", json=body, timeout=60)

    model.sleep = slow  # type: ignore[method-assign]
    try:
        with ThreadPoolExecutor(3) as pool:
            order = pool.submit(ask, "/sleep", {"model": "demo"})
            assert sleeps.wait(WAIT_SECONDS)
            answers = {path: pool.submit(ask, path, body) for path, body in asks.items()}
            assert order.result().status_code == 200, order.result().text
            for path, answer in answers.items():
                assert answer.result().status_code == 200, answer.result().text
                part = "data" if path == "/v1/embeddings" else "choices"
                assert answer.result().json()[part] == before[path][part]
    finally:
        model.sleep = sleep  # type: ignore[method-assign]


def unload(client: httpx.Client, *names: str) -> None:
    for name in names:
        client.post("/api/generate", json={"model": name, "keep_alive": 0})
    wait_until(lambda: not client.get("/api/ps").json()["models"], "the models are unloaded")


def test_a_look_at_a_model_does_not_load_it(running, client):
    def show(name: str) -> dict[str, Any]:
        answer = client.post("/api/show", json={"model": name, "verbose": True})
        assert answer.status_code == 200 and "x-jaxpage-ignored-fields" not in answer.headers
        body: dict[str, Any] = answer.json()
        return body

    unload(client, "demo", "other")
    shown_model = show("demo:latest")
    running.table.check()
    assert not client.get("/api/ps").json()["models"]
    assert shown_model["details"]["family"] == "llama"
    assert shown_model["model_info"]["llama.context_length"] == 512
    client.post("/v1/completions", json=request("demo", 0, 0))
    assert show("demo") == shown_model
    client.post("/sleep", json={"model": "demo"})
    assert show("demo") == shown_model
    assert client.get("/is_sleeping", params={"model": "demo"}).json()["is_sleeping"]
    gone = client.post("/api/show", json={"model": "gone"})
    assert gone.status_code == 500 and "/" not in gone.json()["error"]
    assert show("other")["details"]["family"] == "llama"


def test_ollamas_durations_have_the_time_of_loading(client):
    asks: dict[str, dict[str, Any]] = {
        "/api/generate": {"prompt": "Once", "options": {"num_predict": 2}, "stream": False},
        "/api/chat": {"messages": [{"role": "user", "content": "Once"}], "stream": False},
        "/api/embed": {"input": "Once"},
    }
    asks["/api/chat"]["options"] = {"num_predict": 2}
    for path, body in asks.items():
        unload(client, "demo")
        began = time.monotonic()
        first = client.post(path, json={"model": "demo", **body}).json()
        taken = (time.monotonic() - began) * 1e9
        again = client.post(path, json={"model": "demo", **body}).json()
        assert taken >= first["total_duration"] > first["load_duration"] > taken / 4, path
        assert again["total_duration"] > again["load_duration"] < first["load_duration"] / 4, path
        parts = [first.get(f"{part}_duration", 0) for part in ("load", "prompt_eval", "eval")]
        assert first["total_duration"] >= sum(parts)
    loaded = client.post("/api/generate", json={"model": "demo"}).json()
    assert loaded["done_reason"] == "load" and loaded["load_duration"] < taken
    [model] = client.get("/api/ps").json()["models"]
    assert model["size"] > 0 and model["size_vram"] == 0, "a CPU has no memory of its own"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
        *((path, {"prompt": "x"}) for path in ("/api/generate", "/api/embeddings")),
        *(("/v1/embeddings", {"input": "x"}), ("/api/embed", {"input": "x"}), ("/api/show", {})),
    ],
)
def test_a_name_that_is_nearly_right_is_answered_with_the_right_one(client, path, body):
    for name in ("demoo", "DEMO", "demo2:latest", "org/demo"):
        answer = client.post(path, json={"model": name, **body})
        assert answer.status_code == 404 and "did you mean 'demo'?" in answer.text, answer.text
    answer = client.post(path, json={"model": "nothing like it", **body})
    assert answer.status_code == 404 and "this server has 'demo, other, gone'" in answer.text
    assert "did you mean 'other'?" in client.get("/v1/models/otter").text


def metric(client: httpx.Client, name: str, model: str) -> float:
    [value] = [
        sample.value
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for sample in family.samples
        if sample.name == name and sample.labels.get("model_name") == model
    ]
    return value


def test_metrics_have_each_name_once_and_each_model_in_memory(client):
    client.post("/v1/completions", json=request("demo", 0, 0))
    text = client.get("/metrics").text
    assert client.post("/sleep", json={"model": "demo"}).status_code == 200
    client.post("/v1/completions", json=request("other", 0, 0))
    assert metric(client, "jaxpage_num_requests_running", "other") == 0
    assert metric(client, "jaxpage_num_requests_running", "demo") == 0, "it sleeps, and is there"
    helps = [line for line in client.get("/metrics").text.splitlines() if "# HELP" in line]
    assert len(helps) == len(set(helps)) and len(helps) >= text.count("# HELP")


def test_ollamas_list_describes_what_is_loaded_and_what_is_not(client):
    client.post("/v1/completions", json=request("demo", 0, 0))
    listed = {model["name"]: model for model in client.get("/api/tags").json()["models"]}
    for model in listed.values():
        assert len(model["digest"]) == 64 and model["modified_at"]
        if model["size"]:  # the files of one are not there
            assert model["details"]["family"] and model["details"]["parameter_size"]
    assert listed["demo"]["size"] and listed["other"]["size"]
    loaded = {model["name"]: model for model in client.get("/api/ps").json()["models"]}
    assert loaded["demo"]["digest"] == listed["demo"]["digest"]
    assert loaded["demo"]["details"] == listed["demo"]["details"]


def test_ollamas_keep_alive(client):
    def until() -> str:
        [model] = client.get("/api/ps").json()["models"]
        assert model["name"] == "demo"
        return str(model["expires_at"])

    said = {"model": "demo:latest", "prompt": "Once", "options": {"num_predict": 1}}
    for keep_alive, year in ((-1, "9999"), ("87600h", None), ("-5m", "9999")):
        answer = client.post(
            "/api/generate", json={**said, "stream": False, "keep_alive": keep_alive}
        )
        assert answer.status_code == 200 and answer.json()["done"], answer.text
        assert (until()[:4] == "9999") == (year == "9999")
    for wrong in ("5x", True, [1]):
        answer = client.post("/api/generate", json={**said, "keep_alive": wrong})
        assert answer.status_code == 400 and "keep_alive" in answer.json()["error"]
    for path, key in (("/api/chat", "message"), ("/api/generate", "response")):
        answer = client.post(path, json={"model": "demo", "keep_alive": 0})
        assert answer.status_code == 200 and answer.json()["done_reason"] == "unload"
        assert key in answer.json()
    wait_until(lambda: not client.get("/api/ps").json()["models"], "the model is unloaded")


def test_a_batch_of_two_models_leaves_out_no_line(client, expected):
    cases = [*sorted(expected), ("gone", 0, 0)]
    line = {"method": "POST", "url": "/v1/completions"}
    lines = [{**line, "custom_id": str(case), "body": request(*case)} for case in cases]
    content = "\n".join(map(json.dumps, lines))
    file = client.post(
        "/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)}
    ).json()
    asks = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = client.post("/v1/batches", json=asks).json()

    def now() -> dict[str, Any]:
        batch_state: dict[str, Any] = client.get(f"/v1/batches/{batch['id']}").json()
        return batch_state

    wait_until(lambda: now()["status"] == "completed", "the batch ends", 300)
    answers = {}
    for kind in ("output_file_id", "error_file_id"):
        for text in client.get(f"/v1/files/{now()[kind]}/content").text.splitlines():
            answer = json.loads(text)
            answers[answer["custom_id"]] = answer["response"]
    assert answers.pop(str(cases[-1]))["status_code"] == 500
    assert {case: each["body"]["choices"][0]["token_ids"] for case, each in answers.items()} == {
        str(case): ids for case, ids in expected.items()
    }


def test_a_shutdown_during_a_load_answers_those_that_wait(directory, tmp_path):
    reached, go_on = threading.Event(), threading.Event()
    answers: list[httpx.Response] = []
    with serving(
        tmp_path / "models.yaml", models_of(directory), shutdown_timeout_seconds=0.2
    ) as running:

        def slow(name: str) -> Any:
            reached.set()
            assert go_on.wait(WAIT_SECONDS)
            raise RuntimeError("nobody waits for it any more")

        running.opener._open = slow  # type: ignore[method-assign]

        def ask() -> None:
            with httpx.Client(base_url=running.address, timeout=300) as client:
                answers.append(client.post("/v1/completions", json=request("other", 0, 0)))

        asking = threading.Thread(target=ask)
        asking.start()
        assert reached.wait(WAIT_SECONDS)
        running.signal()
        asking.join(WAIT_SECONDS)
        go_on.set()
    assert running.status == 0
    assert [answer.status_code for answer in answers] == [503]
    assert "shutting down" in answers[0].json()["error"]["message"]


A = "{name: a, model: demo"
WRONG_FILES = {
    "models: []": "models",
    "{}": "empty|models",
    "models: [3]": "model 1: must be a mapping",
    "models: [{name: a}]": "model 1: model",
    f"models: [{A}, colour: red}}]": "model 1: colour: ",
    f"models: [{A}}}, {A}}}]": "the name 'a' is given 2 times",
    f"models: [{A}, keep_alive: 5x}}]": "keep_alive",
    f"models: [{A}, settings: {{block_sise: 4}}}}]": r"\(a\): block_sise: .*block_size",
    f"models: [{A}, settings: {{model: x}}}}]": "belongs next to name",
    f"models: [{A}, settings: {{lora_modules: [b=c]}}}}]": "needs enable_lora",
    f"models: [{A}}}]\nmemori: 1GiB": "models.yaml:2: memori: .*memory",
}


@pytest.mark.parametrize("text", WRONG_FILES)
def test_a_wrong_file_is_refused_with_the_place(text, tmp_path):
    path = tmp_path / "models.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=WRONG_FILES[text]) as refused:
        read_models_file(path, ServerConfig())
    assert "models.yaml" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        read_models_file(tmp_path / "absent.yaml", ServerConfig())


def test_settings_of_one_model_do_not_go_with_several(tmp_path, capsys):
    path = tmp_path / "models.yaml"
    path.write_text(f"models: [{A}}}]")
    assert main(["serve", "demo", "--models", str(path)]) == 2
    assert "--models FILE does not go with model: " in capsys.readouterr().err
    settings = {"weights_directory": "w", "kv_events": "tcp://127.0.0.1:9"}
    with pytest.raises(ConfigError) as refused:
        ServerConfig(models_file=str(path), **settings)
    assert str(refused.value).splitlines() == [
        f"{name}: is not supported with models_file" for name in settings
    ]


def test_models_that_do_not_fit_together_are_refused_with_the_numbers(tmp_path):
    path = tmp_path / "models.yaml"

    def sizes(**memory: str) -> dict[str, int]:
        models = [
            {"name": name, "model": "demo", "memory": size, "keep_alive": -1 if name == "a" else 0}
            for name, size in memory.items()
        ]
        path.write_text(yaml.safe_dump({"models": models}))
        entries, _ = read_models_file(path, ServerConfig())
        return check_sizes(entries, 100 * 2**20, "the memory of the file")

    assert sizes(a="60MiB", b="40MiB", c="40MiB") == {"a": 60 << 20, "b": 40 << 20, "c": 40 << 20}
    with pytest.raises(ConfigError, match="'b' takes 101 MiB, and the memory of the file is 100"):
        sizes(b="101MiB")
    with pytest.raises(ConfigError, match=r"'b' \(41 MiB\) does not fit next to 'a' \(60 MiB\)"):
        sizes(a="60MiB", b="41MiB")


def test_spans_of_several_models_have_the_time_of_loading(tmp_path):
    """The span begins before its model is there, whichever model the request names."""
    pytest.importorskip("opentelemetry.sdk", reason="spans need the extra [otel]")
    otlp = pytest.importorskip("jaxpage.serving.metrics.otlp")
    from opentelemetry.sdk.trace.export import in_memory_span_exporter as in_memory

    exporter = in_memory.InMemorySpanExporter()
    names = ("first", "second")
    models = [{"name": name, "model": "demo", "settings": {**SMALL}} for name in names]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(otlp, "OTLPSpanExporter", lambda endpoint: exporter)
        endpoint = "http://127.0.0.1:9/v1/traces"
        with serving(tmp_path / "m.yaml", models, otlp_traces_endpoint=endpoint) as server:
            for name in ("first", "first", "second", "third"):
                body = {"model": name, "prompt": "A cat", "max_tokens": 2}
                httpx.post(f"{server.address}/v1/completions", json=body, timeout=300)
    spans = exporter.get_finished_spans()
    servers = [span for span in spans if span.parent is None]
    assert [span.name for span in servers] == [
        *("text_completion first", "text_completion first", "text_completion second"),
        "POST /v1/completions",
    ]
    loads = []
    for span in servers[:3]:
        parts = [each for each in spans if each.parent == span.context]
        assert [part.name for part in parts] == ["load", "queue", "prefill", "decode"]
        assert parts[0].start_time >= span.start_time
        assert parts[0].end_time <= parts[1].start_time
        loads.append(parts[0].end_time - parts[0].start_time)
    assert min(loads[0], loads[2]) > loads[1], "the second request finds its model"
    assert servers[3].attributes["http.response.status_code"] == 404


def test_kernels_that_the_device_does_not_run_are_refused_before_a_request(tmp_path):
    path = tmp_path / "models.yaml"
    path.write_text("models: [{name: a, model: demo, settings: {attention_backend: fa3}}]")
    with pytest.raises(UnsupportedError, match="attention_backend 'fa3' needs a GPU"):
        open_table(*read_models_file(path, ServerConfig()), ServerConfig())


def test_the_server_keeps_the_responses_of_all_models(client, running):
    """A model may go meanwhile. Only one of these has a chat template."""
    response_id = f"resp_{'1' * 32}"
    stored = StoredResponse(b'[{"role":"user","content":"x"}]', b'{"output":[]}')
    running.board.responses.put(response_id, "", stored)
    url = f"/v1/responses/{response_id}"
    assert client.get(url).json() == {"output": []}
    assert client.get(f"{url}/input_items").json()["data"][0]["role"] == "user"
    body = {"input": "y", "previous_response_id": response_id, "max_output_tokens": 1}
    answer = client.post("/v1/responses", json={"model": "other", **body})
    assert answer.status_code == 400 and "no chat template" in answer.text
    body["model"] = "demo"
    answer = client.post("/v1/responses", json=body)
    assert answer.json()["previous_response_id"] == response_id, answer.text
    assert client.get(f"/v1/responses/{answer.json()['id']}").json() == answer.json()
    assert client.delete(url).json()["deleted"]
    gone = client.post("/v1/responses", json=body)
    assert client.get(url).status_code == gone.status_code == 404
    assert gone.json()["error"]["code"] == "previous_response_not_found"
