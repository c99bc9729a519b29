"""JAX's ragged paged attention for TPUs, interpreted on a CPU and compared with float64."""

from __future__ import annotations

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as package
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from jaxpage import SamplingParams
from jaxpage.device.pages import kv_pages
from jaxpage.settings import engine_config
from pallas_kernels import paged_attention, write_kv
from pallas_kernels.page_layouts import INTERLEAVED, interleave
from pallas_kernels.sets import SETS
from tests.support.attention import hidden, make_case, oracle
from tests.support.engines import LLAMA, invariants, make_llm
from tests.support.random_checkpoints import random_checkpoint
from tests.support.sweeps import few
from tests.support.tpu_interpreter import interpreted

# Rows of every kind, and empty ones in each place; more than a turn of the loop over the context.
ROWS = {
    "rows of every kind": ([9, 0, 25, 40, 0], [1, 0, 25, 5, 0]),
    "contexts of several turns": ([530, 1], [2, 1]),
    "more than one program": ([70, 3], [40, 3]),
}
WIDTHS = {"rows of every kind": 128, "contexts of several turns": 64, "more than one program": 80}


def call_interleaved(case, **options):
    """Makes a call whose pages are interleaved here."""
    kv_pages = interleave(jnp.asarray(case.k_pages), jnp.asarray(case.v_pages))
    return paged_attention(
        case.q_TNH, kv_pages, None, *case.arrays[3:], interleaved=True, **options
    )


def attend(case, **options):
    """Makes the same call by the set `tpu`."""
    return call_interleaved(case, backend="tpu", **options)


def error(case, result, **options) -> float:
    """Returns the largest error; padding is exactly zero."""
    result = np.asarray(result, np.float64)
    assert not result[case.query_start[-1] :].any()
    return float(np.abs(result - oracle(case, **options)).max())


@pytest.mark.parametrize("rows", few(ROWS, ["contexts of several turns"]))
def test_the_kernel_of_jax_matches_float64_without_races(rows):
    contexts, queries = ROWS[rows]
    case = hidden(make_case(1, contexts, queries, width=WIDTHS[rows], heads=(4, 2)), queries)
    with interpreted() as has_races:
        result = attend(case, scale=0.1)
        assert error(case, result, scale=0.1) < 1e-5
        assert not has_races()


@pytest.mark.parametrize("window", few([3, 17], [3]))
def test_windows_begin_at_a_block_and_softcaps_hold(window):
    contexts, queries = [60, 5, 0, 33], [1, 5, 0, 9]
    case = hidden(make_case(2, contexts, queries, width=128), queries, window)
    # Slots of a block that is read are a sequence's own: finite, and they may be large.
    seen = np.isfinite(case.k_pages).all(axis=(1, 2, 3)), np.isnan(case.k_pages)
    filled = [np.where(seen[1], np.float32(50.0), each) for each in (case.k_pages, case.v_pages)]
    blocks = np.unique(case.block_table_BM[case.block_table_BM > 0])
    for pages, new in zip((case.k_pages, case.v_pages), filled, strict=True):
        pages[blocks] = new[blocks]
    options = {"scale": 0.1, "sliding_window": window, "logit_softcap": 5.0}
    with interpreted() as has_races:
        assert error(case, attend(case, **options), **options) < 1e-5
        assert not has_races()


def test_bfloat16_is_read_in_words_of_two():
    queries = [1, 6]
    case = make_case(3, [20, 6], queries, width=128, dtype=jnp.bfloat16, page_dtype=jnp.bfloat16)
    with interpreted() as has_races:
        assert error(case, attend(case, scale=0.1), scale=0.1) < 0.03
        assert not has_races()


def test_a_step_of_padding_alone_gives_zeros():
    case = make_case(4, [0, 0], [0, 0], width=128, padding=4)
    with interpreted() as has_races:
        assert not np.asarray(attend(case, scale=0.1)).any()
        assert not has_races()


OPTIONS = {
    "plain": {},
    "window and softcap": {"sliding_window": 9, "logit_softcap": 2.0},
    "sinks": {"sinks": np.linspace(-1, 1, 4, dtype=np.float32)},
    "a tree": {"tree_mask_TQ": np.tri(34, 25, dtype=bool)},
}


@pytest.mark.parametrize(
    ("backend", "options"),
    few(
        itertools.product(["scan", "reference"], OPTIONS),
        [("scan", "window and softcap"), ("reference", "sinks"), ("scan", "a tree")],
    ),
)
def test_plain_xla_reads_interleaved_pages_to_the_same_bits(backend, options):
    """Plain XLA computes what the kernel of JAX refuses, from the same pages."""
    case = make_case(1, *ROWS["rows of every kind"], width=16)
    options = {"scale": 0.1, "backend": backend, **OPTIONS[options]}
    expected = paged_attention(*case.arrays, **options)
    np.testing.assert_array_equal(call_interleaved(case, **options), expected)


def test_what_is_written_is_where_the_kernel_reads_it():
    case = make_case(1, [5, 9], [2, 1], width=16, padding=0)
    rng = np.random.default_rng(0)
    k_TKH, v_TKH = (rng.standard_normal((3, 2, 16)).astype(np.float32) for _ in range(2))
    slots_T = np.array([9, 30, 0], np.int32)
    expected = write_kv(k_TKH, v_TKH, case.k_pages, case.v_pages, slots_T, backend="reference")
    kv_pages = interleave(jnp.asarray(case.k_pages), jnp.asarray(case.v_pages))
    written, nothing = write_kv(k_TKH, v_TKH, kv_pages, None, slots_T, backend="reference")
    assert nothing is None
    np.testing.assert_array_equal(written, interleave(*expected))


def refusal_of(case, **options):
    """Returns why the set does not take a call."""
    with interpreted(), pytest.raises(NotImplementedError) as refusal:
        call_interleaved(case, **{"scale": 0.1, "backend": "tpu", **options})
    return str(refusal.value)


def test_each_refusal_has_its_reason():
    def case(*, heads=(4, 2), width=128, **form):
        return make_case(0, [5], [1], heads=heads, width=width, **form)

    assert "3 key/value heads in float32" in refusal_of(case(heads=(6, 3)))
    assert "q_TNH of float16" in refusal_of(case(dtype="float16"))
    assert "pages of bfloat16 under q_TNH of float32" in refusal_of(case(page_dtype=jnp.bfloat16))
    assert "sinks: its attention has no such" in refusal_of(case(), sinks=np.zeros(4, np.float32))
    assert "tree_mask_TQ: its" in refusal_of(case(), tree_mask_TQ=np.ones((4, 1), bool))
    wide = case(table_width=300_000)
    assert "block tables of 1 rows and 300000 blocks" in refusal_of(wide)
    assert "takes neither interpret nor tiles" in refusal_of(case(), interpret=True)
    with interpreted(), pytest.raises(NotImplementedError, match="separate pages of keys"):
        paged_attention(*case().arrays, scale=0.1, backend="tpu")
    with pytest.raises(NotImplementedError, match="needs a TPU, and the device is a cpu"):
        call_interleaved(case(), scale=0.1, backend="tpu")
    with pytest.raises(NotImplementedError, match="cpu: interleaved pages of keys and values"):
        call_interleaved(case(), scale=0.1, backend="cpu")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"v_pages": np.zeros((4, 8, 4, 128))}, "v_pages and k_scale must not be given"),
        ({"k_pages": np.zeros((4, 8, 3, 128))}, "a key and a value for each head"),
        ({"k_pages": np.zeros((4, 8, 4, 16))}, "multiple of 128 wide, but"),
        ({"k_pages": np.zeros((4, 8, 4, 256))}, "head width differs: queries 16, pages 256"),
        ({"k_pages": np.zeros((4, 8, 4, 128), np.int8)}, "not quantised, but k_pages hold int8"),
        ({"value_width": 8}, "value_width means values within the keys"),
    ],
)
def test_what_cannot_be_interleaved_pages_is_refused_by_name(changes, text):
    case = make_case(0, [5], [1])
    arrays = {"k_pages": np.zeros((4, 8, 4, 128)), "v_pages": None, "scale": 0.1, **changes}
    with pytest.raises(ValueError, match=text):
        paged_attention(
            case.q_TNH,
            block_table_BM=case.block_table_BM,
            context_len_B=case.context_len_B,
            query_start=case.query_start,
            interleaved=True,
            **arrays,
        )


def skip_wait(copies):
    """Waits without waiting: the memory is read before the copy has come."""
    return copies._vmem_buf


def test_a_copy_that_nobody_waits_for_is_seen():
    case = make_case(1, *ROWS["more than one program"], width=128)
    with interpreted(skip_wait, copies="eager") as has_races:
        attend(case, scale=0.1).block_until_ready()
        assert has_races()


# What may go wrong on the way to the kernel: (pages, lengths, tables, starts, count) as it is, and
# wrong.
PLANTED = {
    "values before keys": lambda p, n, t, s, c: (jnp.roll(p, 1, axis=2), n, t, s, c),
    "an empty row has no context": lambda p, n, t, s, c: (p, n - (jnp.diff(s) == 0), t, s, c),
    "a row too few": lambda p, n, t, s, c: (p, n, t, s, c - 1),
    "rows at the end that are empty": lambda p, n, t, s, c: (p, n, t, s, 0 * c + n.shape[0]),
    "the table of the row before": lambda p, n, t, s, c: (p, n, jnp.roll(t, 1, axis=0), s, c),
    "a context too long": lambda p, n, t, s, c: (p, n + 1, t, s, c),
}


@pytest.mark.parametrize(
    "mistake",
    few([*PLANTED], ["a row too few"]),
)
def test_a_planted_mistake_is_seen(mistake, monkeypatch):
    def kernel(q_TNH, *arrays, **options):
        return ragged_paged_attention(q_TNH, *PLANTED[mistake](*arrays), **options)

    monkeypatch.setattr(package, "ragged_paged_attention", kernel)
    # The second row of heads is another program, which begins where the first has ended.
    case = make_case(5, [9, 0, 22, 0], [1, 0, 15, 0], heads=(16, 16), width=128, padding=0)
    with interpreted():
        assert not error(case, attend(case, scale=0.1), scale=0.1) < 1e-5


def test_interleaved_pages_change_no_token(tmp_path, monkeypatch):
    """A preempted request is swapped out and in, and a fork copies blocks, whatever the layout."""
    toy = dataclasses.replace(SETS["reference"], name="toy", layouts=(INTERLEAVED,))
    monkeypatch.setitem(SETS, "toy", dataclasses.replace(toy, platforms=("cpu",)))
    monkeypatch.setattr(engine_config, "attention_backends", lambda: ("reference", "toy"))
    page_shapes, seen = kv_pages.page_shapes, []
    monkeypatch.setattr(
        kv_pages,
        "page_shapes",
        lambda *shapes, **options: seen.append(page_shapes(*shapes, **options)) or seen[-1],
    )
    directory = random_checkpoint(tmp_path, {**LLAMA, "num_hidden_layers": 1})
    settings = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "max_model_len": 64}
    settings |= {"num_blocks": 11, "block_size": 8}
    settings |= {"preemption_mode": "swap", "swap_space_blocks": 20}
    options = {"temperature": 0.9, "seed": 3, "max_tokens": 20, "ignore_eos": True}
    params = [SamplingParams(**options), SamplingParams(**options, n=2)]
    tokens = []
    for backend in ("reference", "toy"):
        seen.clear()
        with make_llm(directory, attention_backend=backend, largest_shapes=True, **settings) as llm:
            outputs = llm.generate([list(range(1, 31)), list(range(40, 57))], params)
            stats = llm.stats()
            invariants(llm)
        assert stats["num_preemptions_total"]["swap"] and stats["copy_on_write_blocks_total"]
        last = [layer.is_interleaved for layer in seen[-1]]
        assert last == [backend == "toy"]
        tokens.append([output.token_ids for each in outputs for output in each.outputs])
    assert tokens[0] == tokens[1]
