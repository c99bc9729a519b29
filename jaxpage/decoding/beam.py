"""Implements beam search: the most likely continuations of all beams go on.

A hypothesis that has ended competes with the others by its score. Tokens and scores are those of
Hugging Face's `generate(num_beams=...)`; its `_beam_search` is the definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxpage.decoding.stopping import Detokenizer, Stopping
from jaxpage.outputs import TokenLogprobs
from jaxpage.step.edits import Append, Drop, Edit, Finish, Fork
from jaxpage.step.request import Request
from jaxpage.step.strategy import Draw, refusal


def hypothesis_score(cumulative_logprob: float, num_tokens: int, length_penalty: float) -> float:
    """Returns the score by which hypotheses of different lengths are compared.

    Args:
        cumulative_logprob: The sum of the log probabilities of the output tokens.
        num_tokens: The number of output tokens, the ending one included.
        length_penalty: The exponent of the length; larger values prefer longer hypotheses.
    """
    return cumulative_logprob / math.pow(num_tokens, length_penalty)


class _Beam(NamedTuple):
    """Holds a sequence that goes on."""

    sequence_id: int
    cumulative_logprob: float
    stopping: Stopping


class _Candidate(NamedTuple):
    """Holds a beam and one more token for it."""

    parent: _Beam
    token: TokenLogprobs  # without the other candidates
    cumulative_logprob: float


class _Hypothesis(NamedTuple):
    """Holds an ended hypothesis: a sequence, or a candidate that becomes one if it is kept."""

    score: float
    ended: int | _Candidate


class BeamStrategy:
    """Decodes one request by beam search.

    Every beam is a sequence, and so is every ended hypothesis among the best so far. A hypothesis
    can end only with one of the best `beam_width` candidates of a step; the further candidates only
    make sure that enough beams go on. If there are fewer continuations than beams, fewer beams go
    on, and the request may return fewer hypotheses than it asked for. A search with one beam is
    greedy decoding.
    """

    def __init__(
        self,
        request: Request,
        sequence_ids: Sequence[int],
        new_detokenizer: Callable[[], Detokenizer],
    ) -> None:
        """Starts the search with one beam.

        Args:
            request: A request with beam search parameters.
            sequence_ids: The id of the first sequence, then the ids that forks may take;
                `Request.num_sequence_ids` in all.
            new_detokenizer: Makes the detokenizer of the first beam.
        """
        assert request.beam is not None and len(sequence_ids) == request.num_sequence_ids
        self._beam = request.beam
        self._ending_token_ids = request.ending_token_ids
        self._max_tokens = request.max_total_tokens - len(request.prompt_token_ids)
        self._sequence_ids = tuple(sequence_ids)
        self._num_tokens = 0  # the output tokens of each beam
        # The most likely beam comes first.
        self._beams = [_Beam(sequence_ids[0], 0.0, Stopping(request, new_detokenizer()))]
        self._best: list[_Hypothesis] = []  # the best ended hypotheses, in order

    def advance(self, draws: Sequence[Draw]) -> list[Edit]:
        """Returns the edits that give every beam one more token; draws may come in any order."""
        bad = next((draw for draw in draws if draw.token_id < 0), None)
        if bad is not None:
            return self._fail(refusal(bad))
        self._num_tokens += 1
        is_last = self._num_tokens >= self._max_tokens
        ranked = self._rank(draws)
        ended = [c for c in ranked[: self._beam.beam_width] if is_last or self._is_end(c)]
        going = (
            [] if is_last else [c for c in ranked if not self._is_end(c)][: self._beam.beam_width]
        )
        best = self._merge(ended)
        if not going or self._is_over(going[0], best):
            going = []
            best = best[: self._beam.n or self._beam.beam_width]
        return self._edits(going, best)

    def mask(self, sequence_id: int, drafts: tuple[int, ...] = ()) -> None:
        """Returns None: beam search takes no grammar."""

    def renumber(self, sequence_ids: Mapping[int, int]) -> None:
        """Raises an error, since no beam search is continued."""
        raise NotImplementedError("a beam search cannot be continued")

    def _rank(self, draws: Sequence[Draw]) -> list[_Candidate]:
        """Returns the candidates of all beams, the most likely first.

        Of two equal candidates, the one of the more likely beam comes first.
        """
        drawn = {draw.sequence_id: draw.logprobs for draw in draws}
        assert drawn.keys() == {beam.sequence_id for beam in self._beams}, "beams draw together"
        candidates = [c for beam in self._beams for c in _candidates(beam, drawn[beam.sequence_id])]
        return sorted(candidates, key=lambda candidate: -candidate.cumulative_logprob)

    def _is_end(self, candidate: _Candidate) -> bool:
        return candidate.token.token_id in self._ending_token_ids

    def _merge(self, ended: Iterable[_Candidate]) -> list[_Hypothesis]:
        """Returns the best hypotheses, both those that had ended and those that end now."""
        new = [
            _Hypothesis(self._score(candidate.cumulative_logprob, self._num_tokens), candidate)
            for candidate in ended
        ]
        return sorted([*self._best, *new], key=lambda hypothesis: -hypothesis.score)[
            : self._beam.beam_width
        ]

    def _is_over(self, best_candidate: _Candidate, best: list[_Hypothesis]) -> bool:
        """Returns whether no beam can improve the result any more.

        Args:
            best_candidate: The most likely candidate that could go on.
            best: The best hypotheses that have ended.
        """
        width = self._beam.beam_width
        early = self._beam.early_stopping
        if len(best) < width:
            return False
        if early is True or width == 1:
            return True
        # A longer text can only score better.
        max_length = early == "never" and self._beam.length_penalty > 0.0
        num_tokens = self._max_tokens if max_length else self._num_tokens
        return self._score(best_candidate.cumulative_logprob, num_tokens) <= best[-1].score

    def _score(self, cumulative_logprob: float, num_tokens: int) -> float:
        return hypothesis_score(cumulative_logprob, num_tokens, self._beam.length_penalty)

    def _edits(self, going: list[_Candidate], best: list[_Hypothesis]) -> list[Edit]:
        """Returns the edits of a step, in order: drops, then forks, then appends.

        Forks come before appends, so that a fork copies its parent without the new token. With two
        beams:

            beams      candidates, best first      edits
            A  -0.5    A+x  -0.7   goes on         Drop(B)
            B  -0.9    A+y  -1.0   goes on         Fork(A to B)     the id of B is free again
                       B+z  -1.6   is dropped      Append(A, x), Append(B, y)
        """
        continued = [
            *going,
            *(hypothesis.ended for hypothesis in best if isinstance(hypothesis.ended, _Candidate)),
        ]
        surviving = {candidate.parent.sequence_id for candidate in continued} | _sequences(best)
        had = [*(beam.sequence_id for beam in self._beams), *sorted(_sequences(self._best))]
        edits: list[Edit] = [
            Drop(sequence_id) for sequence_id in had if sequence_id not in surviving
        ]
        sequence_ids, forks = self._place(continued, surviving)
        edits += forks
        self._beams = []
        for sequence_id, candidate in zip(sequence_ids, continued, strict=True):
            edits += self._grow(sequence_id, candidate)
        new_ids = iter(sequence_ids[len(going) :])
        self._best = [
            h if isinstance(h.ended, int) else h._replace(ended=next(new_ids)) for h in best
        ]
        return edits

    def _place(
        self, continued: list[_Candidate], surviving: set[int]
    ) -> tuple[list[int], list[Edit]]:
        """Returns the sequence id of each candidate, and the forks that this takes.

        The first continuation of a beam keeps the beam's own sequence. Because drops come before
        forks, twice as many ids as beams are enough.
        """
        free_ids = iter(
            [sequence_id for sequence_id in self._sequence_ids if sequence_id not in surviving]
        )
        sequence_ids: list[int] = []
        forks: list[Edit] = []
        for parent_id in (candidate.parent.sequence_id for candidate in continued):
            if parent_id in sequence_ids:
                sequence_ids.append(next(free_ids))
                forks.append(Fork(parent_id, sequence_ids[-1], 0))
            else:
                sequence_ids.append(parent_id)
        return sequence_ids, forks

    def _grow(self, sequence_id: int, candidate: _Candidate) -> list[Edit]:
        """Returns the edits that append the candidate's token to its sequence.

        The token ends the sequence, and gives it text, just as in sampling.
        """
        stopping = candidate.parent.stopping.fork()
        verdict = stopping.push(candidate.token.token_id)
        append = Append(sequence_id, candidate.token.token_id, verdict.text, candidate.token)
        if verdict.reason is None:
            self._beams.append(_Beam(sequence_id, candidate.cumulative_logprob, stopping))
            return [append]
        return [append, Finish(sequence_id, verdict.reason, verdict.stop_reason, verdict.last_text)]

    def _fail(self, reason: Finish) -> list[Edit]:
        """Ends all beams with this reason and drops the hypotheses, because one beam failed."""
        ends = [Finish(beam.sequence_id, reason.reason, reason.stop_reason) for beam in self._beams]
        return [*(Drop(sequence_id) for sequence_id in sorted(_sequences(self._best))), *ends]


def _candidates(beam: _Beam, logprobs: TokenLogprobs | None) -> Iterator[_Candidate]:
    """Yields the most likely next tokens of a beam, without those of probability zero."""
    assert logprobs is not None
    for rank, (token_id, logprob) in enumerate(
        zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True), 1
    ):
        if logprob > -math.inf:
            yield _Candidate(
                beam, TokenLogprobs(token_id, logprob, rank), beam.cumulative_logprob + logprob
            )


def _sequences(hypotheses: Iterable[_Hypothesis]) -> set[int]:
    """Returns the ids of the hypotheses that are sequences already."""
    return {hypothesis.ended for hypothesis in hypotheses if isinstance(hypothesis.ended, int)}
