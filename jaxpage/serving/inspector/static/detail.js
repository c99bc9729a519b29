// Says what is pointed at: of a block who refers to it, with which positions; and the block tables, as they are in memory.

import { count, el } from "./dom.js";
import { requestColor } from "./colors.js";
import { nameOf } from "./snapshot.js";

const MOST_ENTRIES = 64; // of a block table

/** Elements that describe a block, a request, or where to look. */
export function describe(block, request, snapshot) {
  if (block) return describeBlock(block, snapshot.pool.block_size);
  if (request) return [el("p", {}, el("b", {}, `Request #${request.number}`), ` ${storyOf(request)}`)];
  return [
    el("p", {}, "Keys and values of the tokens lie in blocks of equal size, wherever one was free. A sequence finds its own through a block table; what begins alike shares blocks, and who writes to a shared one gets a copy."),
    el("p", { class: "muted" }, "Point at a block to see whose it is, or at a request to see its block table; a click holds it. With the keyboard: Tab to the grid, then arrows, Enter and Escape."),
  ];
}

function describeBlock(block, size) {
  const facts = {
    null: "takes the writes of padding and is never handed out.",
    free: "is free.",
    cached: "is free, and what it holds is kept: a prompt that begins with the same tokens takes it as it is. It is handed out last.",
    used: `has ${count(block.refCount, "reference")}; ${block.filled} of its ${size} slots are computed${block.known > block.filled ? `, ${block.known - block.filled} more are reserved for tokens that are known` : ""}.`,
  };
  const forks = new Set(block.references.map(({ request }) => request?.number ?? 0));
  const shared = block.refCount < 2 ? "" : forks.size > 1 ? " Requests that begin alike share it." : " Sequences of one request share it; who writes to it first gets a copy.";
  const kept = block.kept && block.kind === "used" ? " The prefix index knows its content, so nobody writes to it any more." : "";
  const name = block.isHost ? "Host block" : "Block";
  return [el("p", {}, el("b", {}, `${name} ${block.id}`), ` ${facts[block.kind]}${shared}${kept}`)];
}

function positions({ place, sequence, pin }, size) {
  const first = place * size;
  return `positions ${first}–${Math.min(first + size, sequence?.known ?? pin.tokens) - 1}`;
}

function dotOf({ request }) {
  const dot = el("span", { class: "dot" });
  dot.style.background = requestColor(request?.number ?? 0);
  return dot;
}

function storyOf(request) {
  const found = request.cached_tokens ? `, ${request.cached_tokens} of them found in the cache` : "";
  const kind = request.beam_width ? `; a beam search of ${request.beam_width}` : request.num_sequences > 1 ? `; ${request.num_sequences} samples` : "";
  const gave = request.num_preemptions ? `; preempted ${count(request.num_preemptions, "time")}` : "";
  return `is ${request.state}: ${count(request.prompt_tokens, "token")} of prompt${found}, up to ${request.max_total_tokens} in all${kind}${gave}.`;
}

/** The block table of a sequence: the physical block of each logical one. */
export function tableStrip(reference, here, snapshot) {
  const { sequence, pin } = reference;
  const isOnHost = Boolean(sequence?.host_blocks.length);
  const table = isOnHost ? sequence.host_blocks : (pin ?? sequence).blocks;
  const place = here ? reference.place : -1;
  const first = Math.max(0, Math.min(place - MOST_ENTRIES / 2, table.length - MOST_ENTRIES));
  const entries = table.slice(first, first + MOST_ENTRIES).map((id, index) => {
    const position = (first + index) * snapshot.pool.block_size;
    return el("li", { class: first + index === place ? "here" : "", title: `from position ${position}` }, id ? String(id) : "–");
  });
  const before = first > 0 ? [el("li", { class: "muted" }, "…")] : [];
  const behind = first + MOST_ENTRIES < table.length ? [el("li", { class: "muted" }, "…")] : [];
  const label = `Block table of ${nameOf(reference)}${isOnHost ? " in host memory" : ""}`;
  const nothing = table.length ? [] : [el("li", { class: "muted" }, "no blocks")];
  return el(
    "div", { class: "table" },
    el("span", {}, dotOf(reference), nameOf(reference)),
    el("ol", { "aria-label": label }, ...before, ...entries, ...behind, ...nothing),
    here ? el("span", { class: "muted" }, positions(reference, snapshot.pool.block_size)) : null,
  );
}
