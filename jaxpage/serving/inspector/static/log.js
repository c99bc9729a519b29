// Makes snapshots of a recorded event log (docs/reference/event-log.md), without an engine: follows the block tables of the plans, and works
// out what lies between them: forks, releases, and which blocks the prefix index knows.

import { LogState } from "./log_state.js";

const MOST_BYTES = 2 ** 28;
const MOMENTS_BETWEEN_COPIES = 128;

/** A log that was read. A moment is the end of a step; moment 0 is before the first. */
export class Recording {
  /** Raises an Error that says what is wrong with the text. */
  constructor(text, name = "log") {
    this.name = name;
    this.lines = text.split("\n");
    this.isTorn = this.lines.pop() !== ""; // a last line without its end, as a killed process leaves it, is left out
    this.ends = [1]; // by moment: the line after it
    this.momentOfStep = new Map();
    this.copies = [];
    const header = this.record(0);
    this.about = header.incident?.reason ?? null;
    this.state = new LogState(header);
    this.copies.push(structuredClone(this.state.data));
    this.lines.forEach((_, index) => {
      if (index === 0) return;
      const record = this.record(index);
      try {
        this.state.apply(record);
      } catch (error) {
        throw new Error(`line ${index + 1} cannot be followed: ${error.message}`);
      }
      if (record.event === "result" || record.event === "failure") {
        this.ends.push(index + 1);
        this.momentOfStep.set(record.step, this.last);
        if (this.last % MOMENTS_BETWEEN_COPIES === 0) this.copies.push(structuredClone(this.state.data));
      }
    });
    if (this.ends.at(-1) < this.lines.length) this.ends.push(this.lines.length); // what came after the last step
    this.moment = this.last;
    this.lastStep = this.state.data.step;
  }

  static async read(file) {
    if (file.size > MOST_BYTES) throw new Error(`the file has ${file.size} bytes; ${MOST_BYTES} can be opened`);
    return new Recording(await file.text(), file.name);
  }

  get last() {
    return this.ends.length - 1;
  }

  momentOf(step) {
    return this.momentOfStep.get(step);
  }

  record(index) {
    let record = null;
    try {
      record = JSON.parse(this.lines[index]);
    } catch {
      // said below
    }
    if (typeof record?.event !== "string") throw new Error(`line ${index + 1} is not a record of an event log`);
    return record;
  }

  /** The snapshot of a moment. */
  at(moment) {
    if (moment < this.moment) {
      const copy = Math.min(Math.floor(moment / MOMENTS_BETWEEN_COPIES), this.copies.length - 1);
      this.state.data = structuredClone(this.copies[copy]);
      this.moment = copy * MOMENTS_BETWEEN_COPIES;
    }
    for (let line = this.ends[this.moment]; line < this.ends[moment]; line++) this.state.apply(this.record(line));
    this.moment = moment;
    return this.state.snapshot();
  }
}
