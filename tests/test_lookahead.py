"""Lookahead decoding: window and n-grams against the published algorithm, written out column by
column for models that are functions of the text; that nothing hurts it; and how many drafts are
asked for.
"""

from __future__ import annotations

import itertools
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpage.errors import ConfigError, UnsupportedError
from jaxpage.settings.draft_settings import Lookahead
from jaxpage.settings.speculative_config import SpeculativeConfig
from jaxpage.shapes import NOT_FINITE, NOTHING_ALLOWED
from jaxpage.speculation import lookahead as under_test
from jaxpage.speculation.controller import Controller
from jaxpage.speculation.lookahead import LookaheadProposer, Pool, Window
from jaxpage.speculation.speculator import ProposingSpeculator
from jaxpage.step.draft import NO_DRAFTS, Draft
from jaxpage.step.limits import StepLimits
from jaxpage.step.plan import Row, StepPlan, StepResult
from jaxpage.step.report import StepReport
from jaxpage.step.request import SequenceGroup
from tests.support.engines import LLAMA, MISTRAL, make_llm
from tests.support.fake_device import make_group
from tests.support.random_checkpoints import random_checkpoint
from tests.support.simulated_speculation import Guesses, ShapedDevice, SpeculativeLoop

Model = Callable[[Sequence[int]], int]  # the token after a text
VOCAB = 1 << 20


def of_the_last(order: int, vocab_size: int) -> Model:
    """Returns a model that reads the last tokens only: its text soon goes in circles, and is
    learnt.
    """
    return lambda text: zlib.crc32(bytes(str(text[-order:]), "ascii")) % vocab_size


def of_the_place(text: Sequence[int]) -> int:
    """Draws by position alone: a guess is right whatever tokens come before it."""
    return zlib.crc32(bytes(str(len(text)), "ascii")) % VOCAB


def couple(text: Sequence[int]) -> int:
    """Draws as a model at a high temperature: half of the tokens depend on the position alone."""
    return (
        of_the_place(text)
        if zlib.crc32(bytes(str([len(text)]), "ascii")) % 2
        else of_the_last(2, VOCAB)(text)
    )


MODELS: dict[str, Model] = {
    "one token back": of_the_last(1, 30),
    "three tokens back": of_the_last(3, 5),
    "by place": of_the_place,
    "coupled": couple,
}


def draws_of(model: Model, text: list[int], draft: Draft) -> list[int]:
    return [
        model(text),
        *(model([*text, *draft.path(index)]) for index in range(len(draft.token_ids))),
    ]


def gained_tokens(draft: Draft, drawn: list[int]) -> list[int]:
    """Returns the tokens that verification gives: the draws, up to the first that no draft
    foresaw.
    """
    tokens, place = [drawn[0]], -1
    children = {
        key: index for index, key in enumerate(zip(draft.parents, draft.token_ids, strict=True))
    }
    while (place := children.get((place, tokens[-1]), -2)) >= 0:
        tokens.append(drawn[1 + place])
    return tokens


class Published:
    """The published algorithm, written column by column, with every context spelled out.

    A column holds its guesses. Each guess is drawn after the one before it.
    """

    def __init__(self, model: Model, prompt: list[int], sizes: Lookahead) -> None:
        self.model, self.text, self.sizes = model, prompt, sizes
        self.pool: dict[int, list[tuple[int, ...]]] = {}
        self.num_taken = 0
        self.fillings = (self.text[number % len(self.text)] for number in itertools.count())
        first_row = [prompt[-1], *itertools.islice(self.fillings, sizes.window - 1)]
        self.columns = deque(deque([token_id]) for token_id in first_row)

    def paths(self) -> list[tuple[int, ...]]:
        """Returns the paths to draft: those of the n-gram pool, and one for each column."""
        length = self.sizes.ngram
        for end in range(max(length, self.num_taken + 1), len(self.text) + 1):
            self.put(self.text[end - length : end])
        self.num_taken = len(self.text)
        self.columns[0][0] = self.text[-1]
        return [
            *self.pool.get(self.text[-1], ())[::-1],
            *(self.context(column) for column in range(self.sizes.window)),
        ]

    def context(self, column: int) -> tuple[int, ...]:
        return (
            *(self.columns[before][0] for before in range(1, column + 1)),
            *list(self.columns[column])[1:],
        )

    def put(self, ngram: Iterable[int]) -> None:
        first, *tail = ngram
        known = [other for other in self.pool.get(first, []) if other != tuple(tail)]
        self.pool[first] = [*known, tuple(tail)][-self.sizes.guesses :]

    def drop(self) -> None:
        num_candidates = len(self.columns.popleft())
        self.columns.append(deque(next(self.fillings) for _ in range(num_candidates)))

    def step(self) -> int:
        """Takes a step, and returns the number of tokens that it gains."""
        paths, num_known = self.paths(), len(self.text)
        drawn = [
            self.model([*self.text, *self.context(column)]) for column in range(self.sizes.window)
        ]
        for column, token_id in zip(self.columns, drawn, strict=True):
            column.append(token_id)
        if len(self.columns[0]) < self.sizes.ngram:
            self.drop()
        else:
            for column in self.columns:
                self.put(column)
                column.popleft()
        self.text.append(self.model(self.text))
        while any(
            path[: len(self.text) - num_known] == tuple(self.text[num_known:]) for path in paths
        ):
            self.text.append(self.model(self.text))
        num_tokens = len(self.text) - num_known
        for _ in range(min(num_tokens - 1, self.sizes.window)):
            self.drop()
        return num_tokens


def step(
    proposer: LookaheadProposer, group: SequenceGroup, model: Model, num_drafts: int
) -> tuple[Draft, int]:
    """Takes a step as an engine does. Returns the draft, and the number of gained tokens."""
    (sequence,) = group.sequences
    draft = proposer.propose(group.request, sequence, num_drafts)
    assert draft is not None and draft == draft.sound(VOCAB, num_drafts)
    drawn = draws_of(model, sequence.token_ids, draft)
    tokens = gained_tokens(draft, drawn)
    proposer.learn_draws(sequence.sequence_id, len(sequence.token_ids), draft, drawn)
    sequence.token_ids += tokens
    return draft, len(tokens)


def differs_from_the_published(
    model: Model, prompt: list[int], sizes: Lookahead, num_steps: int
) -> str | None:
    """Returns where the drafts or the gained tokens differ, or None."""
    published, proposer = Published(model, list(prompt), sizes), LookaheadProposer(sizes)
    group = make_group("a", 0, prompt, max_tokens=10_000)
    for number in range(num_steps):
        expected = {path[:size] for path in published.paths() for size in range(1, len(path) + 1)}
        num_tokens = published.step()
        draft, actual = step(proposer, group, model, sizes.num_drafts)
        if {draft.path(index) for index in range(len(draft.token_ids))} != expected or len(
            draft.token_ids
        ) != len(expected):
            return f"the draft of step {number}"
        if actual != num_tokens or group.sequences[0].token_ids != published.text:
            return f"the tokens of step {number}"
    return None


SIZES = st.builds(Lookahead, st.integers(1, 5), st.integers(2, 5), st.integers(1, 4))
TEXTS = st.lists(st.integers(0, 9), min_size=1, max_size=12)


@given(st.sampled_from(sorted(MODELS)), TEXTS, SIZES)
@settings(max_examples=60, deadline=None)
def test_every_step_is_that_of_the_published_algorithm(model, prompt, sizes):
    assert differs_from_the_published(MODELS[model], prompt, sizes, 25) is None


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("move", lambda self: setattr(self, "num_known", len(self._token_ids))),
        (
            "paths",
            lambda self: (
                tuple(row[column] for row in self.rows) for column in range(len(self.rows[0]))
            ),
        ),
        ("_filling", lambda self: self._token_ids[-1]),
    ],
    ids=[
        "it does not go with the text",
        "its columns do not see the first row",
        "it begins with something else",
    ],
)
def test_a_planted_mistake_is_seen(name, mistake, monkeypatch):
    requested = MODELS["coupled"], [1, 2, 3, 4, 5], Lookahead(4, 4, 3), 25
    assert differs_from_the_published(*requested) is None
    monkeypatch.setattr(Window, name, mistake)
    assert differs_from_the_published(*requested) is not None


def test_what_is_by_place_alone_is_right_at_once():
    """A guess is right when it was drawn, so that after k steps k rows of the window are.

    Columns that begin anew take their time.
    """
    sizes = Lookahead(7, 5, 7)
    proposer, group = LookaheadProposer(sizes), make_group("a", 0, [3, 1, 4], max_tokens=999)
    gains = [step(proposer, group, of_the_place, sizes.num_drafts)[1] for _ in range(40)]
    assert gains[: sizes.ngram - 1] == [1, 2, 3, 4]
    assert sum(gains) > 3 * len(gains)


def test_n_grams_are_learnt_ahead_of_the_text():
    """The text is a walk through 300 tokens that never meets one again: nothing of it helps, but
    columns that began elsewhere have been there.
    """
    order = np.random.default_rng(0).permutation(300).tolist()
    follows = dict(itertools.pairwise([*order, order[0]]))
    prompt = [*order[40::20], order[0]]
    proposer, group = (
        LookaheadProposer(Lookahead(12, 5, 4)),
        make_group("a", 0, prompt, max_tokens=999),
    )
    gains = [step(proposer, group, lambda text: follows[text[-1]], 63)[1] for _ in range(60)]
    assert group.sequences[0].output_token_ids == order[1 : 1 + sum(gains)]
    assert gains[:9] == [1] * 9 and 1.3 * len(gains) < sum(gains) < len(order)
    assert max(gains) == 5, "all of an n-gram, and what was drawn after it"


# --- what an engine may do to it


@given(st.data(), SIZES, st.sampled_from(sorted(MODELS)))
@settings(max_examples=60, deadline=None)
def test_whatever_is_left_of_a_draft_the_window_goes_on(data, sizes, name):
    """Three samples of a request and one of another meet drafts that are cut, thinned out by a
    grammar, not made or not heard of, draws that are none, steps without drafts, and requests that
    end.
    """
    proposer, model = LookaheadProposer(sizes), MODELS[name]
    groups = [
        make_group("a", 0, [1, 2, 3], max_tokens=999, n=3),
        make_group("b", 9, [4], max_tokens=999),
    ]
    parent = groups[0].sequences[0]
    groups[0].sequences += [
        type(parent)(number, number, parent.num_prompt_tokens, [*parent.token_ids, number])
        for number in (1, 2)
    ]
    for _ in range(data.draw(st.integers(1, 40))):
        group = data.draw(st.sampled_from(groups))
        sequence = data.draw(st.sampled_from(group.sequences))
        text = sequence.token_ids
        if data.draw(st.integers(0, 4)) == 0:
            # without drafts
            text += [data.draw(st.integers(0, 9)) for _ in range(data.draw(st.integers(1, 9)))]
        draft = proposer.propose(
            group.request, sequence, data.draw(st.integers(0, sizes.num_drafts))
        )
        assert draft is not None and draft == draft.sound(VOCAB, sizes.num_drafts)
        assert len(set(zip(draft.token_ids, draft.parents, strict=True))) == len(draft.token_ids), (
            "equal children"
        )
        draft = thin_out(draft, [data.draw(st.integers(0, 9)) > 0 for _ in draft.token_ids])
        drawn = draws_of(model, text, draft)
        tokens = gained_tokens(draft, drawn)
        gone = data.draw(st.sets(st.integers(0, len(drawn) - 1), max_size=3))
        heard = [
            (NOT_FINITE, NOTHING_ALLOWED)[index % 2] if index in gone else each
            for index, each in enumerate(drawn)
        ]
        if data.draw(st.integers(0, 9)):
            proposer.learn_draws(sequence.sequence_id, len(text), draft, heard)
        text += tokens[: data.draw(st.integers(1, len(tokens)))]
        window = proposer._drafted[sequence.sequence_id].window
        assert 1 <= len(window.rows) < sizes.ngram and {len(row) for row in window.rows} == {
            sizes.window
        }
        assert all(0 <= token_id < VOCAB for row in window.rows for token_id in row)
    for group in groups:
        proposer.forget(group)
        proposer.learn_draws(group.sequences[0].sequence_id, 3, Draft((), ()), [1])
    assert not proposer._drafted and not proposer._pools


def thin_out(draft: Draft, stays: list[bool]) -> Draft:
    places = {-1: -1}
    tokens, parents = [], []
    for index, (token_id, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
        if stays[index] and parent in places:
            places[index] = len(tokens)
            tokens.append(token_id)
            parents.append(places[parent])
    return Draft(tuple(tokens), tuple(parents))


def test_n_grams_come_first_in_a_draft_and_the_window_by_columns():
    proposer, group = (
        LookaheadProposer(Lookahead(3, 3, 2)),
        make_group("a", 0, [5, 6, 7, 5, 8, 9, 5], max_tokens=99),
    )

    def draft(num_drafts: int) -> list[tuple[int, ...]]:
        proposal = proposer.propose(group.request, group.sequences[0], num_drafts)
        assert proposal is not None
        return [proposal.path(index) for index in range(len(proposal.token_ids))]

    ngrams = [(8,), (8, 9), (6,), (6, 7)]  # the latest first
    assert draft(9) == [*ngrams, (5,), (5, 6)]
    assert draft(3) == ngrams[:3]
    proposer.learn_draws(0, 7, Draft((5,), (-1,)), [8, 1])
    window = proposer._drafted[0].window
    assert window.rows == [[5, 6, 5], [1, 7, 8]], (
        "the first column is gone, and after the third nothing was drawn"
    )


def test_what_was_not_drawn_is_in_no_n_gram():
    pool, window = Pool(3, 4), Window(Lookahead(3, 3, 4), [1, 2])
    window.hear([11, None, 13], pool)
    assert window.rows == [[1, 2, 1], [2, 13, 2]] and not list(pool.after(1))
    window.hear([21, 22, None], pool)
    assert list(pool.after(1)) == [(2, 21)] and list(pool.after(2)) == [(13, 22)]


def test_a_pool_keeps_the_latest():
    pool = Pool(3, 2, max_keys=2)
    for tail in ((1, 1), (2, 2), (1, 1), (3, 3)):
        pool.add(7, tail)
    assert list(pool.after(7)) == [(3, 3), (1, 1)]
    pool.add(8, (0, 0))
    pool.add(7, (4, 4))
    pool.add(9, (0, 0))
    assert (
        not list(pool.after(8))
        and len(list(pool.after(7))) == 2
        and list(pool.after(9)) == [(0, 0)]
    )


LIMITS = StepLimits(
    4,
    256,
    4,
    mixed=False,
    decoded=(2, 4),
    verified=((2, 16), (4, 16)),
    trees=True,
    streams=((2, 32), (4, 64)),
)


class Hearing(LookaheadProposer):
    def __init__(self) -> None:
        super().__init__(Lookahead(2, 3, 1))
        self.heard: list[Any] = []

    def learn_draws(self, *what: Any) -> None:
        self.heard.append(what)
        if len(self.heard) > 2:
            raise RuntimeError("it fails")


def test_draws_are_reported_by_row_and_by_draft(caplog):
    proposer = Hearing()
    speculator = ProposingSpeculator(proposer, LIMITS, None, vocab_size=VOCAB)
    rows = (
        Row(3, 4, (7,), ((1,),)),
        Row(5, 9, (1, 2, 3), ((2,),), parents=(0, 0)),
        Row(6, 1, (4, 5), ((3,),), parents=(0,)),
    )
    numbers = np.array([9, 11, 12, NOT_FINITE, 14, 15], np.int32)
    nothing = np.empty((6, 0))
    result = StepResult(numbers, nothing, nothing, nothing, nothing)

    def observe(*rows: Row) -> None:
        speculator.observe(StepReport(NO_DRAFTS, StepPlan(1, rows, ()), result, [], []))

    observe(*rows)
    messages = [
        (5, 10, Draft((2, 3), (-1, -1)), [11, 12, NOT_FINITE]),
        (6, 2, Draft((5,), (-1,)), [14, 15]),
    ]
    assert proposer.heard == messages
    observe(rows[0])
    assert proposer.heard == messages, "of a step without drafts there is nothing to tell"
    for _ in range(2):
        observe(*rows)
    assert len(proposer.heard) == 3 and "the proposer failed" in caplog.text


def test_long_prompts_are_taken_in_by_and_by(monkeypatch):
    monkeypatch.setattr(under_test, "AT_ONCE", 10)
    group = make_group("a", 0, [*range(50), 3], max_tokens=99)
    proposer = LookaheadProposer(Lookahead(1, 3, 1))
    drafts = [proposer.propose(group.request, group.sequences[0], 9) for _ in range(2)]
    assert [draft and draft.token_ids for draft in drafts] == [(4, 5), (4, 5)]
    assert len(proposer._pools["a"]._tails) == 18, "n-grams that end within the first twenty"


def test_samples_share_n_grams_and_requests_do_not():
    proposer = LookaheadProposer(Lookahead(1, 3, 4))
    group, other = (
        make_group("a", 0, [1, 2], max_tokens=99, n=2),
        make_group("b", 5, [1, 2], max_tokens=99),
    )
    first = group.sequences[0]
    second = type(first)(1, 1, first.num_prompt_tokens, [*first.token_ids, 7])
    first.token_ids += [3, 7, 8, 9]
    proposer.propose(group.request, first, 9)
    other.sequences[0].token_ids += [7]
    assert proposer.propose(group.request, second, 9) == Draft((8, 9), (-1, 0))
    assert proposer.propose(other.request, other.sequences[0], 9) == Draft((), ())


# --- the engine


def test_drafts_for_which_no_step_has_room_are_refused(tmp_path):
    with pytest.raises(
        ConfigError,
        match="the smallest step with drafts has 63 tokens; max_num_batched_tokens is 62",
    ):
        make_llm(
            random_checkpoint(tmp_path, LLAMA),
            max_num_batched_tokens=62,
            speculative_config={"method": "lookahead"},
        )


def test_it_is_refused_for_models_with_windows(tmp_path):
    with pytest.raises(
        UnsupportedError,
        match="method 'lookahead' is not supported for .*sliding windows or states; use a method",
    ):
        make_llm(random_checkpoint(tmp_path, MISTRAL), speculative_config={"method": "lookahead"})


# --- what is configured


@pytest.mark.parametrize(
    ("setting", "sizes"),
    [
        ({}, (17, 4, 4)),
        ({"num_speculative_tokens": 31}, (8, 4, 2)),
        ({"num_speculative_tokens": 7}, (3, 3, 1)),
        ({"num_speculative_tokens": 1}, (1, 2, 1)),
        ({"lookahead_ngram": 5}, (13, 5, 3)),
        ({"lookahead_window": 7, "lookahead_ngram": 5, "lookahead_guesses": 7}, (7, 5, 7)),
        ({"lookahead_window": 7}, (7, 4, 14)),
        ({"lookahead_guesses": 7}, (14, 4, 7)),
    ],
)
def test_sizes_fill_the_drafts_that_there_are(setting, sizes):
    assert SpeculativeConfig(method="lookahead", **setting).lookahead == sizes


def test_any_number_of_drafts_gives_sizes_that_fit():
    for number in range(1, 64):
        config = SpeculativeConfig(method="lookahead", num_speculative_tokens=number)
        assert not list(config.problems()) and config.lookahead.num_drafts <= number, number
        for name, value in (("window", 1), ("guesses", 1), ("ngram", 2)):
            part = SpeculativeConfig(
                method="lookahead", num_speculative_tokens=number, **{f"lookahead_{name}": value}
            )
            assert not list(part.problems()) and getattr(part.lookahead, name) == value, (
                number,
                name,
            )


# --- how many


PARENTS = (-1, 0, 1, -1, 3, 4)  # of a draft that has found less than it was asked for


def controller_that_saw(right: int, dear: float = 1.0) -> Controller:
    """Returns a controller of drafts that come in fifteens, of which so many were right."""
    controller = Controller(LIMITS, unit=15)
    for shape in ((2, 2), (4, 4), (2, 32), (4, 64)):
        controller.costs.at_start(shape, 1.0 + dear * (shape[1] > shape[0]))
    for sequence_id in (1, 2, 3):
        for _ in range(100):
            controller.learn_verified(sequence_id, PARENTS, range(right))
    return controller


def test_all_drafts_or_none():
    """It depends on how many of them are right: no node of a window ever seems worth it, and
    without them there is nothing to draft.
    """
    draft = Draft((5,) * 6, PARENTS)
    worth = controller_that_saw(right=3)
    requested = [worth.ask(3, [1, 2, 3]) for _ in range(2)]
    assert {} in requested and {1: 15, 2: 15, 3: 15} in requested, "one of them is a probe"
    assert worth.cut(3, {1: draft, 3: draft}) == {1: 15, 3: 15}
    for controller in (controller_that_saw(right=0), controller_that_saw(right=3, dear=5.0)):
        assert {} in [controller.ask(3, [1, 2, 3]) for _ in range(2)] and not controller.is_on


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9])
def test_it_does_not_lose(rate):
    """The simulated device needs four times as long for such a step: it is compared with drafting
    never, and always.

    A look at drafts that are that dear has to be saved up for, some hundred steps.
    """
    device = ShapedDevice(fixed=1e-3, weights=7e-3, token=2e-3)

    def loop(num_drafts: int) -> SpeculativeLoop:
        return SpeculativeLoop(
            device, Guesses(lambda place, step: (rate,) * 15, seed=1), 1, num_drafts=num_drafts
        )

    always, auto = loop(15), loop(15)
    controller = Controller(auto.limits, unit=15, warm_up=5)
    for shape in ((2, 2), (1, 16)):
        controller.costs.at_start(shape, device.seconds(shape))
    auto.controller = controller
    auto.speculator = auto._new_speculator(controller)
    auto.run(900)
    actual = auto.run(1000)
    none = 1 / device.seconds((2, 2))
    assert set(actual.num_by_shape) <= {(2, 2), (1, 16)}
    assert actual.tokens_per_second >= 0.97 * none
    assert actual.tokens_per_second >= 0.95 * always.run(1000).tokens_per_second
    assert (actual.num_by_shape[1, 16] > 700) == (rate == 0.9)
