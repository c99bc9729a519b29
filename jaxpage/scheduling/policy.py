"""What a backend admits in one step, and the scheduler's constants: every number that shapes a plan stands here."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpage.request import Request

# Share of the pool that admitting a request must leave free while others run, so that they do not preempt it at once
# (the watermark of vLLM's first version, which the PagedAttention paper measured). Never less than one block.
WATERMARK = 0.01


@dataclass(frozen=True)
class StepLimits:
    """The steps that the backend's compiled shapes hold. A step has either one-token rows only, or is bound by the chunk limits.

    Raises:
        ValueError: a limit is not positive.
    """

    max_rows: int  # of a step whose rows have one token each
    max_tokens: int  # query tokens of a step with longer rows
    max_chunk_rows: int  # rows of such a step
    mixed: bool  # whether decoding rows join a step with longer rows; if not, the two kinds alternate

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_tokens", "max_chunk_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    def holds_chunks_beside(self, num_decoding: int) -> bool:
        """Whether a step with this many decoding rows has room for a longer row."""
        return self.mixed and num_decoding < min(self.max_tokens, self.max_chunk_rows)


def num_sequences(request: Request) -> int:
    """How many sequences the request can have at once: what its admission has to make room for."""
    return request.params.best_of or request.params.n


def watermark_blocks(num_usable: int) -> int:
    return max(1, int(num_usable * WATERMARK))
