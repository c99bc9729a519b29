// The legends: cells and lines as the page draws them, each with its name.

import { $, el, fitCanvas } from "./dom.js";
import { drawWithCount } from "./cells.js";
import { drawTimeline } from "./timeline.js";

const SIZE = 20;
const USED = {
  kind: "used",
  refCount: 1,
  slots: 16,
  filled: 16,
  known: 16,
  vectors: [],
  references: [{ request: { number: 1 } }],
};
const BLOCKS = [
  [USED, "in use; one colour per request"],
  [{ ...USED, filled: 6, known: 10 }, "computed tokens, known tokens, empty slots"],
  [{ ...USED, vectors: [{ from: 4, to: 16 }] }, "upper band: slots that a picture fills"],
  [{ ...USED, refCount: 2 }, "reference count 2: shared by sequences of one request"],
  [
    {
      ...USED,
      refCount: 3,
      isCached: true,
      references: [{ request: { number: 1 } }, { request: { number: 2 } }],
    },
    "shared by requests",
  ],
  [{ ...USED, isCached: true }, "folded corner: in the prefix cache"],
  [
    { ...USED, kind: "cached", refCount: 0, isCached: true, references: [] },
    "free, still in the prefix cache",
  ],
  [{ ...USED, kind: "free", refCount: 0, references: [] }, "free"],
  [{ ...USED, pinned: true }, "pinned"],
  [{ ...USED, kind: "null", refCount: 0, references: [] }, "null block"],
  [{ ...USED, isWritten: true }, "underlined: written by the last step"],
];
const LINES = [
  ["queued", "waiting"],
  ["chunk", "prefill (a chunk of the prompt)"],
  ["decode", "decode"],
  ["preempted", "preempted, to be recomputed"],
  ["swapped", "preempted, swapped to host memory"],
];

export function drawLegends() {
  const cells = BLOCKS.map(([block, text]) => [
    makeCanvas("swatch", (canvas) => drawWithCount(fitCanvas(canvas, SIZE + 2), block, SIZE)),
    text,
  ]);
  const arrow = [el("span", { class: "arrow", "aria-hidden": "true" }, "↷"), "copy-on-write"];
  $("legend").replaceChildren(...[...cells, arrow].map(item));
  const line = (kind) => (canvas) =>
    drawTimeline(canvas, { number: 1, timeline: [[kind, 0, 1, 0]] }, { from: 0, to: 1, now: 1 });
  $("timeline-legend").replaceChildren(
    ...LINES.map(([kind, text]) => item([makeCanvas("swatch-line", line(kind)), text])),
  );
}

const item = ([swatch, text]) => el("li", {}, swatch, text);

/** Makes a canvas that is drawn once it has a size. */
function makeCanvas(style, draw) {
  const canvas = el("canvas", { class: style, "aria-hidden": "true" });
  new ResizeObserver(() => canvas.clientWidth && draw(canvas)).observe(canvas);
  return canvas;
}
