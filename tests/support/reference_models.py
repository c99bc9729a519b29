"""The page of models in docs/reference/: what each family can be used with, as the code says it,
and the tests that show it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

from flax import nnx

from jaxpage.assembly.planning import ModelLayout
from jaxpage.assembly.planning.layer_kinds import check_recurrent, check_windows
from jaxpage.checkpoints.quantization.formats import METHODS
from jaxpage.checkpoints.quantization.on_load import SCHEMES
from jaxpage.checkpoints.quantization.quantization_fields import QuantizationFields
from jaxpage.checkpoints.quantization.scheme import Scheme
from jaxpage.cli.plan import CACHE_DTYPES
from jaxpage.errors import UnsupportedError
from jaxpage.layers.expert_linear import ExpertLinear
from jaxpage.layers.linear import Linear
from jaxpage.models.base import KVSpec, make_model
from jaxpage.models.parameters.lora_layers import lora_targets
from jaxpage.models.parts.encoder_config import SCORES_PAIRS
from jaxpage.models.registry import ENCODERS, FAMILIES, load_family, load_page
from jaxpage.settings.speculative_config import SpeculativeConfig
from tests.support import measured_errors
from tests.support.model_configs import MODELS, config_json
from tests.support.refused_configs import REFUSED
from tests.test_decilm import CONFIG as DECILM
from tests.test_gguf import MODELS as GGUF_MODELS
from tests.test_quantization import FORMATS

OUTSIDE = {"DeciLMForCausalLM": DECILM}  # The configs of those that transformers does not have.
# Widths that are multiples of what shares a scale.
_WIDE = {"hidden_size": 128, "intermediate_size": 64, "moe_intermediate_size": 64}
# The tests of each column, in tests/.
TESTS = {
    "cases": [
        "test_models.py::test_logits_are_those_of_transformers",
        "test_engine_models.py::test_tokens_are_those_of_transformers_and_no_bit_depends_on_the_engine",
    ],
    "error": [
        "test_models.py::test_logits_are_those_of_transformers",
        "test_models.py::test_the_page_of_models_has_an_error_of_each_architecture",
    ],
    "refused": ["test_models.py::test_what_cannot_be_honoured_is_refused_by_name"],
    "GGUF": ["test_gguf.py::test_logits_are_those_of_transformers"],
    "experts in": [
        "test_quantized_experts.py::test_a_checkpoint_stands_for_its_weights",
        "test_quantized_experts.py::test_experts_are_rounded_alike_apart_and_stacked",
        "test_quantized_experts.py::test_stacked_experts_of_other_formats_are_refused_in_one_sentence",
        "test_experts.py::test_experts_in_mxfp4_are_multiplied_as_they_are_stored",
    ],
    "LoRA": [
        "test_lora.py::test_tokens_and_logits_are_those_of_peft",
        "test_lora.py::test_a_product_that_is_absorbed_takes_no_adapter",
    ],
    "drafts": [
        "test_speculation.py::test_trees_are_refused_where_they_are_not_drafted_or_not_attended",
        "test_recurrent.py::test_no_bit_depends_on_the_engine",
        "test_recurrent.py::test_what_is_not_honoured_is_refused_by_name",
    ],
    "as a draft model": ["test_eagle.py::test_a_draft_model_has_the_logits_of_transformers"],
    "KV cache": [
        "test_quantized_pages.py::test_an_engine_says_nearly_the_same",
        "test_recurrent.py::test_what_is_not_honoured_is_refused_by_name",
    ],
}
INTRODUCTION = """\
What `architectures` of a config.json may name, and what each can be used with. An empty cell: the model has
nothing of the kind, or it is refused with an error that names it.
All have prefix caching, preemption, chunked prefill, [several devices](../scale.md) (`tests/test_tensor_parallel.py`), linear layers in
each format of [quantised weights](../guides/quantization.md) (`tests/test_quantization.py`), and
[speculation](../guides/speculation.md) with chains of drafts by each method (`tests/test_speculation.py`, `tests/test_eagle.py`,
`tests/test_medusa.py`), and derivatives (`tests/test_training.py`).
More: [models and formats](../guides/models.md), [adapters](../guides/lora.md), [training](../guides/weights.md).

`cases` are the configs that tests compare with transformers, and the values of the parameter of the tests. `error` is the greatest
difference of a logit in these cases: float32 on a CPU, 40 tokens, small random weights whose logits have a deviation of more than 0.5,
against transformers {version}. Tests allow {tolerance}. `pytest -n 0 -m '' tests/test_models.py --write-errors` measures anew.
`refused` are fields of config.json of which some values are refused with an error; for all families these are also encoders, cross
attention and code of the model's own. `experts in` has formats of quantised weights, by the names of the tests. `LoRA` is of linear
layers. `KV cache` has the values of `kv_cache_dtype`; `auto` is the model's dtype."""


def models() -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Yields the two tables, each with header and rows."""
    described, used = [], []
    errors = measured_errors.read()["errors"]
    for architecture, entry in FAMILIES.items():
        what = (load_page(entry).__doc__ or "").strip().splitlines()[0]
        family = load_family({"architectures": [architecture]})
        cases = [case for case in MODELS if config_json(case)["architectures"] == [architecture]]
        if cases:
            family = load_family(config_json(cases[0]))
        configs = [config_json(case) for case in cases] or [OUTSIDE[architecture]]
        families = [load_family(config) for config in configs]
        specs = [
            each.Spec.from_config(config) for each, config in zip(families, configs, strict=True)
        ]
        models = list(zip(families, specs, strict=True))
        error = measured_errors.greatest(errors, architecture)
        described.append((f"`{architecture}`", what, ", ".join(cases), error, _refused(cases)))
        used.append(
            (
                f"`{architecture}`",
                ", ".join(
                    case
                    for case, (config, _) in GGUF_MODELS.items()
                    if config["architectures"] == [architecture]
                ),
                _experts(family, cases) if cases else "",
                _lora(models),
                _drafts([spec.kv for spec in specs]),
                "yes" if _takes(_as_draft_model, specs) else "",
                ", ".join(dtype for dtype in CACHE_DTYPES if _takes(partial(_cache, dtype), specs)),
            )
        )
    yield ("architecture", "what it is", "cases", "error", "refused"), described
    yield (
        (
            "architecture",
            "GGUF",
            "experts in",
            "LoRA",
            "drafts",
            "as a draft model",
            "KV cache",
        ),
        used,
    )


def encoders() -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns the table of encoders, its header and rows."""
    rows = []
    for architecture, entry in ENCODERS.items():
        what = (load_page(entry).__doc__ or "").strip().splitlines()[0]
        use = "scores of pairs" if architecture.endswith(SCORES_PAIRS) else "vectors"
        rows.append((f"`{architecture}`", what, use))
    return ("encoder", "what it is", "gives"), rows


def _refused(cases: list[str]) -> str:
    rows = [
        fields for error, case, _, fields in REFUSED if case in cases and error is UnsupportedError
    ]
    named = [f"`{name}`" for fields in rows for name in fields if name != "architectures"]
    return ", ".join(dict.fromkeys(named))


def _has(models: list[tuple[Any, Any]], kind: type[nnx.Module]) -> bool:
    """Returns whether a model has such a module; models are families with specs."""
    return any(isinstance(module, kind) for model in models for _, module in _modules(*model))


@lru_cache(maxsize=16)  # the columns of an architecture ask one after the other
def _modules(family: Any, spec: Any) -> list[tuple[Any, nnx.Module]]:
    return [
        (path, module)
        for path, module in nnx.iter_modules(make_model(family, spec, "float32", None))
    ]


def _experts(family: Any, cases: list[str]) -> str:
    """Returns the formats whose rule takes an expert's place."""
    schemes: dict[str, Scheme] = {**SCHEMES}
    schemes |= {
        name: METHODS[config["quant_method"]](QuantizationFields(config))
        for name, (config, _) in FORMATS.items()
    }
    if not _has([(family, family.Spec.from_config(config_json(cases[0])))], ExpertLinear):
        return ""
    spec = family.Spec.from_config(config_json(cases[0], **_WIDE))
    experts = [
        (path, module)
        for path, module in _modules(family, spec)
        if isinstance(module, ExpertLinear)
    ]
    if not any(module.spec.modules for _, module in experts):
        schemes = {
            "mxfp4 as of GPT-OSS": METHODS["mxfp4"](QuantizationFields({})),
            **schemes,
        }  # of tensors that have all experts
    taken = [
        name
        for name, scheme in schemes.items()
        if all(scheme.rule(*expert) is not None for expert in experts)
    ]
    return "all formats" if len(taken) == len(schemes) else ", ".join(taken)


def _lora(models: list[tuple[Any, Any]]) -> str:
    """Returns the linear layers that an adapter may change: all, or all but some."""
    others = ["experts"] if _has(models, ExpertLinear) else []
    for family, spec in models:
        targets = lora_targets(family, spec)
        names = [
            part.name
            for _, module in _modules(family, spec)
            if isinstance(module, Linear)
            for part in module.spec.parts
        ]
        others += [
            f"`{name.rsplit('.', 1)[-1]}`"
            for name in names
            if name is not None and name not in targets
        ]
    return f"all but {', '.join(sorted(set(others)))}" if others else "all"


def _drafts(kvs: list[KVSpec]) -> str:
    branching = SpeculativeConfig(method="lookahead")
    count = sum(_takes(lambda kv: check_windows(branching, "", [kv]), [kv]) for kv in kvs)
    return (
        "chains, trees"
        if count == len(kvs)
        else "chains, trees without windows"
        if count
        else "chains"
    )


def _as_draft_model(spec: Any) -> None:
    check_recurrent("", spec.kv, ModelLayout("float32", "auto", 1), [spec.kv])


def _cache(dtype: str, spec: Any) -> None:
    check_recurrent("", spec.kv, ModelLayout("float32", dtype, 1))


def _takes(check: Callable[[Any], None], values: list[Any]) -> bool:
    try:
        for value in values:
            check(value)
    except UnsupportedError:
        return False
    return True
