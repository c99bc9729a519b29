"""Stopping: streamed text against a brute-force oracle that cuts the whole text, across token and
UTF-8 borders.
"""

from __future__ import annotations

import codecs
import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxpage.decoding import SamplingStrategy, Stopping, advance, masks_of
from jaxpage.decoding import stopping as stopping_module
from jaxpage.decoding.constraints import End
from jaxpage.decoding.stop_strings import StopStrings
from jaxpage.outputs import TokenLogprobs
from jaxpage.settings.sampling_params import SamplingParams
from jaxpage.shapes import NOT_FINITE, NOTHING_ALLOWED
from jaxpage.step.edits import Append, Finish
from jaxpage.step.plan import Row, Sample, StepPlan, StepResult
from jaxpage.step.request import Request
from jaxpage.step.strategy import Draw
from jaxpage.step.token_masks import Mask
from tests.support.sweeps import examples

# Token ids and the bytes that they stand for: whole words, stop strings in parts, and the bytes of
# € and 😀 one by one.
TOKENS = [
    b"a",
    b"b",
    b"ab",
    b"ba",
    b"aab",
    b"c",
    b"\xe2",
    b"\x82",
    b"\xac",
    b"x\xe2\x82",
    b"\xf0\x9f",
    b"\x98\x80",
    b"",
    b"b\xe2",
]
EOS, STOP_ID = len(TOKENS), len(TOKENS) + 1
STOPS = ["a", "ab", "ba", "aab", "abab", "bc", "€", "a€", "€b", "😀", "b�", "�a", "abc", "aa", "c"]


class ByteDetokenizer:
    """Keeps incomplete UTF-8 back, as the engine's does."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(TOKENS[token_id]) if token_id < len(TOKENS) else ""

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


def make_request(num_prompt: int = 3, max_total_tokens: int | None = None, **params) -> Request:
    checked = SamplingParams(**params)
    assert checked.max_tokens is not None
    return Request(
        request_id="r",
        prompt=None,
        prompt_token_ids=(0,) * num_prompt,
        params=checked,
        seed=0,
        eos_token_ids=frozenset() if checked.ignore_eos else frozenset({EOS}),
        max_total_tokens=max_total_tokens or num_prompt + checked.max_tokens,
    )


def first_stop(text: str, stops: tuple[str, ...], start: int) -> tuple[int, str] | None:
    """Returns (end, stop string) of the one that is complete first, after `start` characters; the
    longest of several.
    """
    for end in range(start + 1, len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            return end, max(matching, key=len)
    return None


def oracle(request: Request, token_ids: list[int]) -> tuple[int, str, str | None, int | str | None]:
    """Returns (tokens taken, text, finish reason, stop reason), by decoding everything from the
    start after each token.
    """
    params = request.params
    exempt, text = 0, ""
    for num_taken in range(1, len(token_ids) + 1):
        token_id, may_stop = token_ids[num_taken - 1], num_taken > params.min_tokens
        reason, stop_reason, num_text = None, None, num_taken
        if may_stop and token_id in request.eos_token_ids:
            reason, num_text = "stop", num_taken - 1
        elif may_stop and token_id in params.stop_token_ids:
            reason, stop_reason, num_text = "stop", token_id, num_taken - 1
        elif num_taken >= params.max_tokens:
            reason = "length"
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        given_bytes = b"".join(TOKENS[t] for t in token_ids[:num_text] if t < len(TOKENS))
        text = decoder.decode(given_bytes, final=reason is not None)
        stop_found = first_stop(text, params.stop, exempt) if may_stop else None
        if stop_found is not None:
            end, stop = stop_found
            return (
                num_taken,
                text[: end if params.include_stop_str_in_output else end - len(stop)],
                "stop",
                stop,
            )
        if reason is not None:
            return num_taken, text, reason, stop_reason
        if not may_stop:
            exempt = len(text)
    return len(token_ids), text, None, None


def stream(request: Request, token_ids: list[int]) -> tuple[int, str, str | None, int | str | None]:
    stopping, text = Stopping(request, ByteDetokenizer()), ""
    for num_taken, token_id in enumerate(token_ids, 1):
        verdict = stopping.push(token_id)
        text += verdict.text + verdict.last_text
        assert verdict.reason is not None or not verdict.last_text
        if verdict.reason is not None:
            return num_taken, text, verdict.reason, verdict.stop_reason
    return len(token_ids), text, None, None


def agree_with_the_oracle(
    token_ids: list[int], stops: list[str], include: bool, min_tokens: int, max_tokens: int
) -> None:
    request = make_request(
        stop=stops or None,
        include_stop_str_in_output=include,
        min_tokens=min(min_tokens, max_tokens),
        max_tokens=max_tokens,
        stop_token_ids=[STOP_ID],
    )
    expected, actual = oracle(request, token_ids), stream(request, token_ids)
    if expected[2] is not None:
        assert actual == expected
        return
    # Still going on: what came out begins the text, and only what a stop string could begin with is
    # held back.
    assert actual[2] is None and expected[1].startswith(actual[1])
    held = expected[1][len(actual[1]) :]
    assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    assert not (held and include), "nothing has to be held back when the stop string is shown"


cases = given(
    token_ids=st.lists(
        st.sampled_from(range(STOP_ID + 1)) | st.sampled_from([0, 1, 2, 3]), max_size=14
    ),
    stops=st.lists(st.sampled_from(STOPS) | st.text("ab€", min_size=1, max_size=4), max_size=4),
    include=st.booleans(),
    min_tokens=st.sampled_from([0, 0, 1, 2, 5]),
    max_tokens=st.sampled_from([1, 3, 6, 20, 20]),
)


@examples(400)
@cases
@example([0, 0, 1], ["aab", "ab"], False, 0, 20)  # both end here: the longer one counts
# "a" is complete first, although "aabc" begins no later
@example([4, 5], ["aabc", "a"], False, 0, 20)
@example([9, 8], ["x"], False, 0, 20)
@example([1, 6, EOS], ["b�"], False, 0, 20)  # the end completes the stop string
@example([0, 0], ["aa"], False, 1, 20)  # begins below min_tokens, complete after it
@example([0, 0], ["aa"], False, 2, 20)
@example([2, 2], ["ab"], True, 0, 20)
def test_streamed_text_is_the_whole_text_cut_at_the_first_stop(
    token_ids, stops, include, min_tokens, max_tokens
):
    agree_with_the_oracle(token_ids, stops, include, min_tokens, max_tokens)


@examples(100)
@given(
    text=st.text("ab", max_size=16),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    include=st.booleans(),
    borders=st.lists(st.integers(0, 16), max_size=6),
)
def test_where_the_pieces_end_makes_no_difference(text, stops, include, borders):
    def cut(pieces: list[str]) -> tuple[str, str | None]:
        strings, shown = StopStrings(tuple(stops), include=include), ""
        for piece in pieces:
            new, stop = strings.push(piece)
            shown += new
            if stop is not None:
                return shown, stop
        return shown + strings.flush(), None

    edges = [0, *sorted(border for border in borders if border < len(text)), len(text)]
    pieces = [text[i:j] for i, j in itertools.pairwise(edges)]
    assert cut(pieces) == cut([text]) == cut(list(text))


class HoldsNothing(StopStrings):
    def _num_to_hold(self, text: str) -> int:
        return 0


class HoldsOneTooFew(StopStrings):
    def _num_to_hold(self, text: str) -> int:
        return max(0, super()._num_to_hold(text) - 1)


class AlwaysHoldsTheMax(StopStrings):
    def _num_to_hold(self, text: str) -> int:
        return min(self._reach, len(text))


class TakesTheFirstInTheList(StopStrings):
    def _find(self, text):
        matches = (
            [StopStrings._find(self, text)] if any(stop in text for stop in self._stops) else []
        )
        for stop in self._stops:
            start = text.find(stop, max(0, len(self._recent) + 1 - len(stop)))
            if matches and start >= 0:
                return start + len(stop), start, stop
        return None


class LooksOnlyAtThePiece(StopStrings):
    def _find(self, text):
        ends = ((text.find(stop, len(self._recent)), stop) for stop in self._stops)
        return min(
            ((start + len(stop), start, stop) for start, stop in ends if start >= 0), default=None
        )


class ForgetsWhatIsHeld(StopStrings):
    def flush(self) -> str:
        return ""


class FindsOldStopsAgain(StopStrings):
    def _find(self, text):
        places = ((text.find(stop), stop) for stop in self._stops)
        return min(
            ((start + len(stop), start, stop) for start, stop in places if start >= 0), default=None
        )


@pytest.mark.parametrize(
    "mistaken",
    [
        HoldsNothing,
        HoldsOneTooFew,
        AlwaysHoldsTheMax,
        TakesTheFirstInTheList,
        LooksOnlyAtThePiece,
        ForgetsWhatIsHeld,
        FindsOldStopsAgain,
    ],
)
def test_the_oracle_sees_planted_mistakes(mistaken, monkeypatch):
    monkeypatch.setattr(stopping_module, "StopStrings", mistaken)
    search = settings(
        max_examples=3000, phases=[p for p in settings().phases if p.name == "generate"]
    )
    with pytest.raises(AssertionError):
        search(cases(agree_with_the_oracle))()


def verdicts(
    request: Request, token_ids: list[int]
) -> list[tuple[str, str | None, int | str | None, str]]:
    stopping = Stopping(request, ByteDetokenizer())
    return [(v.text, v.reason, v.stop_reason, v.last_text) for v in map(stopping.push, token_ids)]


def test_eos_and_stop_ids_bring_no_text_but_release_what_was_held():
    request = make_request(stop=["abc"], stop_token_ids=[STOP_ID, 5])
    assert verdicts(request, [2, EOS]) == [("", None, None, ""), ("", "stop", None, "ab")]
    # token 5 is "c": it is not shown
    assert verdicts(request, [2, 5]) == [("", None, None, ""), ("", "stop", 5, "ab")]


def test_an_id_that_is_both_eos_and_stop_id_counts_as_eos():
    assert verdicts(make_request(stop_token_ids=[EOS]), [EOS]) == [("", "stop", None, "")]


def test_ignored_eos_goes_on():
    request = make_request(ignore_eos=True, max_tokens=2)
    assert verdicts(request, [EOS, 0]) == [("", None, None, ""), ("a", "length", None, "")]


def test_the_length_of_the_model_ends_before_max_tokens():
    request = make_request(max_tokens=10, max_total_tokens=5)
    assert verdicts(request, [0, 1])[-1] == ("b", "length", None, "")


def test_eos_at_the_last_token_is_a_stop_and_an_incomplete_character_comes_out():
    assert verdicts(make_request(max_tokens=2), [6, EOS])[-1] == ("", "stop", None, "�")
    assert verdicts(make_request(max_tokens=2), [6, 7])[-1] == ("", "length", None, "�")


def test_min_tokens_outlasts_every_kind_of_stop():
    request = make_request(min_tokens=3, stop=["a"], stop_token_ids=[STOP_ID])
    assert [v[1:3] for v in verdicts(request, [0, EOS, STOP_ID, 0])] == [(None, None)] * 3 + [
        ("stop", "a")
    ]


def test_min_tokens_does_not_outlast_the_length():
    assert verdicts(make_request(min_tokens=2, max_tokens=2), [0, 0])[-1][1] == "length"


@pytest.mark.parametrize(("min_tokens", "reason"), [(0, ("stop", "b�")), (1, ("length", None))])
def test_a_stop_string_in_the_last_text_counts_above_min_tokens(min_tokens, reason):
    """A character that was never completed completes the stop string when the length ends the
    sequence.
    """
    text, *others, last_text = verdicts(
        make_request(stop=["b�"], min_tokens=min_tokens, max_tokens=1), [13]
    )[-1]
    assert tuple(others) == reason and text + last_text == ("" if min_tokens == 0 else "b�")


@pytest.mark.parametrize("end", [End("stop", None), End("error", "structured_outputs: no")])
def test_the_end_of_a_grammar_wins_over_a_length_at_the_same_token(end):
    stopping = Stopping(make_request(max_tokens=1), ByteDetokenizer())
    verdict = stopping.push(0, end)
    assert (verdict.text, verdict.reason, verdict.stop_reason) == ("a", *end)


def test_strategy_answers_with_edits_per_sequence():
    strategy = SamplingStrategy(make_request(stop=["ab"], max_tokens=4), ByteDetokenizer)
    logprobs = TokenLogprobs(token_id=0, logprob=-1.0, rank=1)
    draws = [Draw(10, 0, logprobs), Draw(11, 1)]  # the text of each is its own
    assert strategy.advance(draws) == [Append(10, 0, "", logprobs), Append(11, 1, "b")]
    assert strategy.advance([Draw(10, 1)]) == [Append(10, 1, ""), Finish(10, "stop", "ab")]
    assert strategy.advance([Draw(11, EOS)]) == [Append(11, EOS, ""), Finish(11, "stop", None)]
    assert not any(strategy._by_id)  # Nothing is kept of a sequence that has ended.


@pytest.mark.parametrize(
    ("token_id", "reason"), [(NOT_FINITE, "not finite"), (NOTHING_ALLOWED, "leave no token")]
)
def test_a_draw_without_a_token_ends_its_sequence_alone(token_id, reason):
    strategy = SamplingStrategy(make_request(), ByteDetokenizer)
    assert strategy.advance([Draw(10, 1)]) == [Append(10, 1, "b")]
    first, second = strategy.advance([Draw(10, token_id), Draw(11, 1)])
    assert strategy._stopping_of.keys() == {11}
    assert isinstance(first, Finish) and (first.sequence_id, first.reason) == (10, "error")
    assert reason in str(first.stop_reason) and second == Append(11, 1, "b")


class Done:
    """Stands in for a grammar that may end, and admits one token to go on with."""

    may_stop = True

    def advance(self, token_id: int) -> None:
        return None


@pytest.mark.parametrize(("token_id", "reason"), [(NOT_FINITE, "error"), (NOTHING_ALLOWED, "stop")])
def test_a_grammar_that_may_end_does_so_only_where_nothing_is_allowed(token_id, reason):
    """Logits that are no numbers are an error of the model wherever the grammar stands."""
    strategy = SamplingStrategy(make_request(stop=["ab"]), ByteDetokenizer)
    strategy._constraint_of[10] = Done()  # type: ignore[assignment]
    assert strategy.advance([Draw(10, 0)]) == [Append(10, 0, "", None)]
    (last,) = strategy.advance([Draw(10, token_id)])
    assert isinstance(last, Finish) and last.reason == reason
    assert last.text == ("a" if reason == "stop" else "")


def test_a_mask_that_cannot_be_made_admits_nothing():
    class Fails(SamplingStrategy):
        def mask(self, sequence_id: int, drafts: tuple[int, ...] = ()) -> Mask | None:
            raise RuntimeError("no mask")

    params = SamplingParams(structured_outputs={"regex": "a"})
    plan = StepPlan(1, (Row(4, 0, (0,), ((1,),)),), (Sample(0, 0, 4, params, 0, 0, 1),))
    masks = masks_of(plan, {4: Fails(make_request(), ByteDetokenizer)})
    assert masks.keys() == {0} and masks[0] is not None and not masks[0].any()


def test_advance_gives_each_draw_to_its_strategy_with_the_logprobs_that_were_requested():
    requested: list[int | None] = [None, 0, 2, 1]
    plan = StepPlan(
        step_id=1,
        rows=tuple(Row(i, 0, (0,), ((1,),)) for i in range(4)),
        samples=tuple(
            Sample(i, 0, i, SamplingParams(), 0, 0, 4, num_logprobs=k)
            for i, k in enumerate(requested)
        ),
    )
    result = StepResult(
        token_ids=np.array([0, 1, 5, 0], np.int32),
        logprobs=np.array([-1, -2, -3, -4], np.float32),
        ranks=np.array([0, 2, 3, 4], np.int32),
        top_token_ids=np.array([[9, 8, 7]] * 4, np.int32),
        top_logprobs=np.array([[-0.5, -1.5, -2.5]] * 4, np.float32),
    )
    strategies = {
        i: SamplingStrategy(replace(make_request(), request_id=str(i)), ByteDetokenizer)
        for i in range(3)
    }
    assert advance(plan, result, strategies) == [  # sequence 3 has no strategy: it was aborted
        Append(0, 0, "a", None),
        Append(1, 1, "b", TokenLogprobs(1, -2.0, 2)),
        Append(2, 5, "c", TokenLogprobs(5, -3.0, 3, (9, 8), (-0.5, -1.5))),
    ]


@pytest.mark.parametrize("make", [make_request, lambda: make_request(stop=["ab"])])
def test_empty_text_is_no_trouble(make):
    assert verdicts(make(), [12, 12]) == [("", None, None, "")] * 2
