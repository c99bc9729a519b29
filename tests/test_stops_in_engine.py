"""Ends of requests through the whole engine: forced tokens, the demo model's byte-level tokenizer,
and an oracle that decodes everything.

Stop strings lie across tokens and inside the bytes of a character; they end where the
end-of-sequence token, max_tokens or min_tokens do.
"""

from __future__ import annotations

import dataclasses
import itertools
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxpage import LLM, SamplingParams
from jaxpage.decoding import stopping as stopping_module
from jaxpage.decoding.stop_strings import StopStrings
from jaxpage.engine.text import StreamDetokenizer
from jaxpage.step.plan import StepResult
from tests.support.engines import invariants
from tests.support.running import SMALL
from tests.support.sweeps import examples
from tests.support.tokenizers import byte_letters

pytestmark = pytest.mark.usefixtures("largest_shapes")

PROMPT = "Once upon a time"
EOS, STOP_ID = 0, 281
WORDS = {"a": 65, "b": 66, "ab": 566, "c": 67, "ac": 537, " a": 259, "ing": STOP_ID}
EURO, SMILE = (159, 225, 106), (173, 254, 247, 223)  # the bytes of € and 😀, each a token
TOKENS = (*WORDS.values(), *EURO, *SMILE, EOS)
STOPS = [
    "a",
    "ab",
    "ba",
    "bc",
    "abc",
    "aab",
    "abab",
    "a a",
    "€",
    "a€",
    "€b",
    "b€a",
    "€€",
    "😀",
    "a😀",
    "ing",
    "b\ufffd",
    "\ufffda",
]


@pytest.fixture(scope="module")
def llm():
    with LLM("demo", **SMALL, use_tqdm=False) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_left_after(llm):
    yield
    invariants(llm)


@contextmanager
def script(engine, scripts):
    """Makes the device draw what `scripts[seed][sample index]` says, place by place; it computes
    nothing.
    """
    build = engine.builder.build
    num_prompt, plans = len(engine.tokenizer(PROMPT)["input_ids"]), []

    def build_noted(plan, *masks):
        plans.append(plan)
        return build(plan, *masks)

    def draw(batch):
        samples = plans[-1].samples
        tokens = [
            scripts[sample.seed][sample.sample_index][sample.position - num_prompt]
            for sample in samples
        ]
        nothing = np.zeros((len(samples), 0))
        return StepResult(
            np.array(tokens, np.int32),
            nothing,
            nothing,
            nothing.astype(np.int32),
            nothing.astype(np.float32),
        )

    engine.builder.build, engine.runner.run = build_noted, draw
    try:
        yield
    finally:
        del engine.builder.build, engine.runner.run


def decode(tokenizer, token_ids, *, whole):
    """Returns the text of an output.

    Unless it is whole, a character that may still be completed is not there yet.
    """
    taken = [*tokenizer(PROMPT)["input_ids"], *token_ids]
    text = tokenizer.decode(taken, skip_special_tokens=True)
    letters = byte_letters()
    if not whole and text.endswith("\ufffd"):
        # Of these continuation bytes some complete each beginning of a character.
        for byte, count in itertools.product((0x80, 0x90, 0xA0, 0xBF), (1, 2, 3)):
            follows = tokenizer.convert_tokens_to_ids([letters[byte]] * count)
            if not tokenizer.decode([*taken, *follows], skip_special_tokens=True).startswith(text):
                return text[len(PROMPT) : -1]
    return text[len(PROMPT) :]


def first_stop(text, stops, start):
    """Returns (end, stop string) of the one that is complete first, after `start` characters; the
    longest of several.
    """
    for end in range(start + 1, len(text) + 1):
        if matching := [stop for stop in stops if text[:end].endswith(stop)]:
            return end, max(matching, key=len)
    return None


def oracle(tokenizer, params, token_ids):
    """Returns (token ids, text, finish reason, stop reason), and the text after each token before
    the end.
    """
    exempt, so_far = 0, []
    for num_taken, token_id in enumerate(token_ids, 1):
        may_stop, taken = num_taken > params.min_tokens, token_ids[:num_taken]
        end = None
        if may_stop and token_id == EOS and not params.ignore_eos:
            end, taken = ("stop", None), taken[:-1]
        elif may_stop and token_id in params.stop_token_ids:
            end, taken = ("stop", token_id), taken[:-1]
        elif num_taken == params.max_tokens:
            end = ("length", None)
        text = decode(tokenizer, taken, whole=end is not None)
        stop_found = first_stop(text, params.stop, exempt) if may_stop else None
        if stop_found:
            place, stop = stop_found
            place_of_end = place if params.include_stop_str_in_output else place - len(stop)
            return (token_ids[:num_taken], text[:place_of_end], "stop", stop), so_far
        if end is not None:
            return (token_ids[:num_taken], text, *end), so_far
        if not may_stop:
            exempt = len(text)
        so_far.append(text)
    raise AssertionError("max_tokens ends everything")


def shown_part(text, params):
    """Returns the part of a text that is shown while it goes on.

    It is without the longest end that a stop string could begin with, unless that is kept anyway.
    """
    if params.include_stop_str_in_output:
        return text
    begins = (stop[:length] for stop in params.stop for length in range(1, len(stop)))
    return text[
        : len(text) - max((len(begin) for begin in begins if text.endswith(begin)), default=0)
    ]


def run(llm, scripts, params, gives_way_at):
    """Runs each script as a request, or several as samples of one.

    Returns their outputs, whole, and what chunks showed, token by token.
    """
    engine = llm._engine
    reporters, chunks = {}, {}
    with script(engine, scripts):
        for seed, samples in enumerate(scripts):
            requested = dataclasses.replace(params, seed=seed, n=len(samples))
            reporters[str(seed)] = engine.add(
                str(seed), engine.prepare(PROMPT, engine.tokenizer(PROMPT)["input_ids"], requested)
            )
        for number in itertools.count():
            if not engine.has_unfinished:
                break
            if number == gives_way_at:
                engine.scheduler.give_way()
            for group in engine.step():
                request_id = group.request.request_id
                for sample in reporters[request_id].delta().outputs:
                    chunks.setdefault((request_id, sample.index), []).append(sample)
    outputs = {
        (request_id, sample.index): sample
        for request_id, reporter in reporters.items()
        for sample in reporter.whole().outputs
    }
    return outputs, chunks


def agree_with_the_oracle(llm, scripts, stops, include, min_tokens, max_tokens, gives_way_at):
    params = SamplingParams(
        stop=stops or None,
        stop_token_ids=[STOP_ID] if "ing" not in stops else None,
        include_stop_str_in_output=include,
        min_tokens=min(min_tokens, max_tokens),
        max_tokens=max_tokens,
    )
    scripts = [[[*part, *[WORDS["c"]] * max_tokens] for part in samples] for samples in scripts]
    outputs, chunks = run(llm, scripts, params, gives_way_at)
    for (request_id, index), output in outputs.items():
        (expected, so_far) = oracle(llm.tokenizer, params, scripts[int(request_id)][index])
        assert (output.token_ids, output.text, output.finish_reason, output.stop_reason) == expected
        pieces = [part for part in chunks[request_id, index] if part.token_ids]
        assert "".join(part.text for part in chunks[request_id, index]) == output.text, (
            "no chunk shows what is cut later"
        )
        assert [part.token_ids for part in pieces] == [[token_id] for token_id in output.token_ids]
        assert [part.finish_reason for part in pieces] == [None] * len(so_far) + [expected[2]]
        begun = list(itertools.accumulate(part.text for part in pieces))
        for text, streamed in zip(so_far, begun, strict=False):
            if params.min_tokens == 0:
                assert streamed == shown_part(text, params), (
                    "neither more nor less is held back than has to be"
                )
            assert output.text.startswith(streamed)


outputs = st.lists(
    st.sampled_from(TOKENS) | st.sampled_from(TOKENS[:5]) | st.sampled_from(EURO), max_size=10
)
whole_characters = st.lists(
    st.sampled_from([EURO, SMILE, (65,), (66,), (566,), (259,), (*EURO, 66), (65, *EURO), (EOS,)]),
    max_size=6,
).map(lambda parts: [token_id for part in parts for token_id in part])
cases = given(
    scripts=st.lists(
        st.lists(outputs | whole_characters, min_size=1, max_size=2), min_size=1, max_size=2
    ),
    stops=st.lists(st.sampled_from(STOPS), max_size=4, unique=True),
    include=st.booleans(),
    min_tokens=st.sampled_from([0, 0, 0, 1, 2, 5]),
    max_tokens=st.sampled_from([1, 2, 4, 7, 12]),
    gives_way_at=st.sampled_from([None, None, 1, 3, 5]),
)


@examples(120)
@cases
@example([[[65, *EURO, 66]]], ["a€"], False, 0, 12, None)  # over four tokens
@example([[[65, *EURO, 66]]], ["€b"], True, 0, 12, None)
@example([[[65, *EURO]]], ["€"], False, 0, 4, None)  # complete with the last token that is allowed
@example([[[65, *EURO[:2]]]], ["b\ufffd"], False, 0, 3, None)  # cut off in a character
@example([[[66, 159, EOS]]], ["b\ufffd"], False, 0, 12, None)  # the end makes it complete
@example([[[566, EOS]]], ["abc"], False, 0, 12, None)  # held back, and shown after all
@example([[[566, 67]]], ["ab", "abc"], False, 0, 12, None)  # one is a prefix of the other
@example([[[566, 67]]], ["abc", "bc"], False, 0, 12, None)  # both end here
@example([[[65, 66], [66, 65]]], ["ab"], False, 0, 4, None)  # each sample by itself
@example([[[566, 566]]], ["ab"], False, 1, 12, None)
@example([[[65, 566]]], ["aab"], False, 1, 12, None)  # begins below min_tokens, complete after it
@example([[[STOP_ID]], [[65, STOP_ID]]], ["a"], True, 0, 12, 1)
def test_text_tokens_and_reasons_are_exact(
    llm, scripts, stops, include, min_tokens, max_tokens, gives_way_at
):
    agree_with_the_oracle(llm, scripts, stops, include, min_tokens, max_tokens, gives_way_at)


class HoldsNothing(StopStrings):
    def _num_to_hold(self, text):
        return 0


class HoldsAllThatItCan(StopStrings):
    def _num_to_hold(self, text):
        return min(self._reach, len(text))


class ShowsBytes(StreamDetokenizer):
    def push(self, token_id):
        self._window.append(token_id)
        return self._take(self._decode(self._window))


@pytest.mark.parametrize(
    ("module", "name", "mistaken"),
    [
        (stopping_module, "StopStrings", HoldsNothing),
        (stopping_module, "StopStrings", HoldsAllThatItCan),
        ("jaxpage.engine.strategies", "StreamDetokenizer", ShowsBytes),
        ("jaxpage.decoding.sampling", "Stopping", None),
    ],
)
def test_the_oracle_sees_planted_mistakes(llm, module, name, mistaken, monkeypatch):
    if mistaken is None:  # the samples of a request share one state
        shared = {}
        stopping = stopping_module.Stopping

        def mistaken(request, text):
            return shared.setdefault(request.request_id, stopping(request, text))

    target = f"{module}.{name}" if isinstance(module, str) else f"{module.__name__}.{name}"
    monkeypatch.setattr(target, mistaken)
    search = settings(
        max_examples=300, phases=[p for p in settings().phases if p.name == "generate"]
    )

    def is_seen(**case):
        try:
            agree_with_the_oracle(llm, **case)
        finally:
            llm._engine.abort_all()

    with pytest.raises((AssertionError, ExceptionGroup)):
        search(cases(is_seen))()
