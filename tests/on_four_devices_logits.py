"""Logits that several devices have in parts: the draws from them, and that no step gathers them
without need.

`tests/test_tensor_parallel.py` runs this file with `tests/on_four_devices.py`, which says how to
run it by hand.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest

from jaxpage import LLM, SamplingParams
from jaxpage.device import steps
from jaxpage.device.divided_logits import Logits, draw_from_parts
from jaxpage.device.hardware.mesh import make_mesh
from jaxpage.device.inputs.step_inputs import unpack
from jaxpage.layers.sharding import Sharding
from jaxpage.shapes import NOT_FINITE
from tests.support.engines import LLAMA, invariants
from tests.support.executables import when_used
from tests.support.random_checkpoints import random_checkpoint
from tests.support.reference_sampling import drawn
from tests.support.sweeps import few
from tests.test_sampler import BUCKET, NUM_ROWS, TABLES, flags_of, inputs_for
from tools.lab.kernel_lab.inspection import hlo

# Chunks of 16 tokens cut the long prompts, and the pool does not hold both sequences to their end.
SETTINGS: dict[str, Any] = {
    **{
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "block_size": 4,
        "num_blocks": 18,
        "max_model_len": 60,
    },
    **{"dtype": "float32", "preemption_mode": "recompute", "use_tqdm": False},
}
INVARIANT = {"tensor_parallel_reduction": "invariant"}
ON_4 = {"tensor_parallel_size": 4}
pytestmark = pytest.mark.usefixtures("largest_shapes")
VOCAB = 50  # of which four devices have 13 each, two of them padding


def prompts_of(vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, vocab_size, length).tolist() for length in (3, 41, 17)]


def from_parts(
    logits_RV: np.ndarray, packed: np.ndarray, num_devices: int, *, by_row: bool
) -> np.ndarray:
    mesh, sharding = make_mesh(num_devices), Sharding(4, num_devices, num_devices)
    padding = -VOCAB % num_devices
    # whatever is there is no token
    padded = np.pad(logits_RV, ((0, 0), (0, padding)), constant_values=1000.0)
    part = jax.ShapeDtypeStruct((NUM_ROWS, padded.shape[1] // num_devices), np.float32)
    divided = mesh.shapes_of_whole(part, 1)

    def draw(local_RU: jax.Array, packed: jax.Array) -> jax.Array:
        return draw_from_parts(
            Logits(local_RU, VOCAB, sharding), unpack(packed, BUCKET, TABLES), by_row=by_row
        )

    placed = jax.device_put(padded, divided.sharding)
    return np.asarray(jax.jit(mesh.on_each(draw, (divided, None), None))(placed, mesh.put(packed)))


@pytest.mark.parametrize(
    ("num_devices", "by_row"),
    few(itertools.product((2, 4), (True, False)), [(4, True), (2, False)]),
)
def test_parts_give_what_whole_rows_do(num_devices, by_row, monkeypatch):
    """Draws are those of float64, with ties between devices; then the noise of another place is
    planted.
    """
    rng = np.random.default_rng(num_devices)
    logits_RV = np.round(rng.standard_normal((NUM_ROWS, VOCAB)) * 2).astype(np.float32)
    temperature_R = np.where(np.arange(NUM_ROWS) % 3 == 0, 0.0, 0.7).astype(np.float32)
    fields = {
        "seed_R2": [0, 7],
        "drawn_position_R": np.arange(NUM_ROWS),
        "temperature_R": temperature_R,
    }
    greedy = SamplingParams(temperature=0.0)
    random = SamplingParams(temperature=float(np.float32(0.7)))
    expected = [
        drawn(logits.astype(np.float64), random if temperature_R[row] else greedy, 7, 0, row)
        for row, logits in enumerate(logits_RV)
    ]
    logits_RV[0, VOCAB - 1], logits_RV[1], logits_RV[2, 0] = np.nan, -np.inf, np.inf
    expected[:3] = [NOT_FINITE] * 3
    draw = functools.partial(from_parts, logits_RV, num_devices=num_devices, by_row=by_row)
    assert draw(inputs_for(**fields)).tolist() == expected
    all_greedy = draw(inputs_for(**{**fields, "temperature_R": 0.0}, flags=flags_of(RANDOM=0)))
    assert all_greedy[3:].tolist() == logits_RV[3:].argmax(axis=1).tolist()
    if by_row:  # a planted mistake: all devices have the noise of the first
        real = jax.lax.dynamic_slice_in_dim
        monkeypatch.setattr(
            jax.lax, "dynamic_slice_in_dim", lambda array, start, size: real(array, 0, size)
        )
        assert draw(inputs_for(**fields)).tolist() != expected


REQUESTED = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
    "random": SamplingParams(temperature=0.9, seed=3, max_tokens=8, ignore_eos=True),
    "cut off": SamplingParams(
        temperature=0.9, seed=3, top_k=5, top_p=0.8, max_tokens=8, ignore_eos=True
    ),
    "penalised": SamplingParams(
        temperature=0.0, repetition_penalty=1.5, max_tokens=8, ignore_eos=True
    ),
    "scored": SamplingParams(temperature=0.9, seed=3, max_tokens=8, ignore_eos=True, logprobs=1),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("llama"), LLAMA, 1)


def texts(directory: Any, together: list[str], **settings: Any) -> dict[str, Any]:
    """Returns the text of each alone, and of some together."""
    prompt = prompts_of(LLAMA["vocab_size"])[2]
    with when_used(), LLM(str(directory), **{**SETTINGS, **settings}) as llm:
        outputs = {
            name: llm.generate(prompt, params, use_tqdm=False) for name, params in REQUESTED.items()
        }
        requested = [REQUESTED[name] for name in together]
        outputs["together"] = llm.generate([prompt] * len(requested), requested, use_tqdm=False)
        invariants(llm)
    return {
        name: [list(output.outputs[0].token_ids) for output in group]
        for name, group in outputs.items()
    }


def test_texts_are_those_of_one_device(directory, monkeypatch):
    """Logits are gathered or not. A missing gather for a cut-off would be found."""
    together = ["greedy", "random", "cut off", "penalised", "scored"]
    single = texts(directory, together, **INVARIANT)
    assert single["together"] == [single[name][0] for name in together]
    assert (
        single["random"] == single["scored"] and len({str(single[name]) for name in together}) == 4
    )
    assert texts(directory, together, **ON_4) == single
    monkeypatch.setattr(steps, "need_whole_rows", lambda inputs, vocab_size: inputs.flags[0] < 0)
    planted = texts(directory, ["greedy", "random"], **ON_4)
    assert (planted["greedy"], planted["random"]) == (single["greedy"], single["random"])
    assert planted["cut off"] != single["cut off"] and planted["penalised"] != single["penalised"]


def test_drafts_are_verified_on_parts(directory, monkeypatch):
    """Token recycling looks at whole rows.

    Where drafts are taken unseen the text is another one.
    """
    params = [
        SamplingParams(temperature=t, seed=3, max_tokens=30, ignore_eos=True) for t in (0.0, 0.9)
    ]
    prompt = prompts_of(LLAMA["vocab_size"])[2]

    def generate(**settings: Any) -> tuple[list[list[int]], int]:
        with when_used(), LLM(str(directory), **{**SETTINGS, **settings}) as llm:
            outputs = llm.generate([prompt] * 2, params, use_tqdm=False)
            stats = llm.stats()
        return [output.outputs[0].token_ids for output in outputs], stats[
            "spec_decode_num_accepted_tokens_total"
        ]

    drafting = {"speculative_config": {"method": "token_recycling", "num_speculative_tokens": 3}}
    single, _ = generate(**INVARIANT)
    four, num_accepted = generate(**ON_4, **drafting)
    assert four == single and num_accepted > 0
    real = steps.accept
    monkeypatch.setattr(steps, "accept", lambda drawn, ids, *others: real(ids, ids, *others))
    assert generate(**ON_4, **drafting)[0] != single


def max_gathered(computations: Mapping[str, hlo.Computation], name: str) -> int:
    """Returns the bytes of the largest array that this computation must gather.

    Of a conditional the way that gathers least counts.
    """
    maximum = 0
    for item in computations[name].instructions:
        if item.opcode.startswith("all-gather"):
            maximum = max(maximum, *item.sizes)
        elif item.opcode == "conditional":
            branches = re.search(
                r"(?:branch_computations=\{|true_computation=)([^}]*)", item.arguments
            )
            assert branches is not None, item.arguments
            maximum = max(
                maximum,
                min(
                    max_gathered(computations, branch)
                    for branch in re.findall(r"%([\w.\-]+)", branches[1])
                ),
            )
        else:
            called = re.findall(r"\b(?:calls|to_apply|body|condition)=%?([\w.\-]+)", item.arguments)
            maximum = max([maximum, *(max_gathered(computations, each) for each in called)])
    return maximum


@pytest.mark.parametrize("num_devices", few([2, 4], [4]))
def test_no_greedy_step_gathers_a_row_of_logits(directory, num_devices, monkeypatch):
    """No compiled step does. A gather that is planted is found."""

    def gather_bytes() -> tuple[int, int]:
        settings = {**SETTINGS, "tensor_parallel_size": num_devices}
        with when_used(), LLM(str(directory), **settings) as llm:
            (bucket,) = llm._engine.builder.menu.decode
            text = llm._engine.runner.executables.step(bucket).executable.as_text()
        entry = re.search(r"^ENTRY %?([\w.\-]+) ", text, re.M)
        assert entry is not None
        return max_gathered(hlo.computations(text), entry[1]), bucket.num_rows * 4 * LLAMA[
            "vocab_size"
        ]

    maximum, row_bytes = gather_bytes()
    # Of the sums of all layers: 4 shards of 64 columns.
    assert 0 < maximum < row_bytes
    scope = steps._scope

    def undivided(*inputs: Any, divided_logits: bool = False, **settings: Any) -> Any:
        return scope(*inputs, **settings)

    monkeypatch.setattr(steps, "_scope", undivided)
    maximum, row_bytes = gather_bytes()
    assert maximum >= row_bytes
