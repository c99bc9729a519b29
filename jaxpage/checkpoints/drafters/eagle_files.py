"""Opens EAGLE heads from headers alone, fits them to their target, and loads them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from jaxpage.checkpoints.config_file import check_config
from jaxpage.checkpoints.drafters.eagle_config import EagleConfig
from jaxpage.checkpoints.drafters.token_map import read_token_map
from jaxpage.checkpoints.fitting import LoadPlan, fit_stored, rename_tensors, same_bytes
from jaxpage.checkpoints.loading import load_weights
from jaxpage.checkpoints.opening import ModelFiles
from jaxpage.checkpoints.problems import Problems
from jaxpage.checkpoints.safetensors_files import INDEX, NUMPY_DTYPES, SINGLE, read_tensors
from jaxpage.checkpoints.safetensors_header import TensorInfo
from jaxpage.errors import CheckpointError
from jaxpage.models import DecoderConfig
from jaxpage.models.drafters import Eagle3Spec, EagleSpec
from jaxpage.models.parameters import weights_of

logger = logging.getLogger(__name__)

EagleMethod = Literal["eagle", "eagle3"]
EAGLE_FILES = ("config.json", SINGLE, INDEX)
TABLES = {"tokens": "embed_tokens.weight", "head": "lm_head.weight"}
TOKEN_MAPS = {"eagle": "token_map", "eagle3": "d2t"}
# The inverse of d2t, as booleans, and the frequencies of a rotation.
_IGNORED = ("t2d", "*rotary_emb.inv_freq")


@dataclass(frozen=True)
class EagleFiles:
    """Holds a head that fits its target.

    Only headers, the token map, and tables that may be the target's have been read.

    Attributes:
        spec: The spec of the head.
        plan: The tensors that fill its parameters.
        token_map: The token id of each row of its head; None without a map.
    """

    spec: EagleSpec
    plan: LoadPlan
    token_map: npt.NDArray[np.int32] | None

    def num_bytes(self, dtype: str) -> int:
        """Returns the bytes of the head in a model of this type."""
        return self.plan.num_bytes(dtype) + (0 if self.token_map is None else self.token_map.nbytes)


def open_eagle(directory: Path, method: EagleMethod, target: ModelFiles) -> EagleFiles:
    """Opens a head in the form of its authors and SpecForge, of vLLM, or of speculators (EAGLE-3).

    The tensors say which biases, norms of heads and tables it has.

    Raises:
        CheckpointError: The head does not fit; the error lists all that is wrong.
    """
    problems = Problems(directory)
    config = check_config(directory, problems)
    stored = _read_tensors(directory, problems)
    map_info = stored.pop(TOKEN_MAPS[method], None)
    spec = None
    if config and (stored or not problems):
        with problems.collect(), EagleConfig(config) as fields:
            _check_method(method, stored)
            spec = _spec(fields, method, stored, map_info, target, problems)
    plan = LoadPlan(directory, "safetensors")
    token_map = None
    if spec is not None:
        plan = fit_stored(plan, stored, weights_of(spec.make("float32")), _IGNORED, problems)
        if map_info is not None:
            token_map = read_token_map(
                map_info, target.spec.vocab_size, problems, differences=method == "eagle3"
            )
    problems.raise_if_any()
    assert spec is not None
    if isinstance(spec, Eagle3Spec):
        logger.info(
            "%s takes hidden states that enter layers %s of %d",
            directory,
            spec.aux_layers,
            target.spec.kv.num_decoder_layers,
        )
    return EagleFiles(spec, plan, token_map)


def load_eagle(
    files: EagleFiles, dtype: str, put: Callable[[np.ndarray], Any], *, progress: bool = False
) -> dict[str, Any]:
    """Returns the parameters as `models.drafters.join` takes them, each one `put(array)`."""
    parameters = dict.fromkeys(TABLES) | load_weights(files.plan, dtype, put, progress=progress)
    return (
        parameters if files.token_map is None else {**parameters, "token_map": put(files.token_map)}
    )


def _read_tensors(directory: Path, problems: Problems) -> dict[str, TensorInfo]:
    """Returns the tensors of a head, each by one name.

    Some formats have a prefix, or `midlayer` for the first layer.
    """

    def plain(name: str) -> str:
        name = name.removeprefix("model.")
        return (
            f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name
        )

    return rename_tensors(read_tensors(directory, problems), plain, problems)


def _check_method(method: EagleMethod, stored: Mapping[str, TensorInfo]) -> None:
    is_eagle3 = "layers.0.hidden_norm.weight" in stored
    if is_eagle3 != (method == "eagle3"):
        has = "have" if is_eagle3 else "lack"
        raise CheckpointError(
            f"its tensors are of method {'eagle3' if is_eagle3 else 'eagle'!r}, not {method!r}: "
            f"they {has} layers.0.hidden_norm.weight"
        )


def _spec(
    config: EagleConfig,
    method: EagleMethod,
    stored: dict[str, TensorInfo],
    map_info: TensorInfo | None,
    target: ModelFiles,
    problems: Problems,
) -> EagleSpec | None:
    """Returns the spec, by the config and the names of the tensors.

    A table that is a copy of the target's is taken out of `stored`.
    """
    decoder = config.decoder(problems)
    if decoder is None:
        return None
    has = {
        part: f"layers.0.self_attn.{part}" in stored
        for part in ("q_proj.bias", "o_proj.bias", "q_norm.weight")
    }
    decoder = replace(decoder, mlp_bias="layers.0.mlp.gate_proj.bias" in stored)
    known = map_info.shape[0] if map_info is not None and map_info.shape else target.spec.vocab_size
    _check_sizes(config, method, decoder, map_info, known, target, problems)
    shapes = {
        "tokens": (target.spec.vocab_size, decoder.hidden_size),
        "head": (known, decoder.hidden_size),
    }
    tables = {
        name: _has_table(name, shape, stored, target, problems) for name, shape in shapes.items()
    }
    spec = EagleSpec(
        decoder=decoder,
        table_rows=known,
        input_bias=has["q_proj.bias"],
        output_bias=has["o_proj.bias"],
        has_head_norms=has["q_norm.weight"],
        token_map=map_info is not None,
        fc_bias="fc.bias" in stored,
        own_tokens=tables["tokens"],
        own_head=tables["head"],
        aux_layers=config.aux_layers(target.spec.kv.num_decoder_layers)
        if method == "eagle3"
        else (),
    )
    if method == "eagle":
        return spec
    return Eagle3Spec(
        **vars(spec),
        target_width=target.spec.hidden_size,
        norm_before_residual=config.norm_before_residual,
        norm_before_fc=config.flag("norm_before_fc"),
        norm_each=config.flag("fc_norm"),
        norm_output=config.flag("norm_output"),
    )


def _check_sizes(
    config: EagleConfig,
    method: EagleMethod,
    decoder: DecoderConfig,
    map_info: TensorInfo | None,
    known: int,
    target: ModelFiles,
    problems: Problems,
) -> None:
    """Adds sizes that differ from the target's; `known` is the number of tokens of the head."""
    vocab_size = target.spec.vocab_size
    width = target.spec.hidden_size
    if decoder.vocab_size != vocab_size:
        problems.add(
            f"config.json: vocab_size is {decoder.vocab_size}, but the model's is {vocab_size}"
        )
    stated = config.field("target_hidden_size") if method == "eagle3" else None
    if (stated or decoder.hidden_size) != width:
        name = "hidden_size" if stated is None else "target_hidden_size"
        problems.add(
            f"config.json: {name} is {stated or decoder.hidden_size}, but the model's width is "
            f"{width}"
        )
    for name in ("draft_vocab_size", "truncated_vocab_size"):
        if config.field(name, known) != known:
            contradiction = (
                f"there is no {TOKEN_MAPS[method]}"
                if map_info is None
                else f"{map_info.name} has {known} tokens"
            )
            problems.add(f"config.json: {name} is {config.field(name)!r}, but {contradiction}")


def _has_table(
    name: str,
    shape: tuple[int, int],
    stored: dict[str, TensorInfo],
    target: ModelFiles,
    problems: Problems,
) -> bool:
    """Returns whether the head has a table of its own.

    A copy of the target's is not one, and is taken out of `stored`.
    """
    table = find_shared_table(name, target)
    own_table = stored.get(TABLES[name])
    if table is None:
        if own_table is None:
            problems.add(
                f"there is no {TABLES[name]}, and the model's, in few bits, cannot take its place: "
                "use a model whose table is not quantised, or another method"
            )
        return own_table is not None
    if own_table is None:
        if table.shape != shape:
            problems.add(
                f"there is no {TABLES[name]}, and the model's of shape {table.shape} cannot take "
                f"the place of one of {shape}"
            )
        return False
    readable = (
        target.plan.layout == "safetensors" and own_table.dtype in NUMPY_DTYPES and not problems
    )
    if readable and own_table.shape == shape and same_bytes(own_table, table):
        del stored[TABLES[name]]
        return False
    return True


def find_shared_table(name: str, target: ModelFiles) -> TensorInfo | None:
    """Returns the model's tensor that a drafter without the table shares; None if it is quantised.

    Args:
        name: A key of `TABLES`. A model without a head has its token table in its place.
        target: The model.
    """
    of_table = {
        place: [filled for filled in target.plan.parameters if filled.weight.path[0] == place]
        for place in (name, "tokens")
    }
    filled = of_table[name] or of_table["tokens"]
    return next((each.pieces[0][1] for each in filled if each.weight.path[-1] == "table"), None)
