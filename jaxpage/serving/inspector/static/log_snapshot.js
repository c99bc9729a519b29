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
      further_groups: state.furtherGroups,
      pins: [...pins.values()],
    },
    requests: sorted.map((request) => described(request, state.data.sequences)),
    step: plan,
    history: [...history],
    copies,
    num_steps: numSteps,
    compiles: null,
  };
}

function described({ members, ids, lastStep, rank, salt, scores, cached_tokens, timeline, ...request }, all) {
  const sequences = members.map((id) => all.get(id));
  return {
    ...request,
    cached_tokens: cached_tokens ?? 0,
    timeline: timeline.map((segment) => [...segment]),
    sequences: sequences.map(({ id, sample, tokens, computed, blocks, host }) => ({
      id, sample, known: tokens.length, computed, blocks: [...blocks], host_blocks: host,
    })),
    ...(request.state === "finished" ? { reasons: sequences.map((sequence) => sequence.reason) } : {}),
  };
}
