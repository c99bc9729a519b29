"""Drafts of which a set share is right: the same requests have run without drafts before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

from jaxpage.speculation import Proposer
from jaxpage.step.draft import Draft, chain
from jaxpage.step.request import Request
from jaxpage.step.request import Sequence as Known

Outputs = Mapping[tuple[int, ...], Sequence[Sequence[int]]]  # by prompt: of each of its samples


def rates_of(mean_length: float, num_drafts: int) -> tuple[float, ...]:
    """Returns of `num_drafts` drafts how often the first is right, the first two are, and so on,
    with the least variance.

    Args: mean_length: tokens of a step: 1 and the right drafts, from 1 to 1 + `num_drafts`.
    """
    if not 1 <= mean_length <= 1 + num_drafts:
        raise ValueError(
            f"mean_length={mean_length} must be from 1 to {1 + num_drafts}, for {num_drafts} drafts"
        )
    return tuple(min(1.0, max(0.0, mean_length - 1 - index)) for index in range(num_drafts))


class SyntheticProposer(Proposer):
    """Drafts chains of `len(rates)` tokens: so many from the known output, and from there on wrong
    ones.
    """

    def __init__(
        self, outputs: Outputs, rates: Sequence[float], *, vocab_size: int, seed: int = 0
    ) -> None:
        """
        Args:
            outputs: what the engine draws for these prompts without drafts.
            rates: how often the first draft is right, the first two are, and so on: from 1 to 0,
            and never more than before.
            vocab_size: at least 2.
            seed: of who is right when. The rest is the sequence and the position.
        """
        if any(not later <= rate for rate, later in zip((1.0, *rates), (*rates, 0.0), strict=True)):
            raise ValueError(f"rates={tuple(rates)} must go down from 1 to 0")
        if vocab_size < 2:
            raise ValueError(f"vocab_size={vocab_size} leaves no wrong token")
        self._outputs = outputs
        self._rates = tuple(rates)
        self._vocab_size = vocab_size
        self._seed = seed

    def propose(self, request: Request, sequence: Known, num_drafts: int) -> Draft | None:
        """Raises ValueError where the sequence does not go as its known output does."""
        output = self._outputs[request.prompt_token_ids][sequence.sample_index]
        start = sequence.num_output_tokens
        if start and (start > len(output) or sequence.token_ids[-1] != output[start - 1]):
            raise ValueError(
                f"sequence {sequence.sequence_id} is not what the known output says at token "
                f"{start - 1}"
            )
        drafts = [
            int(token_id) for token_id in output[start : start + min(num_drafts, len(self._rates))]
        ]
        num_right = self.num_right(sequence.sequence_id, len(sequence.token_ids))
        wrong = [(token_id + 1) % self._vocab_size for token_id in drafts[num_right:]]
        return chain((*drafts[:num_right], *wrong)) if drafts else None

    def num_right(self, sequence_id: int, position: int) -> int:
        """Returns those of the drafts of a sequence that take the places from `position` on, if all
        are made.
        """
        key = blake2b(f"{self._seed} {sequence_id} {position}".encode(), digest_size=8)
        uniform = int.from_bytes(key.digest(), "little") / 2**64
        return sum(uniform < rate for rate in self._rates)
