"""Keeps the LoRA adapters of an engine: those that are read, and those in slots on the device."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpage import checkpoints
from jaxpage.checkpoints import in_memory
from jaxpage.engine.batch_builder import NO_SLOTS
from jaxpage.errors import ModelNotFoundError
from jaxpage.models.parameters import LoRASpec
from jaxpage.models.parameters import Path as LayerPath
from jaxpage.settings.lora_request import LoRARequest
from jaxpage.step.plan import StepPlan

if TYPE_CHECKING:
    from jaxpage.checkpoints import Adapter

# Writes A and B of a layer into a slot, or zeros for None. Slots count from 1.
WriteLayer = Callable[[LayerPath, int, tuple[np.ndarray, np.ndarray] | None], None]


class Adapters:
    """Reads adapters or takes them from memory, and gives those of a step slots on the device.

    An adapter is known by the digest of its numbers, so that files which have changed are another
    adapter. It keeps its slot until another one needs it. The scheduler makes sure that running
    requests have no more adapters than there are slots.

    Attributes:
        spec: The layers that take adapters, and the number of slots.
    """

    def __init__(self, spec: LoRASpec, write: WriteLayer):
        self.spec = spec
        self._paths = {target.path for target in spec.targets.values()}
        self._write = write
        self._lock = threading.Lock()  # guards the next three
        self._meant: dict[int, tuple[str, str | None]] = {}  # name and path, by lora_int_id
        self._in_memory: dict[int, Adapter] = {}  # those without a path, by lora_int_id
        # Adapters by path; the one that was used last comes last.
        self._read: OrderedDict[str, tuple[object, Adapter]] = OrderedDict()
        self._slots: OrderedDict[str, int] = OrderedDict()  # by digest; the last used comes last
        self._held: dict[str, Adapter] = {}  # by id of an unfinished request

    def open(self, requested: LoRARequest) -> Adapter:
        """Returns the adapter of a request; any thread may call it.

        Args:
            requested: The adapter that the request names.

        Raises:
            ValueError: The number lora_int_id belongs to another adapter.
            ModelNotFoundError: There is no such directory, or no `update` of an adapter that has
                none.
            CheckpointError: The adapter does not fit the model; the message lists all problems.
        """
        self._check_number(requested)
        if requested.lora_path is None:
            return self._find_in_memory(requested)
        directory = directory_of(requested)
        with self._lock:
            known = self._read.get(requested.lora_path)
        version = checkpoints.adapter_version(directory)
        if known is None or known[0] != version:
            # Without the lock: reading takes seconds, and other threads open adapters meanwhile.
            known = version, checkpoints.read_adapter(directory, self.spec)
        with self._lock:
            self._meant[requested.lora_int_id] = _meaning(requested)
            self._read[requested.lora_path] = known
            self._read.move_to_end(requested.lora_path)
            # The rest stays in memory for later requests.
            while len(self._read) > self.spec.num_slots:
                self._read.popitem(last=False)
        return known[1]

    def update(
        self, requested: LoRARequest, tensors: Mapping[str, Any], config: Mapping[str, Any]
    ) -> str:
        """Takes the numbers of an adapter from memory; see `LLM.update_adapter`.

        Any thread may call it.
        """
        if requested.lora_path is not None:
            raise ValueError(
                f"LoRA adapter {requested.lora_name!r} is in {requested.lora_path}; one that is "
                "updated has no lora_path"
            )
        self._check_number(requested)
        return self._keep(requested, in_memory.make_adapter_from(config, tensors, self.spec))

    def update_from(self, requested: LoRARequest, directory: Path) -> str:
        """Takes the numbers of an adapter without a path from files, which are read only now.

        Any thread may call it.

        Returns:
            The digest of the numbers.

        Raises:
            CheckpointError: The adapter does not fit the model; the message lists all problems.
        """
        return self._keep(requested, checkpoints.read_adapter(directory, self.spec))

    def _keep(self, requested: LoRARequest, adapter: Adapter) -> str:
        with self._lock:
            self._meant[requested.lora_int_id] = _meaning(requested)
            self._in_memory[requested.lora_int_id] = adapter
        return adapter.digest

    def _check_number(self, requested: LoRARequest) -> None:
        with self._lock:
            meant = self._meant.get(requested.lora_int_id, _meaning(requested))
        if meant != _meaning(requested):
            place = "memory" if meant[1] is None else meant[1]
            raise ValueError(
                f"lora_int_id={requested.lora_int_id} is {meant[0]!r} in {place}; give "
                f"{requested.lora_name!r} another number"
            )

    def _find_in_memory(self, requested: LoRARequest) -> Adapter:
        with self._lock:
            adapter = self._in_memory.get(requested.lora_int_id)
        if adapter is None:
            raise ModelNotFoundError(
                f"LoRA adapter {requested.lora_name!r} has no lora_path, and update_adapter has "
                "not given its numbers"
            )
        return adapter

    def hold(self, request_id: str, adapter: Adapter) -> None:
        """Keeps the adapter of a request that was added."""
        self._held[request_id] = adapter

    def release(self, request_id: str) -> None:
        """Gives up the adapter of a request that has ended."""
        self._held.pop(request_id, None)

    def load_for(self, plan: StepPlan) -> Mapping[str, int]:
        """Puts the adapters of a step on the device, and returns the slots by digest.

        It is called between two steps. Adapters that have a slot stay there.
        """
        needed = dict.fromkeys(row.lora for row in plan.rows if row.lora is not None)
        for digest in needed:
            if digest not in self._slots:
                self._place(digest, self._free_slot(needed))
            self._slots.move_to_end(digest)
        # The builder writes slots only where there are some.
        return self._slots if needed else NO_SLOTS

    def _place(self, digest: str, slot: int) -> None:
        # Of a request that runs, because `_read` may have dropped it by now.
        adapter = next(adapter for adapter in self._held.values() if adapter.digest == digest)
        for path in self._paths:
            self._write(path, slot, adapter.layers.get(path))
        self._slots[digest] = slot

    def _free_slot(self, needed: Container[str]) -> int:
        """Returns an empty slot, or that of the adapter that was not used for the longest time."""
        if free := set(range(1, 1 + self.spec.num_slots)) - set(self._slots.values()):
            return min(free)
        return self._slots.pop(next(digest for digest in self._slots if digest not in needed))

    def lose_slots(self) -> None:
        """Forgets what is in the slots, because other weights have taken their place."""
        self._slots.clear()

    def forget(self, lora_int_id: int) -> None:
        """Allows that the number is given to another adapter."""
        with self._lock:
            self._meant.pop(lora_int_id, None)
            self._in_memory.pop(lora_int_id, None)


def _meaning(requested: LoRARequest) -> tuple[str, str | None]:
    return requested.lora_name, requested.lora_path


def directory_of(requested: LoRARequest) -> Path:
    """Returns the directory of an adapter.

    Raises:
        ModelNotFoundError: There is no such directory.
    """
    assert requested.lora_path is not None, "one in memory has no directory"
    if not (directory := Path(requested.lora_path)).is_dir():
        raise ModelNotFoundError(
            f"LoRA adapter {requested.lora_name!r}: there is no directory {requested.lora_path}"
        )
    return directory
