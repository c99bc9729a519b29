// Draws KV blocks as cells, each with what it is, whose, and how far it is filled.

import { requestColor, themeVariable } from "./colors.js";

/** Draws a cell as the legend shows it. */
export function drawWithCount(context, block, size) {
  drawCell(context, block, 1, 1, size, block.isWritten);
  drawCount(context, block, 1, 1, size);
}

export function drawCell(context, block, x, y, size, isWritten) {
  const radius = Math.min(5, size / 4);
  context.save();
  context.beginPath();
  context.roundRect(x, y, size, size, radius);
  context.fillStyle = themeVariable(
    block.kind === "used" ? "cell-used" : block.kind === "cached" ? "cell-cached" : "cell-free",
  );
  context.fill();
  context.save();
  context.clip();
  if (block.kind === "used") drawOwners(context, block, x, y, size);
  if (size >= 8) drawVectors(context, block, x, y, size);
  if (block.kind === "cached" || block.kind === "null")
    drawHatch(context, x, y, size, themeVariable(block.kind === "null" ? "line" : "cached-line"));
  if (block.isCached && size >= 8) drawFold(context, x, y, size);
  context.restore();
  if (block.pinned) outline(context, x + 1, y + 1, size - 2, themeVariable("ink"), 2);
  else if (size >= 8)
    outline(context, x, y, size, themeVariable(block.kind === "used" ? "cell-edge" : "line"), 1);
  if (isWritten && size >= 8) {
    context.fillStyle = themeVariable("ink");
    context.fillRect(x + size * 0.2, y + size - 3, size * 0.6, 2);
  }
  context.restore();
}

/**
 * Draws the colours of the requests that refer to the block, filled from the left as far as its
 * slots are; the known tokens are paler.
 */
function drawOwners(context, block, x, y, size) {
  const numbers = [...new Set(block.references.map(({ request }) => request?.number ?? 0))].slice(
    0,
    4,
  );
  const slots = block.slots;
  numbers.forEach((number, index) => {
    const top = y + (index * size) / numbers.length;
    const height = size / numbers.length;
    const fill = (share, alpha) => {
      context.fillStyle = requestColor(number, alpha);
      context.fillRect(x, top, size * share, height);
    };
    fill(1, 0.2);
    fill(block.known / slots, 0.35);
    fill(block.filled / slots, 1);
  });
}

/** Draws a band over the slots that pictures fill. */
function drawVectors(context, { vectors, slots }, x, y, size) {
  const height = Math.max(3, Math.round(size * 0.24));
  for (const { from, to } of vectors) {
    const [left, width] = [x + (size * from) / slots, (size * (to - from)) / slots];
    context.fillStyle = themeVariable("cell-used");
    context.fillRect(left, y, width, height + 1);
    context.fillStyle = themeVariable("picture");
    context.fillRect(left, y, width, height);
  }
}

function drawHatch(context, x, y, size, color) {
  context.strokeStyle = color;
  context.lineWidth = size >= 14 ? 1.5 : 1;
  const gap = Math.max(3, size / 4);
  context.beginPath();
  for (let offset = -size; offset < size; offset += gap) {
    context.moveTo(x + offset, y + size);
    context.lineTo(x + offset + size, y);
  }
  context.stroke();
}

/** Draws a folded corner: the prefix cache knows what is in the block. */
function drawFold(context, x, y, size) {
  const fold = Math.max(4, size * 0.3);
  context.fillStyle = themeVariable("ink");
  context.globalAlpha *= 0.75;
  context.beginPath();
  context.moveTo(x + size - fold, y);
  context.lineTo(x + size, y);
  context.lineTo(x + size, y + fold);
  context.fill();
}

/** Draws the reference count, where there is more than one reference. */
export function drawCount(context, { refCount }, x, y, size) {
  if (refCount < 2 || size < 14) return;
  context.font = `700 ${Math.round(size * 0.5)}px ${themeVariable("font")}`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.lineWidth = 3;
  context.strokeStyle = themeVariable("card");
  context.strokeText(refCount, x + size / 2, y + size / 2 + 1);
  context.fillStyle = themeVariable("ink");
  context.fillText(refCount, x + size / 2, y + size / 2 + 1);
}

export function outline(context, x, y, size, color, width) {
  context.strokeStyle = color;
  context.lineWidth = width;
  context.beginPath();
  context.roundRect(x, y, size, size, Math.min(5, size / 4));
  context.stroke();
}

export function drawArrow(context, [x0, y0], [x1, y1], size, color) {
  const [dx, dy] = [x1 - x0, y1 - y0];
  const length = Math.hypot(dx, dy) || 1;
  const bend = Math.min(40, length / 3);
  const [cx, cy] = [(x0 + x1) / 2 - (dy / length) * bend, (y0 + y1) / 2 + (dx / length) * bend];
  context.strokeStyle = context.fillStyle = color;
  context.lineWidth = 2;
  context.beginPath();
  context.moveTo(x0, y0);
  context.quadraticCurveTo(cx, cy, x1, y1);
  context.stroke();
  const angle = Math.atan2(y1 - cy, x1 - cx);
  const head = Math.max(5, size / 4);
  context.beginPath();
  context.moveTo(x1, y1);
  context.lineTo(x1 - head * Math.cos(angle - 0.5), y1 - head * Math.sin(angle - 0.5));
  context.lineTo(x1 - head * Math.cos(angle + 0.5), y1 - head * Math.sin(angle + 0.5));
  context.fill();
}
