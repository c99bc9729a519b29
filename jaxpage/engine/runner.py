"""Runs batches on the device. Owns the parameters, the pages and the host's pages; never sees a sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jaxpage.device.executables import Executables
from jaxpage.device.host_pages import HostPages
from jaxpage.device.kv_pages import KVPages
from jaxpage.device.steps import unpack_drawn
from jaxpage.engine.batch_builder import Batch, Move
from jaxpage.models.replacing import Path
from jaxpage.models.sharding import ShardedWeight, at
from jaxpage.models.weights import add_missing
from jaxpage.step.plan import StepResult


class Runner:
    """Steps from the table of executables. The pages are donated to each step and replaced by what it returns."""

    def __init__(
        self,
        parameters: Any,
        new_pages: Callable[[], KVPages],
        executables: Executables,
        host_pages: Sequence[HostPages],
        adapters: Sequence[ShardedWeight] = (),
    ):
        """host_pages: of each cache group. adapters: A and B of every layer that takes any."""
        self.executables = executables
        self._parameters = parameters
        self._new_pages = new_pages
        self._pages = new_pages()
        self._host_pages = host_pages
        self._adapters = {sharded.weight.path: sharded for sharded in adapters}

    def run(self, batch: Batch) -> StepResult:
        self.swap_out(batch.swap_out)
        self.swap_in(batch.swap_in)
        for group, pairs in batch.copies:
            self._pages = self.executables.copy(self._pages, group, pairs)
        step = self.executables.step(batch.bucket, batch.draft_depth)
        output, self._pages = step(
            self._parameters, self._pages, batch.packed, batch.processor_inputs
        )
        result = StepResult(*unpack_drawn(np.asarray(output.drawn), batch.num_draws))
        if batch.num_scored:
            result = replace(
                result,
                scored=StepResult(*unpack_drawn(np.asarray(output.scored), batch.num_scored)),
            )
        if output.paths.size:
            result = replace(result, paths=np.asarray(output.paths)[: batch.num_rows])
        if output.draft_candidates is not None:
            result = replace(result, draft_candidates=np.asarray(output.draft_candidates))
        return result

    def swap_out(self, moves: tuple[Move, ...]) -> None:
        """Copies each (block, host block) pair. On return the host has them, so that the blocks may be overwritten."""
        for group, pairs in moves:
            contents = self.executables.gather(self._pages, group, pairs[:, 0])
            self._host_pages[group].store(pairs[:, 1], np.asarray(contents))

    def swap_in(self, moves: tuple[Move, ...]) -> None:
        """Copies each (host block, block) pair. What reads the pages next waits for it on the device."""
        for group, pairs in moves:
            contents = self._host_pages[group].load(pairs[:, 0])
            self._pages = self.executables.scatter(self._pages, group, pairs[:, 1], contents)

    def read_blocks(self, blocks: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
        """The contents of blocks of the first cache group, [bytes of a block] each."""
        size, found = self.executables.num_swapped, list[npt.NDArray[np.uint8]]()
        for start in range(0, len(blocks), size):
            padded = np.zeros(size, np.int32)  # with the null block
            part = blocks[start : start + size]
            padded[: len(part)] = part
            found += list(np.array(self.executables.gather(self._pages, 0, padded))[: len(part)])
        return found

    def write_blocks(self, contents: Sequence[tuple[int, npt.NDArray[np.uint8]]]) -> None:
        """Into blocks of the first cache group, as `read_blocks` gives them."""
        size = self.executables.num_swapped
        for start in range(0, len(contents), size):
            part = contents[start : start + size]
            padded, rows = np.zeros(size, np.int32), np.zeros((size, len(part[0][1])), np.uint8)
            padded[: len(part)] = [block for block, _ in part]
            rows[: len(part)] = [own for _, own in part]
            self._pages = self.executables.scatter(self._pages, 0, padded, rows)

    def wait(self) -> None:
        """Returns when all that was dispatched has happened: for measurements, since steps need no waiting."""
        for page in jax.tree.leaves(self._pages):
            page.block_until_ready()

    @property
    def parameters(self) -> Any:
        """The weights as they are loaded: a nested dict of arrays."""
        return self._parameters

    def replace_parameters(self, target: Any) -> None:
        """Takes other weights of the model, of the same shapes and types, from the next step on. Adapters stay."""
        add_missing(target, self._parameters["target"], lambda adapters: adapters)
        self._parameters = {**self._parameters, "target": target}

    def write_adapter(
        self, path: Path, slot: int, layer: tuple[np.ndarray, np.ndarray] | None
    ) -> None:
        """A and B of a linear layer into a slot, from 1; None: zeros. Nothing is compiled for it."""
        for index, name in enumerate(("a", "b")):
            sharded = self._adapters[*path, "lora", name]
            for place in sharded.places:
                module = at(self._parameters["target"], place.path[:-1])
                before, parts = module[name], []
                for shard in before.addressable_shards:
                    numbers, device = (
                        np.array(shard.data),
                        (shard.index[0].start or 0) // place.shape[0],
                    )
                    numbers[slot - 1] = (
                        0 if layer is None else sharded.part(layer[index][None], place, device)[0]
                    )
                    parts.append(jax.device_put(numbers, shard.device))
                module[name] = jax.make_array_from_single_device_arrays(
                    before.shape, before.sharding, parts
                )
                before.delete()

    def rebuild_pages(self) -> None:
        """An empty pool; what sequences had in the old one is gone. The host's pages stay as they are."""
        self._pages = ()
        self._pages = self._new_pages()

    def close(self) -> None:
        """Gives the memory of the device and of the host back."""
        for array in jax.tree.leaves((self._parameters, self._pages)):
            array.delete()
        self._parameters, self._pages = {}, ()
        for host_pages in self._host_pages:
            host_pages.close()
        self.executables.close()
