"""`tools/lab/compare_speculation.py`: its ratios by hand, and what it sends to a server that is a
script, and stops it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from tests.support.engines import LLAMA
from tests.support.random_checkpoints import random_checkpoint
from tests.support.tokenizers import write_tokenizer
from tools.lab import compare_speculation
from tools.lab.compare_speculation import cells, measure
from tools.lab.peers.llama_server import Run, run_server

ROOT = Path(__file__).parents[2]
# It answers with the last token of the prompt again and again, but to long prompts with 9 where it
# drafts; half of the tokens after the first are drafts that were accepted. It writes down what it
# was asked.
SERVER = """#!{python}
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
if "--help" in sys.argv:
    sys.exit(print("--spec-type none,draft-simple,ngram-simple,ngram-mod   comma-separated"))
if "--version" in sys.argv:
    sys.exit(print("version: 7 (abc)", file=sys.stderr))
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
drafts = flags["--spec-type"] != "none"

def note(**what):
    with open("{log}", "a") as log:
        print(json.dumps({{"pid": os.getpid(), **what}}), file=log)

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *words):
        pass

    def do_GET(self):
        self.answer(200, {{}})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        note(path=self.path, asked=asked)
        if flags["--spec-type"] == "ngram-none":
            time.sleep(600)
        if flags["--spec-type"] == "ngram-full":
            return self.answer(503, "no room")
        if flags["--spec-type"] == "ngram-killed":
            os._exit(5)
        token = 9 if drafts and len(asked["prompt"]) > 200 else asked["prompt"][-1]
        accepted = {{"draft_n_accepted": asked["n_predict"] // 2}} if drafts else {{}}
        self.answer(200, {{"tokens": [token] * asked["n_predict"], "timings": accepted}})

    def answer(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

with open(flags.get("--model", "/dev/null"), "rb") as model:
    note(flags=sys.argv[1:], magic=model.read(4).decode())
if flags["--spec-type"] == "ngram-broken":
    sys.exit("no such type")
ThreadingHTTPServer((flags["--host"], int(flags["--port"])), Handler).serve_forever()
"""


@pytest.fixture
def server(tmp_path):
    """Returns the path of the script, and a function that reads what it wrote down."""
    path, log = tmp_path / "llama-server", tmp_path / "asked.jsonl"
    path.write_text(SERVER.format(python=sys.executable, log=log))
    path.chmod(0o755)
    yield path, lambda: [json.loads(line) for line in log.read_text().splitlines()]
    for pid in {json.loads(line)["pid"] for line in log.read_text().splitlines()}:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "llama"
    return write_tokenizer(random_checkpoint(path, LLAMA))


def test_ratios_by_hand() -> None:
    """Without drafts 40 tokens take 2, 4, 4, 8 and 8 seconds.

    Each ratio is to the mean of two of these.
    """
    seconds = iter([2.0, 2.0, 4.0, 1.0, 4.0, 6.0, 8.0, 4.0, 8.0])
    order = []

    def run(kind: str) -> Run:
        order.append(kind)
        changed = kind == "b" and len(order) == 4
        outputs = [[1] * 20, [2] * 19 + [7 if changed else 3]]
        return Run(next(seconds), outputs, {"a": 19, "b": 0, "none": 0}[kind])

    pairs = measure(run, ["a", "b"], 2)
    assert order == ["none", "a", "none", "b", "none", "a", "none", "b", "none"]
    assert {kind: cells(pairs_of_kind) for kind, pairs_of_kind in pairs.items()} == {
        "none": ["1.00", "8 (5 to 10)", "0.75 (0.50 to 1.00)", "8 of 8"],
        "a": ["2.00", "13 (7 to 20)", "1.25 (1.00 to 1.50)", "4 of 4"],
        "b": ["1.00", "25 (10 to 40)", "3.00 (2.00 to 4.00)", "3 of 4"],
    }


def test_what_is_sent(server, port, model, monkeypatch, capsys) -> None:
    path, requested = server
    words = [str(model), "--server", str(path), "--port", str(port), "--tasks", "chat", "summarise"]
    words += ["--batches", "1", "2", "--max-output", "5", "--repeats", "1", "--flags", "-fa off"]
    words += ["--num-prompts", "3"]
    monkeypatch.setattr(sys, "argv", ["compare_speculation.py", *words])
    compare_speculation.main()
    shown = capsys.readouterr().out
    assert "`python tools/lab/compare_speculation.py llama --server llama-server --port" in shown
    assert "llama.cpp 7 (abc)" in shown and shown.count("\n| chat |") == 6
    (row,) = [line for line in shown.splitlines() if line.startswith("| summarise | 2 | ngram-mod")]
    assert row.split(" | ")[3] == "2.00" and row.endswith(" | 0 of 4 |")
    (row,) = [line for line in shown.splitlines() if line.startswith("| chat | 2 | ngram-mod")]
    assert row.split(" | ")[3] == "2.00" and row.endswith(" | 4 of 4 |")

    notes = requested()
    starts = [note["flags"] for note in notes if "flags" in note]
    kinds = [flags[flags.index("--spec-type") + 1] for flags in starts]
    assert kinds == ["none", "ngram-simple", "none", "ngram-mod", "none"] * 4
    assert {note.get("magic", "GGUF") for note in notes} == {"GGUF"}
    assert all(flags[-2:] == ["-fa", "off"] for flags in starts)
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = (ROOT / "jaxpage/bench/tasks/summarise.txt").read_text().split("\n====\n")
    prompts = [tokenizer(each.strip())["input_ids"] for each in text[:4]]
    last = [note for note in notes if note["pid"] == notes[-1]["pid"]]
    flags, *requests = [note.get("asked") or note["flags"] for note in last]
    max_length = max(map(len, prompts))
    assert flags[flags.index("--parallel") + 1] == "2"
    assert int(flags[flags.index("--ctx-size") + 1]) >= 2 * (max_length + 5)
    greedy = {"temperature": 0.0, "samplers": ["top_k"], "top_k": 1}
    others = {"ignore_eos": True, "cache_prompt": False, "return_tokens": True, **greedy}
    expected = [{"prompt": prompt, "n_predict": 5, **others} for prompt in prompts]
    warming = [{"prompt": prompt[:8], "n_predict": 2, **others} for prompt in prompts[:2]]
    for begin, requests_then in ((0, warming), (2, expected[:2]), (4, expected[2:])):
        assert sorted(requests[begin : begin + 2], key=str) == sorted(requests_then, key=str)
    assert len(requests) == 6
    assert {note.get("path", "/completion") for note in notes} == {"/completion"}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("ngram-broken", "the server ended with status 1\nno such type"),
        ("ngram-full", "refused a request with status 503: b'\"no room\"'"),
        ("ngram-killed", "llama-server: Remote end closed connection without response"),
    ],
)
def test_a_server_that_fails(kind, said, server, port, model, monkeypatch) -> None:
    words = [str(model), "--server", str(server[0]), "--port", str(port), "--types", kind]
    words += ["--tasks", "chat", "--batches", "1", "--repeats", "1"]
    words += ["--num-prompts", "1"]
    monkeypatch.setattr(sys, "argv", ["compare_speculation.py", *words])
    with pytest.raises(SystemExit) as ended:
        compare_speculation.main()
    assert said in ended.value.code


def test_a_port_that_is_taken(server, port) -> None:
    server[0].with_name("asked.jsonl").touch()
    taken = pytest.raises(SystemExit, match=f"--port {port}: Address already in use")
    with (
        socket.create_server(("127.0.0.1", port)),
        taken,
        run_server(str(server[0]), port, ["--spec-type", "none"]),
    ):
        raise AssertionError("a server was started")


def test_a_request_to_end_stops_the_server(server, port, model) -> None:
    """The server computes at that time, and the fixture looks for its process."""
    path, requested = server
    words = [str(model), "--server", str(path), "--port", str(port), "--types", "ngram-none"]
    words += ["--tasks", "chat", "--batches", "2", "--repeats", "1", "--num-prompts", "2"]
    command = [sys.executable, str(ROOT / "tools/lab/compare_speculation.py"), *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as program:
        log, end = path.with_name("asked.jsonl"), time.monotonic() + 60
        try:
            while not (log.exists() and len(requested()) > 6):  # the second server has a request
                assert program.poll() is None and time.monotonic() < end
                time.sleep(0.05)
        finally:
            program.terminate()
        assert b"KeyboardInterrupt" in program.communicate(timeout=30)[1]
        assert program.returncode == -signal.SIGINT


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["m", "--server", "/no/such"], "'/no/such': there is no such program"),
        (["m", "--server", "true", "--draft", "/no/such"], "--draft /no/such: there is no such"),
        (["m", "--server", "true", "--max-output", "1"], "1 row, 1 prompt, 1 round and 2 tokens"),
        (["/no/such", "--server", "true"], "/no/such is no model: it is no GGUF file and has no"),
        ([str(ROOT / "LICENSE"), "--server", "true"], "its --help names no --spec-type with n-gr"),
    ],
)
def test_wrong_use(words, said, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["compare_speculation.py", *words])
    with pytest.raises(SystemExit) as ended:
        compare_speculation.main()
    assert said in f"{ended.value.code} {capsys.readouterr().err}"


def test_the_file_that_is_written_has_the_tokens_and_the_numbers(model, tmp_path) -> None:
    """transformers and safetensors read the model.

    The rows of queries are interleaved by halves of heads.
    """
    path = tmp_path / "model.gguf"
    compare_speculation.write_gguf(model, LLAMA, str(path), "float32")
    reader, tokenizer = gguf.GGUFReader(path), AutoTokenizer.from_pretrained(model)
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    ids = range(len(tokenizer))
    assert tokens[: len(ids)] == tokenizer.convert_ids_to_tokens(ids)
    assert tokens[len(ids)] == f"[PAD{len(ids)}]" and len(tokens) == LLAMA["vocab_size"]
    types = reader.fields["tokenizer.ggml.token_type"].contents()
    assert types[:2] == [gguf.TokenType.CONTROL, gguf.TokenType.NORMAL] and types[-1] == 5
    assert reader.fields["tokenizer.ggml.eos_token_id"].contents() == tokenizer.eos_token_id
    stored = load_file(model / "model.safetensors")
    written = {tensor.name: tensor.data for tensor in reader.tensors}
    assert len(written) == len(stored)
    down = stored["model.layers.1.mlp.down_proj.weight"]
    assert np.array_equal(written["blk.1.ffn_down.weight"], down)
    queries = stored["model.layers.0.self_attn.q_proj.weight"].reshape(4, 2, 8, 64)
    rows = written["blk.0.attn_q.weight"].reshape(4, 8, 2, 64)
    assert all(np.array_equal(rows[:, :, half], queries[:, half]) for half in (0, 1))
