"""Runs batches on the device.

It owns the parameters, the pages and the host's pages, and never sees a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from jaxpage.device import Executables, Packings, to_host, unpack_drawn
from jaxpage.device.pages import HostPages, KVPages
from jaxpage.device.vision import vision_key, without_vision
from jaxpage.engine.batch_builder import Batch, Move
from jaxpage.models.parameters import Path
from jaxpage.models.sharding import ShardedWeight, entry_at
from jaxpage.step.plan import StepResult


class WakingWeights(NamedTuple):
    """Holds the weights with which one sleep ends, on the device.

    Attributes:
        parameters: The weights.
        num_sleeps: The number of the sleep for which they were read. A later one does not end with
            them, since the weights may have been replaced in between.
    """

    parameters: Any
    num_sleeps: int


class Runner:
    """Runs steps from the table of executables.

    The pages are donated to each step, and replaced by those that it returns.

    Attributes:
        executables: The table of executables.
        is_asleep: True while the device has neither weights nor pages.
        num_sleeps: How many times it has fallen asleep.
        host_parameters: The weights in host memory, while the runner sleeps with them; else None.
    """

    def __init__(
        self,
        parameters: Any,
        new_pages: Callable[[], KVPages],
        executables: Executables,
        host_pages: Sequence[HostPages],
        adapters: Sequence[ShardedWeight] = (),
        packed: Packings | None = None,
    ):
        """Makes the pages.

        Args:
            parameters: The weights, as a nested dict of arrays.
            new_pages: Makes empty pages.
            executables: The table of executables.
            host_pages: The host's pages of each cache group.
            adapters: The LoRA weights A and B of every layer that takes adapters.
            packed: The weights that are in panels.
        """
        self.executables = executables
        self.is_asleep = False
        self.num_sleeps = 0
        self.host_parameters: Any | None = None
        self._parameters = parameters
        # Arrays that were lent are never deleted: their memory is free when nobody refers to them.
        self._is_shared = False
        self.packed = packed or {}
        self._new_pages = new_pages
        self._pages = new_pages()
        self._host_pages = host_pages
        self._adapters = {sharded.weight.path: sharded for sharded in adapters}

    def run(self, batch: Batch) -> StepResult:
        """Runs a batch, its moves of blocks first, and returns what the step drew."""
        # The order is that of `StepPlan`: what swaps out frees blocks that the same step fills.
        self.swap_out(batch.swap_out)
        self.swap_in(batch.swap_in)
        for group, pairs in batch.copies:
            self._pages = self.executables.copy(self._pages, group, pairs)
        step = self.executables.step(batch.bucket, batch.draft_depth)
        output, self._pages = step(
            self._of_steps,
            self._pages,
            batch.packed,
            batch.processor_inputs,
            *batch.vectors,
        )
        result = StepResult(**unpack_drawn(np.asarray(output.drawn), batch.num_draws)._asdict())
        if batch.num_scored:
            scored = unpack_drawn(np.asarray(output.scored), batch.num_scored)
            result = replace(result, scored=StepResult(**scored._asdict()))
        if batch.returns_masks:
            result = replace(result, masks=np.asarray(output.masks)[: batch.num_draws])
        if batch.returns_routes:
            result = replace(result, routes=np.asarray(output.routes))
        if batch.returns_hidden:
            result = replace(result, hidden=np.asarray(output.hidden)[: batch.num_draws])
        if output.paths.size:
            result = replace(result, paths=np.asarray(output.paths)[: batch.num_rows])
        if output.draft_candidates is not None:
            result = replace(result, draft_candidates=np.asarray(output.draft_candidates))
        return result

    @property
    def _of_steps(self) -> Any:
        """Returns the weights that steps take: without those of an encoder of pictures."""
        return without_vision(self._parameters)

    def encode(self, size: int, inputs: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """Returns the rows [R, 1 + n, D] of one call of the encoder of pictures.

        Args:
            size: The number of patches of the executable.
            inputs: The arrays, padded to this size.
        """
        encode = self.executables.executable(vision_key(size))
        return np.asarray(encode(self._parameters["vision"], inputs))

    def swap_out(self, moves: tuple[Move, ...]) -> None:
        """Copies blocks to the host, by (block, host block) pairs.

        On return the host has the contents, so that the blocks may be overwritten.
        """
        for group, pairs in moves:
            contents = self.executables.gather(self._pages, group, pairs[:, 0])
            self._host_pages[group].store(pairs[:, 1], np.asarray(contents))

    def swap_in(self, moves: tuple[Move, ...]) -> None:
        """Copies blocks from the host, by (host block, block) pairs.

        It does not wait: the next reader of the pages waits on the device.
        """
        for group, pairs in moves:
            contents = self._host_pages[group].load(pairs[:, 0])
            self._pages = self.executables.scatter(self._pages, group, pairs[:, 1], contents)

    def read_blocks(self, blocks: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
        """Returns the contents of blocks of the first cache group, each as an array of bytes."""
        size = self.executables.num_swapped
        contents = list[npt.NDArray[np.uint8]]()
        for start in range(0, len(blocks), size):
            padded = np.zeros(size, np.int32)  # padded with the null block
            part = blocks[start : start + size]
            padded[: len(part)] = part
            contents += list(np.array(self.executables.gather(self._pages, 0, padded))[: len(part)])
        return contents

    def write_blocks(self, contents: Sequence[tuple[int, npt.NDArray[np.uint8]]]) -> None:
        """Writes contents that `read_blocks` returned into blocks of the first cache group."""
        size = self.executables.num_swapped
        for start in range(0, len(contents), size):
            part = contents[start : start + size]
            padded = np.zeros(size, np.int32)
            rows = np.zeros((size, len(part[0][1])), np.uint8)
            padded[: len(part)] = [block for block, _ in part]
            rows[: len(part)] = [content for _, content in part]
            self._pages = self.executables.scatter(self._pages, 0, padded, rows)

    def wait(self) -> None:
        """Waits until all that was dispatched has happened; only measurements need it."""
        for page in jax.tree.leaves(self._pages):
            page.block_until_ready()

    @property
    def parameters(self) -> Any:
        """Returns the weights that are loaded, as a nested dict of arrays."""
        return self._parameters

    def share_parameters(self) -> Any:
        """Returns the weights to a caller, who may hold the arrays as long as they are needed."""
        self._is_shared = True
        return self._parameters

    def replace_parameters(self, others: Mapping[str, Any]) -> None:
        """Takes other weights of the same shapes and types, from the next step on.

        Adapters stay, and so do weights that are not given.

        Args:
            others: The model's weights under "target", those of its drafter under "drafter".
        """
        _add_missing(others["target"], self._parameters["target"])
        self._parameters = {**self._parameters, **others}

    def write_adapter(
        self, path: Path, slot: int, layer: tuple[np.ndarray, np.ndarray] | None
    ) -> None:
        """Writes A and B of a linear layer into a slot, from 1, or zeros for None.

        Nothing is compiled for it.
        """
        for index, name in enumerate(("a", "b")):
            sharded = self._adapters[*path, "lora", name]
            for place in sharded.places:
                module = entry_at(self._parameters["target"], place.path[:-1])
                before = module[name]
                parts = []  # vectors may still be computed with the array before, so it stays
                for shard in before.addressable_shards:
                    # A copy, because JAX's own arrays cannot be written.
                    numbers = np.array(shard.data)
                    device = (shard.index[0].start or 0) // place.shape[0]
                    numbers[slot - 1] = (
                        0 if layer is None else sharded.part(layer[index][None], place, device)[0]
                    )
                    parts.append(jax.device_put(numbers, shard.device))
                module[name] = jax.make_array_from_single_device_arrays(
                    before.shape, before.sharding, parts
                )

    def sleep(self, *, keeps_weights: bool) -> None:
        """Frees the device's memory but for the executables, until `wake`.

        Args:
            keeps_weights: True keeps the weights in the host's memory; False drops them.
        """
        for page in jax.tree.leaves(self._pages):
            page.delete()
        self._pages = ()
        if keeps_weights:
            self.host_parameters = to_host(self._parameters, deletes=not self._is_shared)
        self._drop_parameters()
        self.num_sleeps += 1
        # The last, because a thread that finds the runner asleep reads what was kept.
        self.is_asleep = True

    def wake(self, parameters: Any) -> None:
        """Takes the weights again, and makes empty pages."""
        self.rebuild_pages()
        self._parameters = parameters
        self.is_asleep = False
        self.host_parameters = None

    def rebuild_pages(self) -> None:
        """Makes empty pages; the contents of the old ones are lost. The host's pages stay."""
        # The old pages go first: there is no room for both.
        self._pages = ()
        self._pages = self._new_pages()

    def close(self) -> None:
        """Gives back the memory of the device and of the host."""
        self._drop_parameters()
        for page in jax.tree.leaves(self._pages):
            page.delete()
        self._pages = ()
        for host_pages in self._host_pages:
            host_pages.close()
        self.executables.close()

    def _drop_parameters(self) -> None:
        """Frees the weights; those that a caller may hold are left to that caller."""
        if not self._is_shared:
            for array in jax.tree.leaves(self._parameters):
                array.delete()
        self._parameters = {}
        self._is_shared = False


def _add_missing(parameters: dict[Any, Any], others: dict[Any, Any]) -> None:
    """Adds the parameters of another tree that these lack: no checkpoint has them."""
    for key, other in others.items():
        if key not in parameters:
            parameters[key] = other
        elif isinstance(other, dict):
            _add_missing(parameters[key], other)
