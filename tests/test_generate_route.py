"""POST /v1/generate: token ids in, ids and arrays out.

The arrays have the bits of the engine's own outputs, and nothing is passed over.
"""

from __future__ import annotations

import base64
import json

import jsonschema
import numpy as np
import pytest

from jaxpage import LLM, SamplingParams
from jaxpage.serving.dialects.openai import DIALECT, DOCUMENT
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.generate import GenerateRequest, array_body, open_generate
from jaxpage.serving.wire.openapi import openapi
from jaxpage.serving.wire.reading import is_neutral
from tests.support.engines import invariants, make_llm
from tests.support.field_bounds import NEEDS, fields_at_bounds, fields_beyond
from tests.support.wire import VOCAB_SIZE, context

PROMPT = [5, 9, 2, 40, 41]
BODY = {"model": "demo", "prompt_token_ids": PROMPT}
SAMPLED = {"max_tokens": 7, "temperature": 0.8, "top_k": 6, "seed": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm():
    with make_llm("demo", largest_shapes=True, enable_return_sampling_mask=True) as llm:
        yield llm
        invariants(llm)


def open_route(**fields):
    return open_generate({**BODY, **fields}, context(vocab_size=VOCAB_SIZE))


def generate(llm: LLM, **fields):
    """Returns the body of the answer, as a client has it, and the engine's output."""
    exchange = open_route(**fields)
    (request,) = exchange.prompts
    (output,) = llm.generate([list(request.prompt)], request.params, use_tqdm=False)
    body = json.loads(json.dumps(exchange.whole([output]), allow_nan=False))
    jsonschema.validate(body, openapi(context(), [DOCUMENT])["components"]["schemas"]["Rollout"])
    return body, output


def array_of(body):
    values = np.frombuffer(
        base64.b64decode(body["data"]), np.dtype(body["dtype"]).newbyteorder("<")
    )
    return values.reshape(body["shape"])


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_arrays_have_the_bits_of_the_engine(mode, llm):
    body, output = generate(llm, **SAMPLED, n=2, logprobs=8, logprobs_mode=mode, prompt_logprobs=2)
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["weights_version"] == 0 and body["usage"]["completion_tokens"] == 14
    for choice, completion in zip(body["choices"], output.outputs, strict=True):
        assert choice["token_ids"] == completion.token_ids
        assert choice["cumulative_logprob"] == completion.cumulative_logprob
        expected = [
            e[t].logprob for e, t in zip(completion.logprobs, completion.token_ids, strict=True)
        ]
        logprobs = array_of(choice["logprobs"])
        assert logprobs.dtype == np.float32 and logprobs.tolist() == expected
        ids, top = array_of(choice["top_token_ids"]), array_of(choice["top_logprobs"])
        assert ids.shape == top.shape == (7, 8)
        for index, entry in enumerate(completion.logprobs):
            num_kept = int((ids[index] >= 0).sum())
            assert num_kept == (completion.num_kept[index] if mode == "processed" else 8)
            assert (top[index, num_kept:] == -np.inf).all() and (ids[index, num_kept:] == -1).all()
            for token_id, logprob in zip(ids[index, :num_kept], top[index, :num_kept], strict=True):
                assert entry[int(token_id)].logprob == logprob
        has_counts = "num_kept" in choice
        assert has_counts == (mode == "processed")
        assert not has_counts or array_of(choice["num_kept"]).tolist() == completion.num_kept
    scores = array_of(body["prompt_logprobs"])
    assert scores.tolist() == [
        entry[t].logprob for entry, t in zip(output.prompt_logprobs[1:], PROMPT[1:], strict=True)
    ]
    assert array_of(body["prompt_top_token_ids"]).shape == (len(PROMPT) - 1, 2)


def test_a_mask_has_the_ids_that_were_kept(llm):
    body, output = generate(llm, **SAMPLED, return_sampling_mask=True)
    (choice,), (completion,) = body["choices"], output.outputs
    mask = {name: array_of(array) for name, array in choice["sampling_mask"].items()}
    parts = np.split(mask["kept_token_ids"], np.cumsum(mask["num_kept"])[:-1])
    assert [part.tolist() for part in parts] == completion.sampling_mask.token_ids
    assert all(t in part for t, part in zip(choice["token_ids"], parts, strict=True))
    assert "logprobs" not in choice


def test_nothing_but_ids_unless_it_is_requested(llm):
    body, _ = generate(llm, **SAMPLED)
    (choice,) = body["choices"]
    assert choice.keys() == {
        "index",
        "token_ids",
        "finish_reason",
        "stop_reason",
        "cumulative_logprob",
        "weights_versions",
    }


def test_numbers_of_every_type_and_order_come_back():
    for array in (
        np.arange(6, dtype=">i2").reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        np.zeros((0, 4), np.int32),
    ):
        np.testing.assert_array_equal(array_of(array_body(array)), array)


def test_every_parameter_of_the_engine_is_honoured_or_refused():
    for field, name, value in fields_at_bounds("rollouts"):
        needs = NEEDS.get(("completions", field.name), {}) if field.name == "min_tokens" else {}
        needs |= {"top_k": 1} if name == "return_sampling_mask" else {}
        exchange = open_route(**{name: value, **needs})
        (prompt,) = exchange.prompts
        if (
            field.engine is not None
            and value != ""
            and not is_neutral(GenerateRequest, name, value)
        ):
            assert getattr(prompt.params, field.name) is not None, name
    names = GenerateRequest.model_fields.keys() - {"model", "prompt_token_ids"}
    of_engine = SamplingParams.__dataclass_fields__.keys() - {"thinking_markers"}
    assert names == of_engine | {"receipt", "request_id", "continue_from"}


@pytest.mark.parametrize(("name", "value", "place"), fields_beyond("rollouts"))
def test_a_value_beyond_a_bound_is_refused_by_its_name(name, value, place):
    with pytest.raises(ApiError) as refused:
        open_route(**{name: value})
    assert refused.value.status == 400 and refused.value.param == place


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"sampling_params": {"temperature": 0}}, "sampling_params"),
        ({"token_ids": [1]}, "token_ids"),
        ({"prompt": "x"}, "prompt"),
        ({"messages": []}, "messages"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids[0]"),
        ({"prompt_token_ids": [1] * 513}, "prompt_token_ids"),
        ({"return_sampling_mask": True, "top_k": 10**6, "max_tokens": 500}, "return_sampling_mask"),
        ({"logprobs": 20, "n": 128, "max_tokens": 500}, "logprobs"),
    ],
)
def test_what_it_does_not_do_is_refused(fields, param):
    with pytest.raises(ApiError) as refused:
        open_route(**fields)
    assert refused.value.status == 400 and refused.value.param == param


def test_its_path_is_listed():
    assert DIALECT.paths["/v1/generate"].open is open_generate
    assert "/v1/generate" in openapi(context(), [DOCUMENT])["paths"]
