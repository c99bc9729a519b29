"""`jaxpage plan`: published sizes, users counted by a real block manager, the engine's own plan,
and how it refuses.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxpage import cli
from jaxpage.assembly.planning import ModelLayout
from jaxpage.assembly.planning.vectors import VectorInput, VisionPart
from jaxpage.checkpoints import describe_model
from jaxpage.checkpoints.finding import resolve_model_config
from jaxpage.cli import plan_rate
from jaxpage.cli.flag import byte_size
from jaxpage.cli.flags import PLAN_SETTINGS, PLANNED_SETTINGS
from jaxpage.cli.plan import spec_of
from jaxpage.cli.setting_flags import ENGINE_FLAGS
from jaxpage.device.hardware import KNOWN_DEVICES, DeviceSpec, choose_backend, device_spec
from jaxpage.device.vision import sizes_for
from jaxpage.errors import CapacityError, ConfigError, UnsupportedError
from jaxpage.layers.sharding import Sharding
from jaxpage.memory import BlockManager, BlockPool, BlockTables
from jaxpage.models import load_family
from jaxpage.models.base import abstract_model
from jaxpage.models.sharding.dividing import ShardingChecker, shard_weights, with_sharding
from jaxpage.settings.checked_settings import UnsupportedSettings
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.simulation.setup import Setup
from jaxpage.simulation.shape_costs import ShapeCost
from jaxpage.simulation.sustained_rate import PRECISION, Question, highest_rate
from jaxpage.simulation.traces import LENGTHS
from jaxpage.step.plan import Row, StepPlan
from pallas_kernels.cpu import library
from tests.support.engines import LLAMA, make_llm
from tests.support.model_configs import MODELS, config_json
from tests.support.planned_models import MODELS as PLANNED
from tests.support.random_checkpoints import random_checkpoint
from tests.support.sweeps import few

GIB = 2**30


def opt(num_layers: int, width: int, num_heads: int) -> dict[str, Any]:
    """Returns an OPT of Zhang et al., table 1, with the fields of the published config.json."""
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "vocab_size": 50272,
        "hidden_size": width,
        "ffn_dim": 4 * width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "max_position_embeddings": 2048,
        "word_embed_proj_dim": width,
        "do_layer_norm_before": True,
        "torch_dtype": "float16",
    }


LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
# For what does not follow from its size: a plan makes every layer.
SHORT = {**LLAMA_3_8B, "num_hidden_layers": 2}
# As many parameters in few layers: 16 GB do not hold it in bfloat16.
WIDE = {
    **{**LLAMA_3_8B, "num_hidden_layers": 4, "num_key_value_heads": 32},
    "intermediate_size": 143_360,
}


def write(directory: Path, config: dict[str, Any]) -> str:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def run(*words: str) -> int:
    try:
        return cli.main(["plan", *words])
    except SystemExit as error:
        return int(error.code or 0)


def plan_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run(*words, "--json") == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("config", "num_devices", "weights_gb", "kv_gib", "bytes_per_token", "slots"),
    [
        (opt(40, 5120, 40), 1, 26, 12, 800 * 2**10, 15_728),
        pytest.param(
            *(opt(64, 9216, 72), 4, 132, 21.3, 2.25 * 2**20, 9_700), marks=pytest.mark.sweep
        ),
        pytest.param(
            *(opt(96, 12288, 96), 8, 346, 264.1, 4.5 * 2**20, 60_100), marks=pytest.mark.sweep
        ),
    ],
    ids=["13B", "66B", "175B"],
)
def test_table_1_of_the_paper(
    config: dict[str, Any],
    num_devices: int,
    weights_gb: float,
    kv_gib: float,
    bytes_per_token: float,
    slots: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The table has the memory of parameters, of keys and values, and the slots.

    Ours is divided among the devices.
    """
    pool = str(int(kv_gib * GIB / num_devices))
    flags = ["--kv-cache-memory-bytes", pool, "--tensor-parallel-size", str(num_devices)]
    plan = plan_of(
        capsys,
        write(tmp_path, config),
        "--memory",
        "80GiB",
        "--gpu-memory-utilization",
        "1",
        *flags,
    )
    assert plan["dtype"] == "float16"
    assert plan["weights_bytes"] * num_devices == pytest.approx(weights_gb * 1e9, rel=0.015)
    assert plan["bytes_per_token"] * num_devices == bytes_per_token
    assert plan["num_blocks"] * 16 == pytest.approx(slots, abs=50), (
        "printed in thousands, with one decimal"
    )
    assert plan["num_slots"] == (plan["num_blocks"] - 1) * 16, (
        "the null block is ours: it takes padding"
    )
    if num_devices == 1:
        assert plan["num_blocks"] == 983 and plan["num_blocks"] * 16 == slots


def test_llama_3_8b(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has 8,030,261,248 parameters, as on its page, and 128 KiB per token in bfloat16.

    In int8 there is a byte for each number and a scale for 128 of them.
    """
    model = write(tmp_path, LLAMA_3_8B)
    plan = plan_of(capsys, model, "--memory", "24GiB", "--max-num-batched-tokens", "2048")
    assert (plan["num_parameters"], plan["weights_bytes"]) == (8_030_261_248, 16_060_522_496)
    assert (plan["bytes_per_token"], plan["block_bytes"]) == (128 * 2**10, 2 * 2**20)
    assert plan["available_bytes"] == int(0.9 * 24 * GIB)
    free = plan["available_bytes"] - plan["weights_bytes"] - plan["workspace_bytes"]
    assert 0 <= free - plan["pool_bytes"] < free / 32, (
        "all that is left, in six significant bits of blocks"
    )
    per_token = {
        (option["dtype"], option["kv_cache_dtype"], option["tensor_parallel_size"]): option.get(
            "bytes_per_token"
        )
        for option in plan["alternatives"]
    }
    vectors = 2 * 32 * 8  # keys and values, layers, heads
    assert per_token["bfloat16", "auto", 1] == vectors * 128 * 2
    for cache in ("int8", "fp8"):
        assert per_token["bfloat16", cache, 1] == vectors * (128 + 4)
        assert per_token["float32", cache, 4] == vectors * (128 + 4) / 4
    assert per_token["float32", "auto", 2] == vectors * 128 * 4 / 2
    assert per_token["float32", "auto", 1] is None, "32 GB of weights"


def test_deepseek_v3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It keeps 70.272 kB per token in 61 layers (DeepSeek-AI, "Insights into DeepSeek-V3", 2025,
    table 1).

    Layers keep the same each, so four are planned, with fewer experts, which keep nothing.
    """
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "torch_dtype": "bfloat16",
    }
    sizes = {
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 4,
        "num_attention_heads": 128,
    }
    experts = {"n_routed_experts": 8, "n_group": 1, "topk_group": 1}
    model = write(tmp_path, {**config, **sizes, **experts, "vocab_size": 129280})
    plan = plan_of(capsys, model, "--memory", "2000GiB")
    assert plan["bytes_per_token"] * 61 == 4 * 70_272
    assert run(model, "--memory", "2000GiB") == 0
    assert "4 layers, a latent of 576 for all heads" in capsys.readouterr().out


@pytest.mark.parametrize("name", few(PLANNED, ["gpt-oss-20b", "Gemma 4 E4B"]))
def test_published_models_have_the_sizes_that_follow_from_their_description(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The descriptions are those of the table of docs/guides/memory.md."""
    model = PLANNED[name]
    plan = plan_of(capsys, write(tmp_path, model.config), "--memory", "1000GB")
    assert plan["num_parameters"] == model.num_parameters
    assert model.num_parameters / 1e9 == pytest.approx(model.published, rel=0.01)
    assert plan["dtype"] == "bfloat16"
    plain = 2 * (model.num_parameters - model.num_quantized)
    assert plan["weights_bytes"] == pytest.approx(
        plain + model.num_quantized * model.bits / 8, rel=1e-3
    )
    assert plan["bytes_per_token"] == model.bytes_per_token


def test_the_workspace_holds_scored_tiles_and_neutral_processor_inputs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prompt is scored 64 tokens at a time however few sequences run.

    What stands in for penalties is as wide as a context.
    """
    model = write(tmp_path, SHORT)
    few = plan_of(
        capsys, model, "--memory", "24GiB", "--max-num-seqs", "1", "--max-num-batched-tokens", "64"
    )
    assert few["workspace_bytes"] > 2 * 4 * 64 * LLAMA_3_8B["vocab_size"]
    short, long = (
        plan_of(capsys, model, "--memory", "24GiB", "--max-model-len", length)["workspace_bytes"]
        for length in ("1024", "8192")
    )
    assert long - short >= 64 * 4 * (8192 - 1024)


def test_the_workspace_holds_a_draw_after_every_draft(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """64 sequences with 7 drafts draw from 512 tokens, if a step may have as many.

    Each draw has logits of its own.
    """
    model = write(tmp_path, SHORT)
    drafting = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 7}')

    def workspace(maximum: str, *words: str) -> int:
        size = ("--memory", "80GiB", "--max-model-len", "1024", "--max-num-batched-tokens", maximum)
        return plan_of(capsys, model, *size, *words)["workspace_bytes"]

    logits = 4 * LLAMA_3_8B["vocab_size"]
    assert workspace("2048", *drafting) - workspace("2048") >= (512 - 64) * logits
    assert workspace("128", *drafting) - workspace("128") >= (128 - 64) * logits, (
        "16 sequences with 7 drafts"
    )


_QWEN2_5_VL = {
    **{"model_type": "qwen2_5_vl", "depth": 2, "hidden_size": 1280, "intermediate_size": 3420},
    **{"num_heads": 16, "out_hidden_size": 3584, "window_size": 112, "fullatt_block_indexes": [1]},
}
_GEMMA3 = {
    **{"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304},
    **{"num_attention_heads": 16, "image_size": 896, "patch_size": 14, "num_hidden_layers": 2},
}
_SEEING = {
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl", _QWEN2_5_VL),
    "Gemma3ForConditionalGeneration": ("gemma3", _GEMMA3),
}


@pytest.mark.parametrize(
    ("architecture", "rows", "maximum"),
    few(
        [
            ("Qwen2_5_VLForConditionalGeneration", 16384, 1.8),
            ("Qwen2_5_VLForConditionalGeneration", 1024, 2.5),
            ("Gemma3ForConditionalGeneration", 256, 2.5),
        ],
        [("Qwen2_5_VLForConditionalGeneration", 1024, 2.5)],
    ),
)
def test_the_workspace_of_a_picture_is_near_what_its_encoder_takes(
    architecture: str, rows: int, maximum: float
) -> None:
    """The sizes are published ones with two layers, as compiled: never below, and so many times at
    most.
    """
    kind, vision = _SEEING[architecture]
    text = {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4}
    parts = {"vision_config": vision, "text_config": text, "mm_tokens_per_image": 256}
    config = {"architectures": [architecture], "model_type": kind, **parts}
    model: Any = load_family(config)
    family = model.Vision
    spec = family.Spec.from_config(config)
    graph, parameters = abstract_model(family, spec, "float32")
    inputs = family.Model.input_shapes(spec, sizes_for(spec, rows)[-1])
    encode = jax.jit(lambda weights, arrays: nnx.merge(graph, weights)(arrays))
    analysis = encode.lower(parameters, inputs).compile().memory_analysis()
    num_bytes = analysis.temp_size_in_bytes + analysis.output_size_in_bytes
    estimate = VectorInput(64, VisionPart(family, spec)).vision_workspace_bytes(rows, "float32")
    assert 1 <= estimate / num_bytes <= maximum


@pytest.mark.parametrize("method", ['"lookahead"', '"suffix", "tree": true'])
def test_trees_of_drafts_are_refused_for_windows_as_by_the_engine(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mistral = {
        **SHORT,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 4096,
    }
    drafting = ("--speculative-config", f'{{"method": {method}}}')
    assert run(write(tmp_path, mistral), "--memory", "80GiB", *drafting) == 2
    shown = capsys.readouterr()
    assert "is not supported for" in shown.err and "sliding windows" in shown.err and not shown.out


def test_a_drafter_without_the_weight_files_is_refused_with_what_helps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafting = ("--speculative-config", '{"method": "mtp"}')
    assert run(write(tmp_path, SHORT), "--memory", "80GiB", *drafting) == 1
    shown = capsys.readouterr().err
    assert "method 'mtp' reads the headers" in shown and "leave speculative_config out" in shown


def test_users_are_as_many_as_a_block_manager_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of(capsys, write(tmp_path, LLAMA_3_8B), "--memory", "20GiB", "--block-size", "32")
    assert [row["length"] for row in plan["users_by_length"]] == [256, 512, 1024, 2048, 4096, 8192]
    odd = plan_of(
        capsys, str(tmp_path), "--memory", "20GiB", "--block-size", "32", "--max-model-len", "1000"
    )
    assert [row["length"] for row in odd["users_by_length"]] == [256, 512, 1000]
    assert (odd["reference_length"], odd["users"]) == (1000, odd["users_by_length"][-1]["users"])
    full = plan_of(
        capsys, str(tmp_path), "--memory", "20GiB", "--num-blocks", "32", "--max-model-len", "256"
    )
    assert full["users_by_length"] == [{"length": 256, "blocks": 16, "users": 1}], (
        "one block is the null block"
    )
    for of in (plan, odd, full):
        for row in of["users_by_length"]:
            manager, num_users = (
                BlockManager([BlockTables(BlockPool(of["num_blocks"]), of["block_size"])]),
                0,
            )
            with pytest.raises(CapacityError):
                while True:
                    manager.reserve(num_users, 0, row["length"])
                    num_users += 1
            assert (row["users"], row["blocks"]) == (num_users, len(manager.block_tables(0)[0])), (
                row["length"]
            )


def test_the_engine_does_what_was_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The device is this machine's.

    "auto" is the checkpoint's type, and the pool ends at what max_num_seqs can use.
    """
    model = random_checkpoint(tmp_path / "llama", LLAMA, dtype="bfloat16")
    flags = ["--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--max-model-len", "64"]
    plan = plan_of(capsys, str(model), *flags)
    settings = {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
        "num_blocks": None,
        "dtype": "auto",
    }
    with make_llm(model, **settings) as llm:
        memory = llm.memory
    for name in (
        "weights_bytes",
        "block_bytes",
        "num_blocks",
        "max_model_len",
        "pool_bytes",
        "num_slots",
        "device",
    ):
        assert plan[name] == getattr(memory, name), name
    assert plan["dtype"] == ("float32" if library.load().reason else "bfloat16")
    assert plan["num_blocks"] == 1 + 2 * 4
    assert run(str(model), *flags) == 0
    assert "no more blocks than max_num_seqs x max_model_len can use" in capsys.readouterr().out


def test_heads_on_several_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """12 query and 2 key/value heads: 4 devices have each of the two twice, and 8 cannot share the
    12.
    """
    heads = {
        "hidden_size": 768,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
    }
    model = write(tmp_path, {**LLAMA_3_8B, **heads})
    plan = plan_of(capsys, model, "--memory", "8GiB", "--dtype", "float32")
    options = {
        o["tensor_parallel_size"]: o for o in plan["alternatives"] if o["dtype"] == "float32"
    }
    # keys and values, layers, width, float32, heads; of the last `auto` comes first
    per_token = 2 * 2 * 64 * 4 * 2
    auto = {o["tensor_parallel_size"]: o for o in plan["alternatives"][:4]}
    assert [auto[n].get("bytes_per_token") for n in (1, 2, 4, 8)] == [
        per_token,
        per_token / 2,
        per_token / 2,
        None,
    ]
    assert [auto[n].get("num_kv_copies") for n in (1, 2, 4, 8)] == [1, 1, 2, None]
    assert [auto[n].get("weights_bytes") for n in (1, 2, 4)] == [
        -(-plan["weights_bytes"] // n) for n in (1, 2, 4)
    ]
    assert auto[8]["error"] == options[8]["error"] == "8 devices cannot share 12 query heads evenly"
    assert auto[8]["users"] == 0 and auto[1]["factor"] == 1.0
    assert run(model, "--memory", "8GiB", "--dtype", "float32", "--tensor-parallel-size", "5") == 2
    assert "5 devices cannot share 12 query heads evenly" in capsys.readouterr().err
    assert (
        run(
            write(tmp_path, {**LLAMA_3_8B, **heads, "num_key_value_heads": 4}),
            "--tensor-parallel-size",
            "6",
        )
        == 2
    )
    assert "6 devices cannot share 4 key/value heads evenly" in capsys.readouterr().err


def lines_of(capsys: pytest.CaptureFixture[str], *words: str) -> list[list[str]]:
    assert run(*words) == 0
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_the_tables_have_the_numbers_of_the_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (write(tmp_path, LLAMA_3_8B), "--memory", "24GiB")
    plan, lines = plan_of(capsys, *words), lines_of(capsys, *words)
    assert ["KV", "bytes", "per", "token", "131,072"] in lines
    for row in plan["users_by_length"]:
        assert [f"{row[name]:,}" for name in ("length", "blocks", "users")] in lines
    assert [
        "At",
        "most",
        "64",
        "of",
        "them",
        "run",
        "at",
        "a",
        "time",
        "(max_num_seqs);",
        "the",
        "others",
        "wait.",
    ] in lines
    assert ["float32", "auto", "1", "does", "not", "fit"] in lines
    for option in plan["alternatives"]:
        if option["error"] is None:
            form = [option["dtype"], option["kv_cache_dtype"]]
            [line] = [
                line
                for line in lines
                if line[:2] == form and line[2].strip("*") == str(option["tensor_parallel_size"])
            ]
            assert line[-2:] == [f"{option['users']:,}", f"{option['factor']:.2f}"]
            assert line[2].endswith("*") == bool(option["not_run_because_of"])


@pytest.mark.parametrize(
    "form", [{"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8"}, {"tensor_parallel_size": 2}]
)
def test_what_this_version_does_not_run_is_planned_and_marked(
    form: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [(name, value)] = form.items()
    try:
        EngineConfig(**form)
        runs = True
    except UnsupportedSettings:
        runs = False
    flag = "--" + name.replace("_", "-")
    words = (write(tmp_path, SHORT), "--memory", "24GiB", flag, str(value))
    plan = plan_of(capsys, *words)
    assert (plan[name], plan["not_run_because_of"]) == (value, [] if runs else [name])
    assert run(*words) == 0
    assert (f"does not run it ({name})" in capsys.readouterr().out) is not runs


def test_a_named_device_has_the_memory_of_its_maker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write(tmp_path, WIDE)
    tokens = {}
    for name, gigabytes in (("v6e", 32), ("V7X", 96), ("v5p", 95), ("h100", 80), ("rtx4090", 24)):
        plan = plan_of(capsys, model, "--device", name)
        same = plan_of(capsys, model, "--memory", f"{gigabytes}GB")
        assert plan.pop("device") != same.pop("device")
        assert plan["num_blocks"] == same["num_blocks"]
        tokens[name] = plan["num_blocks"]
    assert tokens["h100"] > tokens["v6e"] > tokens["rtx4090"]
    assert run(model, "--device", "v5e") == 1, "16 GB do not hold 8B in bfloat16"
    assert "on tpu (TPU v5e, 16 GB by its maker's numbers, gpu_" in capsys.readouterr().err
    assert run(model, "--device", "v5e", "--quantization", "int8") == 0
    assert "\ndevice                     tpu (TPU v5e, 16 GB" in capsys.readouterr().out
    words = (model, "--device", "t4", "--quantization", "int8")
    plan = plan_of(capsys, *words, "--attention-backend", "scan")
    assert (plan["dtype"], plan["attention"]) == ("float16", "scan")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--device", "v3"), "--device must be one of v4, v5e, v5p, .* got 'v3'; for another"),
        (("--device", "v5e", "--memory", "8GiB"), "--device and --memory both say"),
        (("--device", "v5e", "--slo", "ttft=1,tpot=1"), "--device is another device than this"),
    ],
)
def test_what_names_no_device_is_refused(
    words: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("demo", *words) == 2
    assert re.search(text, capsys.readouterr().err)


def test_what_does_not_fit_says_so_in_numbers_and_shows_what_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write(tmp_path, LLAMA_3_8B)
    assert run(model, "--memory", "12GiB") == 1
    out, err = capsys.readouterr()
    assert (
        "of 10.80 GiB available on a device of 12.00 GiB (gpu_memory_utilization 0.9), weights "
        "take 14.96 GiB"
    ) in err
    assert (
        "bfloat16  auto           2   7.48 GiB     64.00 KiB     36\n" in out
        and "Users at" not in out
    )
    assert run(model, "--memory", "12GiB", "--json") == 1
    assert capsys.readouterr().out == ""
    assert run(model, "--memory", "12GiB", "--devices", "2") == 0, "two devices hold it"
    out = capsys.readouterr().out
    assert (
        "8,030,261,248 parameters" in out
        and "does not fit" in out
        and out.splitlines()[-1].split()[:2] == ["2", "1"]
    )
    assert not re.search(r" 4 +7\.48 GiB", out), "more devices than there are"
    plan = plan_of(capsys, model, "--memory", "12GiB", "--devices", "2")
    assert "are missing" in plan["error"] and [
        each["users_of_all"] > 0 for each in plan["divisions"]
    ] == [
        False,
        True,
    ]
    assert (
        run(
            model,
            "--memory",
            "17.5GiB",
            "--gpu-memory-utilization",
            "0.95",
            "--max-model-len",
            "8192",
        )
        == 1
    )
    assert (
        "One sequence of max_model_len = 8192 tokens does not fit in the KV pool"
        in capsys.readouterr().err
    )


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(*words) == 1
    return capsys.readouterr().err.strip()


def test_advice_helps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The advice is followed, and then it fits."""
    model = write(tmp_path, LLAMA_3_8B)
    small = (model, "--memory", "24GiB", "--max-model-len", "8192")
    error = error_of(capsys, *small, "--num-blocks", "20")
    assert error.endswith("Lower max_model_len to 304 or less, or raise num_blocks to 513 or more.")
    assert plan_of(capsys, *small, "--num-blocks", "513")["users"] == 8
    assert (
        plan_of(capsys, *small[:-1], "304", "--num-blocks", "20")["users_by_length"][-1]["users"]
        == 1
    )
    error = error_of(capsys, *small, "--kv-cache-memory-bytes", "8MiB")
    assert error.endswith("or raise kv_cache_memory_bytes to 1075838976 or more.")
    assert plan_of(capsys, *small, "--kv-cache-memory-bytes", "1075838976")["num_blocks"] == 513
    error = error_of(capsys, model, "--memory", "17.9GiB", "--max-model-len", "8192")
    assert error.endswith(
        "or less: 513 blocks would take 1.00 GiB, and 123.47 MiB are free for the pool."
    ), error
    error = error_of(capsys, model, "--memory", "24GiB", "--dtype", "float32")
    assert (
        "are missing: use dtype bfloat16, in which the weights take 14.96 GiB; or free memory of"
        in error
    )
    error = error_of(capsys, model, "--memory", "17GiB")
    assert "or raise gpu_memory_utilization to 0.95 or more; or" in error
    assert (
        plan_of(capsys, model, "--memory", "17GiB", "--gpu-memory-utilization", "0.95")[
            "num_blocks"
        ]
        > 2
    )
    # 67 GiB of weights
    large = write(tmp_path / "large", {**SHORT, "intermediate_size": 2**20 + 2**19})
    error = error_of(capsys, large, "--memory", "24GiB")
    assert error.endswith(
        "free memory of the device, or use a larger one, or several (tensor_parallel_size)."
    ), error


def test_what_a_cpu_ignores_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write(tmp_path, {**LLAMA_3_8B, "num_hidden_layers": 1, "vocab_size": 1000})
    assert run(model, "--num-blocks", "20", "--gpu-memory-utilization", "0.9") == 0
    assert [record.getMessage() for record in caplog.records] == [
        (
            "gpu_memory_utilization = 0.9 means nothing on a CPU: num_blocks or "
            "kv_cache_memory_bytes size the pool here"
        ),
        "max_model_len is 304, as many tokens as the KV pool holds; the model could take 8192: "
        "num_blocks or kv_cache_memory_bytes give it more memory",
    ]
    caplog.clear()
    assert run(model, "--num-blocks", "513") == 0
    assert run(model, "--memory", "24GiB", "--gpu-memory-utilization", "0.5") == 0
    assert run(model, "--num-blocks", "20", "--max-model-len", "200") == 0
    assert not caplog.records


WRONG_USE = [
    (("--memory", "0"), "must be more than 0, got '0'"),
    (("--memory", "24"), "argument --memory: 24 without a unit is 24 bytes; write 24GiB or 24MiB"),
    (
        ("--kv-cache-memory-bytes", "4"),
        "argument --kv-cache-memory-bytes: 4 without a unit is 4 bytes; write 4GiB",
    ),
    (("--memory", "24GX"), "not an amount of memory such as 24GiB, 40GB or bytes: '24GX'"),
    (("--memory", "-1"), "argument --memory"),
    (("--kv-cache-dtype", "int3"), "kv_cache_dtype: must be 'auto', 'int8' or 'fp8', got 'int3'"),
    (
        ("--tensor-parallel-size", "0"),
        "tensor_parallel_size: must be greater than or equal to 1, got 0",
    ),
    (("--dtype", "int8"), "dtype: must be 'auto', 'float32'"),
    (
        ("--max-model-len", "8193", "--memory", "24GB"),
        "max_model_len is 8193, but the model's positions end at 8192",
    ),
    (("--revision", "v1"), "revision = 'v1' names a version on the hub"),
    (("--scheduling-policy", "fair"), "unknown argument '--scheduling-policy'"),
]


@pytest.mark.parametrize(
    ("words", "message"), WRONG_USE, ids=[" ".join(words) for words, _ in WRONG_USE]
)
def test_wrong_use_is_status_2(
    words: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(write(tmp_path, SHORT), *words) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and "Traceback" not in err


def test_the_model_is_a_directory_a_config_or_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    directory = write(tmp_path / "m", SHORT)
    memory = ("--memory", "24GiB")
    by_directory = plan_of(capsys, directory, *memory)
    for name in ("m", "m/config.json"):
        assert {**plan_of(capsys, name, *memory), "model": directory} == by_directory
    assert plan_of(capsys, "demo", *memory) == plan_of(capsys, *memory), "the built-in model"
    requested = []

    class Hub:
        @staticmethod
        def snapshot_download(**arguments: Any) -> str:
            requested.append(arguments)
            return directory

    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub)
    assert (
        plan_of(capsys, "org/name", "--revision", "v1", *memory)["weights_bytes"]
        == by_directory["weights_bytes"]
    )
    assert requested == [
        {
            "repo_id": "org/name",
            "revision": "v1",
            "allow_patterns": ["config.json", "hf_quant_config.json"],
        }
    ], "no weights"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["NoSuchModel"]}, "architecture 'NoSuchModel' is not one of"),
        ({"hidden_size": 10**9, "torch_dtype": "../../x"}, "(2 problems)"),
        (
            {"torch_dtype": "float64"},
            "config.json: dtype 'float64' is not one of float32, bfloat16, float16",
        ),
    ],
)
def test_a_config_that_does_not_serve_is_status_1(
    change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(write(tmp_path, {**SHORT, **change}), "--memory", "24GiB") == 1
    assert message in capsys.readouterr().err
    assert run(str(tmp_path / "none")) == 1
    assert "there is no such directory" in capsys.readouterr().err


def test_a_config_without_a_dtype_means_float32(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {name: value for name, value in SHORT.items() if name != "torch_dtype"}
    assert plan_of(capsys, write(tmp_path, config), "--memory", "80GB")["dtype"] == "float32"
    assert (
        plan_of(capsys, write(tmp_path, {**config, "dtype": "float16"}), "--memory", "80GB")[
            "dtype"
        ]
        == "float16"
    )


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("24GiB", 24 * 2**30),
        ("40GB", 40 * 10**9),
        ("1.5 tib", 3 * 2**39),
        ("80 kB", 80_000),
        ("0.1MiB", 104_857),
        ("1000", 1000),
        ("7B", 7),
    ],
)
def test_amounts_of_memory(text: str, num_bytes: int) -> None:
    assert byte_size(text) == num_bytes


@pytest.mark.parametrize("text", ["24", "512", "999", " 7.5 "])
def test_a_small_number_asks_for_its_unit(text: str) -> None:
    with pytest.raises(
        argparse.ArgumentTypeError,
        match=f"{text.strip()} without a unit is .* bytes; write .*GiB or",
    ):
        byte_size(text)


@pytest.mark.parametrize(
    "text", ["", "GiB", "24G", "24 gigabytes", "-1GB", "1e9", "1_000", "nan", "٣GB", "1.GB"]
)
def test_what_is_no_amount_of_memory(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="not an amount of memory"):
        byte_size(text)


def test_flags_are_settings() -> None:
    assert set(PLAN_SETTINGS) < {flag.setting for flag in ENGINE_FLAGS}
    assert set(PLANNED_SETTINGS) == set(PLAN_SETTINGS) & set(ModelLayout.__dataclass_fields__) - {
        "dtype"
    }


# What no plan takes: a value, with what it needs.
UNPLANNED: dict[str, dict[str, Any]] = {
    "tokenizer": {"tokenizer": "demo"},
    "load_format": {"load_format": "orbax"},
    "swap_space_blocks": {"swap_space_blocks": 7},
    "scheduling_policy": {"scheduling_policy": "fair"},
    "preemption_mode": {"preemption_mode": "recompute"},
    "new_requests_wait_until": {"new_requests_wait_until": "completed"},
    "enable_prefix_caching": {"enable_prefix_caching": False},
    "prefix_cache_directory": {"prefix_cache_directory": "blocks"},
    "prefix_cache_disk_bytes": {"prefix_cache_disk_bytes": 4096},
    "seed": {"seed": 3},
    "max_aborted_requests": {"max_aborted_requests": 1},
    "cudagraph_update_mode": {"cudagraph_update_mode": "always_update"},
    "cudagraph_collectives": {"cudagraph_collectives": True, "tensor_parallel_size": 2},
    "event_log": {"event_log": "events"},
    "event_log_weights": {"event_log": "events", "event_log_weights": True},
}


def test_settings_that_no_plan_takes_change_nothing_in_it(tmp_path: Path) -> None:
    taken = {"model", *PLAN_SETTINGS}
    assert set(UNPLANNED) == {flag.setting for flag in ENGINE_FLAGS} - taken
    model = write(tmp_path, SHORT)
    arguments = argparse.Namespace(device="h100", memory=None)

    def memory(**settings: Any) -> Any:
        return spec_of(arguments, EngineConfig(model=model, **settings), {}).memory

    base = memory()
    for name, settings in UNPLANNED.items():
        assert memory(**settings) == base, name
    for more in ({"num_scheduler_steps": 1}, {"enable_mixed_steps": False}):
        memory(**more)  # they decide which steps there are
    assert memory(attention_backend="scan", kv_cache_dtype="int8").unaddressable == (0, 0)
    assert memory(attention_backend="triton", kv_cache_dtype="int8").unaddressable != (0, 0)


def test_sums_in_one_order_take_a_workspace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """64 rows need it for attention, in 32 segments of 256 positions, and 2 rows for products."""
    words = (write(tmp_path, SHORT), "--device", "h100", "--max-num-seqs")
    for rows, num_bytes in (("64", 64 * 32 * 128 * 32 * 4), ("2", 256 * 256 * 128 * 4)):
        plain, ordered = (
            plan_of(capsys, *words, rows, *flag)["workspace_bytes"]
            for flag in ((), ("--batch-invariant",))
        )
        assert ordered - plain == num_bytes
    for flag in ((), ("--batch-invariant",)):  # a CPU adds up in one order anyway
        plain = plan_of(capsys, *words[:1], *flag)["workspace_bytes"]
    assert plain == plan_of(capsys, *words[:1])["workspace_bytes"]


def test_a_plan_refuses_kernels_as_an_engine_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The card decides, and not only its platform: Triton takes no T4, and FP8 pages need an L4."""
    model = write(tmp_path, SHORT)
    for name, backend, cache, batch_invariant in (
        ("v6e", "auto", "auto", True),
        ("h100", "scan", "auto", True),
        ("h100", "cpu", "auto", False),
        ("t4", "auto", "auto", True),
        ("rtx3090", "triton", "fp8", False),
        ("b200", "mosaic", "auto", False),
    ):
        hardware = KNOWN_DEVICES[name].spec(1.0).hardware
        with pytest.raises(UnsupportedError) as refusal:
            choose_backend(backend, hardware, cache, batch_invariant=batch_invariant)
        flags = ("--batch-invariant",) * batch_invariant
        words = ("--attention-backend", backend, "--kv-cache-dtype", cache, *flags)
        assert run(model, "--device", name, *words) == 2
        assert str(refusal.value) in capsys.readouterr().err


def test_a_plan_says_which_kernels_attend(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where none takes the pages on this card, it says what each of them lacks."""
    words = (write(tmp_path, LLAMA_3_8B), "--kv-cache-dtype", "fp8", "--device")
    assert run(*words, "a100-80gb") == 2
    text = capsys.readouterr().err
    assert "triton: needs a GPU of compute capability 8.9" in text and "A100 of 80 GB" in text
    assert plan_of(capsys, *words, "l40s")["attention"] == "triton"
    assert plan_of(capsys, *words[:1], "--memory", "80GB")["attention"] == ""
    assert run(*words[:1], "--device", "l40s") == 0
    assert "\nattention                  triton\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--enable-lora",), "enable_lora: XLA adds up the products with adapters; leave it out,"),
        (
            ("--speculative-config", '{"method": "suffix", "tree": true}'),
            "speculative_config: the keys of a tree of drafts are not at their positions; use tree",
        ),
        (
            ("--speculative-config", '{"method": "ngram", "acceptance": "rejection"}'),
            "acceptance 'rejection': XLA adds up the probabilities of drafts; use coupled,",
        ),
        (
            ("--tensor-parallel-size", "8"),
            "tensor_parallel_size 8 and tensor_parallel_reduction 'auto': devices would add up",
        ),
    ],
)
def test_a_plan_refuses_what_has_no_one_order(
    flags: tuple[str, ...], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is taken where nothing asks for one, and on a CPU, where all sums have one."""
    words = (write(tmp_path, SHORT), *flags)
    assert run(*words, "--device", "h100", "--batch-invariant") == 2
    assert f"batch_invariant with {text}" in capsys.readouterr().err
    assert run(*words, "--device", "h100") == 0
    assert run(*words, "--batch-invariant", "--max-num-seqs", "2") == 0 or "8" in flags


def test_an_encoder_of_pictures_has_no_one_order_either(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    architecture = "Qwen2_5_VLForConditionalGeneration"
    kind, vision = _SEEING[architecture]
    widths = {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4}
    config = {**SHORT, **widths, "architectures": [architecture], "model_type": kind}
    config["vision_config"] = vision
    words = (write(tmp_path, config), "--device", "h100", "--batch-invariant")
    assert run(*words) == 2
    assert "limit_images: XLA adds up in the encoder of pictures; set" in capsys.readouterr().err
    assert run(*words, "--limit-images", "0") == 0


# ---- --slo


def test_the_highest_rate_is_that_of_a_queue_with_one_server() -> None:
    """There is one request at a time, and steps take 10 ms.

    Lindley's recursion gives every request's wait: of the same arrivals 99 of 100 keep the SLO at
    the rate that is found, and not at one above the precision.
    """
    cost = ShapeCost(((64, 0.01),), ((4096, 64, 0.01),), 0.0)
    question = Question(
        Setup(max_num_seqs=1).new_scheduler, cost, {"e2el": 0.3}, "random", 1, 10, num_requests=100
    )
    answer = highest_rate(question, [3])

    def share_within(rate: float) -> float:
        draw = np.random.default_rng(3)
        times = np.cumsum(draw.exponential(1 / rate, 100))
        _, outputs = LENGTHS["random"](draw, 100, 1, 10)
        end, within = 0.0, []
        for time, num_tokens in zip(times, outputs, strict=True):
            end = max(end, time) + 0.01 * num_tokens
            within.append(end - time <= 0.3)
        return float(np.mean(within))

    assert answer.share_within_slo == pytest.approx(share_within(answer.rate)) and answer.rate > 1
    assert share_within(answer.rate) >= 0.99 > share_within(answer.rate * PRECISION)
    assert not highest_rate(replace(question, slo={"e2el": 0.01}), [3]).is_sustained


def test_a_step_costs_what_its_shape_and_its_context_cost() -> None:
    cost = ShapeCost(((1, 1.0), (4, 2.0)), ((64, 2, 3.0), (64, 8, 5.0)), 0.01)
    decode, chunk = Row(0, 116, (0,), ()), Row(1, 0, (0,) * 30, ())
    for rows, seconds in (
        ([decode], 1 + 0.01 * 101),  # of 117 tokens 16 are in the step's own time
        ([decode] * 3, 2 + 0.01 * 3 * 101),
        ([decode] * 6, 3 + 0.01 * 6 * 101),
        ([chunk], 3.0),
        ([chunk, decode, decode], 5 + 0.01 * 2 * 101),
    ):
        assert cost.compute_seconds(StepPlan(0, tuple(rows), ())) == pytest.approx(seconds)


@pytest.mark.usefixtures("compiled_when_used")
def test_costs_are_measured_where_none_are_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # tests/test_simulation.py has rates of as many requests as users simulate
    monkeypatch.setattr(plan_rate, "Question", functools.partial(Question, num_requests=40))
    model = random_checkpoint(tmp_path / "model", LLAMA)
    words = [
        "--num-blocks",
        "33",
        "--max-num-seqs",
        "1",
        "--max-num-batched-tokens",
        "16",
        "--max-model-len",
        "128",
    ]
    sizes = ["--dataset", "random", "--max-input", "20", "--max-output", "8"]
    result = plan_of(capsys, str(model), *words, *sizes, "--slo", "ttft=10000,tpot=10000")
    costs = result["costs"]
    assert (
        all(seconds > 0 for *_, seconds in (*costs["decode"], *costs["chunk"]))
        and costs["context_token"] >= 0
    )
    assert (
        costs["decode"][-1][0] == 1
        and costs["chunk"][-1][0] == 16
        and result["highest_rate"]["rate"] > 1
    )
    (tmp_path / "costs.json").write_text(json.dumps(result))
    flags = [
        "--memory",
        "1GiB",
        "--costs",
        str(tmp_path / "costs.json"),
        "--slo",
        "e2el=0.001",
        "--rate",
        "1",
    ]
    assert run(str(model), *words, *sizes, *flags) == 1
    assert "1 requests/s are not sustained" in capsys.readouterr().out, (
        "no request is done within a microsecond"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--slo", "itl=3"), "--slo takes ttft=MS,tpot=MS,e2el=MS, got 'itl=3'"),
        (
            ("--slo", "tpot=3"),
            "--slo needs ttft or e2el: without one of them requests may wait for ever",
        ),
        (("--rate", "3"), "--rate goes with --slo ttft=MS,tpot=MS"),
        (("--max-input", "3"), "--max-input goes with --slo ttft=MS,tpot=MS"),
        (("--slo", "ttft=3", "--memory", "24GiB"), "--slo then needs --costs FILE"),
        (
            ("--slo", "ttft=3", "--costs", "no.json"),
            "--costs no.json: costs are what `jaxpage plan --slo --json` prints",
        ),
        (
            ("--slo", "ttft=3", "--dataset", "mine"),
            "--dataset must be one of sharegpt, alpaca, random, chat, translation",
        ),
        (("--slo", "ttft=3", "--rate", "-1"), "--rate must be more than 0, got -1.0"),
    ],
)
def test_wrong_use_of_an_slo(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("demo", *words) == 2
    assert message in capsys.readouterr().err


def test_weights_whose_groups_cannot_be_divided_are_planned_as_far_as_they_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two devices have 43 groups of 128 each of 11,008 inputs; four would have 21 and a half.

    Falcon's heads stay in their groups.
    """
    awq = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "version": "gemm",
    }
    config = {
        **LLAMA_3_8B,
        "intermediate_size": 11008,
        "num_hidden_layers": 2,
        "quantization_config": awq,
    }
    options = plan_of(capsys, write(tmp_path, config), "--memory", "24GiB")["alternatives"]
    errors = {option["tensor_parallel_size"]: option["error"] for option in options}
    assert errors[1] is errors[2] is None
    assert (
        "down_proj has 11008 inputs of which each 128 share a scale, and cannot be divided into 4"
        in errors[4]
    )
    falcon = {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "new_decoder_architecture": True,
    }
    sizes = {
        "hidden_size": 128,
        "num_kv_heads": 2,
        "num_attention_heads": 8,
        "num_hidden_layers": 1,
        "vocab_size": 257,
    }
    assert run(write(tmp_path, {**falcon, **sizes}), "--memory", "24GiB") == 0
    rows = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(("float32", "bfloat16"))
    ]
    assert ["cannot be divided" in row for row in rows] == [
        row.split()[2] in ("4", "8") for row in rows
    ]


@pytest.mark.parametrize(
    "name", few(MODELS, ["qwen3-grouped", "qwen3-next-mixed", "deepseek-v3-halves"])
)
def test_a_division_is_refused_as_by_the_divided_model(name: str, tmp_path: Path) -> None:
    """One model is built for all divisions; the oracle builds one for each, as an engine does.

    The 22 columns of DeepSeek's shared expert cannot be divided into 4, those of its first layer
    can.
    """
    path = write(tmp_path, config_json(name, moe_intermediate_size=22))
    described = describe_model(resolve_model_config(path))
    model = described.family, described.spec
    divisions = ShardingChecker(*model, described.rule)

    def divide(sharding: Sharding) -> None:
        rule = with_sharding(sharding, described.rule)
        _, shapes = abstract_model(*model, "float32", rule)
        shard_weights(divisions.weights, shapes, sharding)

    def refusal(check: Callable[[Sharding], None], sharding: Sharding) -> str | None:
        try:
            check(sharding)
        except (ConfigError, UnsupportedError) as error:
            return str(error)
        return None

    heads = described.spec.kv.num_kv_heads
    for sharding in [Sharding(heads, 2, 2), Sharding(heads, 1, 4, invariant=True)]:
        assert refusal(divisions.check, sharding) == refusal(divide, sharding)


def test_devices_are_divided_into_replicas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights of a replica times its devices are the model's.

    16 GB of weights do not fit on a device of 12 GiB.
    """
    model = write(tmp_path, LLAMA_3_8B)
    flags = ("--memory", "12GiB", "--tensor-parallel-size", "2")
    values = {
        each["tensor_parallel_size"]: each
        for each in plan_of(capsys, model, *flags, "--devices", "8")["divisions"]
    }
    assert [(size, each["replicas"]) for size, each in values.items()] == [
        (1, 8),
        (2, 4),
        (4, 2),
        (8, 1),
    ]
    assert "leave no room" in values[1]["error"] and values[1]["users_of_all"] == 0
    for size in (2, 4, 8):
        assert values[size]["weights_bytes"] * size == 16_060_522_496
        assert values[size]["users_of_all"] == 8 // size * (values[size]["num_slots"] // 1024)
    assert run(model, *flags, "--devices", "8") == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["1", "8", "does", "not", "fit"] in table
    users = [f"{2 * (values[4]['num_slots'] // length):,}" for length in (1024, 4096)]
    assert ["4", "2", "3.74", "GiB", f"{values[4]['num_slots']:,}", *users] in table
    assert run(model, *flags, "--devices", "0") == 2


def test_blocks_are_of_16_tokens_until_a_card_was_measured(monkeypatch):
    h100 = DeviceSpec("gpu (NVIDIA H100 80GB HBM3)", 2**30)
    assert [h100.choose_block_size(size) for size in ("auto", 8)] == [16, 8]
    monkeypatch.setitem(device_spec.MEASURED_BLOCK_SIZES, "H100", 64)
    assert h100.choose_block_size("auto") == 64
    assert [h100.choose_block_size("auto", tokens) for tokens in (2048, 40, 32, 1)] == [
        64,
        32,
        32,
        1,
    ]
    assert DeviceSpec("gpu (NVIDIA H200)", 2**30).choose_block_size("auto") == 16
