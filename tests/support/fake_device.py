"""A device without a model, for tests of the host wing: slots hold token ids, and a draw is a hash of what its row reads.

Whatever breaks paging shows: a row that reads another sequence's token, a lost copy or a stale block draws other tokens.
As keys and values do, each slot also depends on all that was read before it: a hash of the tokens up to its own.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping

from jaxpage.decoding import Append, Edit, Finish, Fork
from jaxpage.memory import BlockManager
from jaxpage.request import Request, Sequence, SequenceGroup
from jaxpage.sampling_params import SamplingParams
from jaxpage.scheduling import Scheduler, StepLimits, StepPlan

EOS = 7
NUM_TOKEN_IDS = 40
NOTHING = -1


def draw(context: Iterable[int], seed: int, sample_index: int, suppressed: Iterable[int] = ()) -> int:
    """The token that follows `context`: a function of the context and the noise key alone."""
    banned = set(suppressed)
    for attempt in itertools.count():
        key = f"{list(context)} {seed} {sample_index} {attempt}"
        token_id = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest()) % NUM_TOKEN_IDS
        if token_id not in banned:
            return token_id
    raise AssertionError


def make_group(
    request_id: str,
    sequence_id: int,
    prompt: Iterable[int],
    *,
    max_tokens: int = 4,
    n: int = 1,
    min_tokens: int = 0,
    ignore_eos: bool = False,
    cache_salt: str | None = None,
) -> SequenceGroup:
    token_ids = tuple(prompt)
    request = Request(
        request_id=request_id,
        prompt=None,
        prompt_token_ids=token_ids,
        params=SamplingParams(n=n, max_tokens=max_tokens, min_tokens=min_tokens, cache_salt=cache_salt),
        seed=sequence_id,
        eos_token_ids=frozenset() if ignore_eos else frozenset({EOS}),
        max_total_tokens=len(token_ids) + max_tokens,
    )
    return SequenceGroup(request, [Sequence(sequence_id, 0, len(token_ids), list(token_ids))])


def alone(request: Request, sample_index: int = 0) -> list[int]:
    """The output that the request must have whatever happens around it: drawn one by one, without blocks or steps."""
    known = list(request.prompt_token_ids)
    while True:
        too_early = len(known) - len(request.prompt_token_ids) < request.params.min_tokens
        known.append(draw(known, request.seed, sample_index, request.eos_token_ids if too_early else ()))
        if ends(request, known):
            return known[len(request.prompt_token_ids) :]


def ends(request: Request, known: list[int]) -> bool:
    return known[-1] in request.eos_token_ids or len(known) >= request.max_total_tokens


def context_of(token_ids: Iterable[int], root: object = None) -> int:
    """What the slot of the last of these tokens must depend on."""
    context = hash((0, root))
    for token_id in token_ids:
        context = hash((context, token_id))
    return context


class FakeDevice:
    """The pages of a pool, with one token id and one context per slot. Salts are made visible: they are roots of contexts."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots = [[NOTHING] * block_size for _ in range(num_blocks)]
        self.contexts = [[NOTHING] * block_size for _ in range(num_blocks)]

    def copy(self, copies: Iterable[tuple[int, int]]) -> None:
        for source, destination in copies:
            self.slots[destination] = self.slots[source].copy()
            self.contexts[destination] = self.contexts[source].copy()

    def write(self, table: tuple[int, ...], start: int, token_ids: Iterable[int], root: object = None) -> None:
        context = self.context(table, start, root)
        for position, token_id in enumerate(token_ids, start):
            block, slot = table[position // self.block_size], position % self.block_size
            context = hash((context, token_id))
            self.slots[block][slot], self.contexts[block][slot] = token_id, context

    def read(self, table: tuple[int, ...], num_tokens: int) -> list[int]:
        return [self.slots[table[p // self.block_size]][p % self.block_size] for p in range(num_tokens)]

    def context(self, table: tuple[int, ...], num_tokens: int, root: object = None) -> int:
        if num_tokens == 0:
            return context_of([], root)
        return self.contexts[table[(num_tokens - 1) // self.block_size]][(num_tokens - 1) % self.block_size]

    def run(self, plan: StepPlan, roots: Mapping[int, object]) -> list[int]:
        """Copies, then all writes, then all draws."""
        self.copy(plan.copies)
        for row in plan.rows:
            self.write(row.block_table, row.start, row.token_ids, roots[row.sequence_id])
        token_ids = []
        for sample in plan.samples:
            row = plan.rows[sample.row]
            context = self.read(row.block_table, row.start + sample.offset + 1)
            assert sample.position == len(context)
            token_ids.append(draw(context, sample.seed, sample.sample_index, sample.suppressed_token_ids))
        return token_ids


EditsOf = Callable[[SequenceGroup, Sequence, int], list[Edit]]


class Driver:
    """Steps a scheduler on a fake device and asserts, at every step, what every plan promises."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.device = FakeDevice(scheduler.block_manager.pool.num_blocks, scheduler.block_manager.block_size)
        self.new_sequence_id = itertools.count(1_000_000).__next__
        self.plans: list[StepPlan] = []
        self._steps_missed = 0  # in a row, by the oldest running group

    def step(self, change: EditsOf | None = None) -> list[SequenceGroup]:
        """One step; `change` may answer a draw with edits of its own. Returns the touched groups."""
        scheduler = self.scheduler
        before = scheduler.running
        plan = scheduler.plan()
        if plan is None:
            assert not scheduler.has_unfinished
            return []
        self.plans.append(plan)
        self._check_preemption(plan, before)
        sequences = {s.sequence_id: (g, s) for g in scheduler.running for s in g.unfinished}
        check_limits(plan, scheduler.limits, {i: s for i, (_, s) in sequences.items()})
        roots = {i: g.request.params.cache_salt for i, (g, _) in sequences.items()}
        token_ids = self.device.run(plan, roots)
        for row in plan.rows:
            known = sequences[row.sequence_id][1].token_ids[: row.context_length]
            assert self.device.read(row.block_table, row.context_length) == known
            context = self.device.context(row.block_table, row.context_length)
            assert context == context_of(known, roots[row.sequence_id]), "computed behind another prefix"
        edits: list[Edit] = []
        for sample, token_id in zip(plan.samples, token_ids, strict=True):
            group, sequence = sequences[sample.sequence_id]
            edits += (change or self.edits_of)(group, sequence, token_id)
        touched = scheduler.commit(plan, edits)
        scheduler.check()
        check_cached(scheduler.block_manager, self.device)
        return touched

    def lose_pages(self) -> None:
        self.scheduler.lose_pages()
        self.device = FakeDevice(len(self.device.slots), self.device.block_size)
        self.scheduler.check()

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished:
                return
            self.step()
        raise AssertionError(f"unfinished after {max_steps} steps")

    def edits_of(self, group: SequenceGroup, sequence: Sequence, token_id: int) -> list[Edit]:
        """Sampling: the token is appended; the first draw of a request with n > 1 forks its other samples off."""
        request = group.request
        edits: list[Edit] = []
        drawn = {sequence.sequence_id: token_id}
        if len(group.sequences) < request.params.n:
            banned = request.eos_token_ids if request.params.min_tokens else ()
            for sample_index in range(1, request.params.n):
                child_id = self.new_sequence_id()
                edits.append(Fork(sequence.sequence_id, child_id, sample_index))
                drawn[child_id] = draw(sequence.token_ids, request.seed, sample_index, banned)
        for sequence_id, token in drawn.items():
            edits.append(Append(sequence_id, token))
            if ends(request, [*sequence.token_ids, token]):
                edits.append(Finish(sequence_id, "stop" if token in request.eos_token_ids else "length"))
        return edits

    def _check_preemption(self, plan: StepPlan, before: tuple[SequenceGroup, ...]) -> None:
        arrival = [group.request.request_id for group in (*self.scheduler.running, *self.scheduler.waiting)]
        num_running = self.scheduler.num_running
        gave_way = arrival[num_running : num_running + len(plan.preempted)]
        assert list(plan.preempted) == gave_way[::-1], "the newest give way first"
        assert num_running + len(plan.preempted) >= len(before), "somebody gave way and is not named"
        assert num_running > 0, "the oldest gave way"
        in_step = {row.sequence_id for row in plan.rows}
        assert not in_step & {s.sequence_id for g in self.scheduler.waiting for s in g.sequences}
        oldest = self.scheduler.running[0]
        self._steps_missed = 0 if in_step & {s.sequence_id for s in oldest.sequences} else self._steps_missed + 1
        assert self._steps_missed <= 1, "the oldest stands still"


def check_cached(manager: BlockManager, device: FakeDevice) -> None:
    """Asserts that every block of the prefix index holds what the index says, to the last slot."""
    for block in range(manager.pool.num_blocks):
        if manager.pool.is_kept(block):
            assert manager.prefix_index is not None
            assert tuple(device.slots[block]) == manager.prefix_index.entry(block).token_ids, f"block {block} lies"


def check_limits(plan: StepPlan, limits: StepLimits, sequences: dict[int, Sequence]) -> None:
    """Asserts that the backend's shapes hold the plan and that its parts fit together."""
    lengths = [len(row.token_ids) for row in plan.rows]
    assert lengths and min(lengths) > 0
    if max(lengths) == 1:
        assert len(lengths) <= limits.max_rows
    else:
        assert sum(lengths) <= limits.max_tokens and len(lengths) <= limits.max_chunk_rows
        decoding = [row for row in plan.rows if sequences[row.sequence_id].num_pending_tokens == 1 and row.start > 0]
        assert limits.mixed or not decoding, "decoding rows in a step with prompts"
    reaching = {}
    for index, row in enumerate(plan.rows):
        sequence = sequences[row.sequence_id]
        assert row.start == sequence.num_computed_tokens and 0 not in row.block_table
        assert row.token_ids == tuple(sequence.token_ids[row.start : row.context_length])
        if row.context_length == sequence.num_known_tokens:
            reaching[index] = row.sequence_id
    assert {sample.row: sample.sequence_id for sample in plan.samples} == reaching
    order = {sequence_id: place for place, sequence_id in enumerate(sequences)}
    decoding_first = [
        (sequences[row.sequence_id].num_pending_tokens > 1 or row.start == 0, order[row.sequence_id])
        for row in plan.rows
    ]
    assert decoding_first == sorted(decoding_first), "single tokens first, each kind in order of arrival"
