"""What drafts were drawn from stays with them on their way from a proposer into a step, or they do not go there."""

from __future__ import annotations

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.device.inputs.buckets import Bucket, make_menu
from jaxpage.device.inputs.step_inputs import TableShape, unpack
from jaxpage.engine.batch_builder import BatchBuilder
from jaxpage.replay.recorder import _drafts
from jaxpage.replay.replaying import _draft
from jaxpage.settings.sampling_params import SamplingParams
from jaxpage.shapes import MOST_CANDIDATES
from jaxpage.speculation.speculator import filter_drafts
from jaxpage.step.draft import Candidates, Draft
from jaxpage.step.plan import Row, Sample, StepPlan

IDS = np.array([[5, 3, -1], [3, 5, -1], [7, 8, 9], [2, -1, 1]], np.int32)
ODDS = np.array([[0.5, 0.5, 0], [0.75, 0.25, 0], [0.2, 0.3, 0.5], [0.4, 0, 0.6]], np.float32)
DRAFT = Draft((5, 3, 8, 1), (-1, -1, 0, 1), Candidates(IDS, ODDS))


def assert_same(draft: Draft, wanted: Draft) -> None:
    assert draft[:2] == wanted[:2] and draft.q is not None and wanted.q is not None
    np.testing.assert_array_equal(draft.q.token_ids_NW, wanted.q.token_ids_NW)
    np.testing.assert_array_equal(draft.q.probabilities_NW, wanted.q.probabilities_NW)


def test_what_is_cut_keeps_its_own():
    assert_same(DRAFT.cut(2), Draft((5, 3), (-1, -1), Candidates(IDS[:2], ODDS[:2])))
    assert_same(DRAFT.first_branch(), Draft((5, 8), (-1, 0), Candidates(IDS[[0, 2]], ODDS[[0, 2]])))
    assert_same(DRAFT.sound(20, 9), DRAFT)
    assert_same(DRAFT.sound(20, 3), DRAFT.cut(3))
    assert_same(DRAFT._replace(parents=(-1, 7, 0, 1)).sound(20, 9), DRAFT.cut(1))


@pytest.mark.parametrize(
    ("ids", "odds", "message"),
    [
        (IDS[:3], ODDS[:3], "4 drafts with q of"),
        (IDS, ODDS[:, :2], "4 drafts with q of"),
        (
            np.full((4, MOST_CANDIDATES + 1), 5),
            np.full((4, MOST_CANDIDATES + 1), 0.03),
            "33 tokens; 32 are possible",
        ),
        (IDS, ODDS * 0.9, "no distribution"),
        (IDS, ODDS * [[1], [1], [np.nan], [1]], "no distribution"),
        (IDS, np.where(IDS == 3, -0.5, ODDS) + np.where(IDS == 5, 1.0, 0), "no distribution"),
        (np.where(IDS == 9, 20, IDS), ODDS, "beyond the model's, which end at 19"),
        (np.where(IDS == 9, -1, IDS), ODDS, "beyond the model's"),
        (np.where(IDS == 8, 9, IDS), ODDS, "cannot be drawn from"),
        (IDS, np.where(IDS == 8, 0, ODDS) + np.where(IDS == 9, 0.3, 0), "cannot be drawn from"),
    ],
)
def test_what_no_draft_was_drawn_from_is_an_error(ids, odds, message):
    with pytest.raises(ValueError, match=message):
        DRAFT._replace(q=Candidates(ids, odds)).sound(20, 9)


class Forbidding:
    """A grammar that admits nothing."""

    def mask(self, sequence_id: int, drafts: tuple[int, ...] = ()) -> Any:
        return None if drafts else np.zeros(1, np.uint32)


def test_no_grammar_takes_out_what_was_drawn():
    """Of chosen drafts it does: what is certain to be wrong was not drawn by chance."""
    assert_same(filter_drafts({7: DRAFT}, {7: Forbidding()})[7], DRAFT)  # type: ignore[dict-item]
    assert not filter_drafts({7: DRAFT._replace(q=None)}, {7: Forbidding()})  # type: ignore[dict-item]


def test_a_log_gives_them_back():
    row = Row(4, 30, (1, *DRAFT.token_ids), ((3,),), parents=(0, 0, 1, 2), q=DRAFT.q)
    sequence_id, draft = _draft(*json.loads(json.dumps(_drafts(row))), vocab_size=20)
    assert sequence_id == 4
    assert_same(draft, DRAFT)
    # no padding
    assert DRAFT.q is not None and [len(ids) for ids, _ in DRAFT.q.as_lists()] == [2, 2, 3, 3]
    for wrong in (
        [],
        [[[5], [0]]] * 4,
        [[5, 3]] * 4,
        [[["x"], [1]]] * 4,
        [[[2**40], [2**40]]] * 4,
        7,
    ):
        with pytest.raises((OverflowError, TypeError, ValueError)):
            _draft(4, [5, 3, 8, 1], [-1, -1, 0, 1], wrong, vocab_size=20)


def test_a_step_is_told_what_each_draft_was_drawn_from():
    """Of chosen drafts, and of what is no draft, the token itself."""
    menu = make_menu(
        4, 16, num_drafts=(7,), max_verified_tokens=64, trees=True, q_width=MOST_CANDIDATES
    )
    builder = BatchBuilder(menu, table_width=4, block_size=16, blocks=[range(1, 9)], vocab_size=20)
    rows = (
        Row(0, 0, (6, 9), ((1,),), parents=(0,)),
        Row(1, 3, (1, *DRAFT.token_ids), ((2,),), parents=(0, 0, 1, 2), q=DRAFT.q),
        Row(2, 5, (4,), ((3,),)),
    )
    samples = tuple(
        Sample(index, offset, index, SamplingParams(), 0, 0, 9)
        for index, row in enumerate(rows)
        for offset in range(len(row.token_ids))
    )
    batch = builder.build(StepPlan(1, rows, samples))
    assert batch.bucket.q_width == MOST_CANDIDATES
    inputs = unpack(jnp.asarray(batch.packed), batch.bucket, TableShape(1, 4))
    ids, odds = np.asarray(inputs.q_ids_TW), np.asarray(inputs.q_TW)
    assert ids.shape == odds.shape == (batch.bucket.num_tokens, MOST_CANDIDATES)
    np.testing.assert_array_equal(ids[3:7, :3], IDS)
    np.testing.assert_array_equal(odds[3:7, :3], ODDS)
    assert (ids[:, 3:] == -1).all() and (odds[:, 3:] == 0).all()
    for place, token_id in ((0, 6), (1, 9), (2, 1), (7, 4)):
        assert ids[place, :2].tolist() == [token_id, -1] and odds[place, :2].tolist() == [1, 0]
    plain = make_menu(4, 16, num_drafts=(7,), max_verified_tokens=64, trees=True)
    assert {bucket.q_width for bucket in plain.buckets + menu.decode + menu.chunk} == {0}
    assert Bucket(8, 1, 8, verifies=True).q_width == 0
