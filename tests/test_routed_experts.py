"""return_routed_experts and return_hidden_states: both are those of transformers, of every token
once, however an engine computes it.
"""

from __future__ import annotations

import base64
import dataclasses

import numpy as np
import pytest

from jaxpage import SamplingParams
from jaxpage.decoding import advancing
from jaxpage.errors import UnsupportedError
from jaxpage.scheduling import admitting
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.generate import open_generate
from jaxpage.step.edits import Route
from tests.support.engines import LLAMA, invariants, make_llm, run_giving_way
from tests.support.random_checkpoints import random_checkpoint
from tests.support.sweeps import few
from tests.support.wire import context

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")

pytestmark = pytest.mark.usefixtures("decode_as_chunks")
LAYERS = (0, 2)  # those that have experts
NAME = "qwen3-moe-mixed"
PARAMS = SamplingParams(
    temperature=0.9,
    seed=7,
    max_tokens=8,
    ignore_eos=True,
    logprobs=0,
    return_routed_experts=True,
    return_hidden_states=True,
)
SILENT = dataclasses.replace(PARAMS, return_routed_experts=False, return_hidden_states=False)
PROMPT = [3, 9, 1, 7, 7, 2, 30, 3, 9, 1, 7, 7, 2, 30, 5, 6, 3, 9, 1, 7, 7]
RETURNS = {"enable_return_routed_experts": True, "enable_return_hidden_states": True}
MODEL = {"max_model_len": 64, "dtype": "float32", **RETURNS}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Returns the directory, and transformers' model."""
    from tests.support.hf_models import save_model

    directory = tmp_path_factory.mktemp(NAME)
    return directory, save_model(NAME, directory, head_dim=16)


@pytest.fixture(scope="module")
def llm(checkpoint):
    with make_llm(checkpoint[0], **MODEL) as llm:
        yield llm
        invariants(llm)


@pytest.fixture(scope="module")
def alone(llm):
    return generate(llm)


def generate(llm, params=PARAMS, prompt=PROMPT):
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return output.outputs


def check_oracle(model, completion):
    """Compares routes with the experts that a router of transformers rates highest."""
    token_ids = [*PROMPT, *completion.token_ids[:-1]]
    with torch.no_grad():
        rated = model(torch.tensor([token_ids]), output_router_logits=True).router_logits
    routes = completion.routed_experts
    assert routes.dtype == np.int16
    assert routes.shape[:2] == (len(token_ids), model.config.num_hidden_layers)
    for logits, layer in zip(rated, LAYERS, strict=True):
        expected = np.asarray(logits.reshape(len(token_ids), -1).topk(routes.shape[2]).indices)
        np.testing.assert_array_equal(np.sort(routes[:, layer]), np.sort(expected))
    check_hidden_states(model, completion)
    others = [layer for layer in range(routes.shape[1]) if layer not in LAYERS]
    assert (routes[:, others] == -1).all()


def check_hidden_states(model, completion):
    """Compares them with those of transformers, and what the head makes of them with the log
    probabilities.
    """
    token_ids = [*PROMPT, *completion.token_ids[:-1]]
    states = completion.hidden_states
    with torch.no_grad():
        expected = model.model(torch.tensor([token_ids])).last_hidden_state[0, len(PROMPT) - 1 :]
        logprobs = model.lm_head(torch.tensor(states)).log_softmax(-1).numpy()
    assert states.dtype == np.float32
    np.testing.assert_allclose(states, expected.numpy(), atol=1e-4)
    for index, (token_id, entry) in enumerate(
        zip(completion.token_ids, completion.logprobs, strict=True)
    ):
        assert logprobs[index, token_id] == pytest.approx(entry[token_id].logprob, abs=1e-5)


def test_the_experts_are_those_of_transformers(checkpoint, alone):
    check_oracle(checkpoint[1], alone[0])


def one_too_late(plan, result, routes_TLX):
    return _routes(plan, result, np.roll(routes_TLX, 1, axis=0))


def in_reverse(plan, result, routes_TLX):
    return _routes(plan, result, routes_TLX[:, ::-1])


_routes = advancing._routes


@pytest.mark.parametrize("mistake", few([one_too_late, in_reverse], [one_too_late]))
def test_the_oracle_sees_planted_mistakes(mistake, checkpoint, llm, monkeypatch):
    monkeypatch.setattr(advancing, "_routes", mistake)
    with pytest.raises(AssertionError):
        check_oracle(checkpoint[1], generate(llm)[0])


def same(outputs, others):
    for output, other in zip(outputs, others, strict=True):
        assert output == other
        np.testing.assert_array_equal(output.routed_experts, other.routed_experts)
        np.testing.assert_array_equal(output.hidden_states, other.hidden_states)


ENGINES = {
    "chunks of 16": {"max_num_batched_tokens": 16, "enable_prefix_caching": False},
    "several steps": {"num_scheduler_steps": 4},
    "drafts": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 1,
        }
    },
}


@pytest.mark.parametrize("name", few(ENGINES, ["chunks of 16", "drafts"]))
def test_an_engine_changes_no_route(name, checkpoint, alone):
    with make_llm(checkpoint[0], **MODEL, **ENGINES[name]) as other:
        same(generate(other), alone)


def test_a_cached_prompt_is_computed_for_its_routes(llm, alone):
    generate(llm, SILENT)
    (output,) = llm.generate([PROMPT], PARAMS, use_tqdm=False)
    same(output.outputs, alone)
    assert output.metrics.num_cached_tokens == 0


def test_what_is_cached_has_no_routes_unless_it_is_computed(llm, alone, monkeypatch):
    """The test above sees it if a prompt is taken from the cache all the same."""
    generate(llm, SILENT)
    beginnings = admitting.beginnings

    def cache_all_the_same(group, manager):
        params, group.request.__dict__["params"] = group.request.params, SILENT
        try:
            yield from list(beginnings(group, manager))
        finally:
            group.request.__dict__["params"] = params

    monkeypatch.setattr(admitting, "beginnings", cache_all_the_same)
    with pytest.raises(AssertionError):
        same(generate(llm), alone)


@pytest.mark.parametrize("step", few([0, 5], [5]))
def test_preemption_changes_no_route(step, llm, alone):
    engine = llm._engine
    elder = dataclasses.replace(PARAMS, max_tokens=20)
    for name, params in (("elder", elder), ("other", PARAMS)):
        reporter = engine.add(name, engine.prepare(None, PROMPT, params))
    run_giving_way(engine, step)
    same(reporter.whole().outputs, alone)


def test_samples_share_the_routes_of_their_prompt(llm, alone):
    outputs = generate(llm, dataclasses.replace(PARAMS, n=3))
    same(outputs[:1], alone)
    for output in outputs:
        routes = output.routed_experts
        assert len(routes) == len(PROMPT) + len(output.token_ids) - 1
        np.testing.assert_array_equal(routes[: len(PROMPT)], alone[0].routed_experts[: len(PROMPT)])
        assert len(output.hidden_states) == len(output.token_ids)
        np.testing.assert_array_equal(output.hidden_states[0], alone[0].hidden_states[0])


def test_a_stream_has_them_at_the_end(llm, alone):
    parts = [part.outputs[0] for part in llm.stream(PROMPT, PARAMS)]
    for part in parts[:-1]:
        assert part.routed_experts is part.hidden_states is None
    np.testing.assert_array_equal(parts[-1].routed_experts, alone[0].routed_experts)
    np.testing.assert_array_equal(parts[-1].hidden_states, alone[0].hidden_states)


def test_the_route_of_http_has_the_arrays(llm, alone):
    exchange = open_generate(
        {
            **{"model": "demo", "prompt_token_ids": PROMPT, "temperature": 0.9, "seed": 7},
            **{"max_tokens": 8, "ignore_eos": True, "return_routed_experts": True},
            **{"return_hidden_states": True},
        },
        context(),
    )
    outputs = llm.generate([PROMPT], exchange.prompts[0].params, use_tqdm=False)
    choice = exchange.whole(outputs)["choices"][0]
    for name, dtype in (("routed_experts", "int16"), ("hidden_states", "float32")):
        array = choice[name]
        numbers = np.frombuffer(base64.b64decode(array["data"]), dtype).reshape(array["shape"])
        assert array["dtype"] == dtype
        np.testing.assert_array_equal(numbers, getattr(alone[0], name))
    body = {"model": "demo", "prompt_token_ids": PROMPT, "return_hidden_states": True}
    with pytest.raises(ApiError, match="could have 76800000 numbers .*at most 64000000"):
        open_generate({**body, "max_tokens": 300, "n": 2}, context(hidden_size=128_000))


def test_who_does_not_ask_has_no_routes(llm, alone):
    (output,) = generate(llm, SILENT)
    assert output.routed_experts is output.hidden_states is None
    assert output == alone[0], "the same tokens and log probabilities"


def test_refusals(checkpoint, tmp_path):
    with make_llm(checkpoint[0], max_model_len=64) as plain:
        for name in ("return_routed_experts", "return_hidden_states"):
            with pytest.raises(UnsupportedError, match=f"needs enable_{name}=True"):
                generate(plain, dataclasses.replace(SILENT, **{name: True}))
    with pytest.raises(UnsupportedError, match="the model has no experts"):
        make_llm(random_checkpoint(tmp_path, LLAMA), enable_return_routed_experts=True)


def test_routes_of_rows_and_of_paths():
    """A row that is not asked for is passed over, and so are drafts that were wrong."""
    routes = np.arange(6, dtype=np.int16)[:, None, None]
    rows = [
        advancing_row(4, 10, 3, is_routed=False),
        advancing_row(5, 20, 3, is_routed=True),
    ]
    plan, result = Fake(rows=rows), Fake(paths=np.array([[0, 1, -1], [3, 5, -1]]))
    (edit,) = _routes(plan, result, routes)
    assert edit == Route(5, 20, [routes[3], routes[5]])


class Fake:
    def __init__(self, **fields):
        self.__dict__ |= fields


def advancing_row(sequence_id, start, count, *, is_routed):
    from jaxpage.step.plan import Row

    return Row(sequence_id, start, tuple(range(count)), (), is_routed=is_routed)
