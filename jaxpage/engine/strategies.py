"""Makes the strategies of requests, and holds the parts that take an engine's decisions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxpage import decoding
from jaxpage.decoding import MaskBudget, SamplingStrategy
from jaxpage.engine.text import NoText, StreamDetokenizer
from jaxpage.speculation import Speculator
from jaxpage.step.events import Events
from jaxpage.step.request import Request, SequenceGroup
from jaxpage.step.strategy import Strategy

if TYPE_CHECKING:
    from jaxpage.decoding import Grammar

NewStrategy = Callable[[SequenceGroup, "Grammar | None"], Strategy]


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """Holds the parts of an engine that take decisions, and that a caller may replace.

    A replay passes its own parts, which take their decisions from the log.

    Attributes:
        speculator: The proposer of drafts; None for no speculation.
        strategies: The decoding strategies by sequence id; a speculator may read the same dict.
        new_strategy: Makes the strategy of a new request; None chooses it by the parameters.
        events: The listener; None ignores all events.
    """

    speculator: Speculator | None = None
    strategies: dict[int, Strategy] | None = None
    new_strategy: NewStrategy | None = None
    events: Events | None = None


NO_PARTS = EngineParts()


class DefaultStrategies:
    """Makes the strategy of each request, by its parameters.

    Attributes:
        mask_budget: The time that grammars may take for the masks of a step.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        """Takes the tokenizer; None makes no text."""
        self._tokenizer = tokenizer
        self.mask_budget = MaskBudget()

    def __call__(self, group: SequenceGroup, grammar: Grammar | None) -> Strategy:
        """Returns the strategy of a request and its compiled grammar, if it has one."""
        request = group.request
        if request.beam:
            return decoding.BeamStrategy(
                request, group.reserved_ids, lambda: self._new_detokenizer(request)
            )
        return SamplingStrategy(
            request, lambda: self._new_detokenizer(request), grammar, self.mask_budget
        )

    def _new_detokenizer(self, request: Request) -> StreamDetokenizer | NoText:
        # A model without a tokenizer gives token ids alone.
        if self._tokenizer is None:
            return NoText()
        skip = request.params.skip_special_tokens
        return StreamDetokenizer(
            self._tokenizer, request.prompt_token_ids, skip_special_tokens=skip
        )
