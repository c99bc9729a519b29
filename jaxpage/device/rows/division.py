"""Divides rows of tokens into steps of one shape.

Some rows are a stream, and a long row is several chunks, which run one after the other:

    rows 0 1 2 3 4, two in a stream, each in three chunks:

    steps    rows 0 and 1: chunk 0, 1, 2    rows 2 and 3: chunk 0, 1, 2    row 4: chunk 0, 1, 2
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpage.device.inputs.buckets import MIN_ROWS, Bucket
from jaxpage.device.inputs.step_inputs import StepInputs, TableShape, empty_inputs, unpack

STREAM_TOKENS = 512  # the most tokens of a step
BLOCK_SIZE = 16


class Division(NamedTuple):
    """Says how rows of tokens become steps.

    Attributes:
        num_rows: The number of rows.
        length: The number of tokens of a row.
        num_streams: The number of streams.
        rows_at_once: The rows of a stream.
        num_chunks: The number of chunks of a row.
        chunk: The tokens of a chunk.
    """

    num_rows: int
    length: int
    num_streams: int
    rows_at_once: int
    num_chunks: int
    chunk: int

    @property
    def bucket(self) -> Bucket:
        """Returns the shape of a step."""
        num_tokens = self.rows_at_once * self.chunk
        return Bucket(num_tokens, max(self.rows_at_once, MIN_ROWS), self.chunk)

    @property
    def table_width(self) -> int:
        """Returns the number of blocks of a row."""
        return -(-self.num_chunks * self.chunk // BLOCK_SIZE)

    @property
    def num_blocks(self) -> int:
        """Returns the number of blocks of all rows of a stream, with the null block."""
        return 1 + self.bucket.num_rows * self.table_width

    def divide(self, token_ids_RC: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the tokens [steps, T], padded with zeros, and the chunk of each step."""
        missing_rows = self.num_streams * self.rows_at_once - self.num_rows
        missing_tokens = self.num_chunks * self.chunk - self.length
        padded = jnp.pad(token_ids_RC, ((0, missing_rows), (0, missing_tokens)))
        streams = padded.reshape(self.num_streams, self.rows_at_once, self.num_chunks, self.chunk)
        token_ids = streams.swapaxes(1, 2).reshape(-1, self.rows_at_once * self.chunk)
        return token_ids, jnp.tile(jnp.arange(self.num_chunks), self.num_streams)

    def join(self, of_steps: jax.Array) -> jax.Array:
        """Returns what steps gave for their tokens, [steps, T, ...], as [R C, ...]."""
        last = of_steps.shape[2:]
        shape = (self.num_streams, self.num_chunks, self.rows_at_once, self.chunk)
        of_rows = of_steps.reshape(*shape, *last).swapaxes(1, 2)
        of_rows = of_rows.reshape(self.num_streams * self.rows_at_once, -1, *last)
        return of_rows[: self.num_rows, : self.length].reshape(-1, *last)

    def inputs(self, token_ids_T: jax.Array, chunk: jax.Array, lora_slot: int) -> StepInputs:
        """Returns the inputs of a step. The block tables of its rows count up.

        Args:
            token_ids_T: The tokens.
            chunk: The place of the step's chunk in a row.
            lora_slot: The slot of the adapter of all tokens; 0 for none.
        """
        tables = TableShape(1, self.table_width)
        index_T = np.tile(np.arange(self.chunk), self.rows_at_once)
        row_T = np.repeat(np.arange(self.rows_at_once), self.chunk)
        row_B = np.arange(self.bucket.num_rows)
        first_block_B = 1 + row_B * self.table_width
        positions_T = chunk * self.chunk + index_T
        table_BM = first_block_B[:, None] + np.arange(self.table_width)
        # A row of padding, which `MIN_ROWS` may add, ends where it begins.
        ends_B = np.minimum(np.arange(len(row_B) + 1), self.rows_at_once) * self.chunk
        fields = {
            "token_ids_T": token_ids_T,
            "positions_T": positions_T,
            "slots_ZT": (first_block_B[row_T] * BLOCK_SIZE + positions_T)[None],
            "block_table_ZBM": table_BM[None],
            "context_len_B": jnp.where(row_B < self.rows_at_once, (chunk + 1) * self.chunk, 0),
            "query_start": ends_B,
            "lora_slot_T": np.full(len(row_T), lora_slot),
        }
        packed, _ = empty_inputs(self.bucket, tables)
        inputs = unpack(jnp.asarray(packed), self.bucket, tables)
        replaced: dict[str, Any] = {
            name: jnp.asarray(field, jnp.int32) for name, field in fields.items()
        }
        return inputs._replace(**replaced)


def divide_rows(num_rows: int, length: int) -> Division:
    """Returns the division of rows with as few tokens of padding as there can be."""
    # A token alone would be a matrix-vector product, which XLA rounds in another way.
    padded_length = max(length, 2)
    num_chunks = -(-padded_length // STREAM_TOKENS)
    chunk = -(-padded_length // num_chunks)
    num_streams = -(-num_rows // max(1, STREAM_TOKENS // chunk))
    rows_at_once = -(-num_rows // num_streams)
    return Division(num_rows, length, num_streams, rows_at_once, num_chunks, chunk)
