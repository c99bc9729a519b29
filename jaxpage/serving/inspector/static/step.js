// The last step: which of the compiled shapes it took, whose tokens are in it, and what is padding.

import { fitted } from "./dom.js";
import { requestColor, themed } from "./colors.js";

const tokensOf = (step) => step.rows.reduce((sum, [, , , tokens]) => sum + tokens, 0);

/** [number, label] pairs. */
export function stepNumbers(step) {
  if (!step) return [["no", "step yet"]];
  const [tokens, rows] = step.bucket;
  const padding = 1 - tokensOf(step) / tokens;
  const drafts = step.rows.reduce((sum, row) => sum + row[4], 0);
  return [
    [`${step.step}`, step.kind],
    [`${tokensOf(step)}/${tokens}`, "tokens"],
    [`${step.rows.length}/${rows}`, "rows"],
    [`${Math.round(100 * padding)} %`, "padding"],
    ...(drafts ? [[`${drafts}`, "drafts"]] : []),
    ...(step.copies.length ? [[`${step.copies.length}`, "copied"]] : []),
    ...(step.preempted.length ? [[step.preempted.map((number) => `#${number}`).join(" "), "preempted"]] : []),
    ...(step.seconds === null ? [] : [[(1000 * step.seconds).toFixed(1), "ms"]]),
  ];
}

export function stepText(step, compiles) {
  if (!step) return "Send a request, and every step shows here.";
  const [tokens, rows] = step.bucket;
  const menu = compiles ? ` ${compiles.total} executables were compiled, in ${compiles.seconds.toFixed(1)} s.` : "";
  return `The smallest shape that holds it: ${tokens} tokens of ${rows} rows. Hatched cells are padding.${menu}`;
}

/** A cell for each token of the stream, in the order of its rows; drafts are hollow. */
export function drawStep(canvas, step) {
  const cells = step ? step.rows.flatMap(([number, , , tokens, drafts]) => Array.from({ length: tokens }, (_, index) => [number, index >= tokens - drafts])) : [];
  const total = step ? step.bucket[0] : 16;
  const width = canvas.clientWidth;
  if (!width) return;
  const pitch = [20, 16, 12, 9, 7, 5, 4, 3].find((size) => Math.ceil(total / Math.floor(width / size)) * size <= 72) ?? 2;
  const columns = Math.floor(width / pitch);
  const context = fitted(canvas, Math.ceil(total / columns) * pitch + 2);
  const size = pitch - (pitch > 5 ? 2 : 1);
  for (let index = 0; index < total; index++) {
    const [x, y] = [1 + (index % columns) * pitch, 1 + Math.floor(index / columns) * pitch];
    context.beginPath();
    context.roundRect(x, y, size, size, Math.min(3, size / 4));
    if (index < cells.length) drawToken(context, ...cells[index]);
    else drawPadding(context, x, y, size);
  }
}

function drawToken(context, number, isDraft) {
  context.fillStyle = requestColor(number, isDraft ? 0.3 : 1);
  context.fill();
  if (!isDraft) return;
  context.strokeStyle = requestColor(number);
  context.lineWidth = 1.5;
  context.stroke();
}

function drawPadding(context, x, y, size) {
  context.fillStyle = themed("cell-free");
  context.fill();
  context.strokeStyle = themed("cached-line");
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(x + 2, y + size - 2);
  context.lineTo(x + size - 2, y + 2);
  context.stroke();
}

/** A bar for each step: as high as its shape, filled as far as it has tokens. Heights are square roots, so that decodes are seen. */
export function drawHistory(canvas, history) {
  const height = 44;
  const context = fitted(canvas, height);
  const most = Math.sqrt(Math.max(16, ...history.map(([, , tokens]) => tokens)));
  const pitch = 5;
  const shown = history.slice(-Math.floor(canvas.clientWidth / pitch));
  shown.forEach(([, tokens, bucket], index) => {
    const [x, full, filled] = [index * pitch, (Math.sqrt(bucket) / most) * height, (Math.sqrt(tokens) / most) * height];
    context.fillStyle = themed("cached-line");
    context.fillRect(x, height - full, pitch - 1.5, full);
    context.fillStyle = themed("accent");
    context.fillRect(x, height - filled, pitch - 1.5, filled);
  });
}
