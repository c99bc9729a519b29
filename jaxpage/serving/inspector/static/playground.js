// The playground: a request as an OpenAI client would make it, its samples or beams side by side, and how fast they come.

import { $, count, el } from "./dom.js";
import { ApiError, messages, request } from "./api.js";
import { spansOf, tokensOf, walkTokens } from "./tokens.js";

const NUM_ALTERNATIVES = 5;
const NEUTRAL = { temperature: 1, top_p: 1, top_k: 0 }; // what an empty field means where nobody says otherwise

export class Playground {
  constructor() {
    this.model = "";
    this.stated = {}; // what the model's generation_config.json says of sampling: the server goes by it
    this.ofChat = {}; // what a chat takes where that is silent
    this.history = []; // of a chat: {role, content}
    this.running = null; // an AbortController
    $("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    $("form").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.send();
    });
    for (const radio of document.querySelectorAll("[name=kind]")) radio.addEventListener("change", () => this.turn());
    $("search").addEventListener("change", () => this.turn());
    $("stop").addEventListener("click", () => this.running?.abort());
    $("clear").addEventListener("click", () => this.clear());
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.running?.abort());
    this.turn();
  }

  get isChat() {
    return $("form").elements.kind.value === "chat";
  }

  turn() {
    $("form").classList.toggle("chat", this.isChat);
    $("prompt-label").textContent = this.isChat ? "Message" : "Text to go on with";
    const isBeam = $("search").value === "beam";
    for (const id of ["temperature", "top_p", "top_k", "seed"]) $(id).disabled = isBeam;
    $("n").previousSibling.textContent = isBeam ? "Beams" : "Samples";
    this.showDefaults();
  }

  /** What the server's /v1/capabilities says of its model. */
  describe({ sampling_defaults: stated = {}, chat_defaults: ofChat = {} }) {
    this.stated = stated;
    this.ofChat = ofChat;
    this.showDefaults();
  }

  /** An empty field is what the model asks for; of a chat, where it asks for nothing, what makes good reading. */
  showDefaults() {
    const own = this.isChat ? this.ofChat : {};
    for (const id in NEUTRAL) $(id).placeholder = this.stated[id] ?? own[id] ?? NEUTRAL[id];
    const parts = [
      ...Object.entries(this.stated).map(([name, value]) => `${name} ${value} (the model's generation_config.json)`),
      ...Object.entries(own).map(([name, value]) => `${name} ${value} (a chat's, where the model says nothing)`),
    ];
    $("defaults").textContent = parts.length ? `Empty fields: ${parts.join(", ")}` : "";
  }

  clear() {
    this.running?.abort();
    this.history = [];
    $("conversation").replaceChildren();
  }

  async send() {
    const text = $("prompt").value;
    if (this.running || !text) return;
    const body = this.body(text);
    const exchange = new Exchange(this.isChat ? text : "", body.n ?? 1, body.use_beam_search);
    this.busy(new AbortController());
    try {
      const path = this.isChat ? "/v1/chat/completions" : "/v1/completions";
      const response = await request(path, { body, signal: this.running.signal });
      if (body.stream) for await (const chunk of messages(response)) exchange.add(chunk);
      else exchange.add(await response.json());
      this.remember(text, exchange);
      exchange.end("");
    } catch (error) {
      if (error.name !== "AbortError" && !(error instanceof ApiError)) throw error;
      if (error.name === "AbortError") this.remember(text, exchange);
      exchange.end(error.name === "AbortError" ? "stopped" : error.message, error instanceof ApiError);
    } finally {
      this.busy(null);
    }
  }

  busy(controller) {
    this.running = controller;
    $("send").disabled = Boolean(controller);
    $("stop").disabled = !controller;
  }

  remember(text, exchange) {
    if (!this.isChat) return;
    this.history.push({ role: "user", content: text }, { role: "assistant", content: exchange.firstText });
    $("prompt").value = "";
  }

  body(text) {
    const own = this.isChat ? this.ofChat : {};
    const number = (id) => ($(id).disabled ? undefined : $(id).value === "" ? own[id] : Number($(id).value));
    const isBeam = $("search").value === "beam";
    const n = number("n");
    const body = {
      model: this.model,
      max_tokens: number("max_tokens"),
      temperature: isBeam ? 0 : number("temperature"),
      top_p: number("top_p"),
      top_k: number("top_k"),
      seed: number("seed"),
      stop: $("stop-text").value || undefined,
      n: n > 1 || isBeam ? n : undefined,
      use_beam_search: isBeam || undefined,
      stream: !isBeam, // which beams are the best is known only at the end
      stream_options: isBeam ? undefined : { include_usage: true },
    };
    const withProbabilities = $("probabilities").checked && !isBeam;
    if (!this.isChat) return { ...body, prompt: text, logprobs: withProbabilities ? NUM_ALTERNATIVES : undefined };
    const system = $("system").value ? [{ role: "system", content: $("system").value }] : [];
    return {
      ...body,
      messages: [...system, ...this.history, { role: "user", content: text }],
      ...(withProbabilities ? { logprobs: true, top_logprobs: NUM_ALTERNATIVES } : {}),
    };
  }
}

/** One request and what came of it, on the page. */
class Exchange {
  constructor(said, numColumns, isBeam) {
    this.began = performance.now();
    this.first = null; // when the first token came
    this.last = this.began;
    this.numTokens = 0;
    this.isBeam = isBeam;
    this.columns = Array.from({ length: numColumns }, (_, index) => {
      const text = el("div", { class: "text", tabindex: "0", keydown: walkTokens });
      const title = numColumns > 1 ? el("h3", {}, `${isBeam ? "Beam" : "Sample"} ${index + 1}`) : null;
      const reason = el("p", { class: "muted small" });
      return { box: el("div", { class: "column" }, title, text, reason), text, reason };
    });
    this.note = el("p", { class: "note mono", role: "status" }, "waiting…");
    const columns = el("div", { class: "columns" }, ...this.columns.map(({ box }) => box));
    const element = el("article", { class: "card exchange" }, said ? el("p", { class: "said" }, said) : null, columns, this.note);
    $("conversation").prepend(element);
  }

  get firstText() {
    return this.columns[0].text.textContent;
  }

  add({ choices = [], usage }) {
    for (const choice of choices) {
      const text = choice.text ?? choice.delta?.content ?? choice.message?.content ?? "";
      const tokens = tokensOf(choice.logprobs);
      const column = this.columns[choice.index];
      column.text.append(...spansOf(text, tokens));
      if (choice.finish_reason) column.reason.textContent = { length: "the most tokens", stop: "came to its end" }[choice.finish_reason] ?? choice.finish_reason;
      if (text || tokens.length) {
        this.last = performance.now();
        this.first ??= this.last;
        this.numTokens += tokens.length || 1;
      }
    }
    if (usage) this.numTokens = usage.completion_tokens;
    this.tell();
  }

  tell(ending = "") {
    if (this.first === null) return;
    const wait = `first after ${Math.round(this.first - this.began)} ms`;
    const seconds = (this.last - (this.isBeam ? this.began : this.first)) / 1000;
    const rate = seconds > 0.01 ? `${(this.numTokens / seconds).toFixed(1)} tokens/s` : "";
    const parts = [count(this.numTokens, "token"), rate, this.isBeam ? "" : wait, ending];
    this.note.textContent = parts.filter(Boolean).join(" · ");
  }

  end(ending, isProblem = false) {
    if (this.first === null) this.note.textContent = ending || "nothing came";
    else this.tell(ending);
    this.note.classList.toggle("problem", isProblem);
  }
}
