"""Beam search: the strategy against a naive one and all hypotheses there are, and the same through
an engine.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import jaxpage.decoding.beam as beam_module
from jaxpage import BeamSearchParams, SamplingParams
from jaxpage.decoding import BeamStrategy
from jaxpage.decoding.beam import _Candidate, _Hypothesis
from jaxpage.engine.text import NoText, StreamDetokenizer
from jaxpage.errors import CapacityError, UnsupportedError
from jaxpage.outputs import TokenLogprobs
from jaxpage.step.edits import Append, Drop, Edit, Finish, Fork
from jaxpage.step.request import Request
from jaxpage.step.strategy import Draw
from tests.support.beams import Found, all_hypotheses, best_tokens, naive_search, random_logprobs
from tests.support.engines import LLAMA, WIDE, invariants, make_llm
from tests.support.random_checkpoints import random_checkpoint
from tests.support.sweeps import examples
from tests.support.tokenizers import byte_letters

pytestmark = pytest.mark.usefixtures("largest_shapes")

PROMPT = (5, 6, 7)


def request_of(beam: BeamSearchParams, eos: Sequence[int] = (), max_tokens: int = 6) -> Request:
    return Request(
        request_id="beams",
        prompt=None,
        prompt_token_ids=PROMPT,
        params=SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=beam.ignore_eos,
            stop_token_ids=beam.stop_token_ids,
        ),
        seed=0,
        eos_token_ids=frozenset(eos),
        max_total_tokens=len(PROMPT) + max_tokens,
        beam=beam,
    )


@dataclasses.dataclass
class Text:
    """Holds a sequence as an executor of edits sees it."""

    token_ids: tuple[int, ...] = ()
    total: float = 0.0
    text: str = ""
    end: Finish | None = None


class World:
    """Runs a strategy on log probabilities that depend on the text alone, and is strict about every
    edit.
    """

    def __init__(
        self, strategy: BeamStrategy, request: Request, key: object, num_token_ids: int
    ) -> None:
        self.strategy, self.request, self.key, self.num_token_ids = (
            strategy,
            request,
            key,
            num_token_ids,
        )
        self.texts = {0: Text()}
        self.num_forks = 0

    def logprobs_of(self, token_ids: tuple[int, ...]) -> np.ndarray:
        return random_logprobs((self.key, token_ids), self.num_token_ids)

    def run(self) -> list[Found]:
        beam = self.request.beam
        assert beam is not None
        while live := [i for i, text in self.texts.items() if text.end is None]:
            assert len(live) <= beam.beam_width and len(self.texts) - len(live) <= beam.beam_width
            assert len({len(self.texts[i].token_ids) for i in live}) == 1, "in lock step"
            random.Random(len(self.texts)).shuffle(live)
            draws = []
            for i in live:
                top = best_tokens(
                    self.logprobs_of(self.texts[i].token_ids), self.request.num_logprobs or 0
                )
                draws.append(Draw(i, top.token_id, top))
            for edit in self.strategy.advance(draws):
                self.apply(edit)
        assert all(text.end is not None for text in self.texts.values())
        best = [
            Found(
                text.token_ids,
                beam_module.hypothesis_score(text.total, len(text.token_ids), beam.length_penalty),
            )
            for text in self.texts.values()
        ]
        return sorted(best, key=lambda candidate: -candidate.score)

    def apply(self, edit: Edit) -> None:
        match edit:
            case Drop(sequence_id):
                del self.texts[sequence_id]
            case Fork(parent_id, child_id):
                assert child_id not in self.texts and child_id in range(
                    self.request.num_sequence_ids
                )
                assert self.texts[parent_id].end is None
                self.texts[child_id] = dataclasses.replace(self.texts[parent_id])
                self.num_forks += 1
            case Append(sequence_id, token_id, text, logprobs):
                grown = self.texts[sequence_id]
                assert grown.end is None and logprobs is not None and logprobs.token_id == token_id
                assert logprobs.logprob == self.logprobs_of(grown.token_ids)[token_id]
                assert not logprobs.top_token_ids
                grown.token_ids, grown.text = (*grown.token_ids, token_id), grown.text + text
                grown.total += logprobs.logprob
            case Finish(sequence_id, _, _, text):
                assert self.texts[sequence_id].end is None
                self.texts[sequence_id].end, self.texts[sequence_id].text = (
                    edit,
                    self.texts[sequence_id].text + text,
                )


BEAMS = st.builds(
    BeamSearchParams,
    beam_width=st.integers(1, 6),
    length_penalty=st.sampled_from([-1.5, -0.5, 0.0, 0.5, 1.0, 1.0, 2.0]),
    early_stopping=st.sampled_from([False, False, True, "never"]),
    stop_token_ids=st.sampled_from([(), (), (1,), (1, 2, 3)]),
)
CASES = {
    "beam": BEAMS,
    "n": st.integers(1, 6),
    "eos": st.sampled_from([(), (0,), (0,), (0, 2)]),
    "max_tokens": st.integers(1, 12),
    "num_token_ids": st.integers(4, 9),
    "key": st.integers(0, 10_000),
}


def check_search(
    beam: BeamSearchParams,
    n: int,
    eos: tuple[int, ...],
    max_tokens: int,
    num_token_ids: int,
    key: int,
) -> None:
    """Checks tokens, scores and reasons of the strategy against the naive search."""
    beam = dataclasses.replace(beam, n=min(n, beam.beam_width))
    request = request_of(beam, eos, max_tokens)
    ends = {*eos, *beam.stop_token_ids}
    strategy = BeamStrategy(request, range(request.num_sequence_ids), NoText)
    world = World(strategy, request, key, num_token_ids)
    outputs = world.run()
    expected = naive_search(world.logprobs_of, beam, ends, max_tokens)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert [output.score for output in outputs] == pytest.approx(
        [output.score for output in expected], rel=1e-12
    )
    for text in world.texts.values():
        assert text.end is not None
        last = text.token_ids[-1]
        stop_id = last if last in beam.stop_token_ids and last not in eos else None
        assert (text.end.reason, text.end.stop_reason) == (
            ("stop", stop_id) if last in ends else ("length", None)
        )
        assert not ends.intersection(text.token_ids[:-1])


@examples(150)
@given(**CASES)
def test_the_strategy_is_the_naive_search(**case: Any) -> None:
    check_search(**case)


class WrongSign(BeamStrategy):
    def _score(self, cumulative_logprob, num_tokens):
        return cumulative_logprob * math.pow(num_tokens, self._beam.length_penalty)


class NeverStopsEarly(BeamStrategy):
    def _is_over(self, candidate, best):
        return False


class StopsWhenFull(BeamStrategy):
    def _is_over(self, candidate, best):
        return len(best) == self._beam.beam_width


class HopesForNoLength(BeamStrategy):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        if self._beam.early_stopping == "never":
            self._beam = dataclasses.replace(self._beam, early_stopping=False)


class EndsAnywhere(BeamStrategy):
    """Ends at a candidate beyond the first W, too."""

    def _rank(self, draws):
        ranked = super()._rank(draws)
        return sorted(ranked, key=lambda c: not self._is_end(c))


class OnlyTheFirstOfABeam(BeamStrategy):
    """Takes too few candidates of each beam."""

    def _rank(self, draws):
        return [c for c in super()._rank(draws) if c.token.rank <= self._beam.beam_width]


class ForksAfterAppends(BeamStrategy):
    def _edits(self, going, best):
        return sorted(super()._edits(going, best), key=lambda edit: isinstance(edit, Fork))


class DropsTooLate(BeamStrategy):
    def _edits(self, going, best):
        return sorted(super()._edits(going, best), key=lambda edit: isinstance(edit, Drop))


class DropsNoHypothesis(BeamStrategy):
    def _edits(self, going, best):
        ended = beam_module._sequences(self._best)
        edits = super()._edits(going, best)
        return [
            edit for edit in edits if not (isinstance(edit, Drop) and edit.sequence_id in ended)
        ]


class SharesItsText(BeamStrategy):
    """Gives a fork its parent's end of text."""

    def _grow(self, sequence_id, candidate):
        candidate.parent.stopping.fork = lambda: candidate.parent.stopping
        return super()._grow(sequence_id, candidate)


class ForgetsTheSum(BeamStrategy):
    def _rank(self, draws):
        return sorted(super()._rank(draws), key=lambda c: -c.token.logprob)


class EndIsNotCounted(BeamStrategy):
    def _merge(self, ended):
        self._num_tokens -= 1
        try:
            return super()._merge(ended)
        finally:
            self._num_tokens += 1

    def _score(self, cumulative_logprob, num_tokens):
        return super()._score(cumulative_logprob, max(num_tokens, 1))


@pytest.mark.parametrize(
    "mistaken",
    [
        WrongSign,
        NeverStopsEarly,
        StopsWhenFull,
        pytest.param(HopesForNoLength, marks=pytest.mark.sweep),  # rare: it takes seconds to find
        EndsAnywhere,
        OnlyTheFirstOfABeam,
        ForksAfterAppends,
        DropsTooLate,
        DropsNoHypothesis,
        SharesItsText,
        ForgetsTheSum,
        EndIsNotCounted,
    ],
)
def test_planted_mistakes_are_seen(
    mistaken: type[BeamStrategy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.BeamStrategy", mistaken)

    @settings(max_examples=2500, phases=[Phase.generate])
    @given(**CASES)
    def check(**case: Any) -> None:
        check_search(**case)

    with pytest.raises((AssertionError, KeyError, StopIteration, RuntimeError, BaseExceptionGroup)):
        check()


@settings(max_examples=60)
@given(
    num_token_ids=st.integers(2, 3),
    max_tokens=st.integers(1, 4),
    length_penalty=st.sampled_from([-1.0, 0.0, 0.7, 2.0]),
    early_stopping=st.sampled_from([False, True, "never"]),
    ends=st.sampled_from([(), (0,), (0, 1)]),
    key=st.integers(0, 1000),
)
def test_a_width_that_holds_every_hypothesis_finds_the_best(
    num_token_ids: int,
    max_tokens: int,
    length_penalty: float,
    early_stopping: Any,
    ends: tuple[int, ...],
    key: int,
) -> None:
    width = num_token_ids**max_tokens
    beam = BeamSearchParams(
        width, length_penalty=length_penalty, early_stopping=early_stopping, stop_token_ids=ends
    )
    request = request_of(beam, (), max_tokens)
    world = World(BeamStrategy(request, range(2 * width), NoText), request, key, num_token_ids)
    expected = all_hypotheses(world.logprobs_of, length_penalty, ends, max_tokens)
    outputs = world.run()
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert [output.score for output in outputs] == pytest.approx(
        [output.score for output in expected]
    )


@functools.cache
def tokenizer_of_bytes() -> PreTrainedTokenizerFast:
    """Makes a tokenizer whose token ids are parts of characters."""
    letters = byte_letters()
    vocabulary = {letters[byte]: index for index, byte in enumerate(b"a\xc3\xa9 \xe2\x82\xac.")}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("key", range(20))
def test_the_text_of_a_hypothesis_is_that_of_its_tokens(key: int) -> None:
    """Beams part within a character, too. What ends a hypothesis brings no text."""

    def new() -> StreamDetokenizer:
        return StreamDetokenizer(tokenizer_of_bytes(), PROMPT, skip_special_tokens=True)

    beam = BeamSearchParams(4, stop_token_ids=[7], early_stopping="never", length_penalty=2.0)
    request = request_of(beam, (), 9)
    world = World(BeamStrategy(request, range(8), new), request, key, 8)
    world.run()
    assert world.num_forks > 5
    for text in world.texts.values():
        detokenizer = new()
        shown = [detokenizer.push(token_id) for token_id in text.token_ids if token_id != 7]
        assert text.text == "".join(shown) + detokenizer.flush()


def test_a_draw_that_is_none_ends_the_whole_search() -> None:
    likely = int(random_logprobs((3, ()), 4).argmax())
    request = request_of(BeamSearchParams(3, stop_token_ids=[likely]))
    world = World(BeamStrategy(request, range(6), NoText), request, 3, 4)
    for edit in world.strategy.advance([Draw(0, 1, best_tokens(world.logprobs_of(()), 4))]):
        world.apply(edit)
    live = [i for i, text in world.texts.items() if text.end is None]
    assert len(live) == 3 and len(world.texts) == 4
    for edit in world.strategy.advance([Draw(i, -1 if i == live[1] else 0) for i in live]):
        world.apply(edit)
    ends = [text.end for text in world.texts.values()]
    assert [end and (end.reason, end.stop_reason) for end in ends] == [
        ("error", "the model's logits are not finite")
    ] * 3


@pytest.mark.parametrize(("best_logprob", "is_over"), [(-2.0, True), (-2.5, True), (-1.5, False)])
def test_a_search_ends_where_its_beams_can_only_draw_level(
    best_logprob: float, is_over: bool
) -> None:
    """A beam with exactly the score of the worst hypothesis that is held does not replace it, as in
    transformers.
    """
    strategy = BeamStrategy(request_of(BeamSearchParams(2, length_penalty=0.0)), range(4), NoText)
    hypotheses = [_Hypothesis(-1.0, 0), _Hypothesis(-2.0, 1)]
    best_beam = _Candidate(strategy._beams[0], TokenLogprobs(0, -1.0, 1), best_logprob)
    assert strategy._is_over(best_beam, hypotheses) == is_over


@pytest.mark.parametrize(("length_penalty", "best_logprob"), [(0.5, -2.0), (-0.5, -1.4)])
def test_a_search_that_never_stops_early_looks_at_the_length_that_helps(
    length_penalty: float, best_logprob: float
) -> None:
    """With six tokens -2 / 6 ** 0.5 is above -1.5; a penalty below 0 makes the shortest beam the
    best: -1.4 now.
    """
    beam = BeamSearchParams(2, length_penalty=length_penalty, early_stopping="never")
    strategy = BeamStrategy(request_of(beam, max_tokens=6), range(4), NoText)
    strategy._num_tokens = 1
    best_beam = _Candidate(strategy._beams[0], TokenLogprobs(0, -1.0, 1), best_logprob)
    assert not strategy._is_over(best_beam, [_Hypothesis(-1.0, 0), _Hypothesis(-1.5, 1)])


def test_beams_draw_together() -> None:
    request = request_of(BeamSearchParams(2))
    with pytest.raises(AssertionError, match="together"):
        BeamStrategy(request, range(4), NoText).advance(
            [Draw(1, 0, TokenLogprobs(0, -1.0, 1, (0,), (-1.0,)))]
        )


# ---- through engines

LENGTHS = (1, 5, 16, 33, 50)
STOPS = tuple(range(100, 130))
PARAMS = [  # by prompt
    BeamSearchParams(4, max_tokens=14, stop_token_ids=STOPS),
    BeamSearchParams(2, max_tokens=20, length_penalty=-0.5, stop_token_ids=STOPS),
    BeamSearchParams(3, max_tokens=14, ignore_eos=True),
    BeamSearchParams(4, 18, length_penalty=2.0, early_stopping="never", n=2, stop_token_ids=STOPS),
    BeamSearchParams(1, max_tokens=14),
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    directory = random_checkpoint(tmp_path_factory.mktemp("llama"), LLAMA)
    with make_llm(directory, **WIDE) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_left_after(request):
    yield
    if "llm" in request.fixturenames:
        invariants(request.getfixturevalue("llm"))


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(4)
    return [rng.integers(1, 257, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def lone(llm, prompts):
    """Returns the outputs by prompt, one request at a time."""
    requested = zip(prompts, PARAMS, strict=True)
    return [llm.generate(*request, use_tqdm=False)[0].outputs for request in requested]


def test_there_is_something_to_compare(lone):
    outputs = [hypothesis for outputs in lone for hypothesis in outputs]
    assert {hypothesis.finish_reason for hypothesis in outputs} == {"stop", "length"}
    assert [len(outputs) for outputs in lone] == [4, 2, 3, 2, 1]
    for outputs, params in zip(lone, PARAMS, strict=True):
        assert [hypothesis.index for hypothesis in outputs] == list(range(len(outputs)))
        assert [hypothesis.score for hypothesis in outputs] == sorted(
            (hypothesis.score for hypothesis in outputs), reverse=True
        )
        for hypothesis in outputs:
            assert (
                hypothesis.score
                == hypothesis.cumulative_logprob
                / len(hypothesis.token_ids) ** params.length_penalty
            )
            assert hypothesis.logprobs is None and hypothesis.text == ""
            assert (hypothesis.stop_reason in STOPS) == (
                hypothesis.finish_reason == "stop" and hypothesis.token_ids[-1] != 0
            )


def test_what_cannot_be_honoured_is_refused(llm, prompts):
    with pytest.raises(UnsupportedError, match="streaming cannot show beam_width=2"):
        llm.stream(prompts[0], BeamSearchParams(2))
    with pytest.raises(
        UnsupportedError,
        match="beam_width=62 with 3 end-of-sequence and stop ids needs 65 candidates",
    ):
        llm.generate(prompts[0], BeamSearchParams(62, stop_token_ids=[4, 5]), use_tqdm=False)
    with pytest.raises(CapacityError, match="17 sequences at once; max_num_seqs is 16"):
        llm.generate(prompts[0], BeamSearchParams(17), use_tqdm=False)
    for penalty in (400.0, -400.0):
        with pytest.raises(ValueError, match=f"length_penalty={penalty}: 16 tokens"):
            llm.generate(prompts[0], BeamSearchParams(2, length_penalty=penalty), use_tqdm=False)
    (output,) = llm.generate(
        prompts[0], BeamSearchParams(2, 1, length_penalty=400.0), use_tqdm=False
    )
    assert len(output.outputs) == 2
    with pytest.raises(ValueError, match="stop_token_ids has 257"):
        llm.generate(prompts[0], BeamSearchParams(2, stop_token_ids=[257]), use_tqdm=False)


def test_a_search_that_cannot_begin_leaves_nothing(llm, prompts, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(llm._engine._default_strategies, "_new_detokenizer", lambda request: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate(prompts[0], PARAMS[0], use_tqdm=False)
    invariants(llm)


def test_an_abort_at_any_step_leaves_nothing(llm, prompts):
    engine = llm._engine
    for num_steps in range(8):
        reporter = engine.add("watched", engine.prepare(None, prompts[3], PARAMS[3]))
        for _ in range(num_steps):
            engine.step()
        engine.abort("watched")
        assert {hypothesis.finish_reason for hypothesis in reporter.whole().outputs} == {"abort"}
        invariants(llm)


def test_a_failed_step_and_a_failed_strategy_end_the_search(llm, prompts, monkeypatch):
    def failing_after(real, number):
        calls = itertools.count()

        def failing(*arguments):
            if next(calls) == number:
                raise RuntimeError("planted")
            return real(*arguments)

        return failing

    for number in (0, 1, 5):
        for place, name in ((llm._engine.runner, "run"), (BeamStrategy, "_merge")):
            with monkeypatch.context() as patch:
                patch.setattr(place, name, failing_after(getattr(place, name), number))
                (output,) = llm.generate(prompts[3], PARAMS[3], use_tqdm=False)
            assert {hypothesis.finish_reason for hypothesis in output.outputs} == {
                "error"
            } and output.finished
            assert len(output.outputs) == (1 if number == 0 else 2)
            invariants(llm)


def test_every_search_counts_what_it_returns(llm, prompts):
    before = llm.stats()["request_success_total"]
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    after = llm.stats()["request_success_total"]
    for reason in ("stop", "length"):
        num_ended = sum(
            hypothesis.finish_reason == reason
            for output in outputs
            for hypothesis in output.outputs
        )
        assert after[reason] - before.get(reason, 0) == num_ended
