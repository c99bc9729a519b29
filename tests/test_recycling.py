"""Token recycling: the tree against its definition, written out path by path."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxpage.shapes import MAX_DRAFTS
from jaxpage.speculation import recycling
from jaxpage.speculation.medusa import search
from jaxpage.speculation.recycling import NUM_RECYCLED, RecyclingProposer
from jaxpage.step.draft import Draft
from tests.support.fake_device import make_group

VOCAB = 6
TREE = search([recycling.ACCURACIES] * recycling.MAX_LEVELS, MAX_DRAFTS)

# A step's draws: salts, the tokens that they stand after, and the seed of what is likely after
# those.
heard_steps = st.lists(
    st.tuples(
        st.lists(st.tuples(st.sampled_from([None, "a"]), st.integers(0, VOCAB - 1)), min_size=1),
        st.integers(0, 99),
    ),
    max_size=6,
)


def likely(count: int, seed: int, width: int = NUM_RECYCLED) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (count, width), np.int32)


def paths(draft: Draft | None) -> list[tuple[int, ...]]:
    return [draft.path(index) for index in range(len(draft.token_ids))] if draft else []


@given(
    heard=heard_steps,
    tree=st.booleans(),
    last=st.integers(0, VOCAB - 1),
    maximum=st.integers(1, MAX_DRAFTS),
)
def test_drafts_are_what_was_likely_the_last_time_rank_by_rank(heard, tree, last, maximum):
    proposer = RecyclingProposer(VOCAB, tree=tree)
    known: dict[tuple[str | None, int], list[int]] = {}
    for draws, seed in heard:
        salts, token_ids = zip(*draws, strict=True)
        rows = likely(len(draws), seed)
        proposer.on_top_k(salts, token_ids, rows)
        known.update(zip(draws, rows.tolist(), strict=True))
    for salt in (None, "a"):
        expected: list[tuple[int, ...]] = []
        for choice in TREE if tree else [(0,) * depth for depth in range(1, MAX_DRAFTS + 1)]:
            path = [last]
            for rank in choice:
                if (salt, path[-1]) not in known:
                    break
                path.append(known[salt, path[-1]][rank])
            else:
                expected.append(tuple(path[1:]))
        group = make_group("one", 0, [0, last], cache_salt=salt)
        assert (
            paths(proposer.propose(group.request, group.sequences[0], maximum))
            == expected[:maximum]
        )


def test_salts_that_nobody_uses_give_way(monkeypatch):
    monkeypatch.setattr(recycling, "MAX_TABLES", 2)
    monkeypatch.setattr(recycling, "MIN_IDLE_STEPS", 2)
    proposer = RecyclingProposer(VOCAB, tree=False)

    def drafts(*salts: str | None) -> list[bool]:
        groups = [make_group("one", 0, [3], cache_salt=salt) for salt in salts]
        return [
            proposer.propose(group.request, group.sequences[0], 1) is not None for group in groups
        ]

    proposer.on_top_k(["b", "a", "c"], [3] * 3, likely(3, 0))
    assert drafts("b", "a", "c", None) == [True, True, False, False]
    proposer.on_top_k(["a", "c", None], [3] * 3, likely(3, 0))
    assert drafts("b", "a", "c", None) == [
        True,
        True,
        False,
        True,
    ]  # b was used a step ago, and there is room without a salt
    proposer.on_top_k(["a", "c"], [3] * 2, likely(2, 0))
    assert drafts("b", "a", "c", None) == [False, True, True, True]


def test_models_of_fewer_tokens_than_are_kept():
    proposer = RecyclingProposer(VOCAB, tree=True)
    proposer.on_top_k([None], [3], np.array([[3, 1, 4]], np.int32))
    group = make_group("one", 0, [3])
    draft = proposer.propose(group.request, group.sequences[0], 9)
    assert (
        draft is not None
        and set(paths(draft)) >= {(3,), (1,), (4,), (3, 3), (3, 1)}
        and set(draft.token_ids) == {1, 3, 4}
    )
