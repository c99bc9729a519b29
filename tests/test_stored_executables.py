"""Executables as files: a second start compiles nothing and says the same; damaged ones, and those
of another kind, are compiled again.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpage.device import executables, stored_executables
from jaxpage.device.stored_executables import StoredExecutables
from tests.support.engines import LLAMA, make_llm
from tests.support.executables import with_compiled_kernels
from tests.support.random_checkpoints import random_checkpoint

PROGRAM = """
import json, sys
import jax
from jaxpage import LLM, SamplingParams
params = SamplingParams(temperature=0.9, seed=3, max_tokens=40, ignore_eos=True, n=2, logprobs=1, presence_penalty=0.5)
engines = 2 * [None, {"method": "token_recycling", "num_speculative_tokens": 3}]
found = []
for drafting in engines[: int(sys.argv[2])]:
    settings = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "num_blocks": 33, "preemption_mode": "swap"}
    llm = LLM(sys.argv[1], use_tqdm=False, speculative_config=drafting, **settings)
    pages = jax.tree.leaves(llm._engine.runner._pages)
    outputs = llm.generate([[1, 2, 3, 1, 2, 3]] * 3, params, use_tqdm=False)
    assert all(page.is_deleted() for page in pages), "donated"
    executables = llm._engine.runner.executables
    texts = [[(one.token_ids, one.cumulative_logprob) for one in each.outputs] for each in outputs]
    found.append({"texts": texts, "found": executables.num_found_of_all[0], "all": executables.num_found_of_all[1],
        "workspace": executables.workspace_bytes(), "compiled": executables.compile_total})
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("model"), {**LLAMA, "num_hidden_layers": 1})


def start(model: Path, cache: Path, num_engines: int) -> tuple[list[Any], str]:
    environment = {**os.environ, "JAXPAGE_CACHE_DIR": str(cache)}
    del environment["JAX_COMPILATION_CACHE_DIR"]  # of the tests
    command = [sys.executable, "-c", PROGRAM, str(model), str(num_engines)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_a_second_start_compiles_nothing_and_says_the_same(model, tmp_path):
    """The engines that come after them in the second process find what was compiled again, too."""
    cache = with_compiled_kernels(tmp_path / "cache")
    first, _ = start(model, cache, 2)
    assert first[0]["found"] == 0 and first[0]["all"] > 4
    assert first[1]["found"] == 4, "what makes pages and moves blocks is as for the first"
    assert first[0]["texts"] == first[1]["texts"], "with drafts as without"
    files = sorted(cache.glob("xla/*/executables/*"))
    assert len(files) > first[0]["all"] and files[0].parent.stat().st_mode & 0o077 == 0
    contents = [path.read_bytes() for path in files]
    for index in range(0, len(files), 8):
        files[index].write_bytes(contents[index][:-1] + b"?")
    for index in range(4, len(files), 8):
        files[index].write_bytes(contents[index - 1])  # whole, but another one
    started, said = start(model, cache, 4)
    second, third = started[:2], started[2:]
    assert said.count("is compiled again: its contents are not those") == len(files[::4])
    for engine, other, last in zip(first, second, third, strict=True):
        assert engine["texts"] == other["texts"] == last["texts"]
        assert last["found"] == last["all"]
        assert last["workspace"] == engine["workspace"]
    assert sum(engine["all"] - engine["found"] for engine in second) == len(files[::4])
    for engine in started:
        assert engine["compiled"] == engine["all"] - engine["found"], "and nothing else, as pages"


def test_what_is_compiled_has_a_file(tmp_path):
    stored = StoredExecutables(tmp_path / "executables", jax.devices())
    calls = [
        functools.partial(lambda _: jax.jit(lambda x: x + 1.0).lower(1.0).compile(), number)
        for number in range(2)
    ]
    assert not stored.has(calls[0])
    stored.get(calls[0], (1.0,), 1.0)
    assert [*map(stored.has, calls)] == [True, False]


def test_other_flags_may_make_other_code(tmp_path, monkeypatch):
    compile_one = functools.partial(lambda: jax.jit(lambda x: x + 1.0).lower(1.0).compile())
    stored = StoredExecutables(tmp_path / "executables", jax.devices())
    surroundings = stored_executables._surroundings
    usual = os.environ.get("XLA_FLAGS", "")
    for number, flags in enumerate((usual, f"{usual} --xla_cpu_enable_fast_math=false")):
        monkeypatch.setenv("XLA_FLAGS", flags)
        # a process reads them once
        monkeypatch.setattr(stored_executables, "_surroundings", surroundings.__wrapped__)
        for num_found in (number, number + 1):
            stored.get(compile_one, (1.0,), 1.0)
            assert stored.num_found == num_found


def test_what_a_file_is_expected_to_hold_is_what_a_step_gives(monkeypatch):
    """A step with more rows than the drafter grows trees for gives no candidates."""
    tree = {
        "method": "draft_model",
        "model": "demo/draft",
        "num_speculative_tokens": 15,
        "tree": True,
    }
    sizes = {
        "block_size": 8,
        "max_model_len": 24,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "num_blocks": 10,
    }
    without_candidates = set()
    with make_llm(
        "demo", dtype="bfloat16", speculative_config=tree, **sizes, preemption_mode="swap"
    ) as llm:
        runner, menu = llm._engine.runner, llm._engine.builder.menu
        shapes, mesh = (runner._parameters, runner._pages), runner.executables._mesh
        monkeypatch.setattr(executables, "_compile_step", lambda *_: None)
        for bucket in (menu.decode[0], menu.decode[-1], menu.verify[-1], menu.chunk[-1]):
            arguments = (*shapes, bucket, runner.executables.options, mesh)
            job = functools.partial(executables._compile_step, *arguments)
            step, shapes_of_step = executables.step_call(*arguments)
            output = jax.eval_shape(step, *shapes, *shapes_of_step)
            assert jax.tree.structure(executables._trees(job)[1]) == jax.tree.structure(output), (
                bucket
            )
            without_candidates.add(output[0].draft_candidates is None)
    assert without_candidates == {True, False}


def test_what_cannot_be_stored_is_said_in_a_line(tmp_path, caplog):
    compile_one = functools.partial(lambda: jax.jit(lambda x: [x] * 300).lower(1.0).compile())
    stored = StoredExecutables(tmp_path / "executables", jax.devices())
    executable = stored.get(compile_one, (1.0,), {"other": 1.0})
    assert len(executable(1.0)) == 300 and not [*tmp_path.glob("*/*")]
    (record,) = caplog.records
    assert "cannot store executables in" in record.getMessage() and len(
        record.getMessage()
    ) < 300 + len(str(tmp_path))


def test_a_step_that_calls_python_is_not_stored_and_no_warning(tmp_path, caplog):
    def calls_python(x: jax.Array) -> jax.Array:
        return jax.pure_callback(lambda value: value, jax.ShapeDtypeStruct((), x.dtype), x)

    compile_one = functools.partial(lambda: jax.jit(calls_python).lower(jnp.ones(())).compile())
    executable = StoredExecutables(tmp_path / "executables", jax.devices()).get(
        compile_one, (1.0,), 1.0
    )
    assert executable(jnp.ones(())) == 1.0
    assert not caplog.records and not [*tmp_path.glob("*/*")]
