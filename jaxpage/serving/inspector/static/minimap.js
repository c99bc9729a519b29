// The whole block pool in a strip: where in it the cells in sight lie. Shown while not all of them
// are.

import { fitCanvas } from "./dom.js";
import { requestColor, themeVariable } from "./colors.js";

const MAX_SIDE = 6; // of a block, in px
const MIN_SIDE = 1; // below it several blocks share a cell
const MAX_HEIGHT = 60;
const MARGIN = 3; // for the frame

export class Minimap {
  constructor(canvas, grid) {
    this.canvas = canvas;
    this.grid = grid;
    this.blocks = [];
    const go = ({ offsetX, offsetY }) => {
      const cell =
        Math.max(0, Math.floor((offsetY - MARGIN) / this.side)) * this.columns +
        Math.floor(offsetX / this.side);
      const block = this.blocks[Math.min(cell * this.perCell, this.blocks.length - 1)];
      if (block) grid.scrollTo(block.id);
    };
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      go(event);
    });
    canvas.addEventListener("pointermove", (event) => event.buttons && go(event));
  }

  /** Shows the blocks of the whole pool. marked: a Set of ids, or null. */
  show(blocks, marked) {
    this.blocks = blocks;
    this.marked = marked;
    this.draw();
  }

  draw() {
    const [first, end] = this.grid.visibleRange;
    this.canvas.hidden = end - first >= this.blocks.length;
    if (this.canvas.hidden || !this.canvas.clientWidth) return;
    const height = this.layout();
    const context = fitCanvas(this.canvas, height);
    const colors = new Map();
    const colorOf = (block) => {
      const number = block.references[0]?.request?.number ?? 0;
      if (!colors.has(number)) colors.set(number, requestColor(number));
      return colors.get(number);
    };
    const cells = Math.ceil(this.blocks.length / this.perCell);
    for (let start = 0; start < cells;) {
      const [color, isPale] = this.styleOf(start, colorOf);
      let end = start + 1;
      const endOfRow = (Math.floor(start / this.columns) + 1) * this.columns;
      const isSame = ([other, pale]) => other === color && pale === isPale;
      while (end < Math.min(endOfRow, cells) && isSame(this.styleOf(end, colorOf))) end += 1;
      context.globalAlpha = isPale ? 0.3 : 1;
      context.fillStyle = color;
      if (color)
        context.fillRect(
          (start % this.columns) * this.side,
          MARGIN + Math.floor(start / this.columns) * this.side,
          (end - start) * this.side,
          this.side,
        );
      start = end;
    }
    context.globalAlpha = 1;
    this.frameSight(context);
  }

  layout() {
    const width = this.canvas.clientWidth;
    const side = Math.sqrt((width * MAX_HEIGHT) / this.blocks.length);
    this.columns = Math.ceil(width / Math.min(Math.max(side, MIN_SIDE), MAX_SIDE));
    this.side = width / this.columns;
    this.perCell = Math.ceil(
      this.blocks.length / (this.columns * Math.floor(MAX_HEIGHT / this.side)),
    );
    return Math.ceil(this.blocks.length / this.perCell / this.columns) * this.side + 2 * MARGIN;
  }

  /**
   * Returns the style of a cell: the colour of the block that is marked or most in use, and whether
   * others are meant.
   */
  styleOf(cell, colorOf) {
    const rank = (block) =>
      this.marked?.has(block.id) ? 4 : ({ used: 3, cached: 2 }[block.kind] ?? 1);
    let best = this.blocks[cell * this.perCell];
    for (let index = 1; index < this.perCell; index++) {
      const other = this.blocks[cell * this.perCell + index];
      if (other && rank(other) > rank(best)) best = other;
    }
    const color =
      best.kind === "used"
        ? colorOf(best)
        : best.kind === "cached"
          ? themeVariable("cached-line")
          : "";
    return [color, Boolean(this.marked) && !this.marked.has(best.id)];
  }

  /** Draws a frame around what the grid has in sight. */
  frameSight(context) {
    const [first, end] = this.grid.visibleRange;
    if (first >= end) return;
    const origin = this.blocks[0].id;
    const rowOf = (block) =>
      Math.floor((block.id - origin) / this.perCell / this.columns) * this.side;
    const [top, bottom] = [
      rowOf(this.grid.blocks[first]),
      rowOf(this.grid.blocks[end - 1]) + this.side,
    ];
    context.strokeStyle = themeVariable("accent");
    context.lineWidth = 2;
    context.strokeRect(1, top + 1, this.canvas.clientWidth - 2, bottom - top + 2 * MARGIN - 2);
  }
}
