// Reads the snapshots of a recorded event log, as `jaxpage replay LOG --snapshots FILE` writes them
// (jaxpage/serving/inspector/recorded.py): a line that says what the file is, and one for each
// snapshot.

const FORMAT = 1;
const MAX_BYTES = 2 ** 28;

/** Snapshots that were read. A moment is the end of a step; moment 0 is before the first. */
export class Recording {
  /** Raises an Error that says what is wrong with the text. */
  constructor(text, fileName = "snapshots") {
    this.lines = text.split("\n");
    this.isTorn = this.lines.pop() !== ""; // a killed process leaves a last line without its end
    const { log, incident } = checkHeader(parseLine(this.lines, 0), fileName);
    this.name = log ?? fileName;
    this.about = incident?.reason ?? null;
    if (this.lines.length < 2) throw new Error("it has no snapshots");
    this.momentOfStep = new Map();
    this.lastStep = 0;
    for (let moment = 0; moment <= this.last; moment++) {
      const { step } = this.at(moment);
      this.lastStep = step?.step ?? 0;
      if (step && !this.momentOfStep.has(step.step)) this.momentOfStep.set(step.step, moment);
    }
  }

  static async read(file) {
    if (file.size > MAX_BYTES) {
      throw new Error(
        `the file has ${file.size} bytes; ${MAX_BYTES} can be opened: --until STEP makes a ` +
          "smaller one",
      );
    }
    return new Recording(await file.text(), file.name);
  }

  get last() {
    return this.lines.length - 2;
  }

  momentOf(step) {
    return this.momentOfStep.get(step);
  }

  /**
   * Returns the snapshot of a moment. It is parsed anew each time, because all of them would need
   * much memory.
   */
  at(moment) {
    const snapshot = parseLine(this.lines, moment + 1);
    if (!snapshot?.pool || !Array.isArray(snapshot.requests)) {
      throw new Error(`line ${moment + 2} is not a snapshot`);
    }
    return snapshot;
  }
}

/** Returns the JSON of a line, or null. */
function parseLine(lines, index) {
  try {
    return JSON.parse(lines[index]);
  } catch {
    return null;
  }
}

function checkHeader(header, fileName) {
  if (header?.event === "header") {
    throw new Error(
      "it is an event log, and this page shows its snapshots. This command writes them: jaxpage " +
        `replay ${fileName} --snapshots snapshots.jsonl`,
    );
  }
  if (header?.event !== "snapshots")
    throw new Error("it does not have the snapshots of an event log");
  if (header.format !== FORMAT)
    throw new Error(`its format is ${header.format}; this page reads format ${FORMAT}`);
  return header;
}
