"""A device without a model, for tests of the host modules: slots hold token ids, and a draw is a
hash of what its row reads.

Whatever breaks paging shows: a row that reads another sequence's token, a lost copy or a stale
block draws other tokens. As keys and values do, each slot also depends on all that was read before
it: a hash of the tokens up to its own.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from jaxpage.decoding import BeamStrategy
from jaxpage.engine.text import NoText
from jaxpage.memory import BlockManager
from jaxpage.outputs import TokenLogprobs
from jaxpage.scheduling import Scheduler
from jaxpage.scheduling.queues import ByPriority, FirstCome
from jaxpage.settings.sampling_params import BeamSearchParams, SamplingParams
from jaxpage.step.draft import Draft, Drafts
from jaxpage.step.edits import Append, Edit, Finish, Fork, Score
from jaxpage.step.plan import Row, Sample, StepPlan
from jaxpage.step.request import Request, Sequence, SequenceGroup
from jaxpage.step.strategy import Draw
from tests.support.beams import best_tokens, random_logprobs

EOS = 7
NUM_TOKEN_IDS = 40
NOTHING = -1


def draw(
    context: Iterable[int], seed: int, sample_index: int, suppressed: Iterable[int] = ()
) -> int:
    """Returns the token after `context`: a function of the context and the noise key alone."""
    banned = set(suppressed)
    for attempt in itertools.count():
        key = f"{list(context)} {seed} {sample_index} {attempt}"
        token_id = (
            int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest()) % NUM_TOKEN_IDS
        )
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
    **params: Any,
) -> SequenceGroup:
    token_ids = tuple(prompt)
    request = Request(
        request_id=request_id,
        prompt=None,
        prompt_token_ids=token_ids,
        params=SamplingParams(n=n, max_tokens=max_tokens, min_tokens=min_tokens, **params),
        seed=sequence_id,
        eos_token_ids=frozenset() if ignore_eos else frozenset({EOS}),
        max_total_tokens=len(token_ids) + max_tokens,
    )
    return SequenceGroup(request, [Sequence(sequence_id, 0, len(token_ids), list(token_ids))])


def make_beam_group(
    request_id: str, first_id: int, prompt: Iterable[int], beam: BeamSearchParams
) -> SequenceGroup:
    """Makes a group whose forks take the ids that follow the first."""
    token_ids = tuple(prompt)
    assert beam.max_tokens is not None
    request = Request(
        request_id=request_id,
        prompt=None,
        prompt_token_ids=token_ids,
        params=SamplingParams(
            temperature=0.0, max_tokens=beam.max_tokens, stop_token_ids=beam.stop_token_ids
        ),
        seed=0,
        eos_token_ids=frozenset({EOS}),
        max_total_tokens=len(token_ids) + beam.max_tokens,
        beam=beam,
    )
    reserved = tuple(range(first_id, first_id + request.num_sequence_ids))
    return SequenceGroup(
        request, [Sequence(first_id, 0, len(token_ids), list(token_ids))], reserved_ids=reserved
    )


def alone(request: Request, sample_index: int = 0, window: int | None = None) -> list[int]:
    """Returns the output that the request must have whatever happens around it.

    It is drawn one by one, without blocks or steps.
    """
    known = list(request.prompt_token_ids)
    while True:
        too_early = len(known) - len(request.prompt_token_ids) < request.params.min_tokens
        known.append(
            draw(
                known[-window:] if window else known,
                request.seed,
                sample_index,
                request.eos_token_ids if too_early else (),
            )
        )
        if ends(request, known):
            return known[len(request.prompt_token_ids) :]


def score(context: Iterable[int], token_id: int) -> TokenLogprobs:
    """Returns what a token of a prompt gets behind `context`: a number that depends on both."""
    return TokenLogprobs(token_id, -float(draw(context, token_id, 0)), 1)


def scores_alone(request: Request, window: int | None = None) -> list[TokenLogprobs]:
    """Returns what the tokens of the prompt must get, all but the first."""
    prompt = request.prompt_token_ids
    return [
        score(prompt[max(0, index - (window or index)) : index], prompt[index])
        for index in range(1, len(prompt))
    ]


def ends(request: Request, known: list[int]) -> bool:
    return known[-1] in request.eos_token_ids or len(known) >= request.max_total_tokens


def context_of(token_ids: Iterable[int], root: object = None) -> int:
    """Returns what the slot of the last of these tokens must depend on."""
    context = hash((0, root))
    for token_id in token_ids:
        context = hash((context, token_id))
    return context


class FakeDevice:
    """The pages of a pool, with one token id and one context per slot. Salts are made visible: they
    are roots of contexts.

    A draw sees the tokens of the window, if there is one; the context of a slot is a hash of all
    before it all the same, as the keys of a deep layer depend on more than its window. Blocks of
    all cache groups have slots here: a token is written to each, and what a draw sees must stand in
    each, as far back as the group sees.
    """

    def __init__(
        self, num_blocks: int, block_size: int, windows: tuple[int | None, ...] = (None,)
    ) -> None:
        """Makes a device with these windows of cache groups, the first of which sees most."""
        self.block_size = block_size
        self.window, *self.further_windows = windows
        self.host: dict[int, tuple[list[int], list[int]]] = {}
        self.slots = [[NOTHING] * block_size for _ in range(num_blocks)]
        self.contexts = [[NOTHING] * block_size for _ in range(num_blocks)]

    def copy(self, copies: Iterable[tuple[int, int]]) -> None:
        for source, destination in copies:
            self.slots[destination] = self.slots[source].copy()
            self.contexts[destination] = self.contexts[source].copy()

    def swap(self, plan: StepPlan) -> None:
        """Swaps out, and then in: a block that is freed by the one may be filled by the other."""
        for block, host_block in plan.swap_out:
            self.host[host_block] = self.slots[block].copy(), self.contexts[block].copy()
        for host_block, block in plan.swap_in:
            slots, contexts = self.host[host_block]
            self.slots[block], self.contexts[block] = slots.copy(), contexts.copy()

    def write(
        self, table: tuple[int, ...], start: int, token_ids: Iterable[int], root: object = None
    ) -> None:
        context = self.context(table, start, root)
        for position, token_id in enumerate(token_ids, start):
            block, slot = table[position // self.block_size], position % self.block_size
            context = hash((context, token_id))
            self.slots[block][slot], self.contexts[block][slot] = token_id, context

    def read(self, table: tuple[int, ...], num_tokens: int) -> list[int]:
        return self.read_window(table, num_tokens, self.window)

    def read_window(self, table: tuple[int, ...], num_tokens: int, window: int | None) -> list[int]:
        first = max(0, num_tokens - window) if window else 0
        return [
            self.slots[table[p // self.block_size]][p % self.block_size]
            for p in range(first, num_tokens)
        ]

    def context(self, table: tuple[int, ...], num_tokens: int, root: object = None) -> int:
        if num_tokens == 0:
            return context_of([], root)
        return self.contexts[table[(num_tokens - 1) // self.block_size]][
            (num_tokens - 1) % self.block_size
        ]

    def write_drafts(self, row: Row, table: tuple[int, ...]) -> None:
        """Returns the drafts of a row: each in the slot of its place, and after its parent."""
        known = row.start + len(row.token_ids) - len(row.parents)
        contexts = [self.context(table, known)]
        for index, parent in enumerate(row.parents, 1):
            contexts.append(hash((contexts[parent], row.token_ids[index])))
            block, slot = self.place(table, row.start + index)
            self.slots[block][slot], self.contexts[block][slot] = (
                row.token_ids[index],
                contexts[index],
            )

    def verify(self, row: Row, drawn: list[int]) -> list[int]:
        """Returns the tokens that are right, by what was drawn after each token of a row.

        They follow each other, and are moved to where they belong.
        """
        path = [0]
        while right := [
            index
            for index, parent in enumerate(row.parents, 1)
            if parent == path[-1] and row.token_ids[index] == drawn[parent]
        ]:
            path.append(right[0])
        for table in row.block_tables:
            places = [self.place(table, row.start + place) for place in path]
            stored = [
                (self.slots[block][slot], self.contexts[block][slot]) for block, slot in places
            ]
            for depth, (token_id, context) in enumerate(stored):
                block, slot = self.place(table, row.start + depth)
                self.slots[block][slot], self.contexts[block][slot] = token_id, context
        return path

    def place(self, table: tuple[int, ...], position: int) -> tuple[int, int]:
        return table[position // self.block_size], position % self.block_size

    def run(self, plan: StepPlan, roots: Mapping[int, object]) -> list[tuple[Sample, int, bool]]:
        """Swaps, copies, then all writes, then all draws. Returns the draws that count, and whether
        a draft was just that.
        """
        for moves in (plan.swap_out, plan.swap_in, plan.copies):
            assert len({destination for _, destination in moves}) == len(moves), (
                "a block is a destination twice"
            )
        self.swap(plan)
        self.copy(plan.copies)
        for row in plan.rows:
            known = row.token_ids[: len(row.token_ids) - len(row.parents)]
            for table in row.block_tables:
                self.write(table, row.start, known, roots[row.sequence_id])
                self.write_drafts(row, table)
        drawn: dict[int, list[tuple[Sample, int]]] = {}
        for sample in plan.samples:
            row = plan.rows[sample.row]
            num_drafts, path = len(row.parents), []
            place = sample.offset
            while place > 0 and num_drafts:
                path.append(row.token_ids[place])
                place = row.parents[place - 1]
            num_known = row.start + place + 1
            assert sample.position == num_known + len(path)
            context = self.read(row.block_tables[0], num_known)
            for table, window in zip(row.block_tables[1:], self.further_windows, strict=True):
                assert self.read_window(table, num_known, window) == context[-window:], (
                    "cache groups differ"
                )
            context = [*context, *path[::-1]]
            context = context[-self.window :] if self.window else context
            stops = sample.params.stop_token_ids if sample.is_early else ()
            token_id = draw(
                context, sample.seed, sample.sample_index, {*sample.suppressed_token_ids, *stops}
            )
            drawn.setdefault(sample.row, []).append((sample, token_id))
        counted = []
        for index, draws in drawn.items():
            if row_parents := plan.rows[index].parents:
                assert [sample.offset for sample, _ in draws] == list(range(1 + len(row_parents)))
                path = self.verify(plan.rows[index], [token_id for _, token_id in draws])
                counted += [(*draws[place], place != path[-1]) for place in path]
            else:
                counted += [(*each, False) for each in draws]
        return counted


EditsOf = Callable[[SequenceGroup, Sequence, int], list[Edit]]


class Driver:
    """Steps a scheduler on a fake device and asserts, at every step, what every plan promises."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        manager = scheduler.block_manager
        num_blocks, windows = (
            manager.groups[-1].pool.num_blocks,
            (group.sliding_window for group in manager.groups),
        )
        self.device = FakeDevice(num_blocks, manager.block_size, tuple(windows))
        self.new_sequence_id = itertools.count(1_000_000).__next__
        self.plans: list[StepPlan] = []
        self.searches: dict[str, BeamStrategy] = {}  # by request id, once they have drawn
        self._steps_missed = (None, 0)  # in a row, by the running group of the lowest rank
        self.propose: Callable[[Scheduler], Mapping[int, Draft]] | None = None
        self.num_right = 0  # drafts that became tokens

    def step(self, change: EditsOf | None = None) -> list[SequenceGroup]:
        """Takes one step, and returns the touched groups.

        `change` may answer a draw with edits of its own.
        """
        scheduler, manager = self.scheduler, self.scheduler.block_manager
        before = scheduler.running
        plan = self._plan()
        if plan is None:
            assert not scheduler.has_unfinished
            return []
        self.plans.append(plan)
        self._check_preemption(plan, before)
        sequences = {s.sequence_id: (g, s) for g in scheduler.running for s in g.unfinished}
        each, requests = (
            {i: pair[1] for i, pair in sequences.items()},
            {i: g.request for i, (g, _) in sequences.items()},
        )
        check_limits(plan, scheduler, each, requests)
        roots = {i: g.request.params.cache_salt for i, (g, _) in sequences.items()}
        counted = self.device.run(plan, roots)
        for row in plan.rows:
            known = sequences[row.sequence_id][1].token_ids[: row.context_length - len(row.parents)]
            self._check_row(row.block_tables, known, roots[row.sequence_id])
        edits = self.scores(plan)
        draws: dict[str, list[Draw]] = {}
        ended: set[int] = set()
        after: dict[int, list[int]] = {}  # what a row has drawn before
        for sample, token_id, drafted in counted:
            parent_id = plan.rows[sample.row].sequence_id
            group, sequence = sequences[parent_id]
            if request := group.request.beam and group.request:
                context = self.device.read(plan.rows[sample.row].block_tables[0], sample.position)
                candidates = best_tokens(
                    random_logprobs(tuple(context), NUM_TOKEN_IDS), request.num_logprobs or 0
                )
                draws.setdefault(request.request_id, []).append(
                    Draw(parent_id, candidates.token_id, candidates)
                )
                if request.request_id not in self.searches:
                    self.searches[request.request_id] = BeamStrategy(
                        request, group.reserved_ids, NoText
                    )
            elif sample.sequence_id != parent_id:
                edits.append(Fork(parent_id, sample.sequence_id, sample.sample_index))
                edits += self.appended(
                    group.request, sequence.token_ids, sample.sequence_id, token_id
                )
            elif plan.rows[sample.row].parents:
                drawn = after.setdefault(parent_id, [])
                if parent_id not in ended:
                    new = self.appended(
                        group.request, [*sequence.token_ids, *drawn], parent_id, token_id
                    )
                    edits += [replace(new[0], drafted=drafted), *new[1:]]  # type: ignore[type-var]
                    ended |= {parent_id} if new[1:] else set()
                    drawn.append(token_id)
                    self.num_right += drafted
            else:
                edits += (change or self.edits_of)(group, sequence, token_id)
        for request_id, drawn in draws.items():
            edits += self.searches[request_id].advance(drawn)
        touched = scheduler.commit(plan, edits)
        scheduler.check()
        for row in plan.rows:
            sequence = sequences[row.sequence_id][1]
            if row.parents and not sequence.finished:
                tables = manager.block_tables(row.sequence_id)
                num_computed = sequence.num_computed_tokens
                assert num_computed == len(sequence.token_ids) - 1, "a right draft is computed"
                num_blocks = manager.blocks_for(num_computed)
                assert all(len(table) == num_blocks for table in tables), "wrong drafts keep blocks"
                self._check_row(tables, sequence.token_ids[:num_computed], roots[row.sequence_id])
        check_cached(scheduler.block_manager, self.device)
        return touched

    def _plan(self) -> StepPlan | None:
        """Returns the next plan, which drafts must not change in anything but drafts."""
        drafts = {} if self.propose is None else self.propose(self.scheduler)
        if not drafts:
            return self.scheduler.plan()
        without = copy.deepcopy(self.scheduler).plan()
        plan = self.scheduler.plan(Drafts(drafts))
        assert plan is not None and without is not None
        assert len(plan.rows) == len(without.rows), "a draft is in somebody's way"
        bare = [
            row._replace(
                token_ids=row.token_ids[: len(row.token_ids) - len(row.parents)],
                parents=(),
                block_tables=tuple(
                    table[: len(bare)]
                    for table, bare in zip(row.block_tables, other.block_tables, strict=True)
                ),
            )
            for row, other in zip(plan.rows, without.rows, strict=True)
        ]
        samples = [
            sample
            for sample in plan.samples
            if not (plan.rows[sample.row].parents and sample.offset)
        ]
        assert replace(plan, rows=tuple(bare), samples=tuple(samples)) == without, (
            "a draft is in somebody's way"
        )
        return plan

    def _check_row(
        self, tables: tuple[tuple[int, ...], ...], known: list[int], root: object
    ) -> None:
        windows = (self.device.window, *self.device.further_windows)
        for table, window in zip(tables, windows, strict=True):
            assert self.device.read_window(table, len(known), window) == (
                known[-window:] if window else known
            )
            assert self.device.context(table, len(known), root) == context_of(known, root), (
                "computed behind another prefix"
            )

    def scores(self, plan: StepPlan) -> list[Edit]:
        """Returns the tokens that the plan asks for, after what the device reads before them."""
        edits: list[Edit] = []
        for row in plan.rows:
            first = row.start + row.first_scored + 1
            scored = [
                score(self.device.read(row.block_tables[0], p), t)
                for p, t in enumerate(row.scored, first)
            ]
            if scored:
                assert first + len(scored) <= row.context_length + 1, "a score before its logits"
                edits.append(Score(row.sequence_id, first, tuple(scored)))
        return edits

    def lose_pages(self) -> None:
        self.scheduler.lose_pages()
        windows = (self.device.window, *self.device.further_windows)
        self.device = FakeDevice(len(self.device.slots), self.device.block_size, windows)
        self.scheduler.check()

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished:
                return
            self.step()
        raise AssertionError(f"unfinished after {max_steps} steps")

    def edits_of(self, group: SequenceGroup, sequence: Sequence, token_id: int) -> list[Edit]:
        """Samples: the token is appended, and the first draw of a request with n > 1 forks off
        samples.

        They are those that the plan did not fork off.
        """
        request = group.request
        edits: list[Edit] = []
        drawn = {sequence.sequence_id: token_id}
        if len(group.sequences) < request.params.n and not group.child_ids:
            banned = request.eos_token_ids if request.params.min_tokens else ()
            for sample_index in range(1, request.params.n):
                child_id = self.new_sequence_id()
                edits.append(Fork(sequence.sequence_id, child_id, sample_index))
                seen = (
                    sequence.token_ids[-self.device.window :]
                    if self.device.window
                    else sequence.token_ids
                )
                drawn[child_id] = draw(seen, request.seed, sample_index, banned)
        for sequence_id, token in drawn.items():
            edits += self.appended(request, sequence.token_ids, sequence_id, token)
        return edits

    def appended(
        self, request: Request, known: list[int], sequence_id: int, token_id: int
    ) -> list[Edit]:
        edits: list[Edit] = [Append(sequence_id, token_id)]
        if ends(request, [*known, token_id]):
            edits.append(
                Finish(sequence_id, "stop" if token_id in request.eos_token_ids else "length")
            )
        return edits

    def _check_preemption(self, plan: StepPlan, before: tuple[SequenceGroup, ...]) -> None:
        gave_way = [group.request.request_id for group in before][
            len(before) - len(plan.preempted) :
        ]
        assert list(plan.preempted) == gave_way[::-1], "the highest ranks are preempted first"
        assert {group.request.request_id for group in before} <= {
            *plan.preempted,
            *(group.request.request_id for group in self.scheduler.running),
        }, "somebody was preempted and is not named"
        assert self.scheduler.num_running > 0 and len(plan.preempted) < max(1, len(before)), (
            "the first was preempted"
        )
        assert not (plan.preempted and plan.swap_in), "a step admits or preempts, never both"
        in_step = {row.sequence_id for row in plan.rows}
        assert not in_step & {s.sequence_id for g in self.scheduler.waiting for s in g.sequences}
        first = self.scheduler.running[0]
        whose, missed = self._steps_missed
        missed = missed + 1 if whose is first else 1
        self._steps_missed = (
            first,
            0 if in_step & {s.sequence_id for s in first.sequences} else missed,
        )
        assert self._steps_missed[1] <= 1, "the first stands still"


def check_cached(manager: BlockManager, device: FakeDevice) -> None:
    """Asserts that every block of the prefix index holds what the index says, to the last slot."""
    for block in manager.groups[0].pool.kept_blocks():
        assert manager.cached is not None
        own_tokens = manager.cached.index.entry(block).token_ids[: manager.block_size]
        assert tuple(device.slots[block]) == own_tokens, f"block {block} lies"


def check_limits(
    plan: StepPlan,
    scheduler: Scheduler,
    sequences: dict[int, Sequence],
    requests: dict[int, Request],
) -> None:
    """Asserts that the backend's shapes hold the plan, that its parts fit together, and that nobody
    writes where others read.
    """
    limits, manager = scheduler.limits, scheduler.block_manager
    block_size = manager.block_size
    lengths = [len(row.token_ids) for row in plan.rows]
    assert lengths and min(lengths) > 0
    num_rows = max(len(lengths), 0 if plan.verifies else len(plan.samples))
    if plan.verifies:
        holds = [rows >= num_rows and length >= max(lengths) for rows, length in limits.verified]
        assert any(holds) and [len(row.token_ids) - len(row.parents) for row in plan.rows] == [
            1
        ] * len(lengths)
        assert limits.trees or not plan.branches
        stream = [
            (index, offset) for index, length in enumerate(lengths) for offset in range(length)
        ]
        assert [(sample.row, sample.offset) for sample in plan.samples] == stream, (
            "a token without a draw behind it"
        )
    elif max(lengths) == 1 and not any(row.scored for row in plan.rows):
        assert num_rows <= limits.max_rows
    else:
        assert sum(lengths) <= limits.max_tokens and num_rows <= limits.max_chunk_rows
        decoding = [
            row
            for row in plan.rows
            if sequences[row.sequence_id].num_pending_tokens == 1 and row.start > 0
        ]
        assert limits.mixed or not decoding, "decoding rows in a step with prompts"
    reaching = {}
    for index, row in enumerate(plan.rows):
        sequence = sequences[row.sequence_id]
        assert row.start == sequence.num_computed_tokens
        known_until = row.context_length - len(row.parents)
        for group, table in zip(manager.groups, row.block_tables, strict=True):
            num_passed, window = table.count(0), group.sliding_window
            assert num_passed == 0 or (
                window is not None and num_passed * block_size <= row.start - window + 1
            ), "a hole"
            written = table[row.start // block_size : manager.blocks_for(row.context_length)]
            assert len(written) == manager.blocks_for(row.context_length) - row.start // block_size
            assert all(group.pool.is_writable(block) for block in written), (
                "written to a block that others have"
            )
        request = requests[row.sequence_id]
        assert row.context_length < request.max_total_tokens, "a token that is never wanted"
        assert not (request.beam and row.parents), "a beam has drafts"
        assert row.token_ids[: known_until - row.start] == tuple(
            sequence.token_ids[row.start : known_until]
        )
        if known_until == sequence.num_known_tokens:
            reaching[index] = row.sequence_id
    # the last draw of a row is its own sequence's
    sampled = {sample.row: sample.sequence_id for sample in plan.samples}
    first = [
        sample.sequence_id
        for sample in plan.samples
        if not (plan.rows[sample.row].parents and sample.offset)
    ]
    assert sampled == reaching and len(set(first)) == len(first)
    queue = scheduler._requests._queue
    first_come = isinstance(queue, FirstCome) and not isinstance(queue, ByPriority)
    order = {sequence_id: index if first_come else 0 for index, sequence_id in enumerate(sequences)}
    decoding_first = []
    for row in plan.rows:
        # a prompt of one token may be taken for either kind
        if row.start or len(row.token_ids) > 1:
            decoding_first.append(
                (sequences[row.sequence_id].num_pending_tokens > 1, order[row.sequence_id])
            )
    assert decoding_first == sorted(decoding_first), (
        "single tokens first, each kind in order of arrival"
    )
