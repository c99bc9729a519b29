"""Tests of whatever needs several devices.

`tests/test_tensor_parallel.py` runs this file in a process of its own, whose CPU is four devices.
By hand: XLA_FLAGS=--xla_force_host_platform_device_count=4 pytest -n 0 tests/on_four_devices.py
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")

from jaxpage import LLM, LoRARequest, SamplingParams  # noqa: E402
from jaxpage.checkpoints import convert, load_shards, open_model  # noqa: E402
from jaxpage.checkpoints.in_memory import open_parameters, with_parameters  # noqa: E402
from jaxpage.device.batch_invariance import refuse_sums  # noqa: E402
from jaxpage.device.executables import step_call  # noqa: E402
from jaxpage.device.hardware import make_mesh  # noqa: E402
from jaxpage.device.hardware.backends import Backend  # noqa: E402
from jaxpage.device.hardware.mesh import shapes_of  # noqa: E402
from jaxpage.errors import CheckpointError, UnsupportedError  # noqa: E402
from jaxpage.layers import sharded, sharding  # noqa: E402
from jaxpage.models import abstract_model  # noqa: E402
from jaxpage.models.sharding import dividing  # noqa: E402
from jaxpage.replay import replay  # noqa: E402
from jaxpage.support import support_matrix  # noqa: E402
from pallas_kernels.compat import describe_gpu  # noqa: E402
from tests.on_four_devices_logits import INVARIANT, ON_4, SETTINGS, prompts_of  # noqa: E402
from tests.support import seeing_models as seeing  # noqa: E402
from tests.support.engines import LLAMA, invariants, run_giving_way, tokens_of  # noqa: E402
from tests.support.executables import when_used  # noqa: E402
from tests.support.gguf_files import write_gguf  # noqa: E402
from tests.support.hf_models import MODELS, config_json, make_model, save_model  # noqa: E402
from tests.support.matrix import ON_DEVICES, Engines, cell  # noqa: E402
from tests.support.medusa import random_heads, write_original  # noqa: E402
from tests.support.mtp import save_with_head  # noqa: E402
from tests.support.random_checkpoints import random_checkpoint, random_tensors  # noqa: E402
from tests.support.sweeps import few  # noqa: E402
from tests.test_drafting_ahead import (  # noqa: E402
    GREEDY,
    assert_as_the_reference,
    heads,
    of_a_head,
    record,
    write_heads,
)
from tests.test_experts import save_gpt_oss  # noqa: E402

pytestmark = pytest.mark.usefixtures("largest_shapes")

NUM_TOKENS = 10
LAYOUTS = {"one": INVARIANT, "two": {"tensor_parallel_size": 2}, "four": ON_4}
KEY_HEADS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
# Small: what is compiled takes the time of this file, and for a head width of 16 that is least.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama-grouped": {"head_dim": 16},
    "qwen3-grouped": {"head_dim": 16, "num_hidden_layers": 1},
    "gemma3-types": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "bloom-plain": {"n_layer": 1},  # ALiBi's slopes by head
    "mixtral-window": {"head_dim": 16, "num_hidden_layers": 1},
    "gpt-oss-windows": {"num_hidden_layers": 1, "num_local_experts": 4},
    "falcon-grouped": {
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_kv_heads": 4,
        "num_hidden_layers": 1,
    },
    "deepseek-v3-groups": {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    "qwen3-5-mixed": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        **KEY_HEADS,
    },
}
# The others differ from these in nothing that is divided; two devices, with two shards each, are a
# column of the support matrix, and a plain Llama is in the tests of one small model.
ALWAYS = ("gpt-oss-windows", "deepseek-v3-groups", "qwen3-5-mixed")
# Where each device has the part of the first, which must be seen.
PLANTED = {
    **{
        "gpt-oss-windows": "sinks",
        "falcon-grouped": "query_key_value",
        "falcon-multi-query": "query_key_value",
    },
    **{
        "deepseek-v3-groups": "expand",
        "qwen3-5-mixed": "convolution",
        "qwen3-next-mixed": "beta_step",
        "lfm3-mixed": "gates",
    },
}
# Sizes that four devices can share, of others.
SWEPT = {
    "falcon-one-norm": FAMILIES["falcon-grouped"],
    "mpt-six-heads": {"n_heads": 8},
    "opt-norm-first": {"hidden_size": 64},
    "lfm3-mixed": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    **{
        name: {"n_routed_experts": 4}
        for name in ("deepseek-v2-greedy", "deepseek-v3-halves", "glm4-moe-lite-mixed")
    },
    "qwen3-5-moe": {"num_experts": 4, **KEY_HEADS},
    "qwen3-next-mixed": {
        "num_hidden_layers": 2,
        "full_attention_interval": 2,
        "num_experts": 4,
        **KEY_HEADS,
    },
}
INDIVISIBLE = (
    *(
        "gemma4-keys-are-values",
        "opt-350m-form",
        "qwen3-moe-mixed",
        "qwen2-moe-shared",
        "qwen3-5-short",
    ),
    *("granitemoehybrid-mixed", "granitemoehybrid-dense", "lfm2-mixed", "lfm2-plain"),
    *("lfm2-moe-mixed", "lfm2-moe-uncorrected", "lfm3-plain"),
    *("mimo-v2-flash-windows", "mimo-v2-flash-wide-values"),
    *(
        "nemotron-h-mixed",
        "nemotron-h-experts",
        "nemotron-h-latent",
        "mamba-tied",
        "mamba-biases",
        "falcon-mamba-norms",
        "mamba2-tied",
        "jamba-mixed",
        "jamba-dense",
        "zamba2-turns",
        "zamba2-biases",
        "bamba-mixed",
        "falcon-h1-factors",
        "falcon-h1-first",
        "falcon-h1-plain",
    ),
)
DIVISIBLE = [
    name for name in MODELS if name not in INDIVISIBLE and "text_config" not in config_json(name)
]


def test_there_are_four_devices():
    assert len(jax.devices()) == 4


def generate(
    directory: Path | str, prompts: list[list[int]], temperature: float = 0.0, **settings: Any
) -> Any:
    """Returns tokens, and the log probabilities of the likeliest ones."""
    params = SamplingParams(
        temperature=temperature, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3
    )
    with when_used(), LLM(str(directory), **{**SETTINGS, **settings}) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        invariants(llm)
    return tokens_of(outputs)


@torch.no_grad()
def assert_as_transformers(model: Any, prompts: list[list[int]], outputs: Any) -> None:
    """Checks that each token is the likeliest after those before it, with transformers' log
    probability.
    """
    for prompt, (tokens, logprobs) in zip(prompts, outputs, strict=True):
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].double()
        assert logits.argmax(-1).tolist() == tokens
        expected = logits.log_softmax(-1)
        for index, entries in enumerate(logprobs):
            for token, logprob in entries.items():
                assert abs(logprob - float(expected[index, token])) < 1e-4


@pytest.mark.usefixtures("decodes_in_chunks")
@pytest.mark.parametrize(
    ("name", "layout"),
    few(
        itertools.product(DIVISIBLE, ("two", "four")),
        [(name, "four") for name in ALWAYS],
    ),
)
def test_one_two_and_four_devices_give_the_same_bits_and_those_of_transformers(
    name, layout, tmp_path, monkeypatch
):
    """A mistake is planted in some: each device has of one weight the part of the first.

    GPT-OSS has its experts in MXFP4.
    """
    save = save_gpt_oss if name == "gpt-oss-windows" else functools.partial(save_model, name)
    model = save(tmp_path, **{**SWEPT, **FAMILIES}.get(name, {}))
    model.generation_config.eos_token_id = None
    prompts = prompts_of(model.config.vocab_size)
    single, several = (generate(tmp_path, prompts, **LAYOUTS[each]) for each in ("one", layout))
    assert_as_transformers(model, prompts, single)
    assert single == several
    if layout == "four" and name in PLANTED:
        plant_parts_of_the_first(monkeypatch, PLANTED[name])
        assert generate(tmp_path, prompts, **ON_4) != single


def plant_parts_of_the_first(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """Gives each device the first one's part of the parameters that have this in their path."""
    real = dividing.ShardedWeight.boxes

    def boxes(self, place, device):
        return real(self, place, 0 if part in place.path else device)

    monkeypatch.setattr(dividing.ShardedWeight, "boxes", boxes)


# Of one small model, on which a mistake is planted too.


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("llama"), LLAMA, 1)


@pytest.fixture(scope="module")
def expected(directory):
    return generate(directory, prompts_of(257), 0.9, **INVARIANT)


def weights_in_parts(files: Any, *, invariant: bool) -> list[Any]:
    """Returns the weights of a model's parts on four devices."""
    divided = dividing.Sharding(2, 4, 4, invariant=invariant)
    rule = dividing.with_sharding(divided, files.rule)
    _, shapes = abstract_model(files.family, files.spec, "float32", rule)
    weights = [filled.weight for filled in files.plan.parameters]
    return dividing.shard_weights(weights, shapes, divided)


@pytest.mark.parametrize("invariant", [True, False])
def test_arrays_on_devices_are_divided_there(invariant):
    """Arrays of one device, of all four, and some of each are divided; JAX itself lets nothing of
    the host in.
    """
    tensors = random_tensors(LLAMA)
    mesh = make_mesh(4)
    places = [
        jax.NamedSharding(jax.sharding.Mesh(np.array(jax.devices()), "x"), spec)
        for spec in (jax.P("x"), jax.P())
    ] + [jax.devices()[2]]
    arrays = {
        name: jax.device_put(array, places[index % 3 if array.shape[0] % 4 == 0 else 2])
        for index, (name, array) in enumerate(tensors.items())
    }
    on_host = open_parameters(LLAMA, tensors)
    on_device = with_parameters(on_host, arrays)
    about = weights_in_parts(on_host, invariant=invariant), mesh.put, mesh.put_shards
    for dtype in ("float32", "bfloat16"):
        expected = load_shards(on_host.plan, dtype, *about)
        with jax.transfer_guard_host_to_device("disallow_explicit"):
            made = load_shards(on_device.plan, dtype, *about)
        for array, other in zip(*map(jax.tree.leaves, (made, expected)), strict=True):
            assert array.sharding == other.sharding
            np.testing.assert_array_equal(np.asarray(array), np.asarray(other))
    assert not any(array.is_deleted() for array in arrays.values())


def test_parts_are_the_same_of_either_layout_of_files(directory, tmp_path, capfd, monkeypatch):
    """Each device gets its part, of safetensors files and of Orbax."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    mesh = make_mesh(4)
    files, orbax = map(
        open_model, (directory, convert(directory, tmp_path / "orbax", progress=False))
    )
    about = weights_in_parts(files, invariant=True), mesh.put, mesh.put_shards
    expected, actual = (
        load_shards(each.plan, "bfloat16", *about, progress=True) for each in (files, orbax)
    )
    for array, other in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert array.sharding == other.sharding
        np.testing.assert_array_equal(np.asarray(array), np.asarray(other))
    assert jax.tree.structure(expected) == jax.tree.structure(actual)
    assert "loading weights: 100%" in capfd.readouterr().err


@pytest.mark.usefixtures("decodes_in_chunks")
def test_what_is_fast_gives_the_same_tokens(directory, expected):
    fast = {**ON_4, "tensor_parallel_reduction": "fast"}
    outputs = generate(directory, prompts_of(257), 0.9, **fast)
    assert [tokens for tokens, _ in outputs] == [tokens for tokens, _ in expected]


@pytest.mark.sweep
def test_bfloat16_too(directory):
    single, four = (
        generate(directory, prompts_of(257), 0.9, **layout, dtype="bfloat16")
        for layout in (INVARIANT, ON_4)
    )
    assert single == four


@pytest.mark.usefixtures("decodes_in_chunks")
@pytest.mark.parametrize("mistake", few(["order", "heads"], ["order"]))
def test_a_planted_mistake_is_seen(directory, expected, mistake, monkeypatch):
    if mistake == "order":  # two sums, of which the second depends on the devices

        def total(parts, shards):
            partial = sum(parts[1:], parts[0])
            return (
                partial if shards.num_devices == 1 else jax.lax.psum(partial, sharding.DEVICE_AXIS)
            )

        monkeypatch.setattr(sharded, "total", total)
    else:  # each shard has the key/value heads of another
        real = sharding.Sharding.part

        def part(self, axis, size, place):
            return real(self, axis, size, 3 - place if axis == "kv_heads" else place)

        monkeypatch.setattr(sharding.Sharding, "part", part)
    assert generate(directory, prompts_of(257), 0.9, **ON_4) != expected


def test_one_engine_in_every_other_way(directory, expected, tmp_path):
    """One engine answers alone as together, scores, embeds, takes weights, and its log is
    replayed.
    """
    prompts, log = prompts_of(257), tmp_path / "log"
    stored = load_file(directory / "model.safetensors")
    params = SamplingParams(
        temperature=0.9, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3
    )
    with when_used(), LLM(str(directory), **{**SETTINGS, **ON_4}) as llm:
        alone = [tokens_of(llm.generate(prompt, params, use_tqdm=False))[0] for prompt in prompts]
        assert alone == expected
        reported = [
            [entry[id_] for entry, id_ in zip(entries, ids, strict=True)]
            for ids, entries in expected
        ]
        assert llm.score(prompts, [ids for ids, _ in expected]) == reported
        held = {name: np.asarray(array) for name, array in llm.parameters().items()}
        assert held.keys() == stored.keys()
        for name, array in stored.items():
            np.testing.assert_array_equal(held[name], array, err_msg=name)
        (kernel,) = llm._engine.runner.parameters["target"]["layers"][0]["mlp"]["shards"].values()
        shapes = [shard.data.shape for shard in kernel["down"]["kernel"].addressable_shards]
        assert shapes == [(4, 40, 16, 1)] * 4, "a device has its part of the weights, in panels"
        page = llm._engine.runner._pages[0].k_pages
        assert [shard.data.shape[2] for shard in page.addressable_shards] == [1] * 4, (
            "and of the pages"
        )
        vectors = llm.embed(prompts, use_tqdm=False)
        llm.update_parameters({name: array * np.float32(0.9) for name, array in held.items()})
        assert tokens_of(llm.generate(prompts, params, use_tqdm=False)) != expected
        llm.update_parameters(held)
        assert tokens_of(llm.generate(prompts, params, use_tqdm=False)) == expected
        wrong = "model.layers.1.mlp.down_proj.weight"
        changed = held[wrong].copy()
        changed[0, -1] = np.nan  # in the part of the last device
        with pytest.raises(CheckpointError, match=f"{wrong}' has numbers that are NaN") as refused:
            llm.update_parameters({**held, wrong: changed}, check_finite=True)
        assert str(refused.value).count("has numbers") == 1
    with when_used(), LLM(str(directory), **{**SETTINGS, **INVARIANT}) as llm:
        np.testing.assert_array_equal(llm.embed(prompts, use_tqdm=False), vectors)
    with when_used(), LLM(str(directory), **{**SETTINGS, **ON_4}, event_log=str(log)) as llm:
        assert tokens_of(llm.generate(prompts, params, use_tqdm=False)) == expected
    with when_used():
        report = replay(log, progress=False)
    assert report.difference is None and report.num_tokens == NUM_TOKENS * len(prompts)
    header = json.loads(log.read_text().splitlines()[0])
    assert header["config"]["tensor_parallel_size"] == 4 and header["engine"]["sharding"] == [
        2,
        4,
        4,
        True,
    ]


# That each shard has its part of weights of few bits, with its scales, is seen in
# tests/test_quantization.py, for every format.


@pytest.mark.usefixtures("decodes_in_chunks")
@pytest.mark.parametrize("quantization", few(["gguf", "int8"], ["int8"]))
def test_weights_of_few_bits_give_the_same_bits(quantization, tmp_path):
    """GGUF has products of parts of two types, with minima and without; with int8 each shard rounds
    its own inputs.
    """
    config = {**LLAMA, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
    if quantization == "gguf":
        kinds = {"embed": "Q8_0", "v_proj": "Q8_0", "down_proj": "Q4_0"}
        config, tensors = {**config, "rms_norm_eps": 1e-6}, random_tensors(config)
        model = write_gguf(tmp_path / "model.gguf", config, tensors, "Q4_1", kinds=kinds)
    else:
        model = random_checkpoint(tmp_path, config)
    single, four = (
        generate(model, prompts_of(257), **LAYOUTS[layout], quantization=quantization)
        for layout in ("one", "four")
    )
    assert single == four


# LoRA adapters: A and B divided as the weights beside which they stand.


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Returns peft's model with two adapters, and the directory that has all of them."""
    pytest.importorskip("peft", reason="the oracle is peft, which is installed for Python 3.11")
    from tests.test_lora import with_adapters

    directory, sizes = tmp_path_factory.mktemp("lora"), {"head_dim": 16, "num_hidden_layers": 1}
    save_model("llama-grouped", directory / "model", **sizes)
    return with_adapters(
        make_model("llama-grouped", **sizes), directory, ["third", "narrow"]
    ), directory


def generate_with(directory: Path, names: list[str | None], **settings: Any) -> Any:
    """Returns what `generate` does, for prompts with an adapter or none.

    Two adapters share one slot.
    """
    lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3)
    requested = [
        name and LoRARequest(name, 1 + names.index(name), str(directory / name)) for name in names
    ]
    with when_used(), LLM(str(directory / "model"), **{**SETTINGS, **lora, **settings}) as llm:
        outputs = llm.generate(prompts_of(131), params, use_tqdm=False, lora_request=requested)
        invariants(llm)
    return tokens_of(outputs)


@pytest.mark.usefixtures("decodes_in_chunks")
def test_adapters_give_the_same_bits_and_those_of_peft(adapters, monkeypatch):
    model, directory = adapters
    names = ["third", None, "narrow"]
    outputs = {
        layout: generate_with(directory, names, **LAYOUTS[layout]) for layout in ("one", "four")
    }
    for name, prompt, output in zip(names, prompts_of(131), outputs["one"], strict=True):
        with model.disable_adapter() if name is None else nullcontext():
            model.set_adapter(name or "third")
            assert_as_transformers(model, [prompt], [output])
    assert outputs["one"] == outputs["four"]
    # a planted mistake: each device has the part of the first
    real = dividing.ShardedWeight.part
    monkeypatch.setattr(
        dividing.ShardedWeight,
        "part",
        lambda self, whole, place, _: real(self, whole, place, 0),
    )
    planted = generate_with(directory, names, **ON_4)
    assert (
        planted[1] == outputs["one"][1]
        and planted[0] != outputs["one"][0]
        and planted[2] != outputs["one"][2]
    )


# Drafters with weights, of which each device has all: the text is that without drafts, to the last
# bit. EAGLE's heads take the model's divided tables, and draft what they draft in float64; a whole
# model is on each device as a head's layer is.


@pytest.mark.usefixtures("decodes_in_chunks")
@pytest.mark.parametrize("method", few(["draft_model", "medusa", "eagle", "eagle3"], ["eagle"]))
def test_a_drafter_changes_no_bit(method, directory, expected, tmp_path):
    """The drafter is the model itself, whose products are whole where it drafts and which is right
    most of the time, or a head of random numbers.
    """
    write_heads(tmp_path)
    write_original(tmp_path / "medusa", random_heads(3, 1, 257, 64))
    drafter = directory if method == "draft_model" else tmp_path / method
    requested = {"method": method, "model": str(drafter), "num_speculative_tokens": 3}
    params = SamplingParams(
        temperature=0.9, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3
    )
    with (
        when_used(),
        LLM(
            str(directory),
            **{**SETTINGS, **ON_4, "speculative_config": requested, "preemption_mode": "swap"},
        ) as llm,
    ):
        engine, prompts = llm._engine, enumerate(prompts_of(257))
        reporters = [
            engine.add(str(name), engine.prepare(None, prompt, params)) for name, prompt in prompts
        ]
        run_giving_way(engine, 4)
        invariants(llm)
        assert tokens_of([reporter.whole() for reporter in reporters]) == expected
        stats = llm.stats()
        if method.startswith("eagle"):
            reference, drafts = of_a_head(heads()[method], directory), record(llm)
            llm.generate(prompts_of(257), GREEDY, use_tqdm=False)
            assert_as_the_reference(llm, drafts, reference)
    assert stats["num_preemptions_total"]["swap"] > 0, (
        "its keys and values are swapped with the model's"
    )
    num_drafts, num_accepted = (
        stats[f"spec_decode_num_{what}_tokens_total"] for what in ("draft", "accepted")
    )
    assert num_drafts > 0 and (method != "draft_model" or num_accepted > num_drafts // 2)


# A head takes the same divided tables as EAGLE, which runs always.
@pytest.mark.sweep
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5"])
def test_a_head_inside_the_checkpoint_changes_no_bit(family, tmp_path):
    """Each device has all of it, experts and latents included, and the model's divided tables.

    A text is that of one device.
    """
    sizes = {"qwen3_5": KEY_HEADS}.get(family, {})
    model = save_with_head(
        family, tmp_path, num_tokens=4, vocab_size=257, max_position_embeddings=256, **sizes
    )
    requested = {"method": "mtp", "num_speculative_tokens": 2}
    outputs = {}
    for layout, drafting in (("one", None), ("four", requested)):
        settings = {**SETTINGS, **LAYOUTS[layout], "speculative_config": drafting}
        with when_used(), LLM(str(tmp_path), **settings) as llm:
            drafts = record(llm) if drafting else []
            outputs[layout] = tokens_of(llm.generate(prompts_of(257), GREEDY, use_tqdm=False))
            invariants(llm)
            if drafting:
                assert_as_the_reference(llm, drafts, of_a_head(model.head, tmp_path))
    assert outputs["one"] == outputs["four"]


# The column of the support matrix: two devices give what one gives, to the last bit.


@pytest.fixture(scope="module")
def engines():
    engines = Engines(**INVARIANT)
    yield engines
    for llm in engines._llms.values():
        invariants(llm)
    engines.close()


# Of each kind of field one: samples, cut-offs, histories, masks, scores and beams.
CELLS = (
    *("n", "top_p", "repetition_penalty", "allowed_token_ids", "structured_outputs"),
    *("prompt_logprobs", "return_hidden_states", "beam_width"),
)


@pytest.mark.usefixtures("decodes_in_chunks")
@pytest.mark.parametrize("name", few(support_matrix(), CELLS))
def test_a_cell_is_what_the_package_says(engines, name):
    assert cell(engines, name, ON_DEVICES) == support_matrix()[name][ON_DEVICES]


@pytest.mark.parametrize(
    ("name", "layout"),
    few(itertools.product(seeing.SEEING, ("two", "four")), []),
)
def test_pictures_give_the_same_bits(name, layout, tmp_path):
    """Each device has the whole encoder."""
    directory = seeing.save(name, tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=3)
    picture = seeing.picture(name, 1, 2)
    requests = [
        seeing.prompt(name, [[5, 6, 7], picture, [8, 9]]),
        seeing.prompt(name, [[5, 6, 7, 4], seeing.picture(name, 2, 3), [8], picture, [3]]),
        ([7, 8, 9], None),
    ]
    outputs = []
    for settings in (LAYOUTS["one"], LAYOUTS[layout]):
        with when_used(), LLM(directory, **{**SETTINGS, **settings}) as llm:
            engine = llm._engine
            reporters = [
                engine.add(f"{number}", engine.prepare(None, ids, params, embedded))
                for number, (ids, embedded) in enumerate(requests)
            ]
            while engine.has_unfinished:
                engine.step()
            outputs.append(tokens_of([reporter.whole() for reporter in reporters]))
    assert outputs[0] == outputs[1]


EXPERTS: dict[str, Any] = {
    **{"head_dim": 16, "num_hidden_layers": 1, "sliding_window": None},
    **FAMILIES["mixtral-window"],
}


def test_a_step_on_two_gpus_leaves_no_sum_of_floats_to_xla_or_to_devices(tmp_path):
    """A model with experts has no such sum with `batch_invariant`; sums in the fastest order are
    seen.
    """
    exact = Backend("triton", batch_invariant=True)

    def trace(**settings: Any) -> Any:
        engine = {**SETTINGS, "attention_backend": "reference", "dtype": "bfloat16"}
        with when_used(), LLM(str(tmp_path), tensor_parallel_size=2, **engine, **settings) as llm:
            runner = llm._engine.runner
            options = runner.executables.options._replace(
                attention_backend=exact, sample_by_row=False
            )
            mesh = make_mesh(2)
            bucket = llm.spec.menu.decode[0]
            parameters, pages = (shapes_of(each) for each in (runner._parameters, runner._pages))
            with describe_gpu():
                step, shapes = step_call(parameters, pages, bucket, options, mesh)
                return step.trace(parameters, pages, *shapes).jaxpr

    save_model("mixtral-window", tmp_path, **EXPERTS)
    refuse_sums(trace())
    with pytest.raises(UnsupportedError, match="psum"):
        refuse_sums(trace(tensor_parallel_reduction="fast"))


@pytest.mark.sweep
def test_two_devices_answer_the_same_in_every_batch_by_kernels_of_a_gpu(tmp_path):
    """A model with experts runs interpreted; one device with the same shards has these
    bits, too.
    """
    save_model("mixtral-window", tmp_path, **EXPERTS)
    settings = {"attention_backend": "triton", "batch_invariant": True, "dtype": "bfloat16"}
    prompts = prompts_of(131)
    together = generate(tmp_path, prompts, tensor_parallel_size=2, **settings)
    for prompt, answer in zip(prompts, together, strict=True):
        assert generate(tmp_path, [prompt], tensor_parallel_size=2, **settings) == [answer]
    assert generate(tmp_path, prompts, **INVARIANT, **settings) == together
