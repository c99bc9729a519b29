"""Defines the interface between the engine and a decoding strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from jaxpage.outputs import TokenLogprobs
from jaxpage.shapes import NOTHING_ALLOWED
from jaxpage.step.edits import Edit, Finish
from jaxpage.step.token_masks import Mask

NO_TOKEN_LEFT = "all tokens are masked: the parameters of the request leave no token to sample"


class Draw(NamedTuple):
    """The outcome of one draw.

    Attributes:
        sequence_id: The sequence that drew.
        token_id: The token. A negative number says that none could be drawn; see `refusal`.
        logprobs: The log probabilities; None unless the request asks for any.
        drafted: True if the token is a draft of this step, and another draw follows after it.
    """

    sequence_id: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    drafted: bool = False


class Strategy(Protocol):
    """Decodes one request: sees what its sequences drew, and answers with edits.

    It never touches a block.
    """

    def advance(self, draws: Sequence[Draw]) -> list[Edit]:
        """Returns the edits that a step leads to.

        Args:
            draws: The draws of all sequences of the request that have not ended: they draw in the
                same step. A sequence whose drafts were right has several draws, in order.
        """
        ...

    def mask(self, sequence_id: int, drafts: tuple[int, ...] = ()) -> Mask | None:
        """Returns the tokens that a sequence may draw next, or None for all.

        The engine asks only if the request has a grammar or a budget for reasoning.

        Args:
            sequence_id: The sequence that is about to draw.
            drafts: The drafts between its known tokens and the draw.
        """
        ...

    def renumber(self, sequence_ids: Mapping[int, int]) -> None:
        """Gives the sequences new ids, by the old ones, because an aborted request goes on."""
        ...


def refusal(draw: Draw) -> Finish:
    """Returns the end of a sequence for which no token could be drawn."""
    # `NOT_FINITE` is the only other negative number.
    if draw.token_id == NOTHING_ALLOWED:
        reason = NO_TOKEN_LEFT
    else:
        reason = "the model's logits are not finite"
    return Finish(draw.sequence_id, "error", reason)
