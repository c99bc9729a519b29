"""What one step may hold."""

from __future__ import annotations

from dataclasses import dataclass


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
    verified: tuple[tuple[int, int], ...] = ()  # of steps with drafts: (rows, query tokens of a row) that a shape holds
    trees: bool = False  # whether drafts may branch in those
    decoded: tuple[int, ...] = ()  # rows that the shapes of one-token rows hold, from small to large
    streams: tuple[
        tuple[int, int], ...
    ] = ()  # (rows, query tokens of all) that each of `verified` holds; by default all it can
    # Tokens that a step may draw of a sequence, one after the other; with more than 1 there are no drafts
    num_steps: int = 1

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_tokens", "max_chunk_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    def most_drafts(self, num_rows: int) -> int:
        """How many drafts a row may have in a step of so many rows, all of which decode."""
        return max((length - 1 for rows, length in self.verified if rows >= num_rows), default=self.num_steps - 1)

    @property
    def longest_row(self) -> int:
        """Query tokens that a sequence can have in a step, at most."""
        return max(self.max_tokens, 1 + self.most_drafts(1))

    def draft_budget(self, num_rows: int) -> int:
        """How many drafts all rows of such a step may have together."""
        most = (tokens - num_rows for rows, tokens in self._streams if rows >= num_rows)
        return max(most, default=num_rows * (self.num_steps - 1))

    def shape(self, num_rows: int, num_drafts: int) -> tuple[int, int]:
        """(rows, query tokens) of the smallest shape that holds so many rows of one token, and so many drafts behind them."""
        shapes = self._streams if num_drafts else [(rows, rows) for rows in self.decoded]
        num_tokens = num_rows + num_drafts
        fitting = [(tokens, rows) for rows, tokens in shapes if rows >= num_rows and tokens >= num_tokens]
        tokens, rows = min(fitting, default=(num_tokens, num_rows))
        return rows, tokens

    @property
    def _streams(self) -> tuple[tuple[int, int], ...]:
        return self.streams or tuple((rows, rows * length) for rows, length in self.verified)

    def holds_chunks_beside(self, num_decoding: int) -> bool:
        """Whether a step with this many decoding rows has room for a longer row."""
        return self.mixed and num_decoding < min(self.max_tokens, self.max_chunk_rows)
