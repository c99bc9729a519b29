"""Holds the settings of an acceptance rule and of drafting methods, with defaults filled in.

`SpeculativeConfig` makes them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class SuffixDecoding(NamedTuple):
    """Holds the settings of suffix decoding.

    Attributes:
        max_tree_depth: The most matching tokens and draft tokens together.
        max_cached_requests: How many finished requests' outputs are kept to draft from.
        max_spec_factor: The most draft tokens for each matching token.
        min_token_prob: The lowest probability, by counts, of a draft with all drafts before it.
    """

    max_tree_depth: int = 24
    max_cached_requests: int = 10_000  # each sample of a request counts
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1


class AcceptanceRule(NamedTuple):
    """Says which drafts are accepted.

    Typical acceptance takes a draft whose probability is above the smaller of two thresholds. The
    other rules have no thresholds.

    Attributes:
        name: The rule.
        posterior_threshold: The first threshold; a draft above it is right whatever else is likely.
        posterior_alpha: The second threshold is this number times exp(-entropy).
    """

    name: Literal["coupled", "rejection", "typical"] = "coupled"
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3


class Lookahead(NamedTuple):
    """Holds the sizes of lookahead decoding, which its authors call W, N and G.

    Attributes:
        window: The columns of guesses that every step improves.
        ngram: The tokens of a kept n-gram; the first is known when the others are drafted.
        guesses: The n-grams that are kept after a token, and are drafted.
    """

    window: int
    ngram: int
    guesses: int

    @property
    def num_drafts(self) -> int:
        """Returns the most drafts of a step; one token of the window is known, and is no draft."""
        return (self.window + self.guesses) * (self.ngram - 1) - 1
