"""`SpeculativeConfig`: how drafts are made and how many, as `EngineConfig.speculative_config` takes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

MOST_DRAFTS = 63  # of a sequence in a step: with the token before them, 64 query tokens


class SpeculativeConfig(BaseModel):
    """How what follows is drafted. With coupled acceptance nothing in here changes a text: it changes how many steps it takes."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    method: Literal["ngram", "suffix", "draft_model", "medusa", "eagle", "eagle3", "lookahead"]
    model: str | None = None  # of the methods that have weights of their own: where they are
    num_speculative_tokens: Annotated[int, Field(ge=1, le=MOST_DRAFTS)] | Literal["auto"] = "auto"
    tree: bool = False  # drafts may branch: several guesses of what comes next, verified at once
    acceptance: Literal["coupled", "rejection", "typical"] = "coupled"
    prompt_lookup_min: Annotated[int, Field(ge=1, le=64)] = 2  # of "ngram": the shortest match
    prompt_lookup_max: Annotated[int, Field(ge=1, le=64)] = 4  # and the longest

    def problems(self) -> Iterable[str]:
        """What contradicts itself."""
        if self.prompt_lookup_min > self.prompt_lookup_max:
            yield f"prompt_lookup_min is {self.prompt_lookup_min}, above prompt_lookup_max, {self.prompt_lookup_max}"

    def refused(self) -> Iterable[str]:
        """What this version does not do."""
        if self.method not in ("ngram",):
            yield f"method {self.method!r} is not supported: this version drafts by ngram only"
        if self.acceptance != "coupled":
            yield f"acceptance {self.acceptance!r} is not supported: this version accepts coupled drafts only"
        if self.tree and self.method == "ngram":
            yield "tree=True is not supported: method 'ngram' drafts chains; use False"
        if self.model is not None:
            yield f"model {self.model!r} is not supported: method {self.method!r} has no weights"
