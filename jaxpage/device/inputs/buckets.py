"""Decides the shape of every step; no other module decides a shape.

A step takes the smallest bucket that holds it out of a small menu. Every bucket is compiled before
service.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

# A token alone would be computed as a matrix-vector product, which XLA rounds differently from a
# matrix product: no step has fewer rows.
MIN_ROWS = 2
MIN_CHUNK = 64  # tokens; with fewer a step is hardly shorter, since it reads all weights
MIN_STREAM = 32  # tokens of an encoder; with fewer a call is hardly shorter
CHUNK_ROWS = 16  # sequences that share one prompt step, at most
# A batch of swapped blocks: large enough that calls cost little, small enough that padding does
# (docs/lab-log.md).
SWAPPED_BYTES = 2 * 2**20
MAX_SWAPPED = 64


@dataclass(frozen=True, order=True)
class Bucket:
    """Holds the static shape of a step.

    Attributes:
        num_tokens: T, the query tokens of the stream.
        num_rows: B, the sequences.
        max_query_len: Q, the most tokens of a row.
        verifies: A row is a token and drafts of what follows it, and there is a draw after every
            token. In other steps there are as many draws as rows.
        trees: Drafts may branch; a chain is a tree, too.
        q_width: W, the tokens in the distribution that a draft was drawn from; 0 where it is not
            used.
        num_steps: The decode steps that follow each other, each with the tokens that the one before
            it drew. A row has a place in the stream for each of them.
        takes_vectors: Vectors may take the place of tokens; rows may have any length.
    """

    num_tokens: int
    num_rows: int
    max_query_len: int
    verifies: bool = False
    trees: bool = False
    q_width: int = 0
    num_steps: int = 1
    takes_vectors: bool = False

    @property
    def num_mask_words(self) -> int:
        """Returns the 32-bit words of a token's tree mask; 0 where drafts cannot branch.

        The mask has a bit for each token of the token's row.
        """
        return -(-self.max_query_len // 32) if self.trees else 0

    @property
    def num_draws(self) -> int:
        """Returns R, the number of draws."""
        return self.num_tokens if self.verifies or self.num_steps > 1 else self.num_rows

    @property
    def num_processed(self) -> int:
        """Returns the number of draws whose logits can be processed.

        Where a bucket has several steps, these are the draws of one step.
        """
        return self.num_rows if self.num_steps > 1 else self.num_draws

    @property
    def kind(self) -> str:
        """Returns the name of this kind of step: decode, tree, verify or chunk."""
        if self.num_steps > 1 or self.max_query_len == 1:
            return "decode"
        return "tree" if self.trees else "verify" if self.verifies else "chunk"

    def __str__(self) -> str:
        if self.num_steps > 1:
            return f"decode {self.num_rows} tokens x {self.num_steps} steps"
        vectors = ", or vectors," if self.takes_vectors else ""
        return f"{self.kind} {self.num_tokens} tokens{vectors} x {self.num_rows} rows"


@dataclass(frozen=True)
class BucketMenu:
    """Holds all shapes that a step can have, from small to large.

    Attributes:
        decode: The buckets for rows of one token.
        chunk: The buckets for prompt chunks.
        verify: The buckets that verify drafts.
        multi_step: The buckets of several decode steps.
        vectors: The buckets for steps in which vectors take the place of tokens.
        num_copies: The blocks that are copied in one call.
        num_swapped: The blocks that are swapped in one call; 0 if nothing is swapped.
    """

    decode: tuple[Bucket, ...]
    chunk: tuple[Bucket, ...]
    verify: tuple[Bucket, ...] = ()
    multi_step: tuple[Bucket, ...] = ()
    vectors: tuple[Bucket, ...] = ()
    num_copies: int = 16
    num_swapped: int = 0  # 0: nothing is swapped

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Returns all buckets of the menu."""
        return self.decode + self.multi_step + self.verify + self.chunk + self.vectors

    @property
    def max_chunk_rows(self) -> int:
        """Returns the most sequences that share a chunk step."""
        return self.chunk[-1].num_rows

    def swapping(self, block_bytes: int) -> BucketMenu:
        """Returns the menu with the number of blocks that one call swaps: a power of two."""
        maximum = 1 << max(0, (SWAPPED_BYTES // block_bytes).bit_length() - 1)
        return replace(self, num_swapped=min(MAX_SWAPPED, maximum))

    def by_first_use(self) -> list[Bucket]:
        """Returns the buckets in the order in which they are likely to be used first.

        The smallest of each kind come first, since the first request is usually small.
        """
        kinds = self.chunk, self.decode, self.vectors, self.verify, self.multi_step
        return [
            bucket
            for rank in itertools.zip_longest(*kinds)
            for bucket in rank
            if bucket is not None
        ]

    def of_one_text(self, num_tokens: int) -> list[Bucket]:
        """Returns the buckets of the first steps of a text alone, whose prompt has so many tokens.

        They are for the first part of the prompt, and for one row of each other kind.
        """
        prompt = self.choose([min(num_tokens, self.chunk[-1].num_tokens)])
        minimal = [kind[0] for kind in (self.decode, self.multi_step, self.verify) if kind]
        return list(dict.fromkeys((prompt, *minimal)))

    def choose(
        self,
        query_lens: list[int],
        num_draws: int = 0,
        *,
        scores: bool = False,
        verifies: bool = False,
        branches: bool = False,
        multi_step: bool = False,
        takes_vectors: bool = False,
    ) -> Bucket:
        """Returns the smallest bucket for rows of these lengths.

        A step that fits none is a bug of the scheduler, not a reason to compile.

        Args:
            query_lens: The number of tokens of each row.
            num_draws: The number of draws.
            scores: The step scores tokens, which only chunk buckets do.
            verifies: The step verifies drafts.
            branches: The drafts are not only chains.
            multi_step: The value of `StepPlan.is_multi_step`.
            takes_vectors: The value of `StepPlan.takes_vectors`.

        Raises:
            ValueError: No bucket holds the step.
        """
        max_length = max(query_lens)
        # Such buckets have a draw for each token. Others have one for each row, so that several
        # samples of one row need more rows.
        num_rows = max(len(query_lens), 0 if verifies or multi_step else num_draws)
        single = self.decode if max_length == 1 and not scores else self.chunk
        if takes_vectors:
            single = self.vectors
        for bucket in self.multi_step if multi_step else self.verify if verifies else single:
            if branches and not bucket.trees:
                continue
            if (
                sum(query_lens) <= bucket.num_tokens
                and num_rows <= bucket.num_rows
                and max_length <= bucket.max_query_len
            ):
                return bucket
        raise ValueError(
            f"no bucket holds {len(query_lens)} rows of {sum(query_lens)} tokens and {num_draws} "
            "draws;"
            f" the menu has {self.buckets}"
        )


def make_menu(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    *,
    mixed: bool = False,
    num_drafts: tuple[int, ...] = (),
    max_verified_tokens: int = 0,
    trees: bool = False,
    q_width: int = 0,
    num_steps: int = 1,
    takes_vectors: bool = False,
) -> BucketMenu:
    """Returns decode buckets by doubling rows, and chunk buckets by doubling tokens.

    There are few shapes, and little padding.

    Args:
        max_num_seqs: The most rows of a step.
        max_num_batched_tokens: The most tokens of a chunk step.
        mixed: A chunk step holds a row of every sequence, since those that decode take part.
        num_drafts: Numbers of drafts that a row has on average. For each there are buckets by
            doubling rows, from 1. A row may have more drafts than another, up to the largest of
            these numbers: attention takes a tile of queries for each row in any case.
        max_verified_tokens: The most tokens of a bucket that verifies.
        trees: Drafts may branch. Then all buckets that verify take trees, which cost a little more
            than chains alone.
        q_width: The `q_width` of the buckets that verify.
        num_steps: The decode steps of an executable, if there is more than one.
        takes_vectors: Prompts may have vectors in place of tokens. A step with one is a chunk step
            of as many rows as there are sequences, since all may decode next to it.
    """
    rows = max(MIN_ROWS, max_num_seqs)
    decode = tuple(Bucket(size, size, 1) for size in _ladder(MIN_ROWS, rows))
    max_length = 1 + max(num_drafts, default=0)
    verify = [
        Bucket(
            size * (1 + k),
            size,
            min(size * (1 + k), max_length),
            verifies=True,
            trees=trees,
            q_width=q_width,
        )
        # One row is enough here: with its drafts it has more than one token.
        for size in (1, *(bucket.num_rows for bucket in decode))
        for k in num_drafts
    ]
    chunk_rows = rows if mixed else min(CHUNK_ROWS, rows)
    return BucketMenu(
        decode=decode,
        chunk=tuple(
            Bucket(size, chunk_rows, size) for size in _ladder(MIN_CHUNK, max_num_batched_tokens)
        ),
        multi_step=tuple(
            Bucket(b.num_rows * num_steps, b.num_rows, num_steps, num_steps=num_steps)
            for b in decode
            if num_steps > 1
        ),
        vectors=tuple(
            Bucket(size, rows, size, takes_vectors=True)
            for size in _ladder(MIN_CHUNK, max(rows, max_num_batched_tokens))
            if takes_vectors
        ),
        verify=tuple(
            sorted(bucket for bucket in verify if bucket.num_tokens <= max_verified_tokens)
        ),
    )


def _ladder(first: int, last: int) -> list[int]:
    """Returns the doubles of `first` that are less than `last`, and `last` itself."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return [*sizes, last]


def stream_sizes(max_length: int, maximum: int) -> tuple[int, ...]:
    """Returns the numbers of tokens for which an encoder is compiled, each twice the last.

    Args:
        max_length: The tokens of the longest text.
        maximum: The tokens that texts fill together, where one alone does not fill more.
    """
    sizes = [MIN_STREAM]
    while sizes[-1] < max(max_length, maximum):
        sizes.append(2 * sizes[-1])
    return tuple(sizes)
