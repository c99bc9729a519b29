"""Defines `SpeculativeConfig`: which method drafts, how many drafts, and which are accepted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from jaxpage.settings.draft_settings import AcceptanceRule, Lookahead, SuffixDecoding
from jaxpage.settings.speculative_methods import AUTO, METHODS, WITH_WEIGHTS
from jaxpage.shapes import MAX_DRAFTS

AUTO_DRAFTS = (1, 3, 7)  # powers of two together with the token before them

# The methods that read a field. With another method the field is a contradiction.
BELONGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "model": WITH_WEIGHTS,
        **{field: (name,) for name, method in METHODS.items() for field in method.fields},
    }
)
TYPICAL = ("typical_acceptance_posterior_threshold", "typical_acceptance_posterior_alpha")

# Type checkers read no Literal that is computed.
if TYPE_CHECKING:
    MethodName = str
else:
    MethodName = Literal[(*METHODS, "auto")]

# A path to a draft in Medusa's tree: a rank among the predictions of the first head, a rank among
# those of the second head, and so on.
Choice = Annotated[tuple[Annotated[int, Field(ge=0, lt=MAX_DRAFTS)], ...], Field(min_length=1)]


class SpeculativeConfig(BaseModel):
    """Holds the settings of speculative decoding.

    With coupled acceptance these settings change how many steps a text takes, and never the text.
    With rejection they can change a text, but not the distribution of texts. Typical acceptance
    changes both. A setting that is None has the method's default.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    method: MethodName
    # The place of the drafter's weights, for methods that have any.
    model: str | None = None
    num_speculative_tokens: Annotated[int, Field(ge=1, le=MAX_DRAFTS)] | Literal["auto"] = "auto"
    tree: bool = False  # drafts may branch: several for one position, verified at once
    acceptance: Literal["coupled", "rejection", "typical"] = "coupled"
    # See AcceptanceRule.
    typical_acceptance_posterior_threshold: Annotated[float, Field(ge=0, lt=1)] | None = None
    typical_acceptance_posterior_alpha: Annotated[float, Field(ge=0, le=1)] | None = None
    # The shortest match that "ngram" drafts from (2 by default).
    prompt_lookup_min: Annotated[int, Field(ge=1, le=64)] | None = None
    # The longest match that "ngram" looks for (16 by default).
    prompt_lookup_max: Annotated[int, Field(ge=1, le=64)] | None = None
    # See SuffixDecoding.
    suffix_decoding_max_tree_depth: Annotated[int, Field(ge=2, le=256)] | None = None
    # With 0, a request drafts from no other request's output.
    suffix_decoding_max_cached_requests: Annotated[int, Field(ge=0)] | None = None
    suffix_decoding_max_spec_factor: Annotated[float, Field(gt=0, le=64)] | None = None
    suffix_decoding_min_token_prob: Annotated[float, Field(ge=0, le=1)] | None = None

    # The tree of "medusa".
    medusa_choices: (
        Annotated[tuple[Choice, ...], Field(min_length=1, max_length=MAX_DRAFTS)] | None
    ) = None

    # See Lookahead.
    lookahead_window: Annotated[int, Field(ge=1, le=MAX_DRAFTS)] | None = None
    lookahead_ngram: Annotated[int, Field(ge=2, le=MAX_DRAFTS)] | None = None
    lookahead_guesses: Annotated[int, Field(ge=1, le=MAX_DRAFTS)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_method(cls, value: Any) -> Any:
        """Returns the settings that the word "auto" stands for."""
        return {"method": value} if value == "auto" else value

    @field_validator("medusa_choices", mode="before")
    @classmethod
    def _as_tuples(cls, value: Any) -> Any:
        """Returns the tree as tuples; JSON and Medusa's own code write it as a list of lists."""
        if isinstance(value, list | tuple):
            return tuple(tuple(path) if isinstance(path, list) else path for path in value)
        return value

    @property
    def prompt_lookup(self) -> tuple[int, int]:
        """Returns the shortest and the longest match of "ngram".

        If only one is given, the default of the other is moved so that both fit together.
        """
        min_length = self.prompt_lookup_min
        max_length = self.prompt_lookup_max
        if min_length is None:
            min_length = 2 if max_length is None else min(2, max_length)
        return min_length, max(16, min_length) if max_length is None else max_length

    @property
    def suffix_decoding(self) -> SuffixDecoding:
        """Returns the settings of suffix decoding, with defaults filled in."""
        values = {name: getattr(self, f"suffix_decoding_{name}") for name in SuffixDecoding._fields}
        return SuffixDecoding(
            **{name: value for name, value in values.items() if value is not None}
        )

    @property
    def rule(self) -> AcceptanceRule:
        """Returns the acceptance rule, with defaults filled in."""
        values = {name.removeprefix("typical_acceptance_"): getattr(self, name) for name in TYPICAL}
        return AcceptanceRule(
            self.acceptance, **{name: value for name, value in values.items() if value is not None}
        )

    @property
    def lookahead(self) -> Lookahead:
        """Returns the sizes of lookahead decoding.

        Sizes that are not given follow from `num_speculative_tokens`: four columns in five are for
        the window (docs/lab-log.md has the comparison).
        """
        maximum = (
            MAX_DRAFTS if self.num_speculative_tokens == "auto" else self.num_speculative_tokens
        )
        ngram = self.lookahead_ngram or (4 if maximum >= 23 else 3 if maximum >= 3 else 2)
        columns = (maximum + 1) // (ngram - 1)
        window = self.lookahead_window
        guesses = self.lookahead_guesses
        if guesses is None:
            guesses = max(1, columns // 5 if window is None else columns - window)
        return Lookahead(max(1, columns - guesses) if window is None else window, ngram, guesses)

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        """Returns the numbers of drafts that a sequence may have in a step.

        This is the one number that was asked for, or the few that "auto" chooses from.
        """
        num_drafts = self.num_speculative_tokens
        choices = self.medusa_choices
        if self.method == "lookahead":
            return (self.lookahead.num_drafts,)
        if num_drafts == "auto" and choices is not None:  # the given tree, or a part of it
            return (*(length for length in AUTO_DRAFTS if length < len(choices)), len(choices))
        return AUTO_DRAFTS if num_drafts == "auto" else (num_drafts,)

    @property
    def has_weights(self) -> bool:
        """Returns whether what drafts has weights of its own, or may have."""
        return any(METHODS[name].weights for name in self._possible)

    @property
    def drafts_on_device(self) -> bool:
        """Returns whether drafts are made, or may be made, in the step of the model."""
        return any(METHODS[name].drafter for name in self._possible)

    @property
    def _possible(self) -> tuple[str, ...]:
        """Returns the methods that it may turn out to be."""
        return AUTO if self.method == "auto" else (self.method,)

    @property
    def branches(self) -> bool:
        """Returns whether drafts may branch."""
        return self.tree or self.method == "lookahead"

    def problems(self) -> Iterable[str]:
        """Yields a text for each contradiction between the settings."""
        for name in TYPICAL:
            if (value := getattr(self, name)) is not None and self.acceptance != "typical":
                yield (
                    f"{name} is {value!r}, but acceptance is {self.acceptance!r}: it belongs to "
                    "typical"
                )
        for name, methods in BELONGS.items():
            value = getattr(self, name)
            if value is not None and self.method not in methods:
                yield (
                    f"{name} is {value!r}, but method is {self.method!r}: it belongs to "
                    f"{', '.join(methods)}"
                )
        min_length, max_length = self.prompt_lookup
        if min_length > max_length:
            yield f"prompt_lookup_min is {min_length}, above prompt_lookup_max, {max_length}"
        if self.method == "suffix":
            yield from self._never_drafted(self.suffix_decoding)
        if self.method == "lookahead":
            yield from self._too_many(self.lookahead)

        if self.method in WITH_WEIGHTS and not self.model:
            yield f"method {self.method!r} needs model: where its weights are"
        if self.medusa_choices is not None:
            yield from self._wrong_choices(self.medusa_choices)

    def _never_drafted(self, settings: SuffixDecoding) -> Iterable[str]:
        depth = settings.max_tree_depth
        factor = settings.max_spec_factor
        num_drafts = self.num_speculative_tokens
        if num_drafts != "auto" and num_drafts >= depth:
            yield (
                f"num_speculative_tokens is {num_drafts}, but suffix_decoding_max_tree_depth "
                f"{depth} leaves at most {depth - 1}"
            )
        if int((depth - 1) * factor) < 1:
            yield (
                f"suffix_decoding_max_spec_factor is {factor:g}, so nothing is drafted: "
                f"suffix_decoding_max_tree_depth {depth} allows "
                f"at most {depth - 1} matching tokens; use at least 1/{depth - 1}"
            )

    def _too_many(self, sizes: Lookahead) -> Iterable[str]:
        num_drafts = self.num_speculative_tokens
        maximum = MAX_DRAFTS if num_drafts == "auto" else num_drafts
        if sizes.num_drafts > maximum:
            window, ngram, guesses = (
                f"lookahead_{name} {value}" for name, value in sizes._asdict().items()
            )
            whose = (
                f"the {maximum} that fit in a step"
                if num_drafts == "auto"
                else f"num_speculative_tokens, {maximum}"
            )
            yield (
                f"{window}, {ngram} and {guesses} take {sizes.num_drafts} drafts, more than {whose}"
            )

    def _wrong_choices(self, choices: tuple[tuple[int, ...], ...]) -> Iterable[str]:
        known = set(choices)
        if len(known) < len(choices):
            yield "medusa_choices has a path twice"
        for path in sorted(known):
            if len(path) > 1 and path[:-1] not in known:
                yield f"medusa_choices has {list(path)}, but not its parent {list(path[:-1])}"
        if not self.tree and len({len(path) for path in known}) < len(known):
            yield "medusa_choices branches, but tree is False"
        if self.num_speculative_tokens not in ("auto", len(choices)):
            yield (
                f"num_speculative_tokens is {self.num_speculative_tokens}, but medusa_choices has "
                f"{len(choices)} paths"
            )

    def find_refused(self) -> Iterable[str]:
        """Yields a text for each setting that this version does not support."""
        if self.method == "lookahead" and self.acceptance != "coupled":
            yield (
                f"acceptance {self.acceptance!r} is not supported: this version of method "
                "'lookahead' learns from coupled draws after "
                "every draft; use coupled"
            )
        is_fixed = all(METHODS[name].is_fixed for name in self._possible)
        if is_fixed and self.num_speculative_tokens == "auto":
            yield (
                "num_speculative_tokens 'auto' is not supported: this version of method "
                f"{self.method!r} drafts a fixed number; "
                f"use 1 to {MAX_DRAFTS}"
            )
        if self.tree and not all(METHODS[name].has_trees for name in self._possible):
            yield f"tree=True is not supported: method {self.method!r} drafts chains; use False"
