"""Chooses how a kernel cuts its work: a checked config, a choice for each shape, and measurements.

The measurements on a kind of GPU are the tiles of each kernel set, and the fastest set.

A choice depends only on the fields of `Shape`, and never on how many rows or blocks a call has. So
a token's sums have the same order in every bucket of one kind of step, whoever its neighbours are.
There is one exception: if a row of several query tokens has more context than `max_splits` splits
of `split_context` positions, or a window, its tiles say where splits end.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pallas_kernels.arguments import Arguments
from pallas_kernels.compat import target_device

# There is a file for each kind of GPU, which tools/bench_kernels.py --tune writes.
TUNED = Path(__file__).parent / "tuned"
_FASTEST = "fastest set"  # the key of the fastest sets in a file, next to those of the sets' tiles


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Says how a kernel cuts its work.

    Attributes:
        query_rows: The rows of a tile's matrix products: query tokens times the query heads of one
            key/value head.
        context: The positions of a turn of the loop over the context.
        max_splits: The most programs that share the context of one tile. Their results are reduced
            in float32; 1 needs no reduction.
        split_context: The positions of a split at least: a shorter context has fewer splits.
        num_warps: The warps of a program.
        num_stages: The turns of the loop whose loads are in flight.

    Raises:
        ValueError: No kernel could take these tiles; the message names the field.
        TypeError: A field is no int.
    """

    query_rows: int
    context: int
    max_splits: int
    split_context: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            # `isinstance` would take a bool for an int.
            if type(value) is not int:
                raise TypeError(f"{name} must be an int, not {value!r}")
        for name, low, high in (
            ("query_rows", 16, 256),
            ("context", 16, 256),
            ("num_warps", 1, 16),
        ):
            value = getattr(self, name)
            if not low <= value <= high or value & (value - 1):
                raise ValueError(f"{name} must be a power of two from {low} to {high}, not {value}")
        for name, low, high in (("max_splits", 1, 64), ("num_stages", 1, 8)):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} must be from {low} to {high}, not {getattr(self, name)}")
        if self.split_context < self.context or self.split_context % self.context:
            raise ValueError(
                f"split_context must be a multiple of context, {self.context}, not "
                f"{self.split_context}"
            )

    def query_tokens(self, group: int) -> int:
        """Returns Q, the query tokens of a tile if `group` query heads share a key/value head."""
        return max(1, self.query_rows // group)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Holds the properties of a call that a choice of tiles depends on."""

    kind: str  # "decode": rows of one token; "verify": of a few; "chunk": of any number
    group: int  # G
    head_dim: int  # H
    block_size: int  # S
    dtype: str
    page_dtype: str

    def __str__(self) -> str:
        return (
            f"{self.kind} g{self.group} h{self.head_dim} s{self.block_size} {self.dtype} "
            f"{self.page_dtype}"
        )


VERIFY_LEN = 64  # with more query tokens in a row, a call is a chunk


def kind_of(max_query_len: int) -> str:
    """Returns the kind of a call by its longest row."""
    return "decode" if max_query_len == 1 else "verify" if max_query_len <= VERIFY_LEN else "chunk"


def shape_of(arguments: Arguments) -> Shape:
    """Returns the shape of a call."""
    return Shape(
        kind=kind_of(arguments.max_query_len),
        group=arguments.group,
        head_dim=arguments.q_TNH.shape[2],
        block_size=arguments.k_pages.shape[1],
        dtype=arguments.q_TNH.dtype.name,
        page_dtype=arguments.k_pages.dtype.name,
    )


def find_tuned(backend: str, shape: Shape) -> Tiles | None:
    """Returns the tiles that were measured to be best on this kind of GPU, if any were."""
    device = target_device()
    matching = (
        _table(device.device_kind).get(backend, {}).get(str(shape))
        if device.platform == "gpu"
        else None
    )
    return None if matching is None else Tiles(**matching)


def find_measured_set(shape: Shape) -> str | None:
    """Returns the kernel set that was measured to be fastest on this kind of GPU, if any."""
    device = target_device()
    return (
        _table(device.device_kind).get(_FASTEST, {}).get(str(shape))
        if device.platform == "gpu"
        else None
    )


def write_tuned(
    device_kind: str,
    table: dict[str, dict[str, Tiles]],
    directory: Path = TUNED,
    *,
    fastest: dict[str, str] | None = None,
) -> Path:
    """Writes measurements to the file of a kind of GPU.

    Args:
        device_kind: The kind of GPU.
        table: The tiles by kernel set and `str(shape)`.
        directory: The directory of the files.
        fastest: The fastest kernel set by `str(shape)`; these are added to those in the file.
    """
    directory.mkdir(exist_ok=True)
    path = _path(device_kind, directory)
    plain: dict[str, dict[str, Any]] = {
        backend: {key: asdict(tiles) for key, tiles in each.items()}
        for backend, each in table.items()
    }
    if sets := read_fastest(device_kind, directory) | (fastest or {}):
        plain[_FASTEST] = sets
    path.write_text(json.dumps(plain, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    _table.cache_clear()
    return path


def read_tuned(device_kind: str, directory: Path = TUNED) -> dict[str, dict[str, Tiles]]:
    """Returns the tiles that `write_tuned` wrote; an empty dict if nothing was written."""
    table = _table(device_kind, directory)
    sets = {backend: each for backend, each in table.items() if backend != _FASTEST}
    return {
        backend: {key: Tiles(**tiles) for key, tiles in each.items()}
        for backend, each in sets.items()
    }


def read_fastest(device_kind: str, directory: Path = TUNED) -> dict[str, str]:
    """Returns the fastest kernel set for each `str(shape)`, or nothing if none were compared."""
    return dict(_table(device_kind, directory).get(_FASTEST, {}))


@functools.cache
def _table(device_kind: str, directory: Path = TUNED) -> dict[str, dict[str, Any]]:
    path = _path(device_kind, directory)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _path(device_kind: str, directory: Path) -> Path:
    return directory / (device_kind.lower().replace(" ", "-").replace("/", "-") + ".json")
