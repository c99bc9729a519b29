"""Counts the tokens of an answer that are reasoning."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from jaxpage.chat_forms import ReasoningPlaces
from jaxpage.serving.wire.logprobs import TextOffsets


class ReasoningTokens:
    r"""Counts the tokens of one answer whose text begins between the markers of reasoning.

        <think>  \n  We  think  .</  think>  Hi        <think>  We  think  .  \n  </think>  Hi
                  1   2      3    4                              1      2  3   4

    So a budget of N tokens that is used up gives N. A token without text is reasoning if it comes
    before the closing marker.
    """

    def __init__(self, places: ReasoningPlaces, offsets: TextOffsets) -> None:
        """Makes the count of an answer without tokens.

        Args:
            places: Where the reasoning is in the text, which grows as the text is read.
            offsets: The offsets of the answer's tokens, before the first one.
        """
        self._places = places
        self._offsets = offsets
        self._begins = array("q")  # where each token begins
        self._empty = array("q")  # where tokens without text are

    def add(self, token_ids: Iterable[int]) -> None:
        """Adds the next tokens, whose text is read already, as far as it is certain."""
        last = self._begins[-1] if self._begins else 0
        for token_id in token_ids:
            if self._places.is_over and last > max(self._places.ends, default=-1):
                return
            # A special token within a character begins after what is known of the character.
            last = max(last, self._offsets.after(token_id, ""))
            self._begins.append(last)
            if self._offsets.end <= last:
                self._empty.append(last)

    @property
    def number(self) -> int:
        """Returns the number of tokens, as far as the text is certain."""
        number = 0
        for begin, end in zip(self._places.begins, self._places.ends, strict=True):
            number += bisect_left(self._begins, end) - bisect_left(self._begins, begin)
            number += bisect_right(self._empty, end) - bisect_left(self._empty, end)
        return number
