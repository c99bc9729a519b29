"""Lists the methods of speculation: the fields that each reads, and what drafts on the device."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

# On the device drafts come from heads or layers on the model's hidden states, from another model,
# or from the model's own most likely tokens.
DrafterKind = Literal["heads", "eagle_head", "mtp_head", "model", "top_ids"]


class Method(NamedTuple):
    """Says what the settings and the assembly of an engine have to know of a method.

    Attributes:
        drafter: What it needs on the device besides the model; None if it drafts on the host.
        weights: The checkpoint that the drafter's weights are in; None if it has none.
        fields: The fields of `SpeculativeConfig` that no other method reads.
        is_fixed: True if it takes no `num_speculative_tokens="auto"`.
        has_trees: False if it drafts chains alone, and refuses `tree=True`.
    """

    drafter: DrafterKind | None = None
    weights: Literal["own", "model"] | None = None
    fields: tuple[str, ...] = ()
    is_fixed: bool = False
    has_trees: bool = True


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "ngram": Method(fields=("prompt_lookup_min", "prompt_lookup_max"), has_trees=False),
        "suffix": Method(
            fields=(
                "suffix_decoding_max_tree_depth",
                "suffix_decoding_max_cached_requests",
                "suffix_decoding_max_spec_factor",
                "suffix_decoding_min_token_prob",
            )
        ),
        "draft_model": Method("model", "own"),
        "medusa": Method("heads", "own", ("medusa_choices",)),
        "eagle": Method("eagle_head", "own"),
        "eagle3": Method("eagle_head", "own"),
        "mtp": Method("mtp_head", "model"),
        "lookahead": Method(fields=("lookahead_window", "lookahead_ngram", "lookahead_guesses")),
        # "auto" was tried and lost at large batches (docs/lab-log.md).
        "token_recycling": Method("top_ids", is_fixed=True),
    }
)
WITH_WEIGHTS = tuple(name for name, method in METHODS.items() if method.weights == "own")
# The methods that "auto" tries, in this order; the last one takes any model.
AUTO = (*(name for name, method in METHODS.items() if method.weights == "model"), "suffix")
