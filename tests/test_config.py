"""EngineConfig, strict YAML, and the precedence of sources: what is accepted, what is refused, and
how the refusal reads.
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from jaxpage.checkpoints.finding import resolve_model
from jaxpage.cli import main
from jaxpage.errors import ConfigError, ModelNotFoundError, UnsupportedError
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.exchange import open_chat, open_completion
from jaxpage.settings.engine_config import EngineConfig, attention_backends
from jaxpage.settings.engine_settings import LLMSettings
from jaxpage.settings.sources import resolve_config
from jaxpage.settings.yaml_file import load_mapping, parse_scalar
from tests.support.wire import context


def write(directory: Path, text: str | bytes) -> Path:
    path = directory / "engine.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def resolve(
    path: Path | None = None, environment: dict[str, str] | None = None, **settings: Any
) -> EngineConfig:
    return resolve_config(path, settings, environment=environment or {}).config


# ---- values


def test_fields_and_defaults_are_those_of_the_interface() -> None:
    assert {name: field.default for name, field in EngineConfig.model_fields.items()} == {
        "model": "demo",
        "dtype": "auto",
        "max_model_len": None,
        "block_size": "auto",
        "num_blocks": None,
        "kv_cache_memory_bytes": None,
        "gpu_memory_utilization": 0.9,
        "swap_space_blocks": None,
        "max_num_seqs": 64,
        "max_num_batched_tokens": None,
        "num_scheduler_steps": "auto",
        "preemption_mode": "auto",
        "enable_prefix_caching": True,
        "attention_backend": "auto",
        "batch_invariant": False,
        "seed": 0,
        "speculative_config": None,
        "enable_lora": False,
        "enable_prompt_embeds": False,
        "enable_return_hidden_states": False,
        "enable_return_routed_experts": False,
        "enable_return_sampling_mask": False,
        "max_aborted_requests": 256,
        "limit_images": None,
        "encoder_cache_bytes": 512 * 2**20,
        "max_loras": 4,
        "max_lora_rank": 16,
        "tensor_parallel_size": 1,
        "tensor_parallel_reduction": "auto",
        "load_format": "auto",
        "tokenizer": None,
        "revision": None,
        "quantization": None,
        "kv_cache_dtype": "auto",
        "enable_mixed_steps": None,
        "scheduling_policy": "fcfs",
        "new_requests_wait_until": "readmitted",
        "cudagraph_update_mode": "auto",
        "cudagraph_collectives": False,
        "event_log": None,
        "event_log_weights": False,
        "prefix_cache_directory": None,
        "prefix_cache_disk_bytes": 8 * 2**30,
    }


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("block_size", 0, "block_size: must be greater than or equal to 1 or 'auto', got 0"),
        ("block_size", 3, "block_size: must be a power of two from 1 to 128 or 'auto', got 3"),
        ("block_size", 256, "block_size: must be a power of two from 1 to 128 or 'auto', got 256"),
        ("block_size", -16, "block_size: must be greater than or equal to 1 or 'auto', got -16"),
        ("block_size", 1.5, "block_size: must be a valid integer or 'auto', got 1.5"),
        ("block_size", "16", "block_size: must be a valid integer or 'auto', got '16'"),
        (
            "cudagraph_collectives",
            True,
            (
                "cudagraph_collectives: cannot be true while tensor_parallel_size is 1: one "
                "device exchanges nothing"
            ),
        ),
        ("max_num_seqs", 0, "max_num_seqs: must be greater than or equal to 1, got 0"),
        ("max_num_seqs", True, "max_num_seqs: must be a valid integer, got True"),
        ("num_blocks", 1, "num_blocks: must be greater than or equal to 2, got 1"),
        ("max_model_len", 0, "max_model_len: must be greater than or equal to 2, got 0"),
        (
            "max_num_batched_tokens",
            63,
            "max_num_batched_tokens: must be at least max_num_seqs (64), got 63",
        ),
        ("gpu_memory_utilization", 0.0, "gpu_memory_utilization: must be greater than 0, got 0.0"),
        (
            "gpu_memory_utilization",
            1.1,
            "gpu_memory_utilization: must be less than or equal to 1, got 1.1",
        ),
        (
            "gpu_memory_utilization",
            float("nan"),
            "gpu_memory_utilization: must be a finite number, got nan",
        ),
        ("dtype", "int3", "dtype: must be 'auto', 'float32', 'bfloat16' or 'float16', got 'int3'"),
        ("seed", -1, "seed: must be greater than or equal to 0, got -1"),
        ("model", "", "model: must have at least 1 character, got ''"),
        ("model", None, "model: must be a valid string, got None"),
        ("max_model_length", 9, "max_model_length: unknown setting; did you mean 'max_model_len'?"),
        ("zebra", 9, "zebra: unknown setting; settings are model, tokenizer"),
    ],
)
def test_a_bad_value_is_refused_with_name_value_and_what_is_allowed(
    name: str, value: object, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(**{name: value})
    assert message in str(error.value).splitlines() or str(error.value).startswith(message)


def test_a_step_holds_a_block() -> None:
    sizes: dict[str, Any] = {"max_num_batched_tokens": 8, "max_num_seqs": 4}
    with pytest.raises(ConfigError, match=r"must be at least block_size \(16\), got 8"):
        EngineConfig(**sizes, block_size=16)
    assert EngineConfig(**sizes).block_size == "auto"


def test_contradictions_are_reported_beside_other_mistakes() -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(  # type: ignore[call-arg]
            block_size=13,
            zebra=1,
            swap_space_blocks=3,
            preemption_mode="recompute",
            attention_backend="cuda",
            max_num_seqs="many",  # type: ignore[arg-type]
            max_num_batched_tokens=40,
        )
    lines = str(error.value).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        *("block_size", "max_num_seqs", "zebra", "swap_space_blocks", "attention_backend"),
    ], (
        "and nothing that comes of a default in the place of a mistake: 40 are fewer than 64 "
        "max_num_seqs"
    )
    assert lines[0] == "block_size: must be a power of two from 1 to 128 or 'auto', got 13"


def test_settings_that_were_given_are_known() -> None:
    config = EngineConfig(max_num_seqs=64).replace(seed=1)
    assert config.explicit_settings() == {"max_num_seqs": 64, "seed": 1}
    assert EngineConfig(**config.explicit_settings()) == config
    nested = EngineConfig(speculative_config={"method": "ngram"})  # type: ignore[arg-type]
    assert nested.replace(seed=0) == nested


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((1000, 1000), (2**30, 2**30), ("24GiB", 24 * 2**30), ("1.5 MB", 1_500_000)),
        *((24, "must be at least 1000 bytes, or an amount with a unit such as 24GiB, got 24"),),
        *((0, "must be at least 1000 bytes"), (-(2**30), "must be at least 1000 bytes")),
        *(
            ("24", "must be a number of bytes or an amount such as 24GiB, got '24'"),
            ("much", "must be a number of bytes"),
        ),
        *((True, "must be a valid integer, got True"), (1e9, "must be a valid integer")),
    ],
)
def test_amounts_of_memory(value: object, expected: int | str) -> None:
    if isinstance(expected, int):
        assert EngineConfig(kv_cache_memory_bytes=value).kv_cache_memory_bytes == expected  # type: ignore[arg-type]
        return
    with pytest.raises(ConfigError, match=f"^kv_cache_memory_bytes: {expected}"):
        EngineConfig(kv_cache_memory_bytes=value)  # type: ignore[arg-type]


def test_an_amount_of_memory_in_a_file_and_in_a_variable(tmp_path: Path) -> None:
    assert resolve(write(tmp_path, "kv_cache_memory_bytes: 4GiB\n")).kv_cache_memory_bytes == 2**32
    assert (
        resolve(environment={"JAXPAGE_KV_CACHE_MEMORY_BYTES": "4GiB"}).kv_cache_memory_bytes
        == 2**32
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"swap_space_blocks": 8, "max_num_seqs": 1},
            (
                "swap_space_blocks: cannot be 8 while max_num_seqs is 1 and preemption_mode "
                "'auto': one sequence recomputes"
            ),
        ),
        (
            {"scheduling_policy": "priority", "new_requests_wait_until": "completed"},
            (
                "new_requests_wait_until: cannot be 'completed' while scheduling_policy is "
                "'priority': requests of higher priority do not wait"
            ),
        ),
        (
            {"num_blocks": 10, "kv_cache_memory_bytes": 1000},
            "num_blocks: cannot be 10 while kv_cache_memory_bytes is 1000",
        ),
        (
            {"preemption_mode": "swap", "swap_space_blocks": 0},
            (
                "preemption_mode: cannot be 'swap' while swap_space_blocks is 0: there is nowhere "
                "to swap to"
            ),
        ),
        (
            {"preemption_mode": "recompute", "swap_space_blocks": 8},
            (
                "swap_space_blocks: cannot be 8 while preemption_mode is 'recompute': nothing is "
                "swapped"
            ),
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attention_backend", "cuda"),
        ("speculative_config", {"method": "lookahead", "acceptance": "typical"}),
    ],
)
def test_what_this_version_does_not_honour_is_refused_not_ignored(name: str, value: object) -> None:
    with pytest.raises(
        UnsupportedError, match=f"^{name}: .* is not supported: this version .*; use "
    ):
        EngineConfig(**{name: value})


NESTED = [
    (
        {"num_speculative_tokens": 0},
        r"num_speculative_tokens: must be greater than or equal to 1 or 'auto', got 0$",
    ),
    (
        {"num_speculative_tokens": "4"},
        r"num_speculative_tokens: must be a valid integer or 'auto', got '4'$",
    ),
    (
        {"num_speculative_tokens": 64},
        r"num_speculative_tokens: must be less than or equal to 63 or 'auto', got 64$",
    ),
    (
        {"num_speculative_token": 4},
        r"num_speculative_token: unknown setting; did you mean 'num_speculative_tokens'\?$",
    ),
    ({"max_num_seqs": 4}, r"max_num_seqs: unknown setting; settings are method, model, "),
    ({"method": "ngrams"}, r"method: must be 'ngram', .*, got 'ngrams'$"),
    ({"acceptance": 1}, r"acceptance: must be 'coupled', .*, got 1$"),
    (
        {"acceptance": "typical", "typical_acceptance_posterior_threshold": 1.0},
        r"typical_acceptance_posterior_threshold: must be less than 1, got 1.0$",
    ),
    (
        {"acceptance": "typical", "typical_acceptance_posterior_alpha": -0.1},
        r"typical_acceptance_posterior_alpha: must be greater than or equal to 0, got -0.1$",
    ),
]


@pytest.mark.parametrize(("change", "message"), NESTED, ids=[str(change) for change, _ in NESTED])
def test_settings_of_speculation_are_named_in_full(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Each is one line, also from a file, with the place of the whole."""
    with pytest.raises(ConfigError, match=rf"^speculative_config\.{message}"):
        EngineConfig(speculative_config={"method": "ngram", **change})
    text = "speculative_config:\n" + "".join(
        f"  {n}: {json.dumps(v)}\n" for n, v in {"method": "ngram", **change}.items()
    )
    with pytest.raises(ConfigError, match=rf"engine\.yaml:1: speculative_config\.{message}"):
        resolve(write(tmp_path, text))


def test_settings_of_speculation_that_contradict_or_are_missing() -> None:
    with pytest.raises(ConfigError, match=r"^speculative_config\.method: is required$"):
        EngineConfig(speculative_config={"num_speculative_tokens": 3})
    with pytest.raises(
        ConfigError,
        match="^speculative_config: prompt_lookup_min is 5, above prompt_lookup_max, 4$",
    ):
        EngineConfig(
            speculative_config={"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4}
        )
    for acceptance in ("coupled", "rejection"):
        with pytest.raises(
            ConfigError,
            match=rf"typical_acceptance_posterior_alpha is 0.2, but acceptance is '{acceptance}'",
        ):
            EngineConfig(
                speculative_config={
                    "method": "ngram",
                    "acceptance": acceptance,
                    "typical_acceptance_posterior_alpha": 0.2,
                }
            )
    with pytest.raises(ConfigError, match="^speculative_config: must be a valid dictionary"):
        EngineConfig(speculative_config=7)


def test_speculation_that_this_version_does_not_do_is_refused() -> None:
    with pytest.raises(
        UnsupportedError,
        match="^speculative_config: tree=True is not supported: method 'ngram' drafts chains",
    ):
        EngineConfig(speculative_config={"method": "ngram", "tree": True})
    with pytest.raises(
        UnsupportedError,
        match="^speculative_config: acceptance 'rejection' is not supported: this version of method "
        "'lookahead'",
    ):
        EngineConfig(speculative_config={"method": "lookahead", "acceptance": "rejection"})
    with pytest.raises(
        ConfigError,
        match="^speculative_config: model is 'there', but method is 'ngram': it belongs to",
    ):
        EngineConfig(speculative_config={"method": "ngram", "model": "there"})


def test_which_drafts_become_tokens() -> None:
    assert (
        EngineConfig().acceptance == EngineConfig(speculative_config={"method": "ngram"}).acceptance
    )
    assert EngineConfig().acceptance.name == "coupled"
    values = {
        "method": "suffix",
        "acceptance": "typical",
        "typical_acceptance_posterior_threshold": 0.2,
    }
    assert EngineConfig(speculative_config=values).acceptance == ("typical", 0.2, 0.3)
    assert EngineConfig(
        speculative_config={"method": "medusa", "model": "m", "acceptance": "typical"}
    ).acceptance == (
        "typical",
        0.09,
        0.3,
    )


def test_settings_of_speculation_from_every_source(tmp_path: Path) -> None:
    expected = {"method": "ngram", "num_speculative_tokens": 3}
    for config in (
        resolve(
            write(tmp_path, "speculative_config:\n  method: ngram\n  num_speculative_tokens: 3")
        ),
        resolve(environment={"JAXPAGE_SPECULATIVE_CONFIG": json.dumps(expected)}),
        resolve(speculative_config=expected),
    ):
        assert config == EngineConfig(speculative_config=expected)
    resolved = resolve_config(None, {"speculative_config": expected}, environment={})
    assert resolve(write(tmp_path, "\n".join(resolved.lines()))) == resolved.config
    assert (
        EngineConfig(**resolved.config.model_dump()) == resolved.config == resolved.config.replace()
    )


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (jnp.bfloat16, "bfloat16"),
        (np.float16, "float16"),
        (np.dtype("float32"), "float32"),
        ("half", "float16"),
    ],
)
def test_a_dtype_may_be_a_type(dtype: Any, name: str) -> None:
    assert EngineConfig(dtype=dtype).dtype == name


def test_neutral_values_of_unsupported_settings_are_accepted() -> None:
    config = EngineConfig(
        swap_space_blocks=0,
        preemption_mode="recompute",
        attention_backend="reference",
        tensor_parallel_size=1,
    )
    assert config.preemption_mode == "recompute"


def test_every_kernel_set_can_be_chosen_and_nothing_else() -> None:
    kernels = pytest.importorskip("pallas_kernels")
    assert set(attention_backends()) == {"auto", *kernels.BACKENDS}
    for backend in attention_backends():
        EngineConfig(attention_backend=backend)
    with pytest.raises(
        UnsupportedError,
        match=r"'tritn' .* no such kernel set \(did you mean 'triton'\?\); use auto or",
    ):
        EngineConfig(attention_backend="tritn")
    with pytest.raises(ConfigError, match="^attention_backend: must be a valid string, got 7$"):
        EngineConfig(attention_backend=7)


def test_a_config_is_frozen_and_replaced_as_a_whole() -> None:
    config = EngineConfig(model=Path("/models/a"), max_num_seqs=8)  # type: ignore[arg-type]
    assert config.model == "/models/a"
    with pytest.raises(ValidationError, match="frozen"):
        config.max_num_seqs = 4
    assert config.replace(max_num_seqs=4) == EngineConfig(model="/models/a", max_num_seqs=4)
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        config.replace(max_num_batched_tokens=1)


def test_checks_hold_under_python_optimised() -> None:
    program = """
from jaxpage.serving.settings.server_config import ServerConfig
from jaxpage.settings.engine_config import EngineConfig
for config, values in ((EngineConfig, {"block_size": 3}), (ServerConfig, {"port": -1})):
    try:
        config(**values)
    except ValueError as error:
        print(error)
"""
    result = subprocess.run(
        [sys.executable, "-O", "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines() == [
        "block_size: must be a power of two from 1 to 128 or 'auto', got 3",
        "port: must be greater than or equal to 0, got -1",
    ]


# ---- YAML


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6), ("1.0e-6", 1e-6), (".5", 0.5), ("0.9", 0.9), ("8", 8), ("-8", -8),
        ("0123", 123), ("true", True),
        ("False", False), ("null", None), ("~", None), ("yes", "yes"), ("on", "on"), ("no", "no"),
        ("12:30:45", "12:30:45"),
        ("2024-01-01", "2024-01-01"), ("0x1f", "0x1f"), (".nan", ".nan"), ("1_000", "1_000"),
        ("'8'", "8"), ("<<", "<<"),
        ("[1, a]", [1, "a"]), ("{a: {b: 1}}", {"a": {"b": 1}}),
    ],
)  # fmt: skip
def test_scalars_mean_what_they_look_like(text: str, value: object) -> None:
    parsed = parse_scalar(text)
    assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("- model\n", "engine.yaml:1: the top level must be a mapping, not a list"),
        ("\ndemo\n", "engine.yaml:2: the top level must be a mapping, not a single value"),
        ("model: a\nmodel: b\n", "engine.yaml:2: 'model' is given twice, first in line 1"),
        (
            "speculative_config:\n  a: 1\n  a: 2\n",
            "engine.yaml:3: 'a' is given twice, first in line 2",
        ),
        ("model: &name demo\n", "engine.yaml:1: anchors and aliases are not allowed"),
        ("model: demo\ntokenizer: *model\n", "engine.yaml:2: anchors and aliases are not allowed"),
        ("model: !!python/object/apply:os.system [ls]\n", "engine.yaml:1: tags are not allowed"),
        ("model: !!str 5\n", "engine.yaml:1: tags are not allowed"),
        ("1: demo\n", "engine.yaml:1: a key must be plain text"),
        ("model: [demo\n", "engine.yaml:2: expected ',' or ']'"),
        ("model: demo\n---\nmodel: demo\n", "engine.yaml:2: but found another document"),
        (b"\x7fELF\0\0\0", "is not a text file (it contains NUL)"),
        (b"\xff\xfe\x80", "is not a text file (UTF-8)"),
        (b"model: \x07\n", "is not a text file: special characters are not allowed at character 7"),
        ("model: " + "[" * 20_000, "nested too deeply"),
        ("#" * 1_000_001, "a configuration has at most 1000000"),
    ],
)
def test_a_file_that_is_not_a_strict_mapping_is_refused(
    tmp_path: Path, text: str | bytes, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load_mapping(write(tmp_path, text))
    assert message in str(error.value) and str(tmp_path) in str(error.value)


def test_a_path_that_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no configuration file .*missing\.yaml"):
        load_mapping(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="is a directory"):
        load_mapping(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is not a regular file"):
        load_mapping(tmp_path / "pipe")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "model: demo")
    path.chmod(0)
    with pytest.raises(ConfigError, match="cannot read .*Permission denied"):
        load_mapping(path)


# ---- sources


def test_precedence_and_origins(tmp_path: Path) -> None:
    path = write(tmp_path, "model: from-file\nmax_num_seqs: 2\nblock_size: 8\n")
    environment = {
        "JAXPAGE_MAX_NUM_SEQS": "3",
        "JAXPAGE_BLOCK_SIZE": "32",
        "JAXPAGE_REVISION": "1e3",
        "PATH": "/bin",
    }
    resolved = resolve_config(
        path, {"block_size": 64}, environment=environment, overrides_origin="--block-size"
    )
    assert (resolved.config.model, resolved.config.max_num_seqs, resolved.config.block_size) == (
        "from-file",
        3,
        64,
    )
    assert resolved.config.revision == "1e3", "text settings are not parsed"
    assert resolved.origins["model"] == f"{path}:1"
    assert resolved.origins["max_num_seqs"] == "JAXPAGE_MAX_NUM_SEQS"
    assert resolved.origins["block_size"] == "--block-size"
    assert resolved.origins["dtype"] == "built-in"


def test_a_refusal_names_the_source(tmp_path: Path) -> None:
    path = write(tmp_path, "model: demo\n\nblock_size: 3\n")
    with pytest.raises(ConfigError, match=r"engine\.yaml:3: block_size: must be a power of two"):
        resolve(path)
    with pytest.raises(
        ConfigError, match="JAXPAGE_MAX_NUM_SEQS: max_num_seqs: must be a valid integer, got 'abc'"
    ):
        resolve(environment={"JAXPAGE_MAX_NUM_SEQS": "abc"})
    with pytest.raises(
        UnsupportedError, match=r"engine\.yaml:1: attention_backend: 'cuda' is not supported"
    ):
        resolve(write(tmp_path, "attention_backend: cuda"))
    with pytest.raises(ConfigError, match="argument: max_num_batched_tokens: must be at least"):
        resolve(max_num_batched_tokens=1)


@pytest.mark.parametrize("length", [128, 5_000, 2_000_000])
def test_a_name_too_long_to_be_one_is_compared_with_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """It may come from anywhere: comparing takes time that grows with its length."""
    name, compared = "m" * length, []
    monkeypatch.setattr(
        difflib, "get_close_matches", lambda name, *_: compared.append(len(name)) or []
    )
    requests = context(strict_requests=True)
    for error, refused in (
        (ApiError, lambda: open_completion({"model": "demo", "prompt": "x", name: 1}, requests)),
        (ApiError, lambda: open_chat({"model": "demo", "messages": [{"role": "user", "content": "x", name: 1}]}, requests)),
        (ConfigError, lambda: resolve(write(tmp_path, f'"{name}": 1'))),
        (ConfigError, lambda: resolve(**{name: 1})),
        (SystemExit, lambda: main(["generate", "x", f"--{name}"])),
        (ModelNotFoundError, lambda: resolve_model(name)),
    ):  # fmt: skip
        with pytest.raises(error):
            refused()
    resolve(environment={f"JAXPAGE_{name}": "1"})
    assert max(compared, default=0) <= 128 and bool(compared) == (length == 128)


def test_unknown_names_in_every_source(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"engine\.yaml:1: max_model_length: .*did you mean 'max_model_len'"
    ):
        resolve(write(tmp_path, "max_model_length: 8"))
    with pytest.raises(
        ConfigError, match=r"JAXPAGE_MAX_MODEL_LENGTH: .*did you mean 'max_model_len'"
    ):
        resolve(environment={"JAXPAGE_MAX_MODEL_LENGTH": "8"})
    resolve(
        environment={
            "JAXPAGE_SERVICE_HOST": "10.0.0.1",
            "JAXPAGE_DEBUG": "1",
            "JAXPAGE_PORT": "tcp://10.0.0.1",
        }
    )


def test_shown_lines_are_yaml_that_loads_to_the_same_config(tmp_path: Path) -> None:
    resolved = resolve_config(
        None, {"model": 'a "b": \\ #c', "revision": "1e3", "seed": 2**64 - 1}, environment={}
    )
    assert resolve(write(tmp_path, "\n".join(resolved.lines()))) == resolved.config


def test_engine_flags_cover_every_setting() -> None:
    """The command line lists its flags without importing pydantic, so that --help is instant.

    Here both are compared.
    """
    from jaxpage.cli.setting_flags import ENGINE_FLAGS

    assert {flag.setting for flag in ENGINE_FLAGS} == set(EngineConfig.model_fields)
    assert inspect.getdoc(EngineConfig)


def test_keyword_arguments_are_the_settings():
    """They have the same choices. tests/typed_settings.py shows that type checkers see them."""
    hints = get_type_hints(LLMSettings)
    assert {"model", *hints} == EngineConfig.model_fields.keys()
    for name, hint in hints.items():
        choices, expected = (
            _choices(each) for each in (hint, EngineConfig.model_fields[name].annotation)
        )
        # Other words for a choice: "auto" is short for the method of that name.
        others = {"half", "float"} | ({"auto"} if name == "speculative_config" else set())
        assert choices - others == expected, name


def _choices(hint: Any) -> set[Any]:
    arguments = get_args(hint)
    return (
        set(arguments)
        if get_origin(hint) is Literal
        else {value for each in arguments for value in _choices(each)}
    )
