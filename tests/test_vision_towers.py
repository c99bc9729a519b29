"""Encoders of pictures give the rows that transformers feeds to the text model, with its own image
processors.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
import transformers
from flax import nnx
from PIL import Image

from jaxpage.errors import CheckpointError, UnsupportedError
from jaxpage.models import abstract_model, load_family
from jaxpage.models.vision.siglip import place_in_table

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")

from tests.support.hf_models import randomise  # noqa: E402
from tests.test_models import fill  # noqa: E402

TOLERANCE = 1e-5  # of the largest number, in float32
TEXT = {
    **{"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 60},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 12},
}
TOWER = {
    **{"hidden_size": 16, "intermediate_size": 28, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "patch_size": 4},
}
SIZES = ((40, 30), (90, 41), (23, 23), (31, 100))  # width and height of pictures in pixels


def features_of_all(model: Any, arrays: Mapping[str, Any]) -> Any:
    return model.get_image_features(**arrays).pooler_output


def features_of_pixels(model: Any, arrays: Mapping[str, Any]) -> Any:
    return model.get_image_features(pixel_values=arrays["pixel_values"]).pooler_output


def features_with_places(model: Any, arrays: Mapping[str, Any]) -> Any:
    arguments = {name: arrays[name] for name in ("pixel_values", "image_position_ids")}
    return model.get_image_features(**arguments).pooler_output


@dataclass(frozen=True)
class Tower:
    """An encoder of transformers and its image processor.

    Attributes:
        architecture: The class of the whole model.
        config: The fields of its config.
        processor: The class of the processor.
        settings: Its settings.
        parts: How names of the encoder's tensors begin.
        features: Gives the rows of a picture.
    """

    architecture: str
    config: Mapping[str, Any]
    processor: str
    settings: Mapping[str, Any]
    parts: tuple[str, ...]
    features: Callable[[Any, Mapping[str, Any]], Any] = features_of_all


SMOLVLM = Tower(
    "SmolVLMForConditionalGeneration",
    {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**TOWER, "image_size": 24},
        "scale_factor": 3,
    },
    "SmolVLMImageProcessorPil",
    {"size": {"longest_edge": 72}, "max_image_size": {"longest_edge": 24}},
    ("model.vision_model.", "model.connector."),
)
IDEFICS3 = Tower(
    "Idefics3ForConditionalGeneration",
    {**SMOLVLM.config, "scale_factor": 2},
    "Idefics3ImageProcessorPil",
    SMOLVLM.settings,
    SMOLVLM.parts,
)
GEMMA3 = Tower(
    "Gemma3ForConditionalGeneration",
    {
        "text_config": TEXT,
        "vision_config": {**TOWER, "model_type": "siglip_vision_model", "image_size": 32},
        "mm_tokens_per_image": 16,
    },
    "Gemma3ImageProcessorPil",
    {"size": {"height": 32, "width": 32}},
    ("model.vision_tower.", "model.multi_modal_projector."),
    features_of_pixels,
)
MISTRAL3 = Tower(
    "Mistral3ForConditionalGeneration",
    {
        "text_config": {**TEXT, "model_type": "mistral"},
        "vision_config": {**TOWER, "model_type": "pixtral", "image_size": 96},
    },
    "PixtralImageProcessorPil",
    {"size": {"longest_edge": 96}, "patch_size": {"height": 8, "width": 8}},
    ("model.vision_tower.", "model.multi_modal_projector."),
)
GEMMA4 = Tower(
    "Gemma4ForConditionalGeneration",
    {
        "text_config": {**TEXT, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
        "vision_config": {
            **{**TOWER, "num_key_value_heads": 1, "head_dim": 12},
            **{"position_embedding_size": 80, "rms_norm_eps": 1e-5},
        },
    },
    "Gemma4ImageProcessorPil",
    {"patch_size": 4, "max_soft_tokens": 70},
    ("model.vision_tower.", "model.embed_vision."),
    features_with_places,
)
TOWERS = {
    "smolvlm": SMOLVLM,
    "smolvlm-whole": dataclasses.replace(
        SMOLVLM, settings={**SMOLVLM.settings, "do_image_splitting": False}
    ),
    "idefics3": IDEFICS3,
    "mistral3": MISTRAL3,
    "ministral3": dataclasses.replace(
        MISTRAL3,
        config={
            "text_config": {**TEXT, "model_type": "ministral3"},
            "vision_config": {
                **MISTRAL3.config["vision_config"],
                "rope_parameters": {"rope_theta": 100.0, "rope_type": "axial"},
                # A longest side that is not a whole number of blocks, which processors round up.
                **{"hidden_act": "silu", "image_size": 92},
            },
            **{"spatial_merge_size": 3, "multimodal_projector_bias": True},
            "projector_hidden_act": "relu",
        },
        settings={"size": {"longest_edge": 92}, "patch_size": {"height": 12, "width": 12}},
    ),
    "gemma4": GEMMA4,
    "gemma4-bounds": dataclasses.replace(
        GEMMA4,
        config={
            **GEMMA4.config,
            "vision_config": {
                **{**GEMMA4.config["vision_config"], "num_key_value_heads": 2},
                **{"use_clipped_linears": True, "standardize": True},
                **{"pooling_kernel_size": 2, "num_hidden_layers": 1},
            },
        },
        settings={**GEMMA4.settings, "pooling_kernel_size": 2, "max_soft_tokens": 140},
    ),
    "gemma3": GEMMA3,
    "gemma3-crops": dataclasses.replace(
        GEMMA3,
        settings={
            **GEMMA3.settings,
            **{"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 10},
            **{"pan_and_scan_max_num_crops": 3, "pan_and_scan_min_ratio_to_activate": 1.2},
        },
    ),
}


@functools.cache
def theirs(name: str) -> tuple[Any, Any]:
    return build(TOWERS[name])


def build(tower: Tower) -> tuple[Any, Any]:
    """Returns the model of transformers with random weights, and its processor."""
    kind = getattr(transformers, tower.architecture)
    config = {key: dict(v) if isinstance(v, dict) else v for key, v in tower.config.items()}
    model = kind(kind.config_class(**config)).eval()
    generator = torch.Generator().manual_seed(5)
    randomise(model, generator)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():  # a parameter outside of the modules that are known
                parameter.normal_(0.0, 0.3, generator=generator)
        for key, buffer in model.named_buffers():
            middle = {"min": -0.7, "max": 0.7, "scale": 1.0, "bias": 0.0}.get(key.split("_")[-1])
            if middle is not None and key.startswith("model.vision_tower"):
                buffer.normal_(middle, 0.2, generator=generator)
    return model, getattr(transformers, tower.processor)(**tower.settings)


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    """Returns the config.json as transformers writes it."""
    config = theirs(name)[0].config.to_dict()
    return {**config, "architectures": [TOWERS[name].architecture], **changes}


@functools.cache
def ours(name: str) -> tuple[Any, Any, Any]:
    """Returns the family of the encoder, its spec and its parameters."""
    config = config_of(name)
    loaded: Any = load_family(config)
    family = loaded.Vision
    spec = family.Spec.from_config(config)
    return family, spec, fill(family, spec, state_of(name))


def state_of(name: str) -> dict[str, np.ndarray]:
    """Returns the tensors of the encoder."""
    return {
        key: tensor.detach().numpy()
        for key, tensor in theirs(name)[0].state_dict().items()
        if key.startswith(TOWERS[name].parts)
    }


@functools.cache
def encoder(name: str) -> Callable[..., jax.Array]:
    family, spec, _ = ours(name)
    graph, _ = abstract_model(family, spec, "float32")
    return jax.jit(lambda parameters, inputs: nnx.merge(graph, parameters)(inputs))


def pictures(sizes: Sequence[tuple[int, int]] = SIZES) -> Iterator[Image.Image]:
    draw = np.random.default_rng(3)
    for width, height in sizes:
        yield Image.fromarray(draw.integers(0, 256, (height, width, 3), np.uint8))


def process(name: str, picture: Image.Image) -> dict[str, Any]:
    return dict(theirs(name)[1](images=[picture], return_tensors="np"))


def oracle_rows(name: str, arrays: Mapping[str, Any]) -> np.ndarray:
    model, _ = theirs(name)
    tensors = {key: torch.from_numpy(np.asarray(value)) for key, value in arrays.items()}
    with torch.no_grad():
        features = TOWERS[name].features(model, tensors)
    return np.concatenate([each.reshape(-1, each.shape[-1]).numpy() for each in features])


def encode(name: str, calls: Sequence[Any]) -> np.ndarray:
    _, spec, parameters = ours(name)
    rows = []
    for call in calls:
        inputs = call.make_inputs()
        shapes = ours(name)[0].Model.input_shapes(spec, call.size)
        assert {key: (value.shape, value.dtype) for key, value in shapes.items()} == {
            key: (value.shape, value.dtype) for key, value in inputs.items()
        }
        rows.append(np.asarray(encoder(name)(parameters, inputs))[: call.num_rows])
    return np.concatenate(rows)


def error(rows: np.ndarray, expected: np.ndarray) -> float:
    assert rows.shape == expected.shape
    return float(np.abs(rows - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("name", TOWERS)
def test_rows_are_the_features_of_transformers(name: str) -> None:
    family, spec, _ = ours(name)
    worst = 0.0
    counts = []
    for picture in pictures():
        arrays = process(name, picture)
        rows = encode(name, family.Model.calls(spec, arrays))
        worst = max(worst, error(rows[:, 0], oracle_rows(name, arrays)))
        counts.append(len(rows))
    print(f"{name}: {worst:.1e}, rows {counts}")
    assert worst < TOLERANCE
    assert spec.hidden_size == TEXT["hidden_size"] and spec.num_deep == 0


# A picture whose encoder has another size; the encoder of transformers has none.
@pytest.mark.parametrize("name", ["smolvlm", "gemma3", "mistral3", "gemma4"])
def test_the_same_picture_in_a_larger_size_has_the_same_rows(name: str) -> None:
    family, spec, _ = ours(name)
    arrays = process(name, next(pictures()))
    calls = family.Model.calls(spec, arrays)
    rows = encode(name, calls)
    size = calls[0].size
    larger = dataclasses.replace(spec, sizes=(2 * size,))
    in_larger = family.Model.calls(larger, arrays)
    assert {call.size for call in in_larger} == {2 * size}
    assert error(encode(name, in_larger), rows) < TOLERANCE
    np.testing.assert_array_equal(encode(name, calls), rows)


def test_padding_has_no_part_in_the_rows() -> None:
    """Its numbers may be any: the bits are the same."""
    family, spec, _ = ours("smolvlm")
    larger = dataclasses.replace(spec, sizes=(2 * spec.sizes[0],))
    call = family.Model.calls(larger, process("smolvlm", next(pictures())))[0]
    rows = encode("smolvlm", [call])
    inputs = call.make_inputs()
    is_padding = inputs["segment_P"] == 1
    inputs["patch_PI"][is_padding] = 1e3
    inputs["position_P"][is_padding] = 7
    call = call._replace(make_inputs=lambda: inputs)
    assert is_padding.sum() == spec.sizes[0]
    np.testing.assert_array_equal(encode("smolvlm", [call]), rows)


def test_tiles_of_padding_are_left_out_as_by_transformers() -> None:
    """Pictures with fewer tiles than others have tiles without any pixel."""
    _, processor = theirs("smolvlm")
    several = [[each] for each in pictures()]
    arrays = dict(processor(images=several, return_tensors="np"))
    family, spec, _ = ours("smolvlm")
    rows = encode("smolvlm", family.Model.calls(spec, arrays))
    assert error(rows[:, 0], oracle_rows("smolvlm", arrays)) < TOLERANCE
    assert len(rows) < arrays["pixel_values"].shape[0] * arrays["pixel_values"].shape[1] * 4


@pytest.mark.parametrize("side", [14, 16, 24, 26, 27, 32, 37, 64])
def test_places_in_the_table_are_those_of_transformers(side: int) -> None:
    for num_patches in range(1, side + 1):
        boundaries = torch.arange(1 / side, 1.0, 1 / side)
        fractions = torch.arange(num_patches) * (1.0 / torch.tensor(num_patches))
        places = torch.bucketize(fractions.clamp(max=1.0 - 1e-6), boundaries, right=True)
        np.testing.assert_array_equal(place_in_table(num_patches, side), places.numpy())


def test_what_an_encoder_cannot_take_is_refused() -> None:
    family, spec, _ = ours("smolvlm")
    config = config_of("smolvlm")

    def read(**fields: Any) -> None:
        family.Spec.from_config({**config, "vision_config": {**config["vision_config"], **fields}})

    read(image_size=[24, 24], patch_size=[4, 4])
    with pytest.raises(CheckpointError, match="vision_config: image_size makes 7 patches a side"):
        read(image_size=28)
    with pytest.raises(CheckpointError, match="vision_config: num_attention_heads = 3 does not"):
        read(num_attention_heads=3)
    with pytest.raises(UnsupportedError, match="model_type 'eva', which is not one of"):
        read(model_type="eva")
    with pytest.raises(CheckpointError, match="vision_config must be an object, not None"):
        family.Spec.from_config({**config, "vision_config": None})
    pixels = np.zeros((1, 1, 3, 48, 48), np.float32)
    with pytest.raises(UnsupportedError, match="has 144 patches, and the encoder takes at most 36"):
        family.Model.calls(spec, {"pixel_values": pixels})
    gemma, gemma_spec, _ = ours("gemma3")
    with pytest.raises(UnsupportedError, match="fills 4 rows, not 16: .* to 32 x 32 pixels"):
        gemma.Model.calls(gemma_spec, {"pixel_values": pixels[0, :, :, :16, :16]})
    mask = np.ones((1, 1, 24, 24), np.int64)
    mask[..., 12:] = 0
    with pytest.raises(UnsupportedError, match="has padding"):
        family.Model.calls(
            spec, {"pixel_values": pixels[..., :24, :24], "pixel_attention_mask": mask}
        )


@pytest.mark.parametrize("name", ["idefics3", "mistral3", "gemma3", "gemma4"])
def test_absent_fields_mean_what_the_class_of_the_encoder_says(name: str) -> None:
    config = config_of(name)
    whole = config["vision_config"]
    family, _, _ = ours(name)
    kind = type(theirs(name)[0].config.vision_config)
    for left in [{each} for each in whole if each != "model_type"] + [{*whole} - {"model_type"}]:
        vision = {field: value for field, value in whole.items() if field not in left}
        if left & {"image_size", "patch_size"}:  # as many patches as blocks, whatever is left
            vision |= {"image_size": 1024, "patch_size": 16}
        if left & {"num_attention_heads", "num_key_value_heads"}:
            vision |= {"hidden_size": 192}
            if "num_attention_heads" not in left:
                vision["num_attention_heads"] = 12
            vision.pop("num_key_value_heads", None)
        vision.pop("head_dim" if left & {"hidden_size", "num_attention_heads"} else "", None)
        full = kind(**{key: each for key, each in vision.items() if key != "model_type"}).to_dict()
        specs = [
            family.Spec.from_config({**config, "vision_config": each, "mm_tokens_per_image": 256})
            for each in (vision, full)
        ]
        assert specs[0] == specs[1], left


LLAVA = {"model.": ""}
OLDER = {
    "gemma3": ({"model.vision_tower.": "vision_tower.vision_model.", **LLAVA}),
    "gemma3-crops": {"model.vision_tower.": "model.vision_tower.vision_model."},
    "mistral3": LLAVA,
    "idefics3": LLAVA,
    "gemma4": LLAVA,
}


@pytest.mark.parametrize("name", OLDER)
def test_files_with_older_names_fill_the_same_parameters(name: str) -> None:
    family, spec, parameters = ours(name)
    renamed = {}
    for key, tensor in state_of(name).items():
        begin = next((each for each in OLDER[name] if key.startswith(each)), "")
        renamed[OLDER[name].get(begin, "") + key.removeprefix(begin)] = tensor
    assert renamed.keys() != state_of(name).keys()
    same = jax.tree.map(np.array_equal, fill(family, spec, renamed), parameters)
    assert jax.tree.all(same)


@pytest.mark.parametrize("name", TOWERS)
def test_rows_have_the_type_of_the_parameters(name: str) -> None:
    family, spec, _ = ours(name)
    graph, parameters = abstract_model(family, spec, "bfloat16")
    inputs = family.Model.input_shapes(spec, spec.sizes[0])
    rows = jax.eval_shape(lambda weights, each: nnx.merge(graph, weights)(each), parameters, inputs)
    assert rows.dtype == "bfloat16"
    assert rows.shape == (spec.sizes[0] // spec.block**2, 1, spec.hidden_size)
