"""LoRA adapters, many in one step, against peft on transformers."""

from __future__ import annotations

import dataclasses
import json
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")
peft = pytest.importorskip("peft", reason="the oracle is peft, which is installed for Python 3.11")

from safetensors.numpy import load_file, save_file  # noqa: E402

from jaxpage import BeamSearchParams, EngineConfig, LoRARequest, SamplingParams  # noqa: E402
from jaxpage.assembly import Built  # noqa: E402
from jaxpage.device.packing import unpack_weights  # noqa: E402
from jaxpage.errors import CheckpointError, ConfigError, ModelNotFoundError, UnsupportedError  # noqa: E402
from jaxpage.models.parameters.lora_layers import lora_targets  # noqa: E402
from jaxpage.models.registry import load_family  # noqa: E402
from jaxpage.serving import startup  # noqa: E402
from jaxpage.serving.model.lora_modules import check_lora_modules  # noqa: E402
from jaxpage.serving.settings.resolving import resolve_both  # noqa: E402
from jaxpage.serving.settings.server_config import ServerConfig  # noqa: E402
from jaxpage.training import TrainableModel  # noqa: E402
from tests.support.engines import LogitsWitness, invariants, make_llm  # noqa: E402
from tests.support.hf_models import config_json, make_model, save_model  # noqa: E402
from tests.support.running import serving  # noqa: E402

pytestmark = pytest.mark.usefixtures("decode_as_chunks")

NAME = "llama-grouped"
NUM_TOKENS = 10
# Chunks of 16 tokens cut every prompt; two sequences do not fit to their end.
SETTINGS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "block_size": 4,
    "num_blocks": 30,
    "max_model_len": 60,
}
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
CONFIGS = {
    "wide": {
        "r": 4,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
        "rank_pattern": {"layers.1.self_attn.q_proj": 8, "down_proj": 2},
        "alpha_pattern": {"v_proj": 3},
    },
    "narrow": {
        "r": 3,
        "lora_alpha": 5,
        "use_rslora": True,
        "target_modules": ["k_proj", "gate_proj"],
    },
    "third": {"r": 8, "lora_alpha": 8, "target_modules": "all-linear"},
}


def with_adapters(base, directory, names):
    """Returns transformers' model with these adapters, and saves each in a directory of its
    name.
    """
    whole = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers for an old name
        for name in names:
            config = peft.LoraConfig(task_type="CAUSAL_LM", **CONFIGS[name])
            if whole is None:
                whole = peft.get_peft_model(base, config, adapter_name=name)
            else:
                whole.add_adapter(name, config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.3, generator=generator)
    whole.eval().save_pretrained(directory)
    return whole


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Returns transformers' model with the adapters, and the directory that has all of them."""
    directory = tmp_path_factory.mktemp("lora")
    save_model(NAME, directory / "model")
    return with_adapters(make_model(NAME), directory, CONFIGS), directory


@pytest.fixture(scope="module")
def llm(model):
    with make_llm(model[1] / "model", **SETTINGS, **LORA) as llm:
        yield llm


def lora(model, name):
    return name and LoRARequest(name, 1 + list(CONFIGS).index(name), str(model[1] / name))


@torch.no_grad()
def greedy_of_peft(model, name, prompt):
    ids, logits = list(prompt), []
    with model.disable_adapter() if name is None else nullcontext():
        if name is not None:
            model.set_adapter(name)
        for _ in range(NUM_TOKENS):
            logits.append(model(torch.tensor([ids])).logits[0, -1].double().numpy())
            ids.append(int(logits[-1].argmax()))
    return ids[len(prompt) :], logits


def prompt_of(length=33, seed=3):
    return np.random.default_rng(seed).integers(0, 131, length).tolist()


def results(outputs):
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def test_tokens_and_logits_are_those_of_peft(model, llm):
    """One prompt has blocks that the adapters must not share; steps have two adapters and none;
    requests are preempted.
    """
    names = ["wide", None, "narrow", "wide", "narrow", None]
    prompts = [prompt_of()] * 3 + [prompt_of(length, length) for length in (5, 21, 30)]
    llm.generate(prompts[0], GREEDY, use_tqdm=False)  # its blocks are in the prefix cache
    witness = LogitsWitness(llm)
    outputs = llm.generate(
        prompts, GREEDY, use_tqdm=False, lora_request=[lora(model, name) for name in names]
    )
    invariants(llm)
    assert llm.stats()["num_preemptions_total"]["recompute"] > 0
    for index, (name, prompt, output) in enumerate(zip(names, prompts, outputs, strict=True)):
        tokens, logits = greedy_of_peft(model[0], name, prompt)
        assert output.outputs[0].token_ids == tokens
        for number, row in enumerate(logits):
            np.testing.assert_allclose(
                witness.logits[1 + index, len(prompt) + number], row, atol=1e-4
            )
    assert len({tuple(output.outputs[0].token_ids) for output in outputs[:3]}) == 3


def test_no_bit_depends_on_the_adapters_of_others(model, llm):
    """Requests run alone and together, in another slot, after an adapter that took its slot;
    without an adapter as in an engine that has none.
    """
    names = ["third", None, "wide", None]
    prompts = [prompt_of(length, length) for length in (9, 30, 21, 12)]
    requested = [lora(model, name) for name in names]
    llm._engine.adapters._slots.clear()
    alone = [
        llm.generate(prompt, GREEDY, False, lora_request=of)[0]
        for prompt, of in zip(prompts, requested, strict=True)
    ]
    slots = dict(llm._engine.adapters._slots)
    for name in ("narrow", "third"):  # which take the slots of "third" and of "wide"
        llm.generate(prompts[0], GREEDY, False, lora_request=lora(model, name))
    together = llm.generate(prompts, GREEDY, False, lora_request=requested)
    assert (
        llm._engine.adapters._slots.keys() == slots.keys() and llm._engine.adapters._slots != slots
    )
    assert results(together) == results(alone)
    with make_llm(model[1] / "model", **SETTINGS) as plain:
        of_plain = plain.generate([prompts[1], prompts[3]], GREEDY, False)
    assert results(of_plain) == [results(together)[1], results(together)[3]]


def test_adapters_are_in_the_plan_of_the_memory(llm):
    runner = llm._engine.runner
    sizes = {path[1:]: size for path, size in runner.packed.items()}
    arrays = jax.tree.leaves(unpack_weights(runner.parameters["target"], sizes))
    assert llm.memory.weights_bytes == sum(array.nbytes for array in arrays)


def test_nothing_is_compiled_for_an_adapter(model, llm):
    compiled = llm.stats()["compile_total"]
    for name in CONFIGS:
        llm.generate(prompt_of(), GREEDY, False, lora_request=lora(model, name))
    assert llm.stats()["compile_total"] == compiled


def test_an_adapter_that_changes_is_another_adapter(model, llm, tmp_path):
    """It has the same name, number and path: the blocks that are cached of the old one are not
    found.
    """
    directory = tmp_path / "changing"
    shutil.copytree(model[1] / "wide", directory)
    requested = LoRARequest("changing", 9, str(directory))
    before = llm.generate(prompt_of(), GREEDY, False, lora_request=requested)
    for file in (model[1] / "narrow").iterdir():
        shutil.copy(file, directory)
    after = llm.generate(prompt_of(), GREEDY, False, lora_request=requested)
    tokens = [greedy_of_peft(model[0], name, prompt_of())[0] for name in ("wide", "narrow")]
    assert [before[0].outputs[0].token_ids, after[0].outputs[0].token_ids] == tokens


def in_memory(model, name):
    """Returns the tensors and the config of an adapter, as a program has them."""
    config = json.loads((model[1] / name / "adapter_config.json").read_text())
    return load_file(model[1] / name / "adapter_model.safetensors"), config


def test_an_adapter_in_memory_is_updated_while_requests_run(model, llm):
    """New requests have the new numbers, and blocks of them alone; one that runs keeps its own."""
    policy = LoRARequest("policy", 40)
    with pytest.raises(ModelNotFoundError, match="update_adapter has not given its numbers"):
        llm.generate(prompt_of(), GREEDY, False, lora_request=policy)
    tokens = {name: greedy_of_peft(model[0], name, prompt_of())[0] for name in ("wide", "narrow")}
    digest = llm.update_adapter(policy, *in_memory(model, "wide"))
    stream = llm.stream(prompt_of(), GREEDY, lora_request=policy)
    parts = [next(stream)]
    assert llm.update_adapter(policy, *in_memory(model, "narrow")) != digest
    after = llm.generate(prompt_of(), GREEDY, False, lora_request=policy)[0].outputs[0]
    parts += stream
    assert [token for part in parts for token in part.outputs[0].token_ids] == tokens["wide"]
    assert after.token_ids == tokens["narrow"]
    assert llm.update_adapter(policy, *in_memory(model, "wide")) == digest
    pairs = [prompt_of()], [tokens["wide"]]
    (of_memory,), (of_files,) = (
        llm.score(*pairs, lora_request=requested) for requested in (policy, lora(model, "wide"))
    )
    assert of_memory == of_files and [of_memory] != llm.score(*pairs)


def test_numbers_in_memory_that_cannot_be(model, llm):
    tensors, config = in_memory(model, "narrow")
    policy = LoRARequest("policy 2", 41)
    llm.update_adapter(policy, tensors, config)
    before = results(llm.generate(prompt_of(), GREEDY, False, lora_request=policy))
    wrong = {**tensors, KEY.format("A"): np.full((3, 48), np.nan), "x": [1]}
    with pytest.raises(CheckpointError) as refusal:
        llm.update_adapter(policy, wrong, {**config, "use_dora": True})
    for text in ("use_dora = True", "'x' is a list", "dtype float64, not one of float32,"):
        assert text in str(refusal.value)
    with pytest.raises(CheckpointError, match="has NaN or infinite numbers"):
        llm.update_adapter(
            policy, {**tensors, KEY.format("A"): wrong[KEY.format("A")].astype("f")}, config
        )
    with pytest.raises(TypeError, match="config of an adapter must be a dict"):
        llm.update_adapter(policy, tensors, 3)
    with pytest.raises(TypeError, match="lora_request must be LoRARequest, not str"):
        llm.update_adapter("policy", tensors, config)
    with pytest.raises(ValueError, match="one that is updated has no lora_path"):
        llm.update_adapter(lora(model, "wide"), tensors, config)
    with pytest.raises(ValueError, match="lora_int_id=41 is 'policy 2' in memory"):
        llm.update_adapter(LoRARequest("other", 41), tensors, config)
    assert results(llm.generate(prompt_of(), GREEDY, False, lora_request=policy)) == before


def logprobs_of_torch(whole, rows):
    logprobs = whole(torch.tensor(rows)).logits[:, :-1].log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(rows)[:, 1:, None])[..., 0]


def parameters_of_adapter(whole, name):
    """Returns the adapter's parameters of peft's model by their names in files."""
    return {
        key.replace(f".{name}.weight", ".weight"): parameter
        for key, parameter in whole.named_parameters()
        if f".{name}.weight" in key
    }


def test_a_trained_adapter_has_the_bits_of_the_engine_and_derivatives_of_peft(model, llm, tmp_path):
    """Derivatives are also differences in float64 along a random direction of all its numbers."""
    whole = with_adapters(make_model(NAME), tmp_path, ["wide"])
    whole.set_adapter("wide")
    trainer, weights = TrainableModel.for_engine(llm)
    adapter = trainer.load_adapter(tmp_path / "wide")
    rows = [prompt_of(24, 1), prompt_of(24, 2)]
    expected = logprobs_of_torch(whole, rows)
    expected.mean().backward()
    parameters = parameters_of_adapter(whole, "wide")

    @jax.jit
    def differentiate(adapter):
        def mean(adapter):
            logprobs = trainer.log_probabilities(weights, jnp.array(rows), adapter)
            return logprobs.mean(), logprobs

        return jax.value_and_grad(mean, has_aux=True)(adapter)

    (_, logprobs), gradients = differentiate(adapter)
    np.testing.assert_allclose(logprobs, expected.detach().numpy(), atol=5e-5)
    policy = LoRARequest("trained", 60)
    llm.update_adapter(policy, adapter.tensors, adapter.config)
    pairs = [row[:1] for row in rows], [row[1:] for row in rows]
    np.testing.assert_array_equal(logprobs, np.array(llm.score(*pairs, lora_request=policy), "f"))
    assert gradients.tensors.keys() == parameters.keys()
    for name, parameter in parameters.items():
        gradient = parameter.grad.numpy()
        np.testing.assert_allclose(
            gradients.tensors[name], gradient, atol=2e-5 * max(1.0, np.abs(gradient).max())
        )
    whole = whole.double()
    rng = np.random.default_rng(2)
    directions = {name: rng.standard_normal(array.shape) for name, array in parameters.items()}
    slope = sum(
        float((np.asarray(gradients.tensors[name], np.float64) * direction).sum())
        for name, direction in directions.items()
    )
    means = []
    with torch.no_grad():
        for step in (1e-6, -2e-6):
            for name, parameter in parameters_of_adapter(whole, "wide").items():
                parameter += step * torch.tensor(directions[name])
            means.append(logprobs_of_torch(whole, rows).mean().item())
    np.testing.assert_allclose(slope, (means[0] - means[1]) / 2e-6, rtol=1e-3)


def test_a_new_adapter_is_peft_s_and_its_directory_is_loaded_by_both(model, llm, tmp_path):
    trainer, _ = TrainableModel.load(
        config_json(NAME), load_file(model[1] / "model" / "model.safetensors"), max_lora_rank=8
    )
    settings = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        whole = peft.get_peft_model(make_model(NAME), peft.LoraConfig(**settings))
    adapter = trainer.make_adapter(
        rank=4, alpha=6, target_modules=settings["target_modules"], seed=3
    )
    expected = parameters_of_adapter(whole, "default")
    assert adapter.tensors.keys() == expected.keys()
    for name, array in adapter.tensors.items():
        theirs = expected[name].detach().numpy()
        assert array.shape == theirs.shape and array.dtype == jnp.float32
        assert float(abs(array).max()) == pytest.approx(abs(theirs).max(), rel=0.1)
    assert {**adapter.config, **settings} == adapter.config
    others = trainer.make_adapter(rank=4, alpha=6, target_modules=settings["target_modules"])
    a_names = [name for name in adapter.tensors if "lora_A" in name]
    assert all((adapter.tensors[name] != others.tensors[name]).any() for name in a_names)
    rng = np.random.default_rng(1)
    trained = dataclasses.replace(
        adapter,
        tensors={
            name: jnp.asarray(0.3 * rng.standard_normal(array.shape), "bfloat16")
            for name, array in adapter.tensors.items()
        },
    )
    for saved, name in ((adapter, "new"), (trained, "trained")):
        saved.save(tmp_path / "saved")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            loaded = peft.PeftModel.from_pretrained(make_model(NAME), tmp_path / "saved", name)
        tokens, _ = greedy_of_peft(loaded, name, prompt_of())
        requested = LoRARequest("saved", 50, str(tmp_path / "saved"))
        (output,) = llm.generate(prompt_of(), GREEDY, False, lora_request=requested)
        assert output.outputs[0].token_ids == tokens
        assert (tokens == greedy_of_peft(model[0], None, prompt_of())[0]) == (name == "new")
        again = trainer.load_adapter(tmp_path / "saved")
        for key, array in saved.tensors.items():
            np.testing.assert_array_equal(again.tensors[key], array)
            assert again.tensors[key].dtype == array.dtype


def test_more_adapters_than_slots(model, llm):
    """With three for two slots the last waits for one, and both the others have theirs again."""
    names = [*CONFIGS, None, *CONFIGS]
    seen = set()

    def placed(plan, place=llm._engine.adapters.load_for):
        slots = place(plan)
        rows = {row.lora for row in plan.rows} - {None}
        assert len({slots[digest] for digest in rows}) == len(rows) <= 2
        seen.update(rows)
        return slots

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm._engine.adapters, "load_for", placed)
        outputs = llm.generate(
            [prompt_of(20)] * 7, GREEDY, False, lora_request=[lora(model, name) for name in names]
        )
    invariants(llm)
    assert len(seen) == 3 and not llm._engine.adapters._held
    for name, output in zip(names, outputs, strict=True):
        assert output.outputs[0].token_ids == greedy_of_peft(model[0], name, prompt_of(20))[0]


def test_weights_that_are_replaced_keep_their_adapters(model, llm):
    expected = greedy_of_peft(model[0], "wide", prompt_of())[0]
    llm.generate(prompt_of(), GREEDY, False, lora_request=lora(model, "wide"))
    slots = dict(llm._engine.adapters._slots)
    llm.update_parameters({name: np.array(array) for name, array in llm.parameters().items()})
    output = llm.generate(prompt_of(), GREEDY, False, lora_request=lora(model, "wide"))[0].outputs[
        0
    ]
    assert output.token_ids == expected and slots == llm._engine.adapters._slots


def test_embeddings_are_those_of_the_model_without_adapters(model, llm):
    with torch.no_grad(), model[0].disable_adapter():
        states = model[0].base_model.model.model(torch.tensor([prompt_of()])).last_hidden_state[0]
    np.testing.assert_allclose(
        llm.embed(prompt_of(), normalize=False, use_tqdm=False)[0], states[-1], atol=1e-4
    )


def test_beams_are_those_of_the_adapter(model, llm):
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    tokens = (
        llm.generate(prompt_of(20), params, False, lora_request=lora(model, "wide"))[0]
        .outputs[0]
        .token_ids
    )
    model[0].set_adapter("wide")
    settings = {
        "num_beams": 3,
        "max_new_tokens": 6,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    beams = model[0].generate(input_ids=torch.tensor([prompt_of(20)]), **settings)
    assert tokens == beams[0, len(prompt_of(20)) :].tolist()


def test_beside_a_quantised_weight(tmp_path):
    """The oracle is peft on the weights as they are rounded to int4 in groups of 32, and taken back
    to floats.
    """
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    save_model(NAME, tmp_path / "model", **sizes)
    rounded = make_model(NAME, **sizes)
    with torch.no_grad():
        for name, parameter in rounded.named_parameters():
            if "_proj" in name:
                groups = parameter.view(len(parameter), -1, 32)
                scale = groups.gather(2, groups.abs().argmax(2, keepdim=True)) / -8
                parameter.copy_(((groups / scale).round().clamp(-8, 7) * scale).view_as(parameter))
    whole = with_adapters(rounded, tmp_path, ["wide"])
    with make_llm(tmp_path / "model", **SETTINGS, **LORA, quantization="int4") as llm:
        witness = LogitsWitness(llm)
        requested = LoRARequest("wide", 1, str(tmp_path / "wide"))
        output = llm.generate(prompt_of(), GREEDY, False, lora_request=requested)[0].outputs[0]
    tokens, logits = greedy_of_peft(whole, "wide", prompt_of())
    assert output.token_ids == tokens
    for index, row in enumerate(logits):
        np.testing.assert_allclose(witness.logits[0, len(prompt_of()) + index], row, atol=1e-4)


def test_a_linear_layer_before_the_logits_takes_the_rows_adapters(tmp_path):
    """OPT-350m projects hidden states back to the width of its table there; also where a prompt is
    scored.
    """
    save_model("opt-350m-form", tmp_path / "model")
    whole = with_adapters(make_model("opt-350m-form"), tmp_path, ["third"])
    prompts = [[token_id % 101 for token_id in prompt_of(length, length)] for length in (21, 9, 30)]
    requested = [LoRARequest("third", 1, str(tmp_path / "third")), None, None]
    with make_llm(tmp_path / "model", **SETTINGS, **LORA) as llm:
        params = SamplingParams(
            temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1, prompt_logprobs=1
        )
        outputs = llm.generate(prompts, params, False, lora_request=requested)
    for request, prompt, output in zip(requested, prompts, outputs, strict=True):
        tokens, logits = greedy_of_peft(whole, request and "third", prompt)
        (sample,) = output.outputs
        assert sample.token_ids == tokens
        for row, token_id, logprobs in zip(logits, tokens, sample.logprobs, strict=True):
            assert logprobs[token_id].logprob == pytest.approx(
                float(row[token_id] - np.logaddexp.reduce(row)), abs=1e-4
            )
        with torch.no_grad(), nullcontext() if request else whole.disable_adapter():
            scored = torch.log_softmax(whole(torch.tensor([prompt])).logits[0].double(), 1)
        for index, logprobs in enumerate(output.prompt_logprobs[1:]):
            token_id = prompt[index + 1]
            assert logprobs[token_id].logprob == pytest.approx(
                float(scored[index, token_id]), abs=1e-4
            )


def copy_with(source, directory, config=None, tensors=None):
    """Returns a copy of an adapter with fields of its config, and tensors, replaced; None takes a
    tensor out.
    """
    shutil.copytree(source, directory)
    fields = json.loads((directory / "adapter_config.json").read_text()) | (config or {})
    (directory / "adapter_config.json").write_text(json.dumps(fields))
    arrays = load_file(directory / "adapter_model.safetensors") | (tensors or {})
    arrays = {name: array for name, array in arrays.items() if array is not None}
    save_file(arrays, directory / "adapter_model.safetensors")
    return directory


KEY = "base_model.model.model.layers.0.self_attn.k_proj.lora_{}.weight"
BAD = {
    "features": (
        {
            **{
                "use_dora": True,
                "lora_bias": True,
                "alora_invocation_tokens": [1],
                "layer_replication": [[0, 1]],
            },
            **{
                "modules_to_save": ["lm_head"],
                "init_lora_weights": "pissa",
                "bias": "all",
                "new_thing": 1,
            },
            **{"rank_pattern": {".*q": 4, "k_proj": 4, ".*v": 4}, "r": 999},
        },
        {},
        [
            *(
                "use_dora = True",
                "lora_bias",
                "alora_invocation_tokens",
                "layer_replication",
                "modules_to_save",
            ),
            *(
                "init_lora_weights = 'pissa'",
                "bias = 'all'",
                "'new_thing' = 1 is not known",
                "has '.*q': only names of modules",
                "r = 999 is above max_lora_rank",
                "(10 problems)",
            ),
        ],
    ),
    "init": ({"init_lora_weights": "olora"}, {}, ["init_lora_weights = 'olora'"]),
    "not LoRA": ({"peft_type": "LOHA"}, {}, ["peft_type = 'LOHA'"]),
    "modules": (
        {},
        {
            "base_model.model.model.layers.7.self_attn.k_proj.lora_A.weight": np.zeros(
                (3, 48), np.float32
            ),
            "base_model.model.lm_head.lora_A.weight": np.zeros((3, 48), np.float32),
            KEY.format("B"): None,
            "x": np.zeros(1, np.float32),
        },
        [
            "layers.7.self_attn",
            "lm_head",
            "has no lora_B.weight",
            "tensor 'x' is not one of LoRA's",
            "(4 problems)",
        ],
    ),
    "shapes": (
        {},
        {KEY.format("A"): np.zeros((3, 47), np.float32)},
        ["A [3, 47]", "needs [3, 48]"],
    ),
    "ranks": (
        {"r": 9},
        {
            KEY.format("A"): np.zeros((9, 48), np.float32),
            KEY.format("B"): np.zeros((24, 9), np.float32),
        },
        ["has rank 9, above max_lora_rank, which is 8", "with rank 9 the model needs [9, 48]"],
    ),
    "numbers": (
        {},
        {
            KEY.format("A"): np.full((3, 48), np.nan, np.float32),
            KEY.format("B"): np.full((24, 3), np.inf, np.float32),
        },
        ["lora_A.weight' has NaN or infinite numbers", "lora_B.weight' has NaN", "(2 problems)"],
    ),
    "names and numbers": (
        {},
        {"x": np.zeros(1, np.float32), KEY.format("A"): np.full((3, 48), np.nan, np.float32)},
        [
            "tensor 'x' is not one of LoRA's",
            "lora_A.weight' has NaN or infinite numbers",
            "(2 problems)",
        ],
    ),
    "integers": (
        {},
        {KEY.format("A"): np.zeros((3, 48), np.int32)},
        ["is I32; it must be one of F32, BF16, F16"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused_with_every_problem(case, model, llm, tmp_path):
    config, tensors, texts = BAD[case]
    directory = copy_with(model[1] / "narrow", tmp_path / "bad", config, tensors)
    with pytest.raises(CheckpointError) as refusal:
        llm.generate(
            prompt_of(), GREEDY, False, lora_request=LoRARequest("bad", 77, str(directory))
        )
    assert str(refusal.value).startswith(f"the adapter in {directory} does not fit")
    for text in texts:
        assert text in str(refusal.value)
    assert not llm._engine.has_unfinished


def test_requests_that_cannot_be(model, llm, tmp_path):
    wide = lora(model, "wide")

    def ask(request, target=llm):
        target.generate([prompt_of()] * 2, GREEDY, False, lora_request=request)

    with pytest.raises(ModelNotFoundError, match="there is no directory"):
        ask(LoRARequest("gone", 5, str(tmp_path / "gone")))
    with pytest.raises(
        CheckpointError,
        match=r"adapter_config\.json' is missing[^$]*adapter_model\.safetensors' is missing",
    ):
        ask(LoRARequest("empty", 6, str(tmp_path)))
    ask(wide)
    with pytest.raises(ValueError, match="lora_int_id=1 is 'wide' in"):
        ask(LoRARequest("other", 1, wide.lora_path))
    with pytest.raises(ValueError, match="3 lora_request for 2 prompts"):
        ask([None] * 3)
    with pytest.raises(TypeError, match="lora_request must be LoRARequest or None, not str"):
        ask("wide")
    for wrong, error in (("", "lora_name must not be empty"), (3, "lora_name must be a string")):
        with pytest.raises((TypeError, ValueError), match=error):
            LoRARequest(wrong, 1, "x")
    with pytest.raises(ValueError, match="lora_int_id must be at least 1, got 0"):
        LoRARequest("x", 0, "x")
    with pytest.raises(ValueError, match="lora_path must not be empty"):
        LoRARequest("x", 1, "")


def test_settings_that_cannot_be():
    with pytest.raises(UnsupportedError, match=r"event_log.*not supported with enable_lora"):
        EngineConfig(enable_lora=True, event_log="log")
    with pytest.raises(
        UnsupportedError, match=r"method 'medusa' is not supported with enable_lora"
    ):
        EngineConfig(enable_lora=True, speculative_config={"method": "medusa", "model": "x"})
    with pytest.raises(ValueError, match="max_loras: cannot be 2 while enable_lora is false"):
        EngineConfig(max_loras=2)


@pytest.fixture
def client(model, llm):
    """Returns a client of a server with one adapter, and a directory from which others may be
    loaded.
    """
    llm._engine.adapters._meant.clear()  # a server's engine has numbered none before
    built = Built(llm._engine, llm.tokenizer, llm.sampling_defaults, llm.spec, llm._model)
    modules, directory = (f"first={model[1] / 'wide'}",), str(model[1])
    with serving(built, lora_modules=modules, lora_directory=directory) as server:
        with httpx.Client(base_url=server.address, timeout=60) as client:
            yield client
        assert not server.errors
    llm._engine.adapters._meant.clear()


def texts(client, *names):
    """Returns what each model makes of the prompt, all of them at the same time."""
    body = {
        "prompt": prompt_of(),
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    with ThreadPoolExecutor(len(names)) as pool:
        answers = list(
            pool.map(
                lambda name: client.post("/v1/completions", json={"model": name, **body}), names
            )
        )
    return [
        answer.json()["choices"][0]["token_ids"]
        if answer.status_code == 200
        else answer.status_code
        for answer in answers
    ]


def test_the_server_has_adapters_by_name(model, client):
    def list_models():
        return {card["id"]: card.get("parent") for card in client.get("/v1/models").json()["data"]}

    def load(**body):
        return client.post("/v1/load_lora_adapter", json=body)

    expected = {
        name: greedy_of_peft(model[0], name, prompt_of())[0]
        for name in (None, "wide", "narrow", "third")
    }
    assert list_models() == {"demo": None, "first": "demo"}
    assert texts(client, "demo", "first", "second") == [expected[None], expected["wide"], 404]
    assert load(lora_name="second", lora_path="narrow").status_code == 200
    assert list_models() == {"demo": None, "first": "demo", "second": "demo"}
    assert texts(client, "second", "demo", "first") == [
        expected["narrow"],
        expected[None],
        expected["wide"],
    ]
    assert client.get("/v1/models/second").json()["id"] == "second"
    # Under a name that is served only if asked so; then no block of the old adapter is found.
    assert load(lora_name="second", lora_path="third").status_code == 400
    assert (
        load(lora_name="second", lora_path=str(model[1] / "third"), load_inplace=True).status_code
        == 200
    )
    assert texts(client, "second", "first") == [expected["third"], expected["wide"]]
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "second"}).status_code == 200
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "second"}).status_code == 404
    assert texts(client, "second", "demo") == [404, expected[None]]


def test_a_trainer_gives_new_numbers_to_an_adapter_that_is_served(model, llm, client):
    """New requests have them, those that run keep theirs, and outputs say which they had; the files
    are not needed any longer.
    """
    expected = {name: greedy_of_peft(model[0], name, prompt_of())[0] for name in ("wide", "third")}
    body = {"model": "policy", "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    update = {"lora_name": "policy", "lora_path": "step", "load_inplace": True}

    def load(name):
        shutil.copytree(model[1] / name, model[1] / "step")
        try:
            answer = client.post("/v1/load_lora_adapter", json=update).raise_for_status()
        finally:
            shutil.rmtree(model[1] / "step")
        return answer.headers["x-jaxpage-adapter-digest"]

    def generate(**fields):
        fields = {**body, "prompt_token_ids": prompt_of(), **fields}
        answer = client.post("/v1/generate", json=fields).raise_for_status().json()
        return answer["choices"][0]["token_ids"], answer.get("adapter_digest")

    first = load("wide")
    assert generate() == (expected["wide"], first)
    streamed = {**body, "prompt": prompt_of(), "stream": True, "return_token_ids": True}
    tokens = []
    with client.stream("POST", "/v1/completions", json=streamed) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                second = second if tokens else load("third")
                [choice] = json.loads(line.removeprefix("data: "))["choices"]
                tokens += choice["token_ids"]
    assert tokens == expected["wide"]
    assert generate() == (expected["third"], second) and second != first
    assert load("wide") == first, "the digest is of the numbers"
    broken = client.post("/v1/load_lora_adapter", json={**update, "lora_path": "model"})
    assert broken.status_code == 400 and generate() == (expected["wide"], first)
    assert generate(model="demo")[1] is None
    params = SamplingParams(max_tokens=1)
    wide = LoRARequest("wide", 77, str(model[1] / "wide"))
    [output] = llm.generate([prompt_of()], params, lora_request=wide)
    assert output.adapter_digest == first
    assert llm.generate([prompt_of()], params)[0].adapter_digest is None


def test_adapters_are_loaded_from_below_their_directory_alone(model, client, tmp_path):
    outside = tmp_path / "outside"
    shutil.copytree(model[1] / "narrow", outside)
    (model[1] / "link").symlink_to(outside)
    try:
        messages = set()
        for path in (
            str(outside),
            f"../{outside.name}",
            "../../etc",
            "link",
            "gone",
            "/etc",
            "a\0b",
            "wide/adapter_config.json",
        ):
            answer = client.post(
                "/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": path}
            )
            assert answer.status_code == 404, path
            messages.add(answer.json()["error"]["message"])
        assert messages == {"There is no such directory below lora_directory"}
    finally:
        (model[1] / "link").unlink()
    for body, param in (
        ({"lora_name": "demo", "lora_path": "wide"}, "lora_name"),
        ({"lora_name": "a b", "lora_path": "wide"}, "lora_name"),
        ({"lora_name": 3, "lora_path": "wide"}, "lora_name"),
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "model"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "wide", "load_inplace": 1}, "load_inplace"),
    ):
        answer = client.post("/v1/load_lora_adapter", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    foreign = client.post(
        "/v1/load_lora_adapter",
        json={"lora_name": "x", "lora_path": "wide"},
        headers={"Origin": "http://elsewhere"},
    )
    assert foreign.status_code == 403


def test_nothing_is_loaded_where_no_directory_is_given(model, llm):
    built = Built(llm._engine, llm.tokenizer, llm.sampling_defaults, llm.spec, llm._model)
    with serving(built) as server, httpx.Client(base_url=server.address) as client:
        answer = client.post(
            "/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": str(model[1] / "wide")}
        )
        assert answer.status_code == 404


def test_settings_of_a_server_that_cannot_be():
    with pytest.raises(ValueError, match="lora_modules: needs enable_lora"):
        resolve_both(None, {}, {"lora_modules": ["a=b"]}, environment={})
    for wrong in ("no path", "nothing=", "=path", "a name=path"):
        with pytest.raises(
            ValueError, match=f"lora_modules.1: must be NAME=DIRECTORY, .*got '{wrong}'"
        ):
            ServerConfig(lora_modules=("a=b", wrong))


def test_what_is_wrong_with_adapters_of_a_server_is_reported_at_once_before_its_model_is_loaded(
    model, tmp_path
):
    directories = [
        copy_with(model[1] / "narrow", tmp_path / case, *BAD[case][:2])
        for case in ("names and numbers", "integers")
    ]
    named = {
        "good": model[1] / "wide",
        "gone": tmp_path / "gone",
        "bad": directories[0],
        "worse": directories[1],
    }
    modules = [f"{name}={path}" for name, path in named.items()]
    engine = EngineConfig(model=str(model[1] / "model"), **LORA)
    # with nothing that tells of phases no engine can be opened
    with pytest.raises(ConfigError) as refusal:
        startup._open(engine, ServerConfig(lora_modules=(*modules, f"good={model[1]}")), None)
    said = str(refusal.value)
    for text in (
        "'good' is given twice",
        "there is no directory",
        *BAD["names and numbers"][2],
        *BAD["integers"][2],
    ):
        assert text in said
    check_lora_modules(engine, ServerConfig(lora_modules=modules[:1]), ("model",))
    with pytest.raises(ConfigError, match="the name 'good' is that of the model"):
        check_lora_modules(engine, ServerConfig(lora_modules=modules[:1]), ("good",))


def test_a_product_that_is_absorbed_takes_no_adapter():
    """Its weight stands in for it: nothing would add what an adapter adds."""
    config = config_json("deepseek-v3-groups")
    family = load_family(config)
    targets = lora_targets(family, family.Spec.from_config(config))
    attention = "model.layers.0.self_attn"
    assert f"{attention}.o_proj" in targets and f"{attention}.kv_b_proj" not in targets


def test_a_product_of_several_layers_takes_no_adapter():
    """Files name that of one layer, and the others would have it too."""
    config = config_json("zamba2-turns")
    family = load_family(config)
    targets = lora_targets(family, family.Spec.from_config(config))
    assert "model.layers.1.mamba_decoder.mamba.in_proj" in targets
    assert not any("shared_transformer" in name for name in targets)
