"""Hugging Face models with random weights, those of `model_configs`, made by transformers: the
oracle of tests.

The weights are scaled so that attention is far from uniform, logits are well spread and greedy text
is not one token.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from tests.support.model_configs import MODELS, config_json

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")

__all__ = [
    "MODELS",
    "config_json",
    "make_model",
    "randomise",
    "save_model",
    "stated_time_steps",
    "without_timm",
]

_SEED = 11  # a seed with which greedy text varies in every model


@contextlib.contextmanager
def without_timm() -> Iterator[None]:
    """Leaves the models for images and sound out of Gemma 3n: they need timm, and a text none of
    them.
    """
    from_config = transformers.AutoModel.from_config

    def text_alone(part: Any, **options: Any) -> Any:
        is_left_out = part.model_type in ("gemma3n_vision", "gemma3n_audio")
        return torch.nn.Identity() if is_left_out else from_config(part, **options)

    with mock.patch.object(transformers.AutoModel, "from_config", text_alone):
        yield


def without_images() -> None:
    """Lets Llama 4 for images compute a text: its class in transformers 5.24 reads what outputs of
    texts lack.
    """
    outputs = transformers.modeling_outputs.MoeCausalLMOutputWithPast
    if not hasattr(outputs, "image_outputs"):
        outputs.image_outputs = None


def stated_time_steps(model: Any) -> Any:
    """Gives layers of Mamba 2 the limits that config.json states, and returns the model.

    The classes of Nemotron-H and Zamba 2 take `time_step_min` for the least one. The models' own
    code does not, nor do mlx-lm and vLLM (tests/test_time_steps.py compares with the definition).
    """
    limit = getattr(model.config.get_text_config(), "time_step_limit", None) or (0.0, math.inf)
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = tuple(limit)
    return model


def make_model(name: str, *, seed: int = _SEED, **overrides: Any) -> Any:
    """Makes the named model of transformers in float32, ready for inference.

    overrides: fields of config.json.
    """
    config = config_json(name, **overrides)
    model_class = getattr(transformers, config.pop("architectures")[0])
    config_class = model_class.config_class
    config.pop("model_type")
    without_images()
    with without_timm():
        model = stated_time_steps(model_class(config_class(**config)).eval())
    randomise(model, torch.Generator().manual_seed(seed))
    return model


def save_model(
    name: str,
    directory: Path,
    *,
    seed: int = _SEED,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Any:
    """Writes the named model to `directory`, and returns it: config, safetensors and a tokenizer.

    config.json is what transformers saves; the tokenizer knows the words "t0", "t1", ... for the
    ids of the vocabulary.
    """
    model = make_model(name, seed=seed, **overrides)
    if dtype != torch.float32:  # Not for nothing: a cast of Llama 4's complex numbers is warned of.
        model = model.to(dtype)
    model.save_pretrained(directory)
    vocabulary = {f"t{index}": index for index in range(model.config.get_text_config().vocab_size)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    return model


@torch.no_grad()
def randomise(
    model: torch.nn.Module, generator: torch.Generator, *, embedding: float = 0.2
) -> None:
    """Draws all weights anew; embedding: the deviation of the tables' values."""

    def draw(parameter: torch.nn.Parameter, deviation: float, mean: float = 0.0) -> None:
        parameter.normal_(mean, deviation, generator=generator)

    for module in model.modules():
        bias = getattr(module, "bias", None)
        if isinstance(bias, torch.nn.Parameter):
            draw(bias, 0.2)
        for experts in (getattr(module, name, None) for name in ("gate_up_proj", "down_proj")):
            if isinstance(experts, torch.nn.Parameter):
                draw(experts, 1.4 / math.sqrt(experts.shape[2]))
        for extra in (
            getattr(module, name, None) for name in ("gate_up_proj_bias", "down_proj_bias", "sinks")
        ):
            if isinstance(extra, torch.nn.Parameter):
                draw(extra, 0.5)
        for number, mean in (
            *(("A_log", -1.0), ("dt_bias", 0.0), ("D", 1.0)),
            *(("alpha_p", 0.5), ("alpha_n", 0.0)),
        ):
            if isinstance(parameter := getattr(module, number, None), torch.nn.Parameter):
                draw(parameter, 1.0, mean)
        for factor in ("layer_scalar", "per_expert_scale", "scale", "correct_output_scale"):
            if isinstance(tensor := getattr(module, factor, None), torch.Tensor):
                tensor.normal_(1.0, 0.2, generator=generator)
        for correction in ("e_score_correction_bias", "expert_bias"):
            if isinstance(tensor := getattr(module, correction, None), torch.Tensor):
                tensor.normal_(0.0, 0.3, generator=generator)
        if isinstance(module, torch.nn.Embedding):
            draw(module.weight, embedding)
        elif isinstance(module, torch.nn.Linear | transformers.Conv1D):
            num_in = module.weight.shape[0 if isinstance(module, transformers.Conv1D) else 1]
            draw(module.weight, 1.4 / math.sqrt(num_in))
        elif isinstance(getattr(module, "weight", None), torch.nn.Parameter):
            router = module.weight.ndim == 2
            draw(
                module.weight,
                1.4 / math.sqrt(module.weight.shape[1]) if router else 0.3,
                mean=1.0 - router,
            )  # or a norm
    for name, parameter in model.named_parameters():
        # Zamba 2's add to other products, and as much again would amplify the last bits of numbers.
        if "_adapter_list" in name or name.endswith(".linear.weight"):
            parameter.mul_(0.4)
    if model.config.tie_word_embeddings:  # then the head, drawn as a Linear, is the token table
        draw(model.get_input_embeddings().weight, embedding)
