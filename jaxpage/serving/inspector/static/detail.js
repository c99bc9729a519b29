// Describes what is pointed at: a block with its references, or a request; and the block tables.

import { count, el } from "./dom.js";
import { requestColor } from "./colors.js";
import { nameOf, vectorsIn, vectorsText } from "./snapshot.js";

const MAX_ENTRIES = 64; // of a block table
const MAX_IDS = 64; // of a prompt

/** Returns elements that describe a block, a request, or what can be pointed at. */
export function describe(block, request, snapshot) {
  if (block) return describeBlock(block, snapshot.pool.block_size);
  if (request) return describeRequest(request);
  return [
    el(
      "p",
      {},
      "The KV cache is divided into blocks of equal size. A block table lists the blocks of a " +
        "sequence, which can be anywhere in the pool. Sequences with a common prefix share " +
        "blocks; a shared block is copied before one of them writes to it (copy-on-write).",
    ),
    el(
      "p",
      { class: "muted" },
      "Point at a block or a request, or tap it, to see its block tables; a click selects it. " +
        "Keyboard: Tab to the grid, then arrow keys, Enter and Escape.",
    ),
  ];
}

function describeBlock(block, size) {
  const numReserved = block.known - block.filled;
  const reserved = numReserved > 0 ? `, ${numReserved} more are reserved for known tokens` : "";
  const facts = {
    null: "is the null block: padding tokens write to it, and it is never allocated.",
    free: "is free.",
    cached:
      "is free, and its content is still in the prefix cache: a prompt with the same tokens " +
      "reuses it. It is allocated again last (LRU).",
    used:
      `has ${count(block.refCount, "reference")}; ${block.filled} of its ${size} slots are ` +
      `computed${reserved}.`,
  };
  const forks = new Set(block.references.map(({ request }) => request?.number ?? 0));
  const shared =
    block.refCount < 2
      ? ""
      : forks.size > 1
        ? " Requests with a common prefix share it."
        : " Sequences of one request share it; it is copied before one of them writes to it.";
  const inCache =
    block.isCached && block.kind === "used" ? " It is full and in the prefix cache." : "";
  const name = block.isHost ? "Host block" : "Block";
  const vectors = block.vectors
    .map((span) => `Slots ${span.from} to ${span.to - 1}: ${describeVectors(span)}. `)
    .join("");
  return [
    el("p", {}, el("b", {}, `${name} ${block.id}`), ` ${facts[block.kind]}${shared}${inCache}`),
    vectors ? el("p", {}, vectors.trim()) : null,
  ].filter(Boolean);
}

function describeRequest(request) {
  const { prompt } = request;
  const text = Array.isArray(prompt)
    ? `token ids ${prompt.slice(0, MAX_IDS).join(" ")}${prompt.length > MAX_IDS ? " …" : ""}`
    : prompt;
  return [
    el("p", {}, el("b", {}, `Request #${request.number}`), ` ${storyOf(request)}`),
    text ? el("p", { class: "muted prompt" }, `Prompt: ${text}`) : null,
  ].filter(Boolean);
}

const describeVectors = (span) => `${vectorsText(span)}, of request #${span.request.number}`;

function positions({ index, sequence, pin }, size) {
  const first = index * size;
  return `positions ${first}–${Math.min(first + size, sequence?.known ?? pin.tokens) - 1}`;
}

function dotOf({ request }) {
  const dot = el("span", { class: "dot" });
  dot.style.background = requestColor(request?.number ?? 0);
  return dot;
}

function storyOf(request) {
  const hit = request.cached_tokens
    ? `, ${request.cached_tokens} of them from the prefix cache`
    : "";
  const numPictures = Math.max(0, ...(request.vectors ?? []).map(([, , picture]) => picture));
  const pictures = numPictures ? ` with ${count(numPictures, "picture")}` : "";
  const kind = request.beam_width
    ? `; beam search, width ${request.beam_width}`
    : request.num_sequences > 1
      ? `; ${request.num_sequences} samples`
      : "";
  const gave = request.num_preemptions
    ? `; preempted ${count(request.num_preemptions, "time")}`
    : "";
  const ended = request.reasons ? `; ended: ${request.reasons.join(", ")}` : "";
  return (
    `is ${request.state}: ${count(request.prompt_tokens, "token")} of prompt${pictures}${hit}, ` +
    `at most ${request.max_total_tokens} in total${kind}${gave}${ended}.`
  );
}

/** Returns the block table of a sequence: the physical block of each logical one. */
export function tableStrip(reference, here, snapshot) {
  const { sequence, pin } = reference;
  const isOnHost = Boolean(sequence?.host_blocks.length);
  const table = isOnHost ? sequence.host_blocks : (pin ?? sequence).blocks;
  const marked = here ? reference.index : -1;
  const first = Math.max(0, Math.min(marked - MAX_ENTRIES / 2, table.length - MAX_ENTRIES));
  const entries = table.slice(first, first + MAX_ENTRIES).map((id, index) => {
    const size = snapshot.pool.block_size;
    const position = (first + index) * size;
    const vectors = vectorsIn(reference.request ?? {}, position, position + size);
    const title = [`from position ${position}`, ...vectors.map(vectorsText)].join("; ");
    const isHere = first + index === marked ? "here " : "";
    return el(
      "li",
      { class: `${isHere}${vectors.length ? "picture" : ""}`, title },
      id ? String(id) : "–",
    );
  });
  const before = first > 0 ? [el("li", { class: "muted" }, "…")] : [];
  const after = first + MAX_ENTRIES < table.length ? [el("li", { class: "muted" }, "…")] : [];
  const label = `Block table of ${nameOf(reference)}${isOnHost ? " in host memory" : ""}`;
  const nothing = table.length ? [] : [el("li", { class: "muted" }, "no blocks")];
  return el(
    "div",
    { class: "table" },
    el("span", {}, dotOf(reference), nameOf(reference)),
    el("ol", { "aria-label": label }, ...before, ...entries, ...after, ...nothing),
    here ? el("span", { class: "muted" }, positions(reference, snapshot.pool.block_size)) : null,
  );
}
