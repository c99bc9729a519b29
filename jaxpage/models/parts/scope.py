"""Names a module in a checkpoint while it is made."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jax.typing import DTypeLike


@dataclass(frozen=True)
class Scope:
    """Holds the name of a module in the checkpoint, and the type of its parameters.

    `scope / "self_attn"` is the scope of a module inside of it.
    """

    name: str
    dtype: DTypeLike

    def __truediv__(self, module: str) -> Scope:
        """Returns the scope of a module of this one; "" is this one itself."""
        return replace(self, name=".".join(filter(None, (self.name, module))))
