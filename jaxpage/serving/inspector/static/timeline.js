// The course of a request: segments [kind, start, end or null, tokens], as jaxpage/serving/inspector/watching.py keeps them.

import { fitted } from "./dom.js";
import { requestColor, segmentAlpha, themed } from "./colors.js";

const MOST_SEGMENTS = 200;

export function wait(request, kind, at) {
  close(request, at);
  request.timeline.push([kind, at, null, 0]);
}

/** A row of a step. The decodes of one step after the other become one segment; each step's chunk is its own. */
export function compute(request, kind, began, ended, numTokens, step) {
  close(request, began);
  const last = request.timeline.at(-1);
  const goesOn = request.lastStep === step || (kind === "decode" && request.lastStep === step - 1);
  if (last && last[0] === kind && (goesOn || request.timeline.length >= MOST_SEGMENTS)) {
    last[2] = ended;
    last[3] += numTokens;
  } else {
    request.timeline.push([kind, began, ended, numTokens]);
    request.timeline.splice(0, request.timeline.length - MOST_SEGMENTS);
  }
  request.lastStep = step;
}

export function close(request, at) {
  const last = request.timeline.at(-1);
  if (last && last[2] === null) last[2] = at;
}

/** Draws a request's course between two times, one lane high. */
export function drawTimeline(canvas, request, from, to, now) {
  const height = 18;
  const context = fitted(canvas, height);
  const width = canvas.clientWidth;
  const x = (time) => ((time - from) / Math.max(to - from, 1e-9)) * width;
  const color = requestColor(request.number);
  context.fillStyle = themed("line");
  const [first, last] = [request.timeline[0], request.timeline.at(-1)];
  if (first) context.fillRect(x(first[1]), height / 2 - 0.5, x(last[2] ?? now) - x(first[1]), 1);
  for (const [kind, start, end] of request.timeline) {
    const left = Math.max(x(start), 0);
    if (x(end ?? now) < 0) continue;
    const right = Math.max(x(end ?? now), left + 1.5);
    if (kind === "queued" || kind === "preempted" || kind === "swapped") {
      drawWaiting(context, kind, left, right, height);
    } else {
      context.globalAlpha = segmentAlpha[kind];
      context.fillStyle = color;
      const gap = kind === "chunk" && right - left > 4 ? 1 : 0; // chunks are told apart
      context.fillRect(left, kind === "chunk" ? 2 : 5, right - left - gap, kind === "chunk" ? height - 4 : height - 10);
      context.globalAlpha = 1;
    }
  }
}

function drawWaiting(context, kind, left, right, height) {
  context.strokeStyle = kind === "queued" ? themed("muted") : themed(kind);
  context.lineWidth = 1.5;
  context.setLineDash(kind === "queued" ? [2, 3] : kind === "preempted" ? [5, 3] : []);
  context.beginPath();
  context.moveTo(left, height / 2);
  context.lineTo(right, height / 2);
  context.stroke();
  context.setLineDash([]);
}
