"""Defines the edits, which are the only ways in which a sequence changes after a step.

A strategy says with them what should happen, and `Scheduler.commit` makes it so.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jaxpage.outputs import TokenLogprobs


@dataclass(frozen=True)
class Append:
    """The sequence gains a token.

    Attributes:
        sequence_id: The sequence.
        token_id: The token.
        text: The text of the sequence that may now be shown; it is empty while a stop string could
            still cut it.
        logprobs: The log probabilities of the draw, if the request asks for any.
        drafted: True if the token was a draft of the step that drew it, so that its keys and values
            are in place.
    """

    sequence_id: int
    token_id: int
    text: str = ""
    logprobs: TokenLogprobs | None = None
    drafted: bool = False


@dataclass(frozen=True)
class Score:
    """The prompt's tokens from `position` on have these log probabilities.

    No strategy answers with this edit: it follows from what the plan asked for. It does not matter
    which sequence of the request computed the tokens.

    Attributes:
        sequence_id: The sequence that computed them.
        position: The position of the first token.
        logprobs: The log probabilities, one for each token.
    """

    sequence_id: int
    position: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True)
class Route:
    """The tokens from `position` on have these experts.

    No strategy answers with this edit either.

    Attributes:
        sequence_id: The sequence that computed them.
        position: The position of the first token.
        routes: The experts [L, X] of each token; drafts that were wrong are not among them.
    """

    sequence_id: int
    position: int
    routes: list[npt.NDArray[np.int16]]


@dataclass(frozen=True)
class Fork:
    """A new sequence of the same request begins with the parent's tokens and shares its blocks.

    Attributes:
        parent_id: The sequence that is forked.
        child_id: The id of the new sequence.
        sample_index: The number of the new sequence among the samples of the request.
    """

    parent_id: int
    child_id: int
    sample_index: int


@dataclass(frozen=True)
class Drop:
    """The sequence is given up and leaves no output.

    It is a beam that fell out, or one that has ended and is not among the best any more.

    Attributes:
        sequence_id: The sequence.
    """

    sequence_id: int


@dataclass(frozen=True)
class Finish:
    """The sequence ends.

    Attributes:
        sequence_id: The sequence.
        reason: The finish reason.
        stop_reason: The stop string or the stop token that ended it, or what went wrong.
        text: The text that was held back and may be shown after all.
    """

    sequence_id: int
    reason: str
    stop_reason: int | str | None = None
    text: str = ""


Edit = Append | Score | Route | Fork | Drop | Finish
