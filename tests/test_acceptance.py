"""Acceptance of drafts: their distributions, the rules on the device, and texts of whole engines.

A distribution is known in float64: on the device of a Markov chain of eight tokens, in engines from
the log probabilities of prompts, by the public interface. Rejection changes none, whatever is
drafted; each test of that is also run with mistakes planted, which it must see. Typical acceptance,
which does change it, is the rule that its authors wrote down.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage import LLM, SamplingParams
from jaxpage.device import acceptance
from jaxpage.device.acceptance import decide
from jaxpage.device.drafters import growing
from jaxpage.device.inputs.buckets import Bucket, make_menu
from jaxpage.device.inputs.step_inputs import (
    FIELDS,
    Flags,
    ProcessorInputs,
    StepInputs,
    TableShape,
    processor_shapes,
    unflatten,
    unpack,
)
from jaxpage.device.sampler import Stream, noise_key
from jaxpage.engine.batch_builder import BatchBuilder
from jaxpage.replay.recorder import _drafts
from jaxpage.replay.replaying import _draft
from jaxpage.settings.draft_settings import AcceptanceRule
from jaxpage.shapes import MAX_CANDIDATES, NOT_FINITE, NOTHING_ALLOWED
from jaxpage.speculation import Proposer
from jaxpage.speculation.speculator import filter_drafts
from jaxpage.step.draft import Candidates, Draft
from jaxpage.step.plan import Row, Sample, StepPlan
from jaxpage.step.request import Request, Sequence
from tests.support.distributions import probabilities, z_score
from tests.support.engines import LLAMA, invariants, make_llm
from tests.support.random_checkpoints import random_checkpoint, random_tensors, write_tensors
from tests.support.reference_sampling import processed
from tests.support.scripted import Guesses, draft_with, without_drafts
from tests.support.sweeps import few
from tests.support.tokenizers import write_tokenizer
from tests.test_event_log import open_log, records_of, replay_log
from tests.test_speculation_log import results_of

# --- what drafts were drawn from stays with them on their way from a proposer into a step

IDS = np.array([[5, 3, -1], [3, 5, -1], [7, 8, 9], [2, -1, 1]], np.int32)
PROBS = np.array([[0.5, 0.5, 0], [0.75, 0.25, 0], [0.2, 0.3, 0.5], [0.4, 0, 0.6]], np.float32)
DRAFT = Draft((5, 3, 8, 1), (-1, -1, 0, 1), Candidates(IDS, PROBS))


def assert_same(draft: Draft, expected: Draft) -> None:
    assert draft[:2] == expected[:2] and draft.q is not None and expected.q is not None
    np.testing.assert_array_equal(draft.q.token_ids_NW, expected.q.token_ids_NW)
    np.testing.assert_array_equal(draft.q.probabilities_NW, expected.q.probabilities_NW)


def test_what_is_cut_keeps_its_own():
    assert_same(DRAFT.cut(2), Draft((5, 3), (-1, -1), Candidates(IDS[:2], PROBS[:2])))
    assert_same(
        DRAFT.first_branch(), Draft((5, 8), (-1, 0), Candidates(IDS[[0, 2]], PROBS[[0, 2]]))
    )
    assert_same(DRAFT.sound(20, 9), DRAFT)
    assert_same(DRAFT.sound(20, 3), DRAFT.cut(3))
    assert_same(DRAFT._replace(parents=(-1, 7, 0, 1)).sound(20, 9), DRAFT.cut(1))


@pytest.mark.parametrize(
    ("ids", "probs", "message"),
    [
        (IDS[:3], PROBS[:3], "4 drafts with q of"),
        (IDS, PROBS[:, :2], "4 drafts with q of"),
        (
            np.full((4, MAX_CANDIDATES + 1), 5),
            np.full((4, MAX_CANDIDATES + 1), 0.03),
            "33 tokens; 32 are possible",
        ),
        (IDS, PROBS * 0.9, "no distribution"),
        (IDS, PROBS * [[1], [1], [np.nan], [1]], "no distribution"),
        (IDS, np.where(IDS == 3, -0.5, PROBS) + np.where(IDS == 5, 1.0, 0), "no distribution"),
        (np.where(IDS == 9, 20, IDS), PROBS, "beyond the model's, which end at 19"),
        (np.where(IDS == 9, -1, IDS), PROBS, "beyond the model's"),
        (np.where(IDS == 8, 9, IDS), PROBS, "cannot be drawn from"),
        (IDS, np.where(IDS == 8, 0, PROBS) + np.where(IDS == 9, 0.3, 0), "cannot be drawn from"),
    ],
)
def test_what_no_draft_was_drawn_from_is_an_error(ids, probs, message):
    with pytest.raises(ValueError, match=message):
        DRAFT._replace(q=Candidates(ids, probs)).sound(20, 9)


class Forbidding:
    """Is a grammar that admits nothing."""

    def mask(self, sequence_id: int, drafts: tuple[int, ...] = ()) -> Any:
        return None if drafts else np.zeros(1, np.uint32)


def test_no_grammar_takes_out_what_was_drawn():
    """A grammar takes out chosen drafts alone: those that are certain to be wrong were not drawn by
    chance.
    """
    assert_same(filter_drafts({7: DRAFT}, {7: Forbidding()})[7], DRAFT)  # type: ignore[dict-item]
    assert not filter_drafts({7: DRAFT._replace(q=None)}, {7: Forbidding()})  # type: ignore[dict-item]


def test_a_log_gives_them_back():
    row = Row(4, 30, (1, *DRAFT.token_ids), ((3,),), parents=(0, 0, 1, 2), q=DRAFT.q)
    sequence_id, draft = _draft(*json.loads(json.dumps(_drafts(row))), vocab_size=20)
    assert sequence_id == 4
    assert_same(draft, DRAFT)
    # no padding
    assert DRAFT.q is not None and [len(ids) for ids, _ in DRAFT.q.as_lists()] == [2, 2, 3, 3]
    for wrong in (
        [],
        [[[5], [0]]] * 4,
        [[5, 3]] * 4,
        [[["x"], [1]]] * 4,
        [[[2**40], [2**40]]] * 4,
        7,
    ):
        with pytest.raises((OverflowError, TypeError, ValueError)):
            _draft(4, [5, 3, 8, 1], [-1, -1, 0, 1], wrong, vocab_size=20)


def test_a_step_knows_what_each_draft_was_drawn_from():
    """A chosen draft, and a token that is no draft, has all the probability itself."""
    menu = make_menu(
        4, 16, num_drafts=(7,), max_verified_tokens=64, trees=True, q_width=MAX_CANDIDATES
    )
    builder = BatchBuilder(menu, table_width=4, block_size=16, blocks=[range(1, 9)], vocab_size=20)
    rows = (
        Row(0, 0, (6, 9), ((1,),), parents=(0,)),
        Row(1, 3, (1, *DRAFT.token_ids), ((2,),), parents=(0, 0, 1, 2), q=DRAFT.q),
        Row(2, 5, (4,), ((3,),)),
    )
    samples = tuple(
        Sample(index, offset, index, SamplingParams(), 0, 0, 9)
        for index, row in enumerate(rows)
        for offset in range(len(row.token_ids))
    )
    batch = builder.build(StepPlan(1, rows, samples))
    assert batch.bucket.q_width == MAX_CANDIDATES
    inputs = unpack(jnp.asarray(batch.packed), batch.bucket, TableShape(1, 4))
    ids, probs = np.asarray(inputs.q_ids_TW), np.asarray(inputs.q_TW)
    assert ids.shape == probs.shape == (batch.bucket.num_tokens, MAX_CANDIDATES)
    np.testing.assert_array_equal(ids[3:7, :3], IDS)
    np.testing.assert_array_equal(probs[3:7, :3], PROBS)
    assert (ids[:, 3:] == -1).all() and (probs[:, 3:] == 0).all()
    for place, token_id in ((0, 6), (1, 9), (2, 1), (7, 4)):
        assert ids[place, :2].tolist() == [token_id, -1] and probs[place, :2].tolist() == [1, 0]
    plain = make_menu(4, 16, num_drafts=(7,), max_verified_tokens=64, trees=True)
    assert {bucket.q_width for bucket in plain.buckets + menu.decode + menu.chunk} == {0}
    assert Bucket(8, 1, 8, verifies=True).q_width == 0


# --- the rules, as functions of the device

VOCAB, START, LENGTH, NUM_GENERATIONS = 8, 2, 3, 5_000
REJECTION, TYPICAL = AcceptanceRule("rejection"), AcceptanceRule("typical")
rng = np.random.default_rng(11)
TABLE = rng.normal(0, 1.2, (VOCAB, VOCAB)).astype(np.float32)  # logits of what follows each token
ALLOWED = rng.random((VOCAB, VOCAB)) < 0.6  # by a grammar, after each token
WIDTH = 5  # tokens that a drafter draws from
_scores = TABLE + rng.normal(0, 1.0, (VOCAB, VOCAB)).astype(np.float32)
Q_IDS = np.argsort(-_scores, axis=1)[:, :WIDTH].astype(np.int32)
Q = np.exp(np.take_along_axis(_scores, Q_IDS, axis=1))
Q = (Q / Q.sum(axis=1, keepdims=True)).astype(np.float32)

SAMPLERS: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.7": {"temperature": 0.7},
    "top-k 3": {"temperature": 1.0, "top_k": 3},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "min-p": {"temperature": 1.0, "min_p": 0.1},
    "repetition penalty": {"temperature": 1.0, "repetition_penalty": 1.6},
    "grammar": {"temperature": 1.0, "grammar": True},
}


class Shape(NamedTuple):
    """Says how the drafts of a row are made, with parents as in `Draft`."""

    parents: tuple[int, ...]
    drawn: bool = True  # from q; otherwise the likeliest of q
    replaced: bool = (
        # drafts after the same token are drawn independently: those that differ are as if without
        # replacement
        False
    )
    stream: int | None = Stream.DRAFT
    says: str = "q"  # what the step is told


SHAPES = {
    "chain": Shape((-1, 0, 1)),
    "chain by the noise of draws": Shape((-1, 0, 1), stream=None),
    "chain, chosen": Shape((-1, 0, 1), drawn=False),
    "tree": Shape((-1, -1, -1, 0, 0, 1, 1)),
    "tree with the same drafts twice": Shape((-1, -1, -1, 0, 0, 1, 1), replaced=True),
    "tree, chosen": Shape((-1, -1, -1, 0, 0, 1, 1), drawn=False),
}


def depths_and_ranks(parents: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Returns how deep each token of a row stands, and its rank among the children of its
    parent.
    """
    depths, ranks = [0], [0]
    for index, parent in enumerate(parents):
        depths.append(depths[1 + parent] + 1)
        ranks.append(list(parents[:index]).count(parent))
    return depths, ranks


def draft_tokens(
    shape: Shape, known_B: jax.Array, position_B: jax.Array, seed_B: jax.Array
) -> jax.Array:
    """Returns the token ids [B, Q] of each row: a known token and its drafts."""
    _, ranks = depths_and_ranks(shape.parents)
    depths, _ = depths_and_ranks(shape.parents)
    columns = [known_B]
    for index, parent in enumerate(shape.parents, start=1):
        before_B = columns[1 + parent]

        def draw(
            before: jax.Array,
            position: jax.Array,
            seed: jax.Array,
            place: int = index,
            parent: int = parent,
        ) -> jax.Array:
            scores_W = jnp.log(jnp.asarray(Q))[before]
            if shape.drawn:
                words = jnp.stack([jnp.uint32(0), seed.astype(jnp.uint32)])
                key = noise_key(words, jnp.int32(0), position + depths[1 + parent], shape.stream)
                key = jax.random.fold_in(key, place) if shape.replaced else key
                scores_W += jax.random.gumbel(key, (WIDTH,))
            rank = 0 if shape.replaced else ranks[place]
            return jnp.asarray(Q_IDS)[before][jnp.argsort(-scores_W)[rank]]

        columns.append(jax.vmap(draw)(before_B, position_B, seed_B))
    return jnp.stack(columns, axis=1)


def candidates(shape: Shape, token_ids_BQ: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns what the step is told of each token: [T, W]."""
    num_rows, num_tokens = token_ids_BQ.shape
    before_BQ = token_ids_BQ[:, [0, *(1 + parent for parent in shape.parents)]]
    ids_BQW, q_BQW = jnp.asarray(Q_IDS)[before_BQ], jnp.asarray(Q)[before_BQ]
    if shape.says == "flat":
        q_BQW = jnp.full_like(q_BQW, 1 / WIDTH)
    if not shape.drawn:
        ids_BQW = jnp.where(jnp.arange(WIDTH) == 0, token_ids_BQ[..., None], -1)
        q_BQW = jnp.broadcast_to(jnp.where(jnp.arange(WIDTH) == 0, 1.0, 0.0), ids_BQW.shape)
    padding = ((0, 0), (0, 0), (0, 2))
    ids_BQW, q_BQW = jnp.pad(ids_BQW, padding, constant_values=-1), jnp.pad(q_BQW, padding)
    return ids_BQW.reshape(num_rows * num_tokens, -1), q_BQW.reshape(num_rows * num_tokens, -1)


def neutral_fields(
    token_ids_BQ: jax.Array,
    parents: tuple[int, ...],
    position_B: jax.Array,
    seed_B: jax.Array,
) -> dict[str, Any]:
    """Returns the fields of rows with the same tree, one after the other."""
    num_rows, num_tokens = token_ids_BQ.shape
    total = num_rows * num_tokens
    depths, _ = depths_and_ranks(parents)
    start_B = jnp.arange(num_rows) * num_tokens
    parents_BQ = jnp.where(
        jnp.arange(num_tokens) > 0, start_B[:, None] + jnp.array([0, *(1 + p for p in parents)]), -1
    )
    values: dict[str, Any] = {name: jnp.zeros(total) for name in FIELDS}
    return values | {
        "token_ids_T": token_ids_BQ.reshape(-1),
        "parents_T": parents_BQ.reshape(-1),
        "query_start": jnp.arange(num_rows + 1) * num_tokens,
        "drawn_position_R": (position_B[:, None] + jnp.array(depths)).reshape(-1),
        "seed_R2": jnp.stack(
            [jnp.zeros(total, jnp.uint32), jnp.repeat(seed_B.astype(jnp.uint32), num_tokens)],
            axis=1,
        ),
        "sample_index_R": jnp.zeros(total, jnp.int32),
        "top_k_R": jnp.zeros(total, jnp.int32),
        "top_p_R": jnp.ones(total),
        "repetition_penalty_R": jnp.ones(total),
        "num_prompt_tokens_R": jnp.ones(total, jnp.int32),
        "flags": jnp.zeros(6, jnp.int32),
    }


def step_inputs(*arguments: Any, **fields: Any) -> StepInputs:
    """Returns the inputs of such rows; what `fields` leaves out is neutral."""
    return unflatten(neutral_fields(*arguments) | fields)


def neutral(num_draws: int) -> ProcessorInputs:
    shapes = processor_shapes(num_draws, vocab_size=VOCAB, context=1 + LENGTH + 8)
    return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)


def processor_inputs_of(
    known_BC: jax.Array, token_ids_BQ: jax.Array, parents: tuple[int, ...]
) -> ProcessorInputs:
    """Returns the grammar's mask after each token, and its history: the known tokens and the drafts
    that lead to it.
    """
    num_rows, num_tokens = token_ids_BQ.shape
    words_V = jnp.array(
        [sum(1 << token for token in np.flatnonzero(row)) for row in ALLOWED], jnp.uint32
    )
    histories = []
    for node in range(num_tokens):
        path = []
        while node:
            path.append(token_ids_BQ[:, node])
            node = 1 + parents[node - 1]
        padding = [jnp.full(num_rows, VOCAB)] * (LENGTH + 8 - LENGTH - len(path))
        histories.append(jnp.concatenate([known_BC, jnp.stack([*path, *padding], axis=1)], axis=1))
    history_RC = jnp.stack(histories, axis=1).reshape(num_rows * num_tokens, -1)
    return neutral(num_rows * num_tokens)._replace(
        mask_RU=words_V[token_ids_BQ.reshape(-1)][:, None], history_RC=history_RC
    )


class Texts(NamedTuple):
    """Holds texts as far as they have come: the first token is set, the others are drawn."""

    token_ids_BC: jax.Array  # padded with V
    length_B: jax.Array


def step_of(shape: Shape, rule: AcceptanceRule) -> Any:
    """Returns a jitted step of all texts, by a sampler's settings.

    The step returns the texts and how many drafts were accepted.
    """
    parents, rows = shape.parents, NUM_GENERATIONS
    num_tokens = 1 + len(parents)
    # of a text, with what the last step has too many
    total, width = rows * num_tokens, 1 + LENGTH + num_tokens
    bucket = Bucket(total, rows, num_tokens, verifies=True, trees=True, q_width=WIDTH + 2)

    @jax.jit
    def step(texts: Texts, sampler: dict[str, Any]) -> tuple[Texts, jax.Array]:
        text_BC, length_B = texts
        text_BC = jnp.pad(text_BC, ((0, 0), (0, width - text_BC.shape[1])), constant_values=VOCAB)
        seed_B = jnp.arange(rows)
        known_B = jnp.take_along_axis(text_BC, length_B[:, None] - 1, axis=1)[:, 0]
        token_ids_BQ = draft_tokens(shape, known_B, length_B, seed_B)
        q_ids_TW, q_TW = candidates(shape, token_ids_BQ)
        flags = (
            jnp.zeros(6, jnp.int32)
            .at[Flags.MASKED]
            .set(sampler["grammar"])
            .at[Flags.PENALISED]
            .set(1)
        )
        fields = {
            f"{name}_R": jnp.full(total, value)
            for name, value in sampler.items()
            if name != "grammar"
        }
        inputs = step_inputs(
            token_ids_BQ,
            parents,
            length_B,
            seed_B,
            q_ids_TW=q_ids_TW,
            q_TW=q_TW,
            flags=flags,
            **fields,
        )
        known_BC = jnp.where(
            jnp.arange(1 + LENGTH) < length_B[:, None], text_BC[:, : 1 + LENGTH], VOCAB
        )
        processor_inputs = processor_inputs_of(known_BC, token_ids_BQ, parents)
        logits_RV = jnp.asarray(TABLE)[token_ids_BQ.reshape(-1)]
        token_ids_R, paths_BQ = decide(
            logits_RV, inputs, processor_inputs, bucket, rule, by_row=False
        )
        counts_B = (paths_BQ >= 0).sum(axis=1)
        indices_BQ = jnp.where(paths_BQ >= 0, length_B[:, None] + jnp.arange(num_tokens), width)
        text_BC = text_BC.at[jnp.arange(rows)[:, None], indices_BQ].set(
            token_ids_R[paths_BQ], mode="drop"
        )
        return Texts(
            text_BC[:, : 1 + LENGTH], jnp.minimum(length_B + counts_B, 1 + LENGTH)
        ), counts_B - 1

    return step


@functools.cache
def rejecting(shape: str) -> Any:
    return step_of(SHAPES[shape], REJECTION)


def begin(start_B: Any = START) -> Texts:
    token_ids_BC = jnp.full((NUM_GENERATIONS, 1 + LENGTH), VOCAB).at[:, 0].set(start_B)
    return Texts(token_ids_BC, jnp.ones(NUM_GENERATIONS, jnp.int32))


def settings_of(sampler: dict[str, Any]) -> dict[str, Any]:
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "grammar": False}
    settings = {name: np.float32(value) for name, value in {**neutral, **sampler}.items()}
    return settings | {name: np.int32(settings[name]) for name in ("top_k", "grammar")}


def generate(step: Any, sampler: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Returns how often each text of LENGTH tokens came out, and how many drafts the first step of
    each accepted.
    """
    settings = settings_of(sampler)
    texts, num_accepted_B = step(begin(), settings)
    for _ in range(LENGTH - 1):
        texts, _ = step(texts, settings)
    return count(texts.token_ids_BC[:, 1:]), np.asarray(num_accepted_B)


def count(texts_BL: Any) -> np.ndarray:
    """Returns how often each text of LENGTH tokens is there."""
    counts = np.zeros((VOCAB,) * LENGTH, np.int64)
    np.add.at(counts, tuple(np.asarray(texts_BL).T), 1)
    return counts


def of_texts(follows: Callable[[tuple[int, ...]], np.ndarray]) -> np.ndarray:
    """Returns the distribution of texts of LENGTH tokens, from that of what follows each
    beginning.
    """
    joint = np.ones((VOCAB,) * LENGTH)
    for index in range(LENGTH):
        for output in itertools.product(range(VOCAB), repeat=index):
            joint[output] *= follows(output).reshape(-1, *[1] * (LENGTH - 1 - index))
    return joint


def distribution(
    output: tuple[int, ...], sampler: dict[str, Any], start: int = START
) -> np.ndarray:
    """Returns the distribution of the next token, in float64, from a sampler that is not ours."""
    cuts = {
        name: value
        for name, value in sampler.items()
        if name not in ("repetition_penalty", "grammar")
    }
    params = SamplingParams(repetition_penalty=sampler.get("repetition_penalty", 1.0))
    last = (start, *output)[-1]
    logits = processed(TABLE[last], params, [start], output)
    if sampler.get("grammar"):
        logits = np.where(ALLOWED[last], logits, -np.inf)
    return probabilities(logits, **cuts)


@functools.cache
def expected_counts(name: str) -> np.ndarray:
    return of_texts(lambda output: distribution(output, SAMPLERS[name]))


@pytest.mark.parametrize(
    ("shape", "sampler"),
    few(
        [
            (shape, sampler)
            for shape in ("chain", "chain, chosen", "tree", "tree, chosen")
            for sampler in SAMPLERS
        ]
        + [
            ("chain by the noise of draws", "temperature 1"),
            ("tree with the same drafts twice", "temperature 1"),
        ],
        [  # every sampler, and chains and trees with one that cuts and one that does not
            *[(shape, "temperature 1") for shape in ("chain", "tree")],
            *[("tree", sampler) for sampler in ("top-k 3", "repetition penalty", "grammar")],
            *[("chain", sampler) for sampler in ("temperature 0.7", "top-p 0.9", "min-p")],
            ("chain, chosen", "top-k 3"),
        ],
    ),
)
def test_rejection_changes_no_distribution(shape, sampler):
    counts, num_accepted_B = generate(rejecting(shape), SAMPLERS[sampler])
    assert counts.sum() == NUM_GENERATIONS and num_accepted_B.max() > 0
    assert abs(z_score(counts, expected_counts(sampler))) < 4


def no_residual(p_V: jax.Array, ids_W: jax.Array, q_W: jax.Array) -> jax.Array:
    return p_V


MISTAKES: dict[str, tuple[Shape, AcceptanceRule]] = {
    "drawn from p where a draft was rejected": (SHAPES["chain"], REJECTION),
    "a residual with the noise of the drafts": (SHAPES["chain"], REJECTION),
    "another q": (SHAPES["chain"]._replace(says="flat"), REJECTION),
    "drafts without replacement from q as if with": (SHAPES["tree"], REJECTION),
    "typical acceptance": (SHAPES["chain"], TYPICAL),
}


@pytest.mark.parametrize("mistake", few(MISTAKES, ["another q"]))
def test_a_mistake_shows(mistake, monkeypatch):
    if mistake == "drawn from p where a draft was rejected":
        monkeypatch.setattr(acceptance, "residual", no_residual)
    if mistake == "a residual with the noise of the drafts":
        monkeypatch.setattr(Stream, "RESIDUAL", Stream.DRAFT)
    if mistake == "drafts without replacement from q as if with":
        real = acceptance._try

        def forgetful(place, walk, *others):
            return real(place, walk._replace(tried_V=jnp.zeros(VOCAB, bool)), *others)

        monkeypatch.setattr(acceptance, "_try", forgetful)
    counts, _ = generate(step_of(*MISTAKES[mistake]), SAMPLERS["temperature 1"])
    assert z_score(counts, expected_counts("temperature 1")) > 4  # so the test above fails


@pytest.mark.parametrize("sampler", ["temperature 1", "top-k 3", "grammar"])
@pytest.mark.parametrize("shape", ["chain", "chain, chosen"])
def test_as_many_drafts_are_accepted_as_can_be(shape, sampler):
    """A draft from q is accepted with the sum of min(p, q), a chosen one with its p, after every
    token.
    """
    start_B = np.arange(NUM_GENERATIONS) % VOCAB
    _, num_accepted_B = rejecting(shape)(begin(start_B), settings_of(SAMPLERS[sampler]))
    for start in range(VOCAB):
        p_V, q_V = distribution((), SAMPLERS[sampler], start), np.zeros(VOCAB)
        q_V[Q_IDS[start]] = Q[start]
        share = np.minimum(p_V, q_V).sum() if SHAPES[shape].drawn else p_V[Q_IDS[start, 0]]
        accepted_B = np.asarray(num_accepted_B)[start_B == start] > 0
        deviation = np.sqrt(max(share * (1 - share), 1e-9) / len(accepted_B))
        assert abs(accepted_B.mean() - share) < 4 * deviation


# --- greedy rows, and rows of which nothing can be drawn


def random_rows(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns trees of drafts with tokens that are there twice.

    They are token ids and parents [T], and where rows start [B + 1]; the last are padding.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, MAXIMUM + 1, ROWS)
    lengths[-2:] = 0
    starts = np.concatenate([[0], np.cumsum(lengths)])
    parents = np.full(ROWS * MAXIMUM, -1)
    for start, stop in itertools.pairwise(starts):
        parents[start + 1 : stop] = [
            rng.integers(max(start, index - 3), index) for index in range(start + 1, stop)
        ]
    return rng.integers(0, VOCAB, len(parents)), parents, starts


def inputs_of(
    token_ids_T: np.ndarray, parents_T: np.ndarray, query_start: np.ndarray, **fields: Any
) -> StepInputs:
    """Returns the inputs of drafts that were chosen."""
    total = len(token_ids_T)
    chosen_TW = np.zeros((total, 3), np.float32)
    chosen_TW[:, 0] = 1
    values = neutral_fields(
        jnp.asarray(token_ids_T)[:, None], (), jnp.arange(total), jnp.arange(total)
    )
    values |= {"parents_T": parents_T, "query_start": query_start, "q_TW": chosen_TW}
    values |= {"q_ids_TW": np.where(chosen_TW > 0, token_ids_T[:, None], -1), **fields}
    return unflatten(jax.tree.map(jnp.asarray, values))


ROWS, MAXIMUM = 12, 6
RULES = few(
    itertools.product((REJECTION, TYPICAL), (True, False)), [(REJECTION, True), (TYPICAL, False)]
)


@functools.partial(jax.jit, static_argnames=("rule", "by_row"))
def decide_all(
    logits_RV: Any,
    inputs: StepInputs,
    rule: AcceptanceRule,
    by_row: bool,
    processor_inputs: Any = None,
) -> Any:
    bucket = Bucket(ROWS * MAXIMUM, ROWS, MAXIMUM, verifies=True, trees=True, q_width=3)
    return decide(
        logits_RV, inputs, processor_inputs or neutral(ROWS * MAXIMUM), bucket, rule, by_row=by_row
    )


@pytest.mark.parametrize(("rule", "by_row"), RULES)
def test_every_rule_gives_the_greedy_text(rule, by_row):
    for seed in range(8):
        logits_RV = (
            np.random.default_rng(seed)
            .normal(0, 1, (ROWS * MAXIMUM, VOCAB))
            .astype(np.float32)
            .round(1)
        )
        inputs = inputs_of(*random_rows(seed))
        drawn_R, expected_BQ = decide_all(logits_RV, inputs, AcceptanceRule(), by_row)
        token_ids_R, paths_BQ = decide_all(logits_RV, inputs, rule, by_row)
        np.testing.assert_array_equal(paths_BQ, expected_BQ)
        on_a_path = paths_BQ[paths_BQ >= 0]
        np.testing.assert_array_equal(token_ids_R[on_a_path], drawn_R[on_a_path])


@pytest.mark.parametrize(("rule", "by_row"), RULES)
def test_where_nothing_can_be_drawn_a_path_ends(rule, by_row):
    """Rows are greedy or not: logits are no numbers after a right draft, or none at all, or a mask
    forbids all of them.
    """
    token_ids, parents, starts = (
        np.zeros(72, np.int64),
        np.full(72, -1),
        np.minimum(np.arange(13) * 3, 18),
    )
    logits_RV = np.zeros((72, VOCAB), np.float32)
    words_RU = np.full((72, 1), 255, np.uint32)
    for row in range(6):
        token_ids[3 * row + 1 : 3 * row + 3], parents[3 * row + 1 : 3 * row + 3] = (
            (4, 5),
            (3 * row, 3 * row + 1),
        )
        # each draft is right, for certain
        logits_RV[3 * row, 4] = logits_RV[3 * row + 1, 5] = 200.0
    logits_RV[1], logits_RV[3 + 1], words_RU[6 + 1] = np.nan, -np.inf, 0
    logits_RV[9 + 1], logits_RV[12 + 1], words_RU[15 + 1] = logits_RV[1], logits_RV[3 + 1], 0
    inputs = inputs_of(
        token_ids, parents, starts, temperature_R=np.repeat([0.0, 1.0], [9, 63]).astype(np.float32)
    )
    inputs = inputs._replace(flags=jnp.zeros(6, jnp.int32).at[Flags.MASKED].set(1))
    token_ids_R, paths_BQ = decide_all(
        logits_RV, inputs, rule, by_row, neutral(72)._replace(mask_RU=words_RU)
    )
    for row in range(6):
        assert paths_BQ[row, :3].tolist() == [3 * row, 3 * row + 1, -1]
        refusal = NOTHING_ALLOWED if row in (2, 5) else NOT_FINITE
        assert token_ids_R[3 * row : 3 * row + 2].tolist() == [4, refusal]


@pytest.mark.parametrize("rule", [REJECTION, TYPICAL], ids=["rejection", "typical"])
def test_where_nothing_is_drafted_nothing_is_different(rule):
    """A row in a step with drafts of others draws what it draws in one without."""
    num_bare = 0
    for seed in range(5):
        token_ids, parents, starts = random_rows(seed)
        fields = {
            "temperature_R": np.ones(ROWS * MAXIMUM, np.float32),
            "flags": np.eye(6, dtype=np.int32)[Flags.RANDOM],
        }
        inputs = inputs_of(token_ids, parents, starts, **fields)
        logits_RV = (
            np.random.default_rng(seed).normal(0, 1, (ROWS * MAXIMUM, VOCAB)).astype(np.float32)
        )
        drawn_R, _ = decide_all(logits_RV, inputs, AcceptanceRule(), False)
        token_ids_R, paths_BQ = decide_all(logits_RV, inputs, rule, False)
        ends = np.asarray(paths_BQ).max(axis=1)[:-2]  # the last two rows are padding
        bare = ends[~np.isin(ends, parents)]
        np.testing.assert_array_equal(token_ids_R[bare], drawn_R[bare])
        num_bare += len(bare)
    assert num_bare > 9


def test_texts_are_the_same_by_row_and_together():
    """Another seed gives other texts."""
    rows = random_rows(3)
    logits_RV = np.random.default_rng(3).normal(0, 1, (ROWS * MAXIMUM, VOCAB)).astype(np.float32)
    fields = {"temperature_R": np.ones(ROWS * MAXIMUM, np.float32)}
    first, two = (
        decide_all(logits_RV, inputs_of(*rows, **fields), REJECTION, by_row)
        for by_row in (True, False)
    )
    jax.tree.map(np.testing.assert_array_equal, first, two)
    fields["sample_index_R"] = np.ones(ROWS * MAXIMUM, np.int32)
    other = decide_all(logits_RV, inputs_of(*rows, **fields), REJECTION, True)
    assert (np.asarray(other[1]) != np.asarray(first[1])).any()


# --- typical acceptance


def best_path(
    p_TV: np.ndarray, tokens: np.ndarray, parents: np.ndarray, rule: AcceptanceRule
) -> list[int] | None:
    """Returns the best path of one row, as Medusa's `evaluate_posterior` finds it among those from
    the root to a leaf.

    It is None where rounding could decide.
    """
    leaves = [index for index in range(len(tokens)) if index not in parents]
    paths: list[tuple[int, float, list[int]]] = []
    for leaf in leaves:
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        length, likelihood = 0, 0.0
        for before, place in itertools.pairwise(path):
            p = p_TV[before]
            entropy = -(p[p > 0] * np.log(p[p > 0])).sum()
            threshold = min(rule.posterior_threshold, rule.posterior_alpha * np.exp(-entropy))
            if abs(p[tokens[place]] - threshold) < 1e-5:
                return None
            if p[tokens[place]] <= threshold:
                break
            length, likelihood = length + 1, likelihood + np.log(p[tokens[place]])
        paths.append((length, likelihood, path[: 1 + length]))
    max_length = max(length for length, _, _ in paths)
    paths = [(likelihood, path) for length, likelihood, path in paths if length == max_length]
    top = max(likelihood for likelihood, _ in paths)
    close = {tuple(tokens[path]) for likelihood, path in paths if top - likelihood < 1e-5}
    return (
        min(path for likelihood, path in paths if top - likelihood < 1e-5)
        if len(close) == 1
        else None
    )


def test_typical_acceptance_is_that_of_medusa():
    rule = AcceptanceRule("typical", 0.3, 0.09)  # other numbers than the usual ones
    num_paths, lengths = 0, set()
    for seed in range(40):
        token_ids, parents, starts = random_rows(seed)
        rng = np.random.default_rng(seed)
        logits_RV = rng.normal(0, 1.0, (len(token_ids), VOCAB)).astype(np.float32)
        temperature_R = rng.choice([0.3, 0.7, 1.2], len(token_ids)).astype(np.float32)
        fields = {"temperature_R": temperature_R, "top_k_R": np.full(len(token_ids), 6, np.int32)}
        flags = np.eye(6, dtype=np.int32)[Flags.RANDOM]
        inputs = inputs_of(token_ids, parents, starts, flags=flags, **fields)
        token_ids_R, paths_BQ = decide_all(logits_RV, inputs, rule, False)
        drawn_R, _ = decide_all(logits_RV, inputs, AcceptanceRule(), False)
        p_TV = np.stack(
            [probabilities(*row, top_k=6) for row in zip(logits_RV, temperature_R, strict=True)]
        )
        for index, (start, stop) in enumerate(itertools.pairwise(starts)):
            actual = [place for place in np.asarray(paths_BQ[index]).tolist() if place >= 0]
            if start == stop:
                assert not actual
                continue
            row_parents = np.maximum(parents[start:stop] - start, -1)
            expected = best_path(p_TV[start:stop], token_ids[start:stop], row_parents, rule)
            if expected is not None:
                num_paths += 1
                lengths.add(len(expected))
                assert actual == [start + place for place in expected]
                expected_ids = [
                    *token_ids[actual[1:]],
                    drawn_R[actual[-1]],
                ]  # the last is drawn as ever
                np.testing.assert_array_equal(token_ids_R[np.array(actual)], expected_ids)
    assert num_paths > 150 and len(lengths) > 3


# --- engines, with drafts that a proposer draws from distributions it knows

MODEL = {**LLAMA, "num_hidden_layers": 1}
TOKENS = np.array([17, 40, 41, 66, 90, 133, 200, 251])  # all that requests below may draw
PROMPT, NUM_REQUESTS = [3, 1, 4, 1, 5], 240
NUM_DRAFTS = 5
TREE, CHAIN = (-1, -1, 0, 0, 1), (-1, 0, 1)
SETTINGS = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 96,
    "max_model_len": 128,
    "block_size": 4,
    "num_blocks": 129,
    "largest_shapes": True,
}
SPECULATIVE = {"method": "suffix", "num_speculative_tokens": NUM_DRAFTS, "tree": True}
ENGINE_SAMPLERS: dict[str, dict[str, Any]] = {
    "hot": {"temperature": 1.0},
    "cold, top-k, penalty": {"temperature": 0.7, "top_k": 4, "presence_penalty": 1.2},
}


class Drawing(Proposer):
    """Draws drafts from a distribution of the token before each, without replacement; says so, or
    `says` of which distribution.
    """

    def __init__(
        self, parents: tuple[int, ...], tokens: np.ndarray = TOKENS, *, drawn: bool = True
    ) -> None:
        scores = np.random.default_rng(7).normal(0, 1.0, (257, len(tokens)))
        self.q = (np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)).astype(np.float32)
        self.says = self.q
        self.parents, self.tokens, self.draws = parents, tokens, drawn
        self.num_requested = 0

    def propose(self, request: Request, sequence: Sequence, num_drafts: int) -> Draft | None:
        """Drafts by a function of the request and its tokens, so that it drafts the same again."""
        self.num_requested += 1
        known = sequence.token_ids
        rng = np.random.default_rng([request.seed % 2**32, sequence.sample_index, *known])
        drafts: list[int] = []
        for index, parent in enumerate(self.parents[:num_drafts]):
            before = known[-1] if parent < 0 else drafts[parent]
            siblings = [drafts[other] for other in range(index) if self.parents[other] == parent]
            q = np.where(np.isin(self.tokens, siblings), 0.0, self.q[before].astype(np.float64))
            token_id = (
                rng.choice(self.tokens, p=q / q.sum()) if self.draws else self.tokens[q.argmax()]
            )
            drafts.append(int(token_id))
        draft = Draft(tuple(drafts), self.parents[: len(drafts)])
        if not self.draws:
            return draft
        before = [known[-1] if parent < 0 else drafts[parent] for parent in draft.parents]
        ids = np.tile(self.tokens.astype(np.int32), (len(drafts), 1))
        return draft._replace(q=Candidates(ids, self.says[before]))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tokenizer(random_checkpoint(tmp_path_factory.mktemp("model"), MODEL))


@pytest.fixture(scope="module")
def llm(directory):
    with make_llm(
        directory, speculative_config={**SPECULATIVE, "acceptance": "rejection"}, **SETTINGS
    ) as llm:
        llm.untouched = copy.deepcopy(llm._engine.scheduler)
        yield llm
        invariants(llm)


@pytest.fixture(scope="module")
def log_probabilities(llm):
    """Returns the log probabilities of the eight tokens after none, one and two of them: arrays of
    one, two and three axes.
    """
    without_drafts(llm)
    texts = list(itertools.product(TOKENS.tolist(), repeat=LENGTH))
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
    outputs = llm.generate([[*PROMPT, *text] for text in texts], params, use_tqdm=False)
    values = [
        [
            output.prompt_logprobs[len(PROMPT) + index][token_id].logprob
            for index, token_id in enumerate(text)
        ]
        for text, output in zip(texts, outputs, strict=True)
    ]
    joint = np.array(values).reshape(*[VOCAB] * LENGTH, LENGTH)
    return [
        joint[(slice(None),) * (index + 1) + (0,) * (LENGTH - 1 - index) + (index,)]
        for index in range(LENGTH)
    ]


def distribution_of(
    log_probabilities: list[np.ndarray], presence_penalty: float = 0.0, **sampler: Any
) -> np.ndarray:
    def follows(text: tuple[int, ...]) -> np.ndarray:
        logits = log_probabilities[len(text)][text]
        logits = logits - presence_penalty * np.isin(np.arange(VOCAB), text)
        return probabilities(logits, **sampler)

    return of_texts(follows)


def count_outputs(outputs: list[Any]) -> np.ndarray:
    texts = [each.token_ids for output in outputs for each in output.outputs]
    return count(np.searchsorted(TOKENS, texts))


def requests_for(count: int, first_seed: int = 0, **fields: Any) -> list[SamplingParams]:
    params = SamplingParams(
        max_tokens=LENGTH, ignore_eos=True, allowed_token_ids=TOKENS.tolist(), **fields
    )
    return [dataclasses.replace(params, seed=first_seed + seed) for seed in range(count)]


def texts_of(llm: LLM, params: list[SamplingParams]) -> list[Any]:
    return llm.generate([PROMPT] * len(params), params, use_tqdm=False)


@pytest.mark.parametrize(
    ("kind", "sampler"),
    [
        ("chain", "hot"),
        pytest.param("tree", "hot", marks=pytest.mark.sweep),
        ("tree", "cold, top-k, penalty"),
        ("tree, chosen", "cold, top-k, penalty"),
    ],
)
def test_texts_follow_the_distribution(kind, sampler, llm, log_probabilities):
    draft_with(
        llm._engine, Drawing(CHAIN if kind == "chain" else TREE, drawn=kind != "tree, chosen")
    )
    before = llm.stats()["spec_decode_num_accepted_tokens_total"]
    counts = count_outputs(
        texts_of(llm, requests_for(NUM_REQUESTS, n=4, **ENGINE_SAMPLERS[sampler]))
    )
    assert counts.sum() == NUM_REQUESTS * 4
    assert abs(z_score(counts, distribution_of(log_probabilities, **ENGINE_SAMPLERS[sampler]))) < 4
    assert llm.stats()["spec_decode_num_accepted_tokens_total"] - before > 36


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory):
    """Makes a model of the opinion that one of the eight tokens mostly comes next."""
    tensors = random_tensors(MODEL, seed=5)
    tensors["lm_head.weight"] *= np.where(np.isin(np.arange(257), TOKENS), 2.0, 0.0)[
        :, None
    ].astype(np.float32)
    directory = random_checkpoint(tmp_path_factory.mktemp("draft"), MODEL, seed=5)
    write_tensors(directory, tensors)
    return directory


@pytest.mark.parametrize("sampler", few(ENGINE_SAMPLERS, ["cold, top-k, penalty"]))
def test_drafts_that_a_model_draws_change_no_distribution(sampler, drawing, log_probabilities):
    before = drawing.stats()["spec_decode_num_accepted_tokens_total"]
    counts = count_outputs(
        texts_of(drawing, requests_for(NUM_REQUESTS, n=4, **ENGINE_SAMPLERS[sampler]))
    )
    assert abs(z_score(counts, distribution_of(log_probabilities, **ENGINE_SAMPLERS[sampler]))) < 4
    assert drawing.stats()["spec_decode_num_accepted_tokens_total"] - before > 50


@pytest.mark.sweep  # a proposer that does so: below
def test_a_model_that_draws_from_something_else_shows(
    directory, draft_model, log_probabilities, monkeypatch
):
    """A model that draws from another distribution than it says changes the texts."""
    real = growing.draw_draft

    def lie(*arguments: Any, **options: Any) -> Any:
        token_ids, drawn_from = real(*arguments, **options)
        return token_ids, drawn_from._replace(
            q_RW=drawn_from.q_RW.at[:, :8].set(drawn_from.q_RW[:, 7::-1])
        )

    monkeypatch.setattr(growing, "draw_draft", lie)
    monkeypatch.setattr(Candidates, "check", lambda *_: None)
    with start_drawing(directory, draft_model) as llm:
        counts = count_outputs(texts_of(llm, requests_for(400, n=4, temperature=1.0)))
    assert z_score(counts, distribution_of(log_probabilities, temperature=1.0)) > 10


def start_drawing(directory: Path, draft_model: Path) -> LLM:
    config = {
        "method": "draft_model",
        "model": str(draft_model),
        "num_speculative_tokens": 2,
        "acceptance": "rejection",
    }
    return make_llm(directory, speculative_config=config, **SETTINGS)


@pytest.fixture(scope="module")
def drawing(directory, draft_model):
    with start_drawing(directory, draft_model) as llm:
        yield llm


def test_a_proposer_that_lies_shows(llm, log_probabilities):
    """A proposer that lies about its q changes the distribution; one that says nothing does not:
    see `Draft`.
    """
    liar = Drawing(CHAIN)
    liar.says = np.roll(liar.q, 1, axis=1)
    draft_with(llm._engine, liar)
    assert (
        z_score(
            count_outputs(texts_of(llm, requests_for(NUM_REQUESTS, n=4))),
            distribution_of(log_probabilities),
        )
        > 10
    )
    silent = Drawing(CHAIN)
    real = silent.propose
    silent.propose = lambda *arguments: real(*arguments)._replace(q=None)  # type: ignore[method-assign,union-attr]
    draft_with(llm._engine, silent)
    assert (
        abs(
            z_score(
                count_outputs(texts_of(llm, requests_for(NUM_REQUESTS, n=4))),
                distribution_of(log_probabilities),
            )
        )
        < 4
    )


def test_preemption_changes_no_distribution(llm, log_probabilities):
    """Every third step the newest request is preempted, with the samples that it was forked into;
    the prompt is found in the cache.
    """
    draft_with(llm._engine, Drawing(TREE))
    engine, before = llm._engine, llm.stats()
    reporters = [
        engine.add(f"{index}", engine.prepare(None, PROMPT, params))
        for index, params in enumerate(requests_for(NUM_REQUESTS, 5000, n=2))
    ]
    for number in itertools.count():
        if not engine.has_unfinished:
            break
        if number % 3 == 2:
            engine.scheduler.give_way()
        engine.step()
    counts = count_outputs([reporter.whole() for reporter in reporters])
    assert abs(z_score(counts, distribution_of(log_probabilities))) < 4
    after = llm.stats()
    assert after["prefix_cache_hits_total"] - before["prefix_cache_hits_total"] > 30
    num_preemptions, num_before = (
        sum(each["num_preemptions_total"].values()) for each in (after, before)
    )
    assert num_preemptions - num_before > 30


def test_greedy_texts_are_those_without_drafts(llm):
    rng = np.random.default_rng(3)
    prompts = [rng.integers(1, 100, int(length)).tolist() for length in rng.integers(1, 40, 12)]
    params = SamplingParams(
        temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2, repetition_penalty=1.2
    )
    without_drafts(llm)
    plain = [output.outputs for output in llm.generate(prompts, params, use_tqdm=False)]
    for proposer in (Drawing(TREE), Guesses(), Knowing(prompts, plain)):
        draft_with(llm._engine, proposer)
        assert [output.outputs for output in llm.generate(prompts, params, use_tqdm=False)] == plain


class Knowing(Proposer):
    """Drafts what follows, beside something wrong."""

    def __init__(self, prompts: list[list[int]], outputs: list[Any]) -> None:
        self.texts = {
            tuple(p): [*p, *each[0].token_ids] for p, each in zip(prompts, outputs, strict=True)
        }

    def propose(self, request: Request, sequence: Sequence, num_drafts: int) -> Draft | None:
        known = len(sequence.token_ids)
        right = self.texts[request.prompt_token_ids][known : known + 2]
        wrong = [(token_id + 1) % 257 for token_id in right]
        return Draft(
            (*wrong[:1], *right[:1], *wrong[1:], *right[1:]), (-1, -1, 1, 1)[: 2 * len(right)]
        )


def test_a_text_is_a_function_of_its_seed_and_its_drafts(llm):
    """Neither its neighbours nor what happens to them changes a text."""
    # that begin together: no step in between has a prompt and no drafts
    prompts = [[9, 8, 7, seed] for seed in range(2)]
    params = [
        SamplingParams(seed=seed, max_tokens=40, ignore_eos=True, logprobs=1) for seed in range(2)
    ]
    draft_with(llm._engine, Drawing(TREE))
    together = [output.outputs for output in llm.generate(prompts, params, use_tqdm=False)]
    alone = [
        llm.generate(prompt, param, use_tqdm=False)[0].outputs
        for prompt, param in zip(prompts, params, strict=True)
    ]
    assert together == alone
    without_drafts(llm)
    assert together != [output.outputs for output in llm.generate(prompts, params, use_tqdm=False)]


def test_every_parameter_holds(llm):
    """Sampled requests with drafts from everything and of nonsense get what they ask for, and the
    log probabilities of what came out.
    """
    letters = np.sort(
        [llm.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abct01 "]
    )
    base = {"temperature": 1.3, "max_tokens": 30, "ignore_eos": True, "logprobs": 2}
    favoured = {int(token_id): 6.0 for token_id in letters}
    requests = {
        "grammar": {
            **base,
            "structured_outputs": {"regex": "(ab|ba|cat){2,6}( (10|00))+"},
            "ignore_eos": False,
        },
        "stop": {**base, "stop": ["ab", "10"], "logit_bias": favoured},
        "bad words": {**base, "bad_words": ["a", "ab", "10"], "logit_bias": favoured},
        "min tokens": {
            **base,
            "ignore_eos": False,
            "min_tokens": 9,
            "logit_bias": {0: 5.0, **favoured},
        },
        "allowed": {
            **base,
            "allowed_token_ids": letters.tolist(),
            "min_p": 0.01,
            "frequency_penalty": 0.5,
            "n": 2,
        },
    }
    for proposer in (Drawing(TREE, letters), Drawing(CHAIN, letters), Guesses()):
        draft_with(llm._engine, proposer)
        params = [
            SamplingParams(seed=seed, **each) for each in requests.values() for seed in range(4)
        ]
        prompts = [[5, 6, 7 + index] for index in range(len(params))]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for (name, _), output in zip(itertools.product(requests, range(4)), outputs, strict=True):
            for text in output.outputs:
                if name == "grammar":
                    whole = text.finish_reason == "stop"
                    assert re.fullmatch("(ab|ba|cat){2,6}( (10|00))+", text.text) or not whole
                elif name == "stop":
                    assert not re.search("ab|10", text.text) and (text.finish_reason == "stop") == (
                        text.stop_reason is not None
                    )
                elif name == "bad words":
                    for word in ("a", "ab", "10"):
                        ids = llm.tokenizer.encode(word, add_special_tokens=False)
                        assert all(text.token_ids[at : at + len(ids)] != ids for at in range(30))
                elif name == "min tokens":
                    assert (
                        text.token_ids.index(0) >= 9
                        if 0 in text.token_ids
                        else len(text.token_ids) == 30
                    )
                else:
                    assert (
                        set(text.token_ids) <= set(letters.tolist()) and len(text.token_ids) == 30
                    )
        check_scores(llm, outputs)


def check_scores(llm: LLM, outputs: list[Any]) -> None:
    """Checks that the log probabilities that came with texts are those of the texts as prompts."""
    whole = [(output, text) for output in outputs for text in output.outputs]
    prompts = [[*output.prompt_token_ids, *text.token_ids] for output, text in whole]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=2)
    for (output, text), again in zip(
        whole, llm.generate(prompts, params, use_tqdm=False), strict=True
    ):
        for entries, expected in zip(
            text.logprobs, again.prompt_logprobs[len(output.prompt_token_ids) :], strict=True
        ):
            assert {t: entry.rank for t, entry in entries.items()} == {
                t: entry.rank for t, entry in expected.items()
            }
            for token_id, entry in entries.items():
                assert abs(entry.logprob - expected[token_id].logprob) < 1e-4


def test_a_log_of_drafts_that_were_drawn_is_replayed(llm, tmp_path):
    path = tmp_path / "a.jsonl"
    driver = llm._driver
    tokenizer = llm.tokenizer
    with open_log(llm, path) as other:
        draft_with(other, Drawing(TREE))
        texts_of(llm, requests_for(12, n=2, logprobs=1))
    llm._driver, llm.tokenizer = driver, tokenizer
    report = replay_log(llm, path)
    assert report.difference is report.ending is None and report.num_steps == len(results_of(path))
    (first, *_) = [record["drafts"] for record in records_of(path) if "drafts" in record]
    assert all(len(draft) == 4 and len(draft[3]) == len(draft[1]) for draft in first)


# --- typical acceptance


@pytest.fixture
def lossy(directory, caplog):
    # one request runs in other shapes than two
    settings = {**SETTINGS, "max_num_seqs": 2, "largest_shapes": False}
    typical = {**SPECULATIVE, "acceptance": "typical"}
    with (
        caplog.at_level(logging.WARNING),
        make_llm(directory, speculative_config=typical, **settings) as llm,
    ):
        yield llm
        invariants(llm)


def test_typical_acceptance_is_announced(lossy, caplog):
    messages = [record.getMessage() for record in caplog.get_records("setup")]
    assert any("acceptance 'typical' is lossy" in message for message in messages)


@pytest.mark.sweep  # what a step accepts: above
def test_typical_acceptance_changes_sampled_texts_alone(lossy):
    test_greedy_texts_are_those_without_drafts(lossy)
    test_a_text_is_a_function_of_its_seed_and_its_drafts(lossy)


@pytest.mark.sweep  # with acceptance by rejection: above
def test_every_parameter_holds_with_typical_acceptance(lossy):
    test_every_parameter_holds(lossy)
