"""The key of letters that every array of jaxpage is named with (repeated in `pallas_kernels`, which stands alone).

| letter | axis | letter | axis |
|---|---|---|---|
| B | rows: sequences of a step (R: its draws) | P | physical blocks of the pool |
| T | query tokens of the stream (Q: of one row) | S | slots per block |
| N | query heads | M | blocks per block-table row |
| K | key/value heads (G = N / K query heads share one) | C | context positions |
| H | head width | L | layers |
| D | model width | V | vocabulary: the width of the logits |
| F | feed-forward width | W | candidates kept per row |
| E | entries of a bias | U | words of a mask over the vocabulary |
| J | tokens that are guessed ahead (Medusa's heads) | X | branches that a drafter follows (Y = X * X: candidates) |
| Z | cache groups | | |

Arrays on the device, or bound for it, carry their axes as a suffix: `hidden_TD`, `block_table_ZBM`, `logits_BV`.
Host lists and integers keep plain names. Lengths count tokens; any other unit stands in the name (`_bytes`, `_seconds`, `_blocks`).
"""

# In place of a drawn token id, when there is none:
NOT_FINITE = -1  # the model's logits hold no number to choose by
NOTHING_ALLOWED = -2  # all tokens are masked by what the request allows, forbids and penalises

# Of speculation:
MOST_DRAFTS = 63  # of a sequence in a step: with the token before them, 64 query tokens
# tokens of a distribution that drafts are drawn from, where its probabilities are looked at
MOST_CANDIDATES = 32
