"""Writes text with the model itself, from which drafters learn.

Drafters shall guess the model and not the novels. Every row of a batch has a start, a few tokens
drawn at temperature 1, so that no two rows are alike, and then a temperature of its own.
"""

import functools
import math
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from tools.lab.demo_model import tales
from tools.lab.demo_model.model import (
    ModelSpec,
    Params,
    feed_forward,
    layer_params,
    rms_norm,
    rope_tables,
    rotate,
)
from tools.lab.demo_model.tokenizer import END_OF_TEXT_ID

ROWS = 128
START_TOKENS = 24  # the most tokens of a start
FREE_TOKENS = 16  # tokens drawn at temperature 1 after a start
TEMPERATURES = (0.2, 0.7, 1.0)  # each for a third of the rows; the first is nearly greedy

Caches = list[tuple[jax.Array, jax.Array]]  # for each layer, keys and values [B, S, K, H]


def _decode_layer(
    spec: ModelSpec,
    p: Params,
    x_BD: jax.Array,
    cache: tuple[jax.Array, jax.Array],
    place: jax.Array,
    rope: Any,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Computes one token of each row in a layer, with the keys and values of those before it."""
    b, groups = x_BD.shape[0], spec.heads // spec.kv_heads
    y_BD = rms_norm(x_BD, p["input_norm"], spec.norm_epsilon)
    q, k, v = ((y_BD @ p[f"{part}_proj"]).reshape(b, 1, -1, spec.head_dim) for part in "qkv")
    grow = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=place, axis=1)
    k, v = grow(cache[0], rotate(k, *rope)), grow(cache[1], v)
    q = rotate(q, *rope).reshape(b, spec.kv_heads, groups, -1) / math.sqrt(spec.head_dim)
    scores = jnp.einsum("bkgh,bskh->bkgs", q, k)
    weights = jax.nn.softmax(jnp.where(jnp.arange(k.shape[1]) <= place, scores, -1e30), -1)
    x_BD = x_BD + jnp.einsum("bkgs,bskh->bkgh", weights, v).reshape(b, -1) @ p["o_proj"]
    return x_BD + feed_forward(p, rms_norm(x_BD, p["post_norm"], spec.norm_epsilon)), (k, v)


@functools.partial(jax.jit, static_argnums=0)
def continue_rows(
    spec: ModelSpec,
    params: Params,
    starts_BP: jax.Array,
    lengths_B: jax.Array,
    temperatures_BT: jax.Array,
    key: jax.Array,
) -> jax.Array:
    """Returns rows of as many tokens as there are temperatures.

    A row is its start, cut to its length, and the model's continuation. Token t + 1 of a row is
    drawn with its temperature t; at most 1e-4 counts as greedy.
    """
    rows, length = temperatures_BT.shape
    starts_BT = jnp.pad(starts_BP, ((0, 0), (0, max(0, length - starts_BP.shape[1]))))
    cos_TH, sin_TH = rope_tables(spec, length)
    empty = jnp.zeros((rows, length, spec.kv_heads, spec.head_dim))
    caches: Caches = [(empty, empty)] * spec.layers

    def step(
        carry: tuple[jax.Array, Caches], place: jax.Array
    ) -> tuple[tuple[jax.Array, Caches], jax.Array]:
        drawn_B, caches = carry
        token_B = jnp.where(place < lengths_B, starts_BT[:, place], drawn_B)
        x_BD, grown = params["embed"][token_B], []
        rope = cos_TH[place][None], sin_TH[place][None]
        for layer in range(spec.layers):
            x_BD, cache = _decode_layer(
                spec, layer_params(params, layer), x_BD, caches[layer], place, rope
            )
            grown.append(cache)
        logits_BV = rms_norm(x_BD, params["norm"], spec.norm_epsilon) @ params["embed"].T
        heat_B = temperatures_BT[:, place]
        noise_BV = jax.random.gumbel(jax.random.fold_in(key, place), logits_BV.shape)
        noise_BV = jnp.where(heat_B[:, None] > 1e-4, noise_BV * heat_B[:, None], 0.0)
        return (jnp.argmax(logits_BV + noise_BV, -1).astype(jnp.int32), grown), token_B

    _, tokens_TB = jax.lax.scan(step, (jnp.zeros(rows, jnp.int32), caches), jnp.arange(length))
    return tokens_TB.T


def starts(
    tokenizer: Tokenizer, earlier: np.ndarray | None, rng: random.Random
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a batch of starts and their lengths.

    They are openings of tales, the beginning of a text, and pieces of what was written earlier.
    """
    rows = []
    for row in range(ROWS):
        kind = ("opening", "beginning", "piece")[row // len(TEMPERATURES) % 3]
        if kind == "piece" and earlier is not None:
            begin = rng.randrange(earlier.shape[1] - START_TOKENS)
            rows.append(earlier[rng.randrange(len(earlier)), begin : begin + START_TOKENS].tolist())
        elif kind == "opening":
            ids = tokenizer.encode(tales.tale(rng)).ids
            rows.append(ids[: rng.randint(2, START_TOKENS)])
        else:
            rows.append([END_OF_TEXT_ID])
    padded = np.zeros((ROWS, START_TOKENS), np.int32)
    for row, ids in enumerate(rows):
        padded[row, : len(ids)] = ids
    return padded, np.array([len(ids) for ids in rows], np.int32)


def temperature_table(lengths_B: np.ndarray, temperatures_B: np.ndarray, length: int) -> np.ndarray:
    """Returns the temperature of every draw.

    It is 1 for the first few after a start, then the row's own.
    """
    free_BT = np.arange(length) < (lengths_B + FREE_TOKENS)[:, None]
    return np.where(free_BT, 1.0, temperatures_B[:, None]).astype(np.float32)


def write(
    spec: ModelSpec, params: Params, tokenizer: Tokenizer, tokens: int, seed: int
) -> np.ndarray:
    """Returns at least this many tokens, in rows of the model's longest length.

    The same seed writes the same.
    """
    rng, key = random.Random(seed), jax.random.key(seed)
    batches: list[np.ndarray] = []
    temperatures_B = np.resize(np.array(TEMPERATURES), ROWS)
    for index in tqdm(
        range(math.ceil(tokens / (ROWS * spec.max_positions))), desc="writing", unit="batch"
    ):
        starts_BP, lengths_B = starts(tokenizer, batches[-1] if batches else None, rng)
        table_BT = temperature_table(lengths_B, temperatures_B, spec.max_positions)
        drawn = continue_rows(
            spec, params, starts_BP, lengths_B, table_BT, jax.random.fold_in(key, index)
        )
        batches.append(np.asarray(drawn).astype(np.uint16))
    return np.concatenate(batches)
