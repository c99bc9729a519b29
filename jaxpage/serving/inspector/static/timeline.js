// The course of a request: segments [kind, start, end or null, tokens], as
// jaxpage/serving/inspector/watching.py keeps them.

import { count, fitCanvas } from "./dom.js";
import { requestColor, segmentAlpha, themeVariable } from "./colors.js";

const HEIGHT = 18;

const NAMES = {
  queued: "waiting",
  chunk: "prefill",
  decode: "decode",
  preempted: "preempted",
  swapped: "swapped out",
};

/** Says what a segment was. unit: "seconds" or "steps". */
export function segmentText([kind, start, end, numTokens], unit, now) {
  const last = end ?? now;
  const when =
    unit === "steps"
      ? last - start > 1
        ? `steps ${start + 1} to ${last}`
        : `step ${start + 1}`
      : `${start.toFixed(2)} s to ${last.toFixed(2)} s (${(1000 * (last - start)).toFixed(0)} ms)`;
  return [NAMES[kind] ?? kind, numTokens ? count(numTokens, "token") : "", when]
    .filter(Boolean)
    .join(" · ");
}

/** Returns the place of the segment at a time, or of the next one to it; -1: there are none. */
export function segmentAt(timeline, time, now) {
  const distance = ([, start, end]) => Math.max(start - time, time - (end ?? now), 0);
  return timeline.reduce(
    (best, segment, index) =>
      best < 0 || distance(segment) < distance(timeline[best]) ? index : best,
    -1,
  );
}

/**
 * Draws a request's course between two times, one lane high. chosen: the segment that is pointed
 * at.
 */
export function drawTimeline(canvas, request, { from, to, now }, chosen = -1) {
  const height = HEIGHT;
  const context = fitCanvas(canvas, height);
  const width = canvas.clientWidth;
  const x = (time) => ((time - from) / Math.max(to - from, 1e-9)) * width;
  const color = requestColor(request.number);
  context.fillStyle = themeVariable("line");
  const [first, last] = [request.timeline[0], request.timeline.at(-1)];
  if (first) context.fillRect(x(first[1]), height / 2 - 0.5, x(last[2] ?? now) - x(first[1]), 1);
  request.timeline.forEach(([kind, start, end], index) => {
    const left = Math.max(x(start), 0);
    if (x(end ?? now) < 0) return;
    const right = Math.max(x(end ?? now), left + 1.5);
    if (kind === "queued" || kind === "preempted" || kind === "swapped") {
      drawWaiting(context, kind, left, right, height);
    } else {
      context.globalAlpha = segmentAlpha[kind];
      context.fillStyle = color;
      const gap = kind === "chunk" && right - left > 4 ? 1 : 0; // chunks are told apart
      context.fillRect(
        left,
        kind === "chunk" ? 2 : 5,
        right - left - gap,
        kind === "chunk" ? height - 4 : height - 10,
      );
      context.globalAlpha = 1;
    }
    if (index === chosen) frame(context, left, right, height);
  });
}

function frame(context, left, right, height) {
  context.strokeStyle = themeVariable("ink");
  context.lineWidth = 1.5;
  context.strokeRect(left + 0.75, 0.75, Math.max(right - left - 1.5, 2), height - 1.5);
}

function drawWaiting(context, kind, left, right, height) {
  context.strokeStyle = kind === "queued" ? themeVariable("muted") : themeVariable(kind);
  context.lineWidth = 1.5;
  context.setLineDash(kind === "queued" ? [2, 3] : kind === "preempted" ? [5, 3] : []);
  context.beginPath();
  context.moveTo(left, height / 2);
  context.lineTo(right, height / 2);
  context.stroke();
  context.setLineDash([]);
}
