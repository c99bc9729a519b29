"""When a drafter on the device follows the text, and whom it can draft for: with a controller that is told what to want."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from jaxpage.settings.sampling_params import SamplingParams
from jaxpage.shapes import MOST_DRAFTS
from jaxpage.speculation.controller import MOST_NAP
from jaxpage.speculation.costs import Costs
from jaxpage.speculation.following import KEEPS, PATIENCE, SHARE, Following
from jaxpage.step.limits import StepLimits
from jaxpage.step.plan import Row, Sample, StepPlan

LIMITS = StepLimits(4, 64, 4, mixed=True, verified=((4, 8),))


def plan_of(*rows: tuple[int, int], forks: dict[int, int] | None = None) -> StepPlan:
    """rows: sequences and where they begin. forks: of a new sequence, the row that it is drawn from."""
    made = tuple(Row(sequence_id, start, (1,), (1,)) for sequence_id, start in rows)
    drawn = [(index, row.sequence_id) for index, row in enumerate(made)] + [(r, s) for s, r in (forks or {}).items()]
    samples = tuple(Sample(row, 0, sequence_id, SamplingParams(), 0, 0, 1) for row, sequence_id in drawn)
    return StepPlan(0, made, samples)


def wishes(*, drafts: bool = False, levels: int = 3) -> Any:
    costs = Costs()
    costs.at_start(LIMITS.shape(1, 0), 1.0)
    return SimpleNamespace(drafts=drafts, levels_ahead=levels, num_looks=0, costs=costs)


def run(following: Following, plan: StepPlan, num_tokens: int | None = None) -> int | None:
    """A step that gave so many tokens; None: one to each row."""
    levels = following.levels(plan)
    following.ran(plan)
    following.paid(plan, len(plan.rows) if num_tokens is None else num_tokens)
    return levels


def test_without_a_controller_it_always_drafts_as_far_as_there_is_room() -> None:
    following = Following(LIMITS, None, block_size=4)
    for _ in range(2 * PATIENCE):
        assert run(following, plan_of((1, 5))) == 7
    assert following.ready == {1}


def test_it_rests_when_nobody_wants_drafts_and_begins_again_with_a_new_request() -> None:
    controller = wishes(levels=0)
    following = Following(LIMITS, controller, block_size=4)
    controller.costs.ahead.at_start(LIMITS.shape(1, 0), following=0.1, first=0.1, farthest=0.1)
    steps = [run(following, plan_of((1, 5))) for _ in range(PATIENCE + 1)]
    assert steps == [0] * PATIENCE + [None] and following.has_lost(1)
    rest = round(0.1 / SHARE * PATIENCE)
    assert [run(following, plan_of((1, 5))) for _ in range(rest + 50)] == [None] * (rest + 50)
    assert run(following, plan_of((1, 5), (2, 0))) == 0
    assert following.has_lost(1) and not following.has_lost(2)


def test_a_look_that_found_nothing_ends_its_patience() -> None:
    controller = wishes()
    following = Following(LIMITS, controller, block_size=4)
    for _ in range(10):
        assert run(following, plan_of((1, 5))) == 3
    controller.num_looks = 1
    assert [run(following, plan_of((1, 5))) for _ in range(KEEPS + 2)] == [3] * KEEPS + [None] * 2


def test_while_drafts_are_wanted_it_never_rests() -> None:
    controller = wishes(drafts=True)
    following = Following(LIMITS, controller, block_size=4)
    assert {run(following, plan_of((1, 5))) for _ in range(3 * PATIENCE)} == {3}
    controller.drafts = False
    assert [run(following, plan_of((1, 5))) for _ in range(KEEPS)] == [3] * (KEEPS - 1) + [None]


def test_it_rests_when_drafts_gain_less_than_it_takes() -> None:
    """Though they are wanted: what its following of prompts takes is more than they gain with the few tokens behind them."""
    for num_tokens, prompt_token, rests in ((4, 0.1, False), (4, 0.5, True), (1, 0.0, True)):
        controller = wishes(drafts=True)
        following = Following(LIMITS, controller, block_size=4)
        for shape in ((1, 1), (1, 4), LIMITS.shape(1, 3)):
            controller.costs.at_start(shape, 1.0)
            controller.costs.ahead.at_start(shape, following=0.1, first=0.4, farthest=0.1 + 0.3 * MOST_DRAFTS)
        controller.costs.ahead.prompt_token = prompt_token
        prompt = dataclasses.replace(plan_of((1, 0)), rows=(Row(1, 0, (1,) * 16, (1,)),))
        drafted = dataclasses.replace(plan_of((1, 16)), rows=(Row(1, 16, (1,) * 4, (1,), (0, 1, 2)),))
        drafted = dataclasses.replace(drafted, samples=drafted.samples * 4)
        for _ in range(30):
            run(following, prompt)
            followed = [run(following, drafted, num_tokens) for _ in range(2)]
        assert (followed[-1] is None) == rests


def rests_where_one_is_slow(num_steps: int, cost: float, num_full: int = 2, cost_of_full: float = 4.0) -> bool:
    """Batches of four, in each of which three sequences are faster and end, and the fourth goes on by itself.

    In so many steps by itself the fourth gets four tokens, each for `cost` steps without drafts. Full steps are worth four of those.
    """
    limits = StepLimits(4, 64, 4, mixed=True, decoded=(1, 4), verified=((4, 8),) * 2, streams=((1, 4), (4, 16)))
    controller = wishes(drafts=True)
    following = Following(limits, controller, block_size=4)
    costs = controller.costs
    for shape, seconds in {(1, 1): 1.0, (4, 4): 1.0, (1, 4): cost, (4, 16): cost_of_full}.items():
        costs.at_start(shape, seconds)
    costs.ahead.prompt_token = 0.05
    for batch in range(100):
        slow, *fast = range(4 * batch, 4 * batch + 4)
        places = [{slow: 8 + step} | dict.fromkeys(fast, 8 + 5 * step) for step in range(num_full)]
        places += [{slow: 8 + num_full + 4 * step} for step in range(num_steps)]
        prompts = tuple(Row(sequence_id, 0, (1,) * 8, (1,)) for sequence_id in (slow, *fast))
        levels = [run(following, dataclasses.replace(plan_of(), rows=prompts))]
        for place in places:
            rows = tuple(Row(sequence_id, start, (1,) * 4, (1,), (0, 1, 2)) for sequence_id, start in place.items())
            step = dataclasses.replace(plan_of(*place.items()), rows=rows)
            step = dataclasses.replace(step, samples=tuple(itertools.chain(*[[each] * 4 for each in step.samples])))
            levels.append(run(following, step, 4 * len(rows)))
        if None in levels:
            return True
        following.forget(places[0])
    return False


def test_what_the_last_rows_of_a_batch_gain_is_as_much_as_rows_of_a_whole_batch_would() -> None:
    """Without drafts all four would end together: four tokens of one of them are worth one step, and not four."""
    assert rests_where_one_is_slow(0, 2.0), "the following of prompts is for nothing"
    assert rests_where_one_is_slow(1, 2.0), "and the last step takes two for what is worth one"
    assert not rests_where_one_is_slow(2, 0.1), "last steps that are cheap enough pay for the prompts"


def test_what_all_have_gained_counts_until_the_last_has_ended() -> None:
    """Else a drafter would rest while it drafts for the slowest, who is dear without it as well."""
    assert not rests_where_one_is_slow(4, 3.5, num_full=5, cost_of_full=1.0)
    assert rests_where_one_is_slow(4, 3.5, num_full=5, cost_of_full=4.0)


def test_who_goes_on_for_long_is_by_itself() -> None:
    """From where it has come as far as those that have ended."""
    assert not rests_where_one_is_slow(12, 2.0)


def test_behind_prompts_nothing_is_drafted_while_others_wait() -> None:
    """The next step computes their prompts, and verifies nothing; but where prompts and decoding alternate, it decodes."""
    following = Following(LIMITS, None, block_size=4)
    prompt = dataclasses.replace(plan_of((1, 0)), rows=(Row(1, 0, (1,) * 5, (1,)),))
    assert following.levels(prompt, others_wait=True) == 0
    assert following.levels(prompt) == following.levels(plan_of((1, 5)), others_wait=True) == 7
    alternating = Following(dataclasses.replace(LIMITS, mixed=False), None, block_size=4)
    assert alternating.levels(prompt, others_wait=True) == 7


def test_where_prompts_and_decoding_alternate_nothing_is_drafted_between_two_prompts() -> None:
    following = Following(dataclasses.replace(LIMITS, mixed=False), None, block_size=4)
    prompt = dataclasses.replace(plan_of((2, 0)), rows=(Row(2, 0, (1,) * 5, (1,)),))
    found = [following.levels(plan, others_wait=True) for plan in (prompt, plan_of((1, 5)), plan_of((1, 6)))]
    assert found == [7, 0, 7], "behind two steps that decode nobody can be admitted"
    assert [following.levels(plan) for plan in (prompt, plan_of((1, 7)))] == [7, 7], "nobody waits"


def test_behind_a_prompt_nothing_is_drafted_while_most_of_those_that_decode_next_are_others() -> None:
    following = Following(dataclasses.replace(LIMITS, mixed=False), wishes(), block_size=4)
    prompts = [dataclasses.replace(plan_of((n, 0)), rows=(Row(n, 0, (1,) * 5, (n,)),)) for n in (3, 4)]
    assert following.levels(prompts[0]) == 3, "nobody decodes yet"
    assert [following.levels(plan) for plan in (plan_of((1, 5), (2, 5)), prompts[1])] == [3, 0]
    following.forget([1, 2])
    assert following.levels(prompts[1]) == 3


def test_a_fork_of_as_many_draws_as_its_prompt_has_tokens_is_no_decoding() -> None:
    """What the drafter has not computed of a prompt, it has not of its samples."""
    following = Following(LIMITS, wishes(), block_size=4)
    samples = tuple(Sample(0, 2, child, SamplingParams(), 0, 0, 3) for child in (5, 6, 4))
    plan = StepPlan(0, (Row(4, 0, (1,) * 3, (1,)),), samples)
    assert plan.num_tokens == len(plan.samples) and not plan.decodes
    with mock.patch.object(following, "_choose", return_value=None):
        following.levels(plan)
    assert [following.has_lost(sequence_id) for sequence_id in (4, 5, 6)] == [True] * 3


def test_in_a_rest_the_controller_is_seldom_asked() -> None:
    controller = wishes(levels=0)
    following = Following(LIMITS, controller, block_size=4)
    for _ in range(PATIENCE):
        run(following, plan_of((1, 5)))
        assert following.nap == 0
    run(following, plan_of((1, 5)))
    assert following.nap == MOST_NAP, "until it follows again"
    assert run(following, plan_of((2, 0))) == 0 and following.nap == 0
    controller.costs.ahead.at_start(LIMITS.shape(1, 0), following=0.1, first=0.1, farthest=0.1)
    for _ in range(PATIENCE + 1):
        run(following, plan_of((2, 0)))
    assert following.nap == MOST_NAP


def test_it_begins_again_with_a_request_that_finds_its_beginning_computed() -> None:
    following = Following(LIMITS, wishes(levels=0), block_size=4)
    for _ in range(PATIENCE + 1):
        run(following, plan_of((1, 5)))
    assert run(following, plan_of((1, 5))) is None
    assert run(following, plan_of((2, 4))) == 0


def test_steps_without_draws_draft_nothing() -> None:
    following = Following(LIMITS, None, block_size=4)
    assert run(following, dataclasses.replace(plan_of((1, 0)), samples=())) == 0 and not following.ready


def test_a_shape_that_does_not_draft_makes_nobody_ready() -> None:
    following = Following(LIMITS, None, block_size=4)
    assert following.levels(plan_of((1, 5))) == 7
    following.ran(plan_of((1, 5)), drafted=False)
    assert not following.ready and not following.has_drafted


SIZE = 2  # slots of a block
events = st.lists(
    st.tuples(st.booleans(), st.integers(0, 3), st.integers(1, 3), st.integers(0, 2), st.booleans()), max_size=40
)


@given(events)
def test_it_drafts_for_those_alone_whose_every_token_it_has_computed(
    history: list[tuple[bool, int, int, int, bool]],
) -> None:
    """Against a record of every slot. Sequences grow, or new ones adopt the first blocks of others, as from the prefix cache; some begin
    anew, and some are forked."""
    following = Following(LIMITS, None, block_size=SIZE)
    computed: dict[int, dict[int, bool]] = {}  # by block and slot
    tables: dict[int, list[int]] = {}
    lengths: dict[int, int] = {}
    new_ids = itertools.count()
    new_blocks = itertools.count(1)
    for follows, who, num_tokens, adopted, forks in history:
        sequence_id = sorted(tables)[who] if who < len(tables) else next(new_ids)
        if sequence_id not in tables:
            source = min(tables, default=None)
            full = 0 if source is None else min(adopted, lengths[source] // SIZE)
            tables[sequence_id], lengths[sequence_id] = tables[source][:full] if source is not None else [], full * SIZE
        elif adopted == 2 and forks:  # it starts over
            tables[sequence_id], lengths[sequence_id] = [], 0
        start = lengths[sequence_id]
        table = tables[sequence_id]
        for position in range(start, start + num_tokens):
            if position // SIZE == len(table):
                table.append(next(new_blocks))
                computed[table[-1]] = {}
            computed[table[position // SIZE]][position % SIZE] = follows
        lengths[sequence_id] = start + num_tokens
        row = Row(sequence_id, start, (1,) * num_tokens, tuple(table))
        sample = Sample(0, num_tokens - 1, sequence_id, SamplingParams(), 0, 0, 1)
        plan = StepPlan(0, (row,), (sample,))
        with mock.patch.object(following, "_choose", return_value=3 if follows else None):
            following.levels(plan)
        following.ran(plan)
        whole = all(all(slots.values()) for slots in (computed[block] for block in table))
        assert following.has_lost(sequence_id) == (not whole)
        assert following.ready == ({sequence_id} if follows and whole else set())
