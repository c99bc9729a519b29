"""The interface between the engine and a decoding strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from jaxpage.outputs import TokenLogprobs
from jaxpage.shapes import NOTHING_ALLOWED
from jaxpage.step.edits import Edit, Finish
from jaxpage.step.token_masks import Mask

NO_TOKEN_LEFT = "all tokens are masked: the parameters of the request leave no token to sample"


class Draw(NamedTuple):
    """What came of one draw. `logprobs` is None unless the request asks for any."""

    sequence_id: int
    token_id: int  # negative: none could be drawn, and `refusal` says why
    logprobs: TokenLogprobs | None = None
    drafted: bool = False  # the token drawn is a draft of this step, and another draw behind it follows


class Strategy(Protocol):
    """Decodes one request. Sees what its sequences drew and answers with edits; never touches a block."""

    def advance(self, draws: Sequence[Draw]) -> list[Edit]:
        """What a step leads to. The draws are those of all sequences of the request that have not ended: they draw together.

        A sequence whose drafts were right has several draws, one behind the other.
        """
        ...

    def mask(self, sequence_id: int, drafts: tuple[int, ...] = ()) -> Mask | None:
        """What a sequence that is about to draw may draw, behind these drafts; None if no grammar says. Asked only if the request has
        structured outputs."""
        ...


def refusal(draw: Draw) -> Finish:
    """The end of a sequence for which no token could be drawn."""
    if draw.token_id == NOTHING_ALLOWED:
        reason = NO_TOKEN_LEFT
    else:
        reason = "the model's logits are not finite"
    return Finish(draw.sequence_id, "error", reason)
