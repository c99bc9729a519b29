"""The small modules of the device side: packed inputs, buckets, memory planning, the
compile cache.
"""

from __future__ import annotations

import dataclasses
import os
import re
import stat
import subprocess
import sys

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpage.assembly.planning.sizing import MemoryPlan, choose_num_blocks, choose_num_host_blocks
from jaxpage.device.compile_cache import use_compile_cache
from jaxpage.device.compiler_options import check_graphs, compiler_options
from jaxpage.device.hardware import gpu_memory
from jaxpage.device.inputs.buckets import Bucket, make_menu
from jaxpage.device.inputs.step_inputs import (
    FIELDS,
    TableShape,
    size_when_packed,
    unpack,
    views,
)
from jaxpage.errors import CapacityError, UnsupportedError
from jaxpage.settings.cuda_graphs import GraphSettings
from tests.support.engines import LLAMA
from tests.support.executables import with_compiled_kernels
from tests.support.random_checkpoints import random_checkpoint


def test_what_is_packed_on_the_host_is_unpacked_on_the_device():
    bucket, tables = Bucket(6, 3, 6), TableShape(2, 5)
    packed = np.zeros(size_when_packed(bucket, tables), np.int32)
    rng = np.random.default_rng(0)
    expected = {}
    for name, view in views(packed, bucket, tables).items():
        if view.dtype == np.float32:
            view[...] = rng.standard_normal(view.shape)
        else:
            view[...] = rng.integers(0, 2**31, view.shape)
        expected[name] = view.copy()
    assert list(expected) == list(FIELDS)
    actual = jax.jit(lambda vector: unpack(vector, bucket, tables))(packed)
    for name, value in expected.items():
        record = actual.draws if name in actual.draws._fields else actual
        np.testing.assert_array_equal(np.asarray(getattr(record, name)), value)


@given(rows=st.integers(1, 300), tokens=st.integers(2, 5000))
def test_menus_are_small_and_hold_their_limits(rows, tokens):
    menu = make_menu(rows, tokens)
    assert menu.decode[-1].num_rows == max(2, rows) and menu.chunk[-1].num_tokens == tokens
    assert len(menu.buckets) <= 2 + np.log2(max(rows, 2)) + np.log2(tokens)
    assert all(bucket.num_rows >= 2 and bucket.num_tokens >= 2 for bucket in menu.buckets)
    assert list(menu.decode) == sorted(set(menu.decode)) and list(menu.chunk) == sorted(
        set(menu.chunk)
    )


@given(st.integers(1, 40), st.integers(4, 200), st.sampled_from([(4,), (1,), (1, 3, 7), (63,)]))
def test_drafts_have_shapes_from_one_row_on(rows, tokens, lengths):
    menu = make_menu(rows, 256, num_drafts=lengths, max_verified_tokens=tokens)
    assert list(menu.verify) == sorted(set(menu.verify)) and all(
        b.num_tokens <= tokens for b in menu.verify
    )
    for length in lengths:
        if 1 + length <= tokens:
            bucket = menu.choose([1 + length], 1 + length, verifies=True)
            assert (bucket.num_rows, bucket.num_tokens) == (1, 1 + length), "nothing is padded"
        if 2 * rows * (1 + length) <= tokens:
            bucket = menu.choose([1 + length] * rows, rows * (1 + length), verifies=True)
            assert bucket.num_rows < 2 * rows


PLAN = MemoryPlan(
    device="gpu (test)",
    available_bytes=10_000,
    weights_bytes=4_000,
    workspace_bytes=1_000,
    block_bytes=100,
    block_size=16,
    num_blocks=0,
    max_model_len=64,
)


def test_blocks_are_counted_from_what_is_left():
    assert choose_num_blocks(PLAN, requested=None, pool_bytes=None, max_num_seqs=8).num_blocks == 50
    assert (
        choose_num_blocks(PLAN, requested=None, pool_bytes=2_050, max_num_seqs=8).num_blocks == 20
    )
    assert choose_num_blocks(PLAN, requested=7, pool_bytes=None, max_num_seqs=8).num_slots == 6 * 16
    on_host = MemoryPlan(**{**PLAN.__dict__, "device": "cpu (test)"})
    # 320, halved
    assert (
        choose_num_blocks(on_host, requested=None, pool_bytes=None, max_num_seqs=80).num_blocks
        == 21
    )
    # no use for more
    assert (
        choose_num_blocks(on_host, requested=None, pool_bytes=None, max_num_seqs=2).num_blocks == 9
    )


def test_a_default_does_not_follow_what_happens_to_be_free():
    """On CPU it does not change while half of it is enough; on an accelerator it changes in steps
    of 3 %.

    A number of blocks is a shape to compile.
    """

    def num_blocks(device, available, **fields):
        plan = dataclasses.replace(PLAN, device=device, available_bytes=available, **fields)
        return choose_num_blocks(plan, requested=None, pool_bytes=None, max_num_seqs=64).num_blocks

    assert {num_blocks("cpu (test)", available) for available in range(60_000, 10**7, 99_991)} == {
        64 * 4 + 1
    }
    on_gpu = [
        num_blocks("gpu (test)", available) for available in range(10**7, 10**7 + 100_000, 100)
    ]
    assert len(set(on_gpu)) <= 2 and min(on_gpu) * 1.04 * PLAN.block_bytes > 10**7
    long = {"max_model_len": 131_072, "block_bytes": 2**20}
    assert num_blocks("cpu (test)", 2**36, **long) == 4096, (
        "a sequence of max_model_len would take 8 GiB"
    )
    assert (
        num_blocks("cpu (test)", 2**36, max_model_len=40_000, block_bytes=1000) == 40_000 // 16 + 1
    )


def test_jax_is_given_the_part_of_a_gpu_that_the_engine_is_asked_to_use(monkeypatch):
    """The card has 100 GB. JAX reads the variable when it opens its devices."""

    def plan(utilization, *, is_open=False, fraction=None, **variables):
        for name in gpu_memory.VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        limit = [int(1e9 * 75)]
        monkeypatch.setattr(gpu_memory, "_fraction", fraction)
        monkeypatch.setattr(gpu_memory, "_are_open", lambda: is_open)
        monkeypatch.setattr(
            jax,
            "devices",
            lambda: limit.append(int(1e11 * float(os.environ[gpu_memory.VARIABLES[0]]))),
        )
        gpu_memory.open_devices(utilization)
        assert set(variables) == {name for name in gpu_memory.VARIABLES if name in os.environ}, (
            "nobody else is told"
        )
        return (
            round(gpu_memory.share(limit[-1], utilization) / 1e9, 6),
            limit[-1] / 1e9,
            gpu_memory.notice(utilization),
        )

    assert plan(0.9) == (90, 95, "")
    assert plan(0.3) == (30, 35, "") and plan(1.0) == (95, 95, "")
    assert plan(0.45, is_open=True, fraction=0.75) == (45, 75, ""), "a second engine"
    assert (
        plan(0.9, is_open=True)[:2] == (67.5, 75)
        and "had opened the GPU before" in plan(0.9, is_open=True)[2]
    )
    for name in gpu_memory.VARIABLES:
        *sizes, notice = plan(0.8, **{name: "0.75"})
        assert (
            sizes == [60, 75]
            and f"0.8 is a share of what JAX may take of the GPU, not of all its memory: "
            f"{name}=0.75"
            in notice
        )


def test_jax_says_whether_its_devices_are_open():
    program = (
        "from jaxpage.device.hardware import gpu_memory as g; a = g._are_open(); import jax; "
        "jax.devices(); print(a, g._are_open())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "True"]


_STARTS = """
import sys
from collections import namedtuple
import psutil
psutil.virtual_memory = lambda: namedtuple("Memory", "available total")(int(sys.argv[1]), 2**36)
"""
_COMPILES = """
from jaxpage.cli import main
main(['compile', '--model', sys.argv[2], '--max-num-seqs', '2', '--max-num-batched-tokens', '16'])
"""
_SERVES = """
from jaxpage import LLM
llm = LLM(sys.argv[2], max_num_seqs=2, max_num_batched_tokens=16)
llm.generate([[1, 2, 3]], use_tqdm=False)
from jaxpage.device.hardware import gpu_memory
assert round(gpu_memory._fraction, 2) == 0.95, "JAX opens its devices as the engine asks"
"""


def test_settings_of_cuda_graphs_become_options_of_xla(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    graphs, update = "xla_gpu_enable_command_buffer", "xla_gpu_command_buffer_update_mode"
    usual = compiler_options("gpu")
    assert set(usual) == {graphs} and "COLLECTIVES" not in usual[graphs]
    requested = GraphSettings("skip_profiled", collectives=True)
    assert compiler_options("gpu", requested) == {
        graphs: f"{usual[graphs]},COLLECTIVES",
        update: "SKIP_PROFILED",
    }
    assert compiler_options("cpu", requested) == {}


@pytest.mark.parametrize(
    ("graphs", "platform", "flags", "text"),
    [
        (
            {"update_mode": "skip_profiled"},
            "cpu",
            "",
            "cudagraph_update_mode 'skip_profiled' is for GPUs, .* is a cpu",
        ),
        (
            {"collectives": True},
            "cpu",
            "",
            "cudagraph_collectives true is for GPUs, and the device is a cpu",
        ),
        (
            {"collectives": True},
            "gpu",
            "--xla_gpu_enable_command_buffer=",
            "cudagraph_collectives true: XLA_FLAGS has xla_gpu_enable_command_buffer too",
        ),
        (
            {"update_mode": "nonsense"},
            "gpu",
            "",
            "cudagraph_update_mode 'nonsense': XLA of jax .* does not know it",
        ),
        ({}, "cpu", "", None),
        ({"update_mode": "always_update", "collectives": True}, "gpu", "", None),
    ],
)
def test_settings_of_cuda_graphs_are_honoured_or_refused_by_name(
    monkeypatch, graphs, platform, flags, text
):
    monkeypatch.setenv("XLA_FLAGS", flags)
    if text is None:
        check_graphs(GraphSettings(**graphs), platform)
        return
    with pytest.raises(UnsupportedError, match=text):
        check_graphs(GraphSettings(**graphs), platform)


def test_an_engine_on_a_cpu_refuses_settings_of_cuda_graphs():
    from jaxpage import LLM

    with pytest.raises(UnsupportedError, match="cudagraph_update_mode 'always_update' is for GPUs"):
        LLM("demo", cudagraph_update_mode="always_update", use_tqdm=False)


def test_a_second_start_finds_every_executable(tmp_path):
    """`jaxpage compile` compiles what an engine with the same settings takes, in another process
    with other free memory.
    """
    model = random_checkpoint(tmp_path / "model", {**LLAMA, "num_hidden_layers": 1})
    environment = {name: value for name, value in os.environ.items() if "CACHE" not in name}
    environment["JAXPAGE_CACHE_DIR"] = str(with_compiled_kernels(tmp_path / "cache"))
    said = [
        subprocess.run(
            [sys.executable, "-c", _STARTS + program, str(free), str(model)],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stderr
        for program, free in ((_COMPILES, 2**34 + 12345), (_SERVES, 2**33))
    ]
    assert "0 of " in said[0] and "executables were in the compile cache" in said[0]
    assert re.search(r"all \d+ executables were in the compile cache", said[1]), said[1]


@pytest.mark.parametrize(
    ("change", "requested", "advice"),
    [
        (
            {},
            {"requested": 51},
            r"51 KV blocks take 4\.98 KiB: .* Lower num_blocks to 50 or less, or leave it out",
        ),
        (
            {},
            {"pool_bytes": 5_100},
            r"51 KV blocks take .* Lower kv_cache_memory_bytes to 5000 or less, or leave it out",
        ),
        (
            {},
            {"requested": 1},
            r"A pool of 1 blocks .* Set num_blocks to 2 or more; 4\.88 KiB are free for the "
            r"pool\.$",
        ),
        (
            {},
            {"pool_bytes": 199},
            r"A pool of 1 blocks .* Set kv_cache_memory_bytes to 200 or more; 4\.88 KiB are free",
        ),
        ({"block_size": 1}, {"requested": 2}, r"A pool of 2 blocks .* Set num_blocks to 3 or more"),
        # What is missing: 100 bytes.
        (
            {"weights_bytes": 8_900},
            {},
            r"100 B are missing: lower max_num_batched_tokens .* 900 B or less; or free memory",
        ),
        (
            {"weights_bytes": 8_900},
            {"narrower_dtype": "bfloat16"},
            r": use dtype bfloat16, .* take 4\.35 KiB; or lower",
        ),
        (
            {"weights_bytes": 8_900},
            {"utilization": 0.9},
            r"; or raise gpu_memory_utilization to 0\.91 or more; or free",
        ),
        ({"weights_bytes": 8_900, "device": "cpu (test)"}, {}, r"900 B or less; or free memory\.$"),
        # So much that nothing of that would help.
        (
            {"weights_bytes": 30_000},
            {"narrower_dtype": "bfloat16", "utilization": 0.9, "pool_bytes": 1_000},
            r"20\.70 KiB are missing: free memory of the device, or use a larger one, or "
            r"several \(tensor_parallel_size\)\.$",
        ),
        (
            {"weights_bytes": 17_600},
            {"narrower_dtype": "bfloat16"},
            r"8\.59 KiB are missing: use dtype bfloat16, .*8\.59",
        ),
    ],
)
def test_what_does_not_fit_says_so_in_numbers_and_what_helps(change, requested, advice):
    """Whoever does what is advised has a pool."""
    plan = dataclasses.replace(PLAN, **change)
    with pytest.raises(CapacityError, match=advice) as error:
        choose_num_blocks(
            plan, **{"requested": None, "pool_bytes": None, "max_num_seqs": 8, **requested}
        )
    assert "of 9.77 KiB available on" in str(error.value) and "a block of" in str(error.value)


@pytest.mark.parametrize(
    ("device", "num_requested", "available", "expected"),
    [
        ("gpu (test)", None, 10**6, 49),  # as many as the device has, the null block not counted
        (
            "gpu (test)",
            None,
            2_100,
            6,
        ),  # 49, halved: half of 2,100 bytes is 10 blocks of 100, one of them the null block
        ("gpu (test)", None, 150, 0),
        ("gpu (test)", 20, 2_100, 20),  # what was asked for may take all
        ("gpu (test)", 70, 10**6, 70),
        # weights, workspace and pool take 10,000 of the same memory
        ("cpu (test)", None, 12_100, 6),
        ("cpu (test)", None, 5_000, 0),
        ("cpu (test)", 20, 12_100, 20),
    ],
)
def test_host_blocks_are_counted_from_what_is_left(device, num_requested, available, expected):
    plan = dataclasses.replace(PLAN, device=device, num_blocks=50)
    plan = choose_num_host_blocks(plan, requested=num_requested, available=available)
    assert plan.num_host_blocks == expected
    rows = {6: "6, 700 B", 20: "20, 2.05 KiB", 49: "49, 4.88 KiB", 70: "70, 6.93 KiB"}
    assert dict(plan.rows()).get("host blocks for swapping") == rows.get(expected)


@pytest.mark.parametrize(("device", "available"), [("gpu (test)", 2_099), ("cpu (test)", 12_099)])
def test_host_blocks_that_do_not_fit_say_so_in_numbers(device, available):
    plan = dataclasses.replace(PLAN, device=device, num_blocks=50)
    with pytest.raises(
        CapacityError,
        match=r"20 host .* 2\.05 KiB, but .* 2\.05 KiB are free; .* Lower swap_space_blocks to "
        r"19 or less",
    ):
        choose_num_host_blocks(plan, requested=20, available=available)


def test_the_table_names_every_part():
    plan = choose_num_blocks(PLAN, requested=None, pool_bytes=None, max_num_seqs=8)
    rows = dict(plan.rows())
    assert (
        rows["KV tokens"] == "784"
        and rows["sequences of 64 tokens"] == "12.2"
        and rows["weights"] == "3.91 KiB"
    )


def test_the_compile_cache_is_the_users_alone(tmp_path, caplog):
    names = [
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    ]
    before = {name: getattr(jax.config, name) for name in names}
    try:
        assert use_compile_cache(tmp_path / "deep" / "cache")
        assert stat.S_IMODE((tmp_path / "deep" / "cache").stat().st_mode) == 0o700
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "deep" / "cache")
        (tmp_path / "file").touch()
        assert not use_compile_cache(tmp_path / "file" / "cache")
        assert "no compile cache at" in caplog.text
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
