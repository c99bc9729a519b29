"""Proposers that may hurt no engine: each is wrong in its own way, and one is always right."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from jaxpage.speculation import Proposer
from jaxpage.step.draft import Draft, chain
from jaxpage.step.request import Request, Sequence, SequenceGroup
from tests.support.synthetic import Outputs, SyntheticProposer

Guessing = Callable[[Sequence, int, random.Random], Draft | None]


class Double(Proposer):
    """A proposer made of a function of the sequence, the drafts that are wanted and a source of
    noise that the sequence's length seeds.
    """

    def __init__(self, guess: Guessing) -> None:
        self.guess = guess
        self.num_requested = 0
        self.forgotten: list[str] = []  # ids of requests

    def propose(self, request: Request, sequence: Sequence, num_drafts: int) -> Draft | None:
        self.num_requested += 1
        return self.guess(
            sequence, num_drafts, random.Random(f"{sequence.sequence_id} {len(sequence.token_ids)}")
        )

    def forget(self, group: SequenceGroup) -> None:
        self.forgotten.append(group.request.request_id)


def oracle(outputs: Outputs, maximum: int, vocab_size: int) -> Proposer:
    """Returns a proposer that is always right.

    `outputs`: what the engine draws for these prompts without drafts.
    """
    return SyntheticProposer(outputs, (1.0,) * maximum, vocab_size=vocab_size)


def always_wrong(outputs: Outputs, maximum: int, vocab_size: int) -> Proposer:
    return SyntheticProposer(outputs, (0.0,) * maximum, vocab_size=vocab_size)


class PastTheEnd(Proposer):
    """Right to the end of the known output, and from there on for as many drafts as are wanted:
    past EOS and past the last position.
    """

    def __init__(self, outputs: Outputs) -> None:
        self.outputs = outputs

    def propose(self, request: Request, sequence: Sequence, num_drafts: int) -> Draft | None:
        output = self.outputs[request.prompt_token_ids][sequence.sample_index]
        token_ids = list(output[sequence.num_output_tokens :][:num_drafts])
        return chain((*token_ids, *[output[-1]] * (num_drafts - len(token_ids))))


def any_length(vocab_size: int) -> Double:
    """Drafts random tokens, from none to as many as are wanted."""
    return Double(
        lambda _, maximum, noise: chain(
            tuple(noise.choices(range(vocab_size), k=noise.randint(0, maximum)))
        )
    )


def twins(vocab_size: int) -> Double:
    """Drafts trees in which every token has two equal children, as far as they go."""

    def guess(sequence: Sequence, maximum: int, noise: random.Random) -> Draft:
        levels = noise.choices(range(vocab_size), k=maximum)
        parents = [index // 2 - 1 for index in range(maximum)]
        tokens = [levels[(index + 2).bit_length() - 2] for index in range(maximum)]
        return Draft(tuple(tokens), tuple(parents))

    return Double(guess)


def too_many(vocab_size: int) -> Double:
    return Double(
        lambda _, maximum, noise: chain(tuple(noise.choices(range(vocab_size), k=3 * maximum + 5)))
    )


def unknown_tokens(vocab_size: int) -> Double:
    """Drafts a good token, and then one that no model of this vocabulary has, anywhere in the
    chain.
    """

    def guess(sequence: Sequence, maximum: int, noise: random.Random) -> Draft:
        tokens = noise.choices(range(vocab_size), k=maximum)
        tokens[noise.randrange(maximum)] = noise.choice((-1, -(2**40), vocab_size, 2**31, 2**70))
        return chain(tuple(tokens))

    return Double(guess)


def no_tree(vocab_size: int) -> Double:
    """Drafts parents that come later, are the token itself or are none.

    They may be too few or too many, too.
    """

    def guess(sequence: Sequence, maximum: int, noise: random.Random) -> Draft:
        tokens = tuple(noise.choices(range(vocab_size), k=maximum))
        parents = list(chain(tokens).parents)
        place = noise.randrange(maximum)
        parents[place] = noise.choice((place, place + 1, maximum + 7, -2))
        return Draft(
            tokens,
            noise.choice((tuple(parents), chain(tokens).parents[:-1], (*range(-1, maximum),))),
        )

    return Double(guess)


def fails(after: int) -> Double:
    """Raises when it was asked `after` times."""

    def guess(sequence: Sequence, maximum: int, noise: random.Random) -> Draft:
        if double.num_requested > after:
            raise RuntimeError("a proposer that fails")
        return chain((0,) * maximum)

    double = Double(guess)
    return double


def no_draft() -> Double:
    """Answers with something that is no draft at all."""
    return Double(lambda *_: (1, 2, 3))  # type: ignore[return-value,arg-type]


def harmless(vocab_size: int) -> Mapping[str, Double]:
    """Returns, by name, proposers that know nothing, with which every text is what it is without
    them.
    """
    makers = (any_length, twins, too_many, unknown_tokens, no_tree)
    return {
        **{maker.__name__: maker(vocab_size) for maker in makers},
        "fails": fails(after=3),
        "no_draft": no_draft(),
    }
