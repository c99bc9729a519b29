"""The policies: each queue against a naive model, shares under load, and what preemption can never
do.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpage.scheduling import POLICIES, Preemption, WaitingQueue
from jaxpage.scheduling.admitting import spare_blocks
from jaxpage.scheduling.queues import ByPriority, FairShare
from jaxpage.step.request import SequenceGroup
from tests.support.fake_device import Driver, alone, make_group
from tests.support.sweeps import examples, few
from tests.test_scheduler import make_driver


class Naive:
    """The order of a policy by its definition: everything is sorted anew whenever somebody asks."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.new: list[SequenceGroup] = []
        self.preempted: list[SequenceGroup] = []
        self.counters: Counter[str | None] = Counter()
        self.level = 0

    def add(self, group: SequenceGroup) -> None:
        user = group.request.params.user
        waiting = {other.request.params.user for other in self.new}
        if user not in waiting:
            floor = min((self.counters[other] for other in waiting), default=self.level)
            self.counters[user] = max(self.counters[user], floor)
        self.new.append(group)

    def order(self) -> list[SequenceGroup]:
        if self.policy == "priority":
            return sorted(
                [*self.preempted, *self.new], key=lambda g: (g.request.params.priority, g.arrival)
            )
        preempted = sorted(
            self.preempted, key=lambda g: g.arrival if self.policy == "fcfs" else g.admission
        )
        if self.policy == "fcfs":
            return [*preempted, *sorted(self.new, key=lambda g: g.arrival)]
        waiting: dict[str | None, list[SequenceGroup]] = {}
        for group in self.new:
            waiting.setdefault(group.request.params.user, []).append(group)
        # Of users with equal counters the one comes first that began to wait first.
        began = {user: self.began[user] for user in waiting}
        users = sorted(waiting, key=lambda user: (self.counters[user], began[user]))
        return [*preempted, *(group for user in users for group in waiting[user])]

    began: dict[str | None, int]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@examples(100)
@given(events=st.lists(st.tuples(st.sampled_from("aaapprs"), st.integers(0, 10**6)), max_size=60))
def test_the_queue_is_in_the_order_of_its_definition(policy, events):
    queue, naive = POLICIES[policy](), Naive(policy)
    naive.began = {}
    running: list[SequenceGroup] = []
    arrivals, admissions = itertools.count(1), itertools.count(1)
    for kind, number in events:
        if kind == "a":  # arrives
            group = group_of(number)
            group.arrival = next(arrivals)
            if group.request.params.user not in {g.request.params.user for g in naive.new}:
                naive.began[group.request.params.user] = group.arrival
            naive.add(group)
            queue.add(group)
        elif kind == "p" and naive.order():  # the first is admitted ("p": gets its place)
            group = queue.first()
            assert group is naive.order()[0]
            queue.remove(group)
            if group.num_preemptions:
                naive.preempted.remove(group)
            else:
                naive.new.remove(group)
                group.admission = next(admissions)
                user = group.request.params.user
                naive.level = max(naive.level, naive.counters[user])
                naive.counters[user] += 3
                queue.admitted(group, 3)
            running.append(group)
            running.sort(key=queue.rank)
        elif kind == "r" and running:  # is preempted
            if number % 2:
                group = running.pop()
                queue.put_back(group)
                group.num_preemptions += 1
                naive.preempted.append(group)
            else:  # or is aborted while it waits
                if naive.new:
                    group = naive.new.pop(number % len(naive.new))
                    queue.remove(group)
        elif kind == "s" and running:  # is served
            group = running[number % len(running)]
            naive.counters[group.request.params.user] += 2
            queue.served(group, 1)
        assert len(queue) == len(naive.order())
        assert list(queue) == naive.order()
        assert queue.first() is next(iter(naive.order()), None)


def group_of(number: int) -> SequenceGroup:
    rng = random.Random(number)
    return make_group(
        f"{number} {rng.random()} {id(rng)} {next(_UNIQUE)}",
        0,
        range(3),
        priority=rng.randint(-1, 2),
        user=rng.choice([None, "ann", "bob"]),
    )


_UNIQUE = itertools.count()


def backlog(
    driver: Driver, user: str, count: int, *, num_prompt: int, max_tokens: int, first_id: int
) -> None:
    for index in range(count):
        prompt = [(first_id + index) % 40, *range(num_prompt - 1)]
        group = make_group(
            f"{user} {index}",
            first_id + index,
            prompt,
            max_tokens=max_tokens,
            ignore_eos=True,
            user=user,
        )
        driver.scheduler.add(group)


def groups_of(driver: Driver) -> dict[int, SequenceGroup]:
    groups = (*driver.scheduler.running, *driver.scheduler.waiting)
    return {sequence.sequence_id: group for group in groups for sequence in group.sequences}


def service(driver: Driver) -> Counter[str]:
    """Returns weighted tokens by user, off the plans: prompt tokens once, drawn tokens twice."""
    weights: Counter[str] = Counter()
    highest: Counter[int] = Counter()
    groups = groups_of(driver) | driver.seen  # type: ignore[attr-defined]
    for plan in driver.plans:
        for row in plan.rows:
            request = groups[row.sequence_id].request
            num_prompt = len(request.prompt_token_ids)
            upto = min(row.context_length, num_prompt)
            weights[request.params.user or ""] += max(
                0, upto - max(row.start, highest[row.sequence_id])
            )
            highest[row.sequence_id] = max(highest[row.sequence_id], upto)
        for sample in plan.samples:
            weights[groups[sample.sequence_id].request.params.user or ""] += 2
    return weights


@pytest.mark.parametrize("policy", ["fair", "fcfs"])
def test_who_floods_the_queue_gets_no_larger_share(policy):
    """Both users always have requests that wait.

    The bound is that of virtual token counters (Sheng et al., theorem 4.4): the service of two
    backlogged users differs by at most twice the larger of the longest prompt and what the running
    batch can hold.
    """
    driver = make_driver(num_blocks=65, block_size=4, max_num_seqs=4, max_tokens=16, policy=policy)
    driver.seen = {}  # type: ignore[attr-defined]
    backlog(driver, "flood", 60, num_prompt=9, max_tokens=6, first_id=0)
    backlog(driver, "modest", 20, num_prompt=5, max_tokens=12, first_id=1000)
    driver.seen = groups_of(driver)  # type: ignore[attr-defined]
    largest = 0
    while {g.request.params.user for g in driver.scheduler.waiting} == {"flood", "modest"}:
        driver.step()
        actual = service(driver)
        largest = max(largest, abs(actual["flood"] - actual["modest"]))
    bound = 2 * max(9, 4 * (2 * 12 + 9))  # in a batch of 4: the most that one of them can be owed
    assert (largest <= bound) == (policy == "fair"), f"{largest} against {bound}"


def test_the_urgent_go_first_and_give_way_last():
    driver = make_driver(
        num_blocks=9, block_size=2, max_num_seqs=2, max_tokens=16, policy="priority"
    )
    for index, priority in enumerate((2, 2, 0, 1)):
        prompt = [index, *range(3)]
        driver.scheduler.add(
            make_group(str(index), index, prompt, max_tokens=8, ignore_eos=True, priority=priority)
        )
    driver.step()
    assert [group.request.request_id for group in driver.scheduler.running] == ["2", "3"]
    driver.run()
    preempted = [request_id for plan in driver.plans for request_id in plan.preempted]
    assert "3" in preempted and "2" not in preempted
    order = list(dict.fromkeys(row.sequence_id for plan in driver.plans for row in plan.rows))
    assert order == [2, 3, 0, 1]


def contend(seed: int, **settings_: Any) -> Driver:
    """Returns a pool far smaller than the demand, and requests of adversarial lengths.

    They are one token or all that fits, or many alike.
    """
    rng = random.Random(seed)
    alike = seed % 2 == 1
    driver = make_driver(
        num_blocks=33 if alike else 17, block_size=4, max_num_seqs=12, max_tokens=16, **settings_
    )
    for index in range(24):
        num_prompt = rng.choice([5, 7, 9] if alike else [1, 4, 5, 31, 60])
        max_tokens = 30 if alike else rng.choice([1, 3, 64 - num_prompt])
        group = make_group(
            str(index),
            index,
            rng.choices(range(40), k=num_prompt),
            max_tokens=max_tokens,
            ignore_eos=True,
            n=1 if num_prompt > 15 else rng.choice([1, 2]) if max_tokens <= 3 else 1,
            priority=rng.randint(0, 2),
            user=rng.choice(["a", "b", "c"]),
        )
        driver.scheduler.add(group)
        driver.groups = [*getattr(driver, "groups", []), group]  # type: ignore[attr-defined]
    return driver


@pytest.mark.parametrize(
    ("policy", "mode", "wait"),
    few(
        itertools.product(sorted(POLICIES), ["recompute", "swap"], ["readmitted", "completed"]),
        [("fair", "swap", "readmitted"), ("fcfs", "recompute", "completed")],
    ),
)
def test_everybody_finishes_and_nobody_thrashes(policy, mode, wait):
    """Whoever comes back has a block for each running sequence ahead: no group is preempted twice
    within a block's worth of its steps.
    """
    for seed in range(6):
        driver = contend(seed, policy=policy, num_host_blocks=16, preemption=Preemption(mode, wait))
        for group in driver.groups:  # type: ignore[attr-defined]
            group.last_resumed = None  # type: ignore[attr-defined]
        num_steps_alone = sum(len(alone(g.request)) * g.request.params.n + 4 for g in driver.groups)  # type: ignore[attr-defined]
        resumed_at: dict[str, int] = {}
        while driver.scheduler.has_unfinished:
            running = {group.request.request_id for group in driver.scheduler.running}
            driver.step()
            plan = driver.plans[-1]
            for request_id in plan.preempted:
                if request_id in resumed_at:
                    assert len(driver.plans) - resumed_at[request_id] >= 4, (
                        "it came back only to be preempted"
                    )
            for group in driver.scheduler.running:
                if group.num_preemptions and group.request.request_id not in running:
                    resumed_at[group.request.request_id] = len(driver.plans)
            assert len(driver.plans) < 10 * num_steps_alone
        counts = driver.scheduler.num_preemptions
        assert counts[mode] > 0 and (
            mode == "recompute" or sum(len(plan.swap_in) for plan in driver.plans) > 0
        )
        for group in driver.groups:  # type: ignore[attr-defined]
            for sequence in group.sequences:
                assert sequence.output_token_ids == alone(group.request, sequence.sample_index)


def test_the_reserve_is_what_keeps_the_preempted_from_thrashing(monkeypatch):
    """This is the control of the test above: with the watermark alone, some come back and are
    preempted at once.
    """
    monkeypatch.setattr(
        "jaxpage.scheduling.running_set.spare_blocks",
        lambda usable, **options: spare_blocks(usable, **{**options, "resumes": False}),
    )
    with pytest.raises(AssertionError, match="came back only to be preempted"):
        test_everybody_finishes_and_nobody_thrashes("fcfs", "recompute", "readmitted")


def test_new_ones_wait_for_the_preempted_as_the_setting_says():
    """Under the paper's literal sentence nobody new runs from a preemption until the preempted have
    finished.
    """
    for wait, overtakes in (("readmitted", True), ("completed", False)):
        differs = False
        for seed in range(6):
            driver = contend(seed, preemption=Preemption("recompute", wait))  # type: ignore[arg-type]
            unfinished: set[str] = set()
            started: set[int] = set()
            while driver.scheduler.has_unfinished:
                for group in driver.step():
                    if group.finished:
                        unfinished.discard(group.request.request_id)
                plan = driver.plans[-1]
                new = {row.sequence_id for row in plan.rows if row.start == 0} - started
                held_up = unfinished - {g.request.request_id for g in driver.scheduler.waiting}
                differs |= bool(new and held_up)
                started |= {row.sequence_id for row in plan.rows}
                unfinished |= set(plan.preempted)
        assert differs == overtakes


def test_a_better_newcomer_runs_where_nobody_does_and_the_preempted_come_later():
    """New requests wait for the preempted to complete only while something runs: the preempted one
    is not first here.
    """
    driver = make_driver(
        num_blocks=6,
        block_size=4,
        policy="priority",
        preemption=Preemption("recompute", "completed"),
    )
    scheduler = driver.scheduler
    for name, priority in (("old", 1), ("gives way", 5)):
        group = make_group(
            name, priority, range(8), max_tokens=10, ignore_eos=True, priority=priority
        )
        scheduler.add(group)
    while not scheduler.num_waiting or not scheduler.waiting[0].num_preemptions:
        driver.step()
    scheduler.abort("old")
    assert scheduler.num_running == 0
    scheduler.add(make_group("new", 7, range(8), max_tokens=2, ignore_eos=True, priority=0))
    driver.step()
    assert scheduler.running[0].request.request_id == "new"
    driver.run()


def test_who_comes_after_a_user_that_had_the_engine_alone_has_no_head_start():
    queue = FairShare()

    arrivals, order = itertools.count(), []

    def come(user: str) -> None:
        group = make_group(f"{user} {next(arrivals)}", 0, range(3), user=user)
        queue.add(group)

    def serve(num_tokens: int) -> None:
        group = queue.first()
        assert group is not None
        queue.remove(group)
        queue.admitted(group, num_tokens)
        order.append(group.request.params.user)

    for _ in range(2):
        come("A")
        serve(100)  # A was at 100 when it was last admitted, and is at 200
    for user in "BBBBBBBBBA":
        come(user)
    for _ in range(10):
        serve(30)
    assert order == [*"AA", *"BBBB", "A", *"BBBBB"], (
        "B begins at 100, and is at 220 after four of them"
    )


def test_an_id_that_comes_again_with_another_priority_has_that_one():
    queue = ByPriority()
    before, again, other = (
        make_group(name, number, range(3), priority=priority)
        for number, (name, priority) in enumerate((("a", 0), ("a", 9), ("b", 5)))
    )
    queue.add(before)
    queue.remove(before)
    queue.add(again)
    queue.add(other)
    assert queue.first() is other


@pytest.mark.parametrize("mixed", [False, True])
def test_a_long_prompt_stalls_nobody_beyond_the_budget(mixed):
    """Between two tokens of a decoding sequence lies at most one step of other work, of at most the
    budget; none where steps mix.
    """
    driver = make_driver(
        num_blocks=129, block_size=4, max_num_seqs=4, max_tokens=16, max_chunk_rows=4, mixed=mixed
    )
    for index in range(2):
        driver.scheduler.add(
            make_group(str(index), index, range(5), max_tokens=40, ignore_eos=True)
        )
    for _ in range(4):
        driver.step()
    begun = len(driver.plans)
    driver.scheduler.add(
        make_group("long", 7, [k % 40 for k in range(200)], max_tokens=2, ignore_eos=True)
    )
    for _ in range(20):
        driver.step()
    missed = [
        len([row for row in plan.rows if row.sequence_id < 2]) == 0 for plan in driver.plans[begun:]
    ]
    assert not any(first and second for first, second in itertools.pairwise(missed))
    assert any(missed) != mixed
    assert max(plan.num_tokens for plan in driver.plans[begun:]) <= 16
    computed = sum(
        len(row.token_ids)
        for plan in driver.plans[begun:]
        for row in plan.rows
        if row.sequence_id == 7
    )
    assert computed >= (20 * 14 if mixed else 10 * 16) * 0.7, "the long prompt goes on all the same"


def test_only_so_many_users_who_do_not_wait_are_remembered():
    queue: WaitingQueue = FairShare()
    for number in range(3 * FairShare.MAX_IDLE):
        group = make_group(str(number), number, range(3), user=f"user {number}")
        queue.add(group)
        queue.remove(group)
        queue.admitted(group, 3)
    assert len(queue._idle) <= FairShare.MAX_IDLE + 1 and not queue._counters and not queue._turns  # type: ignore[attr-defined]
