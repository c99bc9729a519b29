"""What every proposer gives: tokens that may follow a sequence, as a tree. A chain is a tree."""

from __future__ import annotations

from typing import NamedTuple


class Draft(NamedTuple):
    """Tokens that may follow the last known token of a sequence. `parents[i]`, smaller than i, is the draft before draft i; -1: none."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]

    def cut(self, num_tokens: int) -> Draft:
        """The first tokens: still a tree, since parents come first."""
        return Draft(self.token_ids[:num_tokens], self.parents[:num_tokens])

    def first_branch(self) -> Draft:
        """The chain of first children."""
        tokens: list[int] = []
        last = -1
        for index, (token_id, parent) in enumerate(zip(self.token_ids, self.parents, strict=True)):
            if parent == last:
                tokens.append(token_id)
                last = index
        return chain(tuple(tokens))

    @property
    def depths(self) -> tuple[int, ...]:
        """Of each draft; 1 for those that follow the last known token."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    def path(self, index: int) -> tuple[int, ...]:
        """The tokens from the first down to draft `index`."""
        tokens: list[int] = []
        while index >= 0:
            tokens.append(self.token_ids[index])
            index = self.parents[index]
        return tuple(reversed(tokens))


def chain(token_ids: tuple[int, ...]) -> Draft:
    return Draft(token_ids, tuple(range(-1, len(token_ids) - 1)))
