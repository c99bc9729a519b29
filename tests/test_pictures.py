"""Pictures are loaded within limits, processed as transformers does, known by keys, and written
into prompts.
"""

from __future__ import annotations

import base64
import copy
import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import transformers
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image
from transformers.image_utils import load_image

from jaxpage.assembly import open_pictures
from jaxpage.errors import CheckpointError, UnsupportedError
from jaxpage.images import (
    ProcessorSettings,
    base64_in,
    decode_base64,
    load_picture,
    process_picture,
    read_settings,
    rule_of,
)
from jaxpage.images.processor import PictureProcessor, picture_key
from jaxpage.models import load_family
from tests.support.picture_models import (
    FAMILIES,
    encoded,
    oracle_of,
    picture,
    processor_of,
    tokenizer_of,
)
from tests.support.sweeps import examples

SIZES = ((50, 40), (33, 90), (7, 7), (150, 20))


def pixels(source: object, **limits: int) -> np.ndarray:
    return np.asarray(load_picture(source, **limits))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_files_are_read_as_transformers_reads_them(kind: str, tmp_path: Path) -> None:
    data = encoded(picture(31, 17), kind)
    path = tmp_path / "picture"
    path.write_bytes(data)
    expected = np.asarray(load_image(base64.b64encode(data).decode()))
    url = f"data:image/{kind.lower()};base64,{base64.b64encode(data).decode()}"
    for source in (data, bytearray(data), path, str(path), url):
        assert np.array_equal(pixels(source), expected)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_orientation_of_exif_is_applied(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(picture(31, 17), "JPEG", exif=exif)
    text = base64.b64encode(data).decode()
    assert np.array_equal(pixels(data), np.asarray(load_image(text)))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "CMYK", "I;16", "1"])
def test_transparent_parts_are_white_as_the_processors_make_them(mode: str) -> None:
    """Those of other modes become RGB, as in transformers."""
    source = picture(20, 10, mode="RGBA")
    if mode == "P":
        source = source.convert("RGB").quantize(16)
        source.info["transparency"] = 3
    elif mode == "I;16":
        source = Image.fromarray(np.arange(200, dtype=np.uint16).reshape(10, 20))
    else:
        source = source.convert(mode)
    processor = oracle_of("qwen3_vl").image_processor
    expected = np.moveaxis(processor.process_image(source, do_convert_rgb=True), 0, -1)
    assert np.array_equal(pixels(source), expected)
    if mode != "CMYK":  # which PNG does not have
        assert np.array_equal(pixels(encoded(source)), expected)


def test_arrays_are_pictures() -> None:
    values = np.asarray(picture(9, 5))
    assert np.array_equal(pixels(values), values)
    assert np.array_equal(pixels(values[::-1]), values[::-1])
    assert pixels(values[..., 0]).shape == (5, 9, 3)
    for wrong in (values.astype(np.float32), np.moveaxis(values, -1, 0), values[None]):
        with pytest.raises(ValueError, match=r"must be uint8 of shape \[height, width, 3\]"):
            load_picture(wrong)


def test_the_first_frame_of_an_animation_counts() -> None:
    frames = [picture(8, 8, seed) for seed in range(3)]
    for kind in ("GIF", "WEBP", "PNG"):
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
        alone = Image.open(io.BytesIO(data))
        assert np.array_equal(pixels(data), np.asarray(alone.convert("RGB")))


def png_of(width: int, height: int) -> bytes:
    """Returns the header of a PNG of this size, and a little data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"0"))


@pytest.mark.parametrize("size", [(9000, 9000), (2**31 - 1, 1), (20_000, 20_000), (50_000, 50_000)])
def test_a_header_with_too_many_pixels_is_refused_before_decoding(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("it was decoded"))
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("it was decoded"))
    number = rf"{size[0] * size[1]} pixels; at most 64000000 are allowed"
    with pytest.raises(ValueError, match=number):
        load_picture(png_of(*size))


def test_the_limit_of_pixels_is_exact() -> None:
    data = encoded(picture(10, 10))
    assert pixels(data, max_pixels=100).shape == (10, 10, 3)
    for source in (data, picture(10, 10), np.asarray(picture(10, 10))):
        with pytest.raises(ValueError, match="10 x 10 = 100 pixels; at most 99 are allowed"):
            load_picture(source, max_pixels=99)


@pytest.mark.parametrize("kind", ["TIFF", "BMP", "ICO", "PPM", "TGA", "PCX", "EPS"])
def test_other_formats_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="is no PNG, JPEG, WebP or GIF file"):
        load_picture(encoded(picture(16, 16), kind))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_files_that_are_cut_off_are_refused(kind: str) -> None:
    data = encoded(picture(40, 40), kind)
    for length in (0, 1, 11, 30, len(data) // 2, len(data) * 9 // 10):
        with pytest.raises(ValueError, match=r"cut off or damaged|is no PNG"):
            load_picture(data[:length])


_FILES = [encoded(picture(24, 18), kind) for kind in ("PNG", "JPEG", "WEBP", "GIF")]


@examples(50)
@given(data=st.data())
def test_damaged_files_are_pictures_or_refused(data: st.DataObject) -> None:
    """Nothing else comes out of a decoder: no other error, and no picture beyond the limit."""
    file = bytearray(data.draw(st.sampled_from(_FILES)))
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(0, len(file) - 1))
        file[place] = data.draw(st.integers(0, 255))
    begin = data.draw(st.integers(0, 8))
    end = data.draw(st.integers(0, len(file)))
    try:
        loaded = load_picture(bytes(file[begin * (begin > 6) : end or None]), max_pixels=10_000)
    except ValueError as error:
        assert "picture" in str(error)
    else:
        assert loaded.mode == "RGB" and loaded.width * loaded.height <= 10_000


@examples(40)
@given(source=st.one_of(st.text(), st.binary(), st.none(), st.integers(), st.lists(st.integers())))
@example("iVBORw0KGgo" * 30)  # base64 is no path: longer than a name may be
def test_anything_else_is_refused(source: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        load_picture(source)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/a.png",
        "https://example.com/a.png",
        "file:///etc/passwd",
        "ftp://a/b.png",
        "/etc/passwd",
        "a.png",
        "",
        "data:image/png,abc",
        "data:",
    ],
)
def test_a_server_fetches_nothing(url: str) -> None:
    with pytest.raises(ValueError, match="must be a data URL with base64") as caught:
        base64_in(url)
    assert "send the picture itself" in str(caught.value)


def test_texts_of_base64() -> None:
    data = bytes(range(256)) * 3
    assert decode_base64(base64.encodebytes(data).decode()) == data
    assert base64_in("DATA:image/png;charset=x;BASE64,AAAA") == "AAAA"
    for wrong in ("", " \n", "A", "AAA", "AA=A", "ÄÄÄÄ", "AA\0=", "-_-_"):
        with pytest.raises(ValueError, match="base64"):
            decode_base64(wrong)


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_have_the_token_ids_of_transformers(name: str) -> None:
    """Prompts have several pictures of several sizes, and the arrays are those of each picture
    alone.
    """
    processor = processor_of(name)
    oracle = oracle_of(name)
    pictures = [picture(*size, seed) for seed, size in enumerate(SIZES)]
    marker = processor.rule.marker
    processed = processor.process(pictures)
    for places in ((0,), (0, 1), (2, 0, 3), (3, 2, 1, 0), (1, 1)):
        chosen = [pictures[place] for place in places]
        between = ["One\n\n", "", " two \n", "\n\n"]
        text = "".join(f"{between[index]}{marker}" for index in range(len(places))) + "\n\nEnd. "
        expected, _ = oracle(text, chosen)
        token_ids, embedded = processor.expand(text, [processed[place] for place in places])
        assert token_ids == expected
        rows = [token_id == processor.token_id for token_id in token_ids]
        filled = [False] * len(rows)
        counts: dict[bytes, list[int]] = {}
        for span in embedded.spans:
            filled[span.start : span.stop] = [True] * span.length
            counts.setdefault(span.key, []).extend(range(span.offset, span.offset + span.length))
            assert span.is_whole == (name in ("gemma3", "gemma4"))
        assert filled == rows
        for place in set(places):
            num_rows = processed[place].picture.num_rows
            assert counts[processed[place].key] == [*range(num_rows)] * places.count(place)
            assert embedded.sources[processed[place].key].num_rows == num_rows
    for source, ready in zip(pictures, processed, strict=True):
        _, arrays = oracle(marker, [source])
        for array_name, array in ready.picture.arrays.items():
            assert np.array_equal(array, np.asarray(arrays[array_name])), array_name
        assert "pixel_values" in ready.picture.arrays


@examples(20)
@given(
    name=st.sampled_from([*FAMILIES]),
    texts=st.lists(st.text("ab \n\t.é<>|", max_size=6), min_size=2, max_size=4),
)
def test_texts_around_pictures_have_the_token_ids_of_transformers(
    name: str, texts: list[str]
) -> None:
    """The text next to a picture may become one token with a part of the picture's text."""
    processor = processor_of(name)
    source = picture(7, 7)
    number = len(texts) - 1
    text = processor.rule.marker.join(texts)
    expected, _ = oracle_of(name)(text, [source] * number)
    (ready,) = processor.process([source])
    token_ids, embedded = processor.expand(text, [ready] * number)
    assert token_ids == expected
    assert sum(span.length for span in embedded.spans) == number * ready.picture.num_rows


@pytest.mark.parametrize("name", FAMILIES)
def test_token_ids_are_expanded_too(name: str) -> None:
    """Those that have all placeholders already are left as they are."""
    processor = processor_of(name)
    tokenizer = tokenizer_of(name)
    processed = processor.process([picture(*size) for size in SIZES[:2]])
    # No text stands at the borders of a marker, with which its own could make one token.
    text = f"{processor.rule.marker}{processor.rule.marker}"
    from_text = processor.expand(text, processed, add_special_tokens=False)
    short = tokenizer(text, add_special_tokens=False)["input_ids"]
    if name != "gemma3":
        assert processor.expand(short, processed)[0] == from_text[0]
    token_ids, embedded = processor.expand(from_text[0], processed)
    assert (token_ids, embedded.spans) == (from_text[0], from_text[1].spans)


def test_the_numbers_of_pictures_and_markers_must_agree() -> None:
    processor = processor_of("smolvlm")
    processed = processor.process([picture(20, 20)])
    marker = processor.rule.marker
    for prompt, pictures, message in (
        (f"{marker}{marker}", processed, "2 places .* for 1 picture"),
        ("none", processed, "0 places .* 1 picture"),
        (marker, [], "1 place .* 0 pictures"),
    ):
        with pytest.raises(ValueError, match=message):
            processor.expand(prompt, pictures)
        with pytest.raises(ValueError, match=message):
            processor.expand(tokenizer_of("smolvlm")(prompt)["input_ids"], pictures)
    gemma = processor_of("gemma3")
    with pytest.raises(ValueError, match="5 tokens '<image_soft_token>', but its 1 picture need 4"):
        gemma.expand("<start_of_image><image_soft_token>", gemma.process([picture(9, 9)]))


def test_keys_know_all_that_rows_depend_on() -> None:
    array = np.arange(6, dtype=np.int32)
    same = {"a": array, "b": array[:2]}
    keys = [
        picture_key(arrays, setting)
        for arrays, setting in (
            (same, b"s"),
            ({"a": array.reshape(2, 3), "b": array[:2]}, b"s"),
            ({"a": array.astype(np.int64), "b": array[:2]}, b"s"),
            ({"a": array.view(np.float32), "b": array[:2]}, b"s"),
            ({"a": array, "c": array[:2]}, b"s"),
            ({"a": array[:5], "b": np.r_[array[5:], array[:2]]}, b"s"),  # the border moved
            ({"a": np.r_[array, array[:2]]}, b"s"),
            (same, b"t"),
            (same, b""),
            ({"a": array + 1, "b": array[:2]}, b"s"),
            ({}, b"s"),
        )
    ]
    assert len({*keys}) == len(keys) and {len(key) for key in keys} == {32}
    assert keys[0] == picture_key(dict(reversed(same.items())), b"s")
    wide = np.arange(12, dtype=np.int32)[::2] // 2
    assert keys[0] == picture_key({"a": wide, "b": wide[:2]}, b"s"), "strides do not count"


def test_keys_are_of_the_processed_picture_and_the_settings() -> None:
    processor = processor_of("qwen2_5_vl")
    source = picture(40, 30)
    first, again, as_file, other = processor.process(
        [source, source.copy(), encoded(source), picture(40, 30, 1)]
    )
    assert first.key == again.key == as_file.key != other.key
    family = FAMILIES["qwen2_5_vl"]
    changed = read_settings({}, {**family.image_processor, "max_pixels": 28 * 28 * 13})
    assert changed is not None
    tokenizer = tokenizer_of("qwen2_5_vl")
    rule = rule_of(changed, tokenizer, {})
    assert rule is not None
    (same_arrays,) = PictureProcessor(changed, rule, tokenizer).process([source])
    assert np.array_equal(
        same_arrays.picture.arrays["pixel_values"], first.picture.arrays["pixel_values"]
    )
    assert same_arrays.key != first.key


def test_keys_follow_what_a_file_says_of_its_pixels() -> None:
    """The orientation of EXIF data, and what is below transparent parts; nothing else of a file."""
    source = picture(30, 30, mode="RGBA")
    rotated = Image.Exif()
    rotated[0x0112] = 6
    named = Image.Exif()
    named[0x010E] = "a title"
    opaque = Image.alpha_composite(Image.new("RGBA", source.size, "white"), source)
    black = Image.alpha_composite(Image.new("RGBA", source.size, "black"), source)
    files = [
        encoded(source),
        encoded(source, exif=named),
        encoded(source, compress_level=1),
        encoded(opaque.convert("RGB")),
        encoded(source, exif=rotated),
        encoded(black),
    ]
    keys = [each.key for each in processor_of("qwen2_5_vl").process(files)]
    assert len({*keys[:4]}) == 1 and len({*keys}) == 3


def test_settings_are_read_from_either_file() -> None:
    image = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 7}
    for processor, alone in (({"x": 1}, image), ({"x": 1, "image_processor": image}, {"a": 2})):
        settings = read_settings(processor, alone)
        assert settings is not None
        assert (settings.kind, settings.arguments, settings.of_prompts) == (
            "Qwen2VLImageProcessor",
            image,
            {"x": 1},
        )
    old = read_settings(None, {"feature_extractor_type": "CLIPFeatureExtractor"})
    assert old is not None and old.kind == "CLIPImageProcessor"
    assert rule_of(old, tokenizer_of("smolvlm"), {}) is None
    assert (
        read_settings(None, None) is None and read_settings({}, {"image_processor_type": 3}) is None
    )


def test_a_picture_that_the_processor_refuses_is_named() -> None:
    with pytest.raises(ValueError, match=r"300 x 1 pixels.*aspect ratio") as caught:
        processor_of("qwen3_vl").process([picture(20, 20), picture(300, 1)])
    assert caught.value.__notes__ == ["This is picture 1 of the prompt."]


def test_a_model_without_an_image_processor_takes_no_pictures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its files say so in a warning; a tokenizer that lacks the tokens is an error."""
    tokenizer = tokenizer_of("qwen3_vl")
    assert open_pictures(tmp_path, {}, tokenizer) is None
    assert "name no image processor, so pictures are refused" in caplog.text
    file = tmp_path / "preprocessor_config.json"
    file.write_text('{"image_processor_type": "CLIPImageProcessor"}')
    assert open_pictures(tmp_path, {}, tokenizer) is None
    assert "name the image processor CLIPImageProcessor" in caplog.text
    file.write_text('{"image_processor_type": "PixtralImageProcessor"}')
    with pytest.raises(CheckpointError, match=r"has no token '\[IMG\]' for pictures"):
        open_pictures(tmp_path, {}, tokenizer)
    file.write_text("[")
    with pytest.raises(CheckpointError, match="preprocessor_config.json"):
        open_pictures(tmp_path, {}, tokenizer)


def test_an_image_processor_that_transformers_lacks_is_named() -> None:
    settings = ProcessorSettings("NoSuchImageProcessor", {}, {})
    with pytest.raises(UnsupportedError, match="has no NoSuchImageProcessorPil: pip install -U"):
        process_picture(settings, picture(4, 4), {})


# The settings of the processor next to each model's own, by the name of the family here.
ENCODERS: dict[str, tuple[str, dict[str, object]]] = {
    "smolvlm": ("smolvlm", {"image_seq_len": 4}),
    "smolvlm-whole": ("smolvlm", {"image_seq_len": 4}),
    "idefics3": ("idefics3", {"image_seq_len": 9}),
    "gemma3": ("gemma3", {"image_seq_length": 16}),
    "gemma4": ("gemma4", {}),
    "mistral3": ("pixtral", {"patch_size": 4, "spatial_merge_size": 2}),
    "qwen3-vl": ("qwen3_vl", {}),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_a_picture_has_a_placeholder_for_each_row_of_the_encoder(name: str) -> None:
    towers = pytest.importorskip("tests.test_vision_towers")
    seeing = pytest.importorskip("tests.support.seeing_models")
    if name in towers.TOWERS:
        tower = towers.TOWERS[name]
        kind, arguments = tower.processor.removesuffix("Pil"), tower.settings
    else:
        tower = seeing.SEEING[name]
        kind = "Qwen2VLImageProcessor"
        arguments = {"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 2560}}
    config_class = getattr(transformers, tower.architecture).config_class
    config = {**config_class(**copy.deepcopy(dict(tower.config))).to_dict()}
    config["architectures"] = [tower.architecture]
    vision = load_family(config).Vision
    spec = vision.Spec.from_config(config)
    family, of_prompts = ENCODERS[name]
    settings = ProcessorSettings(kind, dict(arguments), of_prompts)
    rule = rule_of(settings, tokenizer_of(family), config)
    assert rule is not None
    for ready in PictureProcessor(settings, rule, tokenizer_of(family)).process(
        [picture(*size) for size in SIZES]
    ):
        calls = vision.Model.calls(spec, ready.picture.arrays)
        assert sum(call.num_rows for call in calls) == ready.picture.num_rows > 0
