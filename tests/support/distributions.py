"""Says what a sampler should draw, in float64 and by sorting, and how far counts are from it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def kept(
    logits: npt.NDArray[np.floating], top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> npt.NDArray[np.bool_]:
    """Returns what top-k, top-p and min-p leave, in this order. Ties at the cut-off of top-k stay
    in.
    """
    logits = logits.astype(np.float64)
    stays = np.ones(len(logits), bool)
    if 0 < top_k < len(logits):
        stays &= logits >= np.sort(logits)[-top_k]
    likelihood = np.where(stays, np.exp(logits - logits.max()), 0.0)
    if top_p < 1.0:
        above = np.array([likelihood[likelihood > value].sum() for value in likelihood])
        stays &= above < top_p * likelihood.sum()
    return stays & (likelihood >= min_p)


def probabilities(
    logits: npt.NDArray[np.floating],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Floats:
    """Returns the probability of each token, after temperature and truncation."""
    scaled = logits.astype(np.float64) / temperature
    weights = np.where(kept(scaled, top_k, top_p, min_p), np.exp(scaled - scaled.max()), 0.0)
    return weights / weights.sum()


def z_score(counts: npt.NDArray[np.int64], expected_shares: Floats) -> float:
    """Returns how far counts are from a distribution.

    The unit is the standard deviation of the chi-square statistic; it is infinite if the impossible
    happened.

    Cells in which less than five are expected count as one (Cochran's rule).
    """
    counts, expected = counts.ravel(), expected_shares.ravel() * counts.sum()
    if counts[expected == 0].any():
        return float("inf")
    small = expected < 5
    cells = [
        (counts[small].sum(), expected[small].sum()),
        *zip(counts[~small], expected[~small], strict=True),
    ]
    cells = [(count, mean) for count, mean in cells if mean > 0]
    degrees = len(cells) - 1
    if degrees == 0:
        return 0.0
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    return float((statistic - degrees) / np.sqrt(2 * degrees))
