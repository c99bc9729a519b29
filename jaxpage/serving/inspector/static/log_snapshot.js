// Makes a snapshot of the state of a log, in the form that an engine's has (jaxpage/serving/inspector/state.py).

/** Shares no list with the state, which goes on. */
export function snapshotOf(state) {
  const { refs, entries, pins, requests, plan, history, copies, step, numSteps } = state.data;
  const order = { running: 0, swapped: 1, preempted: 1, waiting: 2, finished: 3 };
  const rank = (request) => (request.state === "finished" ? -request.rank : request.rank); // the last that finished comes first
  const sorted = [...requests.values()].sort((a, b) => order[a.state] - order[b.state] || rank(a) - rank(b) || a.number - b.number);
  return {
    clock: { unit: "steps", now: step },
    pool: {
      block_size: state.blockSize,
      num_blocks: refs.length,
      num_host_blocks: state.numHostBlocks,
      ref_counts: Array.from(refs),
      kept: [...entries.keys()].sort((a, b) => a - b),
      further_groups: furtherGroups(state),
      pins: [...pins.values()],
    },
    requests: sorted.map((request) => described(request, state)),
    step: plan,
    history: [...history],
    copies,
    num_steps: numSteps,
    compiles: null,
  };
}

/** How full the others are, from the block tables: a log does not tell which of their blocks are cached. */
function furtherGroups(state) {
  const sequences = [...state.data.sequences.values()].filter(({ blocks }) => blocks.length);
  const tables = [...sequences.map(({ further }) => further), ...[...state.data.pins.values()].map(({ further_blocks }) => further_blocks)];
  return state.furtherGroups.map((group, index) => {
    const ref_counts = Array(group.num_blocks).fill(0);
    for (const block of tables.flatMap((one) => one?.[index] ?? [])) if (block) ref_counts[block - group.first_block] += 1;
    return { ...group, num_free: ref_counts.filter((count) => !count).length, ref_counts, kept: [] };
  });
}

function described({ members, ids, lastStep, rank, salt, scores, cached_tokens, timeline, ...request }, state) {
  const sequences = members.map((id) => state.data.sequences.get(id));
  return {
    ...request,
    cached_tokens: cached_tokens ?? 0,
    timeline: timeline.map((segment) => [...segment]),
    sequences: sequences.map((sequence) => ({
      id: sequence.id,
      sample: sequence.sample,
      known: sequence.tokens.length,
      computed: sequence.computed,
      blocks: [...sequence.blocks],
      host_blocks: sequence.host,
      ...(sequence.further.length ? { further_blocks: structuredClone(sequence.further) } : {}),
    })),
    ...(request.state === "finished" ? { reasons: sequences.map((sequence) => sequence.reason) } : {}),
  };
}
