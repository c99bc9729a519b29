"""Kernels whose sums have one order for any number of rows, in the interpreter with the order of
sums of a tensor core.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpage.device.attention import make_layer_kernels
from jaxpage.device.hardware.backends import Backend
from jaxpage.layers.experts import ExpertsSpec
from jaxpage.layers.linear import Linear, LinearSpec, Part
from jaxpage.layers.matmul import matmul_by_head
from jaxpage.layers.mlp import GatedMLP
from jaxpage.layers.routing import Groups, Routing
from jaxpage.layers.trace_scope import LayerKernels, TraceScope
from jaxpage.models.base import abstract
from jaxpage.models.parts.experts import make_experts
from jaxpage.models.parts.names import QWEN_EXPERTS
from pallas_kernels import paged_attention, rotate_and_write
from pallas_kernels.quantized_matmul import batch_invariant_matmul, matmul_and_sums
from pallas_kernels.quantized_weight import QuantizedWeight
from pallas_kernels.quantized_weight import numbers as weight_numbers
from pallas_kernels.sets import triton
from pallas_kernels.tiles import Shape
from pallas_kernels.triton import backend, matmul, matmul_tiles, rows, state
from tests.support.attention import make_case, oracle
from tests.support.sweeps import few
from tests.support.tensor_core import dot

NUM_OUT, NUM_IN = 40, 1024  # four segments
ROUTINGS = {
    "softmax": Routing(4, 2, normalized=True),
    "sigmoid": Routing(4, 2, normalized=True, sigmoid=True, corrected=True, factor=2.5),
    "close": Routing(4, 2, normalized=False, jitter=0.1),
    "groups": Routing(8, 2, normalized=False, corrected=True, groups=Groups(4, 2, 2)),
}


@pytest.fixture(autouse=True)
def order_of_a_tensor_core(monkeypatch):
    """Forgets kernels that were traced with another `dot`."""
    caches = (matmul._sum_segments, triton._attend)
    monkeypatch.setattr(backend, "dot", dot)
    for function in caches:
        function.clear_cache()
    yield
    for function in caches:
        function.clear_cache()


def bits(x: jax.Array) -> np.ndarray:
    return np.asarray(x).view(np.uint16 if x.dtype.itemsize == 2 else np.uint32)


def numbers(seed: int, *shape: int, dtype: str = "bfloat16") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def matmul_of(x_TI: jax.Array, weight: jax.Array | QuantizedWeight, *counts, **options):
    return batch_invariant_matmul(
        x_TI, weight, *counts, backend="triton", interpret=True, **options
    )


def int4_weight() -> QuantizedWeight:
    rng = np.random.default_rng(5)
    values = jnp.asarray(rng.integers(0, 256, (NUM_OUT, NUM_IN // 2)), jnp.uint8)
    scale = jnp.asarray(rng.uniform(0.5, 2, (NUM_OUT, NUM_IN // 32)), jnp.float32)
    return QuantizedWeight(values, scale, None, "int4", 32)


def int8_weight() -> QuantizedWeight:
    """Returns a weight with one scale for each output, by which whole sums are multiplied."""
    rng = np.random.default_rng(6)
    values = jnp.asarray(rng.integers(-128, 128, (NUM_OUT, NUM_IN)), jnp.int8)
    scale = jnp.asarray(rng.uniform(0.5, 2, (NUM_OUT, 1)), jnp.float32)
    return QuantizedWeight(values, scale, None, "int8", NUM_IN)


def segments_by_rows(monkeypatch):
    right = matmul.cut_by_weight
    monkeypatch.setattr(
        matmul,
        "cut_by_weight",
        lambda *args, **more: dataclasses.replace(right(*args, **more), folds=2),
    )


def fold_from_the_last_segment(monkeypatch):
    monkeypatch.setattr(
        matmul,
        "_fold_segments",
        lambda turn, empty, turns, share: sum(
            jax.lax.fori_loop(first, first + share, turn, empty)
            for first in reversed(range(0, turns, share))
        ),
    )


def test_a_row_of_a_product_has_the_same_bits_among_any_number_of_rows(monkeypatch):
    """Tiles have 16, 32 and 64 rows, with a program for each segment and with one for all; other
    orders are seen.
    """
    monkeypatch.setattr(matmul_tiles, "MAX_SEPARATE_ROWS", 32)
    x_TI, weight = numbers(2, 33, NUM_IN), numbers(1, NUM_OUT, NUM_IN)

    def of_rows(count: int) -> np.ndarray:
        return np.asarray(matmul_of(x_TI[:count], weight, result="float32"))

    whole = of_rows(33)
    exact = np.asarray(x_TI, np.float64) @ np.asarray(weight, np.float64).T
    size = np.abs(np.asarray(x_TI, np.float64)) @ np.abs(np.asarray(weight, np.float64)).T
    assert (np.abs(whole - exact) / size).max() < 1e-5
    for count in (1, 17):
        np.testing.assert_array_equal(of_rows(count), whole[:count])
    for mistake in (segments_by_rows, fold_from_the_last_segment):
        with monkeypatch.context() as patches:
            mistake(patches)
            matmul._sum_segments.clear_cache()
            assert (of_rows(33) != whole).mean() > 0.05, mistake


@pytest.mark.parametrize("make_weight", few([int4_weight, int8_weight], [int4_weight]))
def test_so_has_a_row_of_a_product_with_a_weight_of_few_bits(make_weight, monkeypatch):
    monkeypatch.setattr(matmul_tiles, "MAX_SEPARATE_ROWS", 16)
    x_TI, weight = numbers(2, 17, NUM_IN), make_weight()
    whole = bits(matmul_of(x_TI, weight))
    np.testing.assert_array_equal(bits(matmul_of(x_TI[:2], weight)), whole[:2])
    x, w = np.asarray(x_TI, np.float64), np.asarray(weight_numbers(weight), np.float64)
    error = np.abs(whole.view(jnp.bfloat16).astype(np.float64) - x @ w.T)
    assert (error / (np.abs(x) @ np.abs(w).T)).max() < 2.0**-8


def weights_of_groups(make_weight) -> tuple[jax.Array | QuantizedWeight, np.ndarray]:
    """Returns a weight for each of `COUNTS`, and its numbers; groups differ in the order of
    outputs.
    """
    if make_weight is None:
        weight = numbers(1, len(COUNTS), NUM_OUT, NUM_IN)
        return weight, np.asarray(weight, np.float64)
    first = make_weight()
    places = [np.roll(np.arange(NUM_OUT), shift) for shift in range(len(COUNTS))]
    values, scale = (
        jnp.stack([array[place] for place in places]) for array in (first.values, first.scale_OJ)
    )
    plain = np.asarray(weight_numbers(first), np.float64)
    return first._replace(values=values, scale_OJ=scale), plain[np.stack(places)]


COUNTS = (20, 0, 25)  # the rows of three groups, one of them empty


@pytest.mark.parametrize("make_weight", few([None, int8_weight, int4_weight], [int8_weight]))
def test_so_has_a_row_of_a_group(make_weight, monkeypatch):
    """The first row of the first group and two of the last are alone, in split programs, and among
    all others.
    """
    monkeypatch.setattr(matmul_tiles, "MAX_SEPARATE_ROWS", 16)
    x_PI = numbers(2, sum(COUNTS), NUM_IN)
    weight, exact = weights_of_groups(make_weight)
    few_rows = jnp.array([0, 20, 21])

    def of_rows(x_PI: jax.Array, *counts: int) -> np.ndarray:
        return np.asarray(matmul_of(x_PI, weight, jnp.array(counts), result="float32"))

    whole = of_rows(x_PI, *COUNTS)
    np.testing.assert_array_equal(of_rows(x_PI[few_rows], 1, 0, 2), whole[few_rows])
    x = np.asarray(x_PI, np.float64)
    for row, group in ((0, 0), (19, 0), (20, 2), (44, 2)):
        error = np.abs(whole[row] - exact[group] @ x[row])
        tolerance = 2.0**-8 if make_weight is int4_weight else 1e-5  # weights are rounded
        assert (error / (np.abs(exact[group]) @ np.abs(x[row]))).max() < tolerance
    segments_by_rows(monkeypatch)
    assert (of_rows(x_PI[few_rows], 1, 0, 2) != whole[few_rows]).mean() > 0.05


WIDTH, INNER = 128, 64  # two segments of inputs, in turns of 64, and one of an expert's inner layer


def experts_layer(routing: Routing):
    """Returns a mixture with an expert of all tokens under a gate, as a function of tokens and
    kernels.
    """

    def linear(num_out: int, num_in: int) -> Linear:
        return Linear(LinearSpec(num_in, (Part(num_out, None, "part"),), None, False, "bfloat16"))

    shared = GatedMLP(linear(2 * INNER, WIDTH), linear(WIDTH, INNER), activation="silu")
    module = make_experts(
        ExpertsSpec(routing, INNER),
        WIDTH,
        QWEN_EXPERTS,
        layer="0",
        activation="silu",
        shared=(shared, "gate"),
        dtype="bfloat16",
    )
    graph, shapes = abstract(module)
    parameters = jax.tree.map(
        lambda each: (0.1 * numbers(each.size, *each.shape)).astype(each.dtype), shapes
    )

    def run(x_TD: jax.Array, kernels: LayerKernels) -> np.ndarray:
        with TraceScope(kernels).open():
            return bits(jax.jit(lambda x_TD: nnx.merge(graph, parameters)(x_TD))(x_TD))

    return run


@pytest.mark.parametrize("routing", few(ROUTINGS, ["softmax"]))
def test_a_token_has_the_same_bits_in_a_mixture_of_experts_among_any_others(routing, monkeypatch):
    monkeypatch.setattr(matmul_tiles, "MAX_SEPARATE_ROWS", 8)
    monkeypatch.setattr(matmul_tiles, "MIN_TURNS", 1)
    run = experts_layer(ROUTINGS[routing])
    x_TD = numbers(3, 9, WIDTH)
    exact = make_layer_kernels(Backend("triton", interpret=True, batch_invariant=True))
    whole = run(x_TD, exact)
    np.testing.assert_array_equal(run(x_TD[:2], exact), whole[:2])
    segments_by_rows(monkeypatch)
    assert (run(x_TD[:2], exact) != whole[:2]).mean() > 0.05


@pytest.mark.parametrize("transposed", few([False, True], [True]))
def test_a_head_has_the_same_bits_in_a_product_by_head_among_any_tokens(transposed, monkeypatch):
    """Latent attention has such products: in split programs, and in programs that go through all
    segments.
    """
    monkeypatch.setattr(matmul_tiles, "MAX_SEPARATE_ROWS", 64)
    num_heads = 3
    weight = numbers(1, num_heads, NUM_OUT, NUM_IN)
    x_TNI = numbers(2, 33, num_heads, NUM_IN)

    def of_tokens(x_TNI: jax.Array) -> jax.Array:
        stored = weight.swapaxes(1, 2) if transposed else weight
        exact = make_layer_kernels(Backend("triton", interpret=True, batch_invariant=True))
        with TraceScope(exact).open():
            return matmul_by_head(x_TNI, stored, transposed=transposed)

    whole = of_tokens(x_TNI)
    np.testing.assert_array_equal(bits(of_tokens(x_TNI[:2])), bits(whole)[:2])
    x, w = np.asarray(x_TNI, np.float64), np.asarray(weight, np.float64)
    error = np.abs(np.asarray(whole, np.float64) - np.einsum("tni,noi->tno", x, w))
    assert (error / np.einsum("tni,noi->tno", np.abs(x), np.abs(w))).max() < 2.0**-8
    segments_by_rows(monkeypatch)
    assert (bits(of_tokens(x_TNI[:2])) != bits(whole)[:2]).mean() > 0.02


@pytest.mark.parametrize(
    ("num_groups", "num_out", "num_in", "segments"),
    [  # of Llama-3-8B: qkv, output, gate and up, down, head
        (1, 6144, 4096, 4),
        (1, 4096, 4096, 8),
        (1, 28672, 4096, 1),
        (1, 4096, 14336, 8),
        (1, 128256, 4096, 1),
        (1, 64, 64, 1),
        # of the experts of Mixtral-8x7B and Qwen3-30B-A3B: gate and up, down
        (8, 28672, 4096, 1),
        (8, 4096, 14336, 8),
        (128, 1536, 2048, 8),
        (128, 2048, 768, 2),
        # of the heads of DeepSeek-V3: from queries to latents, from latents to values
        (128, 512, 128, 1),
        (128, 128, 512, 2),
    ],
)
def test_segments_depend_on_the_weight_alone(num_groups, num_out, num_in, segments):
    shape = (num_groups, num_out)
    for code in (None, "int8", "int4"):
        cuts = [
            matmul_tiles.cut_by_weight((count, num_in), shape, "bfloat16", code, roomy=roomy)
            for count in (1, 16, 17, 64, 129, 257, 4096)
            for roomy in (False, True)
        ]
        assert len({(cut.segments, cut.depth) for cut in cuts}) == 1
        if code is None:
            assert cuts[0].segments == segments
        assert all(cut.splits == 1 or cut.folds == 1 for cut in cuts)


CONTEXT, QUERIES = 150, 24
HEADS = (4, 2)
SINKS = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
WITH_ALL = {"sliding_window": 100, "sinks": SINKS, "logit_softcap": 3.0}
PLACES = (0, 9, 23)


def attend(case, stretches, **options) -> np.ndarray:
    """Returns the outputs of stretches of the query tokens of one row, each as a row of its own in
    one call.

    With `value_width` they are of latents.
    """
    context = [CONTEXT - QUERIES + stop for _, stop in stretches]
    lengths = [stop - first for first, stop in stretches]
    out = paged_attention(
        np.concatenate([case.q_TNH[first:stop] for first, stop in stretches]),
        case.k_pages,
        None if "value_width" in options else case.v_pages,
        np.repeat(case.block_table_BM, len(stretches), axis=0),
        np.array(context, np.int32),
        np.cumsum([0, *lengths]).astype(np.int32),
        scale=0.25,
        backend="triton",
        interpret=True,
        max_query_len=max(lengths),
        batch_invariant=True,
        **options,
    )
    return bits(out)


@pytest.fixture
def small_segments(monkeypatch):
    """Makes segments of 32 positions, in turns of 16: five in the context of the case."""
    right = triton.heuristic
    monkeypatch.setattr(triton, "SEGMENT", 32)
    monkeypatch.setattr(
        triton, "heuristic", lambda *args: dataclasses.replace(right(*args), context=16)
    )


def one_row(heads=HEADS, width=16):
    settings = {"padding": 0, "dtype": "bfloat16", "page_dtype": "bfloat16"}
    return make_case(7, [CONTEXT], [QUERIES], heads=heads, width=width, **settings)


@pytest.mark.parametrize("options", few([WITH_ALL, {}], [WITH_ALL]))
def test_a_token_has_the_same_bits_in_decode_verification_and_chunks(
    options, small_segments, monkeypatch
):
    """Segments of other lengths are seen to give others."""
    check_kinds(one_row(), monkeypatch, **options)


def test_so_has_a_token_that_attends_to_latents(small_segments, monkeypatch):
    """Thirty-two heads are in two programs, in tiles of 16 and 32 rows, as those of DeepSeek."""
    check_kinds(one_row(heads=(32, 1), width=272), monkeypatch, value_width=256)


def check_kinds(case, monkeypatch, **options) -> None:
    """Checks that decoded tokens have the bits of a chunk, which are near float64's.

    Other segments are seen.
    """
    decoded = attend(case, [(place, place + 1) for place in PLACES], **options)
    monkeypatch.setattr(triton, "MAX_SEPARATE_OUTPUTS", 3)  # a program goes through all segments
    verified = attend(case, [(0, 5), (5, 9), (9, 10)], **options)
    whole = attend(case, [(0, QUERIES)], **options)
    np.testing.assert_array_equal(decoded, whole[list(PLACES)])
    np.testing.assert_array_equal(verified, whole[:10])
    within = options.pop("value_width", None)
    keys = case if within is None else dataclasses.replace(case, v_pages=case.k_pages)
    expected = oracle(keys, scale=0.25, **options)[..., :within]
    actual = whole.view(jnp.bfloat16).astype(np.float64)
    np.testing.assert_allclose(actual, expected, atol=2e-2, rtol=2e-2)
    monkeypatch.setattr(triton, "SEGMENT", 64)
    options |= {} if within is None else {"value_width": within}
    assert (whole != attend(case, [(0, QUERIES)], **options)).sum() > 20


@pytest.mark.parametrize("num_positions", [100, 8192, 131072])
@pytest.mark.parametrize("dtypes", [("bfloat16",) * 2, ("float32",) * 2, ("bfloat16", "int8")])
def test_turns_and_segments_are_the_same_in_every_kind_of_step(num_positions, dtypes):
    for head_dim in (64, 128, 256, 576):  # the last one is of latents
        shape = Shape(
            kind="decode",
            group=4,
            head_dim=head_dim,
            block_size=16,
            dtype=dtypes[0],
            page_dtype=dtypes[1],
        )
        all_tiles = [
            triton.choose_ordered_tiles(
                dataclasses.replace(shape, kind=kind), num_positions, num_tokens * 4096
            )
            for kind, num_tokens in (
                ("decode", 2),
                ("decode", 256),
                ("decode", 257),
                ("verify", 64),
                ("chunk", 2048),
            )
        ]
        assert len({(tiles.context, tiles.split_context) for tiles in all_tiles}) == 1
        for tiles in all_tiles:
            reached = tiles.max_splits * tiles.split_context
            assert tiles.max_splits == 1 or reached >= num_positions


def test_a_tree_of_drafts_is_refused():
    case = one_row()
    with pytest.raises(NotImplementedError, match="its keys are not at their positions"):
        attend(case, [(0, QUERIES)], tree_mask_TQ=np.ones((QUERIES, QUERIES), bool))


WIDE = 80  # of a row, which a power of two covers


def norm_of(x, scale, offset=0.0):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * (scale + offset)


def test_rows_are_what_the_layers_say():
    """Numbers in float32 are compared with float64."""
    x, added = (numbers(seed, 5, WIDE, dtype="float32") for seed in (1, 2))
    scale, bias = (numbers(seed, WIDE, dtype="float32") for seed in (3, 4))
    wide, others, scales, biases = (
        np.asarray(each, np.float64) for each in (x, added, scale, bias)
    )
    sums = wide + others
    centred = sums - sums.mean(-1, keepdims=True)
    half = WIDE // 2
    silu = wide[:, :half] / (1 + np.exp(-wide[:, :half]))
    expected = {
        "norm": norm_of(wide, scales, 1.0),
        "sum": sums,
        "norm of sum": norm_of(sums, scales),
        "layer norm": norm_of(centred, scales) + biases,
        "gate": silu * wide[:, half:],
        "log sums": np.log(np.exp(wide - 2.0).sum(-1)),
        "odds": np.exp(wide - wide.max(-1, keepdims=True)),
        "sigmoids": 1 / (1 + np.exp(-wide)),
        "weighted sum": (np.stack([wide, others], axis=1) * sums[:, :2, None]).sum(1),
    }
    both = rows.add_and_norm(x, added, scale, 1e-5, 0.0, interpret=True)
    results = {
        "norm": rows.rms_norm(x, scale, 1e-5, 1.0, interpret=True),
        "sum": both[0],
        "norm of sum": both[1],
        "layer norm": rows.layer_norm(x, scale, bias, 1e-5, 0.0, added, interpret=True)[1],
        "gate": rows.gate(x, "silu", interpret=True),
        "log sums": rows.log_sums(x, jnp.full(5, 2.0), interpret=True),
        "odds": rows.scores(x, sigmoid=False, interpret=True),
        "sigmoids": rows.scores(x, sigmoid=True, interpret=True),
        "weighted sum": rows.weighted_sum(
            jnp.stack([x, added], axis=1), both[0][:, :2], interpret=True
        ),
    }
    for name, result in results.items():
        np.testing.assert_allclose(result, expected[name], atol=3e-6, rtol=3e-6, err_msg=name)


def backwards(segments: Any, dtype: Any) -> jax.Array:
    """Returns sums of segments in the order of their numbers, from the last one."""
    total = jnp.zeros(segments.shape[1:], jnp.float32)
    for segment in reversed(segments):
        total = total + segment
    return total.astype(dtype)


def test_sums_of_segments_are_added_up_where_rows_are_read():
    """A norm, and a rotation with its writes, of sums have the bits of those of the rounded
    product.
    """
    x_TI, weight = numbers(2, 5, NUM_IN), numbers(1, NUM_OUT, NUM_IN)
    y_TO, sums_ZTO = matmul_and_sums(x_TI, weight, backend="triton", interpret=True)
    assert sums_ZTO is not None and sums_ZTO.shape == (4, 5, NUM_OUT)
    np.testing.assert_array_equal(bits(y_TO), bits(matmul_of(x_TI, weight)))
    x_TO, scale_O = numbers(3, 5, NUM_OUT), numbers(4, NUM_OUT)

    def add_and_norm(added: jax.Array) -> list[np.ndarray]:
        results = rows.add_and_norm(x_TO, added, scale_O, 1e-5, 0.0, interpret=True)
        return [*map(bits, results)]

    angles = np.random.default_rng(5).uniform(0, 9, (5, 2)).astype(np.float32)
    pages = jnp.zeros((2, 4, 1, 8), jnp.bfloat16)
    slots = jnp.arange(2, 7)

    def rotate_and_write_all(heads: jax.Array) -> list[np.ndarray]:
        x_TMH = heads.reshape(*heads.shape[:-1], 5, 8)
        turns = np.cos(angles), np.sin(angles), pages, pages, slots
        options = {"dtype": "bfloat16", "backend": "triton", "interpret": True}
        return [*map(bits, jax.tree.leaves(rotate_and_write(x_TMH, *turns, **options)))]

    for of in (add_and_norm, rotate_and_write_all):
        expected_sums = of(y_TO)
        for actual, expected in zip(of(sums_ZTO), expected_sums, strict=True):
            np.testing.assert_array_equal(actual, expected)
        big = sums_ZTO.at[0].multiply(1e6).at[1].set(-1e6 * sums_ZTO[0])  # order shows here
        right, wrong = of(big), of(backwards(big, jnp.bfloat16))
        assert any(
            (actual != expected).any() for actual, expected in zip(right, wrong, strict=True)
        ), of


def test_neighbours_are_turned_as_by_complex_numbers():
    x_TNH = numbers(1, 3, 2, 12, dtype="float32")  # four pairs, and four numbers that stay
    angles = np.random.default_rng(2).uniform(0, 6, (3, 4))
    cos, sin = (jnp.asarray(each, jnp.float32) for each in (np.cos(angles), np.sin(angles)))
    actual = np.asarray(rows.rotate_pairs(x_TNH, cos, sin, interpret=True))
    pairs = np.asarray(x_TNH, np.float64)
    rotated = (pairs[..., 0:8:2] + 1j * pairs[..., 1:8:2]) * np.exp(1j * angles)[:, None]
    np.testing.assert_allclose(actual[..., 0:8:2], rotated.real, atol=1e-5)
    np.testing.assert_allclose(actual[..., 1:8:2], rotated.imag, atol=1e-5)
    np.testing.assert_array_equal(actual[..., 8:], x_TNH[..., 8:])


def test_queries_and_keys_are_turned_and_values_are_not():
    num_pairs, head_dim = 12, 32
    x_TF = numbers(1, 3, 6 * head_dim, dtype="float32")  # of four queries, one key and one value
    angles = np.random.default_rng(2).uniform(0, 6, (3, num_pairs))
    cos, sin = (jnp.asarray(each, jnp.float32) for each in (np.cos(angles), np.sin(angles)))
    q, k, v = rows.split_and_rotate(x_TF, cos, sin, 1, head_dim, interpret=True)
    heads = np.asarray(x_TF, np.float64).reshape(3, 6, head_dim)
    pairs = heads[..., :num_pairs] + 1j * heads[..., num_pairs : 2 * num_pairs]
    rotated = pairs * np.exp(1j * angles)[:, None]
    expected = np.concatenate([rotated.real, rotated.imag, heads[..., 2 * num_pairs :]], axis=-1)
    np.testing.assert_allclose(np.concatenate([q, k], axis=1), expected[:, :5], atol=1e-5)
    np.testing.assert_array_equal(v, x_TF.reshape(3, 6, head_dim)[:, 5:])


def update_in_float64(
    before: np.ndarray, decay: np.ndarray, k: np.ndarray, v: np.ndarray, q: np.ndarray, beta: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the gated delta rule as its paper has it, and without betas the state space of Mamba,
    head by head.
    """
    after, out = before * decay, np.zeros(v.shape)
    for place in np.ndindex(before.shape[:2]):
        value = v[place]
        if beta is not None:
            value = beta[place] * (value - after[place].T @ k[place])
        after[place] += np.outer(k[place], value)
        out[place] = after[place].T @ q[place]
    return after, out


@pytest.mark.parametrize("decays", [(1, 1), (24, 1), (1, 20), (24, 20)])
@pytest.mark.parametrize("with_beta", [True, False])
def test_states_are_updated_as_in_float64_and_alike_among_other_rows(
    decays, with_beta, monkeypatch
):
    monkeypatch.setattr(state, "COLS", 16)  # two programs a head
    num_rows, num_heads, keys, values = 5, 3, 24, 20
    of = (num_rows, num_heads)
    before, decay, k, v, q, beta = (
        numbers(seed, *of, *shape, dtype="float32")
        for seed, shape in enumerate(((keys, values), decays, (keys,), (values,), (keys,), ()))
    )
    arrays = [before, decay, k, v, q, beta if with_beta else None]
    result = state.update_state(*arrays, interpret=True)
    wide = [None if each is None else np.asarray(each, np.float64) for each in arrays]
    for actual, expected in zip(result, update_in_float64(*wide), strict=True):
        np.testing.assert_allclose(actual, expected, atol=2e-5, rtol=2e-5)
    moved = jnp.array([2, 4, 0, 1, 3])  # other rows stand before it and after it
    others = state.update_state(
        *(None if each is None else each[moved] for each in arrays), interpret=True
    )
    for actual, expected in zip(others, result, strict=True):
        np.testing.assert_array_equal(actual, expected[moved])


def test_a_convolution_is_added_up_in_the_order_of_its_places():
    inputs, kernel = numbers(1, 5, 4, WIDE, dtype="float32"), numbers(2, 4, WIDE, dtype="float32")
    bias = numbers(3, WIDE, dtype="float32")
    for added in (None, bias):
        actual = state.convolve(inputs, kernel, added, interpret=True)
        expected = (np.asarray(inputs, np.float64) * np.asarray(kernel, np.float64)).sum(1)
        expected += 0 if added is None else np.asarray(added, np.float64)
        np.testing.assert_allclose(actual, expected, atol=1e-5, rtol=1e-5)
        rotated = state.convolve(inputs[::-1], kernel, added, interpret=True)
        np.testing.assert_array_equal(rotated, actual[::-1])


def test_the_programs_of_a_state_depend_on_its_widths_alone(monkeypatch):
    seen = set()
    right = backend.kernel_call

    def note_call(kernel, *, num_warps, grid, **settings):
        seen.add((num_warps, *sorted(kernel.keywords.items()), grid[1:]))
        return right(kernel, num_warps=num_warps, grid=grid, **settings)

    monkeypatch.setattr(backend, "kernel_call", note_call)
    for count in (1, 16, 300):
        shapes = [
            jax.ShapeDtypeStruct((count, 4, *shape), jnp.float32)
            for shape in ((128, 128), (1, 1), (128,), (128,), (128,))
        ]
        jax.eval_shape(lambda *arrays: state.update_state(*arrays, interpret=True), *shapes)
    assert seen == {(4, ("cols", 32), ("keys", 128), (4, 4))}


def test_warps_of_a_row_depend_on_its_width_alone(monkeypatch):
    seen = set()
    right = backend.kernel_call
    rows._norm.clear_cache()

    def note_call(*args, **settings):
        seen.add((settings["num_warps"], settings["out_shape"][0].shape[1]))
        return right(*args, **settings)

    monkeypatch.setattr(backend, "kernel_call", note_call)
    for count in (1, 16, 300):
        for width in (64, 4096):
            scale = jnp.ones(width, jnp.bfloat16)
            jax.eval_shape(
                lambda x, scale=scale: rows.rms_norm(x, scale, 1e-5, 0.0, interpret=True),
                jax.ShapeDtypeStruct((count, width), jnp.bfloat16),
            )
    assert seen == {(1, 64), (4, 4096)}
    rows._norm.clear_cache()
