"""Batches: no line twice and none lost whatever is killed, errors by line, answers equal to the
server's, and OpenAI's client.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from jaxpage.cli import main
from jaxpage.errors import ConfigError, EngineFailed
from jaxpage.serving.batches.in_process import InProcessAnswer
from jaxpage.serving.batches.lines import URLS, Line, read_line
from jaxpage.serving.batches.ordering import num_lines, windows
from jaxpage.serving.batches.output_file import OutputFile
from jaxpage.serving.batches.routes import BatchRoutes
from jaxpage.serving.batches.running import BatchRun
from jaxpage.serving.batches.store import OPEN, Store
from jaxpage.serving.batches.uploads import read_form
from jaxpage.serving.http.api_keys import owner_of
from jaxpage.serving.wire.errors import ApiError
from tests.support.executables import when_used
from tests.support.running import SMALL, demo_engine, serving, wait_until

MAX_BYTES = 4096


def line(number: int, body: Any = None, **changes: Any) -> str:
    row = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions"}
    return json.dumps({**row, "body": body or {"model": "demo", "prompt": f"p{number}"}, **changes})


REFUSED = [
    ("{no json", "invalid_json_line", "Line 1: the line is not valid JSON"),
    ('{"custom_id": "a", "custom_id": "b"}', "invalid_json_line", "has the key 'custom_id' twice"),
    ("[1]", "invalid_json_line", "expected a JSON object"),
    (line(1, custom_id=7), "invalid_custom_id", "custom_id must be a string"),
    (line(1, custom_id="seen"), "duplicate_custom_id", "'seen' is that of a line before it"),
    (line(1, url="/v1/images"), "invalid_url", "got '/v1/images'"),
    (line(1, method="GET"), "invalid_method", "method must be 'POST'"),
    (line(1, body=[1]), "invalid_body", "body must be a JSON object"),
    (line(1, body={"stream": True}), "invalid_body", "stream cannot be true"),
    (line(1, bodies={}), "unknown_parameter", "'bodies' is not a field"),
]


@pytest.mark.parametrize(("raw", "code", "text"), REFUSED, ids=[case[1] for case in REFUSED])
def test_a_line_that_asks_for_nothing_is_one_sentence(raw, code, text):
    refused = read_line(1, raw.encode(), {"seen"})
    assert not isinstance(refused, Line) and refused.code == code and text in refused.message
    answer = json.loads(refused.answer())
    assert answer["response"] is None and set(answer["error"]) == {"code", "message"}
    assert answer["id"].startswith("batch_req_1_") and "\n" not in refused.message


class Echo:
    """Answers with the body of the request, for the first time with 429, and dies after `last`
    answers.
    """

    def __init__(self, last: int | None = None) -> None:
        self.requested: list[str] = []
        self.refused: set[str] = set()
        self.last = last

    async def post(self, path: str, body: bytes, owner: str = "") -> InProcessAnswer:
        await asyncio.sleep(0)
        prompt = json.loads(body)["prompt"]
        if prompt not in self.refused and prompt.endswith("7"):
            self.refused.add(prompt)
            return InProcessAnswer(429, "x", b"{}")
        if len(self.requested) == self.last:
            raise EngineFailed("killed")
        self.requested.append(prompt)
        usage = {"prompt_tokens": 2, "completion_tokens": 3}
        content = json.dumps({"echo": prompt, "usage": usage}).encode()
        return InProcessAnswer(400 if prompt.endswith("5") else 200, "x", content)


def run(client: Echo, source: Path, target: Path, window: int = 8) -> OutputFile:
    async def answer_all() -> None:
        with output:
            run = BatchRun(
                client,  # type: ignore[arg-type]
                output,
                num_at_once=3,
                max_line_bytes=MAX_BYTES,
                is_dead=lambda: False,
                window=window,
            )
            await run.run(source)

    output = OutputFile(target)
    asyncio.run(answer_all())
    return output


@pytest.mark.parametrize("seed", range(4))
def test_a_batch_that_is_killed_again_and_again_has_each_line_once(tmp_path, seed, monkeypatch):
    monkeypatch.setattr("jaxpage.serving.batches.running._FIRST_PAUSE_SECONDS", 0.001)
    rng = random.Random(seed)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    texts = [line(number) for number in range(40)]
    texts[11], texts[20], texts[21] = "{", line(3), ""  # no JSON, a name that is taken, and nothing
    source.write_text("\n".join(texts))
    requested: list[str] = []
    while True:
        client = Echo(rng.randrange(1, 12))
        try:
            output = run(client, source, target)
            break
        except EngineFailed:
            # a kill may cut off the line that is being written
            torn = rng.choice([b"", b'{"id": "batch_re', b"\0\0"])
            target.write_bytes(target.read_bytes() + torn)
        finally:
            requested += client.requested
    answers = [json.loads(each) for each in target.read_text().splitlines()]
    numbers = sorted(int(each["id"].split("_")[2]) for each in answers)
    assert numbers == [number for number in range(1, 41) if number != 22]
    assert sorted(requested) == sorted(f"p{n}" for n in range(40) if n not in (11, 20, 21))
    for each in answers:
        if each["error"] is None:
            assert each["response"]["body"]["echo"] == "p" + each["custom_id"][1:]
    refused = {each["error"]["code"] for each in answers if each["error"]}
    assert refused == {"invalid_json_line", "duplicate_custom_id"}
    assert output.counts.lines == 39
    assert output.counts.errors == 2 + sum(f"{n}".endswith("5") for n in range(40))
    before = target.read_bytes()
    assert run(Echo(0), source, target).before.lines == 39  # nothing is left to ask
    assert target.read_bytes() == before


def test_lines_that_begin_alike_follow_each_other_within_a_window(tmp_path):
    source = tmp_path / "in.jsonl"
    system = [
        {"role": "system", "content": text} for text in ("You count. " * 9, "You rhyme. " * 9)
    ]
    bodies: list[Any] = []
    for number in range(12):
        user = {"content": f"{number}", "role": "user"}
        bodies.append({"model": "demo", "messages": [system[number % 2], user]})
    source.write_text("\n".join(line(*each) for each in enumerate(bodies)))

    def systems(window: int) -> list[list[int]]:
        pieces = windows(source, {}, window=window, max_bytes=MAX_BYTES)
        return [[int(each.custom_id[1:]) % 2 for each in lines] for lines in pieces]  # type: ignore[index]

    assert systems(100) == [[0] * 6 + [1] * 6]
    assert systems(6) == [[0] * 3 + [1] * 3] * 2
    assert systems(1) == [[0], [1]] * 6


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(line(number) for number in range(6)))
    run(Echo(), source, target)
    source.write_text(source.read_text().replace("p3", "other"))
    with OutputFile(target) as output:
        with pytest.raises(ConfigError, match="has changed since line 4 was answered"):
            num_lines(source, MAX_BYTES, output.done)
        with pytest.raises(ConfigError, match="is being written by another process"):
            OutputFile(target)
    with pytest.raises(ConfigError, match="line 1 is not an answer of a batch"):
        OutputFile(source)
    source.write_text(line(1, {"model": "demo", "prompt": "x" * 2 * MAX_BYTES}) + "\n" + line(2))
    long, short = next(windows(source, {}, window=9, max_bytes=MAX_BYTES))
    assert not isinstance(long, Line) and long.code == "line_too_long"
    assert isinstance(short, Line) and short.id.startswith("batch_req_2_")


@pytest.mark.parametrize(
    ("content_type", "body", "status"),
    [
        ("application/json", b"{}", 415),
        ("multipart/form-data", b"--a--", 415),
        ("multipart/form-data; boundary=a", b"", 400),
        ("multipart/form-data; boundary=a", b"--a\r\n\r\nx\r\n--a--", 400),
        (
            "multipart/form-data; boundary=a",
            b'--a\r\nContent-Disposition: form-data; name="x"',
            400,
        ),
    ],
)
def test_what_is_no_form(content_type, body, status):
    with pytest.raises(ApiError) as refused:
        read_form(content_type, body)
    assert refused.value.status == status


@pytest.mark.parametrize("content", [b"a", b"\r\n--b\n\0\xff\r\n", b"\r\n" * 3, os.urandom(5000)])
def test_a_form_is_what_a_client_sent(content):
    request = httpx.Request(
        "POST", "http://x", files={"file": ('a "b".jsonl', content)}, data={"purpose": "batch"}
    )
    form = read_form(request.headers["content-type"], request.read())
    assert form["file"].content == content and form["purpose"].content == b"batch"


@pytest.fixture(scope="module")
def demo_build():
    built = demo_engine()
    yield built
    built.engine.runner.close()


PROMPT = "Once upon a time there was a"
GREEDY = {"model": "demo", "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
REQUESTED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {**GREEDY, "logprobs": 2}),
    ("/v1/completions", {**GREEDY, "temperature": 0.9, "seed": 3, "n": 2}),
    ("/v1/completions", {**GREEDY, "max_tokens": -1}),
    (
        "/v1/chat/completions",
        {
            "model": "demo",
            "messages": [{"role": "user", "content": "a"}],
            "max_tokens": 6,
            "seed": 1,
        },
    ),
    ("/v1/embeddings", {"model": "demo", "input": [PROMPT, "a"]}),
    ("/v1/score", {"model": "demo", "prompt": PROMPT, "continuation": [" girl", " boy"]}),
    ("/v1/rerank", {"model": "demo", "query": PROMPT, "documents": ["a girl", "a boy"]}),
]
TO_THE_ANSWER = {"id", "created", "system_fingerprint"}


def test_run_batch_answers_as_the_server_does(demo_build, tmp_path, capsys):
    assert {url for url, _ in REQUESTED} | {"/v1/responses"} == set(URLS)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(line(n, body, url=url) for n, (url, body) in enumerate(REQUESTED)))
    with (
        serving(demo_build) as running,
        httpx.Client(base_url=running.address, timeout=300) as client,
    ):
        expected = [client.post(url, json=body) for url, body in REQUESTED]
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    with when_used():
        assert main(["run-batch", str(source), str(target), "-q", *arguments]) == 0
    failed = sum(each.status_code != 200 for each in expected)
    assert (
        failed < len(REQUESTED)
        and f"{len(REQUESTED)} lines, {failed} errors, " in capsys.readouterr().out
    )
    answers = {each["custom_id"]: each for each in map(json.loads, target.read_text().splitlines())}
    for number, each in enumerate(expected):
        response = answers[f"r{number}"]["response"]
        assert response["status_code"] == each.status_code
        theirs = {k: v for k, v in each.json().items() if k not in TO_THE_ANSWER}
        assert {k: v for k, v in response["body"].items() if k not in TO_THE_ANSWER} == theirs
    assert main(["run-batch", str(source), str(target), "-q"]) == 0  # without an engine
    assert capsys.readouterr().out.startswith(
        f"{len(REQUESTED)} lines, {failed} errors, {len(REQUESTED)} "
    )


@pytest.fixture
def client_of():
    """Makes clients of a server, each with its key."""
    made: list[openai.OpenAI] = []

    def client(running: Any, key: str = "any") -> openai.OpenAI:
        address = f"{running.address}/v1"
        made.append(openai.OpenAI(base_url=address, api_key=key, timeout=300, max_retries=0))
        return made[-1]

    yield client
    for each in made:
        each.close()


def wait_for_end(client: openai.OpenAI, batch_id: str) -> Any:
    wait_until(
        lambda: client.batches.retrieve(batch_id).status in ("completed", "failed", "cancelled"),
        "the batch ends",
        300,
    )
    return client.batches.retrieve(batch_id)


def upload(client: openai.OpenAI, lines: list[str]) -> Any:
    return client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")


def owners_of_lines(running: Any, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Returns to whom responses would belong that the lines of batches have the server keep."""
    owners = set()
    post = running.server.batches._client.post

    async def record(path: str, body: bytes, owner: str = "") -> Any:
        owners.add(owner)
        return await post(path, body, owner)

    monkeypatch.setattr(running.server.batches._client, "post", record)
    return owners


def test_openais_client_runs_a_batch(demo_build, client_of, tmp_path, monkeypatch):
    tmp_path.chmod(0o755)
    with serving(demo_build, api_keys=("one", "two"), batch_directory=str(tmp_path)) as running:
        client, other = client_of(running, "one"), client_of(running, "two")
        expected = client.completions.create(**GREEDY).choices[0].text
        owners = owners_of_lines(running, monkeypatch)
        file = upload(client, [line(0, GREEDY), line(1, {**GREEDY, "n": 0}), "{", line(3, GREEDY)])
        batch = client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/completions",
            completion_window="24h",
            metadata={"a": "b"},
        )
        assert batch.status == "validating" and batch.metadata == {"a": "b"}
        done = wait_for_end(client, batch.id)
        assert running.server.batches is not None
        assert owners == {running.server.batches.store.owner(batch.id)} != {""}
        assert done.status == "completed" and done.request_counts.to_dict() == {
            "total": 4,
            "completed": 2,
            "failed": 2,
        }
        good = [json.loads(each) for each in client.files.content(done.output_file_id).iter_lines()]
        assert {each["custom_id"] for each in good} == {"r0", "r3"}
        assert all(each["response"]["body"]["choices"][0]["text"] == expected for each in good)
        bad = [json.loads(each) for each in client.files.content(done.error_file_id).iter_lines()]
        assert sorted(each["custom_id"] or "" for each in bad) == ["", "r1"]
        assert [each.id for each in client.batches.list(limit=1)] == [batch.id]
        assert {each.id for each in client.files.list()} == {
            file.id,
            done.output_file_id,
            done.error_file_id,
        }
        # What another key has made is not there.
        assert not list(other.batches.list()) and not list(other.files.list())
        for ask in (
            lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.cancel(batch.id),
            lambda: other.files.content(file.id),
            lambda: other.files.delete(file.id),
            lambda: other.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                ask()
        files = list(tmp_path.iterdir())
        assert len(files) >= 8 and not tmp_path.stat().st_mode & 0o077
        assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
        assert client.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)
        with pytest.raises(openai.BadRequestError, match="purpose must be 'batch'"):
            client.files.create(file=b"x", purpose="vision")


def test_texts_that_others_could_read_are_made_private_or_refused(tmp_path, monkeypatch):
    directory = tmp_path / "batches"
    store = Store(directory, MAX_BYTES)
    file_id = f"file-{'a' * 32}"
    store.content(file_id).write_bytes(b"text")
    store.add_file("f", "batch", "", file_id)
    store.close()
    other = directory / "notes.txt"
    other.write_text("not jaxpage's")
    for path in (directory, *directory.iterdir()):
        path.chmod(0o755)
    Store(directory, MAX_BYTES).close()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    del modes["lock"]  # it is empty
    assert modes.pop("notes.txt") == 0o755 and set(modes.values()) == {0o600}, modes
    OutputFile(tmp_path / "out").__exit__()
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o600
    directory.chmod(0o1777)
    with pytest.raises(ConfigError, match=r"cannot use .*batches: it is for all users"):
        Store(directory, MAX_BYTES)
    directory.chmod(0o700)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(ConfigError, match=r"cannot use .*batches: it belongs to another user"):
        Store(directory, MAX_BYTES)


@pytest.mark.parametrize("status", OPEN)
def test_the_input_of_a_batch_that_has_not_ended_stays(tmp_path, status):
    """A batch that was killed while it ended is continued by the next start, from its input."""
    store = Store(tmp_path / "batches", MAX_BYTES)
    client = TestClient(Starlette(routes=BatchRoutes(SimpleNamespace(store=store)).routes))
    store.write_file("in.jsonl", "batch", owner_of({}), "file-1", b"{}")
    batch = {"id": "batch_1", "object": "batch", "created_at": 1, "input_file_id": "file-1"}
    store.put({**batch, "status": status}, owner_of({}))
    with pytest.raises(ApiError, match="the input of batch_1, which has not ended"):
        client.delete("/v1/files/file-1")
    store.put({**batch, "status": "completed"}, owner_of({}))
    assert client.delete("/v1/files/file-1").json()["deleted"]
    store.close()


def test_a_batch_is_cancelled_and_bounds_are_kept(demo_build, client_of, tmp_path, monkeypatch):
    long = {**GREEDY, "max_tokens": 400, "ignore_eos": True}
    monkeypatch.setattr("jaxpage.serving.batches.store.MAX_FILES", 3)
    settings: Any = {"batch_directory": str(tmp_path), "batch_directory_bytes": 1 << 20}
    with serving(demo_build, **settings) as running:
        client = client_of(running)
        file = upload(client, [line(number, long) for number in range(60)])
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.total == 60)
        with pytest.raises(openai.ConflictError, match="has not ended"):
            client.files.delete(file.id)
        assert client.batches.cancel(batch.id).status == "cancelling"
        assert wait_for_end(client, batch.id).status == "cancelled"
        with pytest.raises(openai.BadRequestError, match="more are over the 1048576"):
            client.files.create(file=b"x" * (1 << 20), purpose="batch")
        with pytest.raises(openai.APIStatusError, match="larger than"):
            client.files.create(file=b"x" * (2 << 20), purpose="batch")
        for _ in range(3 - len(list(client.files.list()))):
            upload(client, ["x"])
        with pytest.raises(openai.BadRequestError, match="3 files are stored"):
            upload(client, ["x"])


def test_a_batch_goes_on_when_the_server_starts_again(demo_build, client_of, tmp_path):
    lines = [line(number, {**GREEDY, "max_tokens": 24}) for number in range(30)]
    settings: Any = {"batch_directory": str(tmp_path), "shutdown_timeout_seconds": 0.0}
    with serving(demo_build, **settings) as running:
        client = client_of(running)
        file = upload(client, lines)
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        gone = client.batches.create(
            input_file_id=upload(client, lines).id,
            endpoint="/v1/completions",
            completion_window="24h",
        )
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 0)
        with (
            pytest.raises(ConfigError, match="another server uses"),
            serving(demo_build, **settings),
        ):
            pass
    num_answers = (tmp_path / f"{batch.id}.answers").read_bytes().count(b"\n")
    assert 0 < num_answers < 30
    (tmp_path / f"{gone.input_file_id}.jsonl").unlink()
    with serving(demo_build, **settings) as running:
        client = client_of(running)
        done = wait_for_end(client, batch.id)
        assert done.status == "completed" and done.request_counts.completed == 30
        content = client.files.content(done.output_file_id).read().splitlines()
        assert sorted(json.loads(each)["custom_id"] for each in content) == sorted(
            f"r{n}" for n in range(30)
        )
        failed = wait_for_end(client, gone.id)
        assert failed.status == "failed"
        assert failed.errors.data[0].message == "The input file does not exist any more"
    # A file of answers that is damaged is told without a path of the machine.
    with serving(demo_build, **settings) as running:
        client = client_of(running)
        new = upload(client, lines)
    record = json.loads((tmp_path / f"{batch.id}.json").read_text())
    record["record"] |= {"status": "in_progress", "input_file_id": new.id}
    (tmp_path / f"{batch.id}.json").write_text(json.dumps(record))
    (tmp_path / f"{batch.id}.answers").write_text("what is this\n")
    with serving(demo_build, **settings) as running:
        failed = wait_for_end(client_of(running), batch.id)
        assert failed.status == "failed"
        assert (
            failed.errors.data[0].message
            == "..., line 1 is not an answer of a batch: give another file"
        )
