// The inspector: draws a snapshot, whether it came from a running engine or from a recorded event log.

import { $, count, el, fitted } from "./dom.js";
import { requestColor, themed } from "./colors.js";
import { BlockGrid, drawWhole } from "./grid.js";
import { blocksOf, countsOf, hostBlocksOf, nameOf } from "./snapshot.js";
import { describe, tableStrip } from "./detail.js";
import { drawHistory, drawStep, stepNumbers, stepText } from "./step.js";
import { drawTimeline } from "./timeline.js";

const MOST_ROWS = 24;
const MOST_PATHS = 8;
const WINDOW = { seconds: [2, 40], steps: [20, 320] }; // of the timelines: at least and at most

export class InspectorView {
  constructor() {
    this.snapshot = null;
    this.isLive = false;
    this.lastStep = 0; // that was shown
    this.pointed = null; // {block} or {host} by id, or {request} by number: under the pointer or the cursor
    this.chosen = null; // the same, where it was clicked
    this.rows = new Map(); // of the list of requests, by number
    const grid = (id, maxHeight, kind) =>
      new BlockGrid($(id), {
        maxHeight,
        onPoint: (block) => this.point(block && { [kind]: block.id }),
        onChoose: (block) => this.choose(block && { [kind]: block.id }),
      });
    this.grid = grid("grid", 330, "block");
    this.hostGrid = grid("host-grid", 90, "host");
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.choose(null));
    new ResizeObserver(() => this.redraw()).observe($("step"));
  }

  /** isLive: copies fade; otherwise those of the step stay. */
  show(snapshot, isLive) {
    const isFirst = !this.snapshot || this.isLive !== isLive; // what was copied before nobody looked at
    this.snapshot = snapshot;
    this.isLive = isLive;
    this.blocks = blocksOf(snapshot);
    this.hostBlocks = hostBlocksOf(snapshot);
    const step = snapshot.step;
    const copies = snapshot.copies.filter(([number]) => (isLive ? number > this.lastStep && !isFirst : number === step?.step));
    this.grid.show(this.blocks, { written: this.written(), copies: copies.map(([, from, to]) => [from, to]), keep: isLive });
    $("host").hidden = !this.hostBlocks.length;
    if (this.hostBlocks.length) this.hostGrid.show(this.hostBlocks);
    this.lastStep = step?.step ?? 0;
    this.showNumbers();
    this.showRequests();
    this.showStep();
    this.showPointed();
  }

  redraw() {
    this.lastStep = this.snapshot?.step?.step ?? 0;
    if (this.snapshot) this.show(this.snapshot, this.isLive);
    drawLegends();
  }

  /** The blocks that the last step wrote to. */
  written() {
    const { step, requests, pool } = this.snapshot;
    const tables = new Map(requests.flatMap(({ sequences }) => sequences.map(({ id, blocks }) => [id, blocks])));
    const written = new Set();
    for (const [, id, start, tokens] of step?.rows ?? []) {
      const last = Math.floor((start + tokens - 1) / pool.block_size);
      for (let place = Math.floor(start / pool.block_size); place <= last; place++) written.add(tables.get(id)?.[place]);
    }
    return written;
  }

  showNumbers() {
    const counts = countsOf(this.blocks);
    const part = (name, label) => el("span", { class: `part ${name}` }, el("b", {}, String(counts[name])), ` ${label}`);
    const shared = counts.shared ? el("span", { class: "part" }, el("b", {}, String(counts.shared)), ` shared, saves ${counts.saved}`) : null;
    $("numbers").replaceChildren(...[part("used", "in use"), part("cached", "cached"), part("free", "free"), shared].filter(Boolean));
    const pieces = ["used", "cached", "free"].map((name) => {
      const piece = el("span", { class: `piece ${name}` });
      piece.style.width = `${(100 * counts[name]) / counts.total}%`;
      return piece;
    });
    $("bar").replaceChildren(...pieces);
    $("bar").setAttribute("aria-label", `${counts.used} of ${counts.total} blocks in use, ${counts.cached} cached, ${counts.free} free`);
    const label = `${this.blocks.length} KV blocks of ${this.snapshot.pool.block_size} tokens. Arrow keys move, Enter holds a block, Escape lets go.`;
    $("grid").setAttribute("aria-label", label);
  }

  showRequests() {
    const { requests, clock } = this.snapshot;
    const number = (state) => requests.filter((request) => request.state === state).length;
    const states = ["running", "waiting", "preempted", "swapped"].map((state) => [number(state), state]);
    $("queue").replaceChildren(...states.filter(([n, state]) => n || state === "running").map(([n, state]) => el("span", { class: "part" }, el("b", {}, String(n)), ` ${state}`)));
    const shown = requests.slice(0, MOST_ROWS);
    const [least, most] = WINDOW[clock.unit];
    const open = shown.filter(({ state }) => state !== "finished");
    const starts = (open.length ? open : shown).map(({ timeline }) => timeline[0]?.[1] ?? clock.now);
    const end = Math.max(...shown.map(({ timeline }) => timeline.at(-1)?.[2] ?? clock.now)); // of the last that went on
    const from = Math.max(Math.min(end, ...starts), end - most);
    const to = Math.max(end, from + least);
    const rows = shown.map((request) => this.row(request));
    const list = $("requests");
    const more = requests.length > MOST_ROWS ? [el("li", { class: "muted small" }, `and ${requests.length - MOST_ROWS} more`)] : [];
    const empty = shown.length ? [] : [el("li", { class: "muted empty" }, "Nothing runs and nothing waits.")];
    if (!sameChildren(list, rows) || more.length || empty.length) replaceRows(list, [...rows.map((row) => row.item), ...more, ...empty]);
    shown.forEach((request, index) => drawTimeline(rows[index].canvas, request, from, to, clock.now));
    for (const known of [...this.rows.keys()]) if (!shown.some((request) => request.number === known)) this.rows.delete(known);
  }

  /** The list's row of a request: made once, then filled anew. */
  row(request) {
    let row = this.rows.get(request.number);
    if (!row) {
      const name = el("span", { class: "name" });
      const dot = el("span", { class: "dot" });
      const [state, tokens, canvas] = [el("span", { class: "state" }), el("span", { class: "tokens mono" }), el("canvas", { class: "timeline", "aria-hidden": "true" })];
      const own = { request: request.number };
      const button = el(
        "button",
        { type: "button", click: () => this.choose(own), pointerenter: () => this.point(own), pointerleave: () => this.point(null), focus: () => this.point(own), blur: () => this.point(null) },
        dot, name, state, tokens,
      );
      row = { item: el("li", {}, button, canvas), button, dot, name, state, tokens, canvas };
      this.rows.set(request.number, row);
    }
    row.dot.style.background = requestColor(request.number);
    row.name.textContent = `#${request.number}`;
    row.state.textContent = request.state;
    row.state.dataset.state = request.state;
    const known = Math.max(...request.sequences.map((sequence) => sequence.known));
    const several = request.sequences.length > 1 ? ` × ${request.sequences.length}` : "";
    row.tokens.textContent = `${request.prompt_tokens} + ${known - request.prompt_tokens}${several}`;
    row.button.setAttribute("aria-pressed", String(this.chosen?.request === request.number));
    row.button.title = titleOf(request);
    return row;
  }

  showStep() {
    const { step, history, compiles } = this.snapshot;
    $("step-numbers").replaceChildren(...stepNumbers(step).map(([number, label]) => el("span", { class: "part" }, el("b", {}, number), ` ${label}`)));
    $("step-text").textContent = stepText(step, compiles);
    $("step").setAttribute("aria-label", $("step-numbers").textContent);
    drawStep($("step"), step);
    drawHistory($("history"), history);
  }

  point(what) {
    this.pointed = what;
    if (this.snapshot) this.showPointed();
  }

  choose(what) {
    this.chosen = JSON.stringify(what) === JSON.stringify(this.chosen) ? null : what;
    if (this.snapshot) this.redraw();
  }

  /** Marks what is pointed at, or else was chosen, and says what it is. */
  showPointed() {
    const what = this.pointed ?? this.chosen;
    const block = what?.block != null ? this.blocks[what.block] : what?.host != null ? this.hostBlocks[what.host - 1] : null;
    const request = what?.request != null ? this.snapshot.requests.find(({ number }) => number === what.request) : null;
    const references = block ? block.references : request ? request.sequences.map((sequence) => ({ request, sequence })) : [];
    const tables = references.map(({ sequence, pin }) => (pin ?? sequence).blocks);
    const marked = new Set(tables.flat());
    if (what?.block != null) marked.add(what.block);
    const paths = references.slice(0, MOST_PATHS).map(({ request: owner }, index) => ({ ids: tables[index], color: pathColor(owner) }));
    this.grid.mark(marked.size && references.length ? marked : null, paths);
    const hosts = new Set(references.flatMap(({ sequence }) => sequence?.host_blocks ?? []));
    this.hostGrid.mark(hosts.size ? hosts : null, []);
    const strips = references.slice(0, MOST_PATHS).map((reference) => tableStrip(reference, block, this.snapshot));
    $("detail").replaceChildren(...describe(block, request, this.snapshot), el("div", { class: "tables" }, ...strips));
  }
}

const pathColor = (request) => (request ? `color-mix(in oklab, ${requestColor(request.number)} 55%, ${themed("ink")})` : themed("ink"));

function titleOf(request) {
  const parts = [
    request.id,
    `${request.prompt_tokens} tokens of prompt, ${request.cached_tokens} of them found in the cache, up to ${request.max_total_tokens} in all`,
    request.beam_width ? `a beam search of ${request.beam_width}` : request.num_sequences > 1 ? `${request.num_sequences} samples` : "",
    request.num_preemptions ? `preempted ${count(request.num_preemptions, "time")}` : "",
    request.reasons ? `ended: ${request.reasons.join(", ")}` : "",
    request.prompt ? `prompt: ${request.prompt}` : "",
  ];
  return parts.filter(Boolean).join("\n");
}

function sameChildren(list, rows) {
  return list.children.length === rows.length && rows.every(({ item }, index) => list.children[index] === item);
}

/** As replaceChildren, but who has the focus keeps it. */
function replaceRows(list, items) {
  const focused = document.activeElement;
  list.replaceChildren(...items);
  if (list.contains(focused)) focused.focus();
}

/** The legends show cells as the grid draws them. */
export function drawLegends() {
  const reference = (number) => ({ request: { number } });
  const used = { kind: "used", refCount: 1, slots: 16, filled: 16, known: 16, references: [reference(1)] };
  const entries = [
    [used, "in use, a colour for each request"],
    [{ ...used, filled: 6, known: 10 }, "partly filled: computed, known, empty slots"],
    [{ ...used, refCount: 2 }, "shared by forks: 2 references"],
    [{ ...used, refCount: 3, kept: true, references: [reference(1), reference(2)] }, "shared by requests"],
    [{ ...used, kept: true }, "folded corner: the prefix index finds it"],
    [{ ...used, kind: "cached", refCount: 0, kept: true, references: [] }, "cached: nobody's, found again while it lasts"],
    [{ ...used, kind: "free", refCount: 0, references: [] }, "free"],
    [{ ...used, pinned: true }, "pinned"],
    [{ ...used, kind: "null", refCount: 0, references: [] }, "block 0 takes the writes of padding"],
    [{ ...used, isWritten: true }, "underlined: written by the last step"],
  ];
  const size = 20;
  const swatches = entries.map(([block, text]) => [legendCanvas(size, (context) => drawWhole(context, block, size)), text]);
  const arrow = el("span", { class: "arrow" }, "↷");
  $("legend").replaceChildren(...[...swatches, [arrow, "copy-on-write: a fork writes into a copy"]].map(([swatch, text]) => el("li", {}, swatch, text)));
  const kinds = [["queued", "queued"], ["chunk", "chunk of a prompt"], ["decode", "decode"], ["preempted", "preempted: computes again"], ["swapped", "swapped out"]];
  const lines = kinds.map(([kind, text]) => [timelineSwatch(kind), text]);
  $("timeline-legend").replaceChildren(...lines.map(([swatch, text]) => el("li", {}, swatch, text)));
  requestAnimationFrame(() => lines.forEach(([canvas], index) => drawTimeline(canvas, { number: 1, timeline: [[kinds[index][0], 0, 1, 0]] }, 0, 1, 1)));
}

const timelineSwatch = () => el("canvas", { class: "swatch-line" });

function legendCanvas(size, draw) {
  const canvas = el("canvas", { class: "swatch" });
  requestAnimationFrame(() => draw(fitted(canvas, size + 2)));
  return canvas;
}
