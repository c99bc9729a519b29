"""Masks after drafts are those of a sequence whose tokens the drafts are; and drafts that cannot be
tokens are taken out.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpage import SamplingParams
from jaxpage.checkpoints.tokenizers.tokenizer_files import load_tokenizer
from jaxpage.decoding import Constraint, Grammar, SamplingStrategy
from jaxpage.decoding import grammars as rules
from jaxpage.decoding.grammar_compiler import GrammarCompiler
from jaxpage.engine.processor_inputs import processor_inputs_of
from jaxpage.engine.text import NoText
from jaxpage.scheduling.plan_builder import make_draft_samples, sample_of
from jaxpage.speculation import Proposer
from jaxpage.speculation.speculator import filter_drafts
from jaxpage.step.draft import Draft, chain
from jaxpage.step.request import Request, Sequence
from tests.support.engines import LLAMA, invariants, make_llm
from tests.support.random_checkpoints import random_checkpoint
from tests.support.scripted import DRAFTING, Scripted, draft_with, mixed_up, without_drafts
from tests.support.tokenizers import END, write_tokenizer

pytestmark = pytest.mark.usefixtures("largest_shapes")

VOCAB = LLAMA["vocab_size"]
REGEXES = ("((ab|ba){1,3})( (10|00))?(dog|cat)s?", "[ab]{2,12}", "(dog|cat)+", "[a-d]{1,9}(0|1){2}")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tokenizer(random_checkpoint(tmp_path_factory.mktemp("model"), LLAMA))


@pytest.fixture(scope="module")
def grammar_of(directory):
    compiler = GrammarCompiler(load_tokenizer(directory), VOCAB)
    made: dict[str, Grammar] = {}

    def grammar(regex: str) -> Grammar:
        if regex not in made:
            requested = SamplingParams(structured_outputs={"regex": regex}).structured_outputs
            made[regex] = compiler.compile(requested)
        return made[regex]

    yield grammar
    compiler.close()


def request(**changes: Any) -> Any:
    return SimpleNamespace(eos_token_ids=frozenset({END}), params=SamplingParams(**changes))


def one_by_one(
    new: Callable[[], Constraint], token_ids: tuple[int, ...]
) -> tuple[Constraint, bool]:
    """Returns the sequence whose tokens these are, and whether it still goes on after them."""
    constraint = new()
    for token_id in token_ids:
        ends = bool(constraint._ends_V[token_id // 32] >> np.uint32(token_id % 32) & 1)
        is_text = bool(constraint._text[token_id // 32] >> np.uint32(token_id % 32) & 1)
        if not is_text or (ends and not is_text) or constraint.advance(token_id) is not None:
            return constraint, False
    return constraint, True


def ids_of(mask: Any) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


STEPS = st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 9), max_size=6)), max_size=12)


@settings(max_examples=60)
@given(
    regex=st.sampled_from(REGEXES),
    steps=STEPS,
    min_tokens=st.sampled_from([0, 0, 5]),
    stop=st.booleans(),
    few=st.booleans(),
)
def test_after_drafts_as_after_tokens(grammar_of, regex, steps, min_tokens, stop, few):
    """Looks ahead along many paths, takes a token, looks again.

    Every mask is that of a sequence that never looked ahead.
    """
    grammar = grammar_of(regex)
    letters = [int(i) for i in ids_of(Constraint(grammar, request()).mask)]
    requested = request(
        min_tokens=min_tokens,
        stop_token_ids=[letters[0]] if stop else (),
        allowed_token_ids=[*range(90), END] if few else None,
        max_tokens=30,
    )

    def new() -> Constraint:
        return Constraint(grammar, requested)

    constraint, known = new(), ()
    for choice, path in steps:
        before = constraint.mask.copy()
        # short ones first, and the last look is at what was there
        for length in (*range(len(path) + 1), 0):
            drafts: tuple[int, ...] = ()
            for draw in path[:length]:
                place, _ = one_by_one(new, (*known, *drafts))
                admitted = ids_of(place.mask)
                wrong = (draw * 29) % VOCAB
                drafts += (admitted[draw % len(admitted)] if admitted and draw % 4 else wrong,)
            expected, goes_on = one_by_one(new, (*known, *drafts))
            actual = constraint.mask_after(drafts)
            assert (actual is not None) == goes_on, (known, drafts)
            if actual is not None:
                assert ids_of(actual) == ids_of(expected.mask)
        assert (constraint.mask == before).all(), "looking ahead changed what may be drawn"
        text = ids_of(constraint._text)
        if not text:
            return
        token_id = text[choice % len(text)]
        twin, goes_on = one_by_one(new, (*known, token_id))
        end = constraint.advance(token_id)
        assert (end is None) == goes_on and constraint.may_stop == twin.may_stop
        assert (
            ids_of(constraint.mask) == ids_of(twin.mask)
            and constraint._token_ids == twin._token_ids
        )
        if end is not None:
            return
        known += (token_id,)


def test_looking_ahead_twice_costs_once(grammar_of, monkeypatch):
    """A token that was a draft costs nothing more, either."""
    constraint, computed, real = Constraint(grammar_of(REGEXES[1]), request()), [], Grammar.admit
    monkeypatch.setattr(
        Grammar, "admit", lambda self, matcher: computed.append(1) or real(self, matcher)
    )
    a, b = ids_of(constraint.mask)[:2]
    for path in ((), (a,), (a, b), (a, b, a), (a, a), (a, b, a)):
        assert constraint.mask_after(path) is not None
    assert len(computed) == 4
    assert constraint.advance(a) is None and len(computed) == 4
    # places further on begin anew
    assert constraint.mask_after((b,)) is not None and len(computed) == 5


@pytest.mark.parametrize(
    ("size", "limit", "fails", "mistaken"),
    [(12, 1500, False, False), (30, 300, True, False), (30, 300, True, True)],
)
def test_what_drafts_find_does_not_count(size, limit, fails, mistaken, directory, monkeypatch):
    """llguidance bounds the states that a grammar finds: a sequence comes to that bound where it
    would without wrong drafts.
    """
    monkeypatch.setattr(rules, "MAX_LEXER_STATES", limit)
    letters = [load_tokenizer(directory)(letter)["input_ids"][0] for letter in "ab"]
    tokenizer = rules.tokenizer_of(load_tokenizer(directory).backend_tokenizer.to_str())
    source = rules.source_of("regex", json.dumps(f"[ab]*a[ab]{{{size}}}c"))
    if mistaken:  # the states that drafts find are counted as the sequence's own
        real = Constraint._follow

        def keeping(self: Constraint, token_id: int) -> Constraint | None:
            was_alone = self._is_alone
            ahead = real(self, token_id)
            self._is_alone = was_alone
            return ahead

        monkeypatch.setattr(Constraint, "_follow", keeping)

    def outcome(seed: int, *, drafted: bool) -> Any:
        rng, constraint = (
            np.random.default_rng(seed),
            Constraint(Grammar(*tokenizer, VOCAB, source), request()),
        )
        others = np.random.default_rng(seed + 100)
        for number in range(120):
            if drafted:
                for _ in range(3):
                    path = tuple(int(token_id) for token_id in others.choice(letters, 4))
                    for length in range(1, 5):
                        constraint.mask_after(path[:length])
            if (end := constraint.advance(int(rng.choice(letters)))) is not None:
                return number, end
        return ids_of(constraint.mask)

    plain = [outcome(seed, drafted=False) for seed in range(3)]
    assert all(isinstance(state, tuple) for state in plain) == fails
    assert ([outcome(seed, drafted=True) for seed in range(3)] == plain) != mistaken


# ---- what else stands before a draw


def test_draws_after_drafts_are_processed_as_after_tokens():
    """Penalties, min_tokens and bad words see the path to a draft as if it were known.

    The tree branches.
    """
    requested = Request(
        request_id="a",
        prompt=None,
        prompt_token_ids=(1, 2, 3),
        params=SamplingParams(repetition_penalty=1.3, min_tokens=4, logprobs=1),
        seed=3,
        eos_token_ids=frozenset({END}),
        max_total_tokens=50,
        bad_word_token_ids=((7, 8), (9, 5, 6)),
    )

    def sequence(*path: int) -> Sequence:
        return Sequence(
            sequence_id=0, sample_index=1, num_prompt_tokens=3, token_ids=[1, 2, 3, 9, *path]
        )

    draft = Draft((5, 7, 6, 8, 7), (-1, -1, 0, 1, 3))
    root = sample_of(0, 1, sequence(), requested)
    actual = (root, *make_draft_samples(root, draft, sequence(), requested))
    paths = [(), *(draft.path(index) for index in range(5))]
    expected = tuple(sample_of(0, 1, sequence(*path), requested) for path in paths)
    assert len({sample.suppressed_token_ids for sample in expected}) > 2, "nothing is told apart"
    arrays = [
        processor_inputs_of(samples, {}, 8, vocab_size=VOCAB, context=32)
        for samples in (actual, expected)
    ]
    np.testing.assert_array_equal(arrays[0].history_RC, arrays[1].history_RC)
    np.testing.assert_array_equal(arrays[0].mask_RU, arrays[1].mask_RU)
    same = [sample._replace(history=(), drafts=(), offset=0) for sample in actual]
    assert same == [sample._replace(history=(), offset=0) for sample in expected]


# ---- drafts that are taken out


def strategies_of(grammar: Grammar | None) -> dict[int, SamplingStrategy]:
    requested = Request(
        request_id="a",
        prompt=None,
        prompt_token_ids=(1,),
        params=SamplingParams(),
        seed=0,
        eos_token_ids=frozenset({END}),
        max_total_tokens=50,
    )
    return {7: SamplingStrategy(requested, NoText, grammar)}


TREES = st.integers(0, 9).flatmap(
    lambda size: st.tuples(
        st.lists(
            st.sampled_from([-1, VOCAB]) | st.integers(0, VOCAB - 1), min_size=size, max_size=size
        ),
        st.tuples(*(st.integers(-1, index - 1) for index in range(size))),
    )
)


@given(tree=TREES, regex=st.none() | st.sampled_from(REGEXES))
def test_what_stays_is_what_can_be(grammar_of, tree, regex):
    """Exactly the part of every path that a sequence could take stays, each place once and in
    order.
    """
    token_ids, parents = tree
    grammar = grammar_of(regex) if regex else None
    draft = Draft(tuple(token_ids), parents)
    drafts = filter_drafts({7: draft, 8: draft}, strategies_of(grammar))
    assert 8 not in drafts, "nobody knows that sequence"

    def can_be(path: tuple[int, ...]) -> bool:
        return grammar is None or one_by_one(lambda: Constraint(grammar, request()), path)[1]

    expected = [draft.path(index) for index in range(len(token_ids)) if can_be(draft.path(index))]
    actual = drafts.get(7, Draft((), ()))
    assert all(-1 <= parent < index for index, parent in enumerate(actual.parents))
    assert [actual.path(index) for index in range(len(actual.token_ids))] == expected
    assert (7 in drafts) == bool(expected)


def test_what_stays_keeps_its_parents():
    class Forbidding:
        """Is a grammar that admits no 3."""

        def mask(self, sequence_id: int, drafts: tuple[int, ...] = ()) -> Any:
            return None if 3 in drafts else np.zeros(1, np.uint32)

    draft = Draft((5, 3, 6, 8, 7, 9), (-1, -1, 0, 1, 2, -1))
    assert filter_drafts({7: draft}, {7: Forbidding()}) == {7: Draft((5, 6, 7, 9), (-1, 0, 1, -1))}  # type: ignore[dict-item]


@pytest.fixture(scope="module")
def llm(directory):
    with make_llm(directory, speculative_config=DRAFTING) as llm:
        yield llm


def test_wild_drafts_change_nothing(llm):
    """Tokens that are none, and tokens after the end of a grammar, stand beside right ones: the
    same text comes, and nobody else notices.
    """
    params = [
        SamplingParams(
            temperature=1.2,
            seed=5,
            max_tokens=30,
            structured_outputs={"regex": REGEXES[1] + "(dog|cat){2}"},
        ),
        SamplingParams(temperature=1.0, seed=6, max_tokens=20, ignore_eos=True, logprobs=1),
    ]
    prompts = [[97, 98], [5, 6, 7]]
    without_drafts(llm)
    plain = llm.generate(prompts, params, use_tqdm=False)
    first_id = llm._engine._num_sequences
    texts = {
        first_id + i: [*o.prompt_token_ids, *o.outputs[0].token_ids] for i, o in enumerate(plain)
    }
    scripted = Scripted(texts, mixed_up)

    class Wild(Proposer):
        def propose(self, request: Any, sequence: Any, num_drafts: int) -> Draft | None:
            draft = scripted.propose(request, sequence, num_drafts)
            beyond = (VOCAB, -1, 10**6)[sequence.num_known_tokens % 3]
            return chain((*draft.token_ids[: num_drafts - 1], beyond))

    draft_with(llm._engine, Wild())
    before = llm.stats()["spec_decode_num_draft_tokens_total"]
    drafted = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs for output in drafted] == [output.outputs for output in plain]
    assert llm.stats()["spec_decode_num_draft_tokens_total"] > before
    of_grammar = drafted[0].metrics
    assert 0 < of_grammar.num_accepted_tokens <= of_grammar.num_draft_tokens
    invariants(llm)


def test_an_exception_on_the_way_to_a_mask_ends_that_request_only(llm, monkeypatch):
    neighbour = SamplingParams(temperature=1.0, seed=6, max_tokens=12, ignore_eos=True, logprobs=1)
    requested = dataclasses.replace(neighbour, structured_outputs={"regex": REGEXES[2]})
    without_drafts(llm)
    alone = llm.generate([[5, 6, 7]], neighbour, use_tqdm=False)[0]
    first_id = llm._engine._num_sequences
    texts = {first_id + 1: [5, 6, 7, *alone.outputs[0].token_ids]}
    draft_with(llm._engine, Scripted(texts, lambda *_: (3, 1)))
    monkeypatch.setattr(Constraint, "_follow", lambda *_: 1 / 0)
    broken, beside = llm.generate([[1], [5, 6, 7]], [requested, neighbour], use_tqdm=False)
    assert beside.outputs == alone.outputs and beside.metrics.num_accepted_tokens > 0
    assert (
        broken.outputs[0].finish_reason in ("stop", "length")
        and broken.metrics.num_draft_tokens == 0
    )
