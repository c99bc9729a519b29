// The guided tour: presets that send real requests, each with a sentence on what is seen, and
// afterwards what the engine did.

import { $, count, el } from "./dom.js";
import { ApiError, request } from "./api.js";

const STORY =
  "Once upon a time there lived a young rabbit in an old town by the sea. Every morning he went " +
  "down to the harbour to look at the ships, and every evening he told his sister what he had " +
  "seen. ";
const SECONDS_PER_STEP = 0.25;
const LENGTH = 40; // tokens that a preset generates
const TOKENS_OF_A_STEP = 256; // of a server that does not say it
const MAX_TOKENS = 4096; // a preset that computes more is asked for twice
const SAYING = "Little by little the bird builds its nest.";

/**
 * The presets. Each has its name, what is seen, `why` it cannot be shown here (or null), what it
 * `costs` ([requests, tokens of prompts, tokens generated, decoding steps], at most), how it
 * `run`s, and its `outcome` in words.
 */
const PRESETS = [
  {
    name: "Share a prefix",
    seen:
      "Two prompts begin alike: the second request finds the blocks of the first in the prefix " +
      "cache, so both block tables begin with the same blocks.",
    why: ({ prefix_caching }) =>
      prefix_caching ? null : "prefix caching is off (enable_prefix_caching)",
    costs: (facts, { block_size }) => [2, 2 * (4 * block_size + 3), 1.5 * LENGTH, LENGTH],
    async run(tour) {
      const begin = await tour.text(4 * tour.pool.block_size);
      const first = tour.send("Request A", { prompt: `${begin} One day`, max_tokens: LENGTH });
      await first.started;
      const second = tour.send("Request B", {
        prompt: `${begin} At night`,
        max_tokens: LENGTH / 2,
      });
      await Promise.all([first.ended, second.ended]);
    },
    outcome: (requests) =>
      "Request B took " +
      `${count(Math.max(...requests.map(({ cached_tokens }) => cached_tokens)), "token")} from ` +
      "the prefix cache.",
  },
  {
    name: "Fork three samples",
    seen:
      "Three samples of one prompt share its blocks; the last one is only partly filled, so " +
      "each sample that writes to it gets a copy first (copy-on-write).",
    why: ({ limits }) =>
      limits.max_num_seqs < 3 ? `max_num_seqs is ${limits.max_num_seqs}, and 3 are needed` : null,
    costs: (facts, { block_size }) => [1, 2.5 * block_size, 3 * LENGTH, LENGTH],
    async run(tour) {
      const prompt = await tour.text(
        2 * tour.pool.block_size + Math.ceil(tour.pool.block_size / 2),
      );
      await tour.send("One prompt, n = 3", {
        prompt,
        n: 3,
        temperature: 1,
        seed: 1,
        max_tokens: LENGTH,
      }).ended;
    },
    outcome: (requests, tour) =>
      `${count(tour.numCopies, "block")} ${tour.numCopies === 1 ? "was" : "were"} copied on ` +
      "write; the other blocks of the prompt had a reference count of 3.",
  },
  {
    name: "Beam search",
    seen:
      "Four beams share what they have in common: in every step some are forked and others " +
      "dropped, and a dropped beam gives back only blocks that no other beam refers to.",
    why: ({ limits }) =>
      limits.max_num_seqs < 4 ? `max_num_seqs is ${limits.max_num_seqs}, and 4 are needed` : null,
    costs: (facts, { block_size }) => [1, block_size + 3, 4 * LENGTH, LENGTH],
    async run(tour) {
      await tour.send("Beam width 4", {
        prompt: await tour.text(tour.pool.block_size + 3),
        n: 4,
        use_beam_search: true,
        temperature: 0,
        max_tokens: LENGTH,
        stream: false,
      }).ended;
    },
    outcome: (requests, tour) =>
      `${count(tour.numCopies, "block")} copied on write; at most ` +
      `${count(tour.maxShared, "block")} shared at a time.`,
  },
  {
    name: "Force a preemption",
    seen:
      "Requests that fit together at first outgrow the pool: the newest loses its blocks, " +
      "waits, and goes on later by recomputation or swapping, with the same text.",
    why: (facts, pool) => crowdOf(facts, pool).why ?? null,
    costs: (facts, pool) => {
      const { numRequests, numTokens, growth } = crowdOf(facts, pool);
      // Twice the steps of one request: one that is preempted ends after the others.
      return [numRequests, numRequests * numTokens, numRequests * growth, 2 * growth];
    },
    async run(tour) {
      const { numRequests, numTokens, growth } = crowdOf(tour.facts, tour.pool);
      const names = Array.from({ length: numRequests }, (_, index) => `Request ${index + 1}`);
      const prompt = await Promise.all(
        names.map((name) => tour.ids(`${name}. ${STORY}`, numTokens)),
      );
      const shown = `${names.length} stories, of ${count(numTokens, "token")} each`;
      await tour.send(
        "One prompt for each request",
        { prompt, max_tokens: growth, min_tokens: growth, ignore_eos: true },
        { shown, names },
      ).ended;
    },
    outcome: (requests) => {
      const preempted = requests.filter(({ num_preemptions }) => num_preemptions);
      const names = preempted.map(({ number }) => `#${number}`).join(", ");
      return preempted.length
        ? `Preempted: ${names}; all ${requests.length} finished.`
        : "No request was preempted: others left room in time. Try again.";
    },
  },
  {
    name: "Speculate",
    seen:
      "Drafts (hollow cells in the last step) are verified together in one step: the right ones " +
      "are kept, so one step yields several tokens, and the text is the same as without them.",
    why: ({ speculation }) =>
      speculation
        ? null
        : `speculation is off; start the server with --speculative-config '{"method": "ngram"}'`,
    costs: () => [1, LENGTH, 2 * LENGTH, 2 * LENGTH],
    async run(tour) {
      const prompt = `"${SAYING}"\n\n"Say it again," said Walter.\n\n"${SAYING.split(" ")[0]}`;
      await tour.send("A text that repeats itself", {
        prompt,
        temperature: 0,
        max_tokens: 2 * LENGTH,
      }).ended;
    },
    outcome: ([{ sequences, prompt_tokens }], tour) =>
      `${count(sequences[0].known - prompt_tokens, "token")} came in ` +
      `${count(tour.numSteps, "step")}; without drafts each step yields one.`,
  },
];

/**
 * Plans requests that fit into a pool side by side, and do not once each has grown by a few blocks.
 */
function crowdOf({ model, limits }, { block_size: size, num_blocks }) {
  const usable = num_blocks - 1;
  const growth = 3 * size;
  const maxBlocks = Math.floor(model.max_model_len / size); // blocks of a request
  const numRequests = Math.max(2, Math.ceil((usable + 1) / maxBlocks));
  const tooMany =
    `the pool has room for all ${limits.max_num_seqs} requests that can run at once; start the ` +
    `server with fewer --num-blocks, such as ${Math.max(8, 2 * maxBlocks)}`;
  if (numRequests > Math.min(limits.max_num_seqs, 16)) return { why: tooMany };
  // The blocks of a request at its end: those of all are together more than there are.
  const each = Math.min(maxBlocks, Math.ceil((usable + 1) / numRequests) + 1);
  const numTokens = each * size - growth;
  if (numTokens < 1) return { why: `the pool has only ${usable} blocks` };
  return { numRequests, numTokens, growth };
}

function costText([numRequests, prompts, generated]) {
  return `${count(numRequests, "request")}, ${count(Math.ceil(prompts + generated), "token")}`;
}

/** Says for people how long so many seconds are. */
function durationText(seconds) {
  return seconds < 60 ? `about ${Math.ceil(seconds)} s` : `about ${Math.round(seconds / 60)} min`;
}

export class Tour {
  /**
   * Takes the playground that shows requests. applyPace(): asks for the slow motion that is chosen.
   * pathOf(path): of the engine that is followed.
   */
  constructor(playground, { applyPace, pathOf }) {
    Object.assign(this, { playground, applyPace, pathOf });
    this.facts = null;
    this.running = null; // an AbortController
    this.costs = PRESETS.map(() => el("span", { class: "cost" }));
    this.buttons = PRESETS.map((preset, index) =>
      el(
        "button",
        { type: "button", click: () => this.ask(preset) },
        el("b", {}, `${index + 1}. ${preset.name}`),
        " ",
        this.costs[index],
      ),
    );
    $("presets").replaceChildren(...this.buttons);
    $("tour-stop").addEventListener("click", () => this.running?.abort());
    $("tour-run").addEventListener("click", () => this.start(this.requested));
  }

  focus() {
    this.buttons[0].focus();
  }

  /** Forgets what was shown: the engine is another one from now on. */
  forget() {
    this.facts = this.pool = null;
    this.running?.abort();
    $("tour").hidden = $("to-tour").hidden = true;
  }

  /** Takes what the server's /v1/capabilities says. */
  describe(facts) {
    this.facts = facts;
    this.check();
  }

  /** Takes a new snapshot of the engine. */
  show(snapshot) {
    const { pool, history, copies } = snapshot;
    const isFirst = !this.pool;
    this.snapshot = snapshot;
    this.pool = pool;
    if (isFirst) this.check();
    if (!this.running) return;
    for (const [number, from, to] of copies)
      if (number > this.firstStep) this.copies.add(`${number} ${from} ${to}`);
    this.numSteps = history.filter(([number]) => number > this.firstStep).length;
    this.maxShared = Math.max(
      this.maxShared,
      pool.ref_counts.filter((references) => references > 1).length,
    );
  }

  get numCopies() {
    return this.copies.size;
  }

  /** Checks which presets can be shown on this server. */
  check() {
    if (!this.facts || !this.pool) return;
    PRESETS.forEach((preset, index) => {
      const why = this.whyNot(preset);
      this.buttons[index].setAttribute("aria-disabled", String(Boolean(why)));
      this.costs[index].textContent = why ? "not on this server: why?" : this.priceOf(preset);
    });
    $("tour").hidden = $("to-tour").hidden = false;
  }

  costOf(preset) {
    return preset.costs(this.facts, this.pool);
  }

  /** Returns the seconds of a step of a preset, in slow motion; 0 without. */
  get pace() {
    if ($("pace-label").hidden) return 0;
    return $("pace").value === "tour" ? SECONDS_PER_STEP : Number($("pace").value);
  }

  /** Says what a preset costs, and how long slow motion makes it. */
  priceOf(preset) {
    const cost = this.costOf(preset);
    const numSteps =
      Math.ceil(cost[1] / (this.facts.limits.max_num_batched_tokens ?? TOKENS_OF_A_STEP)) + cost[3];
    return this.pace ? `${costText(cost)}, ${durationText(numSteps * this.pace)}` : costText(cost);
  }

  whyNot(preset) {
    return this.facts.model.has_tokenizer
      ? preset.why(this.facts, this.pool)
      : "the model has no tokenizer";
  }

  /**
   * Starts a preset, unless it cannot be shown here, or computes so much that it is asked for once
   * more.
   */
  ask(preset) {
    if (this.running) return;
    const why = this.whyNot(preset);
    const [, prompts, generated] = why ? [0, 0, 0] : this.costOf(preset);
    const isMuch = prompts + generated > MAX_TOKENS;
    this.requested = preset;
    this.report("");
    $("tour-run").hidden = !isMuch;
    if (!why && !isMuch) return this.start(preset);
    $("tour-text").textContent = why
      ? `Not on this server: ${why}.`
      : `The pool is large, so this computes ${this.priceOf(preset)}, and other users wait for it.`;
  }

  /** Shows what came of a preset. */
  report(text, isProblem = false) {
    $("tour-outcome").textContent = text;
    $("tour-outcome").classList.toggle("problem", isProblem);
  }

  async start(preset) {
    $("tour-run").hidden = true;
    $("tour-text").textContent = preset.seen;
    this.report("");
    this.firstStep = this.snapshot.step?.step ?? 0;
    this.copies = new Set();
    this.numSteps = this.maxShared = 0;
    const before = Math.max(0, ...this.snapshot.requests.map(({ number }) => number));
    this.busy(new AbortController());
    try {
      this.problem = "";
      await this.applyPace();
      await preset.run(this);
      const requests = await this.finishedSince(before);
      if (this.running.signal.aborted) this.report("Stopped.");
      else if (this.problem) this.report(`A request failed: ${this.problem}`, true);
      else this.report(requests.length ? preset.outcome(requests, this) : "");
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.report(error.message, true);
    } finally {
      this.busy(null);
      await this.applyPace();
    }
  }

  /**
   * Returns the requests after the one with the number `before`, as the engine has them at the end.
   * A snapshot may be a tenth of a second old, so the first one may show a request that still runs.
   */
  async finishedSince(before) {
    for (let tries = 0; ; tries++) {
      const state = await (await request(this.pathOf("/debug/state"))).json();
      const requests = state.requests.filter(({ number }) => number > before);
      if (tries === 20 || requests.every(({ state: phase }) => phase === "finished")) {
        this.show(state);
        return requests;
      }
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
  }

  busy(controller) {
    this.running = controller;
    $("tour-stop").disabled = !controller;
    for (const button of this.buttons) button.disabled = Boolean(controller);
  }

  /**
   * Sends a request of a preset and shows it in the conversation. `started`: its first token is
   * there. Of several prompts, each has a name: a browser opens only six connections to a server,
   * so they are one HTTP request.
   */
  send(title, body, { shown = body.prompt, names } = {}) {
    const fullBody = {
      model: this.playground.model,
      stream: true,
      stream_options: body.stream === false ? undefined : { include_usage: true },
      ...body,
    };
    let onText = null;
    const first = new Promise((resolve) => (onText = resolve));
    const ended = this.playground.run("/v1/completions", fullBody, {
      prompt: [{ role: "prompt", content: shown }],
      title,
      names,
      signal: this.running.signal,
      onText,
    });
    ended.then(({ problem }) => (this.problem ||= problem));
    return { started: Promise.race([first, ended]), ended };
  }

  /** Returns the token ids of a text, again and again, up to a number. */
  async ids(text, numTokens) {
    const { tokens } = await (
      await request("/tokenize", { body: { model: this.playground.model, prompt: text } })
    ).json();
    return Array.from({ length: numTokens }, (_, index) => tokens[index % tokens.length]);
  }

  /** Returns a text of about so many tokens. */
  async text(numTokens) {
    const ids = await this.ids(STORY, numTokens);
    const { prompt } = await (
      await request("/detokenize", { body: { model: this.playground.model, tokens: ids } })
    ).json();
    return prompt.trim();
  }
}
