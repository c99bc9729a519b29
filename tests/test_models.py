"""The model families against transformers: logits on random weights, rope frequencies, refusals,
and planted mistakes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from flax import nnx
from safetensors.numpy import load_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import jaxpage
from jaxpage.checkpoints import load_weights
from jaxpage.checkpoints.config_file import check_sizes
from jaxpage.checkpoints.opening import check_spec, open_model
from jaxpage.checkpoints.problems import Problems
from jaxpage.device.rows.dense import dense_recur
from jaxpage.errors import CheckpointError, UnsupportedError
from jaxpage.layers.activations import ACTIVATIONS
from jaxpage.layers.context import ForwardContext
from jaxpage.layers.parameter import AXES
from jaxpage.models import registry
from jaxpage.models.base import abstract_model, model_weights
from jaxpage.models.config.alibi import alibi_slopes
from jaxpage.models.config.fields import Fields
from jaxpage.models.registry import ENCODERS, FAMILIES, load_family
from tests.support import measured_errors
from tests.support.dense import dense_attend, logits_of
from tests.support.family_names import FAMILY_OF
from tests.support.hf_models import MODELS, config_json, make_model, save_model
from tests.support.measured_errors import TOLERANCE, WRITE
from tests.support.refused_configs import REFUSED
from tests.support.sweeps import few

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")

Parameters = dict[Any, Any]
LENGTH = 40  # beyond every sliding window, and beyond the original lengths of llama3 and yarn


@functools.cache
def oracle(name: str) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Returns the state of transformers' model, token ids [T], and its logits [T, V]."""
    model = make_model(name)
    token_ids = torch.randint(
        model.config.get_text_config().vocab_size,
        (1, LENGTH),
        generator=torch.Generator().manual_seed(1),
    )
    with torch.no_grad():
        logits = model(token_ids).logits[0]
    state = {key: tensor.detach().numpy() for key, tensor in model.state_dict().items()}
    return state, token_ids[0].numpy(), logits.numpy()


def read_spec(name: str, **overrides: Any) -> tuple[Any, Any]:
    config = config_json(name, **overrides)
    family = load_family(config)
    return family, family.Spec.from_config(config)


def fill(family: Any, spec: Any, state: Mapping[str, np.ndarray]) -> Parameters:
    """Returns parameters from a checkpoint by what the family declares, every tensor of which must
    be used and fit.
    """
    parameters: Parameters = {}
    unused = set(state)
    for weight in model_weights(family, spec):
        filled = np.full(weight.shape, np.nan, np.float32)
        there = (
            source
            for source in weight.sources
            if all(
                any(
                    name in state and state[name].shape == piece.stored_shape
                    for name in piece.names
                )
                for piece in source.pieces
            )
        )
        source = next(there, None)
        assert source is not None, f"no tensors for {weight.path}: {weight.sources}"
        for piece in source.pieces:
            names = [name for name in piece.names if name in state]
            unused -= set(names)
            tensor = state[names[0]]
            assert tensor.shape == piece.stored_shape, weight
            begins = zip(piece.offset, piece.shape, strict=True)
            values = tensor.swapaxes(-1, -2) if piece.transpose else tensor
            filled[tuple(slice(at, at + size) for at, size in begins)] = values.reshape(piece.shape)
        place = parameters
        for key in weight.path[:-1]:
            place = place.setdefault(key, {})
        place[weight.path[-1]] = jnp.asarray(filled)
    assert not {
        name for name in unused if not any(fnmatchcase(name, pattern) for pattern in family.ignored)
    }
    return parameters


def largest_difference(name: str, **changes: Any) -> float:
    """Returns how far the logits of a model, possibly changed on purpose, are from those of
    transformers.
    """
    state, token_ids, expected = oracle(name)
    family, spec = read_spec(name)
    spec = dataclasses.replace(spec, **changes.get("spec", {}))
    family = changes.get("family", lambda family: family)(family)
    parameters = fill(family, spec, state)
    logits = logits_of(family, spec, parameters, token_ids, attend=changes.get("attend"))
    return float(np.abs(logits - expected).max())


@pytest.fixture(scope="module")
def measured(request):
    """Takes the differences that are found; with `--write-errors` they are kept for the page of
    models.
    """
    errors: dict[str, float] = {}
    yield errors
    if request.config.getoption("--write-errors"):
        measured_errors.write(errors)


# Together these have every kind of module; the layers of each have different ones.
EVERY_WEIGHT = (
    *("kimi-linear-mixed", "gemma3n-shared", "zamba2-turns", "gemma4-keys-are-values"),
    *("jamba-mixed", "qwen3-5-mixed", "nemotron-h-latent", "opt-norm-first", "mistral4-growth"),
    *("falcon-h1-factors", "gpt-oss-windows", "apertus-learned", "codegen-plain", "cohere-norms"),
    *("lfm3-mixed", "deepseek-v3-groups", "olmo-hybrid-mixed", "granitemoehybrid-mixed"),
)
# The first form of each family, and those above; the other forms run in a sweep.
FIRST_FORMS = {FAMILY_OF[config_json(name)["architectures"][0]]: name for name in reversed(MODELS)}
ALWAYS = {*FIRST_FORMS.values(), *EVERY_WEIGHT}


def assert_each_weight_matters(name: str) -> None:
    """Plants a mistake in one kind of weight after the other: in all layers its numbers are off by
    one.
    """
    state, token_ids, expected = oracle(name)
    family, spec = read_spec(name)
    parameters = fill(family, spec, state)
    leaves = jax.tree_util.tree_leaves_with_path(parameters)
    kinds = {re.sub(r"\[\d+\]", "[]", jax.tree_util.keystr(path)): path for path, _ in leaves}
    for kind in kinds:

        def shift(path: Any, weight: jax.Array, kind: str = kind) -> jax.Array:
            if re.sub(r"\[\d+\]", "[]", jax.tree_util.keystr(path)) != kind:
                return weight
            return jnp.roll(weight, 1, axis=-1) if weight.shape[-1:] > (1,) else 2 * weight

        wrong = jax.tree_util.tree_map_with_path(shift, parameters)
        difference = np.abs(logits_of(family, spec, wrong, token_ids) - expected).max()
        assert difference > TOLERANCE, kind


@pytest.mark.parametrize("name", few(MODELS, ALWAYS))
def test_logits_are_those_of_transformers(name, measured):
    """Each kind of weight is seen to matter, where there are many kinds."""
    _, _, expected = oracle(name)
    assert expected.std() > 0.5  # else a small difference says little
    measured[name] = largest_difference(name)
    assert measured[name] < TOLERANCE
    if name in EVERY_WEIGHT:
        assert_each_weight_matters(name)


def test_the_page_of_models_has_an_error_of_each_architecture():
    """The figures are not compared: another machine rounds otherwise."""
    errors = measured_errors.read()["errors"]
    assert set(errors) == set(MODELS), f"it is old: {WRITE}"
    assert max(errors.values()) < TOLERANCE
    assert all(measured_errors.greatest(errors, architecture) for architecture in FAMILY_OF)


def test_decoders_have_as_many_layers_as_those_of_transformers():
    """EAGLE's heads count them; layers that share pages, or keep nothing, count as others do."""
    for name in MODELS:
        num_layers = config_of_transformers(config_json(name)).num_hidden_layers
        assert read_spec(name)[1].kv.num_decoder_layers == num_layers, name


DIFFERENT_LAYERS = [
    "llama-wide-heads",
    "mistral-window",
    "qwen2-upper-windows",
    "qwen3-windows",
    "opt-norm-first",
    "gpt2-layer-scales",
]


@pytest.mark.parametrize(
    "name",
    few(
        [*DIFFERENT_LAYERS, "opt-350m-form", "opt-no-final-norm"],
        ["qwen2-upper-windows", "opt-no-final-norm", "gpt2-layer-scales"],
    ),
)
def test_auxiliary_hidden_states_are_the_hidden_states_of_transformers(name):
    """They are those before every layer, and after the last one before the final norm; in the order
    asked for, twice if asked twice.
    """
    model = make_model(name)
    state, token_ids, _ = oracle(name)
    left = []
    decoder = model.get_decoder()
    layers = decoder.h if name.startswith("gpt2") else decoder.layers
    layers[-1].register_forward_hook(
        lambda _, __, output: left.append(output[0] if type(output) is tuple else output)
    )
    with torch.no_grad():
        entering = model(torch.tensor(token_ids)[None], output_hidden_states=True).hidden_states[
            : len(layers)
        ]
    expected = [hidden.numpy().reshape(LENGTH, -1) for hidden in (*entering, left[0])]
    family, spec = read_spec(name)
    graph, _ = abstract_model(family, spec, "float32")
    aux_layers = (*reversed(range(len(expected))), 1)

    @jax.jit
    def forward(parameters, token_ids_T):
        model, pages = nnx.merge(graph, parameters), (None,) * spec.kv.num_layers
        context = functools.partial(ForwardContext, jnp.arange(LENGTH), dense_attend())
        return model(token_ids_T, pages, context(aux_layers=aux_layers)), model(
            token_ids_T, pages, context()
        )

    (hidden, _, states_of_layers), (plain, _, nothing) = forward(
        fill(family, spec, state), jnp.asarray(token_ids, jnp.int32)
    )
    np.testing.assert_array_equal(hidden, plain)
    assert nothing == ()
    for layer, states in zip(aux_layers, states_of_layers, strict=True):
        np.testing.assert_allclose(states, expected[layer], atol=TOLERANCE)
        others = [other for number, other in enumerate(expected) if number != layer]
        assert min(np.abs(states - other).max() for other in others) > 100 * TOLERANCE


@pytest.mark.parametrize("name", [*DIFFERENT_LAYERS, "opt-350m-form"])
def test_each_layer_tells_the_seam_its_number_its_window_and_its_scale(name):
    family, spec = read_spec(name)
    graph, parameters = abstract_model(family, spec, "float32")
    seen = []

    def attend(layer_index, q_TNH, k_TKH, v_TKH, layer_pages, options, /):
        assert options.set_names <= {"scale", "sliding_window"}
        seen.append((layer_index, layer_pages, options.sliding_window, options.scale))
        return q_TNH, layer_pages + 1

    def forward(parameters: Parameters, ids_T: jax.Array) -> Any:
        context = ForwardContext(ids_T, attend)
        hidden_TD, pages, _ = nnx.merge(graph, parameters)(
            ids_T, tuple(range(spec.kv.num_layers)), context
        )
        assert pages == tuple(range(1, spec.kv.num_layers + 1))
        return hidden_TD

    jax.eval_shape(forward, parameters, jax.ShapeDtypeStruct((3,), jnp.int32))
    scales = getattr(spec, "attention_scales", (spec.kv.head_dim**-0.5,) * spec.kv.num_layers)
    numbers = range(spec.kv.num_layers)
    assert seen == list(zip(numbers, numbers, spec.kv.sliding_windows, scales, strict=True))


def test_angles_are_computed_once_for_each_rope():
    ropes = [
        dataclasses.replace(read_spec("llama-grouped")[1].rope, **changes)
        for changes in ({}, {}, {"attention_factor": 2.0})
    ]
    context = ForwardContext(jnp.arange(5), dense_attend())
    first, again, other = map(context.angles, ropes)
    assert first is again and first is not other
    np.testing.assert_array_equal(other.cos_TE, 2 * ropes[0].angles(jnp.arange(5)).cos_TE)


@functools.cache
def in_bfloat16(name: str) -> tuple[Any, Any, Any, Any]:
    family, spec = read_spec(name)
    return family, spec, *abstract_model(family, spec, jnp.bfloat16)


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_says_its_axes_and_where_it_is_stored(name):
    family, spec, _, abstract = in_bfloat16(name)
    leaves, _ = jax.tree_util.tree_flatten_with_path(abstract)
    weights = model_weights(family, spec)
    in_float32 = {weight.path for weight in weights if weight.dtype == "float32"}
    assert all(path[-1] == "correction" for path in in_float32)
    assert {
        leaf.dtype for path, leaf in leaves if tuple(key.key for key in path) not in in_float32
    } == {jnp.dtype("bfloat16")}
    assert {weight.path: weight.shape for weight in weights} == {
        tuple(key.key for key in path): leaf.shape for path, leaf in leaves
    }
    for weight in weights:
        assert len(weight.axes) == len(weight.shape), weight
        for axis, size in zip(weight.axes, weight.shape, strict=True):
            parts = axis if isinstance(axis, tuple) else ((axis, size),)
            assert {name for name, _ in parts} <= {*AXES, None} and sum(
                size for _, size in parts
            ) == size, weight
        alternatives = [
            {(name, piece.stored_shape) for piece in source.pieces for name in piece.names}
            for source in weight.sources
        ]
        assert sum(map(len, alternatives)) == len(set().union(*alternatives)), weight
    names = [
        name for weight in weights for piece in weight.sources[0].pieces for name in piece.names
    ]
    assert len(weights) == len(leaves) and len(names) == len(set(names))
    hash(spec)


@pytest.mark.parametrize("name", ["llama-tied-bias", "opt-norm-first", "gpt2-usual"])
def test_a_checkpoint_without_the_prefix_and_a_tied_one_under_the_name_of_the_head_load(name):
    state, _, _ = oracle(name)
    family, spec = read_spec(name)
    prefix = "transformer." if "gpt2" in name else "model."
    headless = {
        key.removeprefix(prefix): value for key, value in state.items() if key != "lm_head.weight"
    }
    head_only = {
        key: value
        for key, value in state.items()
        if "embed_tokens" not in key and ".wte." not in key
    }
    expected = fill(family, spec, state)
    for variant in (headless, head_only):
        assert len(variant) == len(state) - 1
        assert jax.tree.all(jax.tree.map(np.array_equal, fill(family, spec, variant), expected))


def test_a_block_of_several_layers_is_held_once_and_goes_by_the_name_of_any_of_them():
    state, _, _ = oracle("zamba2-turns")
    family, spec = read_spec("zamba2-turns")
    expected = fill(family, spec, state)
    first, other = (f"model.layers.{layer}.shared_transformer." for layer in (1, 3))
    assert sum(name.startswith(other) for name in state) > 5
    for left in (first, other):
        filled = fill(family, spec, {k: v for k, v in state.items() if not k.startswith(left)})
        assert jax.tree.all(jax.tree.map(np.array_equal, filled, expected))
    held = sum(leaf.size for leaf in jax.tree.leaves(expected))
    assert held == sum(each.numel() for each in make_model("zamba2-turns").parameters())


@pytest.mark.parametrize(
    "name", ["olmo-hybrid-mixed", "kimi-linear-mixed", "kimi-linear-groups", "axk1-groups"]
)
def test_files_that_transformers_writes_under_other_names_load(name, tmp_path):
    model = save_model(name, tmp_path)
    state = {key: each.detach().numpy() for key, each in model.state_dict().items()}
    assert not set(load_file(tmp_path / "model.safetensors")) >= state.keys()
    family, spec = read_spec(name)
    loaded = load_weights(open_model(tmp_path).plan, "float32", np.asarray)
    assert jax.tree.all(jax.tree.map(np.array_equal, loaded, fill(family, spec, state)))


def test_kernels_of_queries_keys_and_values_may_be_apart():
    """They are as wide as these, which is not how transformers divides them."""
    state, _, _ = oracle("olmo-hybrid-mixed")
    family, spec = read_spec("olmo-hybrid-mixed")
    ends = np.cumsum(spec.recurrent.parts)[:-1]
    separate = {}
    for key, value in state.items():
        if "conv1d" in key:
            parts = zip("qkv", np.split(value, ends), strict=True)
            separate |= {key.replace("conv1d", f"{part}_conv1d"): kernel for part, kernel in parts}
    whole = {key: value for key, value in state.items() if "conv1d" not in key}
    assert len(separate) == 6
    filled, expected = fill(family, spec, whole | separate), fill(family, spec, state)
    assert jax.tree.all(jax.tree.map(np.array_equal, filled, expected))


def test_corrections_that_files_of_a_x_k1_lack_are_zero():
    name = "axk1-groups"
    state, token_ids, corrected = oracle(name)
    model = make_model(name)
    with torch.no_grad():
        for key, tensor in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                tensor.zero_()
        expected = model(torch.tensor(token_ids)[None]).logits[0].numpy()
    assert np.abs(expected - corrected).max() > TOLERANCE
    lacking = {key: each for key, each in state.items() if "e_score_correction_bias" not in key}
    family, spec = read_spec(name, topk_method="greedy")
    ours = logits_of(family, spec, fill(family, spec, lacking), token_ids)
    assert np.abs(ours - expected).max() < TOLERANCE


def test_only_what_carries_nothing_may_be_left_unused():
    for name, idle, needed in (
        (
            "llama-grouped",
            "model.layers.0.self_attn.rotary_emb.inv_freq",
            "model.layers.0.self_attn.q_proj.bias",
        ),
        ("gpt2-usual", "h.1.attn.masked_bias", "h.1.attn.other.bias"),
        ("gpt2-usual", "transformer.h.0.attn.bias", "transformer.h.2.attn.c_attn.bias"),
    ):
        state, _, _ = oracle(name)
        family, spec = read_spec(name)
        fill(family, spec, {**state, idle: np.zeros(3)})
        with pytest.raises(AssertionError):
            fill(family, spec, {**state, needed: np.zeros(3)})


HALVED = ["llama-llama3", "qwen3-windows", "opt-350m-form", "gpt2-usual"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    few(
        itertools.product(HALVED, ["bfloat16", "float16"]),
        [("llama-llama3", "bfloat16"), ("gpt2-usual", "float16")],
    ),
)
def test_half_precision_runs_and_stays_close(name, dtype):
    state, token_ids, expected = oracle(name)
    family, spec = read_spec(name)
    parameters = jax.tree.map(lambda x: x.astype(dtype), fill(family, spec, state))
    logits = logits_of(family, spec, parameters, token_ids, dtype=dtype)
    assert np.abs(logits - expected).std() < 0.15 * expected.std()


def on_layers(part: str, *, modules: str = "layers", **attributes: Any) -> dict[str, Any]:
    """Returns a planted mistake: a part of every layer, or "" for the layers, has other attributes.

    `modules` names the layers in the model.
    """

    def change(family: Any) -> Any:
        def make(spec: Any, *, dtype: Any) -> Any:
            model = family.Model(spec, dtype=dtype)
            for layer in getattr(model, modules):
                module = getattr(layer, part) if part else layer
                for name, value in attributes.items():
                    assert hasattr(module, name), name
                    setattr(module, name, value)
            return model

        names = {"prefix": family.prefix, "ignored": family.ignored}
        return type("Mistaken", (), {"Model": staticmethod(make), **names})  # it has a hash

    return {"family": change}


def _rope(name: str, **changes: Any) -> dict[str, Any]:
    return {"rope": dataclasses.replace(read_spec(name)[1].rope, **changes)}


def _routed(name: str, **changes: Any) -> Any:
    experts = read_spec(name)[1].experts
    return dataclasses.replace(experts, routing=dataclasses.replace(experts.routing, **changes))


def _layer_forms(name: str, field: str, values: Sequence[Any]) -> dict[str, Any]:
    forms = read_spec(name)[1].layer_forms
    changed = [
        dataclasses.replace(form, **{field: value})
        for form, value in zip(forms, values, strict=True)
    ]
    return {"layer_forms": tuple(changed)}


def _mamba(name: str, **changes: Any) -> Any:
    return dataclasses.replace(read_spec(name)[1].recurrent, **changes)


@pytest.mark.parametrize("name", ["deepseek-v32-groups", "glm-moe-dsa-shared"])
def test_an_indexer_chooses_all_positions_up_to_the_longest_sequence(name):
    """Logits differ with one position less, and the shorter length is the model's."""
    state, token_ids, expected = oracle(name)

    @torch.no_grad()
    def difference(num_chosen: int) -> float:
        model = make_model(name, index_topk=num_chosen)
        model.load_state_dict({key: torch.tensor(value) for key, value in state.items()})
        return float(
            np.abs(model(torch.tensor(token_ids)[None]).logits[0].numpy() - expected).max()
        )

    assert difference(LENGTH) < 1e-5 and difference(LENGTH - 1) > 1e-3
    for num_chosen, length in ((LENGTH, LENGTH), (128, 128), (2048, 128)):
        spec = read_spec(name, index_topk=num_chosen)[1]
        assert spec.max_position_embeddings == length
        assert spec.rope == read_spec(name)[1].rope


# Each is compiled; one of each kind always is, the others in a sweep.
PLANTED_ALWAYS = (
    *("attention factor forgotten", "window one too wide", "slopes that are not scaled"),
    *("experts of all groups", "time steps without limits", "pages of another layer"),
    *("chunks one too wide", "norms before the rotation", "tanh for erf"),
)
PLANTED_IN_MODELS: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "epsilon of the norms": ("llama-wide-heads", lambda: {"spec": {"norm_epsilon": 1e-6}}),
    "attention factor forgotten": (
        "mistral-yarn",
        lambda: {"spec": _rope("mistral-yarn", attention_factor=1.0)},
    ),
    "window one too wide": ("mistral-window", lambda: {"attend": dense_attend(1)}),
    "slopes that are not scaled": (
        "falcon-alibi",
        lambda: {"spec": {"alibi_slopes": alibi_slopes(4)}},
    ),
    "mscale of YaRN forgotten": (
        "deepseek-v3-groups",
        lambda: {
            "spec": {
                "latent": dataclasses.replace(
                    read_spec("deepseek-v3-groups")[1].latent, scale=28**-0.5
                )
            }
        },
    ),
    "experts of all groups": (
        "deepseek-v2-groups",
        lambda: {"spec": {"experts": _routed("deepseek-v2-groups", groups=None)}},
    ),
    "time steps without limits": (
        "granitemoehybrid-dense",
        lambda: {"spec": {"recurrent": _mamba("granitemoehybrid-dense", time_steps=(0.0, 9.0))}},
    ),
    "gates before the norm": (
        "falcon-h1-first",
        lambda: {"spec": {"recurrent": _mamba("falcon-h1-first", norm="gated")}},
    ),
    "the scale of one hidden state's heads": (
        "zamba2-turns",
        lambda: on_layers("attention", modules="blocks", scale=16**-0.5),
    ),
    "scales of time steps, B and C forgotten": (
        "falcon-mamba-norms",
        lambda: {"spec": {"recurrent": _mamba("falcon-mamba-norms", normed=False)}},
    ),
    "bases of other layers": (
        "granite-swa-bases",
        lambda: {"spec": {"rope_by_layer": read_spec("granite-swa-bases")[1].rope_by_layer[::-1]}},
    ),
    "norms after experts forgotten": ("axk1-groups", lambda: on_layers("", post_mlp_norm=None)),
    "tanh for erf": ("opt-plain", lambda: {"spec": {"activation": "gelu_new"}}),
    "pages of another layer": (
        "gemma4-shared",
        lambda: {"spec": _layer_forms("gemma4-shared", "place", (0, 1, 2, 0, 1))},
    ),
    "chunks one too wide": ("llama4-chunks", lambda: {"attend": dense_attend(1)}),
    "weights of experts after them": (
        "llama4-chunks",
        lambda: {
            "spec": {
                "experts": dataclasses.replace(
                    read_spec("llama4-chunks")[1].experts, scales_input=False
                )
            }
        },
    ),
    "another share of gates": (
        "gemma3n-shared",
        lambda: {"spec": _layer_forms("gemma3n-shared", "sparsity", (0.9, 0.6, 0.0, 0.3, 0.0))},
    ),
    "norms before the rotation": (
        "hunyuan-v1-dense-norms",
        lambda: on_layers("attention", norm_after_rotation=False),
    ),
    "norm of the second half after the first": (
        "gpt-neox-parallel",
        lambda: {"spec": {"is_parallel": False}},
    ),
    "layers without positions turned": ("exaone4-windows", lambda: {"spec": {"rope_by_layer": ()}}),
    "positions turn as in other families": (
        "nanochat-backwards",
        lambda: {
            "spec": _rope(
                "nanochat-backwards",
                frequencies=tuple(
                    -each for each in read_spec("nanochat-backwards")[1].rope.frequencies
                ),
            )
        },
    ),
}


@pytest.mark.parametrize("mistake", few(PLANTED_IN_MODELS, PLANTED_ALWAYS))
def test_a_mistake_in_the_model_shows_in_the_logits(mistake):
    name, changes = PLANTED_IN_MODELS[mistake]
    assert largest_difference(name, **changes()) > TOLERANCE


ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama3 of 3.2": {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama3 of Llama 4 Scout": {
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn given attention": {
        "factor": 2.0,
        "attention_factor": 0.9,
        "original_max_position_embeddings": 4096,
    },
    "yarn by ratio": {
        "factor": None,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn mscale": {
        "factor": 40.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.1,
        "original_max_position_embeddings": 4096,
    },
    "yarn not truncated": {
        "factor": 4.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "yarn without length": {"factor": 4.0},
    "longrope": {
        "short_factor": [1 + i / 64 for i in range(32)],
        "long_factor": [4.0] * 32,
        "original_max_position_embeddings": 4096,
    },
    "longrope given factor": {
        "short_factor": [1.5] * 32,
        "long_factor": [4.0] * 32,
        "factor": 8.0,
        "original_max_position_embeddings": 4096,
    },
}


@pytest.mark.parametrize("style", ["old", "new"])
@pytest.mark.parametrize("theta", [10_000.0, 500_000])
@pytest.mark.parametrize("case", ROPES)
def test_rope_frequencies_are_those_of_transformers(case, theta, style):
    rope_type, parameters = case.split()[0], dict(ROPES[case])
    keys: dict[str, Any] = {"rope_scaling": {"type": rope_type, **parameters}, "rope_theta": theta}
    if style == "new":
        keys = {"rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **parameters}}
    shape = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 131072}
    config = transformers.LlamaConfig(
        **shape, **{key: _copied(value) for key, value in keys.items()}
    )
    module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
    compute = ROPE_INIT_FUNCTIONS.get(rope_type, module.compute_default_rope_parameters)
    expected, factor = compute(config)
    _, spec = read_spec("llama-grouped", **shape, **keys)
    np.testing.assert_allclose(
        np.asarray(spec.rope.frequencies, np.float32), expected.numpy(), rtol=1e-6
    )
    assert spec.rope.attention_factor == pytest.approx(factor, rel=1e-12)
    assert spec.max_position_embeddings == (4096 if rope_type == "longrope" else 131072)


def _copied(value: Any) -> Any:
    # transformers changes the dict that it is given
    return dict(value) if isinstance(value, dict) else value


def config_of_transformers(config: Mapping[str, Any]) -> Any:
    """Returns what transformers makes of a config.json, of its text model."""
    fields = {
        key: _copied(value)
        for key, value in config.items()
        if key not in ("architectures", "model_type")
    }
    config_class = getattr(transformers, config["architectures"][0]).config_class
    return config_class(**fields).get_text_config()


def test_an_original_length_at_the_top_of_the_file_outranks_the_one_in_the_rope():
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
    }
    config = config_json("llama-grouped", rope_parameters=yarn, original_max_position_embeddings=32)
    theirs = transformers.LlamaConfig(**{**config, "rope_parameters": dict(yarn)})
    expected, _ = ROPE_INIT_FUNCTIONS["yarn"](theirs)
    at_top, inside = (
        np.asarray(
            read_spec("llama-grouped", rope_parameters=yarn, **top)[1].rope.frequencies, np.float32
        )
        for top in ({"original_max_position_embeddings": 32}, {})
    )
    np.testing.assert_allclose(at_top, expected.numpy(), rtol=1e-6)
    assert not np.allclose(inside, expected.numpy(), rtol=1e-3)


def test_absent_fields_mean_what_they_mean_to_transformers():
    for name in MODELS:
        if name.startswith(
            ("mamba", "falcon-mamba", "bloom", "mpt")
        ):  # Their class has no longest sequence.
            continue
        config = config_json(name)
        ropes = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor") * (
            "growth" not in name
            and not name.startswith("lfm3")  # which turns the first half of the pairs
        )
        for field in (
            "rms_norm_eps",
            "sliding_window",
            # Helium's default is not the width that its products have.
            *("head_dim",) * (not name.startswith("helium")),
            "max_position_embeddings",
            "n_positions",
            *ropes,
        ):
            config.get("text_config", config).pop(field, None)
        theirs = config_of_transformers(config)
        if name.startswith(
            ("gemma4", "gemma3n")
        ):  # their layers differ, see test_config_defaults.py
            continue
        ours = load_family(config).Spec.from_config(config)
        if "longrope" not in name:
            lengths = theirs.max_position_embeddings, getattr(theirs, "index_topk", math.inf)
            assert ours.max_position_embeddings == min(lengths), name
        width = (
            getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
        )
        if (rank := getattr(theirs, "kv_lora_rank", None)) is not None:
            width = rank + theirs.qk_rope_head_dim
            assert (ours.kv.num_kv_heads, ours.kv.value_width) == (1, rank)
        elif not name.startswith(
            "falcon"
        ):  # which says it otherwise, and all of whose forms are compared above
            assert ours.kv.num_kv_heads == getattr(
                theirs, "num_key_value_heads", theirs.num_attention_heads
            )
        assert ours.kv.head_dim == width, name
        windows = ("sliding_window", "window_size", "attention_chunk_size")
        window = next((getattr(theirs, each) for each in windows if hasattr(theirs, each)), None)
        types = getattr(theirs, "layer_types", getattr(theirs, "attention_layers", None))
        types = types or ["sliding_attention"] * ours.kv.num_layers
        kinds = ("sliding_attention", "local", "chunked_attention")
        windows = [window if kind in kinds else None for kind in types]
        assert ours.kv.num_decoder_layers == len(windows)
        if ours.kv.decoder_layers is None:
            assert ours.kv.sliding_windows == tuple(windows)
        else:
            assert {*ours.kv.sliding_windows} == {*windows}
        parameters = getattr(theirs, "rope_parameters", None)
        if ropes and parameters and ours.rope.frequencies and not getattr(theirs, "alibi", False):
            parameters = parameters.get("full_attention", parameters)
            theta, factor = parameters["rope_theta"], parameters.get("factor", 1.0)  # of YaRN
            pairs = len(ours.rope.frequencies)
            assert abs(ours.rope.frequencies[-1]) == pytest.approx(
                theta ** (1 / pairs - 1) / factor, rel=1e-5
            ), name


def test_llama_4_is_read_as_it_is_published():
    published, plain = (
        read_spec("llama4-chunks", attn_temperature_tuning=tuning, no_rope_layers=layers)[1]
        for tuning, layers in ((4, []), (True, None))
    )
    assert published == plain and published.temperature_tuning is not None


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_those_of_transformers(activation):
    x = np.linspace(-6, 6, 301, dtype=np.float32)
    expected = transformers.activations.ACT2FN[activation](torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(
        np.asarray(ACTIVATIONS[activation](jnp.asarray(x))), expected, atol=2e-6
    )


@pytest.mark.parametrize(
    ("error", "name", "says", "overrides"), REFUSED, ids=lambda value: str(value)[:40]
)
def test_what_cannot_be_honoured_is_refused_by_name(error, name, says, overrides):
    read_spec(name)
    with pytest.raises(error, match=says):
        read_spec(name, **overrides)


@pytest.mark.parametrize(
    "case",
    [case for case in REFUSED if not {"architectures", "tie_word_embeddings"} & set(case[3])],
    ids=lambda case: case[2],
)
def test_the_fields_after_a_wrong_one_are_read_too(case):
    """Each is reported, and no error that only the first one causes."""
    _, name, says, overrides = case
    config = config_json(name) | overrides
    tied = "tie_embedding" if "tie_embedding" in config else "tie_word_embeddings"
    config[tied] = "yes"
    problems = Problems(Path("somewhere"))
    check_sizes(config, problems)
    assert check_spec(load_family(config), config, problems) is None
    other = "config.json: tie_word_embeddings must be true or false, not 'yes'"
    assert len(problems.lines) == 2 and other in problems.lines
    assert any(re.search(says, line) for line in problems.lines if line != other)


def test_all_wrong_fields_of_a_config_are_reported_at_once():
    config = config_json("llama-grouped") | {
        **{
            "hidden_size": "many",
            "num_attention_heads": 5,
            "num_key_value_heads": 3,
            "intermediate_size": 1.5,
        },
        **{
            "rope_scaling": {"rope_type": "spiral"},
            "hidden_act": "wavy",
            "rms_norm_eps": -1,
            "mlp_bias": 0,
        },
    }
    del config["num_hidden_layers"]
    problems = Problems(Path("somewhere"))
    check_sizes(config, problems)
    assert check_spec(load_family(config), config, problems) is None
    expected = [
        *(
            "hidden_size",
            "intermediate_size",
            "mlp_bias",
            "num_hidden_layers",
            "num_key_value_heads",
        )
    ]
    expected += ["spiral", "intermediate_size", "rms_norm_eps", "wavy"]
    assert [any(each in line for line in problems.lines) for each in expected] == [True] * len(
        expected
    )
    assert len(problems.lines) == 8, problems.lines


def test_a_reader_of_fields_raises_all_at_the_end_of_its_block_and_at_once_outside_of_one():
    config = config_json("llama-grouped") | {
        "hidden_act": "wavy",
        "mlp_bias": 0,
        "is_causal": False,
    }
    with pytest.raises(ExceptionGroup) as caught:
        load_family(config).Spec.from_config(config)
    is_wrong = {
        field: isinstance(error, CheckpointError)
        for error in caught.value.exceptions
        for field in error.fields
    }
    assert is_wrong == {"hidden_act": False, "mlp_bias": True, "is_causal": False}
    with pytest.raises(UnsupportedError, match="is_causal"):
        Fields(config, "llama").integer("vocab_size")
    fields = Fields({"mlp_bias": 0}, "llama")
    with pytest.raises(CheckpointError, match="mlp_bias"):
        fields.flag("mlp_bias", False)


def test_an_error_that_a_replaced_value_may_have_caused_gives_way_to_what_was_noted():
    with (
        pytest.raises(CheckpointError, match="hidden_size is missing"),
        Fields({}, "llama") as fields,
    ):
        print(1 / (fields.integer("hidden_size") - 64))
    with pytest.raises(ZeroDivisionError), Fields({"hidden_size": 64}, "llama") as fields:
        print(1 / (fields.integer("hidden_size") - 64))
    with pytest.raises(ExceptionGroup) as caught, Fields({}, "llama") as fields:
        fields.integer("hidden_size")
        raise CheckpointError("a sum of the family's own")
    assert len(caught.value.exceptions) == 2


@pytest.mark.parametrize(
    ("name", "parameters", "expected"),
    [
        (
            "llama-grouped",
            {
                "rope_type": "llama3",
                "factor": "8",
                "high_freq_factor": 0,
                "original_max_position_embeddings": 1.5,
            }
            | {"partial_rotary_factor": 0.5, "mrope_section": [2, 4]},
            [
                "partial_rotary",
                "mrope_section",
                "needs low_freq",
                "rope factor",
                "high_freq",
                "original_max_position",
            ],
        ),
        (
            "phi3-longrope",
            {
                "rope_type": "longrope",
                "short_factor": [1],
                "attention_factor": -1,
                "partial_rotary_factor": "half",
            },
            ["partial_rotary", "short_factor", "long_factor", "attention_factor"],
        ),
        (
            "gemma3-types",
            {"full_attention": {"rope_type": "yarn", "factor": [], "beta_fast": -1}},
            ["factor", "beta"],
        ),
        (
            "llama-grouped",
            {"rope_type": "spiral", "mrope_section": [2, 4]},
            ["'spiral'", "mrope_section"],
        ),
    ],
)
def test_all_that_is_wrong_with_a_rotary_embedding_is_reported_at_once(name, parameters, expected):
    config = config_json(name) | {"rope_parameters": parameters, "rope_scaling": None}
    if name == "llama-grouped":
        config["head_dim"], expected = 7, [*expected, "even head width, not 7"]
    problems = Problems(Path("somewhere"))
    assert check_spec(load_family(config), config, problems) is None
    assert [any(each in line for line in problems.lines) for each in expected] == [True] * len(
        expected
    ), problems.lines
    assert len(problems.lines) == len(expected), problems.lines


def test_command_r_has_a_length_of_its_own():
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5000.0}
    for fields, max_length in (
        ({"model_max_length": 512}, 512),
        ({"model_max_length": None}, 128),
        ({"model_max_length": 512, "rope_parameters": dynamic}, 128),
    ):
        assert read_spec("cohere-parallel", **fields)[1].max_position_embeddings == max_length


def test_a_missing_size_is_named():
    for name, field in (
        ("llama-grouped", "intermediate_size"),
        ("opt-plain", "ffn_dim"),
        ("gpt2-usual", "n_embd"),
    ):
        config = config_json(name)
        del config[field]
        with pytest.raises(CheckpointError, match=field):
            load_family(config).Spec.from_config(config)


def test_mimo_is_qwen2():
    """Its published code derives from Qwen 2 and adds heads; transformers does not have it."""
    state, token_ids, expected = oracle("qwen2-yarn")
    published = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    config = {**config_json("qwen2-yarn"), **published, "num_nextn_predict_layers": 1}
    family = load_family(config)
    spec = family.Spec.from_config(config)
    logits = logits_of(family, spec, fill(family, spec, state), token_ids)
    assert np.abs(logits - expected).max() < TOLERANCE
    with pytest.raises(CheckpointError, match="but model_type is 'mimo_v2'"):
        family.Spec.from_config({**config, "model_type": "mimo_v2"})


def test_the_registry_counts_the_supported_families_and_gpt2_reads_the_common_names():
    with pytest.raises(
        UnsupportedError, match=f"not one of the {len(FAMILIES) + len(ENCODERS)} that"
    ):
        load_family({"architectures": ["NoSuchModel"]})
    assert {config_json(name)["architectures"][0] for name in MODELS} == set(FAMILY_OF)
    config = config_json("gpt2-usual")
    config["hidden_size"] = config.pop("n_embd")
    assert load_family(config).Spec.from_config(config) == read_spec("gpt2-usual")[1]


def untouched(index, q, k, v, page, options, /):
    return q[..., : options.value_width], page


@pytest.mark.parametrize("names", few(["every module", "every family"], ["every module"]))
def test_strict_promotion_holds(names):
    with (
        warnings.catch_warnings(),
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
    ):
        warnings.simplefilter("error")
        for name in EVERY_WEIGHT if names == "every module" else FIRST_FORMS.values():
            _, spec, graph, parameters = in_bfloat16(name)

            def forward(
                parameters: Parameters, ids_T: jax.Array, graph: Any = graph, spec: Any = spec
            ) -> jax.Array:
                model = nnx.merge(graph, parameters)
                pages = (None,) * spec.kv.num_layers
                context = ForwardContext(ids_T, untouched, recur=dense_recur(1))
                return model.logits(model(ids_T, pages, context)[0])

            logits = jax.eval_shape(forward, parameters, jax.ShapeDtypeStruct((5,), jnp.int32))
            assert (logits.shape, logits.dtype) == ((5, spec.vocab_size), jnp.float32)


def test_a_family_of_ones_own_is_registered(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    config = {**config_json("llama-grouped"), "architectures": ["MyModel"]}
    with pytest.raises(
        UnsupportedError, match="'MyModel' is not one of .*register_model adds one of your own"
    ):
        load_family(config)
    jaxpage.register_model("MyModel", load_family(config_json("llama-grouped")))
    assert load_family(config) is load_family(config_json("llama-grouped"))
    with pytest.raises(TypeError, match="a model family needs Model, prefix, ignored"):
        jaxpage.register_model("Other", SimpleNamespace(Spec=None))
