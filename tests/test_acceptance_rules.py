"""The rules of acceptance as functions of the device: on a Markov chain of eight tokens, whose distribution is known in float64.

Rejection changes no distribution, whatever is drafted; each test of that is also run with mistakes planted, which it must see. Typical
acceptance, which does change it, is the rule that its authors wrote down.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage import SamplingParams
from jaxpage.device import acceptance
from jaxpage.device.acceptance import decide
from jaxpage.device.inputs.buckets import Bucket
from jaxpage.device.inputs.step_inputs import Flags, ProcessorInputs, StepInputs, processor_shapes
from jaxpage.device.sampler import Stream, noise_key
from jaxpage.settings.draft_settings import AcceptanceRule
from jaxpage.shapes import NOT_FINITE, NOTHING_ALLOWED
from tests.support.distributions import probabilities, z_score
from tests.support.reference_sampling import processed
from tests.support.sweeps import few

VOCAB, START, LENGTH, NUM_GENERATIONS = 8, 2, 3, 5_000
REJECTION, TYPICAL = AcceptanceRule("rejection"), AcceptanceRule("typical")
rng = np.random.default_rng(11)
TABLE = rng.normal(0, 1.2, (VOCAB, VOCAB)).astype(np.float32)  # logits of what follows each token
ALLOWED = rng.random((VOCAB, VOCAB)) < 0.6  # by a grammar, behind each token
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
    """Of the drafts of a row: parents as in `Draft`, and how they are made."""

    parents: tuple[int, ...]
    drawn: bool = True  # from q; otherwise the likeliest of q
    replaced: bool = (
        # drafts behind the same token are drawn independently: those that differ are as if without
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
    """Of each token of a row: how deep it stands, and which of those behind its parent it is."""
    depths, ranks = [0], [0]
    for place, parent in enumerate(parents):
        depths.append(depths[1 + parent] + 1)
        ranks.append(list(parents[:place]).count(parent))
    return depths, ranks


def drafted(
    shape: Shape, known_B: jax.Array, position_B: jax.Array, seed_B: jax.Array
) -> jax.Array:
    """Token ids [B, Q] of each row: a known token and its drafts."""
    _, ranks = depths_and_ranks(shape.parents)
    depths, _ = depths_and_ranks(shape.parents)
    columns = [known_B]
    for place, parent in enumerate(shape.parents, start=1):
        before_B = columns[1 + parent]

        def draw(
            before: jax.Array,
            position: jax.Array,
            seed: jax.Array,
            place: int = place,
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
    """What the step is told of each token: [T, W]."""
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


def step_inputs(
    token_ids_BQ: jax.Array,
    parents: tuple[int, ...],
    position_B: jax.Array,
    seed_B: jax.Array,
    **fields: Any,
) -> StepInputs:
    """Rows of the same tree, one behind the other; what `fields` leaves out is neutral."""
    num_rows, num_tokens = token_ids_BQ.shape
    total = num_rows * num_tokens
    depths, _ = depths_and_ranks(parents)
    start_B = jnp.arange(num_rows) * num_tokens
    parents_BQ = jnp.where(
        jnp.arange(num_tokens) > 0, start_B[:, None] + jnp.array([0, *(1 + p for p in parents)]), -1
    )
    given: dict[str, Any] = {name: jnp.zeros(total) for name in StepInputs._fields}
    given |= {
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
    return StepInputs(**{**given, **fields})


def neutral(num_draws: int) -> ProcessorInputs:
    shapes = processor_shapes(num_draws, vocab_size=VOCAB, context=1 + LENGTH + 8)
    return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)


def processor_inputs_of(
    known_BC: jax.Array, token_ids_BQ: jax.Array, parents: tuple[int, ...]
) -> ProcessorInputs:
    """The grammar's mask behind each token, and its history: what is known, and the drafts that lead to it."""
    num_rows, num_tokens = token_ids_BQ.shape
    words_V = jnp.array(
        [sum(1 << token for token in np.flatnonzero(row)) for row in ALLOWED], jnp.uint32
    )
    histories = []
    for place in range(num_tokens):
        path = []
        while place:
            path.append(token_ids_BQ[:, place])
            place = 1 + parents[place - 1]
        rest = [jnp.full(num_rows, VOCAB)] * (LENGTH + 8 - LENGTH - len(path))
        histories.append(jnp.concatenate([known_BC, jnp.stack([*path, *rest], axis=1)], axis=1))
    history_RC = jnp.stack(histories, axis=1).reshape(num_rows * num_tokens, -1)
    return neutral(num_rows * num_tokens)._replace(
        mask_RU=words_V[token_ids_BQ.reshape(-1)][:, None], history_RC=history_RC
    )


class Texts(NamedTuple):
    """As far as they have come: the first token is given, the rest are drawn."""

    token_ids_BC: jax.Array  # padded with V
    length_B: jax.Array


def step_of(shape: Shape, rule: AcceptanceRule) -> Any:
    """A jitted step of all texts, by a sampler's settings. Returns them and how many drafts were accepted."""
    parents, rows = shape.parents, NUM_GENERATIONS
    num_tokens = 1 + len(parents)
    # of a text, with what the last step has too many
    total, width = rows * num_tokens, 1 + LENGTH + num_tokens
    bucket = Bucket(total, rows, num_tokens, verifies=True, trees=True, q_width=WIDTH + 2)

    @jax.jit
    def step(given: Texts, sampler: dict[str, Any]) -> tuple[Texts, jax.Array]:
        text_BC, length_B = given
        text_BC = jnp.pad(text_BC, ((0, 0), (0, width - text_BC.shape[1])), constant_values=VOCAB)
        seed_B = jnp.arange(rows)
        known_B = jnp.take_along_axis(text_BC, length_B[:, None] - 1, axis=1)[:, 0]
        token_ids_BQ = drafted(shape, known_B, length_B, seed_B)
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
        places_BQ = jnp.where(paths_BQ >= 0, length_B[:, None] + jnp.arange(num_tokens), width)
        text_BC = text_BC.at[jnp.arange(rows)[:, None], places_BQ].set(
            token_ids_R[paths_BQ], mode="drop"
        )
        return Texts(
            text_BC[:, : 1 + LENGTH], jnp.minimum(length_B + counts_B, 1 + LENGTH)
        ), counts_B - 1

    return step


@functools.cache
def rejecting(shape: str) -> Any:
    return step_of(SHAPES[shape], REJECTION)


def begun(start_B: Any = START) -> Texts:
    token_ids_BC = jnp.full((NUM_GENERATIONS, 1 + LENGTH), VOCAB).at[:, 0].set(start_B)
    return Texts(token_ids_BC, jnp.ones(NUM_GENERATIONS, jnp.int32))


def settings_of(sampler: dict[str, Any]) -> dict[str, Any]:
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "grammar": False}
    settings = {name: np.float32(value) for name, value in {**neutral, **sampler}.items()}
    return settings | {name: np.int32(settings[name]) for name in ("top_k", "grammar")}


def generated(step: Any, sampler: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """How often each text of LENGTH tokens came out, and of each text how many drafts its first step accepted."""
    settings = settings_of(sampler)
    texts, num_accepted_B = step(begun(), settings)
    for _ in range(LENGTH - 1):
        texts, _ = step(texts, settings)
    return counted(texts.token_ids_BC[:, 1:]), np.asarray(num_accepted_B)


def counted(texts_BL: Any) -> np.ndarray:
    counts = np.zeros((VOCAB,) * LENGTH, np.int64)
    np.add.at(counts, tuple(np.asarray(texts_BL).T), 1)
    return counts


def distribution(
    output: tuple[int, ...], sampler: dict[str, Any], start: int = START
) -> np.ndarray:
    """Of what follows, in float64, from a sampler that is not ours."""
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
def expected(name: str) -> np.ndarray:
    """Of each text of LENGTH tokens."""
    joint = np.ones((VOCAB,) * LENGTH)
    for place in range(LENGTH):
        for output in itertools.product(range(VOCAB), repeat=place):
            joint[output] *= distribution(output, SAMPLERS[name]).reshape(
                -1, *[1] * (LENGTH - 1 - place)
            )
    return joint


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
            *[(shape, "temperature 1") for shape in ("chain", "tree", "tree, chosen")],
            *[("tree", sampler) for sampler in ("top-k 3", "repetition penalty", "grammar")],
            *[("chain", sampler) for sampler in ("temperature 0.7", "top-p 0.9", "min-p")],
            *[("chain, chosen", "top-k 3"), ("tree, chosen", "repetition penalty")],
        ],
    ),
)
def test_rejection_changes_no_distribution(shape, sampler):
    counts, num_accepted_B = generated(rejecting(shape), SAMPLERS[sampler])
    assert counts.sum() == NUM_GENERATIONS and num_accepted_B.max() > 0
    assert abs(z_score(counts, expected(sampler))) < 4


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

        def forgetful(place, walk, *rest):
            return real(place, walk._replace(tried_V=jnp.zeros(VOCAB, bool)), *rest)

        monkeypatch.setattr(acceptance, "_try", forgetful)
    counts, _ = generated(step_of(*MISTAKES[mistake]), SAMPLERS["temperature 1"])
    assert z_score(counts, expected("temperature 1")) > 4  # so the test above fails


@pytest.mark.parametrize("sampler", ["temperature 1", "top-k 3", "grammar"])
@pytest.mark.parametrize("shape", ["chain", "chain, chosen"])
def test_as_many_drafts_are_accepted_as_can_be(shape, sampler):
    """Of drafts that are drawn from q the sum of min(p, q), of a chosen one its p: behind every token."""
    start_B = np.arange(NUM_GENERATIONS) % VOCAB
    _, num_accepted_B = rejecting(shape)(begun(start_B), settings_of(SAMPLERS[sampler]))
    for start in range(VOCAB):
        p_V, q_V = distribution((), SAMPLERS[sampler], start), np.zeros(VOCAB)
        q_V[Q_IDS[start]] = Q[start]
        share = np.minimum(p_V, q_V).sum() if SHAPES[shape].drawn else p_V[Q_IDS[start, 0]]
        accepted_B = np.asarray(num_accepted_B)[start_B == start] > 0
        deviation = np.sqrt(max(share * (1 - share), 1e-9) / len(accepted_B))
        assert abs(accepted_B.mean() - share) < 4 * deviation


# --- greedy rows, and rows of which nothing can be drawn


def random_rows(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Trees of drafts with tokens that are there twice: token ids and parents [T], and where rows start [B + 1]; the last are padding."""
    chance = np.random.default_rng(seed)
    lengths = chance.integers(1, MOST + 1, ROWS)
    lengths[-2:] = 0
    starts = np.concatenate([[0], np.cumsum(lengths)])
    parents = np.full(ROWS * MOST, -1)
    for start, stop in itertools.pairwise(starts):
        parents[start + 1 : stop] = [
            chance.integers(max(start, place - 3), place) for place in range(start + 1, stop)
        ]
    return chance.integers(0, VOCAB, len(parents)), parents, starts


def inputs_of(
    token_ids_T: np.ndarray, parents_T: np.ndarray, query_start: np.ndarray, **fields: Any
) -> StepInputs:
    """Of drafts that were chosen."""
    total = len(token_ids_T)
    chosen_TW = np.zeros((total, 3), np.float32)
    chosen_TW[:, 0] = 1
    given = step_inputs(
        jnp.asarray(token_ids_T)[:, None], (), jnp.arange(total), jnp.arange(total)
    )._asdict()
    given |= {"parents_T": parents_T, "query_start": query_start, "q_TW": chosen_TW}
    given |= {"q_ids_TW": np.where(chosen_TW > 0, token_ids_T[:, None], -1), **fields}
    return StepInputs(**jax.tree.map(jnp.asarray, given))


ROWS, MOST = 12, 6


@functools.partial(jax.jit, static_argnames=("rule", "by_row"))
def decided(
    logits_RV: Any,
    inputs: StepInputs,
    rule: AcceptanceRule,
    by_row: bool,
    processor_inputs: Any = None,
) -> Any:
    bucket = Bucket(ROWS * MOST, ROWS, MOST, verifies=True, trees=True, q_width=3)
    return decide(
        logits_RV, inputs, processor_inputs or neutral(ROWS * MOST), bucket, rule, by_row=by_row
    )


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("rule", [REJECTION, TYPICAL], ids=["rejection", "typical"])
def test_every_rule_gives_the_greedy_text(rule, by_row):
    for seed in range(8):
        logits_RV = (
            np.random.default_rng(seed)
            .normal(0, 1, (ROWS * MOST, VOCAB))
            .astype(np.float32)
            .round(1)
        )
        inputs = inputs_of(*random_rows(seed))
        drawn_R, wanted_BQ = decided(logits_RV, inputs, AcceptanceRule(), by_row)
        token_ids_R, paths_BQ = decided(logits_RV, inputs, rule, by_row)
        np.testing.assert_array_equal(paths_BQ, wanted_BQ)
        on_a_path = paths_BQ[paths_BQ >= 0]
        np.testing.assert_array_equal(token_ids_R[on_a_path], drawn_R[on_a_path])


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("rule", [REJECTION, TYPICAL], ids=["rejection", "typical"])
def test_where_nothing_can_be_drawn_a_path_ends(rule, by_row):
    """Greedy or not: logits that are no numbers behind a right draft, or none at all, and a mask that forbids all of them."""
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
    token_ids_R, paths_BQ = decided(
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
            "temperature_R": np.ones(ROWS * MOST, np.float32),
            "flags": np.eye(6, dtype=np.int32)[Flags.RANDOM],
        }
        inputs = inputs_of(token_ids, parents, starts, **fields)
        logits_RV = (
            np.random.default_rng(seed).normal(0, 1, (ROWS * MOST, VOCAB)).astype(np.float32)
        )
        drawn_R, _ = decided(logits_RV, inputs, AcceptanceRule(), False)
        token_ids_R, paths_BQ = decided(logits_RV, inputs, rule, False)
        ends = np.asarray(paths_BQ).max(axis=1)[:-2]  # the last two rows are padding
        bare = ends[~np.isin(ends, parents)]
        np.testing.assert_array_equal(token_ids_R[bare], drawn_R[bare])
        num_bare += len(bare)
    assert num_bare > 9


def test_texts_are_the_same_by_row_and_together():
    """And another seed gives others."""
    rows = random_rows(3)
    logits_RV = np.random.default_rng(3).normal(0, 1, (ROWS * MOST, VOCAB)).astype(np.float32)
    fields = {"temperature_R": np.ones(ROWS * MOST, np.float32)}
    one, two = (
        decided(logits_RV, inputs_of(*rows, **fields), REJECTION, by_row)
        for by_row in (True, False)
    )
    jax.tree.map(np.testing.assert_array_equal, one, two)
    fields["sample_index_R"] = np.ones(ROWS * MOST, np.int32)
    other = decided(logits_RV, inputs_of(*rows, **fields), REJECTION, True)
    assert (np.asarray(other[1]) != np.asarray(one[1])).any()


# --- typical acceptance


def best_path(
    p_TV: np.ndarray, tokens: np.ndarray, parents: np.ndarray, rule: AcceptanceRule
) -> list[int] | None:
    """Of one row, as Medusa's `evaluate_posterior` finds it: of all paths from the root to a leaf. None: rounding could decide."""
    leaves = [place for place in range(len(tokens)) if place not in parents]
    found: list[tuple[int, float, list[int]]] = []
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
        found.append((length, likelihood, path[: 1 + length]))
    longest = max(length for length, _, _ in found)
    paths = [(likelihood, path) for length, likelihood, path in found if length == longest]
    likeliest = max(likelihood for likelihood, _ in paths)
    close = {tuple(tokens[path]) for likelihood, path in paths if likeliest - likelihood < 1e-5}
    return (
        min(path for likelihood, path in paths if likeliest - likelihood < 1e-5)
        if len(close) == 1
        else None
    )


def test_typical_acceptance_is_that_of_medusa():
    rule = AcceptanceRule("typical", 0.3, 0.09)  # other numbers than the usual ones
    num_paths, lengths = 0, set()
    for seed in range(40):
        token_ids, parents, starts = random_rows(seed)
        chance = np.random.default_rng(seed)
        logits_RV = chance.normal(0, 1.0, (len(token_ids), VOCAB)).astype(np.float32)
        temperature_R = chance.choice([0.3, 0.7, 1.2], len(token_ids)).astype(np.float32)
        fields = {"temperature_R": temperature_R, "top_k_R": np.full(len(token_ids), 6, np.int32)}
        flags = np.eye(6, dtype=np.int32)[Flags.RANDOM]
        inputs = inputs_of(token_ids, parents, starts, flags=flags, **fields)
        token_ids_R, paths_BQ = decided(logits_RV, inputs, rule, False)
        drawn_R, _ = decided(logits_RV, inputs, AcceptanceRule(), False)
        p_TV = np.stack(
            [probabilities(*row, top_k=6) for row in zip(logits_RV, temperature_R, strict=True)]
        )
        for index, (start, stop) in enumerate(itertools.pairwise(starts)):
            got = [place for place in np.asarray(paths_BQ[index]).tolist() if place >= 0]
            if start == stop:
                assert not got
                continue
            own = np.maximum(parents[start:stop] - start, -1)
            wanted = best_path(p_TV[start:stop], token_ids[start:stop], own, rule)
            if wanted is not None:
                num_paths += 1
                lengths.add(len(wanted))
                assert got == [start + place for place in wanted]
                behind = [*token_ids[got[1:]], drawn_R[got[-1]]]  # the last is drawn as ever
                np.testing.assert_array_equal(token_ids_R[np.array(got)], behind)
    assert num_paths > 150 and len(lengths) > 3
