// The block grid: a cell for each KV block, on a canvas in a box that scrolls. Only the cells in
// sight are drawn, so that a pool of any size costs the same. Which block is meant is told by
// pointer, touch or keyboard.

import { drawArrow, drawCell, drawCount, outline } from "./cells.js";
import { fitCanvas } from "./dom.js";
import { themeVariable } from "./colors.js";

// The steps of the zoom: the size of a cell and the gap after it.
const SIZES = [34, 30, 26, 22, 19, 16, 13, 11, 9, 7, 5, 4];
const READABLE = 16; // cells are made no smaller than this to fit the box
const FADE_MS = 1200;
const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");

export class BlockGrid {
  /**
   * Takes a canvas in an .extent in a .scroll box. onPoint(block or null): the pointer or the
   * cursor is on a block. onChoose(block): it was clicked, or Enter was pressed. onView(): other
   * cells are in sight.
   */
  constructor(canvas, { maxHeight, onPoint, onChoose, onView = () => {} }) {
    Object.assign(this, { canvas, maxHeight, onPoint, onChoose, onView });
    this.extent = canvas.parentElement;
    this.box = this.extent.parentElement;
    this.box.style.maxHeight = `${maxHeight}px`;
    this.blocks = [];
    this.indices = new Map(); // by block id
    this.size = null; // the zoom; null: as large as fits, if that is readable
    this.marked = null; // a Set of block ids; the others step back
    this.paths = []; // block tables of what is marked: {ids, color}
    this.copies = []; // {from, to, since}
    this.written = new Set();
    this.cursor = null;
    this.drawnRange = [0, 0]; // the indices in the box when it was drawn last, from and up to
    this.frame = 0;
    canvas.addEventListener("pointermove", (event) =>
      onPoint(this.blockAt(event.offsetX, event.offsetY)),
    );
    canvas.addEventListener("pointerleave", () => onPoint(null));
    canvas.addEventListener("click", (event) =>
      onChoose(this.blockAt(event.offsetX, event.offsetY)),
    );
    canvas.addEventListener("keydown", (event) => this.onKey(event));
    canvas.addEventListener("blur", () => this.moveTo(null));
    this.box.addEventListener("scroll", () => this.redraw(), { passive: true });
    this.box.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    new ResizeObserver(() => this.redraw()).observe(this.box);
  }

  /** Shows blocks, in order of their ids. */
  show(blocks, { written = new Set(), copies = [], keep = false } = {}) {
    if (
      blocks.length !== this.blocks.length ||
      blocks.some(({ id }, index) => id !== this.blocks[index].id)
    )
      this.indices = new Map(blocks.map(({ id }, index) => [id, index]));
    this.blocks = blocks;
    this.written = written;
    const now = performance.now();
    const old = keep ? this.copies.filter(({ since }) => now - since < FADE_MS) : [];
    this.copies = [
      ...old,
      ...copies.map(([from, to]) => ({ from, to, since: keep ? now : Infinity })),
    ].slice(-24);
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

  /**
   * Zooms one step nearer (1) or further away (-1), with what is in the middle where it was; 0: to
   * what fits.
   */
  zoom(direction) {
    const middle = Math.floor((this.box.scrollTop + this.height / 2) / this.pitch) * this.columns;
    const at = SIZES.indexOf(this.minSize);
    this.size = direction ? SIZES[Math.min(Math.max(at - direction, 0), SIZES.length - 1)] : null;
    this.draw();
    this.box.scrollTop = Math.floor(middle / this.columns) * this.pitch - this.height / 2;
    this.redraw();
  }

  onWheel(event) {
    if (!event.ctrlKey) return; // without it the box scrolls
    event.preventDefault();
    this.zoom(event.deltaY < 0 ? 1 : -1);
  }

  onKey(event) {
    const page = Math.max(1, Math.floor(this.height / this.pitch)) * this.columns;
    const steps = {
      ArrowLeft: -1,
      ArrowRight: 1,
      ArrowUp: -this.columns,
      ArrowDown: this.columns,
      PageUp: -page,
      PageDown: page,
    };
    const zooms = { "+": 1, "=": 1, "-": -1, 0: 0 };
    const last = this.blocks.length - 1;
    const from = this.cursor ?? -1;
    if (event.key in steps)
      this.moveTo(from < 0 ? 0 : Math.min(Math.max(from + steps[event.key], 0), last));
    else if (event.key in zooms) this.zoom(zooms[event.key]);
    else if (event.key === "Home") this.moveTo(0);
    else if (event.key === "End") this.moveTo(last);
    else if (event.key === "Enter" || event.key === " ")
      this.onChoose(this.blocks[this.cursor] ?? null);
    else return;
    event.preventDefault();
  }

  moveTo(index) {
    this.cursor = index;
    this.onPoint(index === null ? null : (this.blocks[index] ?? null));
    if (index !== null) this.bringIntoSight(index);
    this.redraw();
  }

  bringIntoSight(index) {
    const top = Math.floor(index / this.columns) * this.pitch;
    this.box.scrollTop = Math.min(
      Math.max(this.box.scrollTop, top + this.pitch + 2 - this.height),
      top,
    );
  }

  /** Scrolls to a block, or to the next one that is shown. */
  scrollTo(id) {
    const index = this.indices.get(id) ?? this.blocks.findIndex((block) => block.id >= id);
    const row = Math.floor((index < 0 ? this.blocks.length : index) / this.columns);
    this.box.scrollTop = row * this.pitch - this.height / 2;
  }

  layout() {
    const width = this.canvas.clientWidth;
    const fits = (size) =>
      Math.ceil(this.blocks.length / Math.max(1, Math.floor(width / size))) * size <=
      this.maxHeight;
    this.minSize = this.size ?? SIZES.find((size) => size === READABLE || fits(size));
    this.columns = Math.max(1, Math.floor(width / this.minSize));
    // Rows are as wide as the box, unless there is less than one.
    this.pitch = this.blocks.length < this.columns ? this.minSize : (width - 1) / this.columns;
    this.cell = Math.floor(this.pitch) - (this.minSize > 15 ? 4 : this.minSize > 8 ? 2 : 1);
    const fullHeight = Math.max(1, Math.ceil(this.blocks.length / this.columns)) * this.pitch + 2;
    this.height = Math.min(fullHeight, this.maxHeight);
    this.extent.style.height = `${fullHeight}px`;
    const first = Math.floor(this.box.scrollTop / this.pitch) * this.columns;
    const end = Math.ceil((this.box.scrollTop + this.height) / this.pitch) * this.columns;
    this.drawnRange = [Math.max(0, first), end];
  }

  /**
   * Returns the indices of the blocks in the box, from and up to: of the blocks that there are,
   * which may be fewer than were drawn.
   */
  get visibleRange() {
    return this.drawnRange.map((index) => Math.min(index, this.blocks.length));
  }

  blockAt(x, y) {
    const column = Math.floor((x - 1) / this.pitch);
    const index = Math.floor((y - 1 + this.box.scrollTop) / this.pitch) * this.columns + column;
    return column >= 0 && column < this.columns ? (this.blocks[index] ?? null) : null;
  }

  corner(index) {
    return [
      1 + (index % this.columns) * this.pitch,
      1 + Math.floor(index / this.columns) * this.pitch - this.box.scrollTop,
    ];
  }

  /** Returns the middle of a block's cell; null where it is not shown. */
  center(id) {
    const index = this.indices.get(id);
    if (index === undefined) return null;
    const [x, y] = this.corner(index);
    return [x + this.cell / 2, y + this.cell / 2];
  }

  draw() {
    if (!this.canvas.clientWidth) return;
    this.layout();
    const context = fitCanvas(this.canvas, this.height);
    const inSight = this.blocks
      .slice(...this.visibleRange)
      .map((block, index) => [block, this.visibleRange[0] + index]);
    const isPale = ({ id }) => this.marked && !this.marked.has(id);
    for (const [block, index] of inSight) {
      context.globalAlpha = isPale(block) ? 0.22 : 1;
      drawCell(context, block, ...this.corner(index), this.cell, this.written.has(block.id));
    }
    context.globalAlpha = 1;
    this.paths.forEach(({ ids, color }) => this.drawPath(context, ids, color));
    for (const [block, index] of inSight)
      if (!isPale(block)) drawCount(context, block, ...this.corner(index), this.cell);
    this.drawCopies(context);
    if (this.cursor !== null && this.cursor < this.blocks.length)
      this.frameCell(context, this.cursor, "accent");
    Object.assign(this.canvas.dataset, { cells: inSight.length, size: this.cell });
    this.onView();
  }

  frameCell(context, index, color) {
    const [x, y] = this.corner(index);
    outline(context, x - 1, y - 1, this.cell + 2, themeVariable(color), 2);
  }

  /**
   * Draws a line through a block table in the order of positions: neighbours in a text are
   * scattered in memory.
   */
  drawPath(context, ids, color) {
    const points = ids.map((id) => this.center(id)).filter(Boolean);
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
      const [start, end] = [this.center(from), this.center(to)];
      if (age > FADE_MS || !start || !end) continue;
      if (since !== Infinity) fading = true;
      context.globalAlpha = reducedMotion.matches ? 1 : 1 - age / FADE_MS;
      drawArrow(context, start, end, this.cell, themeVariable("copy"));
      this.frameCell(context, this.indices.get(to), "copy");
    }
    context.globalAlpha = 1;
    if (fading) this.redraw();
  }
}
