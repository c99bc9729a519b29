"""Proposers that need no device, against their definitions written out in full; and that no
proposer can do harm.
"""

from __future__ import annotations

import ast
import itertools
import logging
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpage import LLM, EngineConfig, SamplingParams
from jaxpage.errors import ConfigError, UnsupportedError
from jaxpage.models.registry import FAMILIES
from jaxpage.settings.draft_settings import SuffixDecoding
from jaxpage.settings.speculative_config import SpeculativeConfig
from jaxpage.settings.speculative_methods import METHODS
from jaxpage.speculation import Proposer, ProposingSpeculator, make_proposer
from jaxpage.speculation.ahead import AheadProposer
from jaxpage.speculation.methods import _PROPOSERS, DraftedModel
from jaxpage.speculation.ngram import NGramProposer
from jaxpage.speculation.recycling import RecyclingProposer
from jaxpage.speculation.suffix import SuffixProposer
from jaxpage.speculation.suffix_tree import SuffixTree
from jaxpage.step.draft import Draft, chain
from jaxpage.step.limits import StepLimits
from jaxpage.step.request import SequenceGroup
from tests.support import proposers
from tests.support.engines import LLAMA, make_llm
from tests.support.fake_device import make_group
from tests.support.random_checkpoints import random_checkpoint
from tests.support.scripted import draft_with
from tests.support.sources import WHEEL, read_modules
from tests.support.synthetic import SyntheticProposer, rates_of

TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=40)
LONG_TEXTS = st.lists(st.integers(0, 3), min_size=20, max_size=40)
VOCAB = 257


def ask(proposer: Proposer, group: SequenceGroup, num_drafts: int) -> Draft | None:
    return proposer.propose(group.request, group.sequences[0], num_drafts)


def write(group: SequenceGroup, token_ids: Iterable[int]) -> None:
    group.sequences[0].token_ids.extend(token_ids)


# --- prompt lookup


def look_up(text: Sequence[int], min_length: int, max_length: int, num_drafts: int) -> Draft | None:
    """Returns the drafts by definition: the longest match, of several the latest."""
    for length in range(max_length, min_length - 1, -1):
        for index in range(len(text) - 1, length - 1, -1):
            if text[index - length : index] == text[len(text) - length :]:
                return chain(tuple(text[index : index + num_drafts]))
    return None


@given(LONG_TEXTS, st.integers(1, 9), st.integers(1, 3), st.integers(0, 5), st.integers(1, 6))
def test_prompt_lookup_goes_on_as_after_the_longest_and_latest_match(
    text, num_prompt_tokens, min_length, more, num_drafts
):
    proposer = NGramProposer(min_length, min_length + more)
    group = make_group("a", 0, text[:num_prompt_tokens], max_tokens=99)
    for token_id in (*text[num_prompt_tokens:], None):
        known = group.sequences[0].token_ids
        assert ask(proposer, group, num_drafts) == look_up(
            known, min_length, min_length + more, num_drafts
        )
        write(group, [] if token_id is None else [token_id])


def test_prompt_lookup_keeps_nothing_of_what_has_ended():
    proposer = NGramProposer(2, 4)
    group = make_group("a", 0, [1, 2, 3, 1, 2])
    assert ask(proposer, group, 2) == chain((3, 1))
    proposer.forget(group)
    assert not proposer._known


# --- the tree of suffixes


class Naive:
    """Holds every run of at most `depth` tokens, and when it occurred: at what time its last token
    came.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.texts: dict[int, list[int]] = {}
        self.times: dict[tuple[int, ...], list[int]] = {}
        self.clock = itertools.count()

    def append(self, text: int, token_id: int) -> None:
        tokens = self.texts.setdefault(text, [])
        tokens.append(token_id)
        time = next(self.clock)
        for length in range(1, min(self.depth, len(tokens)) + 1):
            self.times.setdefault(tuple(tokens[-length:]), []).append(time)

    def count(self, run: Sequence[int]) -> int:
        return len(self.times.get(tuple(run), ()))

    def following(self, run: Sequence[int]) -> list[int]:
        """Returns the most frequent first, of equals the latest."""
        runs = [
            other for other in self.times if len(other) == len(run) + 1 and other[:-1] == tuple(run)
        ]
        return [
            other[-1]
            for other in sorted(
                runs, key=lambda run: (len(self.times[run]), self.times[run][-1]), reverse=True
            )
        ]

    def path(
        self, run: Sequence[int], num_tokens: int, minimum: float
    ) -> tuple[tuple[int, ...], float]:
        path: tuple[int, ...] = ()
        score = 0.0
        while len(path) < num_tokens and (tokens := self.following((*run, *path))):
            probability = self.count((*run, *path, tokens[0])) / self.count(run)
            if probability < minimum - 1e-9:
                break
            path, score = (*path, tokens[0]), score + probability
        return path, score

    def top(self, run: Sequence[int], depth: int, minimum: float) -> list[float]:
        """Returns probabilities of everything that follows, the highest first."""
        results = [
            len(times) / self.count(run)
            for other, times in self.times.items()
            if len(run) < len(other) <= len(run) + depth and other[: len(run)] == tuple(run)
        ]
        return sorted((share for share in results if share >= minimum - 1e-9), reverse=True)


# which text grows by which token
EVENTS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=45)


def both(events: Iterable[tuple[int, int]], depth: int) -> tuple[SuffixTree, Naive]:
    tree, naive = SuffixTree(depth), Naive(depth)
    texts: list[list[int]] = [[], [], []]
    for tokens in texts:
        tree.begin(tokens)
    for text, token_id in events:
        texts[text].append(token_id)
        tree.grow(text, len(texts[text]))
        naive.append(text, token_id)
    return tree, naive


@given(EVENTS, st.integers(2, 6))
def test_the_tree_counts_every_run_and_knows_no_other(events, depth):
    tree, naive = both(events, depth)
    for length in range(1, depth):
        for run in itertools.product(range(3), repeat=length):
            places = tree.find(run)
            assert [tree.count(place) for place in places] == [
                naive.count(run[start:])
                for start in range(length - 1, -1, -1)
                if naive.count(run[start:])
            ]


@given(EVENTS, st.integers(2, 6), st.integers(1, 6), st.sampled_from([0.0, 0.1, 0.4, 0.6]))
def test_the_path_is_of_the_most_frequent_and_of_equals_the_latest(
    events, depth, num_tokens, minimum
):
    tree, naive = both(events, depth)
    for length in range(1, depth):
        for run in itertools.product(range(3), repeat=length):
            if naive.count(run):
                guess = tree.path(tree.find(run)[-1], min(num_tokens, depth - length), minimum)
                path, score = naive.path(run, min(num_tokens, depth - length), minimum)
                assert guess.draft == chain(path)
                assert guess.score == pytest.approx(score)


@given(EVENTS, st.integers(2, 6), st.integers(1, 8), st.sampled_from([0.0, 0.1, 0.4]))
def test_the_tree_of_drafts_has_the_most_likely_each_once(events, depth, num_tokens, minimum):
    tree, naive = both(events, depth)
    for run in itertools.product(range(3), repeat=min(2, depth - 1)):
        if naive.count(run):
            guess = tree.tree(tree.find(run)[-1], num_tokens, depth - len(run), minimum)
            draft = guess.draft
            shares = [
                naive.count((*run, *draft.path(index))) / naive.count(run)
                for index in range(len(draft.token_ids))
            ]
            assert shares == pytest.approx(naive.top(run, depth - len(run), minimum)[:num_tokens])
            assert guess.score == pytest.approx(sum(shares))
            assert len({draft.path(index) for index in range(len(shares))}) == len(shares)
            assert draft == draft.sound(3, num_tokens)


@given(st.lists(TEXTS, min_size=1, max_size=3), st.integers(2, 6))
def test_what_grows_token_by_token_is_what_is_built_at_once(texts, depth):
    slow, fast = SuffixTree(depth), SuffixTree(depth)
    for text, tokens in enumerate(texts):
        for tree in (slow, fast):
            tree.begin(tokens)
        for size in range(1, len(tokens) + 1):
            slow.grow(text, size)
        fast.grow(text, len(tokens))
    assert vars(slow) == vars(fast)


def test_a_tree_knows_nothing_of_tokens_that_it_has_not_taken_in():
    tree = SuffixTree(8)
    text = tree.begin([1, 2, 2, 3, 2, 4])
    tree.grow(text, 4)
    assert len(tree.find([2, 2, 3])) == 3
    assert len(tree.find([3, 2])) == 1  # 2 is known, and that it follows 3 is not
    assert tree.path(tree.find([1])[0], 4, 0.0).token_ids == [2, 2, 3]
    assert tree.tree(tree.find([1])[0], 4, 4, 0.0).token_ids == [2, 2, 3]


def test_a_tree_is_no_larger_than_what_repeats():
    def edges(tokens: list[int]) -> int:
        tree = SuffixTree(24)
        tree.begin(tokens)
        tree.grow(0, len(tokens))
        return len(tree)

    assert edges(list(range(1000))) == 1000  # one for each token
    # and no more than the depth of what there is only one way to go on from
    assert edges([5] * 1000) == 24
    assert edges([1, 2, 3] * 1000) == 3 * 24
    twice = edges([*range(500), *range(500)])
    assert twice <= 24 * 500 + 500  # the worst: everything occurs twice


# --- suffix decoding


def guesses(
    naive: Naive, known: Sequence[int], settings: SuffixDecoding, num_drafts: int
) -> list[tuple[float, Any]]:
    results: list[tuple[float, Any]] = []
    for length in range(1, min(settings.max_tree_depth - 1, len(known)) + 1):
        run = tuple(known[-length:])
        maximum = min(
            num_drafts, int(length * settings.max_spec_factor), settings.max_tree_depth - length
        )
        if naive.count(run):
            path, score = naive.path(run, maximum, settings.min_token_prob)
            results.append((score, path))
    return results


STEPS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 2)), max_size=30)


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=3, max_size=3),
    STEPS,
    st.integers(2, 8),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.integers(1, 5),
)
def test_suffix_decoding_says_the_best_of_what_the_definition_offers(
    prompts, steps, depth, factor, num_drafts
):
    """Three sequences, of which the third is of another salt, grow by some tokens at a time; each
    asks when it has grown.
    """
    settings = SuffixDecoding(depth, 100, factor, 0.1)
    proposer = SuffixProposer(settings)
    groups = [
        make_group(f"{i}", i, prompts[i], max_tokens=99, cache_salt=(None, None, "s")[i])
        for i in range(3)
    ]
    written = [Naive(depth), Naive(depth), Naive(depth)]
    shared = [written[0], written[0], written[2]]
    for which, num_new, token_id in steps:
        group = groups[which]
        new = [(token_id + index) % 3 for index in range(num_new)]
        write(group, new)
        for token in new:
            shared[which].append(which, token)
        known, naive = group.sequences[0].token_ids, Naive(depth)
        for token in known:
            naive.append(0, token)
        offers = guesses(naive, known, settings, num_drafts) + guesses(
            shared[which], known, settings, num_drafts
        )
        best = max(score for score, _ in offers)
        draft = ask(proposer, group, num_drafts)
        if draft is None:
            assert best == 0
        else:
            assert draft in [chain(path) for score, path in offers if score > best - 1e-9]
            assert draft.token_ids


def suffix_proposer(max_requests: int = 100, **settings: Any) -> SuffixProposer:
    return SuffixProposer(SuffixDecoding(max_cached_requests=max_requests), **settings)


def answer(
    proposer: SuffixProposer, number: int, output: Iterable[int], salt: str | None = None
) -> None:
    """Runs a request that asked for drafts once, at its first token, and then ended."""
    group = make_group(f"r{number}", number, [200], max_tokens=99, cache_salt=salt)
    write(group, [201])
    ask(proposer, group, 4)
    write(group, output)
    proposer.forget(group)


def continues(
    proposer: SuffixProposer, known: Sequence[int], salt: str | None = None, number: int = 1000
) -> Draft | None:
    """Returns what a new request is told that ends like this."""
    group = make_group(f"r{number}", number, known, max_tokens=99, cache_salt=salt)
    write(group, [])
    draft = ask(proposer, group, 4)
    proposer.forget(group)
    return draft


def test_a_sequence_goes_on_as_an_earlier_answer_did_its_last_tokens_included():
    proposer = suffix_proposer()
    answer(proposer, 1, [10, 11, 12, 13, 14])
    assert continues(proposer, [99, 10, 11, 12]) == chain((13, 14))
    assert continues(proposer, [99, 11]) == chain((12,))  # one token the same, one drafted
    group = make_group("b", 2, [99, 10, 11], max_tokens=99)
    write(group, [12])
    assert ask(proposer, group, 4) == chain((13, 14))  # what is the same begins in the prompt


def test_prompts_are_nobody_elses():
    proposer = suffix_proposer()
    group = make_group("a", 1, [10, 11, 12, 13], max_tokens=99)
    write(group, [14, 15])
    ask(proposer, group, 4)
    proposer.forget(group)
    assert continues(proposer, [10, 11, 12]) is None
    assert continues(proposer, [14]) == chain((15,))


def test_what_was_written_under_a_salt_is_drafted_under_that_salt_only():
    proposer = suffix_proposer()
    answer(proposer, 1, [10, 11, 12, 13], salt="a")
    answer(proposer, 2, [20, 21, 22, 23])
    assert continues(proposer, [10, 11], salt="a") == chain((12, 13))
    assert continues(proposer, [20, 21]) == chain((22, 23))
    for salt, known in (("b", [10, 11]), (None, [10, 11]), ("a", [20, 21])):
        assert continues(proposer, known, salt=salt) is None


def test_the_sequences_own_tokens_win_over_those_of_others():
    proposer = suffix_proposer()
    answer(proposer, 1, [10, 11])
    # Both have seen 10 twice, themselves included, and once with something after it; the scores
    # are equal.
    answer(proposer, 2, [10])
    assert continues(proposer, [10, 77, 10]) == chain((77,))


def test_a_longer_match_wins_over_an_equally_likely_shorter_one():
    tokens = [1, 2, 3, 4, 9, 2, 5, 6, 7, 1, 2]
    assert continues(suffix_proposer(0), tokens) == chain((3, 4))


@pytest.mark.parametrize("maximum", [1, 2, 3, 7, 10])
def test_the_latest_answers_are_kept_and_never_more_than_may_be(maximum):
    proposer = suffix_proposer(maximum)
    for number in range(40):
        first = 3 * number + 300
        answer(proposer, number, [first, first + 1, first + 2])
        texts = [
            earlier
            for earlier in range(number + 1)
            if continues(proposer, [300 + 3 * earlier, 301 + 3 * earlier])
            == chain((302 + 3 * earlier,))
        ]
        assert texts == list(range(number + 1 - len(texts), number + 1))
        assert min(number + 1, max(1, maximum // 2)) <= len(texts) <= maximum


def test_no_answers_are_kept_where_none_may_be():
    proposer = suffix_proposer(0)
    answer(proposer, 1, [10, 11, 12, 13])
    assert continues(proposer, [10, 11, 12]) is None
    assert not proposer._shared._young


def test_shared_trees_stay_within_their_edges_while_one_sequence_never_ends():
    proposer = suffix_proposer(shared_edges=200)
    group = make_group("a", 1, [0], max_tokens=9999)
    seen = 0
    for start in range(1, 4000, 8):
        write(group, range(start, start + 8))
        ask(proposer, group, 4)
        trees = [
            trees[None]
            for trees in (proposer._shared._young, proposer._shared._old)
            if None in trees
        ]
        assert sum(map(len, trees)) <= 200 + 2 * 8
        assert proposer._shared._num_edges == len(proposer._shared._young[None])
        seen = max(seen, sum(map(len, trees)))
        assert continues(proposer, [start + 2, start + 3]) == chain((start + 4, start + 5))
    assert seen > 100


def test_many_salts_are_many_answers_and_no_more():
    proposer = suffix_proposer(10)
    for number in range(100):
        answer(proposer, number, [1, 2, 3], salt=f"s{number}")
        assert len(proposer._shared._young) + len(proposer._shared._old) <= 10


def test_sequences_without_room_for_a_tree_draft_from_what_others_wrote():
    proposer = suffix_proposer(own_edges=50)
    answer(proposer, 1, [10, 11, 12, 13])
    small = make_group("small", 2, [5, 6, 7, 5, 6], max_tokens=99)
    large = make_group("large", 3, [*range(100, 200), 10, 11], max_tokens=99)
    assert ask(proposer, small, 4) == chain((7, 5))
    assert ask(proposer, large, 4) == chain((12, 13))
    assert proposer._own_trees[3].tree is None
    assert proposer._num_own_edges <= 50
    assert ask(proposer, small, 4) == chain((7, 5))
    for group in (small, large):
        proposer.forget(group)
    assert (proposer._num_own_edges, proposer._own_trees, proposer._shared._written) == (0, {}, {})


def test_a_long_prompt_is_taken_in_over_several_steps_and_drafts_follow_when_it_is():
    proposer = suffix_proposer(at_once=10)
    prompt = [*range(40), 3, 4]
    group, other = (
        make_group("a", 1, prompt, max_tokens=99),
        make_group("b", 2, [1, 2, 1], max_tokens=99),
    )
    for _ in range(4):
        assert ask(proposer, group, 4) is None
        assert ask(proposer, other, 4) is None  # the round's tokens are used up
    assert ask(proposer, group, 4) == chain((5, 6))
    assert ask(proposer, other, 4) == chain((2,))


def test_drafts_branch_where_they_may():
    tokens = [1, 2, 3, 1, 2, 4, 1, 2]
    assert continues(suffix_proposer(0, tree=True), tokens) == Draft((3, 4), (-1, -1))
    assert continues(suffix_proposer(0), tokens) == chain((4, 1))


# --- drafts of which a set share is right


def test_so_many_are_right_as_was_requested_and_the_others_are_wrong():
    rates = (0.8, 0.5, 0.5, 0.1)
    output = [number * 7 % VOCAB for number in range(6000)]
    proposer = SyntheticProposer({(1,): [output]}, rates, vocab_size=VOCAB)
    group = make_group("a", 3, [1], max_tokens=9999)
    counts, drafts = [0] * 4, []
    for position in range(5000):
        draft = ask(proposer, group, 9)
        assert draft is not None and len(draft.token_ids) == 4
        right = [a == b for a, b in zip(draft.token_ids, output[position:], strict=False)]
        assert right == sorted(right, reverse=True)
        for index, is_right in enumerate(right):
            counts[index] += is_right
        drafts.append(draft)
        write(group, [output[position]])
    for count, rate in zip(counts, rates, strict=True):
        assert abs(z(count, 5000, rate)) < 4
        assert abs(z(count, 5000, rate + 0.09)) > 4  # a rate that is not the one
    again = SyntheticProposer({(1,): [output]}, rates, vocab_size=VOCAB)
    other = SyntheticProposer({(1,): [output]}, rates, vocab_size=VOCAB, seed=1)
    numbers = [
        each.num_right(3, index) for each in (proposer, again, other) for index in range(200)
    ]
    assert numbers[:200] == numbers[200:400] != numbers[400:]
    assert [proposer.num_right(4, index) for index in range(200)] != numbers[:200]


def z(count: int, total: int, rate: float) -> float:
    return (count - total * rate) / math.sqrt(total * rate * (1 - rate))


def test_synthetic_drafts_end_with_the_output_and_refuse_another_one():
    proposer = SyntheticProposer({(1,): [[5, 6, 7]]}, (1.0,) * 4, vocab_size=VOCAB)
    group = make_group("a", 0, [1], max_tokens=99)
    assert ask(proposer, group, 4) == chain((5, 6, 7))
    write(group, [5])
    assert ask(proposer, group, 1) == chain((6,))
    write(group, [6, 7])
    assert ask(proposer, group, 4) is None
    write(group, [8])
    with pytest.raises(ValueError, match="token 3"):
        ask(proposer, group, 4)
    other = make_group("b", 1, [1], max_tokens=99)
    write(other, [5, 9])
    with pytest.raises(ValueError, match="token 1"):
        ask(proposer, other, 4)


@given(st.integers(1, 8), st.floats(0, 1))
def test_the_schedule_of_a_mean_length_has_that_mean(num_drafts, share):
    mean = 1 + share * num_drafts
    rates = rates_of(mean, num_drafts)
    assert 1 + sum(rates) == pytest.approx(mean)
    assert sorted(rates, reverse=True) == list(rates)
    assert sum(0 < rate < 1 for rate in rates) <= 1


@pytest.mark.parametrize("mean", [0.9, 4.1, math.nan])
def test_a_mean_that_no_drafts_give_is_refused(mean):
    with pytest.raises(ValueError, match="mean_length"):
        rates_of(mean, 3)


@pytest.mark.parametrize("rates", [(0.5, 0.6), (1.1,), (-0.1,), (math.nan,)])
def test_rates_that_rise_or_are_none_are_refused(rates):
    with pytest.raises(ValueError, match="rates"):
        SyntheticProposer({}, rates, vocab_size=4)


# --- what is configured


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"method": "suffix", "prompt_lookup_max": 3},
            "prompt_lookup_max is 3, but method is 'suffix': it belongs to ngram",
        ),
        (
            {"method": "ngram", "suffix_decoding_min_token_prob": 0.1},
            "suffix_decoding_min_token_prob is 0.1, but method",
        ),
        (
            {"method": "ngram", "model": "m"},
            "model is 'm', but method is 'ngram': it belongs to draft_model, medusa",
        ),
        (
            {"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4},
            "prompt_lookup_min is 5, above",
        ),
        (
            {"method": "suffix", "suffix_decoding_max_tree_depth": 8, "num_speculative_tokens": 8},
            "num_speculative_tokens is 8, but suffix_decoding_max_tree_depth 8 leaves at most 7",
        ),
        (
            {
                "method": "suffix",
                "suffix_decoding_max_tree_depth": 8,
                "suffix_decoding_max_spec_factor": 0.1,
            },
            "suffix_decoding_max_spec_factor is 0.1, so nothing is drafted: .* 8 allows at most "
            "7 matching tokens; use at least 1/7",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(speculative_config=settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["max_tree_depth", "max_spec_factor", "min_token_prob", "max_cached_requests"]
)
def test_settings_of_suffix_decoding_out_of_their_range_are_refused(name):
    for value in (-1, math.inf, math.nan, "1"):
        with pytest.raises(ConfigError, match=f"suffix_decoding_{name}"):
            EngineConfig(speculative_config={"method": "suffix", f"suffix_decoding_{name}": value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "lookahead", "acceptance": "rejection"},
        {"method": "lookahead", "acceptance": "typical"},
    ],
)
def test_what_this_version_does_not_do_is_refused(settings):
    with pytest.raises(UnsupportedError, match="is not supported: .*; use "):
        EngineConfig(speculative_config=settings)  # type: ignore[arg-type]


def test_every_method_that_is_supported_has_a_proposer_with_its_settings():
    target = DraftedModel(VOCAB)
    ngram = make_proposer(
        SpeculativeConfig(method="ngram", prompt_lookup_min=1, prompt_lookup_max=1), target
    )
    group = make_group("a", 0, [1, 9, 2, 1, 2])
    assert ask(ngram, group, 4) == chain((1, 2))
    suffix = make_proposer(
        SpeculativeConfig(method="suffix", suffix_decoding_max_spec_factor=3.0), target
    )
    assert ask(suffix, group, 4) == chain((1, 2))
    lookahead = make_proposer(
        SpeculativeConfig(method="lookahead", num_speculative_tokens=3), target
    )
    assert ask(lookahead, group, 3) == chain((1, 2))
    recycling = make_proposer(SpeculativeConfig(method="token_recycling"), target)
    assert isinstance(recycling, RecyclingProposer) and ask(recycling, group, 3) is None
    recycling.on_top_k([None] * 2, [1, 2], np.array([[3] * 8, [1] * 8], np.int32))
    assert ask(recycling, group, 3) == chain((1, 3))
    heads = make_proposer(SpeculativeConfig(method="mtp"), target)
    assert isinstance(heads, AheadProposer)
    known = get_args(SpeculativeConfig.model_fields["method"].annotation)
    assert known == (*METHODS, "auto")  # one of the others
    assert set(_PROPOSERS) | {name for name, each in METHODS.items() if each.drafter} == {*METHODS}


# Where methods are named; and the parts of drafters, which have names of their own.
HOMES = (
    "jaxpage/speculation/",
    "jaxpage/settings/",
    "jaxpage/models/drafters/medusa",
    "jaxpage/checkpoints/drafters/eagle_",
    "tools/",
)


def decisions_by_method(tree: ast.AST) -> list[int]:
    """Returns lines that compare something with the name of a method, or look something up
    by it.
    """
    results: list[int] = []
    for node in ast.walk(tree):
        names: list[Any] = node.keys if isinstance(node, ast.Dict) else []
        if isinstance(node, ast.Compare):
            names = [
                part
                for side in (node.left, *node.comparators)
                for part in getattr(side, "elts", [side])
            ]
        results += [
            node.lineno
            for name in names
            if isinstance(name, ast.Constant) and name.value in METHODS
        ]
    return results


def test_only_speculation_and_settings_decide_by_the_name_of_a_method():
    planted = "method == 'ngram'\nby_name = {'medusa': 1}\nmethod in ('eagle', 'suffix')"
    assert set(decisions_by_method(ast.parse(planted))) == {1, 2, 3}
    modules = read_modules(Path(__file__).parents[1])
    results = {module.path for module in modules if decisions_by_method(module.tree)}
    assert not {path for path in results if not path.startswith(HOMES)}


def test_a_method_with_a_drafter_changes_four_files_of_others_at_most():
    """It is MTP, with its own files and those of the families that have heads left out."""
    pages = {entry.partition(":")[0] for entry in FAMILIES.values()}
    # The configs of all families with heads, and their door.
    shared = {"parts/decoder_config", "parts/experts", "config/__init__"}
    families = {f"jaxpage/models/{name}.py" for name in pages | shared}
    results = {
        module.path
        for module in read_modules(Path(__file__).parents[1], WHEEL)
        if "mtp" in module.source.lower() and "mtp" not in module.path
    }
    assert results - families == {
        "jaxpage/settings/speculative_methods.py",
        "jaxpage/assembly/planning/drafters.py",
        "jaxpage/checkpoints/drafters/__init__.py",
        "jaxpage/models/drafters/__init__.py",
    }


@pytest.mark.parametrize(
    ("given_min", "given_max", "lengths"),
    [(None, None, (2, 16)), (None, 1, (1, 1)), (20, None, (20, 20)), (3, 5, (3, 5))],
)
def test_the_default_of_one_length_gives_way_to_the_other(given_min, given_max, lengths):
    config = SpeculativeConfig(
        method="ngram", prompt_lookup_min=given_min, prompt_lookup_max=given_max
    )
    assert config.prompt_lookup == lengths
    assert not list(config.problems())


def test_settings_of_suffix_decoding_are_those_that_are_given_and_the_defaults():
    config = SpeculativeConfig(method="suffix", suffix_decoding_max_cached_requests=0)
    assert config.suffix_decoding == SuffixDecoding(24, 0, 1.0, 0.1)


# --- proposers that do harm


@given(
    st.lists(st.integers(-2, 6), max_size=8),
    st.lists(st.integers(-3, 8), max_size=9),
    st.integers(0, 8),
)
def test_what_is_left_of_a_draft_is_a_tree_of_known_tokens(token_ids, parents, maximum):
    draft = Draft(tuple(token_ids), tuple(parents)).sound(5, maximum)
    count = len(draft.token_ids)
    assert draft == Draft(tuple(token_ids[:count]), tuple(parents[:count])) and count <= maximum
    assert len(draft.parents) == count
    assert all(0 <= token_id < 5 for token_id in draft.token_ids)
    assert all(-1 <= parent < index for index, parent in enumerate(draft.parents))
    if count < min(maximum, len(token_ids), len(parents)):  # nothing is dropped without a reason
        assert not (0 <= token_ids[count] < 5 and -1 <= parents[count] < count)


LIMITS = StepLimits(max_rows=4, max_tokens=64, max_chunk_rows=4, mixed=False, verified=((4, 4),))


def test_a_proposer_that_fails_is_not_asked_again_and_hurts_nobody(caplog):
    double = proposers.fails(after=1)
    speculator = ProposingSpeculator(double, LIMITS, None, vocab_size=VOCAB)
    groups = [make_group(f"{i}", i, [1, 2]) for i in range(3)]
    for group in groups:
        group.sequences[0].num_computed_tokens = 1
    with caplog.at_level(logging.ERROR):
        assert speculator.propose(groups).of == {0: chain((0, 0, 0))}
        assert not speculator.propose(groups).of
        speculator.forget(groups[0])
    assert (double.num_requested, double.forgotten) == (2, [])
    assert [record.message for record in caplog.records if "proposer failed" in record.message] == [
        caplog.records[0].message
    ]


def test_only_what_can_be_verified_reaches_a_plan():
    for name, double in proposers.harmless(VOCAB).items():
        speculator = ProposingSpeculator(double, LIMITS, None, vocab_size=VOCAB)
        num_drafts = 0
        for size in range(1, 60):
            group = make_group("a", 0, [1] * size, max_tokens=99)
            group.sequences[0].num_computed_tokens = size - 1
            for draft in speculator.propose([group]).of.values():
                assert draft.token_ids and draft == draft.sound(VOCAB, 3), name
                assert len(draft.parents) == len(draft.token_ids) <= 3, name
                num_drafts += 1
        assert (num_drafts > 0) == (name != "no_draft"), name


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    directory: Path = tmp_path_factory.mktemp("llama")
    random_checkpoint(directory, LLAMA)
    return make_llm(directory, speculative_config={"method": "ngram", "num_speculative_tokens": 3})


PROMPTS = [[1, 2, 3, 4, 1, 2], [9, 8, 7], [5] * 20]
CHOICES = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=5, max_tokens=24, stop_token_ids=list(range(0, 257, 9))),
    SamplingParams(temperature=1.0, seed=6, n=2, max_tokens=24, repetition_penalty=1.2),
]


def run(llm: LLM, proposer: Proposer | None) -> tuple[dict[Any, Any], int]:
    """Returns outputs by prompt, and the steps that they took.

    Without a proposer there are no drafts.
    """
    engine = llm._engine
    draft_with(engine, proposer or proposers.Double(lambda *_: None))
    before = llm.stats()["engine_steps_total"]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], CHOICES)
    assert llm.stats()["num_blocks_free"] == llm.stats()["num_blocks_total"]
    texts = {
        tuple(output.prompt_token_ids): [list(sample.token_ids) for sample in output.outputs]
        for output in outputs
    }
    return texts, llm.stats()["engine_steps_total"] - before


def test_no_proposer_changes_a_text_or_fails_a_step(llm):
    expected, num_steps = run(llm, None)
    # a stop falls inside a run
    assert any(len(sample) < 24 for samples in expected.values() for sample in samples)
    doubles = proposers.harmless(VOCAB)
    for name, double in doubles.items():
        if name != "twins":  # a tree, which the device does not verify yet
            texts, steps = run(llm, double)
            assert texts == expected, name
            assert double.num_requested > 0 and steps <= num_steps, name
    for proposer in (
        proposers.always_wrong(expected, 3, VOCAB),
        SuffixProposer(SuffixDecoding()),
        NGramProposer(1, 3),
    ):
        assert run(llm, proposer)[0] == expected


def test_right_drafts_save_the_steps_that_they_stand_for_also_past_the_end(llm):
    expected, num_steps = run(llm, None)
    for proposer in (proposers.oracle(expected, 3, VOCAB), proposers.PastTheEnd(expected)):
        texts, steps = run(llm, proposer)
        assert texts == expected
        assert steps < num_steps / 2
