// The list of requests, each with its timeline, which answers to pointer, touch and the arrow keys.

import { $, el } from "./dom.js";
import { requestColor } from "./colors.js";
import { drawTimeline, segmentAt, segmentText } from "./timeline.js";
import { hideTip, showTip } from "./tip.js";

const MAX_ROWS = 24;
const WINDOW = { seconds: [2, 40], steps: [20, 320] }; // of the timelines: at least and at most
const STATES = ["running", "waiting", "preempted", "swapped"];

export class RequestList {
  /** Tells of requests: onPoint({request: number} or null), onChoose({request: number}). */
  constructor({ onPoint, onChoose }) {
    this.onPoint = onPoint;
    this.onChoose = onChoose;
    this.rows = new Map(); // by the number of the request
    this.segment = null; // that is pointed at: {number, index}
  }

  /** Shows the requests of a snapshot. chosen: the number of the request that is held. */
  show({ requests, clock }, chosen) {
    const number = (state) => requests.filter((request) => request.state === state).length;
    const states = STATES.map((state) => [number(state), state]);
    $("queue").replaceChildren(
      ...states
        .filter(([n, state]) => n || state === "running")
        .map(([n, state]) => el("span", { class: "part" }, el("b", {}, String(n)), ` ${state}`)),
    );
    const shown = requests.slice(0, MAX_ROWS);
    this.clock = clock;
    this.span = timeWindowOf(shown, clock);
    const rows = shown.map((request) => this.row(request, chosen));
    const list = $("requests");
    const more =
      requests.length > MAX_ROWS
        ? [el("li", { class: "muted small" }, `and ${requests.length - MAX_ROWS} more`)]
        : [];
    const empty = shown.length
      ? []
      : [el("li", { class: "muted empty" }, "No request is running or waiting.")];
    if (!sameChildren(list, rows) || more.length || empty.length)
      replaceRows(list, [...rows.map((row) => row.item), ...more, ...empty]);
    rows.forEach((row) => this.draw(row));
    for (const known of [...this.rows.keys()])
      if (!shown.some((request) => request.number === known)) this.rows.delete(known);
  }

  draw(row) {
    const chosen = this.segment?.number === row.request.number ? this.segment.index : -1;
    const span = this.spanOf(row);
    row.past.textContent = span === this.span ? "" : pastText(span, this.clock);
    drawTimeline(row.canvas, row.request, span, chosen);
  }

  /**
   * Returns the span of a row. A request that ended before the time that is shown has a scale of
   * its own.
   */
  spanOf({ request: { timeline } }) {
    const end = timeline.at(-1)?.[2] ?? this.span.now;
    return end < this.span.from ? { from: timeline[0][1], to: end, now: end } : this.span;
  }

  /** Returns the list's row of a request, which is made once and then filled anew. */
  row(request, chosen) {
    const row = this.rows.get(request.number) ?? this.newRow(request.number);
    row.request = request;
    row.dot.style.background = requestColor(request.number);
    row.name.textContent = `#${request.number} `;
    row.state.textContent = `${request.state} `;
    row.state.dataset.state = request.state;
    const known = Math.max(...request.sequences.map((sequence) => sequence.known));
    const several = request.sequences.length > 1 ? ` × ${request.sequences.length}` : "";
    const generated = known - request.prompt_tokens;
    row.tokens.textContent = `${request.prompt_tokens} + ${generated}${several}`;
    row.button.setAttribute("aria-pressed", String(chosen === request.number));
    row.button.title = request.id;
    return row;
  }

  newRow(number) {
    const target = { request: number };
    const part = (name) => el("span", { class: name });
    const [dot, name, state, tokens] = [
      part("dot"),
      part("name"),
      part("state"),
      part("tokens mono"),
    ];
    const canvas = el("canvas", { class: "timeline", "aria-hidden": "true" });
    const past = part("past muted");
    const row = { number, canvas, dot, name, state, tokens, past };
    const point = () => this.onPoint(target);
    const clear = () => this.clearPoint(row);
    const button = el(
      "button",
      {
        type: "button",
        "aria-describedby": "timeline-keys",
        click: () => this.onChoose(target),
        pointerenter: point,
        pointerleave: clear,
        focus: point,
        blur: clear,
        keydown: (event) => this.onKey(event, row),
      },
      dot,
      name,
      state,
      tokens,
      el("span", { class: "visually-hidden" }, " prompt and generated tokens"),
    );
    for (const kind of ["pointermove", "pointerdown"])
      canvas.addEventListener(kind, (event) => this.pointAt(row, this.indexAt(row, event.offsetX)));
    canvas.addEventListener("pointerleave", clear);
    canvas.addEventListener("click", () => this.onChoose(target));
    Object.assign(row, {
      button,
      item: el("li", {}, button, el("div", { class: "lane" }, canvas, past)),
    });
    this.rows.set(number, row);
    return row;
  }

  indexAt(row, x) {
    const { from, to, now } = this.spanOf(row);
    return segmentAt(row.request.timeline, from + (x / row.canvas.clientWidth) * (to - from), now);
  }

  /** Says what a segment of a row's timeline was. */
  pointAt(row, index) {
    this.segment = { number: row.number, index };
    this.draw(row);
    this.onPoint({ request: row.number });
    const segment = row.request.timeline[index];
    if (!segment) return;
    const text = segmentText(segment, this.clock.unit, this.span.now);
    $("segment").textContent = `Request ${row.number}: ${text}`;
    const { from, to, now } = this.spanOf(row);
    const box = row.canvas.getBoundingClientRect();
    const middle = ((segment[1] + (segment[2] ?? now)) / 2 - from) / (to - from);
    showTip(
      new DOMRect(box.x + Math.min(Math.max(middle, 0), 1) * box.width, box.y, 1, box.height),
      text,
    );
  }

  clearPoint(row) {
    if (this.segment?.number === row.number) this.segment = null;
    if (row.request) this.draw(row);
    hideTip();
    this.onPoint(null);
  }

  /** Walks with left and right over the segments, and with up and down over the requests. */
  onKey(event, row) {
    const { key } = event;
    const last = row.request.timeline.length - 1;
    const rows = [...this.rows.values()]
      .filter(({ item }) => item.isConnected)
      .sort((a, b) => a.item.offsetTop - b.item.offsetTop);
    const here =
      this.segment?.number === row.number
        ? this.segment.index
        : key === "ArrowLeft"
          ? last + 1
          : -1;
    if (key === "ArrowRight" || key === "ArrowLeft")
      this.pointAt(row, Math.min(Math.max(here + (key === "ArrowRight" ? 1 : -1), 0), last));
    else if (key === "ArrowDown" || key === "ArrowUp")
      rows[rows.indexOf(row) + (key === "ArrowDown" ? 1 : -1)]?.button.focus();
    else return;
    event.preventDefault();
  }
}

/** Returns from when to when the timelines are drawn. */
function timeWindowOf(shown, clock) {
  const [minSpan, maxSpan] = WINDOW[clock.unit];
  const open = shown.filter(({ state }) => state !== "finished");
  const starts = (open.length ? open : shown).map(({ timeline }) => timeline[0]?.[1] ?? clock.now);
  // The end of the request that went on for longest.
  const end = Math.max(...shown.map(({ timeline }) => timeline.at(-1)?.[2] ?? clock.now));
  const from = Math.max(Math.min(end, ...starts), end - maxSpan);
  return { from, to: Math.max(end, from + minSpan), now: clock.now };
}

/** Returns how long a request took that ended before the time that is shown, and how long ago. */
function pastText({ from, to }, { unit, now }) {
  if (unit === "steps") return `${to - from} steps, ${now - to} ago`;
  return `${(to - from).toFixed(1)} s, ${Math.round(now - to)} s ago`;
}

function sameChildren(list, rows) {
  return (
    list.children.length === rows.length &&
    rows.every(({ item }, index) => list.children[index] === item)
  );
}

/** Replaces children as replaceChildren does, but a row that has the focus keeps it. */
function replaceRows(list, items) {
  const focused = document.activeElement;
  list.replaceChildren(...items);
  if (list.contains(focused)) focused.focus();
}
