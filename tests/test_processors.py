"""Penalties, biases, masks and bad words: against transformers, against float64 by definition, and
wherever a request goes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpage import SamplingParams
from jaxpage.assembly.sampling_defaults import read_sampling_defaults
from jaxpage.device.inputs.buckets import Bucket, BucketMenu
from jaxpage.device.inputs.step_inputs import (
    ProcessorInputs,
    TableShape,
    processor_shapes,
    unpack,
)
from jaxpage.device.logits_processors import process_logits
from jaxpage.device.sampler import draw
from jaxpage.engine.batch_builder import BatchBuilder
from jaxpage.engine.processor_inputs import processor_inputs_of
from jaxpage.engine.text import words_as_token_ids
from jaxpage.errors import CheckpointError, UnsupportedError
from jaxpage.scheduling.plan_builder import sample_of, suppression
from jaxpage.shapes import MAX_BIASES, NOTHING_ALLOWED
from jaxpage.step import token_masks
from jaxpage.step.plan import Row, Sample, StepPlan
from jaxpage.step.request import Request, Sequence
from jaxpage.step.token_masks import mask_of
from tests.support.engines import (
    LLAMA,
    LogitsWitness,
    invariants,
    make_llm,
)
from tests.support.random_checkpoints import random_checkpoint
from tests.support.reference_sampling import drawn, ends_with, processed
from tests.support.sweeps import examples

pytestmark = pytest.mark.usefixtures("largest_shapes")

# ---- the step's part alone: requests as plans know them, logits of our own

NUM_ROWS, VOCAB, CONTEXT = 4, 75, 32  # the mask has a last word that is not full
BUCKET = Bucket(NUM_ROWS, NUM_ROWS, 1)
BUILDER = BatchBuilder(
    BucketMenu((BUCKET,), (Bucket(16, NUM_ROWS, 16),)),
    table_width=2,
    block_size=16,
    blocks=[range(1, 9)],
    vocab_size=VOCAB,
)
EOS = frozenset({0})
NEUTRAL = jax.tree.map(
    lambda shape: np.zeros(shape.shape, shape.dtype),
    processor_shapes(NUM_ROWS, vocab_size=VOCAB, context=CONTEXT),
)


def plan_of(row, *seeds):
    return StepPlan(
        1,
        (row,),
        tuple(Sample(0, 0, row.sequence_id, SamplingParams(), seed, 0, 1) for seed in seeds),
    )


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32, 2**33 + 5, 2**63, 2**64 - 1])
def test_all_bits_of_a_seed_reach_the_device(seed):
    batch = BUILDER.build(plan_of(Row(7, 0, (3,), ((1,),)), seed))
    assert unpack(batch.packed, BUCKET, TableShape(1, 2)).draws.seed_R2[0].tolist() == [
        *divmod(seed, 2**32)
    ]


@pytest.mark.parametrize(("block", "fits"), [(8, True), (9, False), (-1, False)])
def test_a_block_beyond_the_pool_is_refused_wherever_it_stands_in_a_table(block, fits):
    """It is refused also in a place that the step does not write to: attention may read it."""
    with (
        contextlib.nullcontext()
        if fits
        else pytest.raises(ValueError, match="block_table_ZBM has entries")
    ):
        BUILDER.build(plan_of(Row(7, 0, (3,), ((1, block),)), 0))


@functools.partial(jax.jit, static_argnames="by_row")
def on_device(logits, packed, processor_inputs, by_row):
    inputs = unpack(packed, BUCKET, TableShape(1, 2))
    return process_logits(logits, inputs, processor_inputs, by_row=by_row), draw(
        logits, inputs, processor_inputs, by_row=by_row
    )


def run_step(logits, requests, outputs, by_row=True):
    """Returns processed logits and draws of one step, in which request i has said outputs[i]."""
    rows, samples = [], []
    for index, (request, output) in enumerate(zip(requests, outputs, strict=True)):
        known = [*request.prompt_token_ids, *output]
        samples.append(
            sample_of(index, 1, Sequence(index, 0, len(request.prompt_token_ids), known), request)
        )
        rows.append(Row(index, len(known) - 1, (known[-1],), ((1, 2),)))
    batch = BUILDER.build(StepPlan(0, tuple(rows), tuple(samples)))
    filled = ProcessorInputs(
        *(
            neutral if it is None else it
            for it, neutral in zip(batch.processor_inputs, NEUTRAL, strict=True)
        )
    )
    padded = np.zeros((NUM_ROWS, VOCAB), np.float32)
    padded[: len(rows)] = logits
    processed_BV, token_ids = on_device(padded, batch.packed, filled, by_row)
    return np.asarray(processed_BV)[: len(rows)], np.asarray(token_ids)[: len(rows)]


def make_request(params, prompt=(5, 6, 7, 7), words=(), seed=3):
    return Request(
        request_id="",
        prompt=None,
        prompt_token_ids=tuple(prompt),
        params=params,
        seed=seed,
        eos_token_ids=EOS,
        max_total_tokens=CONTEXT,
        bad_word_token_ids=tuple(map(tuple, words)),
    )


def random_logits(seed, *shape):
    return (np.random.default_rng(seed).standard_normal(shape) * 4).astype(np.float32)


OUTPUT = (9, 7, 9, 9, 30, 6, 41)
ONE_BY_ONE = {
    "repetition": (SamplingParams(repetition_penalty=1.3), ()),
    "repetition below 1": (SamplingParams(repetition_penalty=0.7), ()),
    "frequency": (SamplingParams(frequency_penalty=0.9), ()),
    "presence": (SamplingParams(presence_penalty=-1.7), ()),
    "bias": (SamplingParams(logit_bias={0: 3.0, 74: -2.5, 9: 100, 5: -100}), ()),
    "every bias": (SamplingParams(logit_bias={i: i / 7 - 5 for i in range(VOCAB)}), ()),
    "allowed": (SamplingParams(allowed_token_ids=[0, 31, 32, 63, 64, 74]), ()),
    "early end": (SamplingParams(min_tokens=8, stop_token_ids=[3, 64]), ()),
    "late end": (SamplingParams(min_tokens=7, stop_token_ids=[3, 64]), ()),
    "bad words": (
        SamplingParams(),
        [(8,), (41, 10), (6, 41, 11), (41, 6, 12), (7, *OUTPUT, 13), (*OUTPUT, 14)],
    ),
    "all": (
        SamplingParams(
            **{
                "repetition_penalty": 1.2,
                "frequency_penalty": 0.3,
                "presence_penalty": 0.4,
                "min_tokens": 9,
            },
            **{
                "logit_bias": {9: 2.0, 7: -3.0, 40: 1.0},
                "allowed_token_ids": range(3, 70),
                "stop_token_ids": [41],
            },
        ),
        [(41, 9), (50,)],
    ),
}


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_processed_logits_by_definition(name, by_row):
    params, words = ONE_BY_ONE[name]
    request = make_request(params, words=words)
    for seed in range(3):
        logits = random_logits(seed, VOCAB)
        actual, _ = run_step(logits[None], [request], [OUTPUT], by_row)
        expected = processed(logits, params, request.prompt_token_ids, OUTPUT, eos=EOS, words=words)
        np.testing.assert_allclose(actual[0], expected, rtol=2e-6, atol=1e-5)
        # to the last bit
        np.testing.assert_array_equal(actual[0][expected == logits], logits[expected == logits])
        assert (name == "late end") == (expected == logits).all()


def test_processed_logits_as_transformers_has_them():
    torch = pytest.importorskip("torch")
    import transformers as hf

    prompt, output, logits = [5, 6, 7, 7], list(OUTPUT), random_logits(9, VOCAB)
    words = [[8], [41, 10], [6, 41, 11], [41, 6, 12], [*OUTPUT, 14]]
    biases = {3: 1.5, 70: -2.0, 9: 7.0}
    cases = [
        (hf.RepetitionPenaltyLogitsProcessor(1.3), [*prompt, *output], {"repetition_penalty": 1.3}),
        (hf.RepetitionPenaltyLogitsProcessor(0.8), [*prompt, *output], {"repetition_penalty": 0.8}),
        (hf.NoBadWordsLogitsProcessor(words, eos_token_id=0), output, {"words": words}),
        (hf.SuppressTokensLogitsProcessor([3, 33, 74]), output, {"words": [[3], [33], [74]]}),
        (
            hf.SequenceBiasLogitsProcessor(
                {(token_id,): bias for token_id, bias in biases.items()}
            ),
            output,
            {"logit_bias": biases},
        ),
        (
            hf.MinNewTokensLengthLogitsProcessor(len(prompt), 8, [0, 64]),
            [*prompt, *output],
            {"min_tokens": 8, "stop_token_ids": [64]},
        ),
        (
            hf.MinNewTokensLengthLogitsProcessor(len(prompt), 7, [0, 64]),
            [*prompt, *output],
            {"min_tokens": 7, "stop_token_ids": [64]},
        ),
    ]
    for processor, seen, given_params in cases:
        params = dict(given_params)
        request = make_request(
            words=params.pop("words", ()), params=SamplingParams(**params), prompt=prompt
        )
        actual, _ = run_step(logits[None], [request], [output])
        expected = processor(torch.tensor([seen]), torch.tensor(logits[None]))[0].numpy()
        np.testing.assert_allclose(actual[0], expected, rtol=1e-6)
        assert (np.isinf(actual[0]) == np.isinf(expected)).all()


token_lists = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)


@st.composite
def requests(draw):
    bias = st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=20)
    allowed = st.none() | st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40)
    params = SamplingParams(
        repetition_penalty=draw(st.sampled_from([1.0, 0.5, 1.1, 2.0, 1e-9, 1e9])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.5, -2.0])),
        presence_penalty=draw(st.sampled_from([0.0, 1.5, -0.25])),
        logit_bias=draw(st.just({}) | bias),
        allowed_token_ids=draw(allowed),
        min_tokens=draw(st.sampled_from([0, 3, 16])),
        stop_token_ids=draw(st.lists(st.integers(0, VOCAB - 1), max_size=3)),
        temperature=draw(st.sampled_from([0.0, 0.5, 1.0])),
        top_k=draw(st.sampled_from([0, 0, 3])),
        top_p=draw(st.sampled_from([1.0, 0.8])),
        min_p=draw(st.sampled_from([0.0, 0.05])),
    )
    prompt, output = draw(token_lists), draw(token_lists)
    ends = [(*output[-n:], draw(st.integers(0, VOCAB - 1))) for n in range(draw(st.integers(0, 3)))]
    words = [*map(tuple, draw(st.lists(token_lists, max_size=3))), *ends]
    return make_request(params, prompt, words, seed=draw(st.integers(0, 2**64 - 1))), output


@examples(50)
@given(requested=st.lists(requests(), min_size=2, max_size=4), seed=st.integers(0, 999))
def test_any_requests_together(requested, seed):
    """A row's logits become what its request says, to the last bit the same as alone; so does its
    draw.
    """
    logits = random_logits(seed, len(requested), VOCAB)
    actual, token_ids = run_step(logits, *zip(*requested, strict=True))
    for row, (request, output) in enumerate(requested):
        alone, alone_id = run_step(logits[row][None], [request], [output])
        assert alone[0].tobytes() == actual[row].tobytes() and alone_id[0] == token_ids[row]
        words, prompt = request.bad_word_token_ids, request.prompt_token_ids
        expected = processed(logits[row], request.params, prompt, output, eos=EOS, words=words)
        with np.errstate(over="ignore"):
            np.testing.assert_allclose(actual[row], expected, rtol=1e-5, atol=2e-5)
        if np.isfinite(expected).any():
            # By the float32 logits: the truncation and the draw are what is looked at here.
            known = len(prompt) + len(output)
            assert token_ids[row] == drawn(
                actual[row].astype(np.float64), request.params, request.seed, 0, known
            )
        else:
            assert token_ids[row] == NOTHING_ALLOWED


@given(
    known=st.lists(st.integers(0, 3), min_size=1, max_size=9),
    split=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_ends_of_bad_words(known, split, seed):
    """Words of few tokens over four ids: prefixes that cross from the prompt into the output come
    up all the time.
    """
    rng = np.random.default_rng(seed)
    words = tuple(tuple(rng.integers(0, 4, rng.integers(1, 5)).tolist()) for _ in range(6))
    split = min(split, len(known))
    expected = {word[-1] for word in words if ends_with(known[split:], word[:-1])}
    request = make_request(SamplingParams(), known[:split], words)
    assert suppression(request, known) == (False, tuple(sorted(expected)))


def test_masks_of_a_grammar_are_met_by_the_rest():
    request = make_request(
        SamplingParams(allowed_token_ids=range(30, 70), min_tokens=9, stop_token_ids=[40])
    )
    sample = sample_of(0, 1, Sequence(0, 0, 4, [5, 6, 7, 7, 9]), request)
    grammar = np.zeros(3, np.uint32)
    for token_id in (0, 31, 40, 64, 74):
        grammar[token_id // 32] |= np.uint32(1 << token_id % 32)
    made = processor_inputs_of((sample, sample), {1: grammar}, 4, vocab_size=VOCAB, context=CONTEXT)
    bits = (made.mask_RU[:, :, None] >> np.arange(32, dtype=np.uint32)) & 1
    admitted = [np.flatnonzero(row.reshape(-1)[:VOCAB]).tolist() for row in bits]
    assert admitted == [sorted({*range(30, 70)} - {40}), [31, 64], [*range(VOCAB)], [*range(VOCAB)]]


# ---- words


class Spelling:
    """Is a tokenizer of a few texts."""

    def __init__(self, **spelled):
        self.spelled = {"": [], **{text.replace("_", " "): ids for text, ids in spelled.items()}}

    def __call__(self, text, add_special_tokens=True):
        assert not add_special_tokens
        return {"input_ids": self.spelled[text]}


def test_words_are_spelled_at_the_beginning_and_after_a_space():
    tokenizer = Spelling(
        cat=[1],
        _cat=[2],
        dog=[3, 4],
        _dog=[5],
        cow=[6, 7],
        _cow=[8, 6, 7],
        pig=[9],
        _pig=[9],
        hen=[1, 2],
        _hen=[3, 2],
    )
    assert words_as_token_ids(tokenizer, ("cat",)) == ((1,), (2,))
    assert words_as_token_ids(tokenizer, ("  cat", "cat")) == ((1,), (2,))
    assert words_as_token_ids(tokenizer, ("dog", "hen")) == ((3, 4), (5,), (1, 2), (3, 2))
    assert words_as_token_ids(tokenizer, ("cow", "pig")) == (
        (6, 7),
        (9,),
    )  # the token of the space alone says nothing more
    with pytest.raises(
        ValueError, match="bad_words has ' ', of which the tokenizer makes no token"
    ):
        words_as_token_ids(Spelling(_=[], __=[]), (" ",))


# ---- engines


def spell(words):
    """Stands for a tokenizer: words are token ids."""
    return tuple(tuple(map(int, word.split())) for word in words)


def with_words(llm):
    llm._engine.admission._spell = spell
    return llm


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("llama"), LLAMA)


@pytest.fixture(scope="module")
def llm(directory):
    with make_llm(directory) as llm:
        yield with_words(llm)


@pytest.fixture(autouse=True)
def nothing_left_after(request):
    yield
    if "llm" in request.fixturenames:
        invariants(request.getfixturevalue("llm"))


PROMPT = np.random.default_rng(4).integers(1, 257, 21).tolist()
PLAIN = {"seed": 7, "max_tokens": 8, "logprobs": 2, "ignore_eos": True}


@pytest.fixture(scope="module")
def single(llm):
    """Returns parameters that change something of what the prompt leads to, by name."""
    greedy, sampled = (
        llm.generate(PROMPT, SamplingParams(**PLAIN, temperature=temperature), use_tqdm=False)[0]
        .outputs[0]
        .token_ids
        for temperature in (0.0, 1.0)
    )
    said = sorted({*greedy, *sampled})
    return {
        "greedy": {"temperature": 0.0},
        "presence_penalty": {"presence_penalty": -2.0},
        "frequency_penalty": {"frequency_penalty": -1.2},
        "repetition_penalty": {"repetition_penalty": 1.8},
        "logit_bias": {"logit_bias": {sampled[1]: -100.0, greedy[1]: -7.0, 17: 4.5}},
        "allowed_token_ids": {
            "allowed_token_ids": [i for i in range(257) if i % 3 or i in said[::2]]
        },
        "bad_words": {
            "bad_words": [f"{a} {b}" for a, b in (sampled[:2], greedy[:2])] + [str(sampled[2])]
        },
        "min_tokens": {"min_tokens": 5, "stop_token_ids": said},
        "temperature": {"temperature": 0.6},
        "top_k": {"top_k": 5},
        "top_p": {"top_p": 0.5},
        "min_p": {"min_p": 0.1},
    }


@pytest.fixture(scope="module")
def pairs(single):
    """Returns parameters by the names of the pair; of a single one by its name twice."""
    params = {}
    for first, second in itertools.combinations_with_replacement(single, 2):
        if {first, second} != {"greedy", "temperature"}:
            params[first, second] = SamplingParams(**{**PLAIN, **single[first], **single[second]})
    return params


@pytest.fixture(scope="module")
def lone(llm, pairs):
    """Returns each by itself; with the logits that each of its tokens was drawn from."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm._engine.runner, "executables", llm._engine.runner.executables)
        patch.setattr(llm._engine.builder, "build", llm._engine.builder.build)
        witness = LogitsWitness(llm)
        outputs = {}
        for names, params in pairs.items():
            sequence_id = llm._engine._num_sequences
            output = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0]
            positions = range(len(PROMPT), len(PROMPT) + len(output.token_ids))
            outputs[names] = (
                output,
                [witness.logits[sequence_id, position] for position in positions],
            )
    return outputs


def test_each_parameter_changes_something(lone, llm):
    plain = {
        temperature: llm.generate(
            PROMPT, SamplingParams(**PLAIN, temperature=temperature), use_tqdm=False
        )[0].outputs[0]
        for temperature in (0.0, 1.0)
    }
    for name in {name for pair in lone for name in pair}:
        changed = [lone[name, name][0].token_ids != plain[1.0].token_ids]
        if ("greedy", name) in lone:
            changed.append(lone["greedy", name][0].token_ids != plain[0.0].token_ids)
        assert any(changed), f"{name} shows nothing"


def test_every_pair_draws_what_float64_draws(lone, pairs):
    """Logits are the engine's, the noise is that of the request's key; log probabilities are those
    of the model.
    """
    for names, (output, logits) in lone.items():
        params = pairs[names]
        for index, token_id in enumerate(output.token_ids):
            said, words = output.token_ids[:index], spell(params.bad_words)
            expected = processed(logits[index], params, PROMPT, said, words=words)
            assert drawn(expected, params, params.seed, 0, len(PROMPT) + index) == token_id, (
                names,
                index,
            )
            raw = logits[index].astype(np.float64)
            logprobs = raw - raw.max() - np.log(np.exp(raw - raw.max()).sum())
            entry = output.logprobs[index][token_id]
            np.testing.assert_allclose(entry.logprob, logprobs[token_id], atol=1e-5)
            assert entry.rank == 1 + (logprobs > logprobs[token_id]).sum()
            assert {int(i) for i in np.argsort(-logprobs)[:2]} <= set(output.logprobs[index])


def test_what_is_made_of_long_lists_is_made_once(llm, monkeypatch):
    """It is made neither for each step nor for each prompt: a list may be as long as the
    vocabulary.
    """
    made = []

    def counted(token_ids, vocab_size):
        made.append(len(token_ids))
        return mask_of(token_ids, vocab_size)

    monkeypatch.setattr(token_masks, "mask_of", counted)
    params = SamplingParams(
        allowed_token_ids=range(100, 200),
        stop_token_ids=range(150),
        min_tokens=6,
        max_tokens=9,
        ignore_eos=True,
    )
    outputs = llm.generate([PROMPT, PROMPT[:5]], params, use_tqdm=False)
    assert sorted(made) == [100, 150]
    for output in outputs:
        ids = output.outputs[0].token_ids
        assert all(150 <= token_id < 200 for token_id in ids[:6]) and len(ids) > 6
        assert all(150 <= token_id < 200 for token_id in ids[6:-1]) and 100 <= ids[-1] < 200


def test_a_request_that_runs_out_of_tokens_ends_alone(llm):
    """Bad words leave nothing after the first token: an error of that request; its cached blocks
    stay.
    """
    params = SamplingParams(
        temperature=0.0, allowed_token_ids=[1, 2], bad_words=["1 1", "1 2", "2 1", "2 2"]
    )
    other = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    (expected,) = llm.generate(PROMPT, other, use_tqdm=False)
    hits = llm.stats()["prefix_cache_hits_total"]
    ended, beside = llm.generate([[7, 8], PROMPT], [params, other], use_tqdm=False)
    (output,) = ended.outputs
    assert (output.finish_reason, len(output.token_ids)) == ("error", 1) and output.token_ids[
        0
    ] in (1, 2)
    assert "leave no token to sample" in output.stop_reason
    assert beside.outputs == expected.outputs
    assert llm.stats()["prefix_cache_hits_total"] > hits
    (again,) = llm.generate(PROMPT, other, use_tqdm=False)
    assert again.outputs == expected.outputs and llm.stats()["prefix_cache_hits_total"] > hits + 16
    forked = dataclasses.replace(
        params, n=2, temperature=1.0, seed=3, allowed_token_ids=[1, 2, 3], max_tokens=4
    )
    (both,) = llm.generate([[7, 8]], forked, use_tqdm=False)
    for output in both.outputs:
        dead = set(output.token_ids) & {1, 2}
        assert output.finish_reason == ("error" if dead and len(output.token_ids) < 4 else "length")


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        (
            {"logit_bias": {257: 1.0}},
            ValueError,
            "logit_bias has 257, but the model's token ids are 0 to 256",
        ),
        ({"allowed_token_ids": [1, 2**31 - 1]}, ValueError, "allowed_token_ids has 2147483647"),
        ({"bad_words": ["5 300"]}, ValueError, "bad_words has 300"),
        (
            {"logit_bias": dict.fromkeys(range(MAX_BIASES + 1), 1.0)},
            UnsupportedError,
            "logit_bias has 1025 entries; at most 1024",
        ),
        (
            {"repetition_penalty": 1e-50},
            UnsupportedError,
            "repetition_penalty=1e-50 .* 1e-09 to 1000000000.0",
        ),
        (
            {"allowed_token_ids": [3, 0], "min_tokens": 2, "stop_token_ids": [3]},
            ValueError,
            "all tokens are masked: all of allowed_token_ids ends the text before min_tokens=2",
        ),
        (
            {
                "allowed_token_ids": [3, 4],
                "min_tokens": 2,
                "stop_token_ids": [3],
                "bad_words": ["4"],
            },
            ValueError,
            "is a bad word or ends the text before min_tokens=2",
        ),
        (
            {"bad_words": [str(i) for i in range(257)]},
            ValueError,
            "every token of the vocabulary is a bad word",
        ),
    ],
)
def test_what_cannot_be_is_refused(llm, params, error, message):
    with pytest.raises(error, match=message):
        llm.generate(PROMPT, SamplingParams(**params), use_tqdm=False)


def test_bad_words_need_a_tokenizer(llm, monkeypatch):
    monkeypatch.setattr(llm._engine.admission, "_spell", None)
    with pytest.raises(
        ValueError, match=r"bad_words=\['x'\] needs text, but the model has no tokenizer"
    ):
        llm.generate(PROMPT, SamplingParams(bad_words=["x"]), use_tqdm=False)


def test_what_generation_config_asks_for(tmp_path):
    for requested, expected in (
        (
            {"repetition_penalty": 1.3, "temperature": 0.5},
            {"repetition_penalty": 1.3, "temperature": 0.5},
        ),
        (
            {"repetition_penalty": 1.3, "top_k": 4, "do_sample": False},
            {"repetition_penalty": 1.3, "temperature": 0.0},
        ),
    ):
        (tmp_path / "generation_config.json").write_text(json.dumps(requested))
        assert read_sampling_defaults(tmp_path) == expected


def test_numbers_of_generation_config_that_no_request_can_have_are_taken_as_the_nearest(
    tmp_path, caplog
):
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"temperature": 3, "top_p": 0, "top_k": 5})
    )
    defaults = read_sampling_defaults(tmp_path)
    assert defaults == {"temperature": 2.0, "top_p": 1e-6, "top_k": 5}
    assert [record.getMessage() for record in caplog.records] == [
        "generation_config.json: temperature = 3 is taken as 2.0",
        "generation_config.json: top_p = 0 is taken as 1e-06",
    ]
    for wrong in ({"temperature": -1}, {"top_p": 1.5}, {"top_p": "0"}):
        (tmp_path / "generation_config.json").write_text(json.dumps(wrong))
        with pytest.raises(CheckpointError, match=f"generation_config.json: .*{next(iter(wrong))}"):
            read_sampling_defaults(tmp_path)


def test_what_generation_config_asks_for_in_vain_is_said(tmp_path, caplog):
    requested = {
        "num_beams": 4,
        "typical_p": 1.0,
        "no_repeat_ngram_size": 0,
        "suppress_tokens": [5],
        "temperature": 0.5,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(requested))
    assert read_sampling_defaults(tmp_path) == {"temperature": 0.5}
    (record,) = caplog.records
    assert "asks for num_beams=4, suppress_tokens=[5], which is left out" in record.getMessage()
