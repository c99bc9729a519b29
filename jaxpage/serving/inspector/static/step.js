// The last step: its bucket, whose tokens are in it, what is padding, and the steps before it.

import { $, count, el, fitCanvas } from "./dom.js";
import { requestColor, themeVariable } from "./colors.js";
import { planOf } from "./plan.js";
import { hideTip, showTip } from "./tip.js";

const HEIGHT = 44; // of the history
const PITCH = 5; // of its bars

const numTokens = (step) => step.rows.reduce((sum, [, , , tokens]) => sum + tokens, 0);

export class StepView {
  /** Calls onStep(step) when a bar of the history was clicked, or Enter was pressed on it. */
  constructor({ onStep }) {
    this.onStep = onStep;
    this.pointed = null; // a step of the history
    this.shown = [];
    const canvas = $("history");
    for (const kind of ["pointermove", "pointerdown"])
      canvas.addEventListener(kind, ({ offsetX }) =>
        this.pointAt(this.shown[Math.floor(offsetX / PITCH)]),
      );
    for (const kind of ["pointerleave", "blur"])
      canvas.addEventListener(kind, () => this.pointAt(undefined));
    canvas.addEventListener("click", () => this.pointed !== null && this.onStep(this.pointed));
    canvas.addEventListener("keydown", (event) => this.onKey(event));
    $("plan-box").addEventListener("toggle", () => this.showPlan());
  }

  show(snapshot, isLive) {
    const { step, history, compiles } = snapshot;
    this.snapshot = snapshot;
    const numbers = stepNumbers(step).map(([number, label]) =>
      el("span", { class: "part" }, el("b", {}, number), ` ${label}`),
    );
    $("step-numbers").replaceChildren(...numbers);
    $("step-text").textContent = stepText(step, compiles);
    $("step-error").textContent = step?.error
      ? `This step failed, and the requests that ran ended with an error: ${step.error}`
      : "";
    $("step").setAttribute("aria-label", $("step-numbers").textContent);
    drawStep($("step"), step);
    this.shown = history.slice(-Math.max(1, Math.floor($("history").clientWidth / PITCH)));
    drawHistory($("history"), this.shown, this.pointed);
    if (!isLive && this.isLive !== isLive) $("plan-box").open = true;
    this.isLive = isLive;
    this.showPlan();
  }

  showPlan() {
    if (this.snapshot && $("plan-box").open) $("plan").replaceChildren(...planOf(this.snapshot));
  }

  pointAt(entry) {
    this.pointed = entry?.[0] ?? null;
    drawHistory($("history"), this.shown, this.pointed);
    if (!entry) return hideTip();
    $("segment").textContent = historyText(entry);
    const box = $("history").getBoundingClientRect();
    showTip(
      new DOMRect(box.x + this.shown.indexOf(entry) * PITCH, box.y, PITCH, box.height),
      historyText(entry),
    );
  }

  /** Walks with left and right over the steps before; Enter goes to one, of a log. */
  onKey(event) {
    const at = this.shown.findIndex(([step]) => step === this.pointed);
    const last = this.shown.length - 1;
    if (event.key === "Enter" && at >= 0) this.onStep(this.pointed);
    else if (event.key === "ArrowLeft")
      this.pointAt(this.shown[at < 0 ? last : Math.max(at - 1, 0)]);
    else if (event.key === "ArrowRight")
      this.pointAt(this.shown[at < 0 ? last : Math.min(at + 1, last)]);
    else return;
    event.preventDefault();
  }
}

function stepNumbers(step) {
  if (!step) return [["no", "step yet"]];
  const [tokens, rows] = step.bucket;
  const padding = 1 - numTokens(step) / tokens;
  const drafts = step.rows.reduce((sum, row) => sum + row[4], 0);
  return [
    [`${step.step}`, step.kind],
    [`${numTokens(step)}/${tokens}`, "tokens"],
    [`${step.rows.length}/${rows}`, "rows"],
    [`${Math.round(100 * padding)} %`, "padding"],
    ...(drafts ? [[`${drafts}`, drafts === 1 ? "draft" : "drafts"]] : []),
    ...(step.copies.length ? [[`${step.copies.length}`, "copied"]] : []),
    ...(step.preempted.length
      ? [[step.preempted.map((number) => `#${number}`).join(" "), "preempted"]]
      : []),
    ...(step.seconds === null ? [] : [[(1000 * step.seconds).toFixed(1), "ms"]]),
  ];
}

function stepText(step, compiles) {
  if (!step) return "Each step appears here once a request runs.";
  const [tokens, rows] = step.bucket;
  const menu = compiles
    ? ` There before the first request: ${count(compiles.total, "executable")}, compiled or read ` +
      `in ${compiles.seconds.toFixed(1)} s.`
    : "";
  return (
    "One cell per query token; hatched: padding; hollow: drafts. The smallest bucket that fits: " +
    `${count(tokens, "token")}, ${count(rows, "row")}.${menu}`
  );
}

/** Draws a cell for each token of the stream, in the order of its rows; drafts are hollow. */
function drawStep(canvas, step) {
  const cells = step
    ? step.rows.flatMap(([number, , , tokens, drafts]) =>
        Array.from({ length: tokens }, (_, index) => [number, index >= tokens - drafts]),
      )
    : [];
  const total = step ? step.bucket[0] : 16;
  const width = canvas.clientWidth;
  if (!width) return;
  const pitch =
    [20, 16, 12, 9, 7, 5, 4, 3].find(
      (size) => Math.ceil(total / Math.floor(width / size)) * size <= 72,
    ) ?? 2;
  const columns = Math.floor(width / pitch);
  const context = fitCanvas(canvas, Math.ceil(total / columns) * pitch + 2);
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
  context.fillStyle = themeVariable("cell-free");
  context.fill();
  context.strokeStyle = themeVariable("cached-line");
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(x + 2, y + size - 2);
  context.lineTo(x + size - 2, y + 2);
  context.stroke();
}

/**
 * Draws a bar for each step: as high as its bucket, filled as far as it has tokens. Heights are
 * square roots, so that decodes are seen.
 */
function drawHistory(canvas, shown, chosen) {
  const context = fitCanvas(canvas, HEIGHT);
  const maxRoot = Math.sqrt(Math.max(16, ...shown.map(([, , tokens]) => tokens)));
  shown.forEach(([step, tokens, bucket], index) => {
    const [x, full, filled] = [
      index * PITCH,
      (Math.sqrt(bucket) / maxRoot) * HEIGHT,
      (Math.sqrt(tokens) / maxRoot) * HEIGHT,
    ];
    context.fillStyle = themeVariable("cached-line");
    context.fillRect(x, HEIGHT - full, PITCH - 1.5, full);
    context.fillStyle = themeVariable(step === chosen ? "ink" : "accent");
    context.fillRect(x, HEIGHT - filled, PITCH - 1.5, filled);
  });
}

function historyText([step, tokens, bucket, seconds]) {
  const took = seconds === null ? "" : ` · ${(1000 * seconds).toFixed(1)} ms`;
  return `step ${step} · ${tokens} of ${count(bucket, "token")}${took}`;
}
