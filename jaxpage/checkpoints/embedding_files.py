"""Reads the files that sentence-transformers puts next to a model that embeds texts.

`modules.json` lists what a text goes through. `config_sentence_transformers.json` has the texts
that come before queries and documents, and how vectors are compared:

    Transformer ─▶ Pooling ─▶ Dense ─▶ Normalize        1_Pooling/config.json
    (the model)    [T, D] to [D]                        2_Dense/config.json, model.safetensors

Without `modules.json` a file `1_Pooling/config.json` is read alone, and without both a vector is
the state of the last token, scaled to length 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxpage.checkpoints.files import file_in, has_file, parse_list, read_object
from jaxpage.checkpoints.problems import Problems, quote
from jaxpage.checkpoints.safetensors_files import SINGLE, map_array, read_tensors
from jaxpage.errors import CheckpointError

MODULES_FILE = "modules.json"
POOLING_FILE = "1_Pooling/config.json"
PROMPTS_FILE = "config_sentence_transformers.json"
TEXT_FILE = "sentence_bert_config.json"
# Globs over all files of an embedding model that are not those of the model itself.
EMBEDDING_FILES = (
    *(MODULES_FILE, PROMPTS_FILE, TEXT_FILE, POOLING_FILE),
    *("*_Pooling/config.json", "*_Normalize/config.json"),
    *("*_Dense/config.json", f"*_Dense/{SINGLE}"),
)
MAX_MODULES = 64
# Older files have a field for each way to pool; several that are true are put in a row, as here.
_OLDER_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
POOLING_MODES = tuple(_OLDER_MODES.values())
_LIBRARY = "sentence_transformers."
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
SIMILARITIES: tuple[Similarity, ...] = ("cosine", "dot", "euclidean", "manhattan")
Vector = npt.NDArray[np.float32]


def _gelu(x: np.ndarray) -> np.ndarray:
    # NumPy has no error function.
    return 0.5 * x * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2)))


# The activation functions of `Dense`, by the names of their classes in torch.nn.
ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
    # exp(-x) would overflow for x far below 0, and `logaddexp` does not.
    "Sigmoid": lambda x: np.exp(-np.logaddexp(0, -x)),
    "SiLU": lambda x: x * np.exp(-np.logaddexp(0, -x)),
    "GELU": _gelu,
}


class Normalize(NamedTuple):
    """Scales a vector to length 1."""

    def __call__(self, vector: np.ndarray) -> np.ndarray:
        """Returns the scaled vector; a vector of zeros stays as it is."""
        # The least divisor is that of torch.nn.functional.normalize.
        return vector / max(float(np.linalg.norm(vector)), 1e-12)


class Dense(NamedTuple):
    """Multiplies a vector by a weight.

    Attributes:
        weight: The weight [out, in].
        bias: The bias [out]; zeros if there is none.
        activation: The name of a function of `ACTIVATIONS`.
        residual: What is added to the result: a weight [out, in] times the input, the input itself
            for 1, nothing for None.
    """

    weight: np.ndarray
    bias: np.ndarray
    activation: str = "Tanh"
    residual: np.ndarray | float | None = None

    def __call__(self, vector: np.ndarray) -> np.ndarray:
        """Returns the product after the activation function.

        Raises:
            CheckpointError: The weight is for vectors of another width.
        """
        self.check_width(vector.size)
        projected = self.weight.astype(np.float64) @ vector + self.bias
        activated = ACTIVATIONS[self.activation](projected)
        if self.residual is None:
            return activated
        return activated + (
            self.residual.astype(np.float64) @ vector
            if isinstance(self.residual, np.ndarray)
            else vector
        )

    def check_width(self, width: int) -> None:
        """Raises CheckpointError if the weight is for vectors of another width."""
        if width != self.weight.shape[1]:
            raise CheckpointError(
                f"a Dense module of {MODULES_FILE} takes vectors of {self.weight.shape[1]} "
                "numbers, "
                f"and gets {width}"
            )


@dataclass(frozen=True)
class EmbeddingFiles:
    """Says how a model embeds.

    Attributes:
        modes: The ways in which the states of tokens become one vector; of several, all in a row.
        include_prompt: False leaves the tokens of the text before a query or a document out.
        layers: What the vector goes through after that.
        prompts: The texts before others, by name.
        default_prompt_name: The prompt of a text that is neither query nor document, or None.
        similarity: How vectors are compared.
        is_stated: True if the model has such files.
        refusal: What of them is not supported; empty if all is.
        max_tokens: The tokens of the longest text, if the files say so.
        pair_activation: The function of `ACTIVATIONS` that makes a score of the number that a
            cross-encoder gives; None for a model that embeds.
    """

    modes: tuple[str, ...] = ("lasttoken",)
    include_prompt: bool = True
    layers: tuple[Dense | Normalize, ...] = (Normalize(),)
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    similarity: Similarity = "cosine"
    is_stated: bool = False
    refusal: str = ""
    max_tokens: int | None = None
    pair_activation: str | None = None

    def of_encoder(self, config: Mapping[str, Any], *, scores_pairs: bool) -> EmbeddingFiles:
        """Returns what the files say of an encoder, where they may say less.

        An encoder without files embeds by the mean of all tokens, as in sentence-transformers.

        Args:
            config: The content of config.json.
            scores_pairs: True if the model has a head that scores pairs of texts.
        """
        if scores_pairs:
            refusal = (
                "this model scores pairs of texts (LLM.rerank, POST /v1/rerank) and has no vectors"
            )
            return replace(self, refusal=refusal, pair_activation=_read_pair_activation(config))
        return self if self.is_stated else replace(self, modes=("mean",), is_stated=True)

    def pair_score(self, number: float) -> float:
        """Returns the score of a pair, given the number that the head of a cross-encoder made."""
        assert self.pair_activation is not None, "only a cross-encoder has scores of pairs"
        return float(ACTIVATIONS[self.pair_activation](np.array(number)))

    def check(self) -> None:
        """Raises CheckpointError if something in the files is not supported."""
        if self.refusal:
            raise CheckpointError(self.refusal)

    @property
    def query_prompt(self) -> str:
        """Returns the text before a query."""
        return self.prompts.get("query", "")

    @property
    def document_prompt(self) -> str:
        """Returns the text before a document."""
        names = [name for name in _DOCUMENT_PROMPTS if name in self.prompts]
        return self.prompts[names[0]] if names else ""

    @property
    def default_prompt(self) -> str:
        """Returns the text before a text that is neither query nor document."""
        return self.prompts.get(self.default_prompt_name or "", "")

    def width(self, width: int) -> int:
        """Returns the width of the vectors that `finish` makes of those of this width.

        Raises:
            CheckpointError: A weight does not fit.
        """
        for layer in self.layers:
            if isinstance(layer, Dense):
                layer.check_width(width)
                width = layer.bias.size
        return width

    def finish(
        self, vector: Vector, normalize: bool | None = None, dimensions: int | None = None
    ) -> Vector:
        """Returns the vector of a text, given that of its pooled tokens.

        Args:
            vector: The pooled vector [D].
            normalize: Whether the result has length 1; None for what the files say.
            dimensions: The number of dimensions that are kept, the first; None for all.

        Raises:
            CheckpointError: A weight does not fit the vector.
            ValueError: The vector has fewer dimensions.
        """
        layers = list(self.layers)
        while normalize is False and layers and isinstance(layers[-1], Normalize):
            layers.pop()
        is_unit = bool(layers) and isinstance(layers[-1], Normalize)
        finished: np.ndarray = vector.astype(np.float64)
        for layer in layers:
            finished = layer(finished)
        if dimensions is not None:
            if dimensions > finished.size:
                raise ValueError(
                    f"dimensions={dimensions} is more than the {finished.size} of this model's "
                    "vectors"
                )
            finished = finished[:dimensions]
        if normalize or (is_unit and dimensions is not None):
            finished = Normalize()(finished)
        return finished.astype(np.float32)


def read_embedding_files(directory: Path) -> EmbeddingFiles:
    """Returns what the files say of how a model embeds.

    What is not supported is in `refusal`: it concerns embeddings alone, so that a model generates
    text all the same.
    """
    try:
        return _read(directory)
    except CheckpointError as error:
        return EmbeddingFiles(is_stated=True, refusal=str(error))


def _read(directory: Path) -> EmbeddingFiles:
    has_modules = directory.is_dir() and has_file(directory, MODULES_FILE)
    if not has_modules and not (directory.is_dir() and has_file(directory, POOLING_FILE)):
        return EmbeddingFiles()
    if has_modules:
        pooling, layers = _read_modules(directory)
    else:
        pooling, layers = POOLING_FILE, (Normalize(),)
    texts = read_object(directory, TEXT_FILE) if has_file(directory, TEXT_FILE) else {}
    if texts.get("do_lower_case"):
        raise CheckpointError(f"{TEXT_FILE}: do_lower_case = true is not supported")
    max_tokens = texts.get("max_seq_length")
    if not isinstance(max_tokens, int | None) or (max_tokens is not None and max_tokens < 1):
        raise CheckpointError(f"{TEXT_FILE}: max_seq_length must be a number of tokens or null")
    config = read_object(directory, pooling)
    include_prompt = config.get("include_prompt", True)
    if not isinstance(include_prompt, bool):
        raise CheckpointError(f"{pooling}: include_prompt must be true or false")
    modes = _read_modes(config, pooling)
    return EmbeddingFiles(
        modes,
        include_prompt,
        layers,
        is_stated=True,
        max_tokens=max_tokens,
        **_read_prompts(directory),
    )


def _read_pair_activation(config: Mapping[str, Any]) -> str:
    """Returns the function of the scores of a cross-encoder; a sigmoid unless config.json says it.

    Raises:
        CheckpointError: The function is not known.
    """
    newer = config.get("sentence_transformers")
    stated = newer.get("activation_fn") if isinstance(newer, dict) else None
    stated = stated or config.get("sbert_ce_default_activation_function")
    activation = "Sigmoid" if stated is None else str(stated).rpartition(".")[2]
    if activation not in ACTIVATIONS or (stated and not str(stated).startswith("torch.")):
        raise CheckpointError(
            f"config.json: the activation function {quote(stated)} of scores is not one of "
            f"{_list_names(ACTIVATIONS)} of torch.nn"
        )
    return activation


def _read_modules(directory: Path) -> tuple[str, tuple[Dense | Normalize, ...]]:
    """Returns the config file of the pooling, and what follows it."""
    modules = parse_list(file_in(directory, MODULES_FILE), MODULES_FILE)
    if len(modules) > MAX_MODULES:
        raise CheckpointError(f"{MODULES_FILE} has more than {MAX_MODULES} modules")
    pooling: str | None = None
    layers: list[Dense | Normalize] = []
    for index, module in enumerate(modules):
        kind, path = _kind_and_path(module)
        if index == 0:
            if kind != "Transformer" or path:
                raise CheckpointError(
                    f"{MODULES_FILE}: the first module must be the Transformer in the directory "
                    f"itself, not {kind} in {quote(path)}"
                )
        elif kind == "Pooling" and pooling is None:
            pooling = f"{path}/config.json"
        elif pooling is not None and kind == "Dense":
            layers.append(_read_dense(directory, path))
        elif pooling is not None and kind == "Normalize":
            layers.append(Normalize())
        elif kind != "Dropout":  # It changes training alone.
            raise CheckpointError(
                f"{MODULES_FILE}: module {index} is {kind}, and supported are a Transformer, one "
                "Pooling, and after it Dense, Dropout and Normalize"
            )
    if pooling is None:
        raise CheckpointError(f"{MODULES_FILE} has no Pooling")
    return pooling, tuple(layers)


def _kind_and_path(module: Any) -> tuple[str, str]:
    """Returns the path of a module, and its class, which has its package if it is another one."""
    kind = module.get("type") if isinstance(module, dict) else None
    path = module.get("path", "") if isinstance(module, dict) else None
    if not isinstance(kind, str) or not isinstance(path, str):
        raise CheckpointError(f"{MODULES_FILE}: a module must have type and path as strings")
    return kind.rpartition(".")[2] if kind.startswith(_LIBRARY) else quote(kind), path.rstrip("/")


def _read_modes(config: Mapping[str, Any], place: str) -> tuple[str, ...]:
    """Returns the ways of pooling."""
    older = [name for name in config if name.startswith("pooling_mode_")]
    if unknown := [name for name in older if config[name] and name not in _OLDER_MODES]:
        raise CheckpointError(
            f"{place}: {quote(unknown[0])} is not one of {_list_names(_OLDER_MODES)}"
        )
    if not all(isinstance(config[name], bool | None) for name in older):
        raise CheckpointError(f"{place}: {older[0]} and the like must be true or false")
    stated = config.get("pooling_mode")
    if stated is None:
        stated = [mode for name, mode in _OLDER_MODES.items() if config.get(name)] or ["mean"]
    modes = [stated] if isinstance(stated, str) else stated
    if not isinstance(modes, list) or not modes or len(modes) > len(POOLING_MODES):
        raise CheckpointError(f"{place}: pooling_mode must be a name or a list of names")
    if wrong := [mode for mode in modes if mode not in POOLING_MODES]:
        raise CheckpointError(
            f"{place}: pooling_mode = {quote(wrong[0])} is not one of {_list_names(POOLING_MODES)}"
        )
    return tuple(modes)


def _list_names(names: Any) -> str:
    return ", ".join(names)


def _read_dense(directory: Path, path: str) -> Dense:
    place = f"{path}/config.json"
    config = read_object(directory, place)
    for name in ("module_input_name", "module_output_name"):
        if config.get(name) not in (None, "sentence_embedding"):
            raise CheckpointError(f"{place}: {name} = {quote(config[name])} is not supported")
    stated = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    activation = str(stated).rpartition(".")[2]
    if not str(stated).startswith("torch.") or activation not in ACTIVATIONS:
        raise CheckpointError(
            f"{place}: activation_function = {quote(stated)} is not one of "
            f"{_list_names(ACTIVATIONS)} "
            "of torch.nn"
        )
    if not has_file(directory, f"{path}/{SINGLE}"):
        raise CheckpointError(f"{path} has no {SINGLE}, and pickled weights are not read")
    problems = Problems(directory)
    headers = read_tensors(directory, problems, f"{path}/{SINGLE}")
    problems.raise_if_any()
    tensors = {name: np.array(map_array(info), np.float32) for name, info in headers.items()}
    shape = config.get("out_features"), config.get("in_features")
    weight = tensors.get("linear.weight")
    if weight is None or weight.shape != shape:
        raise CheckpointError(f"{path}/{SINGLE}: linear.weight must have the shape {shape}")
    bias = tensors.get("linear.bias") if config.get("bias", True) else np.zeros(len(weight))
    if bias is None or bias.shape != weight.shape[:1]:
        raise CheckpointError(f"{path}/{SINGLE}: linear.bias must have the shape {shape[:1]}")
    residual: np.ndarray | float | None = None
    if config.get("use_residual"):
        # Between equal widths the library adds the input itself and has no weight for it.
        residual = tensors.get("residual.weight", 1.0)
        if np.shape(residual) != (() if shape[0] == shape[1] else shape):
            raise CheckpointError(f"{path}/{SINGLE}: residual.weight must have the shape {shape}")
    return Dense(weight, bias, activation, residual)


def _read_prompts(directory: Path) -> dict[str, Any]:
    """Returns the fields of `EmbeddingFiles` that PROMPTS_FILE has."""
    if not has_file(directory, PROMPTS_FILE):
        return {}
    config = read_object(directory, PROMPTS_FILE)
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(
        isinstance(text, str | None) for text in prompts.values()
    ):
        raise CheckpointError(f"{PROMPTS_FILE}: prompts must be an object of strings")
    prompts = {name: text or "" for name, text in prompts.items()}
    default = config.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise CheckpointError(
            f"{PROMPTS_FILE}: default_prompt_name = {quote(default)} is not one of the prompts "
            f"{_list_names(map(quote, prompts))}"
        )
    similarity = config.get("similarity_fn_name") or "cosine"
    if similarity not in SIMILARITIES:
        raise CheckpointError(
            f"{PROMPTS_FILE}: similarity_fn_name = {quote(similarity)} is not one of "
            f"{_list_names(SIMILARITIES)}"
        )
    return {"prompts": prompts, "default_prompt_name": default, "similarity": similarity}
