"""Opens Medusa heads from headers alone, fits them to their model, and loads them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jaxpage.checkpoints.config_file import check_config
from jaxpage.checkpoints.drafters.token_map import read_token_map
from jaxpage.checkpoints.fitting import LoadPlan, fit_stored, rename_tensors
from jaxpage.checkpoints.loading import load_weights
from jaxpage.checkpoints.problems import Problems
from jaxpage.checkpoints.safetensors_files import INDEX, SINGLE, read_tensors
from jaxpage.checkpoints.safetensors_header import TensorInfo
from jaxpage.models.drafters import MedusaHeads, MedusaSpec
from jaxpage.models.parameters import weights_of

logger = logging.getLogger(__name__)

MEDUSA_FILE = "medusa_lm_head.safetensors"
MEDUSA_FILES = ("config.json", MEDUSA_FILE, SINGLE, INDEX)
TOKEN_MAP = "token_map"
PREFIX = "medusa_heads."  # Names of vLLM's format may begin with it.
ACCURACIES = "jaxpage_accuracies"  # a field of config.json that is jaxpage's own: [head][rank]
Accuracies = tuple[tuple[float, ...], ...]
# These say which head and layer a tensor belongs to, by format.
_AUTHORS = re.compile(
    r"(?P<head>\d{1,4})\.(?P<layer>\d{1,4})\.linear\.(weight|bias)|(?P<table>\d{1,4})\.\d{1,4}\.weight"
)
_VLLM = re.compile(
    r"blocks\.(?P<head>\d{1,4})\.layers\.(?P<layer>\d{1,4})\.(weight|bias)|lm_heads\.(?P<table>\d{1,4})\.weight"
)


@dataclass(frozen=True)
class MedusaFiles:
    """Holds heads that fit their model. Only headers and the token map have been read.

    Attributes:
        spec: The spec of the heads.
        plan: The tensors that fill their parameters.
        token_map: The id of each token that the heads know; None for the whole vocabulary.
        accuracies: For each head, how often its best prediction is right, its second, and so on;
            None if config.json does not say so.
    """

    spec: MedusaSpec
    plan: LoadPlan
    token_map: npt.NDArray[np.int32] | None
    accuracies: Accuracies | None

    def num_bytes(self, dtype: str) -> int:
        """Returns the bytes of the heads in a model of this type."""
        return self.plan.num_bytes(dtype) + (0 if self.token_map is None else self.token_map.nbytes)

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens that the heads choose among."""
        return self.spec.table_rows if self.token_map is None else len(self.token_map)


def open_medusa(directory: Path, *, hidden_size: int, vocab_size: int) -> MedusaFiles:
    """Opens heads in the format of Medusa's authors or of vLLM.

    The tensors say how many heads there are, because published configs are wrong.

    Args:
        directory: The directory of the heads.
        hidden_size: The width of the model that they predict for.
        vocab_size: The size of its vocabulary.

    Raises:
        CheckpointError: The heads do not fit; the error lists all that is wrong.
    """
    problems = Problems(directory)
    config = check_config(directory, problems)
    for name, ours in (("hidden_size", hidden_size), ("vocab_size", vocab_size)):
        if config.get(name, ours) != ours:
            problems.add(f"config.json: {name} is {config[name]!r}, but the model's is {ours}")
    tensors = read_tensors(directory, problems, MEDUSA_FILE)
    stored = rename_tensors(tensors, lambda name: name.removeprefix(PREFIX), problems)
    token_map = None
    if TOKEN_MAP in stored:
        token_map = read_token_map(stored.pop(TOKEN_MAP), vocab_size, problems)
    spec = _spec(
        config, stored, token_map, problems, hidden_size=hidden_size, vocab_size=vocab_size
    )
    accuracies = _accuracies(config, spec, problems)
    plan = LoadPlan(directory, "safetensors")
    if spec is not None:
        plan = fit_stored(
            plan, stored, weights_of(MedusaHeads(spec, dtype="float32")), (), problems
        )
    problems.raise_if_any()
    assert spec is not None
    return MedusaFiles(spec, plan, token_map, accuracies)


def load_medusa(
    files: MedusaFiles, dtype: str, put: Callable[[np.ndarray], Any], *, progress: bool = False
) -> dict[str, Any]:
    """Returns the parameters of `models.drafters.medusa.MedusaHeads`, each one `put(array)`.

    The host holds all of them at once.
    """
    heads = load_weights(files.plan, dtype, lambda array: array, progress=progress)
    if files.token_map is not None:
        # The tables are saved in full: only the rows of the tokens that the heads know are taken.
        if files.num_tokens < files.spec.table_rows:
            for part in heads["tables"].values():
                part["table"] = part["table"][files.token_map]
        heads[TOKEN_MAP] = files.token_map
    loaded: dict[str, Any] = jax.tree.map(put, heads)
    return loaded


def _spec(
    config: Mapping[str, Any],
    stored: Mapping[str, TensorInfo],
    token_map: npt.NDArray[np.int32] | None,
    problems: Problems,
    *,
    hidden_size: int,
    vocab_size: int,
) -> MedusaSpec | None:
    """Returns the spec, by the names of the tensors.

    It is None, with the reason among the problems, if they are not those of heads.
    """
    matches = [match for name in stored if (match := _AUTHORS.fullmatch(name))]
    is_authors = bool(matches)
    matches = matches or [match for name in stored if (match := _VLLM.fullmatch(name))]
    heads = {int(match["head"] or match["table"]) for match in matches}
    layers = {int(match["layer"]) for match in matches if match["layer"]}
    if not heads:
        # With no tensors and a problem, the files could not be read, which has been said.
        if stored or not problems:
            problems.add(
                "no tensor has a name of Medusa heads: neither 0.0.linear.weight nor "
                "blocks.0.layers.0.weight"
            )
        return None
    for name in ("medusa_num_heads", "num_heads"):
        if config.get(name, len(heads)) != len(heads):
            logger.warning(
                "config.json: %s is %r, but there are %d heads", name, config[name], len(heads)
            )
    _check_layers(
        config, "medusa_num_layers" if is_authors else "num_hidden_layers", len(layers), problems
    )
    spec = MedusaSpec(
        layout="medusa" if is_authors else "vllm",
        num_heads=len(heads),
        num_layers=len(layers),
        # The layers of Medusa's authors always have a bias; in vLLM's format the config decides.
        bias=is_authors or config.get("medusa_fc_bias") is True,
        one_table=not is_authors and config.get("original_lm_head") is True,
        table_rows=vocab_size,
        hidden_size=hidden_size,
        num_known=None if token_map is None else len(token_map),
    )
    if is_authors and token_map is not None:
        problems.add(f"there is a {TOKEN_MAP}, which heads of this format do not have")
    if not is_authors:
        _check_truncation(config, token_map, vocab_size, problems)
    if token_map is not None and _rows(spec, stored) != vocab_size:
        return replace(spec, table_rows=len(token_map))
    return spec


def _accuracies(
    config: Mapping[str, Any], spec: MedusaSpec | None, problems: Problems
) -> Accuracies | None:
    """Returns the measured values, if config.json has them."""
    rows = config.get(ACCURACIES)
    if rows is None or spec is None:
        return None
    right = isinstance(rows, list) and len(rows) == spec.num_heads and all(map(_are_shares, rows))
    if not right:
        problems.add(
            f"config.json: {ACCURACIES} must be a list of shares that make at most 1 for each of "
            f"{spec.num_heads} heads"
        )
        return None
    return tuple(tuple(map(float, row)) for row in rows)


def _are_shares(row: Any) -> bool:
    """Returns whether these are shares of one whole, which rounding may have exceeded a little."""
    # `isinstance` would take true and false of JSON for numbers.
    numbers = isinstance(row, list) and all(type(share) in (int, float) for share in row)
    return numbers and len(row) > 0 and min(row) >= 0 and sum(row) <= 1.001


def _rows(spec: MedusaSpec, stored: Mapping[str, TensorInfo]) -> int | None:
    """Returns the rows of the first head's table, as it is stored."""
    for name in (spec.table(0), "lm_head"):
        info = stored.get(f"{name}.weight")
        if info is not None and info.shape:
            return info.shape[0]
    return None


def _check_layers(
    config: Mapping[str, Any], name: str, num_layers: int, problems: Problems
) -> None:
    if config.get(name, num_layers) != num_layers:
        problems.add(f"config.json: {name} is {config[name]!r}, but the tensors have {num_layers}")


def _check_truncation(
    config: Mapping[str, Any],
    token_map: npt.NDArray[np.int32] | None,
    vocab_size: int,
    problems: Problems,
) -> None:
    known = vocab_size if token_map is None else len(token_map)
    stated = config.get("truncated_vocab_size")
    if stated is not None and stated != known:
        contradiction = (
            f"there is no {TOKEN_MAP}" if token_map is None else f"{TOKEN_MAP} has {known} tokens"
        )
        problems.add(f"config.json: truncated_vocab_size is {stated!r}, but {contradiction}")
