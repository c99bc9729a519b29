"""The only verbs by which sequences change. A strategy says what should happen; `Scheduler.commit` makes it so."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpage.outputs import TokenLogprobs


@dataclass(frozen=True)
class Append:
    """The sequence gains a token. `text` is what may now be shown of it; it is empty while a stop string could still cut it."""

    sequence_id: int
    token_id: int
    text: str = ""
    logprobs: TokenLogprobs | None = None
    drafted: bool = False  # its keys and values are in place: it was a draft of the step that drew it


@dataclass(frozen=True)
class Score:
    """The prompt's tokens from `position` on have these log probabilities, whichever sequence of the request computed them.

    No strategy's answer: it follows from what the plan asked for.
    """

    sequence_id: int
    position: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True)
class Fork:
    """A new sequence of the same request begins with the parent's tokens and shares its blocks."""

    parent_id: int
    child_id: int
    sample_index: int


@dataclass(frozen=True)
class Drop:
    """The sequence is given up and leaves no output: a beam that fell out, or one that has ended and is not among the best any more."""

    sequence_id: int


@dataclass(frozen=True)
class Finish:
    """The sequence ends. `text` is what was held back and may be shown after all."""

    sequence_id: int
    reason: str
    stop_reason: int | str | None = None
    text: str = ""


Edit = Append | Score | Fork | Drop | Finish
