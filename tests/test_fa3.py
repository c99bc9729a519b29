"""The kernel set of FlashAttention-3, over a model of the library in numpy.

Its tiles, splits and block tables are compared with float64. Refusals are tested, which set "auto"
takes for which kind of step, and, where the library is installed, its lowering for a GPU that is
not there.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.device.hardware.backends import Backend, attention_sets, choose_backend
from jaxpage.device.inputs.buckets import Bucket, make_menu
from jaxpage.device.pages.kv_pages import LayerPages
from pallas_kernels import Arguments, AttentionOptions, Call, Tiles, paged_attention, tiles
from pallas_kernels.compat import describe_gpu
from pallas_kernels.sets import candidates, fa3, set_for
from tests.support import flash_attention
from tests.support.attention import hidden, make_case, oracle
from tools.lab.kernel_lab.inspection.compiled_cases import attention_case
from tools.lab.kernel_lab.specs import find

# NaN, on purpose
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")

EPSILON = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
SPLIT = Tiles(
    query_rows=128, context=128, max_splits=3, split_context=128, num_warps=8, num_stages=2
)
INSTALLED = importlib.util.find_spec("flash_attn3_jax") is not None


@pytest.fixture(autouse=True)
def use_model(monkeypatch, request):
    """Replaces the library by its model, but for tests of the library itself."""
    fa3.library.cache_clear()
    fa3._attend.clear_cache()  # of what another test has planted
    if not request.node.name.startswith("test_installed"):
        monkeypatch.setitem(sys.modules, "flash_attn3_jax", flash_attention)
    yield
    fa3.library.cache_clear()


CALLS = {
    "decode, splits of many lengths, empty rows": dict(
        contexts=[700, 1, 0, 128, 129, 384, 500],
        queries=[1, 1, 0, 1, 1, 1, 0],
        tiles=SPLIT,
        max_query_len=1,
    ),
    "decode by the rule, float16, seven heads to one": dict(
        contexts=[1100, 40], queries=[1, 1], heads=(7, 1), max_query_len=1, dtype="float16"
    ),
    "chains of drafts": dict(contexts=[200, 5, 90], queries=[5, 5, 2], max_query_len=5),
    "a chunk of several tiles next to decodes": dict(
        contexts=[170, 33, 0, 64], queries=[150, 1, 0, 64]
    ),
    "one head to one, blocks of 4": dict(
        contexts=[140, 9], queries=[140, 3], heads=(2, 2), block_size=4
    ),
    "blocks of 256": dict(
        contexts=[300, 600], queries=[1, 1], block_size=256, max_query_len=1, tiles=SPLIT
    ),
}


def small_case(contexts, queries, *, dtype="bfloat16", **shape):
    shape = {"width": 128, "block_size": 16, **shape}
    return hidden(make_case(4, contexts, queries, dtype=dtype, page_dtype=dtype, **shape), queries)


def attend(case, **options):
    function = functools.partial(paged_attention, backend="fa3", scale=0.09, **options)
    return np.asarray(jax.jit(function)(*map(jnp.asarray, case.arrays)))


def wrong(case, actual):
    """Returns by how much the worst number is off, in units of what its type can resolve."""
    expected = oracle(case, scale=0.09)
    return np.abs(actual.astype(np.float64) - expected).max() / EPSILON[actual.dtype.name]


@pytest.mark.parametrize("name", CALLS)
def test_the_ragged_stream_becomes_rows_of_the_library_and_comes_back(name):
    call = dict(CALLS[name])
    options = {key: call.pop(key) for key in ("tiles", "max_query_len") if key in call}
    case = small_case(**call)
    assert wrong(case, attend(case, **options)) < 4


MISTAKES = {  # where in the set, and what stands there instead
    "splits have equal weights": (
        "_put_together",
        lambda out, lse, live: out.astype(jnp.float32).mean(axis=1),
    ),
    "the last split is lost": (
        "_put_together",
        lambda out, lse, live: fa3_put_together(out, lse, live & (jnp.arange(live.shape[1]) < 2)),
    ),
    "splits end between blocks": ("_round_up", lambda length, unit: length),
    "tiles begin a token late": (
        "query_cut",
        lambda *arguments: dataclasses.replace(
            cut := fa3_query_cut(*arguments), token_R=cut.token_R + 1
        ),
    ),
    "one position is not seen": (
        "query_cut",
        lambda *arguments: dataclasses.replace(
            cut := fa3_query_cut(*arguments), position_R=cut.position_R - 1
        ),
    ),
}
fa3_put_together, fa3_query_cut = fa3._put_together, fa3.query_cut


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(mistake, monkeypatch):
    name, replacement = MISTAKES[mistake]
    monkeypatch.setattr(fa3, name, replacement)
    errors = []
    for call in (
        "decode, splits of many lengths, empty rows",
        "a chunk of several tiles next to decodes",
    ):
        call = dict(CALLS[call])
        options = {key: call.pop(key) for key in ("tiles", "max_query_len") if key in call}
        case = small_case(**call)
        errors.append(not wrong(case, attend(case, **options)) < 4)
    assert any(errors)


@pytest.mark.parametrize("max_query_len", [1, 5])
def test_the_bits_of_a_token_depend_on_its_own_row_alone(max_query_len):
    """It runs alone, among others, and under a wider table, which has more places for splits."""
    options = {"max_query_len": max_query_len} | ({"tiles": SPLIT} if max_query_len == 1 else {})
    queries = [max_query_len] * 3
    case = make_case(
        5,
        [700, 20, 400],
        queries,
        dtype="bfloat16",
        page_dtype="bfloat16",
        width=128,
        block_size=16,
        padding=0,
    )
    together = attend(case, **options)
    for row in range(3):
        tokens = slice(row * max_query_len, (row + 1) * max_query_len)
        table = np.pad(case.block_table_BM[row : row + 1], ((0, 0), (0, 9 * row)))
        alone = dataclasses.replace(
            case,
            q_TNH=case.q_TNH[tokens],
            block_table_BM=table,
            context_len_B=case.context_len_B[row : row + 1],
            query_start=np.array([0, max_query_len], np.int32),
        )
        np.testing.assert_array_equal(attend(alone, **options), together[tokens])


def gpu(capability, kind="NVIDIA H200"):
    return SimpleNamespace(platform="gpu", device_kind=kind, compute_capability=capability)


def call(name="llama-3-8b decode 64x2048", *, interpret=False, spec=None, **changes):
    """Returns a call as the registry asks about it, from shapes alone.

    spec: the changes of the shape of that name.
    """
    requested = []
    case = attention_case(dataclasses.replace(find(name), **(spec or {})), "fa3")
    shapes = {**case.arguments[0], **case.arguments[1]}
    of_options = {name: shapes.pop(name) for name in ("sinks", "tree_mask_TQ") if name in shapes}

    def ask(shapes, of_options):
        options = AttentionOptions(scale=0.1, **of_options, **changes)
        arguments = Arguments(**shapes, options=options, max_query_len=find(name).max_query_len)
        requested.append(
            Call(interpret=interpret, page_dtype=arguments.k_pages.dtype.name, attention=arguments)
        )

    jax.eval_shape(ask, shapes, of_options)
    return requested[0]


REFUSED = {
    "sinks": dict(spec={"sinks": True}),
    "tree_mask_TQ": dict(spec={"tree": True}),
    "logit_softcap": dict(logit_softcap=30.0),
    "sliding_window": dict(sliding_window=512),
    "k_pages of int8 under q_TNH of bfloat16": dict(spec={"page_dtype": "int8"}),
    "k_pages of float16 under q_TNH of bfloat16": dict(spec={"page_dtype": "float16"}),
    "q_TNH of float32": dict(spec={"dtype": "float32", "page_dtype": "float32"}),
    "heads 64 wide": dict(spec={"head_dim": 64}),
    "256 heads for one": dict(spec={"num_heads": 256, "num_kv_heads": 1}),
    "interpret=True": dict(interpret=True),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_the_library_does_not_take_is_refused_by_name(reason):
    assert reason in fa3.SET.refusal(gpu("9.0"), call(**REFUSED[reason]))


def test_it_is_for_hopper_alone_and_takes_only_tiles_that_mean_something():
    assert fa3.supports(gpu("9.0"), call()) is None and choose_backend(
        "fa3", gpu("9.0")
    ) == Backend("fa3")
    for other in ("8.0", "8.9", "10.0", "12.0"):
        assert f"9.0 (Hopper), but NVIDIA H200 has {other}" in fa3.supports(gpu(other), call())
    case = small_case([40], [3])
    for changes, reason in (
        ({"num_warps": 4}, "tiles.num_warps=4: the library is compiled for 8"),
        ({"query_rows": 256}, "tiles.query_rows=256"),
        ({}, "tiles.max_splits=3"),
    ):
        with pytest.raises(NotImplementedError, match=reason):
            attend(case, tiles=dataclasses.replace(SPLIT, **changes))


def test_without_the_package_the_refusal_has_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn3_jax", None)
    assert "pip install flash-attn3-jax" in fa3.supports(gpu("9.0"), call())
    assert (
        set_for(call("llama-3-8b chunk 2048+0"), backend="auto", device=gpu("9.0")).name == "triton"
    )
    with pytest.raises(
        NotImplementedError, match="fa3: FlashAttention-3 cannot be imported .*pip install"
    ):
        set_for(call(), backend="fa3", device=gpu("9.0"))


# Which set "auto" takes


def choose(name, device, **changes):
    return set_for(call(name, **changes), backend="auto", device=device).name


def test_auto_takes_a_set_for_each_kind_of_step(monkeypatch):
    """The rule is: the library for prompt chunks, if it takes them.

    Where there is a measurement, that decides.
    """
    decode, verify, chunk = (
        "llama-3-8b decode 64x2048",
        "llama-3-8b verify chain 16x8",
        "llama-3-8b chunk 2048+0",
    )
    hopper, ampere = gpu("9.0"), gpu("8.0", "NVIDIA A100")
    assert [choose(name, hopper) for name in (decode, verify, chunk)] == ["triton", "triton", "fa3"]
    assert [choose(name, ampere) for name in (decode, verify, chunk)] == ["triton"] * 3
    assert (
        choose(chunk, hopper, sliding_window=512)
        == "triton"
        == choose(chunk, hopper, spec={"page_dtype": "int8"})
    )
    measured = {
        str(tiles.shape_of(call(decode).attention)): "fa3",
        str(tiles.shape_of(call(chunk).attention)): "mosaic",
    }
    monkeypatch.setattr(
        tiles, "_table", lambda kind: {"fastest set": measured} if kind == "NVIDIA H200" else {}
    )
    monkeypatch.setattr(jax, "devices", lambda: [hopper])
    assert [choose(name, hopper) for name in (decode, verify, chunk)] == ["fa3", "triton", "mosaic"]
    assert choose(decode, hopper, spec={"num_heads": 8}) == "triton", "another shape"
    assert [each.name for each in candidates("auto", "gpu")] == ["triton", "fa3", "mosaic"], (
        "writes and copies"
    )


def test_the_start_up_table_says_which_set_computes_which_steps():
    pages = LayerPages(*(jax.ShapeDtypeStruct((64, 16, 2, 128), jnp.bfloat16) for _ in range(2)))

    def describe(device, menu, windows=(None,), name="auto"):
        layers = [(pages, window) for window in windows]
        return attention_sets(
            Backend(name), device, layers, menu.buckets, num_heads=8, dtype="bfloat16"
        )

    menu = make_menu(8, 256, num_drafts=(2,), max_verified_tokens=64)
    assert describe(gpu("9.0"), menu) == "triton: decode, verify, some of chunk; fa3: some of chunk"
    long = dataclasses.replace(menu, verify=(), chunk=(Bucket(256, 8, 256),))
    assert describe(gpu("9.0"), long) == "triton: decode; fa3: chunk"
    assert describe(gpu("9.0"), long, windows=(64,)) == "triton" == describe(gpu("8.0"), long)
    assert describe(gpu("9.0"), menu, name="fa3") == "fa3"


# The library itself


installed = pytest.mark.skipif(
    not INSTALLED, reason=f"flash-attn3-jax is not installed: {fa3.INSTALL}"
)


@installed
def test_installed_library_has_the_parameters_of_its_model():
    kernel, _ = fa3.library()
    ours = inspect.signature(flash_attention.flash_mha_with_kvcache).parameters
    theirs = inspect.signature(kernel).parameters
    assert {name: each.default for name, each in theirs.items()} == {
        name: each.default for name, each in ours.items()
    }


@installed
@pytest.mark.parametrize(
    "name",
    [
        "decode 64x2048",
        "decode 1x32768",
        "verify chain 16x8",
        "chunk 2048+0",
        "mixed 48 decodes and 2 chunks",
    ],
)
def test_installed_library_is_lowered_for_a_gpu_that_is_not_there(name):
    case = attention_case(find(f"llama-3-8b {name}"), "fa3")
    with describe_gpu():
        text = case.function.trace(*case.arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @flash_mha_fwd") == 1
