"""The settings of an acceptance rule and of a drafting method: `SpeculativeConfig` with its defaults filled in."""

from __future__ import annotations

from typing import Literal, NamedTuple


class SuffixDecoding(NamedTuple):
    """Settings of suffix decoding."""

    max_tree_depth: int = 24  # tokens that are the same and tokens that are drafted, together
    max_cached_requests: int = 10_000  # whose outputs are kept to draft from, each sample counted
    max_spec_factor: float = 1.0  # drafts for each token that is the same
    min_token_prob: float = 0.1  # of a draft: by the counts, with all the drafts before it


class AcceptanceRule(NamedTuple):
    """Which drafts become tokens. The rest is of "typical"."""

    name: Literal["coupled", "rejection", "typical"] = "coupled"
    posterior_threshold: float = 0.09  # a draft this likely is right whatever else is likely
    posterior_alpha: float = 0.3  # and one that is this part of exp(-entropy), where that is less


class Lookahead(NamedTuple):
    """The sizes of lookahead decoding: W, N and G of its authors."""

    window: int  # columns of guesses that are made better in every step
    ngram: int  # tokens of what is kept, the first of them known when it is drafted
    guesses: int  # that are kept behind a token, and drafted

    @property
    def num_drafts(self) -> int:
        """At most: of the first column the first is the known token."""
        return (self.window + self.guesses) * (self.ngram - 1) - 1
