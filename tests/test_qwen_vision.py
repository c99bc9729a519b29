"""Qwen's models that see, against transformers: rows of the encoders, positions on three axes,
whole models' logits.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from flax import nnx
from PIL import Image
from safetensors.numpy import load_file

from jaxpage import SamplingParams
from jaxpage.device.attention import make_layer_kernels
from jaxpage.device.hardware.backends import Backend
from jaxpage.device.rows.dense import dense_recur
from jaxpage.errors import CheckpointError, UnsupportedError
from jaxpage.layers.context import ForwardContext
from jaxpage.layers.rope import Rope
from jaxpage.layers.trace_scope import TraceScope
from jaxpage.models import abstract_model, load_family
from jaxpage.models.base import model_weights
from jaxpage.models.config.mrope import Sections
from jaxpage.models.vision.patch_grid import PatchGrid, rotary_positions
from jaxpage.step.embedded import EmbeddedPrompt, EmbeddedSpan, Picture
from tests.support.dense import dense_attend
from tests.support.engines import make_llm
from tests.support.hf_models import config_json, randomise
from tests.support.mtp import Head
from tests.support.random_checkpoints import write_tensors
from tests.support.sweeps import few
from tests.test_models import fill

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")

pytestmark = pytest.mark.usefixtures("decode_as_chunks")
TOWER_TOLERANCE = 1e-5  # of the largest number, in float32
LOGITS_TOLERANCE = 1e-4
PICTURE = 5  # the token that stands for those of pictures
_TOWER: dict[str, Any] = {"num_heads": 2, "patch_size": 4, "intermediate_size": 40}
_QWEN3 = {
    **{**_TOWER, "depth": 3, "hidden_size": 32, "num_position_embeddings": 25},
    **{"out_hidden_size": 48, "deepstack_visual_indexes": [0, 2]},
}
TOWERS: dict[str, dict[str, Any]] = {
    "qwen2-vl": {**_TOWER, "depth": 2, "embed_dim": 32, "hidden_size": 48, "mlp_ratio": 2},
    "qwen2-5-vl": {
        **{**_TOWER, "depth": 3, "hidden_size": 32, "out_hidden_size": 48},
        **{"window_size": 24, "fullatt_block_indexes": [1]},
    },
    "qwen3-vl": _QWEN3,
    "qwen3-vl-moe": _QWEN3,
    "qwen3-5-images": _QWEN3,
    "qwen3-5-moe-images": _QWEN3,
}
# Of one block, of one window, of windows that end at borders, wide, high; the last one has 24 x 26
# patches.
SIZES = ((8, 8), (24, 24), (40, 56), (16, 120), (104, 24), (96, 104))


@functools.cache
def model_of(name: str) -> tuple[Any, dict[str, Any]]:
    """Returns transformers' model with random weights, and its config.json."""
    fields: dict[str, Any] = {"num_hidden_layers": 3, "max_position_embeddings": 256}
    if name.startswith("qwen3-5"):  # six pairs, so that each axis turns two
        rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75}
        fields |= {"rope_parameters": {**rope, "mrope_section": [2, 2, 2]}}
    seen = {"vision_config": TOWERS[name], "image_token_id": PICTURE}
    config = {**config_json(name, **fields), **seen}
    kind = getattr(transformers, config["architectures"][0])
    others = {
        key: value for key, value in config.items() if key not in ("architectures", "model_type")
    }
    model = kind(kind.config_class(**copy.deepcopy(others))).eval()
    generator = torch.Generator().manual_seed(11)
    randomise(model, generator)
    with torch.no_grad():
        model.model.visual.patch_embed.proj.weight.normal_(0, 0.1, generator=generator)
        model.get_output_embeddings().weight[PICTURE] = 0  # no text has it
    return model, config


@functools.cache
def pictures() -> tuple[Picture, ...]:
    """Returns pictures as transformers' processor makes them."""
    settings: dict[str, Any] = {"shortest_edge": 64, "longest_edge": 10**6}
    processor = transformers.Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=settings)
    random = np.random.default_rng(0)
    made = []
    for height, width in SIZES:
        pixels = random.integers(0, 256, (height, width, 3), np.uint8)
        arrays = {k: np.asarray(v) for k, v in processor(Image.fromarray(pixels)).items()}
        assert arrays["image_grid_thw"].tolist() == [[1, height // 4, width // 4]]
        made.append(Picture(arrays, len(arrays["pixel_values"]) // 4))
    return tuple(made)


@functools.cache
def encoder(name: str) -> tuple[Any, Any, Any, Any]:
    """Returns the encoder's family, its spec, its parameters, and what computes it."""
    model, config = model_of(name)
    loaded: Any = load_family(config)
    family = loaded.Vision
    spec = family.Spec.from_config(config)
    state = {f"model.{name}": tensor for name, tensor in state_of(model.model, "visual.").items()}
    graph, _ = abstract_model(family, spec, "float32")
    forward = jax.jit(lambda parameters, inputs: nnx.merge(graph, parameters)(inputs))
    return family, spec, fill(family, spec, state), forward


def state_of(model: Any, start: str = "") -> dict[str, np.ndarray]:
    return {
        name: tensor.detach().numpy()
        for name, tensor in model.state_dict().items()
        if name.startswith(start)
    }


def rows_of(name: str, picture: Picture) -> np.ndarray:
    """Returns the encoder's rows [R, 1 + n, D]."""
    family, spec, parameters, forward = encoder(name)
    (call,) = family.calls(spec, picture.arrays)
    shapes = family.input_shapes(spec, call.size)
    inputs = call.make_inputs()
    assert {key: (array.shape, array.dtype) for key, array in inputs.items()} == {
        key: (shape.shape, shape.dtype) for key, shape in shapes.items()
    }
    assert call.size in spec.sizes and call.num_rows == picture.num_rows
    return np.asarray(forward(parameters, inputs))[: call.num_rows]


def their_rows(name: str, picture: Picture) -> np.ndarray:
    model, _ = model_of(name)
    arrays = {key: torch.tensor(array) for key, array in picture.arrays.items()}
    with torch.no_grad():
        output = model.model.get_image_features(**arrays)
    deep = getattr(output, "deepstack_features", None) or []
    return np.stack([each[0].numpy() for each in (output.pooler_output, *deep)], axis=1)


@pytest.mark.parametrize("name", few(TOWERS, ["qwen2-vl", "qwen2-5-vl", "qwen3-vl"]))
def test_rows_and_features_are_those_of_transformers(name: str) -> None:
    num_deep = encoder(name)[1].num_deep
    assert num_deep == (2 if name.startswith("qwen3-vl") else 0)
    for picture in pictures():
        expected = their_rows(name, picture)
        assert expected.std() > 0.5 and expected.shape[1] == 1 + num_deep
        largest = np.abs(rows_of(name, picture) - expected).max()
        assert largest < TOWER_TOLERANCE * np.abs(expected).max()


def prompt_of(places: Sequence[Picture], lengths: Sequence[int]) -> np.ndarray:
    """Returns a text with pictures.

    `lengths` are those of the parts of text before, between and after them.
    """
    random = np.random.default_rng(len(lengths))
    parts = [random.integers(10, 100, length) for length in lengths]
    between = [np.full(picture.num_rows, PICTURE) for picture in places]
    joined = [parts[0]]
    for picture, part in zip(between, parts[1:], strict=True):
        joined += [picture, part]
    return np.concatenate(joined).astype(np.int32)


PROMPTS = [
    ((0,), (0, 3)),
    ((2, 0), (4, 1, 0)),
    ((3, 1, 4), (1, 2, 30, 7)),
    ((5,), (2, 1)),
    ((), (6,)),
]


def their_inputs(ids: np.ndarray, shown: Sequence[Picture]) -> dict[str, Any]:
    """Returns what transformers' models take."""
    inputs = {"input_ids": torch.tensor(ids)[None].long()}
    if shown:
        inputs["mm_token_type_ids"] = torch.tensor(ids == PICTURE)[None].int()
        for key in ("pixel_values", "image_grid_thw"):
            inputs[key] = torch.tensor(np.concatenate([each.arrays[key] for each in shown]))
    return inputs


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2-5-vl", "qwen3-vl", "qwen3-5-images"])
@pytest.mark.parametrize(("places", "lengths"), PROMPTS)
def test_positions_on_three_axes_are_those_of_transformers(
    name: str, places: Sequence[int], lengths: Sequence[int]
) -> None:
    shown = [pictures()[place] for place in places]
    ids = prompt_of(shown, lengths)
    family, spec, *_ = encoder(name)
    axes_3T = family.axes_of(spec, ids, shown)
    assert axes_3T.dtype == np.int32
    if not shown:
        np.testing.assert_array_equal(axes_3T, np.tile(np.arange(len(ids)), (3, 1)))
        return
    inputs = their_inputs(ids, shown)
    expected, deltas = model_of(name)[0].model.get_rope_index(
        inputs["input_ids"], inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"]
    )
    np.testing.assert_array_equal(axes_3T, expected[:, 0].numpy())
    assert axes_3T.max() + 1 - len(ids) == deltas.item()


@pytest.mark.parametrize("name", few(TOWERS, ["qwen2-5-vl", "qwen3-vl", "qwen3-5-images"]))
def test_angles_are_those_of_transformers(name: str) -> None:
    model, config = model_of(name)
    rope = load_family(config).Spec.from_config(config).rope  # type: ignore[attr-defined]
    assert set(rope.axes) == {0, 1, 2}
    positions_3T = np.random.default_rng(1).integers(0, 300, (3, 50)).astype(np.int32)
    rotary = model.model.language_model.rotary_emb
    np.testing.assert_allclose(rope.frequencies, rotary.inv_freq, rtol=3e-7)
    rope = dataclasses.replace(rope, frequencies=tuple(rotary.inv_freq.tolist()))
    cos, sin = rotary(torch.zeros(1), torch.tensor(positions_3T)[:, None].long())
    context = ForwardContext(jnp.arange(50), dense_attend(), axes_AT=jnp.asarray(positions_3T))
    angles = context.angles(rope)
    half = len(rope.frequencies)
    np.testing.assert_allclose(angles.cos_TE, cos[0, :, :half], atol=1e-6)
    np.testing.assert_allclose(angles.sin_TE, sin[0, :, :half], atol=1e-6)


def test_a_text_has_the_same_angles_with_axes_and_without() -> None:
    """They agree to the bit, also for a rope that has no axes."""
    positions_T = jnp.asarray([0, 7, 31, 12_345, 100_000])
    axes_AT = jnp.tile(positions_T, (3, 1))
    frequencies = tuple(float(np.float32(500.0**-power)) for power in np.linspace(0, 1, 6))
    for axes in ((), (0, 0, 1, 1, 2, 2), (0, 1, 2, 0, 1, 2)):
        rope = Rope(frequencies, attention_factor=1.3, axes=axes)
        plain = ForwardContext(positions_T, dense_attend()).angles(rope)
        other = ForwardContext(positions_T, dense_attend(), axes_AT=axes_AT).angles(rope)
        np.testing.assert_array_equal(plain.cos_TE, other.cos_TE)
        np.testing.assert_array_equal(plain.sin_TE, other.sin_TE)


def test_sections_say_by_which_axis_pairs_turn() -> None:
    chunked, interleaved = Sections((1, 2, 1)), Sections((9, 9, 9), interleaved=True)

    def config(section: Any) -> dict[str, Any]:
        return {"text_config": {"rope_parameters": {"mrope_section": section}}}

    assert chunked.axes({}, 4) == (0, 1, 1, 2)
    assert chunked.axes(config([2, 1, 1]), 4) == (0, 0, 1, 2)
    assert interleaved.axes({}, 5) == (0, 1, 2, 0, 1)
    assert interleaved.axes(config([3, 1, 2]), 7) == (0, 1, 2, 0, 0, 2, 0)
    for wrong in ([2, 1], [2, 1, 2], "abc", None, [1.0, 2, 1], [5, -1, 0]):
        assert chunked.axes(config(wrong), 4) == ()


@functools.cache
def decoder(name: str) -> tuple[Any, Any]:
    """Returns the text model's parameters, and a function for logits of tokens and pictures."""
    model, config = model_of(name)
    family = load_family(config)
    spec = family.Spec.from_config(config)
    graph, _ = abstract_model(family, spec, "float32")

    @jax.jit
    def forward(
        parameters: Any,
        ids_T: jax.Array,
        axes_AT: jax.Array,
        is_vector_T: jax.Array,
        table_TND: jax.Array,
    ) -> jax.Array:
        text = nnx.merge(graph, parameters)
        context = ForwardContext(
            jnp.arange(len(ids_T)),
            dense_attend(),
            recur=dense_recur(1),
            axes_AT=axes_AT,
            vectors=(is_vector_T, table_TND[:, 0]),
            deep_nTD=jnp.moveaxis(table_TND[:, 1:], 1, 0),
        )
        with TraceScope(make_layer_kernels(Backend("auto"))).open():
            hidden_TD, _, _ = text(ids_T, (None,) * spec.kv.num_layers, context)
            logits: jax.Array = text.logits(hidden_TD)
            return logits

    return fill(family, spec, state_of(model)), forward


def logits_of(
    name: str,
    ids: np.ndarray,
    shown: Sequence[Picture],
    change: Callable[[np.ndarray, np.ndarray], None] = lambda *_: None,
) -> np.ndarray:
    """Returns the logits [T, V] of a prompt; `change` makes a mistake in the positions or in the
    rows.
    """
    family, spec, *_ = encoder(name)
    parameters, forward = decoder(name)
    table_TND = np.zeros((len(ids), 1 + spec.num_deep, spec.hidden_size), np.float32)
    table_TND[ids == PICTURE] = np.concatenate([rows_of(name, picture) for picture in shown])
    axes_3T = family.axes_of(spec, ids, shown)
    change(axes_3T, table_TND)
    return np.asarray(forward(parameters, ids, axes_3T, ids == PICTURE, table_TND))


@pytest.mark.parametrize("name", few(TOWERS, ["qwen2-vl", "qwen3-vl", "qwen3-5-images"]))
def test_logits_of_texts_with_pictures_are_those_of_transformers(name: str) -> None:
    """One axis, positions that go on from the place, or no features give others."""
    shown = [pictures()[place] for place in (2, 0, 1)]
    ids = prompt_of(shown, (5, 3, 1, 9))
    model, _ = model_of(name)
    with torch.no_grad():
        expected = model(**their_inputs(ids, shown)).logits[0].numpy()
    assert expected.std() > 0.5
    worst = np.abs(logits_of(name, ids, shown) - expected).max()
    print(f"{name}: {worst:.1e}")
    assert worst < LOGITS_TOLERANCE
    after = int(np.flatnonzero(ids == PICTURE)[-1]) + 1

    def one_axis(axes_3T: np.ndarray, table_TND: np.ndarray) -> None:
        axes_3T[:] = np.arange(len(ids))

    def from_the_place(axes_3T: np.ndarray, table_TND: np.ndarray) -> None:
        axes_3T[:, after:] = np.arange(after, len(ids))

    def no_features(axes_3T: np.ndarray, table_TND: np.ndarray) -> None:
        table_TND[:, 1:] = 0

    mistakes = [one_axis, from_the_place, *[no_features] * name.startswith("qwen3-vl")]
    for mistake in mistakes:
        wrong = np.abs(logits_of(name, ids, shown, mistake) - expected)[-1].max()
        assert wrong > 100 * LOGITS_TOLERANCE, mistake


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2-5-vl", "qwen3-vl"])
def test_files_with_older_names_fill_the_same_parameters(name: str) -> None:
    family, spec, parameters, _ = encoder(name)
    state = state_of(model_of(name)[0].model, "visual.")
    same = jax.tree.map(np.array_equal, fill(family, spec, state), parameters)
    assert jax.tree.all(same)


def test_no_axis_of_an_encoder_is_divided_among_devices() -> None:
    for name in TOWERS:
        family, spec, *_ = encoder(name)
        for weight in model_weights(family, spec):
            names = {
                name
                for axis in weight.axes
                for name, _ in (axis if isinstance(axis, tuple) else [(axis, 0)])
            }
            assert names <= {None, "embed"}, weight.path


def test_a_picture_that_does_not_fit_is_refused_with_numbers() -> None:
    family, spec, *_ = encoder("qwen3-vl")
    assert spec.sizes[0] == 256 and spec.sizes[-1] == 65_536
    arrays = dict(pictures()[2].arrays)
    with pytest.raises(ValueError, match=r"140 patches with image_grid_thw \[\[2, 10, 7\]\]"):
        family.calls(spec, {**arrays, "image_grid_thw": np.asarray([[2, 10, 7]])})
    with pytest.raises(ValueError, match=r"280 patches with .* are not those of one picture"):
        twice = {key: np.concatenate([array, array]) for key, array in arrays.items()}
        family.calls(spec, twice)
    wide = {"pixel_values": np.zeros((65_540, 1)), "image_grid_thw": np.asarray([[1, 2, 32_770]])}
    with pytest.raises(UnsupportedError, match=r"65540 patches.* at most 65536"):
        family.calls(spec, wide)


def test_placeholders_that_are_not_those_of_the_pictures_are_refused() -> None:
    grids = [PatchGrid(4, 6, 2), PatchGrid(2, 2, 2)]
    with pytest.raises(ValueError, match="has 6 tokens for pictures, and its 2 pictures fill 7"):
        rotary_positions([1] + [PICTURE] * 6, PICTURE, grids)
    with pytest.raises(
        ValueError, match="6 tokens of a picture, from position 0 on, do not follow"
    ):
        rotary_positions([PICTURE] * 3 + [1] + [PICTURE] * 4, PICTURE, grids)
    # Pictures that follow each other without a text between them are told apart by their grids.
    axes_3T = rotary_positions([PICTURE] * 7 + [1], PICTURE, grids)
    assert axes_3T[:, 6:].tolist() == [[3, 4]] * 3


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"num_heads": 3}, "vision_config: 3 heads of 32 numbers cannot turn by rows and columns"),
        ({"window_size": 7}, "window_size = 7 is smaller than a block of patches"),
        ({"fullatt_block_indexes": [2, 1]}, r"numbers of layers in their order, not \[2, 1\]"),
        ({"out_hidden_size": 40}, "have 40 numbers, and those of the text model 48"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn' is not supported"),
        ({"patch_size": [4, 8]}, r"patch_size must be an integer >= 1, not \[4, 8\]"),
        ({"hidden_act": "wavy"}, "hidden_act = 'wavy'"),
        ({"model_type": "siglip"}, "model_type 'siglip', which is not one of qwen2_5_vl_vision"),
    ],
)
def test_a_wrong_config_is_refused(changes: dict[str, Any], error: str) -> None:
    config = model_of("qwen2-5-vl")[1]
    family: Any = load_family(config)
    changed = {**config, "vision_config": {**config["vision_config"], **changes}}
    with pytest.raises((CheckpointError, UnsupportedError), match=error):
        family.Vision.Spec.from_config(changed)


def test_sections_that_do_not_fit_are_refused_by_the_encoder_alone() -> None:
    """A text needs none of them."""
    config = model_of("qwen2-vl")[1]
    rope = {"type": "mrope", "mrope_section": [4, 4, 4]}
    changed = {**config, "text_config": {**config["text_config"], "rope_scaling": rope}}
    family: Any = load_family(changed)
    assert family.Spec.from_config(changed).rope.axes == ()
    with pytest.raises(CheckpointError, match=r"mrope_section = \[4, 4, 4\] .* fit 6 pairs"):
        family.Vision.Spec.from_config(changed)


def test_a_table_that_is_no_square_is_refused() -> None:
    config = model_of("qwen3-vl")[1]
    vision = {**config["vision_config"], "num_position_embeddings": 24}
    family: Any = load_family(config)
    with pytest.raises(CheckpointError, match="must be a square, not 24"):
        family.Vision.Spec.from_config({**config, "vision_config": vision})


_PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen2VL": {
        **{"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4},
        **{"intermediate_size": 18_944, "num_hidden_layers": 1, "vocab_size": 152_064},
        **{"model_type": "qwen2_vl", "max_window_layers": 28, "sliding_window": 32_768},
        **{"use_sliding_window": False, "image_token_id": 151_655, "rope_theta": 1_000_000.0},
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {
            **{"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3},
            **{"hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2},
            **{"spatial_patch_size": 14, "temporal_patch_size": 2},
        },
    },
    "Qwen2_5_VL": {
        **{"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4},
        **{"intermediate_size": 18_944, "num_hidden_layers": 1, "vocab_size": 152_064},
        **{"model_type": "qwen2_5_vl", "max_window_layers": 28, "sliding_window": 32_768},
        **{"use_sliding_window": False, "image_token_id": 151_655, "rope_theta": 1_000_000.0},
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {
            **{"depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420},
            **{"num_heads": 16, "in_chans": 3, "out_hidden_size": 3584, "patch_size": 14},
            **{"spatial_merge_size": 2, "spatial_patch_size": 14, "window_size": 112},
            **{"fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2},
            "temporal_patch_size": 2,
        },
    },
    "Qwen3VL": {
        **{"image_token_id": 151_655, "model_type": "qwen3_vl"},
        "text_config": {
            **{"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 8},
            **{"intermediate_size": 6144, "num_hidden_layers": 1, "vocab_size": 151_936},
            **{"head_dim": 128, "model_type": "qwen3_vl_text", "rope_theta": 5_000_000},
            "rope_scaling": {
                **{"mrope_interleaved": True, "mrope_section": [24, 20, 20]},
                "rope_type": "default",
            },
        },
        "vision_config": {
            **{"deepstack_visual_indexes": [5, 11, 17], "depth": 24, "hidden_size": 1024},
            **{"hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "intermediate_size": 4096},
            **{"model_type": "qwen3_vl", "num_heads": 16, "num_position_embeddings": 2304},
            **{"out_hidden_size": 2048, "patch_size": 16, "spatial_merge_size": 2},
            "temporal_patch_size": 2,
        },
    },
}


@pytest.mark.parametrize("name", _PUBLISHED)
def test_encoders_of_published_sizes_have_the_tensors_of_transformers(name: str) -> None:
    """They are Qwen2-VL-7B, Qwen2.5-VL-7B and Qwen3-VL-2B, with the fields of their files."""
    config = {**_PUBLISHED[name], "architectures": [f"{name}ForConditionalGeneration"]}
    loaded: Any = load_family(config)
    family = loaded.Vision
    spec = family.Spec.from_config(config)
    axes = loaded.Spec.from_config(config).rope.axes
    assert (spec.image_token_id, len(axes), axes.count(0)) == (
        151_655,
        64,
        24 if "3" in name else 16,
    )
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    fields = {key: value for key, value in _PUBLISHED[name].items() if key != "model_type"}
    with torch.device("meta"):
        model = kind(kind.config_class(**copy.deepcopy(fields)))
    expected = {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if name.startswith("model.visual.")
    }
    shapes = {
        piece.name: piece.stored_shape
        for weight in model_weights(family, spec)
        for source in weight.sources
        for piece in source.pieces
        if piece.name in expected
    }
    assert shapes == expected and len(shapes) > 200


# Engines: one with windows in the encoder, one with linear attention and MTP drafts, one with
# experts.
ENGINES: dict[str, dict[str, Any]] = {
    "qwen2-5-vl": {},
    "qwen3-vl-moe": {},
    "qwen3-5-images": {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
    "qwen3-5-moe-images": {},
}


def save(name: str, directory: Path) -> None:
    """Writes the checkpoint; that of Qwen3.5 has an MTP head."""
    model, _ = model_of(name)
    model.save_pretrained(directory)
    if "speculative_config" in ENGINES[name]:
        stored = load_file(directory / "model.safetensors")
        write_tensors(directory, {**stored, **Head(model).tensors(separate=False)})


def embed_pictures(ids: np.ndarray, shown: Sequence[Picture]) -> EmbeddedPrompt:
    starts = [0, *np.cumsum([picture.num_rows for picture in shown])[:-1].tolist()]
    places = np.flatnonzero(ids == PICTURE)
    keys = [bytes([number]) * 32 for number in range(len(shown))]
    spans = [
        EmbeddedSpan(int(places[start]), picture.num_rows, key)
        for start, picture, key in zip(starts, shown, keys, strict=True)
    ]
    return EmbeddedPrompt(tuple(spans), dict(zip(keys, shown, strict=True)))


# Qwen3-VL is in tests/test_seeing_engines.py, and MTP without pictures in tests/test_mtp.py.
@pytest.mark.parametrize("name", few(ENGINES, ["qwen2-5-vl", "qwen3-5-moe-images"]))
def test_engines_give_the_log_probabilities_of_transformers(name: str, tmp_path: Path) -> None:
    """Tokens after a prompt with pictures have positions that go on from the largest one."""
    save(name, tmp_path)
    model, _ = model_of(name)
    shown = [pictures()[place] for place in (2, 0)]
    ids = prompt_of(shown, (5, 3, 9))
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, logprobs=5)
    with make_llm(tmp_path, largest_shapes=True, **ENGINES[name]) as llm:
        engine = llm._engine
        outputs: list[Any] = []
        for number in range(2):  # the second time the prefix is found
            prepared = engine.prepare(None, ids.tolist(), params, embed_pictures(ids, shown))
            reporter = engine.add(str(number), prepared)
            while engine.has_unfinished:
                engine.step()
            outputs.append(reporter.whole().outputs[0])
    first, second = outputs
    assert first.token_ids == second.token_ids and first.logprobs == second.logprobs
    whole = np.concatenate([ids, first.token_ids]).astype(np.int32)
    with torch.no_grad():
        logits = model(**their_inputs(whole, shown)).logits[0, len(ids) - 1 : -1]
    expected = torch.log_softmax(logits.double(), dim=-1).numpy()
    assert len(set(first.token_ids)) > 3
    for entries, row in zip(first.logprobs, expected, strict=True):
        for token_id, entry in entries.items():
            assert abs(entry.logprob - row[token_id]) < LOGITS_TOLERANCE
