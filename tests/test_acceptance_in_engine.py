"""Acceptance by rejection and typical acceptance through the whole engine, with drafts that a proposer draws from distributions it knows.

What texts should be follows in float64 from log probabilities that the engine gives for prompts, by the public interface.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpage import LLM, SamplingParams
from jaxpage.device.drafters import growing
from jaxpage.speculation import Proposer
from jaxpage.step.draft import Candidates, Draft
from jaxpage.step.request import Request, Sequence
from tests.support.distributions import probabilities, z_score
from tests.support.engines import LLAMA, invariants, make_llm
from tests.support.random_checkpoints import random_checkpoint, random_tensors, write_tensors
from tests.support.scripted import Guesses, draft_with, without_drafts
from tests.support.sweeps import few
from tests.support.tokenizers import write_tokenizer
from tests.test_event_log import logged, records_of, replayed
from tests.test_speculation_log import results_of

MODEL = {**LLAMA, "num_hidden_layers": 1}
TOKENS = np.array([17, 40, 41, 66, 90, 133, 200, 251])  # all that requests below may draw
PROMPT, NUM_TOKENS, NUM_REQUESTS = [3, 1, 4, 1, 5], 3, 240
MOST = 5
TREE, CHAIN = (-1, -1, 0, 0, 1), (-1, 0, 1)
SETTINGS = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 96,
    "max_model_len": 128,
    "block_size": 4,
    "num_blocks": 129,
    "largest_shapes": True,
}
SPECULATIVE = {"method": "suffix", "num_speculative_tokens": MOST, "tree": True}
SAMPLERS: dict[str, dict[str, Any]] = {
    "hot": {"temperature": 1.0},
    "cold, top-k, penalty": {"temperature": 0.7, "top_k": 4, "presence_penalty": 1.2},
}


class Drawing(Proposer):
    """Draws drafts from a distribution of the token before each, without replacement; says so, or `says` of which distribution."""

    def __init__(
        self, parents: tuple[int, ...], tokens: np.ndarray = TOKENS, *, drawn: bool = True
    ) -> None:
        scores = np.random.default_rng(7).normal(0, 1.0, (257, len(tokens)))
        self.q = (np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)).astype(np.float32)
        self.says = self.q
        self.parents, self.tokens, self.draws = parents, tokens, drawn
        self.num_requested = 0

    def propose(self, request: Request, sequence: Sequence, num_drafts: int) -> Draft | None:
        """A function of the request and its tokens, so that it drafts the same again."""
        self.num_requested += 1
        known = sequence.token_ids
        rng = np.random.default_rng([request.seed % 2**32, sequence.sample_index, *known])
        drafts: list[int] = []
        for place, parent in enumerate(self.parents[:num_drafts]):
            before = known[-1] if parent < 0 else drafts[parent]
            siblings = [drafts[other] for other in range(place) if self.parents[other] == parent]
            q = np.where(np.isin(self.tokens, siblings), 0.0, self.q[before].astype(np.float64))
            token_id = (
                rng.choice(self.tokens, p=q / q.sum()) if self.draws else self.tokens[q.argmax()]
            )
            drafts.append(int(token_id))
        draft = Draft(tuple(drafts), self.parents[: len(drafts)])
        if not self.draws:
            return draft
        before = [known[-1] if parent < 0 else drafts[parent] for parent in draft.parents]
        ids = np.tile(self.tokens.astype(np.int32), (len(drafts), 1))
        return draft._replace(q=Candidates(ids, self.says[before]))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tokenizer(random_checkpoint(tmp_path_factory.mktemp("model"), MODEL))


@pytest.fixture(scope="module")
def llm(directory):
    with make_llm(
        directory, speculative_config={**SPECULATIVE, "acceptance": "rejection"}, **SETTINGS
    ) as llm:
        llm.untouched = copy.deepcopy(llm._engine.scheduler)
        yield llm
        invariants(llm)


@pytest.fixture(scope="module")
def log_probabilities(llm):
    """Of one of the eight tokens behind none, one and two of them: arrays of one, two and three axes."""
    without_drafts(llm)
    texts = list(itertools.product(TOKENS.tolist(), repeat=NUM_TOKENS))
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
    outputs = llm.generate([[*PROMPT, *text] for text in texts], params, use_tqdm=False)
    found = [
        [
            output.prompt_logprobs[len(PROMPT) + place][token_id].logprob
            for place, token_id in enumerate(text)
        ]
        for text, output in zip(texts, outputs, strict=True)
    ]
    joint = np.array(found).reshape(*[len(TOKENS)] * NUM_TOKENS, NUM_TOKENS)
    return [
        joint[(slice(None),) * (place + 1) + (0,) * (NUM_TOKENS - 1 - place) + (place,)]
        for place in range(NUM_TOKENS)
    ]


def expected(
    log_probabilities: list[np.ndarray], presence_penalty: float = 0.0, **sampler: Any
) -> np.ndarray:
    """Of each text of three tokens."""
    joint = np.ones((len(TOKENS),) * NUM_TOKENS)
    for place, table in enumerate(log_probabilities):
        for text in itertools.product(range(len(TOKENS)), repeat=place):
            logits = table[text] - presence_penalty * np.isin(np.arange(len(TOKENS)), text)
            joint[text] *= probabilities(logits, **sampler).reshape(
                -1, *[1] * (NUM_TOKENS - 1 - place)
            )
    return joint


def counted(outputs: list[Any]) -> np.ndarray:
    counts = np.zeros((len(TOKENS),) * NUM_TOKENS, np.int64)
    for output in outputs:
        for one in output.outputs:
            counts[tuple(np.searchsorted(TOKENS, one.token_ids))] += 1
    return counts


def requested(count: int, first_seed: int = 0, **given: Any) -> list[SamplingParams]:
    params = SamplingParams(
        max_tokens=NUM_TOKENS, ignore_eos=True, allowed_token_ids=TOKENS.tolist(), **given
    )
    return [dataclasses.replace(params, seed=first_seed + seed) for seed in range(count)]


def texts_of(llm: LLM, params: list[SamplingParams]) -> list[Any]:
    return llm.generate([PROMPT] * len(params), params, use_tqdm=False)


@pytest.mark.parametrize(
    ("kind", "sampler"),
    [
        ("chain", "hot"),
        pytest.param("tree", "hot", marks=pytest.mark.sweep),
        ("tree", "cold, top-k, penalty"),
        ("tree, chosen", "cold, top-k, penalty"),
    ],
)
def test_texts_follow_the_distribution(kind, sampler, llm, log_probabilities):
    draft_with(
        llm._engine, Drawing(CHAIN if kind == "chain" else TREE, drawn=kind != "tree, chosen")
    )
    before = llm.stats()["spec_decode_num_accepted_tokens_total"]
    counts = counted(texts_of(llm, requested(NUM_REQUESTS, n=4, **SAMPLERS[sampler])))
    assert counts.sum() == NUM_REQUESTS * 4
    assert abs(z_score(counts, expected(log_probabilities, **SAMPLERS[sampler]))) < 4
    assert llm.stats()["spec_decode_num_accepted_tokens_total"] - before > 36


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory):
    """Mostly of the opinion that one of the eight tokens comes next."""
    tensors = random_tensors(MODEL, seed=5)
    tensors["lm_head.weight"] *= np.where(np.isin(np.arange(257), TOKENS), 2.0, 0.0)[
        :, None
    ].astype(np.float32)
    directory = random_checkpoint(tmp_path_factory.mktemp("draft"), MODEL, seed=5)
    write_tensors(directory, tensors)
    return directory


@pytest.mark.parametrize("sampler", few(SAMPLERS, ["cold, top-k, penalty"]))
def test_drafts_that_a_model_draws_change_no_distribution(sampler, drawing, log_probabilities):
    before = drawing.stats()["spec_decode_num_accepted_tokens_total"]
    counts = counted(texts_of(drawing, requested(NUM_REQUESTS, n=4, **SAMPLERS[sampler])))
    assert abs(z_score(counts, expected(log_probabilities, **SAMPLERS[sampler]))) < 4
    assert drawing.stats()["spec_decode_num_accepted_tokens_total"] - before > 50


@pytest.mark.sweep  # a proposer that does so: below
def test_a_model_that_draws_from_something_else_shows(
    directory, draft_model, log_probabilities, monkeypatch
):
    """Than it says."""
    real = growing.draw_draft

    def lie(*given: Any, **options: Any) -> Any:
        token_ids, drawn_from = real(*given, **options)
        return token_ids, drawn_from._replace(
            q_RW=drawn_from.q_RW.at[:, :8].set(drawn_from.q_RW[:, 7::-1])
        )

    monkeypatch.setattr(growing, "draw_draft", lie)
    monkeypatch.setattr(Candidates, "check", lambda *_: None)
    with start_drawing(directory, draft_model) as llm:
        counts = counted(texts_of(llm, requested(400, n=4, temperature=1.0)))
    assert z_score(counts, expected(log_probabilities, temperature=1.0)) > 10


def start_drawing(directory: Path, draft_model: Path) -> LLM:
    config = {
        "method": "draft_model",
        "model": str(draft_model),
        "num_speculative_tokens": 2,
        "acceptance": "rejection",
    }
    return make_llm(directory, speculative_config=config, **SETTINGS)


@pytest.fixture(scope="module")
def drawing(directory, draft_model):
    with start_drawing(directory, draft_model) as llm:
        yield llm


def test_a_proposer_that_lies_shows(llm, log_probabilities):
    """About what it drew from: the distribution is another one. Where it says nothing, it is the right one: see `Draft`."""
    liar = Drawing(CHAIN)
    liar.says = np.roll(liar.q, 1, axis=1)
    draft_with(llm._engine, liar)
    assert (
        z_score(counted(texts_of(llm, requested(NUM_REQUESTS, n=4))), expected(log_probabilities))
        > 10
    )
    silent = Drawing(CHAIN)
    real = silent.propose
    silent.propose = lambda *given: real(*given)._replace(q=None)  # type: ignore[method-assign,union-attr]
    draft_with(llm._engine, silent)
    assert (
        abs(
            z_score(
                counted(texts_of(llm, requested(NUM_REQUESTS, n=4))), expected(log_probabilities)
            )
        )
        < 4
    )


def test_preemption_changes_no_distribution(llm, log_probabilities):
    """Every third step the newest request is preempted, with the samples that it was forked into; the prompt is found in the cache."""
    draft_with(llm._engine, Drawing(TREE))
    engine, before = llm._engine, llm.stats()
    reporters = [
        engine.add(f"{index}", engine.prepare(None, PROMPT, params))
        for index, params in enumerate(requested(NUM_REQUESTS, 5000, n=2))
    ]
    for number in itertools.count():
        if not engine.has_unfinished:
            break
        if number % 3 == 2:
            engine.scheduler.give_way()
        engine.step()
    counts = counted([reporter.whole() for reporter in reporters])
    assert abs(z_score(counts, expected(log_probabilities))) < 4
    after = llm.stats()
    assert after["prefix_cache_hits_total"] - before["prefix_cache_hits_total"] > 30
    num_preemptions, num_before = (
        sum(each["num_preemptions_total"].values()) for each in (after, before)
    )
    assert num_preemptions - num_before > 30


def test_greedy_texts_are_those_without_drafts(llm):
    rng = np.random.default_rng(3)
    prompts = [rng.integers(1, 100, int(length)).tolist() for length in rng.integers(1, 40, 12)]
    params = SamplingParams(
        temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2, repetition_penalty=1.2
    )
    without_drafts(llm)
    plain = [output.outputs for output in llm.generate(prompts, params, use_tqdm=False)]
    for proposer in (Drawing(TREE), Guesses(), Knowing(prompts, plain)):
        draft_with(llm._engine, proposer)
        assert [output.outputs for output in llm.generate(prompts, params, use_tqdm=False)] == plain


class Knowing(Proposer):
    """Drafts what follows, beside something wrong."""

    def __init__(self, prompts: list[list[int]], outputs: list[Any]) -> None:
        self.texts = {
            tuple(p): [*p, *one[0].token_ids] for p, one in zip(prompts, outputs, strict=True)
        }

    def propose(self, request: Request, sequence: Sequence, num_drafts: int) -> Draft | None:
        known = len(sequence.token_ids)
        right = self.texts[request.prompt_token_ids][known : known + 2]
        wrong = [(token_id + 1) % 257 for token_id in right]
        return Draft(
            (*wrong[:1], *right[:1], *wrong[1:], *right[1:]), (-1, -1, 1, 1)[: 2 * len(right)]
        )


def test_a_text_is_a_function_of_its_seed_and_its_drafts(llm):
    """Not of its neighbours, nor of what happens to them."""
    # that begin together: no step in between has a prompt and no drafts
    prompts = [[9, 8, 7, seed] for seed in range(2)]
    params = [
        SamplingParams(seed=seed, max_tokens=40, ignore_eos=True, logprobs=1) for seed in range(2)
    ]
    draft_with(llm._engine, Drawing(TREE))
    together = [output.outputs for output in llm.generate(prompts, params, use_tqdm=False)]
    alone = [
        llm.generate(prompt, one, use_tqdm=False)[0].outputs
        for prompt, one in zip(prompts, params, strict=True)
    ]
    assert together == alone
    without_drafts(llm)
    assert together != [output.outputs for output in llm.generate(prompts, params, use_tqdm=False)]


def test_every_parameter_holds(llm):
    """Of sampled requests with drafts, drawn from everything and of nonsense: what is asked for, and log probabilities of what came out."""
    letters = np.sort(
        [llm.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abct01 "]
    )
    base = {"temperature": 1.3, "max_tokens": 30, "ignore_eos": True, "logprobs": 2}
    favoured = {int(token_id): 6.0 for token_id in letters}
    requests = {
        "grammar": {
            **base,
            "structured_outputs": {"regex": "(ab|ba|cat){2,6}( (10|00))+"},
            "ignore_eos": False,
        },
        "stop": {**base, "stop": ["ab", "10"], "logit_bias": favoured},
        "bad words": {**base, "bad_words": ["a", "ab", "10"], "logit_bias": favoured},
        "min tokens": {
            **base,
            "ignore_eos": False,
            "min_tokens": 9,
            "logit_bias": {0: 5.0, **favoured},
        },
        "allowed": {
            **base,
            "allowed_token_ids": letters.tolist(),
            "min_p": 0.01,
            "frequency_penalty": 0.5,
            "n": 2,
        },
    }
    for proposer in (Drawing(TREE, letters), Drawing(CHAIN, letters), Guesses()):
        draft_with(llm._engine, proposer)
        params = [
            SamplingParams(seed=seed, **each) for each in requests.values() for seed in range(4)
        ]
        prompts = [[5, 6, 7 + index] for index in range(len(params))]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for (name, _), output in zip(itertools.product(requests, range(4)), outputs, strict=True):
            for one in output.outputs:
                if name == "grammar":
                    whole = one.finish_reason == "stop"
                    assert re.fullmatch("(ab|ba|cat){2,6}( (10|00))+", one.text) or not whole
                elif name == "stop":
                    assert not re.search("ab|10", one.text) and (one.finish_reason == "stop") == (
                        one.stop_reason is not None
                    )
                elif name == "bad words":
                    for word in ("a", "ab", "10"):
                        ids = llm.tokenizer.encode(word, add_special_tokens=False)
                        assert all(one.token_ids[at : at + len(ids)] != ids for at in range(30))
                elif name == "min tokens":
                    assert (
                        one.token_ids.index(0) >= 9
                        if 0 in one.token_ids
                        else len(one.token_ids) == 30
                    )
                else:
                    assert set(one.token_ids) <= set(letters.tolist()) and len(one.token_ids) == 30
        scored(llm, outputs)


def scored(llm: LLM, outputs: list[Any]) -> None:
    """The log probabilities that came with texts are those of the texts as prompts."""
    whole = [(output, one) for output in outputs for one in output.outputs]
    prompts = [[*output.prompt_token_ids, *one.token_ids] for output, one in whole]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=2)
    for (output, one), again in zip(
        whole, llm.generate(prompts, params, use_tqdm=False), strict=True
    ):
        for given, wanted in zip(
            one.logprobs, again.prompt_logprobs[len(output.prompt_token_ids) :], strict=True
        ):
            assert {t: entry.rank for t, entry in given.items()} == {
                t: entry.rank for t, entry in wanted.items()
            }
            for token_id, entry in given.items():
                assert abs(entry.logprob - wanted[token_id].logprob) < 1e-4


def test_a_log_of_drafts_that_were_drawn_is_replayed(llm, tmp_path):
    path = tmp_path / "a.jsonl"
    driver = llm._driver
    tokenizer = llm.tokenizer
    with logged(llm, path) as other:
        draft_with(other, Drawing(TREE))
        texts_of(llm, requested(12, n=2, logprobs=1))
    llm._driver, llm.tokenizer = driver, tokenizer
    report = replayed(llm, path)
    assert report.difference is report.ending is None and report.num_steps == len(results_of(path))
    (first, *_) = [record["drafts"] for record in records_of(path) if "drafts" in record]
    assert all(len(draft) == 4 and len(draft[3]) == len(draft[1]) for draft in first)


# --- typical acceptance


@pytest.fixture
def lossy(directory, caplog):
    # one request runs in other shapes than two
    settings = {**SETTINGS, "max_num_seqs": 2, "largest_shapes": False}
    typical = {**SPECULATIVE, "acceptance": "typical"}
    with (
        caplog.at_level(logging.WARNING),
        make_llm(directory, speculative_config=typical, **settings) as llm,
    ):
        yield llm
        invariants(llm)


def test_typical_acceptance_is_announced_and_changes_sampled_texts_alone(lossy, caplog):
    messages = [record.getMessage() for record in caplog.get_records("setup")]
    assert any("acceptance 'typical' is lossy" in message for message in messages)
    test_greedy_texts_are_those_without_drafts(lossy)
    test_a_text_is_a_function_of_its_seed_and_its_drafts(lossy)


@pytest.mark.sweep  # with acceptance by rejection: above
def test_every_parameter_holds_with_typical_acceptance(lossy):
    test_every_parameter_holds(lossy)
