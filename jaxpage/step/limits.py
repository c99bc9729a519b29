"""Says what one step may hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepLimits:
    """The steps that the backend's compiled shapes hold.

    A step has rows of one token only, or it is bound by the chunk limits. Where chunks and decodes
    are not mixed, the two kinds alternate.

    Attributes:
        max_rows: The most rows of a step whose rows have one token each.
        max_tokens: The most query tokens of a step with longer rows.
        max_chunk_rows: The most rows of such a step.
        mixed: True if decoding rows may join a step with longer rows.
        verified: The shapes of steps with drafts: (rows, query tokens of a row).
        trees: True if drafts may branch in those steps.
        decoded: The rows of the shapes whose rows have one token, from small to large.
        streams: The pairs (rows, query tokens of all rows) that the shapes in `verified` hold; if
            empty, every row may have the longest length.
        num_steps: The tokens that a step draws of a sequence, one after the other. With more than 1
            there are no drafts.
        adapts_num_steps: True if a step draws one token of a sequence, or fewer than `num_steps`,
            where a request waits or has come lately.

    Raises:
        ValueError: A limit is not positive.
    """

    max_rows: int
    max_tokens: int
    max_chunk_rows: int
    mixed: bool
    verified: tuple[tuple[int, int], ...] = ()
    trees: bool = False
    decoded: tuple[int, ...] = ()
    streams: tuple[tuple[int, int], ...] = ()
    num_steps: int = 1
    adapts_num_steps: bool = False

    def __post_init__(self) -> None:
        """Refuses limits that are not positive."""
        for name in ("max_rows", "max_tokens", "max_chunk_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    def max_drafts(self, num_rows: int) -> int:
        """Returns how many drafts a row may have in a step of this many decoding rows."""
        lengths = (length - 1 for rows, length in self.verified if rows >= num_rows)
        # Where a step draws several tokens, those after the first are booked as drafts.
        return max(lengths, default=self.num_steps - 1)

    @property
    def max_row_length(self) -> int:
        """Returns the most query tokens that a sequence can have in a step."""
        return max(self.max_tokens, 1 + self.max_drafts(1))

    def draft_budget(self, num_rows: int) -> int:
        """Returns how many drafts all rows together may have in a step of decoding rows."""
        maximum = (tokens - num_rows for rows, tokens in self._streams if rows >= num_rows)
        # See `max_drafts`: these are the placeholders of several steps.
        return max(maximum, default=num_rows * (self.num_steps - 1))

    def shape(self, num_rows: int, num_drafts: int) -> tuple[int, int]:
        """Returns (rows, query tokens) of the smallest shape for a step of decoding rows.

        Args:
            num_rows: The number of rows, with one known token each.
            num_drafts: The number of drafts that follow these tokens.
        """
        shapes = self._streams if num_drafts else [(rows, rows) for rows in self.decoded]
        num_tokens = num_rows + num_drafts
        # The tokens come first, so that `min` finds the shape with the fewest of them: linear
        # layers pay for tokens, padded ones included.
        fitting = ((tokens, rows) for rows, tokens in shapes if rows >= num_rows)
        large_enough = (shape for shape in fitting if shape[0] >= num_tokens)
        tokens, rows = min(large_enough, default=(num_tokens, num_rows))
        return rows, tokens

    @property
    def _streams(self) -> tuple[tuple[int, int], ...]:
        return self.streams or tuple((rows, rows * length) for rows, length in self.verified)

    def holds_chunks_with(self, num_decoding: int) -> bool:
        """Returns whether a step with this many decoding rows has room for a longer row."""
        # A decoding row takes one token and one row of the step.
        return self.mixed and num_decoding < min(self.max_tokens, self.max_chunk_rows)
