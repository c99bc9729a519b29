// The controls of the snapshots of a recorded event log: a scrubber over its steps, one step back
// or on, and play, slowly or fast.

import { $ } from "./dom.js";
import { Recording } from "./recording.js";

export class Replay {
  /**
   * Takes the view that draws snapshots. onClose: the log was closed. onProblem(message): a file
   * could not be read; null: all is well.
   */
  constructor(view, { onClose, onProblem }) {
    this.view = view;
    this.recording = null;
    this.timer = 0;
    this.onProblem = onProblem;
    $("log-file").addEventListener("change", (event) => {
      const [file] = event.target.files;
      event.target.value = ""; // so that the same file can be chosen again
      if (file) this.open(Recording.read(file));
    });
    document.addEventListener("dragover", (event) => event.preventDefault());
    document.addEventListener("drop", (event) => {
      event.preventDefault();
      const [file] = event.dataTransfer.files;
      if (file) this.open(Recording.read(file));
    });
    $("scrubber").addEventListener("input", () => this.go(Number($("scrubber").value)));
    $("back").addEventListener("click", () => this.go(this.moment - 1));
    $("forward").addEventListener("click", () => this.go(this.moment + 1));
    $("play").addEventListener("click", () => this.play(!this.timer));
    $("speed").addEventListener("change", () => this.timer && this.play(true));
    $("leave-log").addEventListener("click", () => {
      this.close();
      onClose();
    });
  }

  get moment() {
    return Number($("scrubber").value);
  }

  async open(promise) {
    try {
      const recording = await promise;
      this.close();
      this.recording = recording;
      this.view.forget();
      this.onProblem(null);
    } catch (error) {
      this.onProblem(`This file cannot be opened: ${error.message}.`);
      return;
    }
    const { name, last, isTorn, about } = this.recording;
    $("log-name").textContent =
      `${name}${isTorn ? ", cut off at its end" : ""}${about ? ` (incident: ${about})` : ""}`;
    $("scrubber").max = last;
    $("replay").hidden = false;
    document.body.classList.add("recorded");
    this.go(Math.min(1, last));
    $("scrubber").focus();
  }

  close() {
    this.play(false);
    this.recording = null;
    $("replay").hidden = true;
    document.body.classList.remove("recorded");
  }

  go(moment) {
    const { last } = this.recording;
    const bounded = Math.min(Math.max(moment, 0), last);
    $("scrubber").value = bounded;
    const snapshot = this.recording.at(bounded);
    const text = `step ${snapshot.step?.step ?? 0} of ${this.recording.lastStep}`;
    $("moment").textContent = text;
    $("scrubber").setAttribute("aria-valuetext", text);
    $("back").disabled = bounded === 0;
    $("forward").disabled = bounded === last;
    this.view.show(snapshot, false);
    if (bounded === last) this.play(false);
  }

  /** Goes to the end of a step, if the log has it. */
  goToStep(step) {
    const moment = this.recording?.momentOf(step);
    if (moment !== undefined) this.go(moment);
  }

  play(isOn) {
    clearInterval(this.timer);
    this.timer = 0;
    $("play").textContent = isOn ? "❚❚" : "▶";
    $("play").setAttribute("aria-label", isOn ? "Pause" : "Play");
    if (!isOn) return;
    if (this.moment === this.recording.last) this.go(0);
    this.timer = setInterval(() => this.go(this.moment + 1), 1000 * Number($("speed").value));
  }
}
