// Follows the records of an event log: requests, their sequences, plans and results. log_blocks.js has what they do to blocks.

import { LogBlocks } from "./log_blocks.js";
import { snapshotOf } from "./log_snapshot.js";
import { close, compute, wait } from "./timeline.js";

const FORMAT = 4;
const PLACEHOLDER = -1; // among drafts: a token that the step itself draws
const MOST_BLOCKS = 2 ** 21;
const NUM_FINISHED = 12;
const NUM_STEPS = 160;
const MOST_COPIES = 24;

/** What is known at a place of the log. All of it is in `data`, which can be cloned. */
export class LogState extends LogBlocks {
  constructor(header) {
    super();
    if (header.event !== "header") throw new Error("this is not an event log: it does not begin with a header");
    if (header.format !== FORMAT) throw new Error(`the log has format ${header.format}; this page reads format ${FORMAT}`);
    const { num_blocks, swap_space_blocks, cache_groups = [], buckets } = header.engine ?? {};
    if (!(Number.isInteger(num_blocks) && num_blocks > 1 && num_blocks <= MOST_BLOCKS)) throw new Error(`num_blocks is ${num_blocks}`);
    this.blockSize = header.config.block_size;
    this.caches = header.config.enable_prefix_caching;
    this.numHostBlocks = swap_space_blocks ?? 0;
    let first_block = num_blocks;
    this.furtherGroups = cache_groups.slice(1).map(([window, count]) => ({ window, num_blocks: count, first_block: (first_block += count) - count }));
    this.buckets = buckets;
    this.texts = header.texts ?? {}; // of tokens, where `jaxpage replay --texts` has put them there
    this.data = {
      step: 0,
      numSteps: 0,
      numArrivals: 0,
      numUnknown: 0, // tokens that the log does not have
      refs: new Int32Array(num_blocks),
      requests: new Map(), // by id, in order of arrival; finished ones too, for a while
      sequences: new Map(), // by id
      recorded: new Map(), // block tables as the log last had them, by sequence id
      further: new Map(), // the same, of each cache group after the first
      pins: new Map(),
      blockOf: new Map(), // the prefix cache: block by what is in it
      entries: new Map(), // and what is in it, by block
      plan: null,
      history: [],
      copies: [],
    };
  }

  apply(record) {
    const handler = this[`on_${record.event}`];
    if (!handler) throw new Error(`there is no event ${record.event}`);
    handler.call(this, record);
  }

  snapshot() {
    return snapshotOf(this);
  }

  on_arrival({ request_id, sequences, prompt_token_ids, num_prompt_tokens, params = {}, beam, max_total_tokens }) {
    const number = ++this.data.numArrivals;
    const prompt = prompt_token_ids ?? Array.from({ length: num_prompt_tokens }, () => this.unknownToken()); // of an incident
    const request = {
      number,
      id: request_id,
      state: "waiting",
      beam_width: beam?.beam_width ?? 0,
      num_sequences: beam?.beam_width ?? params.best_of ?? params.n ?? 1,
      prompt_tokens: prompt.length,
      ...(prompt_token_ids ? { prompt: prompt_token_ids } : {}),
      max_total_tokens,
      cached_tokens: null,
      num_preemptions: 0,
      timeline: [],
      lastStep: 0,
      rank: 0,
      salt: params?.cache_salt ?? null,
      scores: (params?.prompt_logprobs ?? null) !== null,
      ids: sequences, // that its sequences can have
      members: [sequences[0]], // ids of those that there are
    };
    this.data.requests.set(request_id, request);
    this.data.sequences.set(sequences[0], this.newSequence(sequences[0], request_id, 0, [...prompt]));
    wait(request, "queued", this.data.step);
  }

  newSequence(id, requestId, sample, tokens) {
    return { id, requestId, sample, tokens, computed: 0, blocks: [], further: [], numCached: 0, host: [], reason: null };
  }

  /** Stands for a token that a log does not have: like no other, so that no two blocks count as equal. */
  unknownToken() {
    return `? ${++this.data.numUnknown}`;
  }

  /** The beginning of an incident: what was there when its first steps had been forgotten. */
  on_snapshot({ step, requests }) {
    this.data.step = step;
    for (const { present, ...arrival } of requests) {
      this.on_arrival(arrival);
      const request = this.data.requests.get(arrival.request_id);
      const prompt = this.data.sequences.get(arrival.sequences[0]).tokens;
      this.data.sequences.delete(arrival.sequences[0]);
      request.members = present.map(({ sequence }) => sequence);
      for (const one of present) this.restore(one, request, prompt);
      if (present.some(({ is_running }) => is_running)) this.run(request, 0);
    }
  }

  restore({ sequence: id, sample_index, token_ids, tables, is_running, finish_reason }, request, prompt) {
    const tokens = [...prompt, ...token_ids.map((token) => token ?? this.unknownToken())];
    const sequence = { ...this.newSequence(id, request.id, sample_index, tokens), reason: finish_reason };
    this.data.sequences.set(id, sequence);
    if (!is_running) return;
    this.data.recorded.set(id, tables[0]);
    this.data.further.set(id, this.furtherGroups.map((_, index) => tables[index + 1] ?? []));
    sequence.further = structuredClone(this.data.further.get(id));
    sequence.computed = tokens.length - 1;
    this.setTable(sequence, tables[0], 0, new Set());
  }

  on_abort({ request_id }) {
    this.end(this.data.requests.get(request_id), "abort");
  }

  on_pin({ request_id, pin_id }) {
    const request = this.data.requests.get(request_id);
    const [sequence] = this.unfinished(request);
    const blocks = sequence.blocks.slice(0, this.blocksFor(request.prompt_tokens));
    blocks.forEach((block) => this.share(block));
    const further_blocks = sequence.further.map((table) => table.slice(0, blocks.length));
    this.data.pins.set(pin_id, { id: pin_id, tokens: request.prompt_tokens, blocks, ...(further_blocks.length ? { further_blocks } : {}) });
    this.end(request, "abort");
  }

  on_unpin({ pin_id }) {
    this.data.pins.get(pin_id)?.blocks.forEach((block) => this.release(block));
    this.data.pins.delete(pin_id);
  }

  on_reset() {
    this.data.blockOf.clear();
    this.data.entries.clear();
    for (const sequence of this.data.sequences.values()) sequence.numCached = 0;
  }

  on_failure({ error }) {
    if (this.data.plan) this.data.plan.error = error;
    for (const request of this.data.requests.values()) if (request.state === "running") this.end(request, "error");
    this.data.recorded.clear();
    this.data.further.clear();
  }

  on_rebuild() {
    for (const request of this.data.requests.values()) {
      if (request.state === "running") this.giveWay(request, null);
      if (request.state === "swapped") this.unfinished(request).forEach((sequence) => this.startOver(sequence));
      if (request.state === "swapped") request.state = "preempted";
    }
    for (const pin_id of [...this.data.pins.keys()]) this.on_unpin({ pin_id });
    this.on_reset();
  }

  on_end() {}

  on_header() {
    throw new Error("a second header");
  }

  on_plan(record) {
    const data = this.data;
    data.step = record.step;
    const { rows, tables = [], preempted = [], drafts = [] } = record;
    const ofFirst = (pairs, place) => pairs.filter((pair) => pair[place] < this.data.refs.length); // of the first cache group
    const { copies = [], swap_out = [], swap_in = [] } = record;
    const hostOf = new Map(ofFirst(swap_out, 0));
    const preemptedNumbers = preempted.map((id) => {
      const request = data.requests.get(id);
      if (request) this.giveWay(request, hostOf);
      return request?.number;
    });
    const back = new Set(ofFirst(swap_in, 1).map(([, block]) => block));
    const numDrafts = new Map(drafts.map(([sequence, ids]) => [sequence, ids.length]));
    for (const [id, ...change] of tables) data.recorded.set(id, changed(data.recorded.get(id), change));
    for (const [group, id, ...change] of record.further_tables ?? []) {
      const known = data.further.get(id) ?? this.furtherGroups.map(() => []);
      data.further.set(id, known.with(group - 1, changed(known[group - 1], change)));
    }
    for (const [id, start] of rows) {
      const sequence = data.sequences.get(id);
      this.setTable(sequence, data.recorded.get(id), start, back);
      sequence.further = structuredClone(data.further.get(id) ?? []);
      sequence.computed = start;
      this.run(data.requests.get(sequence.requestId), start);
    }
    data.plan = {
      step: record.step,
      rows: rows.map(([id, start, n]) => [this.requestOf(id).number, id, start, n, numDrafts.get(id) ?? 0]),
      draws: record.draws ?? rows.flatMap(([, , n], row) => (drafts.length ? Array(n).fill(row) : [row])),
      copies,
      swap_out,
      swap_in,
      preempted: preemptedNumbers,
      seconds: null,
    };
    data.copies = [...data.copies, ...copies.map((pair) => [record.step, ...pair])].slice(-MOST_COPIES);
    data.plan.tables = rows.map(([id]) => [...data.recorded.get(id)]);
    data.plan.num_draws = data.plan.draws.length;
    Object.assign(data.plan, this.chooseBucket(data.plan, drafts.some(([, ids]) => ids.includes(PLACEHOLDER))));
  }

  /** A request owns blocks from now on. */
  run(request, start) {
    if (request.state !== "running") request.rank = this.data.step;
    request.state = "running";
    request.cached_tokens ??= start;
  }

  chooseBucket({ rows, draws }, multiStep) {
    const scores = rows.some(([, id, start]) => {
      const request = this.requestOf(id);
      return request.scores && start < request.prompt_tokens - 1;
    });
    const verifies = !multiStep && rows.some(([, , , , drafts]) => drafts);
    const lengths = rows.map(([, , , n]) => n);
    const [total, longest] = [lengths.reduce((a, b) => a + b, 0), Math.max(...lengths)];
    const numRows = Math.max(rows.length, verifies || multiStep ? 0 : draws.length);
    const kind = verifies ? "verify" : multiStep || (longest === 1 && !scores) ? "decode" : "chunk";
    const fitting = this.buckets.find(([tokens, most, query, isVerify, , , numSteps]) => {
      const isKind = multiStep || verifies || (query === 1) === (kind === "decode");
      const holds = total <= tokens && numRows <= most && longest <= query;
      return numSteps > 1 === multiStep && Boolean(isVerify) === verifies && isKind && holds;
    });
    return { kind: fitting?.[4] ? "tree" : kind, bucket: fitting?.slice(0, 3) ?? [total, numRows, longest] };
  }

  on_result({ tokens, logprobs = [], edits = [], paths = null }) {
    const { plan, sequences } = this.data;
    plan.results = resultsOf(tokens, logprobs, (token) => (token in this.texts ? `${token}:${this.texts[token]}` : token));
    if (paths) plan.accepted = plan.rows.map((_, row) => paths[row]?.length ?? 0);
    for (const [, id, start, n, drafts] of plan.rows) {
      const sequence = sequences.get(id);
      if (!sequence) continue; // aborted meanwhile
      sequence.computed = start + n - drafts;
      this.cacheIfFull(sequence, start);
    }
    for (const [number, id, start, n, drafts] of plan.rows) {
      const request = this.requestOf(id);
      if (!request) continue;
      const kind = start < request.prompt_tokens || n - drafts > 1 ? "chunk" : "decode";
      compute(request, kind, plan.step - 1, plan.step, n, plan.step);
    }
    for (const [what, id] of edits) if (what === "drop") this.drop(id);
    for (const [what, ...edit] of edits) if (what === "fork") this.fork(...edit);
    const ends = new Map(edits.filter(([what]) => what === "finish").map(([, id, reason, , at]) => [id, { reason, at }]));
    this.appendDraws(tokens, paths, ends);
    for (const [, id, , , drafts] of plan.rows) {
      const sequence = sequences.get(id);
      if (drafts && sequence && sequence.reason === null) this.trim(sequence, sequence.computed);
    }
    const total = plan.rows.reduce((sum, [, , , n]) => sum + n, 0);
    this.data.numSteps += 1;
    this.data.history.push([plan.step, total, plan.bucket[0], null]);
    this.data.history.splice(0, this.data.history.length - NUM_STEPS);
  }

  /** Every draw becomes the next token of its sequence; which tokens beams took, the log does not say, so theirs are like no others. */
  appendDraws(tokens, paths, ends) {
    const { plan } = this.data;
    const grown = new Set();
    let first = 0; // of a row's draws
    plan.rows.forEach(([, id, , n, drafts], row) => {
      const request = this.requestOf(id);
      const numDraws = plan.draws.filter((one) => one === row).length;
      const drawn = tokens.slice(first, first + numDraws);
      first += numDraws;
      if (!request || !numDraws) return;
      if (request.beam_width) {
        if (!grown.has(request)) this.unfinished(request).forEach((beam) => this.append(beam, [null], ends.get(beam.id)));
        grown.add(request);
      } else if (paths) {
        this.append(this.data.sequences.get(id), [0, ...(paths[row] ?? [])].map((place) => drawn[place]), ends.get(id));
      } else {
        const ids = [...request.ids.slice(1, numDraws), id];
        drawn.forEach((token, index) => this.append(this.data.sequences.get(ids[index]), [token], ends.get(ids[index])));
      }
    });
  }

  append(sequence, tokens, end) {
    if (!sequence || sequence.reason !== null) return;
    const taken = tokens.slice(0, end?.at ?? tokens.length).filter((token) => token === null || token >= 0);
    taken.forEach((token, index) => {
      sequence.tokens.push(token ?? this.unknownToken());
      if (index < tokens.length - 1) {
        sequence.computed += 1; // a draft that was right: it is computed already
        this.cacheIfFull(sequence, sequence.computed - 1);
      }
    });
    if (end) this.finish(sequence, end.reason);
  }

  fork(parentId, id, sample) {
    const parent = this.data.sequences.get(parentId);
    const child = { ...structuredClone(parent), id, sample, blocks: [...parent.blocks] };
    child.blocks.forEach((block) => this.share(block));
    this.data.sequences.set(id, child);
    this.data.requests.get(parent.requestId).members.push(id);
  }

  drop(id) {
    const sequence = this.data.sequences.get(id);
    if (!sequence) return;
    this.releaseAll(sequence);
    const request = this.data.requests.get(sequence.requestId);
    request.members = request.members.filter((member) => member !== id);
    this.data.sequences.delete(id);
    this.forgetTables(id);
  }

  finish(sequence, reason) {
    this.releaseAll(sequence);
    sequence.reason = reason;
    this.forgetTables(sequence.id);
    const request = this.data.requests.get(sequence.requestId);
    if (this.unfinished(request).length) return;
    request.state = "finished";
    close(request, this.data.step);
    const finished = [...this.data.requests.values()].filter((one) => one.state === "finished");
    request.rank = Math.max(0, ...finished.map((one) => one.rank)) + 1; // in order of their end
    for (const old of finished.sort((a, b) => a.rank - b.rank).slice(0, -NUM_FINISHED)) {
      old.members.forEach((id) => this.data.sequences.delete(id));
      this.data.requests.delete(old.id);
    }
  }

  end(request, reason) {
    if (!request) return;
    request.rank = 0;
    for (const sequence of this.unfinished(request).reverse()) this.finish(sequence, reason);
  }

  /** A request gives up its blocks, or moves them to host memory if the plan moves them all. */
  giveWay(request, hostOf) {
    const sequences = this.unfinished(request);
    const computed = sequences.map((sequence) => sequence.blocks.slice(0, this.blocksFor(sequence.computed)));
    const swaps = hostOf?.size > 0 && computed.flat().some(Boolean) && computed.flat().every((block) => !block || hostOf.has(block));
    sequences.forEach((sequence, index) => {
      this.releaseAll(sequence);
      if (swaps) sequence.host = computed[index].map((block) => (block ? hostOf.get(block) : 0));
      else this.startOver(sequence);
    });
    request.state = swaps ? "swapped" : "preempted";
    request.num_preemptions += 1;
    wait(request, request.state, this.data.step - 1);
  }

  startOver(sequence) {
    sequence.computed = 0;
    sequence.host = [];
  }

  forgetTables(id) {
    this.data.recorded.delete(id);
    this.data.further.delete(id);
  }

  requestOf(sequenceId) {
    return this.data.requests.get(this.data.sequences.get(sequenceId)?.requestId);
  }

  unfinished(request) {
    return request.members.map((id) => this.data.sequences.get(id)).filter((sequence) => sequence.reason === null);
  }
}

/** A block table after a change [length, [first place, block, block, ...], ...]. */
function changed(table = [], [length, ...runs]) {
  const result = table.slice(0, length);
  for (const [first, ...blocks] of runs) blocks.forEach((block, index) => (result[first + index] = block));
  return result;
}

/** What was drawn: [{index, token, rank, logprob, top: [[token, logprob], ...]}], with nothing in `top` where the log has no probabilities. */
function resultsOf(drawn, logprobs, called) {
  const tokens = drawn.map(called);
  const results = tokens.map((token, index) => ({ index, token, rank: 0, logprob: null, top: [] }));
  for (const [index, rank, ids, bits] of logprobs) {
    const [own, ...likeliest] = new Float32Array(new Int32Array(bits).buffer);
    results[index] = { index, token: tokens[index] ?? null, rank, logprob: own, top: likeliest.map((logprob, place) => [called(ids[place + 1]), logprob]) };
  }
  return results.filter(Boolean);
}
