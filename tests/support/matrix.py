"""The support matrix: which parameter is honoured together with which feature, found out by asking
the engine.

A cell is found by running the packaged model: the parameter must do what it says (`Case.check`)
and, under a feature that is only a way of running (streaming, prefix cache, preemption, chunks,
speculation), give what a plain run gives, to the last bit. What the engine refuses must be refused
by name.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import queue
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jaxpage import LLM, BeamSearchParams, SamplingParams
from jaxpage.driver import Handle
from jaxpage.errors import UnsupportedError
from jaxpage.outputs import CompletionOutput, RequestOutput
from tests.support.engines import steps_by_hand
from tests.support.executables import when_used
from tests.support.running import SMALL
from tests.support.scripted import DRAFTING, Scripted, draft_with, mixed_up

YES, REFUSED, NO_FIELD = "yes", "refused", "no such field"

PROMPT = (
    "There was once a poor woodcutter who lived with his wife and three children on the edge of a "
    "great forest. One morning in the "
    "middle of winter he"
)
SETTINGS: dict[str, Any] = {
    **SMALL,
    "scheduling_policy": "priority",
    "enable_prefix_caching": False,
    "preemption_mode": "swap",
    "enable_return_hidden_states": True,
    "enable_return_sampling_mask": True,
}
REGEX = "[ a-z,.]{12,400}"

Params = SamplingParams | BeamSearchParams
Outputs = list[CompletionOutput]


class Engines:
    """Runs a request in every way that must not matter. settings: of all engines, besides
    `SETTINGS`.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = {**SETTINGS, **settings}
        self._llms: dict[str, LLM] = {}
        self._known: dict[str, RequestOutput] = {}

    def close(self) -> None:
        for llm in self._llms.values():
            llm.shutdown()

    def llm(self, kind: str = "plain") -> LLM:
        changes: dict[str, dict[str, Any]] = {
            "plain": {},
            "cached": {"enable_prefix_caching": True},
            "recompute": {"preemption_mode": "recompute"},
            "chunked": {"max_num_batched_tokens": 16},
            "speculating": {"speculative_config": DRAFTING},
            "on two devices": {"tensor_parallel_size": 2},
        }
        if kind not in self._llms:
            with when_used():
                self._llms[kind] = LLM(
                    "demo", use_tqdm=False, **{**self._settings, **changes[kind]}
                )
        return self._llms[kind]

    def plain(self, params: Params) -> RequestOutput:
        """Returns what the cells of a row are compared with; it runs once."""
        key = repr(params)
        if key not in self._known:
            self._known[key] = self.llm().generate(PROMPT, params, use_tqdm=False)[0]
        return self._known[key]

    def streaming(self, params: Params) -> RequestOutput:
        whole: dict[int, CompletionOutput] = {}
        for chunk in self.llm().stream(PROMPT, params):
            for new in chunk.outputs:
                old = whole.get(new.index)
                whole[new.index] = new if old is None else _joined(old, new)
        return dataclasses.replace(chunk, outputs=[whole[index] for index in sorted(whole)])

    def prefix_cache(self, params: Params) -> RequestOutput:
        """Runs after a request that has computed the prompt, under the same salt."""
        llm, salt = self.llm("cached"), getattr(params, "cache_salt", None)
        llm.generate(PROMPT, SamplingParams(max_tokens=1, cache_salt=salt), use_tqdm=False)
        return llm.generate(PROMPT, params, use_tqdm=False)[0]

    def preemption(self, params: Params) -> RequestOutput:
        """Preempts by swapping, and again by recomputation: in the prompt, after the first token,
        later.
        """
        swapped, recomputed = (
            self._gives_way(self.llm(kind), params) for kind in ("plain", "recompute")
        )
        assert swapped.outputs == recomputed.outputs
        return swapped

    def chunked(self, params: Params) -> RequestOutput:
        return self.llm("chunked").generate(PROMPT, params, use_tqdm=False)[0]

    def speculation(self, params: Params) -> RequestOutput:
        """Runs with drafts, right and wrong ones, of what the request was without them."""
        llm = self.llm("speculating")
        heard = Scripted({}, lambda *_: (0, 0))
        draft_with(llm._engine, heard)
        first_id = llm._engine._num_sequences
        llm.generate(PROMPT, params, use_tqdm=False)
        shift = llm._engine._num_sequences - first_id
        texts = {sequence_id + shift: text for sequence_id, text in heard.heard.items()}
        draft_with(
            llm._engine, Scripted(texts, mixed_up, vocab_size=llm._engine.builder.vocab_size)
        )
        output = llm.generate(PROMPT, params, use_tqdm=False)[0]
        max_length = max(len(completion.token_ids) for completion in output.outputs)
        if max_length >= 12 and isinstance(params, SamplingParams):
            assert 0 < output.metrics.num_accepted_tokens < output.metrics.num_draft_tokens
        return output

    def tensor_parallel(self, params: Params) -> RequestOutput:
        return self.llm("on two devices").generate(PROMPT, params, use_tqdm=False)[0]

    def _gives_way(self, llm: LLM, params: Params) -> RequestOutput:
        engine, driver = llm._engine, llm._driver
        elder = SamplingParams(max_tokens=60, ignore_eos=True, priority=-(2**31))
        box: queue.SimpleQueue[Any] = queue.SimpleQueue()
        both = [
            Handle(llm._prepare(*requested)[0], box.put)
            for requested in (("Elder", elder), (PROMPT, params))
        ]
        before = sum(engine.scheduler.num_preemptions.values())
        with steps_by_hand(llm):
            driver.wait(driver.add(both))
            for step in itertools.count():
                if both[1].is_over:
                    break
                if step in (2, 4, 9):
                    engine.scheduler.give_way()
                driver.step()
            driver.end(both)
        assert sum(engine.scheduler.num_preemptions.values()) > before
        assert both[1].reporter is not None
        return both[1].reporter.whole()


def _joined(old: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    return dataclasses.replace(
        new,
        text=old.text + new.text,
        token_ids=old.token_ids + new.token_ids,
        logprobs=None if new.logprobs is None else (old.logprobs or []) + new.logprobs,
        num_kept=None if new.num_kept is None else (old.num_kept or []) + new.num_kept,
        sampling_mask=new.sampling_mask and old.sampling_mask + new.sampling_mask,
        weights_versions=old.weights_versions + new.weights_versions,
    )


@dataclass(frozen=True)
class Situation:
    """Holds what a check sees: the outputs with the parameter, those without it, and a way to run
    something else.
    """

    output: RequestOutput
    bare: RequestOutput  # without the parameter, but with what stands beside it
    plain: RequestOutput  # without both
    params: Any
    run: Callable[[Any], RequestOutput]

    @property
    def outputs(self) -> Outputs:
        return self.output.outputs


Check = Callable[[Situation], bool]


@dataclass(frozen=True)
class Case:
    """A parameter and what it must do; what stands beside it makes its effect visible."""

    check: Check
    value: Any  # or a function of the plain output
    beside: Any = field(default_factory=dict)  # likewise
    under_grammar: Check | None = None  # in place of `check` where the grammar has a word in it


def _all(predicate: Callable[[CompletionOutput], bool]) -> Check:
    return lambda situation: all(map(predicate, situation.outputs))


def _as_greedy(situation: Situation) -> bool:
    neutral = dataclasses.replace(situation.params, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    return [o.token_ids for o in situation.outputs] == [
        o.token_ids for o in situation.run(neutral).outputs
    ]


def _changes(situation: Situation) -> bool:
    pairs = zip(situation.outputs, situation.bare.outputs, strict=True)
    return all(output.token_ids != bare.token_ids for output, bare in pairs)


def _nothing(situation: Situation) -> bool:
    return situation.outputs == situation.bare.outputs


def _only_if_random(situation: Situation) -> bool:
    return _nothing(situation) if situation.params.greedy else _changes(situation)


def _best(situation: Situation) -> bool:
    every = dataclasses.replace(situation.params, n=3, best_of=None, logprobs=0)
    ranked = sorted(situation.run(every).outputs, key=lambda output: -output.cumulative_logprob)
    return [o.token_ids for o in situation.outputs] == [
        o.token_ids for o in ranked[: situation.params.n]
    ]


def _cut_at(text_of_bare: str, stop: str, *, included: bool) -> str:
    before, match, _ = text_of_bare.partition(stop)
    return before + (match if included else "")


def _stops_at_string(situation: Situation, *, included: bool = False) -> bool:
    (stop,) = situation.params.stop
    expected = [_cut_at(plain.text, stop, included=included) for plain in situation.plain.outputs]
    return [output.text for output in situation.outputs] == expected and situation.outputs[
        0
    ].stop_reason == stop


def _stops_at_token(situation: Situation) -> bool:
    (stop,) = situation.params.stop_token_ids
    first = situation.bare.outputs[0].token_ids
    output = situation.outputs[0]
    return output.token_ids == first[: first.index(stop) + 1] and output.stop_reason == stop


def _no_bad_word(situation: Situation) -> bool:
    (word,) = situation.params.bad_words
    return word in situation.bare.outputs[0].text and not any(
        word in output.text for output in situation.outputs
    )


def _middle(plain: RequestOutput) -> str:
    return plain.outputs[0].text[9:12]


def _valid(situation: Situation) -> bool:
    return all(re.fullmatch(REGEX, output.text) for output in situation.outputs)


def _prompt_scored(situation: Situation) -> bool:
    scores = situation.output.prompt_logprobs
    return (
        scores is not None
        and len(scores) == len(situation.output.prompt_token_ids)
        and len(scores[1]) >= 2
    )


def _closes(llm: LLM, num_tokens: int, marker: str, situation: Situation) -> bool:
    forced = llm.tokenizer(marker)["input_ids"]
    pairs = zip(situation.outputs, situation.plain.outputs, strict=True)
    return all(
        output.token_ids[: num_tokens + len(forced)] == [*plain.token_ids[:num_tokens], *forced]
        for output, plain in pairs
    )


def _counts_kept(situation: Situation) -> bool:
    numbers = [number for output in situation.outputs for number in output.num_kept]
    return min(numbers) > 5 if situation.params.greedy else 0 < max(numbers) <= 5


def _has_masks(situation: Situation) -> bool:
    return all(
        token_id in ids and len(ids) <= 5
        for output in situation.outputs
        for token_id, ids in zip(output.token_ids, output.sampling_mask.token_ids, strict=True)
    )


def sampling_cases(llm: LLM) -> dict[str, Case]:
    """Returns a case for every field of `SamplingParams`."""
    eos = llm.tokenizer.eos_token_id
    ids = {word: llm.tokenizer(word)["input_ids"][0] for word in (" and", " the", " old", " a")}
    to_the_end = {"logit_bias": {eos: 100.0}, "max_tokens": 12}
    return {
        "n": Case(lambda s: len(s.outputs) == 3, 3),
        "best_of": Case(_best, 3),
        "temperature": Case(_only_if_random, 1.8),
        "top_p": Case(_as_greedy, 1e-6),
        "top_k": Case(_as_greedy, 1),
        "min_p": Case(_as_greedy, 1.0),
        "presence_penalty": Case(_changes, 2.0, {"max_tokens": 60}),
        "frequency_penalty": Case(_changes, 2.0, {"max_tokens": 60}),
        "repetition_penalty": Case(_changes, 1.9, {"max_tokens": 60}),
        "logit_bias": Case(_all(lambda o: set(o.token_ids) == {ids[" and"]}), {ids[" and"]: 100.0}),
        "allowed_token_ids": Case(
            _all(lambda o: set(o.token_ids) <= set(ids.values())), list(ids.values())
        ),
        "bad_words": Case(
            _no_bad_word,
            lambda plain: [max(plain.outputs[0].text.split()[:6], key=len).strip(",.")],
        ),
        "seed": Case(_only_if_random, 6),
        "stop": Case(_stops_at_string, lambda plain: [_middle(plain)]),
        "stop_token_ids": Case(_stops_at_token, lambda plain: [plain.outputs[0].token_ids[3]]),
        "ignore_eos": Case(
            _all(lambda o: o.token_ids == [eos] * 12), True, to_the_end, under_grammar=_valid
        ),
        "max_tokens": Case(
            _all(lambda o: len(o.token_ids) == 5 and o.finish_reason == "length"), 5
        ),
        "min_tokens": Case(
            _all(lambda o: len(o.token_ids) == 7 and o.token_ids[-1] == eos),
            6,
            to_the_end,
            under_grammar=_valid,
        ),
        "logprobs": Case(_all(lambda o: all(len(entry) in (3, 4) for entry in o.logprobs)), 3),
        "prompt_logprobs": Case(_prompt_scored, 2),
        "include_stop_str_in_output": Case(
            functools.partial(_stops_at_string, included=True),
            True,
            lambda plain: {"stop": [_middle(plain)]},
        ),
        "skip_special_tokens": Case(
            _all(lambda o: o.text == llm.tokenizer.eos_token * 12),
            False,
            {**to_the_end, "ignore_eos": True},
            under_grammar=_nothing,
        ),
        "structured_outputs": Case(
            _all(lambda o: o.text in ("yes", "no")), {"choice": ["yes", "no"]}
        ),
        "thinking_token_budget": Case(
            functools.partial(_closes, llm, 6, "</think>"),
            6,
            {"thinking_markers": ("", "</think>")},
            under_grammar=_nothing,  # which does not admit the marker
        ),
        "thinking_markers": Case(
            functools.partial(_closes, llm, 4, "(so)"),
            ("", "(so)"),
            {"thinking_token_budget": 4},
            under_grammar=_nothing,
        ),
        "priority": Case(_nothing, 3),
        "cache_salt": Case(_nothing, "a salt"),
        "user": Case(_nothing, "somebody"),
        "logprobs_mode": Case(_counts_kept, "processed", {"logprobs": 1, "top_k": 5}),
        "return_sampling_mask": Case(_has_masks, True, {"top_k": 5}),
        "return_hidden_states": Case(
            _all(lambda o: o.hidden_states.shape[0] == len(o.token_ids)), True
        ),
    }


def beam_cases(llm: LLM) -> dict[str, Case]:
    """Returns a case for every field of `BeamSearchParams`."""
    return {
        "n": Case(lambda s: len(s.outputs) == 2, 2),
        "stop_token_ids": Case(
            _a_beam_stops, lambda plain: [plain.outputs[0].token_ids[3]], {"length_penalty": -2.0}
        ),
        "ignore_eos": Case(_nothing, True),  # no beam of this prompt meets the end of a text
        "max_tokens": Case(_all(lambda o: len(o.token_ids) == 5), 5),
        "beam_width": Case(lambda s: len(s.outputs) == 2, 2),
        "length_penalty": Case(_scores_follow, 2.0),
        "early_stopping": Case(_nothing, "never"),
    }


def _a_beam_stops(situation: Situation) -> bool:
    (stop,) = situation.params.stop_token_ids
    ended = [output for output in situation.outputs if output.finish_reason == "stop"]
    return bool(ended) and all(o.token_ids.index(stop) == len(o.token_ids) - 1 for o in ended)


def _scores_follow(situation: Situation) -> bool:
    pairs = [(o.score, o.cumulative_logprob / len(o.token_ids) ** 2.0) for o in situation.outputs]
    return all(abs(score - expected) < 1e-5 for score, expected in pairs)


SAMPLING = {"temperature": 1.0, "seed": 5, "max_tokens": 24}
BASES: dict[str, dict[str, Any]] = {  # features that are parameters themselves
    "greedy": {**SAMPLING, "temperature": 0.0},
    "sampling": SAMPLING,
    "n > 1": {**SAMPLING, "n": 2},
    "structured": {**SAMPLING, "structured_outputs": {"regex": REGEX}},
}
BEAM = {"beam_width": 3, "max_tokens": 16}
# features that are ways to run a request
WAYS: dict[str, Callable[[Engines, Params], RequestOutput]] = {
    "streaming": Engines.streaming,
    "prefix cache": Engines.prefix_cache,
    "preemption": Engines.preemption,
    "chunked": Engines.chunked,
    "speculation": Engines.speculation,
    "tensor parallel": Engines.tensor_parallel,
}
ON_DEVICES = "tensor parallel"  # needs several: see tests/on_four_devices.py
FEATURES = ("greedy", "sampling", "n > 1", "beam search", "structured", *WAYS)


def cell(engines: Engines, name: str, feature: str) -> str:
    """Returns what becomes of a parameter together with a feature. Raises AssertionError if it is
    neither honoured nor refused by name.
    """
    llm = engines.llm()
    of_sampling, of_beams = sampling_cases(llm).get(name), beam_cases(llm).get(name)
    if feature == "beam search":
        return (
            NO_FIELD
            if of_beams is None
            else _cell(engines, name, feature, of_beams, BeamSearchParams, BEAM)
        )
    if feature in WAYS and of_sampling is None:
        return _cell(engines, name, feature, of_beams, BeamSearchParams, BEAM)
    if of_sampling is None:
        return NO_FIELD
    return _cell(engines, name, feature, of_sampling, SamplingParams, BASES.get(feature, SAMPLING))


def _cell(
    engines: Engines, name: str, feature: str, case: Case, kind: Any, base: dict[str, Any]
) -> str:
    plain = engines.plain(kind(**base))
    value, beside = (
        setting(plain) if callable(setting) else setting for setting in (case.value, case.beside)
    )
    params = kind(**{**base, **beside, name: value})
    try:
        output = engines.plain(params)
        if way := WAYS.get(feature):
            assert way(engines, params).outputs == output.outputs, (
                f"{feature} changes what {name} does"
            )
    except UnsupportedError as error:
        named = name if kind is SamplingParams else "beam_width"
        assert named in str(error) and feature[:6] in str(error), f"names not both: {error}"
        return REFUSED
    situation = Situation(
        output, engines.plain(kind(**{**base, **beside})), plain, params, engines.plain
    )
    check = case.under_grammar if feature == "structured" and case.under_grammar else case.check
    assert check(situation), f"{name}={value!r} is not honoured with {feature}: {output.outputs}"
    return YES


def markdown(matrix: dict[str, dict[str, str]]) -> str:
    """Returns the matrix as a document."""
    signs = {YES: "yes", REFUSED: "refused", NO_FIELD: "–"}
    lines = [f"| parameter | {' | '.join(FEATURES)} |", f"|---|{'---|' * len(FEATURES)}"]
    lines += [
        f"| `{name}` | {' | '.join(signs[cells[f]] for f in FEATURES)} |"
        for name, cells in matrix.items()
    ]
    return _DOCUMENT.format(table="\n".join(lines))


_DOCUMENT = """# Support matrix

Which parameter works with which feature. The tests try every cell: `pytest tests/test_support_matrix.py --write-support-matrix` writes
this file and `jaxpage/support_matrix.json`. Without the flag the same test fails if either is out of date.

- *yes*: the parameter works (each has a check). In the columns from *streaming* on, the output equals that of a plain run to the last bit.
- *refused*: an `UnsupportedError` that names the parameter and the feature.
- *–*: this kind of request has no such parameter.

{table}

*priority* needs `scheduling_policy: priority` and is refused otherwise. *user* is used only by `scheduling_policy: fair`. *stop*,
*bad_words* and *structured_outputs* need a model with a tokenizer. *preemption* covers swapping and recomputation.
*tensor parallel* compares two devices with one that adds up as they do (docs/scale.md).
*speculation* covers accepted and rejected drafts. Beam searches run in the same batch, without drafts.
"""
