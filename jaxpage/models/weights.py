"""The table that says under which name, in which shape, a checkpoint holds each parameter; written by the families."""

from __future__ import annotations

from dataclasses import dataclass

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Weight:
    """One parameter and its tensor in a Hugging Face checkpoint.

    path: keys of the parameter in the nested dict of `models.base.abstract_model`; list indices are integers.
    shape: in the checkpoint. transpose: the parameter is its transpose (both torch and we keep `[out, in]`; GPT-2 does not).
    aliases: other names for the same tensor. If a checkpoint has several of them, they must hold the same numbers.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    transpose: bool = False
    aliases: tuple[str, ...] = ()


class WeightTable(list[Weight]):
    """Collects the table of a family; each name is also accepted without `prefix` (saved from the headless model)."""

    def __init__(self, prefix: str):
        super().__init__()
        self.prefix = prefix

    def add(self, path: Path, name: str, *shape: int, transpose: bool = False, aliases: tuple[str, ...] = ()) -> None:
        if name.startswith(self.prefix):
            aliases = (name.removeprefix(self.prefix), *aliases)
        self.append(Weight(path, name, shape, transpose, aliases))

    def add_linear(self, path: Path, name: str, num_in: int, num_out: int, *, bias: bool) -> None:
        """A torch `Linear`."""
        self.add((*path, "kernel"), f"{name}.weight", num_out, num_in)
        if bias:
            self.add((*path, "bias"), f"{name}.bias", num_out)

    def add_conv1d(self, path: Path, name: str, num_in: int, num_out: int) -> None:
        """A transformers `Conv1D`: a linear layer stored `[in, out]`."""
        self.add((*path, "kernel"), f"{name}.weight", num_in, num_out, transpose=True)
        self.add((*path, "bias"), f"{name}.bias", num_out)

    def add_layer_norm(self, path: Path, name: str, width: int, *, affine: bool = True) -> None:
        if affine:
            self.add((*path, "scale"), f"{name}.weight", width)
            self.add((*path, "bias"), f"{name}.bias", width)

    def add_embeddings(self, name: str, vocab_size: int, width: int, *, tied: bool) -> None:
        """The token table and the head. When they are tied, a checkpoint may hold either name, or both."""
        head = "lm_head.weight"
        self.add(("tokens", "table"), name, vocab_size, width, aliases=(head,) if tied else ())
        if not tied:
            self.add(("head", "table"), head, vocab_size, width)
