// One request and its answer in the conversation: the prompt, samples or beams side by side, and
// how fast they came.

import { $, count, el } from "./dom.js";
import { markdown } from "./markdown.js";
import { thumbnail } from "./pictures.js";
import { spansOf, tokensOf, walkTokens } from "./tokens.js";

const NEAR = 80; // px from the end: who reads there follows the text as it grows
const REASONS = { length: "stopped at max tokens", stop: "", abort: "aborted" };

export class Exchange {
  /**
   * Shows the prompt, and an empty column for each answer.
   *
   * prompt: [{role, content, pictures}, ...], shown as they were sent; a completion has one, of the
   *   role "prompt".
   * names: of the answers, if there are several.
   * showsTokens: texts appear as coloured tokens, as far as there are probabilities. Otherwise a
   *   chat's are Markdown.
   * answerer: the name of the model, if it is to be shown.
   */
  constructor(
    prompt,
    {
      names = [""],
      isBeam = false,
      isChat = false,
      showsTokens = false,
      title = "",
      answerer = "",
    },
  ) {
    this.options = [prompt, { names, isBeam, isChat, showsTokens, title, answerer }];
    Object.assign(this, { isBeam, isChat, showsTokens, answerer, numTokens: 0, frame: 0 });
    this.began = this.last = performance.now();
    this.first = null; // when the first token came
    this.columns = names.map(newColumn);
    this.note = el("p", { class: "note mono", role: "status" }, "waiting…");
    const messages = prompt.map(({ role, content, pictures = [] }) =>
      el(
        "div",
        { class: `said ${role}` },
        el("span", { class: "role" }, title || role),
        pictures.length > 0 && el("div", { class: "thumbnails" }, ...pictures.map(thumbnail)),
        content,
      ),
    );
    const columns = el("div", { class: "columns" }, ...this.columns.map(({ box }) => box));
    this.element = el(
      "article",
      { class: `exchange ${isChat ? "of-chat" : ""}`, "aria-busy": "true" },
      ...messages,
      columns,
      this.note,
    );
    $("conversation").append(this.element);
    if ($("conversation").checkVisibility()) toEnd();
  }

  /** Returns JSON from which `fromRecord` makes this exchange again. */
  toRecord() {
    const isCutOff = this.element.getAttribute("aria-busy") === "true";
    const columns = this.columns.map(({ pieces, reason }) => ({
      pieces,
      reason: reason.textContent,
    }));
    const note = isCutOff
      ? `${this.note.textContent} · cut off when the page was left`
      : this.note.textContent;
    return {
      options: this.options,
      columns,
      note,
      isProblem: this.note.classList.contains("problem"),
    };
  }

  static fromRecord({ options, columns, note, isProblem }) {
    const exchange = new Exchange(...options);
    exchange.columns.forEach((column, index) => {
      column.pieces = columns[index].pieces;
      column.reason.textContent = columns[index].reason;
    });
    exchange.close(isProblem);
    exchange.note.textContent = note;
    return exchange;
  }

  get firstText() {
    return this.columns[0].pieces.map(([text]) => text).join("");
  }

  add({ choices = [], usage }) {
    for (const choice of choices) {
      const text = choice.text ?? choice.delta?.content ?? choice.message?.content ?? "";
      const tokens = tokensOf(choice.logprobs);
      const column = this.columns[choice.index];
      if (text || tokens.length) this.grow(column, text, tokens);
      if (choice.finish_reason)
        column.reason.textContent = REASONS[choice.finish_reason] ?? choice.finish_reason;
    }
    if (usage) this.numTokens = usage.completion_tokens;
    this.report();
  }

  grow(column, text, tokens) {
    this.last = performance.now();
    this.first ??= this.last;
    this.numTokens += tokens.length || 1;
    column.pieces.push([text, tokens]);
    this.frame ||= requestAnimationFrame(() => this.draw());
  }

  /**
   * Shows new text: as spans, or Markdown as a whole, because an end can change what came before.
   */
  draw(isAnew = false) {
    this.frame = 0;
    const goesOn = isAtEnd();
    const asMarkdown =
      this.isChat &&
      !(
        this.showsTokens &&
        this.columns.some(({ pieces }) => pieces.some(([, tokens]) => tokens.length))
      );
    for (const column of this.columns) {
      column.text.classList.toggle("markdown", asMarkdown);
      if (asMarkdown)
        column.text.replaceChildren(...markdown(column.pieces.map(([text]) => text).join("")));
      else {
        if (isAnew) column.text.replaceChildren();
        const spans = column.pieces.slice(isAnew ? 0 : column.numDrawn);
        column.text.append(
          ...spans.flatMap(([text, tokens]) => spansOf(text, this.showsTokens ? tokens : [])),
        );
        trimStart(column.text);
      }
      column.numDrawn = column.pieces.length;
    }
    if (goesOn) toEnd();
  }

  show({ tokens }) {
    this.showsTokens = this.options[1].showsTokens = tokens;
    this.draw(true);
  }

  report(ending = "") {
    if (this.first === null) return;
    const wait = `first after ${Math.round(this.first - this.began)} ms`;
    const seconds = (this.last - (this.isBeam ? this.began : this.first)) / 1000;
    const rate = seconds > 0.01 ? `${(this.numTokens / seconds).toFixed(1)} tokens/s` : "";
    const parts = [
      this.answerer,
      count(this.numTokens, "token"),
      rate,
      this.isBeam ? "" : wait,
      ending,
    ];
    this.note.textContent = parts.filter(Boolean).join(" · ");
  }

  end(ending, isProblem = false) {
    if (this.first === null) this.note.textContent = ending || "no tokens";
    else this.report(ending);
    this.problem = isProblem ? ending : "";
    this.close(isProblem);
  }

  close(isProblem) {
    cancelAnimationFrame(this.frame);
    this.draw();
    const goesOn = isAtEnd();
    this.element.setAttribute("aria-busy", "false");
    this.note.classList.toggle("problem", isProblem);
    if (goesOn) toEnd();
  }
}

/**
 * Takes away the spaces with which a continuation begins: it is shown below its prompt, not after
 * it.
 */
function trimStart(text) {
  for (const span of text.children) {
    const trimmed = span.textContent.replace(/^ +/, "");
    if (trimmed !== span.textContent) span.textContent = trimmed;
    if (trimmed) return;
  }
}

function newColumn(name) {
  const text = el("div", {
    class: "text",
    tabindex: "0",
    role: "group",
    "aria-label": name || "Output",
    keydown: walkTokens,
  });
  const reason = el("p", { class: "muted small" });
  return {
    box: el("div", { class: "column" }, name && el("h3", {}, name), text, reason),
    text,
    reason,
    pieces: [],
    numDrawn: 0,
  };
}

/**
 * Returns the element that scrolls the conversation: its own box, or on a small screen the page.
 */
function scroller() {
  const box = $("conversation");
  return box.scrollHeight > box.clientHeight + 1 ? box : document.scrollingElement;
}

function isAtEnd() {
  if (!$("conversation").checkVisibility()) return false; // another part of the page is shown
  const { scrollHeight, scrollTop, clientHeight } = scroller();
  return scrollHeight - scrollTop - clientHeight < NEAR;
}

function toEnd() {
  scroller().scrollTop = scroller().scrollHeight;
}
