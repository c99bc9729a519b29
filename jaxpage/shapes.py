"""Defines the letters that name the axes of arrays; `pallas_kernels` has its own copy of them.

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
| J | tokens guessed ahead (Medusa's heads) | X | branches of a drafter (Y = X * X: candidates) |
| Z | cache groups | | |

Arrays on the device, or bound for it, carry their axes as a suffix: `hidden_TD`, `block_table_ZBM`,
`logits_BV`. Host lists and integers keep plain names. Lengths count tokens; any other unit is in
the name (`_bytes`, `_seconds`, `_blocks`).
"""

# These take the place of a drawn token id if there is none.
NOT_FINITE = -1  # the model's logits are not finite
NOTHING_ALLOWED = -2  # the parameters of the request mask all tokens

# Limits of speculation.
MAX_DRAFTS = 63  # drafts of a sequence in a step; 64 query tokens with the token before them
# The most tokens in a distribution that drafts are drawn from, if the acceptance reads its
# probabilities.
MAX_CANDIDATES = 32

# Limits of a draw.
# W: candidates whose log probabilities leave the device when a row asks for any
NUM_CANDIDATES = 64
MAX_BIASES = 1024  # E: entries of logit_bias of one draw
