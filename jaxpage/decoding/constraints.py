"""Follows a sequence through its grammar: which tokens may come next, and when it ends."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from jaxpage.decoding.grammars import DEAD_END, error_of, is_out_of_states, matcher_of
from jaxpage.step.request import Request
from jaxpage.step.token_masks import MASK_BITS, Mask, mask_of, mask_of_ids

_AGAIN_SECONDS = 0.05
_NOT_ALLOWED = "no token of allowed_token_ids continues the grammar"


class End(NamedTuple):
    """Says why a grammar ends a sequence."""

    reason: str
    stop_reason: str | None


class Grammar:
    """Holds a compiled grammar over a model's V token ids.

    Sequences share it. They also share the lexer states that it has computed so far.
    """

    def __init__(self, tokenizer: LLTokenizer, end_id: int, vocab_size: int, source: str) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        width = len(self.mask_of(())) * MASK_BITS
        # The end of the grammar may lie beyond the mask, which is as wide as the model's
        # vocabulary.
        self._no_text = self.mask_of(
            beyond for beyond in (*range(vocab_size, width), end_id) if beyond < width
        )
        self._source = source
        self._begin()

    def _begin(self) -> None:
        begun = time.thread_time()
        self._start = self._compile()
        self._first = self.admit(self._start)
        self._is_quick = time.thread_time() - begun < _AGAIN_SECONDS

    def new_constraint(self, request: Request) -> Constraint:
        """Returns a constraint at the start of the grammar, for a sequence of a request."""
        return Constraint(self, request)

    def at_start(self) -> tuple[LLMatcher, Mask]:
        """Returns a new matcher at the start of the grammar, and its first mask."""
        return self._start.deep_copy(), self._first

    def may_be_crowded(self, matcher: LLMatcher) -> bool:
        """Returns whether a matcher may have failed because of states that other requests added.

        The limit of states counts those of all requests that share the grammar. Another try
        (`alone`) takes time on the engine's thread, so the answer is True only if compiling the
        grammar is quick.
        """
        return self._is_quick and is_out_of_states(matcher)

    def alone(self, token_ids: Iterable[int]) -> LLMatcher:
        """Returns a matcher after these tokens, on a newly compiled copy of the grammar.

        The copy has none of the states that other requests added, so they do not count to the
        limit. Requests that start later use the new copy as well.
        """
        self._begin()
        matcher = self._compile()
        for token_id in token_ids:
            matcher.compute_bitmask()
            matcher.consume_token(token_id)
        return matcher

    def admit(self, matcher: LLMatcher) -> Mask:
        """Returns the tokens that continue the text, without the end and ids that have no text."""
        mask = self.mask_of(())
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint32)[: len(mask)]
        mask[: len(bits)] = bits
        return mask & ~self._no_text

    def mask_of(self, token_ids: Iterable[int]) -> Mask:
        """Returns the mask that admits these token ids."""
        return mask_of(token_ids, self.vocab_size)

    def _compile(self) -> LLMatcher:
        return matcher_of(self._tokenizer, self._source)


class Constraint:
    """Follows one sequence through its grammar; `mask` holds the tokens that may be drawn next.

    Where the grammar may end, the mask admits the request's end-of-sequence and stop ids. Elsewhere
    it admits no end-of-sequence id, and a stop id only if its text continues the grammar. A
    sequence that has no such id to draw ends when the grammar cannot continue.
    """

    def __init__(self, grammar: Grammar, request: Request) -> None:
        params = request.params
        self._grammar = grammar
        self._allowed_V = ~grammar.mask_of(())
        if params.allowed_token_ids is not None:
            self._allowed_V = mask_of_ids(params.allowed_token_ids, grammar.vocab_size)
        self._eos_V = grammar.mask_of(request.eos_token_ids)
        self._ends_V = (
            self._eos_V | mask_of_ids(params.stop_token_ids, grammar.vocab_size)
        ) & self._allowed_V
        self._min_tokens = params.min_tokens
        self._token_ids: list[int] = []
        self._matcher, first = grammar.at_start()
        self._is_alone = False  # no other sequence shares its states
        # The constraint after each tuple of drafts; None where `mask_after` returns None.
        self._ahead: dict[tuple[int, ...], Constraint | None] = {}
        self._note_admitted(first)

    @property
    def may_stop(self) -> bool:
        """Returns whether the text may end here without a token that ends it."""
        return self._may_end and len(self._token_ids) >= self._min_tokens

    def mask_after(self, token_ids: tuple[int, ...]) -> Mask | None:
        """Returns the mask after these tokens, or None if they cannot follow.

        It is None as well if the tokens end the sequence. The constraint itself does not change.
        """
        place = self._constraint_after(token_ids)
        return None if place is None else place.mask

    def _constraint_after(self, token_ids: tuple[int, ...]) -> Constraint | None:
        """Returns the constraint after these tokens.

        Each result is kept, so that drafts with a common beginning share its cost.
        """
        if not token_ids:
            return self
        if token_ids not in self._ahead:
            before = self._constraint_after(token_ids[:-1])
            self._ahead[token_ids] = None if before is None else before._follow(token_ids[-1])
        return self._ahead[token_ids]

    def copy(self) -> Constraint:
        """Returns another constraint at the same place, which goes on by itself."""
        self._is_alone = False  # from now on both add states to the same grammar
        other = copy.copy(self)
        other._matcher = self._matcher.deep_copy()
        other._token_ids = self._token_ids.copy()
        other._ahead = {}
        return other

    def _follow(self, token_id: int) -> Constraint | None:
        """Returns a constraint one token further, or None if the text cannot go on there."""
        if not _has(self._text, token_id):
            return None
        ahead = self.copy()
        return None if ahead.advance(token_id) else ahead

    def advance(self, token_id: int) -> End | None:
        """Takes a token that the mask admitted, and returns an `End` if nothing can follow it."""
        if _has(self._ends_V, token_id) and not _has(self._text, token_id):
            return None  # the token ends the sequence, and is no text of the grammar
        # A draft was right: its constraint is computed already.
        if (ahead := self._ahead.get((token_id,))) is not None:
            vars(self).update(vars(ahead), _ahead={})
            return None
        self._ahead = {}
        self._token_ids.append(token_id)
        self._matcher.consume_token(token_id)
        self._note_admitted(self._admit())
        return self._end()

    def _note_admitted(self, admitted: Mask) -> None:
        """Computes the mask of the next token. This is done once for each token."""
        if (
            self._matcher.is_error()
            and not self._is_alone
            and self._grammar.may_be_crowded(self._matcher)
        ):
            self._matcher = self._grammar.alone(self._token_ids)
            self._is_alone = True
            admitted = self._admit()
        self._failure = error_of(self._matcher) if self._matcher.is_error() else None
        self._may_end = self._failure is None and self._matcher.is_accepting()
        text = self._grammar.mask_of(()) if self._failure else admitted & ~self._eos_V
        self._text = text & self._allowed_V
        self._dead_end = _NOT_ALLOWED if text.any() else DEAD_END
        self.mask = self._text | self._ends_V if self._may_end else self._text

    def _admit(self) -> Mask:
        if self._matcher.is_error():
            return self._grammar.mask_of(())
        return self._grammar.admit(self._matcher)

    def _end(self) -> End | None:
        num_tokens = len(self._token_ids)
        if self._failure is not None:
            return End("error", f"structured_outputs: {self._failure}")
        if self._text.any():
            return None
        if not self._may_end:
            return End("error", f"structured_outputs: {self._dead_end}")
        if not self.may_stop:
            why = f"is complete after {num_tokens} tokens, below min_tokens={self._min_tokens}"
            return End("error", f"structured_outputs: the grammar {why}")
        return None if self._ends_V.any() else End("stop", None)


def _has(mask: Mask, token_id: int) -> bool:
    return bool(mask[token_id // MASK_BITS] >> np.uint32(token_id % MASK_BITS) & 1)
