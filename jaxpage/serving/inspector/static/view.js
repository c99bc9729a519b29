// The inspector: draws a snapshot, whether it came from a running engine or from a file of recorded
// ones.

import { $, count, el } from "./dom.js";
import { requestColor, themeVariable } from "./colors.js";
import { BlockGrid } from "./grid.js";
import { Minimap } from "./minimap.js";
import { RequestList } from "./requests.js";
import { StepView } from "./step.js";
import { blocksOf, countsOf, hostBlocksOf, ofGroup } from "./snapshot.js";
import { describe, tableStrip } from "./detail.js";
import { drawLegends } from "./legend.js";

const MAX_PATHS = 8;
const MAX_SHOWN = 1024; // a larger pool begins with the blocks in use

export class InspectorView {
  /** Calls onStep(step) when a step of a log was chosen. */
  constructor({ onStep }) {
    this.snapshot = null;
    this.isLive = false;
    this.lastStep = 0; // that was shown
    this.group = 0; // the cache group whose blocks are shown
    // This is under the pointer or the cursor: {block} or {host} by id, or {request} by number.
    this.pointed = null;
    this.chosen = null; // the same, where it was clicked
    this.detail = null; // the element that describes it
    const grid = (id, maxHeight, kind, options = {}) =>
      new BlockGrid($(id), {
        maxHeight,
        onPoint: (block) => this.point(block && { [kind]: block.id }),
        onChoose: (block) => this.choose(block && { [kind]: block.id }),
        ...options,
      });
    this.grid = grid("grid", 330, "block", { onView: () => this.minimap.draw() });
    this.minimap = new Minimap($("minimap"), this.grid);
    this.hostGrid = grid("host-grid", 90, "host");
    this.requests = new RequestList({
      onPoint: (what) => this.point(what),
      onChoose: (what) => this.choose(what),
    });
    this.step = new StepView({ onStep });
    this.listen();
  }

  listen() {
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.choose(null));
    new ResizeObserver(() => this.redraw()).observe($("step"));
    for (const radio of document.querySelectorAll("[name=shown]"))
      radio.addEventListener("change", () => this.redraw());
    for (const [id, direction] of [
      ["nearer", 1],
      ["further", -1],
      ["fit", 0],
    ])
      $(id).addEventListener("click", () => this.grid.zoom(direction));
    $("group").addEventListener("change", () => {
      this.group = Number($("group").value);
      this.redraw();
    });
    $("host").addEventListener("toggle", () => this.hostGrid.redraw());
  }

  /** Shows a snapshot. isLive: copies fade; otherwise those of the step stay. */
  show(snapshot, isLive) {
    $("inspector").classList.remove("empty");
    // Nobody has looked at the copies before the first snapshot, so they are not shown.
    const isFirst = !this.snapshot || this.isLive !== isLive;
    if (isFirst) this.begin(snapshot);
    this.whole = snapshot;
    this.snapshot = ofGroup(snapshot, this.group);
    this.isLive = isLive;
    this.blocks = blocksOf(this.snapshot);
    this.showBlocks(isFirst);
    this.showHost();
    this.lastStep = snapshot.step?.step ?? 0;
    this.showNumbers();
    this.requests.show(snapshot, this.chosen?.request);
    this.step.show(this.snapshot, isLive);
    this.showPointed();
  }

  /** Forgets the snapshot: what is shown next is something else than before. */
  forget() {
    this.snapshot = null;
    $("inspector").classList.add("empty");
  }

  /** Begins with the first snapshot of another engine, or of a log. */
  begin({ pool }) {
    this.group = 0;
    this.chosen = this.pointed = null;
    const groups = [
      ["every token"],
      ...pool.further_groups
        .filter(({ ref_counts }) => ref_counts)
        .map(({ window }) => [window ? `window of ${window}` : "further layers"]),
    ];
    $("group").replaceChildren(
      ...groups.map(([text], index) => el("option", { value: index }, `${index + 1}: ${text}`)),
    );
    $("group-label").hidden = groups.length < 2;
    $(pool.num_blocks > MAX_SHOWN ? "shown-used" : "shown-all").checked = true;
    this.hadHost = false;
    $("host").open = false;
  }

  redraw() {
    this.lastStep = this.snapshot?.step?.step ?? 0;
    if (this.snapshot) this.show(this.whole, this.isLive);
    drawLegends();
  }

  showBlocks(isFirst) {
    const { step, copies } = this.snapshot;
    const recent = copies.filter(([number]) =>
      this.isLive ? number > this.lastStep && !isFirst : number === step?.step,
    );
    const isUsed = ({ kind }) => kind === "used";
    const shown = $("shown-used").checked ? this.blocks.filter(isUsed) : this.blocks;
    $("nothing").hidden = shown.length > 0;
    this.grid.box.hidden = !shown.length && !this.grid.box.contains(document.activeElement);
    this.grid.show(shown, {
      written: this.writtenBlocks(),
      copies: recent.map(([, from, to]) => [from, to]),
      keep: this.isLive,
    });
  }

  /** Returns the blocks that the last step wrote to. */
  writtenBlocks() {
    const { step, requests, pool } = this.snapshot;
    const tables = new Map(
      requests.flatMap(({ sequences }) => sequences.map(({ id, blocks }) => [id, blocks])),
    );
    const written = new Set();
    for (const [, id, start, tokens] of step?.rows ?? []) {
      const last = Math.floor((start + tokens - 1) / pool.block_size);
      for (let index = Math.floor(start / pool.block_size); index <= last; index++)
        written.add(tables.get(id)?.[index]);
    }
    return written;
  }

  /**
   * Shows host memory, which is folded while it is empty, and unfolds when a request is swapped
   * out.
   */
  showHost() {
    this.hostBlocks = hostBlocksOf(this.whole);
    const used = this.hostBlocks.filter(({ kind }) => kind === "used").length;
    $("host").hidden = !this.hostBlocks.length;
    $("host-numbers").textContent = used
      ? `${used} of ${this.hostBlocks.length} blocks in use`
      : `${this.hostBlocks.length} blocks, empty`;
    if (Boolean(used) !== this.hadHost) $("host").open = this.hadHost = Boolean(used);
    this.hostGrid.show(this.hostBlocks);
  }

  showNumbers() {
    const counts = countsOf(this.blocks);
    const part = (name, label) =>
      el(
        "span",
        { class: `part ${name}` },
        el("b", {}, counts[name].toLocaleString("en")),
        ` ${label}`,
      );
    const shared = counts.shared
      ? el(
          "span",
          { class: "part" },
          el("b", {}, String(counts.shared)),
          ` shared (saves ${count(counts.saved, "block")})`,
        )
      : null;
    $("numbers").replaceChildren(
      ...[part("used", "in use"), part("cached", "cached"), part("free", "free"), shared].filter(
        Boolean,
      ),
    );
    const pieces = ["used", "cached", "free"].map((name) => {
      const piece = el("span", { class: `piece ${name}` });
      piece.style.width = `${(100 * counts[name]) / counts.total}%`;
      return piece;
    });
    $("bar").replaceChildren(...pieces);
    $("bar").setAttribute(
      "aria-label",
      `${counts.used} of ${counts.total} blocks in use, ${counts.cached} cached, ${counts.free} ` +
        "free",
    );
    const label =
      `${this.grid.blocks.length} KV blocks of ${this.snapshot.pool.block_size} tokens. Arrow ` +
      "keys move, plus and minus zoom, Enter selects a block, Escape releases it.";
    $("grid").setAttribute("aria-label", label);
  }

  point(what) {
    this.pointed = what;
    if (this.snapshot) this.showPointed();
  }

  choose(what) {
    this.chosen = JSON.stringify(what) === JSON.stringify(this.chosen) ? null : what;
    if (this.snapshot) this.redraw();
  }

  /** Marks what is pointed at, or else was chosen, and says what it is. */
  showPointed() {
    const what = this.pointed ?? this.chosen;
    const block =
      what?.block != null
        ? this.blocks[what.block - this.blocks[0].id]
        : what?.host != null
          ? this.hostBlocks[what.host - 1]
          : null;
    const request =
      what?.request != null
        ? this.snapshot.requests.find(({ number }) => number === what.request)
        : null;
    const references = block
      ? block.references
      : request
        ? request.sequences.map((sequence) => ({ request, sequence }))
        : [];
    const tables = references.map(({ sequence, pin }) => (pin ?? sequence).blocks);
    const marked = new Set(tables.flat());
    if (what?.block != null) marked.add(what.block);
    const paths = references
      .slice(0, MAX_PATHS)
      .map(({ request: owner }, index) => ({ ids: tables[index], color: pathColor(owner) }));
    const isMarked = marked.size > 0 && references.length > 0;
    this.grid.mark(isMarked ? marked : null, paths);
    this.minimap.show(this.blocks, isMarked ? marked : null);
    const hosts = new Set(references.flatMap(({ sequence }) => sequence?.host_blocks ?? []));
    this.hostGrid.mark(hosts.size ? hosts : null, []);
    const strips = references
      .slice(0, MAX_PATHS)
      .map((reference) => tableStrip(reference, block, this.snapshot));
    const detail = el(
      "div",
      {},
      ...describe(block, request, this.snapshot),
      el("div", { class: "tables" }, ...strips),
    );
    if (this.detail?.isEqualNode(detail)) return; // nothing new to read out
    this.detail = detail;
    $("detail").replaceChildren(detail);
  }
}

const pathColor = (request) =>
  request
    ? `color-mix(in oklab, ${requestColor(request.number)} 55%, ${themeVariable("ink")})`
    : themeVariable("ink");
