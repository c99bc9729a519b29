// The block grid: a cell for each KV block, on a canvas. Which block is meant is told by pointer or by keyboard.

import { fitted } from "./dom.js";
import { requestColor, themed } from "./colors.js";

const SIZES = [34, 30, 26, 22, 19, 16, 13, 11, 9, 7, 5, 4]; // of a cell and the gap behind it
const FADE_MS = 1200;
const still = matchMedia("(prefers-reduced-motion: reduce)");

export class BlockGrid {
  /** onPoint(block or null): the pointer or the cursor is on a block. onChoose(block): it was clicked, or Enter was pressed. */
  constructor(canvas, { maxHeight, onPoint, onChoose }) {
    this.canvas = canvas;
    this.maxHeight = maxHeight;
    this.blocks = [];
    this.marked = null; // a Set of block ids; the others step back
    this.paths = []; // block tables of what is marked: {ids, color}
    this.copies = []; // {from, to, since}
    this.written = new Set();
    this.cursor = null;
    this.frame = 0;
    canvas.addEventListener("pointermove", (event) => onPoint(this.blockAt(event.offsetX, event.offsetY)));
    canvas.addEventListener("pointerleave", () => onPoint(null));
    canvas.addEventListener("click", (event) => onChoose(this.blockAt(event.offsetX, event.offsetY)));
    canvas.addEventListener("keydown", (event) => this.onKey(event, onPoint, onChoose));
    canvas.addEventListener("blur", () => this.moveTo(null, onPoint));
    new ResizeObserver(() => this.redraw()).observe(canvas);
  }

  show(blocks, { written = new Set(), copies = [], keep = false } = {}) {
    this.blocks = blocks;
    this.written = written;
    const now = performance.now();
    const old = keep ? this.copies.filter(({ since }) => now - since < FADE_MS) : [];
    this.copies = [...old, ...copies.map(([from, to]) => ({ from, to, since: keep ? now : Infinity }))].slice(-24);
    this.redraw();
  }

  mark(ids, paths) {
    this.marked = ids;
    this.paths = paths;
    this.redraw();
  }

  redraw() {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.draw();
    });
  }

  onKey(event, onPoint, onChoose) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns };
    const last = this.blocks.length - 1;
    const from = this.cursor ?? -1;
    if (event.key in steps) this.moveTo(from < 0 ? 0 : Math.min(Math.max(from + steps[event.key], 0), last), onPoint);
    else if (event.key === "Home") this.moveTo(0, onPoint);
    else if (event.key === "End") this.moveTo(last, onPoint);
    else if (event.key === "Enter" || event.key === " ") onChoose(this.blocks[this.cursor] ?? null);
    else return;
    event.preventDefault();
  }

  moveTo(index, onPoint) {
    this.cursor = index;
    onPoint(index === null ? null : this.blocks[index]);
    this.redraw();
  }

  layout() {
    const width = this.canvas.clientWidth;
    const fits = (size) => Math.ceil(this.blocks.length / Math.max(1, Math.floor(width / size))) * size <= this.maxHeight;
    const least = SIZES.find(fits) ?? SIZES.at(-1);
    this.columns = Math.max(1, Math.floor(width / least));
    this.pitch = this.blocks.length < this.columns ? least : (width - 1) / this.columns; // rows are as wide as the box
    this.size = Math.floor(this.pitch) - (least > 15 ? 4 : least > 8 ? 2 : 1);
    return Math.max(1, Math.ceil(this.blocks.length / this.columns)) * this.pitch + 2;
  }

  blockAt(x, y) {
    const column = Math.floor((x - 1) / this.pitch);
    const index = Math.floor((y - 1) / this.pitch) * this.columns + column;
    return column >= 0 && column < this.columns ? (this.blocks[index] ?? null) : null;
  }

  corner(index) {
    return [1 + (index % this.columns) * this.pitch, 1 + Math.floor(index / this.columns) * this.pitch];
  }

  center(id) {
    const [x, y] = this.corner(id - (this.blocks[0]?.id ?? 0));
    return [x + this.size / 2, y + this.size / 2];
  }

  draw() {
    if (!this.canvas.clientWidth) return;
    const context = fitted(this.canvas, this.layout());
    let cells = 0;
    this.blocks.forEach((block, index) => {
      context.globalAlpha = this.marked && !this.marked.has(block.id) ? 0.22 : 1;
      const [x, y] = this.corner(index);
      drawCell(context, block, x, y, this.size, this.written.has(block.id));
      cells += 1;
    });
    context.globalAlpha = 1;
    this.canvas.dataset.cells = cells;
    this.paths.forEach(({ ids, color }) => this.drawPath(context, ids, color));
    this.blocks.forEach((block, index) => {
      if (!this.marked || this.marked.has(block.id)) drawCount(context, block, ...this.corner(index), this.size);
    });
    this.drawCopies(context);
    if (this.cursor !== null && this.cursor < this.blocks.length) {
      const [x, y] = this.corner(this.cursor);
      outline(context, x - 1, y - 1, this.size + 2, themed("accent"), 2);
    }
  }

  /** Through a block table in the order of positions: neighbours in a text are scattered in memory. */
  drawPath(context, ids, color) {
    const points = ids.filter(Boolean).map((id) => this.center(id));
    context.strokeStyle = color;
    context.lineWidth = 2;
    context.lineJoin = "round";
    context.beginPath();
    points.forEach(([x, y], index) => (index ? context.lineTo(x, y) : context.moveTo(x, y)));
    context.stroke();
    context.fillStyle = color;
    points.forEach(([x, y], index) => {
      context.beginPath();
      context.arc(x, y, index ? 2.5 : 4.5, 0, 7);
      context.fill();
    });
  }

  drawCopies(context) {
    const now = performance.now();
    let fading = false;
    for (const { from, to, since } of this.copies) {
      const age = since === Infinity ? 0 : now - since;
      if (age > FADE_MS) continue;
      if (since !== Infinity) fading = true;
      context.globalAlpha = still.matches ? 1 : 1 - age / FADE_MS;
      drawArrow(context, this.center(from), this.center(to), this.size, themed("copy"));
      const [x, y] = this.corner(to - (this.blocks[0]?.id ?? 0));
      outline(context, x - 1, y - 1, this.size + 2, themed("copy"), 2);
    }
    context.globalAlpha = 1;
    if (fading) this.redraw();
  }
}

/** A cell as the legend shows it. */
export function drawWhole(context, block, size) {
  drawCell(context, block, 1, 1, size, block.isWritten);
  drawCount(context, block, 1, 1, size);
}

function drawCell(context, block, x, y, size, isWritten) {
  const radius = Math.min(5, size / 4);
  context.save();
  context.beginPath();
  context.roundRect(x, y, size, size, radius);
  context.fillStyle = themed(block.kind === "used" ? "cell-used" : block.kind === "cached" ? "cell-cached" : "cell-free");
  context.fill();
  context.save();
  context.clip();
  if (block.kind === "used") drawOwners(context, block, x, y, size);
  if (block.kind === "cached" || block.kind === "null") drawHatch(context, x, y, size, themed(block.kind === "null" ? "line" : "cached-line"));
  if (block.kept && size >= 8) drawFold(context, x, y, size);
  context.restore();
  if (block.pinned) outline(context, x + 1, y + 1, size - 2, themed("ink"), 2);
  else if (size >= 8) outline(context, x, y, size, themed(block.kind === "used" ? "cell-edge" : "line"), 1);
  if (isWritten && size >= 8) {
    context.fillStyle = themed("ink");
    context.fillRect(x + size * 0.2, y + size - 3, size * 0.6, 2);
  }
  context.restore();
}

/** The colours of the requests that refer to the block, filled from the left as far as its slots are; the known tokens paler. */
function drawOwners(context, block, x, y, size) {
  const numbers = [...new Set(block.references.map(({ request }) => request?.number ?? 0))].slice(0, 4);
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

/** A folded corner: the prefix index knows what is in the block. */
function drawFold(context, x, y, size) {
  const fold = Math.max(4, size * 0.3);
  context.fillStyle = themed("ink");
  context.globalAlpha *= 0.75;
  context.beginPath();
  context.moveTo(x + size - fold, y);
  context.lineTo(x + size, y);
  context.lineTo(x + size, y + fold);
  context.fill();
}

/** The reference count, where there is more than one reference. */
function drawCount(context, { refCount }, x, y, size) {
  if (refCount < 2 || size < 14) return;
  context.font = `700 ${Math.round(size * 0.5)}px ${themed("font")}`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.lineWidth = 3;
  context.strokeStyle = themed("card");
  context.strokeText(refCount, x + size / 2, y + size / 2 + 1);
  context.fillStyle = themed("ink");
  context.fillText(refCount, x + size / 2, y + size / 2 + 1);
}

function outline(context, x, y, size, color, width) {
  context.strokeStyle = color;
  context.lineWidth = width;
  context.beginPath();
  context.roundRect(x, y, size, size, Math.min(5, size / 4));
  context.stroke();
}

function drawArrow(context, [x0, y0], [x1, y1], size, color) {
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
