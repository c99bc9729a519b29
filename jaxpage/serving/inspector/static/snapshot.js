// Answers what the drawings ask of a snapshot: which sequences refer to each block, and how much of
// it is filled. A snapshot is what /debug/state answers (jaxpage/serving/inspector/state.py), or a
// line of a file of recorded ones.

const NONE = Object.freeze([]); // the references and the vectors of a block that has none

/**
 * Returns a snapshot as the cache group of a number has it: 0, or of `further_groups` from 1 on.
 * Ids of blocks stay as they are.
 */
export function ofGroup(snapshot, group) {
  if (!group) return snapshot;
  const { pool } = snapshot;
  const { num_blocks, first_block, ref_counts, kept: cachedIds } = pool.further_groups[group - 1];
  const pick = ({ further_blocks, ...fields }) => ({
    ...fields,
    blocks: further_blocks?.[group - 1] ?? [],
    host_blocks: [],
  });
  const requests = snapshot.requests.map((request) => ({
    ...request,
    sequences: request.sequences.map(pick),
  }));
  const copies = snapshot.copies.filter(
    ([, from]) => from >= first_block && from < first_block + num_blocks,
  );
  return {
    ...snapshot,
    pool: {
      ...pool,
      num_blocks,
      num_host_blocks: 0,
      first_block,
      ref_counts,
      kept: cachedIds,
      pins: pool.pins.map(pick),
    },
    requests,
    copies,
  };
}

/**
 * Returns the blocks of a snapshot, each with `kind` ("null", "free", "cached", "used"), its
 * references and its flags.
 */
export function blocksOf(snapshot) {
  const {
    num_blocks,
    block_size,
    first_block: first = 0,
    ref_counts,
    kept: cachedIds,
    pins,
  } = snapshot.pool;
  const blocks = Array.from({ length: num_blocks }, (_, index) => ({
    id: first + index,
    kind: first + index === 0 ? "null" : ref_counts[index] ? "used" : "free",
    refCount: ref_counts[index],
    references: NONE, // {request, sequence, index}; of a pin {pin, index}
    isCached: false,
    pinned: false,
    slots: block_size,
    filled: 0, // slots whose keys and values are computed
    known: 0, // slots whose token is known
    vectors: NONE, // slots that a picture fills: {request, from, to, picture, row}
  }));
  for (const id of cachedIds) {
    blocks[id - first].isCached = true;
    if (blocks[id - first].kind === "free") blocks[id - first].kind = "cached";
  }
  const refer = (id, reference, computed, known) => {
    if (id === 0) return; // stands for what fell out of a sliding window
    const block = blocks[id - first];
    const before = reference.index * block_size;
    if (block.references === NONE) block.references = [];
    block.references.push(reference);
    block.filled = Math.max(block.filled, clamp(computed - before, block_size));
    block.known = Math.max(block.known, clamp(known - before, block_size));
  };
  for (const request of snapshot.requests)
    for (const sequence of request.sequences) {
      sequence.blocks.forEach((id, index) =>
        refer(id, { request, sequence, index }, sequence.computed, sequence.known),
      );
      noteVectors(request, block_size, (index) => blocks[(sequence.blocks[index] || NaN) - first]);
    }
  for (const pin of pins)
    pin.blocks.forEach((id, index) => {
      refer(id, { pin, index }, pin.tokens, pin.tokens);
      if (id) blocks[id - first].pinned = true;
    });
  return blocks;
}

const clamp = (value, max) => Math.min(Math.max(value, 0), max);

/**
 * Returns what vectors of a request have at positions `start` to `stop` - 1 of its prompt: {from,
 * to, picture, row}, with positions from `start` on. picture: from 1 on; 0 for vectors of a client.
 */
export function vectorsIn({ vectors = NONE }, start, stop) {
  return vectors
    .filter(([position, length]) => position < stop && start < position + length)
    .map(([position, length, picture, row]) => {
      const from = Math.max(position, start);
      const to = Math.min(position + length, stop);
      return { from: from - start, to: to - start, picture, row: row + from - position };
    });
}

/** Says what vectors are: "picture 1, rows 0 to 15". */
export function vectorsText({ from, to, picture, row }) {
  const source = picture ? `picture ${picture}` : "vectors of the client";
  return `${source}, rows ${row} to ${row + to - from - 1}`;
}

/** Notes at the blocks of a sequence which slots vectors fill. blockOf(index): may be undefined. */
function noteVectors(request, size, blockOf) {
  const indices = new Set(
    (request.vectors ?? NONE).flatMap(([position, length]) => {
      const first = Math.floor(position / size);
      const last = Math.floor((position + length - 1) / size);
      return Array.from({ length: last - first + 1 }, (_, index) => first + index);
    }),
  );
  for (const index of indices) {
    const block = blockOf(index);
    if (!block || block.vectors.some((known) => known.request === request)) continue;
    const spans = vectorsIn(request, index * size, (index + 1) * size);
    block.vectors = [...block.vectors, ...spans.map((span) => ({ request, ...span }))];
  }
}

/**
 * Returns how many blocks are used, cached and free. `saved`: references beyond the first, each of
 * which would be a block without sharing.
 */
export function countsOf(blocks) {
  const counts = { total: 0, used: 0, cached: 0, free: 0, shared: 0, saved: 0 };
  for (const { kind, refCount } of blocks) {
    if (kind === "null") continue;
    counts.total += 1;
    counts[kind] += 1;
    counts.shared += refCount > 1;
    counts.saved += Math.max(0, refCount - 1);
  }
  return counts;
}

/** Returns the blocks of host memory, where swapped requests are. */
export function hostBlocksOf(snapshot) {
  const blocks = Array.from({ length: snapshot.pool.num_host_blocks }, (_, index) => ({
    id: index + 1,
    isHost: true,
    kind: "free",
    refCount: 0,
    references: [],
    slots: snapshot.pool.block_size,
    filled: 0,
    known: 0,
    vectors: NONE,
  }));
  const size = snapshot.pool.block_size;
  for (const request of snapshot.requests)
    for (const sequence of request.sequences) {
      sequence.host_blocks.forEach((id, index) => {
        if (!id) return;
        const block = blocks[id - 1];
        block.kind = "used";
        block.refCount += 1;
        block.references.push({ request, sequence, index });
        block.filled = block.known = size;
      });
      noteVectors(request, size, (index) => blocks[(sequence.host_blocks[index] || NaN) - 1]);
    }
  return blocks;
}

/** Returns "#3", or of a request with several sequences "#3·1". */
export const nameOf = ({ request, sequence, pin }) =>
  pin
    ? `pin ${-pin.id}`
    : request.num_sequences > 1 && sequence
      ? `#${request.number}·${label(request, sequence)}`
      : `#${request.number}`;

const label = (request, sequence) => request.sequences.indexOf(sequence) + 1;
