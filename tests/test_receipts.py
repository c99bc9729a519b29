"""Receipts: what an engine gives to the last bit is verified, and nothing else ever is."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from safetensors.numpy import load_file

import jaxpage
from jaxpage import LLM, AsyncLLM, BeamSearchParams, SamplingParams, cli
from jaxpage.assembly import describe_engine
from jaxpage.cli.flags import RECEIPT_SETTINGS
from jaxpage.cli.verify import _settings_of
from jaxpage.errors import CapacityError, ReceiptError, UnsupportedError
from jaxpage.outputs import Logprob
from jaxpage.receipts import check_receiptable, parse_receipt, read_receipt, verify
from jaxpage.receipts.receipt import MAX_FILE_BYTES, checksum_of
from tests.support.engines import BLOCKS_OF_4, make_llm
from tests.support.running import SMALL, Running, running
from tests.support.sweeps import examples, few

ROOT = Path(__file__).parents[1]
DEMO = Path(jaxpage.__file__).parent / "demo"
PROMPT = "Once upon a time"
SAMPLED: dict[str, Any] = {"temperature": 1.5, "max_tokens": 8}
DRAFTS: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3}
pytestmark = pytest.mark.usefixtures("compiled_when_used", "largest_shapes")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", use_tqdm=False, **SMALL) as built:
        yield built


@pytest.fixture(scope="module")
def receipt(llm: LLM) -> dict[str, Any]:
    return make_receipt(llm, **SAMPLED, seed=3)


def make_receipt(llm: LLM, **params: Any) -> dict[str, Any]:
    """Returns a receipt as a file or an answer has it."""
    (output,) = llm.generate(PROMPT, SamplingParams(**params), use_tqdm=False, receipt=True)
    body: dict[str, Any] = json.loads(json.dumps(output.receipt))
    return body


def with_checksum(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "checksum": checksum_of(body)}


REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "max_tokens": 6},
    "samples": {**SAMPLED, "n": 2, "seed": 2**64 - 1},
    "the best": {**SAMPLED, "n": 1, "best_of": 3, "top_p": 0.9},
    "logits": {
        **SAMPLED,
        "logit_bias": {12: -3.5},
        "repetition_penalty": 1.3,
        "bad_words": ["lived"],
        "allowed_token_ids": list(range(5, 2000)),
        "min_tokens": 2,
        "logprobs": 3,
        "prompt_logprobs": 1,
    },
    "a stop": {"temperature": 0.0, "max_tokens": 60, "stop": ["a"], "min_p": 0.1},
    "a grammar": {**SAMPLED, "structured_outputs": {"choice": ["a king", "a queen"]}},
    "no limit": {"temperature": 0.0, "max_tokens": None, "stop": ["."], "user": "me"},
}


@pytest.mark.parametrize("name", few(REQUESTS, ["samples", "the best", "logits", "a grammar"]))
def test_an_answer_is_verified_alone_and_among_others(llm: LLM, name: str) -> None:
    body = make_receipt(llm, **REQUESTS[name])
    verdict = llm.verify(body)
    assert verdict.result == "equal", verdict
    assert verdict.num_tokens == sum(len(output["token_ids"]) for output in body["outputs"]) > 0
    assert body["request"]["params"]["max_tokens"] <= 512
    assert not {"user", "cache_salt", "logprobs"} & body["request"]["params"].keys()


def test_the_command_has_no_flag_for_what_a_receipt_decides(receipt):
    assert {*_settings_of(parse_receipt(receipt))} <= {*RECEIPT_SETTINGS}


def verify_in_a_process_of_its_own(path: Path) -> str:
    program = (
        "import sys\nfrom jaxpage.receipts import read_receipt\n"
        "from tests.support.engines import make_llm\nfrom tests.support.executables import *\n"
        "with SharedExecutables().in_use(optimized=False), make_llm('demo') as llm:\n"
        "    print(llm.verify(read_receipt(sys.argv[1]).body()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], cwd=ROOT, capture_output=True, text=True
    )
    return done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize("process", few(["this", "another"], ["this"]))
def test_drafts_small_blocks_and_neighbours_are_verified_by_a_plain_engine(
    process: str, llm: LLM, tmp_path: Path
) -> None:
    """The other engine has one request at a time in its blocks of 16, which changes no bit."""
    path = tmp_path / "receipt.json"
    settings: dict[str, Any] = {**BLOCKS_OF_4, "speculative_config": DRAFTS}
    with make_llm("demo", **settings) as busy:
        prompts = [f"{PROMPT} {PROMPT} {word}" for word in ("there", "a king", "in", "was")]
        params = SamplingParams(temperature=0.7, max_tokens=40)
        outputs = busy.generate(prompts, params, use_tqdm=False, receipt=True)
        assert sum(output.metrics.num_draft_tokens for output in outputs if output.metrics)
    path.write_text(json.dumps(outputs[1].receipt))
    if process == "this":
        verdict = str(llm.verify(read_receipt(str(path)).body()))
    else:
        verdict = verify_in_a_process_of_its_own(path)
    assert "result='equal'" in verdict, verdict


def test_the_hashes_are_those_of_the_checkpoint(receipt: dict[str, Any]) -> None:
    """They hash its tensors in the type of the computation, whatever panels they are in.

    Layer 4 drafts.
    """
    expected = {}
    of_model = load_file(DEMO / "model.safetensors").items()
    for name, array in ((name, each) for name, each in of_model if "layers.4." not in name):
        values = array.astype(np.float32)
        header = f"float32 {list(values.shape)}\n".encode()
        expected[name] = hashlib.sha256(header + values.tobytes()).hexdigest()
    assert receipt["weights"]["tensors"] == expected
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(expected.items()))
    assert receipt["weights"]["hash"] == hashlib.sha256(lines.encode()).hexdigest()


def test_a_divided_model_and_one_in_memory_have_the_same_hashes(
    llm: LLM, receipt: dict[str, Any]
) -> None:
    with LLM("demo", use_tqdm=False, tensor_parallel_reduction="invariant", **SMALL) as divided:
        assert divided._receipts.hash_weights()[1].tensors == receipt["weights"]["tensors"]
        verdict = divided.verify(receipt)
        assert verdict.result == "unknown" and "reduction" in verdict.reasons[0]
    parameters = {name: np.asarray(array) for name, array in llm.parameters().items()}
    with LLM.from_parameters(llm.hf_config, parameters, llm.tokenizer, **SMALL) as in_memory:
        assert in_memory.verify(receipt).result == "equal"
        _updates(in_memory, parameters, receipt)


def _updates(llm: LLM, parameters: dict[str, Any], receipt: dict[str, Any]) -> None:
    """Checks that other weights are named, and that a receipt has the hashes of its own."""
    name = "model.layers.2.mlp.up_proj.weight"
    changed = parameters[name].copy()
    changed[3, 5] = np.nextafter(changed[3, 5], np.float32(1))
    llm.update_parameters({**parameters, name: changed})
    verdict = llm.verify(receipt)
    assert verdict.result == "unknown" and verdict.difference is None
    assert f"other tensors: {name!r}" in verdict.reasons[0]
    without_names = copy.deepcopy(receipt)
    without_names["weights"]["tensors"] = None
    assert "the weights are not those" in llm.verify(with_checksum(without_names)).reasons[0]
    later = make_receipt(llm, **SAMPLED)
    assert llm.verify(later).result == "equal"
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=2), receipt=True)
    llm._driver.wait(llm._driver.call(lambda engine: setattr(engine, "weights_version", 7)))
    with pytest.raises(UnsupportedError, match="version 1 of the weights.*version 7"):
        list(stream)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the paths of all values that have no parts."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    if not items:
        yield path
    for key, item in items:
        yield from leaves(item, (*path, key))


def with_value(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(body)
    branch: Any = changed
    for key in path[:-1]:
        branch = branch[key]
    branch[path[-1]] = value
    return changed


def value_at(body: dict[str, Any], path: tuple[Any, ...]) -> Any:
    value: Any = body
    for key in path:
        value = value[key]
    return value


def another(value: Any) -> Any:
    """Returns a value of the same type that is not far away."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return value / 2 if value else 0.25
        case str() if value and all(letter in "0123456789abcdef" for letter in value):
            return value[:-1] + ("1" if value[-1] == "0" else "0")
        case str():
            return f"{value} "
        case list():
            return [3]
        case None:
            return 5
    raise AssertionError(value)


# A receipt with these changed, and the checksum made anew, is no other true one.
DECIDING = {"n", "temperature", "max_tokens", "structured_outputs"}


def test_no_changed_receipt_is_equal(llm: LLM, receipt: dict[str, Any]) -> None:
    """Each field is changed, with the old checksum and with its own."""
    assert llm.verify(receipt).result == "equal"
    assert llm.verify(json.loads(json.dumps(receipt).replace(".0,", ","))).result == "equal"
    _, weights = llm._receipts.hash_weights()
    known: dict[str, Any] = {}

    def generate(prompts: Any, params: Any) -> Any:
        key = repr((prompts, params))
        if key not in known:
            known[key] = llm.generate(prompts, params, use_tqdm=False)
        return known[key]

    def result(body: dict[str, Any]) -> str:
        try:
            return verify(parse_receipt(body), llm._receipts.facts, weights, 512, generate).result
        except ReceiptError:
            return "no receipt"

    paths = [path for path in leaves(receipt) if path[1:2] != ("tensors",) or "norm" in path[2]]
    equal_anyway = set()
    for path in paths:
        body = with_value(receipt, path, another(value_at(receipt, path)))
        assert result(body) != "equal", path
        if path != ("checksum",) and result(with_checksum(body)) == "equal":
            equal_anyway.add(path)
    params = {path for path in equal_anyway if path[:2] == ("request", "params")}
    assert equal_anyway - params == {("model",), ("engine", "processor")}
    assert not {path[2] for path in params} & DECIDING


@given(st.data())
@examples(15)
def test_what_is_no_receipt_is_refused_by_one_error(
    receipt: dict[str, Any], data: st.DataObject
) -> None:
    path = data.draw(st.sampled_from(list(leaves(receipt))))
    path = path[: data.draw(st.integers(1, len(path)))]
    json_values = st.none() | st.booleans() | st.floats() | st.text() | st.integers()
    value = data.draw(json_values | st.lists(json_values) | st.dictionaries(st.text(), json_values))
    try:
        parsed = parse_receipt(with_value(receipt, path, value))
    except ReceiptError as error:
        assert len(str(error)) < 2000
    else:
        assert checksum_of(parsed.body()) == checksum_of(with_value(receipt, path, value))


def test_missing_and_unknown_fields_are_refused(receipt: dict[str, Any]) -> None:
    for name in receipt:
        with pytest.raises(ReceiptError):
            parse_receipt({key: value for key, value in receipt.items() if key != name})
    for part in ("engine", "weights", "request"):
        for name in receipt[part]:
            fewer = {key: value for key, value in receipt[part].items() if key != name}
            with pytest.raises(ReceiptError, match=f"{part}.{name}"):
                parse_receipt({**receipt, part: fewer})
        with pytest.raises(ReceiptError, match=f"{part}.more"):
            parse_receipt({**receipt, part: {**receipt[part], "more": 1}})
    with pytest.raises(ReceiptError, match="has version 2, and this jaxpage reads 1"):
        parse_receipt({**receipt, "version": 2})
    with pytest.raises(ReceiptError, match="no receipt"):
        parse_receipt({"version": 1})


def test_the_first_token_that_differs_is_reported(llm: LLM, receipt: dict[str, Any]) -> None:
    output = receipt["outputs"][0]
    token_id = output["token_ids"][3]
    verdict = llm.verify(with_value(receipt, ("outputs", 0, "token_ids", 3), token_id + 1))
    assert verdict.result == "different" and verdict.difference is not None
    assert (verdict.difference.token, verdict.difference.field) == (3, "token_ids")
    assert (verdict.difference.receipt_value, verdict.difference.computed_value) == (
        token_id + 1,
        token_id,
    )
    verdict = llm.verify(with_value(receipt, ("outputs", 0, "logprobs", 4), "7fc00000"))
    assert json.loads(json.dumps(verdict.body(), allow_nan=False))["difference"]["token"] == 4
    bits = int(output["logprobs"][5], 16) ^ 1
    verdict = llm.verify(with_value(receipt, ("outputs", 0, "logprobs", 5), f"{bits:08x}"))
    difference = verdict.difference
    assert difference is not None and (difference.token, difference.field) == (5, "logprobs")
    assert difference.receipt_logprob != difference.computed_logprob
    assert repr(difference.receipt_logprob) in verdict.reasons[0]
    assert repr(difference.computed_logprob) in verdict.reasons[0]
    shorter = copy.deepcopy(receipt)
    for name in ("token_ids", "logprobs"):
        del shorter["outputs"][0][name][-1]
    difference = llm.verify(shorter).difference
    assert difference is not None and (difference.token, difference.receipt_value) == (7, None)


def test_bits_that_depend_on_the_batch_are_a_difference(llm: LLM, receipt: dict[str, Any]) -> None:
    """An engine that gives up does not tell."""
    parsed = parse_receipt(receipt)
    _, weights = llm._receipts.hash_weights()
    about = parsed, llm._receipts.facts, weights, 512

    def among_others(prompts: Any, params: Any) -> Any:
        (output, *_) = llm.generate(prompts, params, use_tqdm=False)
        if len(prompts) == 4:
            entry = output.outputs[0].logprobs[6]
            token_id, logprob = next(iter(entry.items()))
            entry[token_id] = Logprob(float(np.nextafter(np.float32(logprob.logprob), 0)), 1)
        return [output]

    difference = verify(*about, among_others).difference
    assert difference is not None
    assert (difference.computed, difference.token, difference.field) == (
        "among others",
        6,
        "logprobs",
    )

    def too_much(prompts: Any, params: Any) -> Any:
        raise CapacityError("there is no room")

    verdict = verify(*about, too_much)
    assert (verdict.result, verdict.reasons) == ("unknown", ("there is no room",))
    assert "room for 11" in verify(*about[:3], 11, too_much).reasons[0]


def test_a_grammar_needs_its_library(llm: LLM) -> None:
    body = make_receipt(llm, **SAMPLED, structured_outputs={"choice": ["a king", "a queen"]})
    assert body["engine"]["llguidance"]
    verdict = llm.verify(with_checksum(with_value(body, ("engine", "llguidance"), "0.1")))
    assert verdict.result == "unknown" and "llguidance '0.1'" in verdict.reasons[0]


def test_another_processor_makes_a_difference_no_proof(llm: LLM, receipt: dict[str, Any]) -> None:
    elsewhere = with_value(receipt, ("engine", "processor"), "another one")
    assert llm.verify(with_checksum(elsewhere)).result == "equal"
    changed = with_value(elsewhere, ("outputs", 0, "token_ids", 0), 7)
    verdict = llm.verify(changed)
    assert verdict.result == "unknown" and "no proof" in verdict.reasons[1]


def test_what_has_no_receipt_is_refused_by_its_name(llm: LLM) -> None:
    plain = {"has_adapter": False, "has_vectors": False}
    with pytest.raises(UnsupportedError, match="LoRA adapter"):
        check_receiptable(SamplingParams(), **{**plain, "has_adapter": True})
    with pytest.raises(UnsupportedError, match="pictures or prompt_embeds"):
        check_receiptable(SamplingParams(), **{**plain, "has_vectors": True})
    with pytest.raises(UnsupportedError, match="beam_width=2"):
        llm.generate(PROMPT, BeamSearchParams(2), use_tqdm=False, receipt=True)
    with (
        make_llm("demo", speculative_config={**DRAFTS, "acceptance": "rejection"}) as lossy,
        pytest.raises(UnsupportedError, match="acceptance 'rejection'"),
    ):
        lossy.generate(PROMPT, use_tqdm=False, receipt=True)


def test_asynchronous_answers_have_the_same_receipts(llm: LLM) -> None:
    params = SamplingParams(**SAMPLED, seed=5)

    async def run() -> list[Any]:
        async with AsyncLLM("demo", **SMALL) as other:
            streams = (
                other.generate(PROMPT, params, receipt=True),
                other.stream(PROMPT, params, receipt=True),
            )
            return [[output.receipt async for output in stream] for stream in streams]

    expected = make_receipt(llm, **SAMPLED, seed=5)
    for *others, last in asyncio.run(run()):
        assert not any(others)
        assert last == expected


# The command line.

FLAGS = [
    *("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--num-blocks", "129", "-q"),
]


def test_another_mode_of_a_gpu_is_refused_by_its_name(llm: LLM, receipt: dict[str, Any]) -> None:
    assert receipt["engine"]["batch_invariant"] is False
    verdict = llm.verify(with_checksum(with_value(receipt, ("engine", "batch_invariant"), True)))
    assert verdict.result == "unknown"
    assert verdict.reasons == (
        "the receipt was made with batch_invariant True, and this engine has False",
    )
    kernels = llm.spec.described.kernels
    assert kernels is not None
    exact = dataclasses.replace(llm.spec.described, kernels=kernels._replace(batch_invariant=True))
    built = llm._receipts._built
    spec = dataclasses.replace(llm.spec, described=exact)
    assert describe_engine(built.model, spec, None).batch_invariant


def run(*words: str) -> int:
    try:
        return cli.main(words)
    except SystemExit as error:
        return int(error.code or 0)


def test_the_command_line_makes_and_verifies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "receipt.json"
    words = ["generate", PROMPT, "--receipt", str(path), "--max-tokens", "8", *FLAGS]
    assert run(*words, "--dtype", "float32") == 0
    assert run(*words) == 2, "the file exists"
    body = json.loads(path.read_text())
    assert body["outputs"][0]["text"] in capsys.readouterr().out
    assert run("verify", str(path), *FLAGS) == 0
    assert capsys.readouterr().out.startswith("Equal: 8 tokens")

    path.write_text(json.dumps(with_value(body, ("outputs", 0, "token_ids", 2), 9)))
    assert run("verify", str(path), "demo", "--json", *FLAGS) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["result"], report["difference"]["token"]) == ("different", 2)

    for changes, reason in (
        ({"model": "org/somewhere"}, "which is not on this machine"),
        ({"engine": {**body["engine"], "jaxlib": "0.1"}}, "jaxlib '0.1'"),
        ({"engine": {**body["engine"], "dtype": "float8"}}, "dtype"),
    ):
        path.write_text(json.dumps({**body, **changes}))
        assert run("verify", str(path), *FLAGS) == 3
        reported_line = capsys.readouterr().out
        assert reported_line.startswith("This machine cannot tell: ") and reason in reported_line


def test_a_file_that_is_no_receipt_is_wrong_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], receipt: dict[str, Any]
) -> None:
    path = tmp_path / "receipt.json"
    assert run("verify", str(path)) == 2
    assert run("verify", str(tmp_path)) == 2
    with open(path, "wb") as file:
        file.truncate(2**30)
    assert run("verify", str(path)) == 2
    assert f"more than {MAX_FILE_BYTES} bytes" in capsys.readouterr().err
    written = json.dumps(receipt)
    for text in (
        "[" * 100_000,
        "{}",
        "\0",
        written.replace('"version": 1', '"version": 2'),
        written.replace('"version": 1', '"version": 1, "version": 1'),
        written.replace('"temperature": 1.5', '"temperature": NaN'),
        written.replace('"n": 1', f'"n": {"9" * 5000}'),
        written.replace('"n": 1', '"n": 2'),
        written.replace('"n": 1', '"nn": 1'),
    ):
        path.write_text(text)
        if '"n": 2' in text or '"nn"' in text:
            with pytest.raises(ReceiptError, match="parameters"):
                verify_file(path, receipt)
        else:
            assert run("verify", str(path)) == 2, text[:40]
    os.chmod(path, 0o600)


def verify_file(path: Path, receipt: dict[str, Any]) -> None:
    genuine = parse_receipt(receipt)
    verify(read_receipt(path), genuine.engine, genuine.weights, 512, lambda prompts, params: [])


# HTTP.


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as server:
        yield server


MESSAGES = [{"role": "user", "content": "Who lived there?"}]
OPTIONS = {"temperature": 0.9, "num_predict": 8}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 8, "n": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 8, "temperature": 0.9},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 8},
    "/v1/responses": {"input": "Who?", "max_output_tokens": 8},
    "/api/chat": {"messages": MESSAGES, "options": OPTIONS},
    "/api/generate": {"prompt": PROMPT, "options": OPTIONS},
}


def receipts_in(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if value.get("receipt"):
            yield value["receipt"]
        for item in value.values():
            yield from receipts_in(item)


@pytest.mark.parametrize("path", BODIES)
def test_each_api_answers_with_a_receipt(server: Running, llm: LLM, path: str) -> None:
    for stream in (False, True):
        body = {"model": "demo", **BODIES[path], "stream": stream, "receipt": True}
        answer = httpx.post(server.address + path, json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
        parts = [json.loads(line) for line in lines if line.startswith("{")]
        *others, last = parts
        assert not [each for part in others for each in receipts_in(part)]
        (receipt,) = receipts_in(last)
        assert receipt["model"] == "demo" and receipt["weights"]["tensors"] is None
        assert llm.verify(receipt).result == "equal"
        without = httpx.post(server.address + path, json={**body, "receipt": False}, timeout=60)
        assert "receipt" not in without.text


def test_requests_without_receipts_say_so(server: Running) -> None:
    def refuse(path: str, **body: Any) -> str:
        answer = httpx.post(server.address + path, json={"model": "demo", **body}, timeout=60)
        assert answer.status_code == 400, answer.text
        return str(answer.json()["error"]["message"])

    request = {"prompt": "a", "receipt": True}
    assert "one prompt, not 2" in refuse("/v1/completions", **{**request, "prompt": ["a", "b"]})
    beams = {**request, "use_beam_search": True, "n": 2}
    assert "beam search" in refuse("/v1/completions", **beams)
    assert "max_tokens=0" in refuse("/v1/completions", **request, echo=True, max_tokens=0)
    assert "receipt" in refuse("/v1/embeddings", input="a", receipt=True)
    assert "receipt" in refuse("/v1/completions", prompt="a", receipt="yes")
