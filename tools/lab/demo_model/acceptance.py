"""Measures how often drafts are right, outside jaxpage.

It replays the speculative loop over text that the demo model wrote. A draft is right where it is
the token that the model drew, as with coupled acceptance. Up to the first wrong draft the drafts
are the text itself, so one pass over the text gives for every position how many drafts would have
been right there, and the loop walks over positions.
"""

import itertools
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from tools.lab.demo_model import draft_model, eagle_head, medusa_heads, mtp_head, own_text, tales
from tools.lab.demo_model.distillation import Teacher
from tools.lab.demo_model.model import Params
from tools.lab.demo_model.tokenizer import END_OF_TEXT_ID

# Takes weights and tokens [B, T], and returns int [B, T, J]; see `draft_ranks`.
Ranks = Callable[[Params, jax.Array], jax.Array]

DRAFTS, TREE_DRAFTS = 4, 15
ROWS, LENGTH = 32, 256
MEASURED_RANKS = 10
NOVELS = (
    '"My dear sister," said',
    "It was late in the evening when",
    "I had never seen him so",
    "The captain looked at the sea and",
    "There was a long silence. Then",
    '"You see, Watson," he said,',
    "She could not help thinking that",
    "In the course of the morning",
)


class Sample(NamedTuple):
    """Rows of text that the model wrote, after prompts that it was given."""

    name: str
    tokens_BT: np.ndarray
    begins_B: np.ndarray  # the first token that the model drew
    ends_B: np.ndarray  # the position after the last token of the text


def make_samples(teacher: Teacher, tokenizer: Tokenizer, seed: int) -> list[Sample]:
    """Returns tales and novel-like text, greedy and at temperature 1."""
    rng = random.Random(seed)
    tale_prompts = [tales.tale(rng)[:60].rsplit(" ", 1)[0] for _ in range(ROWS)]
    novel_prompts = [NOVELS[row % len(NOVELS)] for row in range(ROWS)]
    samples = []
    for kind, prompts in (("tales", tale_prompts), ("novels", novel_prompts)):
        for temperature in (0.0, 1.0):
            encoded = [tokenizer.encode(prompt).ids for prompt in prompts]
            if temperature == 0:  # the same prompt again would give the same text again
                encoded = list({tuple(ids): ids for ids in encoded}.values())
            lengths_B = np.array([len(ids) for ids in encoded], np.int32)
            starts_BP = np.zeros((len(encoded), lengths_B.max()), np.int32)
            for row, ids in enumerate(encoded):
                starts_BP[row, : len(ids)] = ids
            heat_BT = np.full((len(encoded), LENGTH), temperature, np.float32)
            key = jax.random.key(seed)
            tokens_BT = np.asarray(
                own_text.continue_rows(
                    teacher.spec, teacher.params, starts_BP, lengths_B, heat_BT, key
                )
            )
            ended_BT = (tokens_BT == END_OF_TEXT_ID) & (np.arange(LENGTH) >= lengths_B[:, None])
            ends_B = np.where(ended_BT.any(1), ended_BT.argmax(1) + 1, LENGTH)
            samples.append(
                Sample(f"{kind}, temperature {temperature:g}", tokens_BT, lengths_B, ends_B)
            )
    return samples


def ranks_of(logits_BTV: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Returns for each position how many tokens are more likely than the token of the text."""
    logit_BT1 = jnp.take_along_axis(logits_BTV, tokens_BT[..., None], -1)
    return (logits_BTV > logit_BT1).sum(-1)


def _whole(logits_BTV: jax.Array, token_map: np.ndarray, vocabulary: int) -> jax.Array:
    """Returns logits over all tokens, from logits over some."""
    everywhere = jnp.full((*logits_BTV.shape[:-1], vocabulary), -jnp.inf)
    return everywhere.at[..., token_map].set(logits_BTV)


def _far(tokens_BT: jax.Array) -> jax.Array:
    return jnp.full((*tokens_BT.shape, DRAFTS), 1 << 20)


def draft_ranks(teacher: Teacher, params: Params, tokens_BT: jax.Array) -> jax.Array:
    """Returns [B, T, J]: the rank of the text's token among the guesses of each draft.

    Token t is known, and draft j is about token t + 1 + j. Rank 0 means that the draft is right.
    Beyond the text a rank is far too high to be right.
    """
    next_BT = ranks_of(draft_model.logits(teacher, params, tokens_BT)[:, :-1], tokens_BT[:, 1:])
    ranks, length = _far(tokens_BT), tokens_BT.shape[1]
    for j in range(DRAFTS):
        ranks = ranks.at[:, : length - 1 - j, j].set(next_BT[:, j:])
    return ranks


def medusa_ranks(
    teacher: Teacher, token_map: np.ndarray, params: Params, tokens_BT: jax.Array
) -> jax.Array:
    """Returns the same as `draft_ranks`, for Medusa heads.

    The heads use the hidden state one position before the known token.
    """
    hidden_BTD, length = teacher(tokens_BT).hidden_BTD, tokens_BT.shape[1]
    ranks = _far(tokens_BT)
    for j in range(medusa_heads.HEADS):
        logits = medusa_heads.head_logits(params, j, hidden_BTD[:, : length - 2 - j])
        about = tokens_BT[:, 2 + j :]
        ranks = ranks.at[:, 1 : length - 1 - j, j].set(
            ranks_of(_whole(logits, token_map, teacher.spec.vocabulary), about)
        )
    return ranks


def eagle_ranks(
    teacher: Teacher, token_map: np.ndarray, params: Params, tokens_BT: jax.Array
) -> jax.Array:
    """Returns the same as `draft_ranks`, for the EAGLE-3 head.

    Draft j of position t is pass j of position t - 1 + j.
    """
    passes = eagle_head.unroll(teacher, params, teacher(tokens_BT), tokens_BT, DRAFTS)
    return _ranks_of_passes(
        [_whole(logits, token_map, teacher.spec.vocabulary) for logits in passes], tokens_BT
    )


def mtp_ranks(teacher: Teacher, params: Params, tokens_BT: jax.Array) -> jax.Array:
    """Returns the same as `eagle_ranks`, for the MTP head."""
    passes = mtp_head.unroll(teacher, params, teacher(tokens_BT), tokens_BT, DRAFTS)
    return _ranks_of_passes(passes, tokens_BT)


def _ranks_of_passes(passes: list[jax.Array], tokens_BT: jax.Array) -> jax.Array:
    length, ranks = tokens_BT.shape[1], _far(tokens_BT)
    for j, logits_BTV in enumerate(passes):
        about = ranks_of(logits_BTV[:, :-1], tokens_BT[:, 2:])
        ranks = ranks.at[:, 1 : length - 1 - j, j].set(about[:, j:])
    return ranks


def replay(right_BTJ: np.ndarray, sample: Sample) -> tuple[list[float], float]:
    """Returns the accepted share of each draft over all steps, and the tokens per step.

    A step starts at a known token. Its right drafts, up to the first wrong one, and one token more
    are the tokens that it gives.

    Args:
        right_BTJ: Whether draft j of position t is the token of the text.
        sample: The text.
    """
    accepted_BT = np.cumprod(right_BTJ, -1).sum(-1)
    counts, steps = np.zeros(right_BTJ.shape[-1]), 0
    for row, (begin, end) in enumerate(zip(sample.begins_B, sample.ends_B, strict=True)):
        place = begin
        while place + right_BTJ.shape[-1] < end:
            accepted = accepted_BT[row, place]
            counts[:accepted] += 1
            steps += 1
            place += accepted + 1
    return [round(float(count / steps), 3) for count in counts], round(
        float(1 + counts.sum() / steps), 2
    )


def measure(params: Params, ranks: Ranks, samples: list[Sample]) -> dict[str, Any]:
    """Measures a drafter on samples.

    Returns:
        For each sample, the acceptance by draft, the tokens per step, the tokens per step with a
        tree of guesses, and the share of new 4-grams. Over all samples, how often the guess of each
        rank was right, by draft; the tree is searched with it.
    """
    compiled = jax.jit(ranks)
    logits = [np.asarray(compiled(params, sample.tokens_BT)) for sample in samples]
    accuracies = _accuracies(logits, samples)
    tree, measured = best_tree(accuracies), {}
    for sample, ranks_BTJ in zip(samples, logits, strict=True):
        positions, chain = replay(ranks_BTJ == 0, sample)
        in_tree_BTJ = np.zeros(ranks_BTJ.shape, bool)
        for path in tree:
            in_tree_BTJ[..., len(path) - 1] |= (ranks_BTJ[..., : len(path)] == path).all(-1)
        measured[sample.name] = {
            "positions": positions,
            "tokens_per_step": chain,
            "tokens_per_step_tree": replay(in_tree_BTJ, sample)[1],
            "new": share_of_new_4_grams(sample),
        }
    return {"acceptance": measured, "accuracies": accuracies}


def best_tree(accuracies: list[list[float]]) -> list[tuple[int, ...]]:
    """Returns the paths of ranks with the highest products of accuracies.

    No path is more likely than the one that it extends, so the paths are a tree.
    """
    ranks = [range(len(row)) for row in accuracies]
    paths = [path for depth in range(DRAFTS) for path in itertools.product(*ranks[: depth + 1])]
    probabilities = {
        path: math.prod(row[rank] for rank, row in zip(path, accuracies, strict=False))
        for path in paths
    }
    return sorted(paths, key=lambda path: (-probabilities[path], len(path)))[:TREE_DRAFTS]


def share_of_new_4_grams(sample: Sample) -> float:
    """Returns the share of 4-grams that are new in their row; 1 where no row repeats itself."""
    total, new = 0, 0
    for row, begin, end in zip(sample.tokens_BT, sample.begins_B, sample.ends_B, strict=True):
        grams = [tuple(row[index : index + 4]) for index in range(begin, end - 3)]
        total, new = total + len(grams), new + len(set(grams))
    return round(new / total, 2)


def _accuracies(logits: list[np.ndarray], samples: list[Sample]) -> list[list[float]]:
    """Returns how often each rank was right, [J][rank], over all positions of all samples."""
    counts, places, place = np.zeros((DRAFTS, MEASURED_RANKS)), np.zeros(DRAFTS), np.arange(LENGTH)
    for sample, ranks_BTJ in zip(samples, logits, strict=True):
        for j in range(DRAFTS):
            within = (place >= sample.begins_B[:, None]) & (place + 1 + j < sample.ends_B[:, None])
            places[j] += within.sum()
            counts[j] += [
                (ranks_BTJ[..., j][within] == rank).sum() for rank in range(MEASURED_RANKS)
            ]
    return [[round(share, 4) for share in row] for row in (counts / places[:, None]).tolist()]


def overlap(teacher: Teacher, params: Params, sample: Sample) -> float:
    """Returns the mean of sum(min(p, q)).

    Rejection sampling would accept this share of drafts that are drawn from the draft model.
    """

    @jax.jit
    def both(tokens_BT: jax.Array) -> jax.Array:
        p_BTV = jax.nn.softmax(teacher(tokens_BT).logits_BTV, -1)
        return jnp.minimum(
            p_BTV, jax.nn.softmax(draft_model.logits(teacher, params, tokens_BT), -1)
        ).sum(-1)

    place = np.arange(LENGTH)
    within = (place >= sample.begins_B[:, None]) & (place < sample.ends_B[:, None])
    return round(float(np.asarray(both(sample.tokens_BT))[within].mean()), 3)
