// The chat and the completions: a request as an OpenAI client would make it, and its answer in the
// conversation.

import { $, el } from "./dom.js";
import { ApiError, messages, readJson, request } from "./api.js";
import { Exchange } from "./exchange.js";
import { loadConversation, saveConversation } from "./storage.js";
import { Pictures, contentOf } from "./pictures.js";

const NUM_ALTERNATIVES = 5;
// An empty field means this where neither the model nor the user says otherwise.
const NEUTRAL = { temperature: 1, top_p: 1, top_k: 0 };
const FIRST_PROMPT = "Once upon a time";
const EXAMPLES = [
  "Once upon a time there lived a clever fox",
  "One day in winter, when the snow lay deep",
  "Say it again: little by little the bird builds its nest.",
];
const coarse = matchMedia("(pointer: coarse)"); // a touch keyboard, whose Enter makes a new line

export class Playground {
  constructor() {
    this.model = "";
    this.names = false; // whether answers say whose they are
    // The model's generation_config.json, which the server uses for what a request leaves out.
    this.stated = {};
    this.ofChat = {}; // what a chat takes where that says nothing
    this.history = []; // of a chat: {role, content}
    this.pictures = new Pictures({ isChat: () => this.isChat, history: () => this.history });
    this.exchanges = [];
    this.running = null; // an AbortController
    this.isChosen = false; // which kind of request, by hand
    this.showsTokens = { completion: true, chat: false };
    $("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    $("prompt").addEventListener("keydown", (event) => this.onKey(event));
    for (const radio of document.querySelectorAll("[name=kind]")) {
      radio.addEventListener("change", () => {
        this.isChosen = true;
        this.turn();
      });
    }
    $("search").addEventListener("change", () => this.turn());
    $("probabilities").addEventListener("change", () => this.choose($("probabilities").checked));
    $("stop").addEventListener("click", () => this.running?.abort());
    $("clear").addEventListener("click", () => this.clear());
    document.addEventListener(
      "keydown",
      (event) => event.key === "Escape" && this.running?.abort(),
    );
    $("examples").replaceChildren(
      ...EXAMPLES.map((text) =>
        el("button", { type: "button", click: () => this.try(text) }, text),
      ),
    );
    addEventListener("pagehide", () => this.keep());
    this.restore();
    this.turn();
  }

  /** Sends an example. */
  try(text) {
    $("prompt").value = text;
    if (!coarse.matches) $("prompt").focus(); // a touch keyboard would hide the answer
    this.send();
  }

  keep() {
    const { model, kind, isChosen, history, exchanges } = this;
    saveConversation({
      model,
      kind,
      isChosen,
      history,
      exchanges: exchanges.map((exchange) => exchange.toRecord()),
    });
  }

  /** Shows again what was there before the page was loaded again. */
  restore() {
    const before = loadConversation();
    if (!before) return this.showStart();
    this.model = before.model;
    this.history = before.history;
    this.isChosen = before.isChosen;
    $("form").elements.kind.value = before.kind;
    $("start").hidden = true;
    this.exchanges = before.exchanges.map((record) => Exchange.fromRecord(record));
  }

  /** Shows how to begin, as long as nothing was said. */
  showStart() {
    $("start").hidden = this.exchanges.length > 0;
    $("conversation").hidden = !$("start").hidden;
  }

  get kind() {
    return $("form").elements.kind.value;
  }

  get isChat() {
    return this.kind === "chat";
  }

  /** Sends on Enter in a chat, and on Ctrl + Enter everywhere. */
  onKey(event) {
    if (event.key !== "Enter" || event.isComposing) return;
    const isPlain = !event.shiftKey && this.isChat && !coarse.matches;
    if (!(event.ctrlKey || event.metaKey || isPlain)) return;
    event.preventDefault();
    this.send();
  }

  turn() {
    $("form").classList.toggle("chat", this.isChat);
    $("prompt-label").textContent = this.isChat ? "Message" : "Prompt";
    $("hint").textContent = coarse.matches
      ? ""
      : this.isChat
        ? "(Enter to send)"
        : "(Ctrl + Enter to send)";
    $("send").textContent = this.isChat ? "Send" : "Generate";
    if (!this.isChat && !$("prompt").value && !this.exchanges.length)
      $("prompt").value = FIRST_PROMPT;
    if (this.isChat && $("prompt").value === FIRST_PROMPT) $("prompt").value = "";
    const isBeam = $("search").value === "beam";
    for (const id of ["temperature", "top_p", "top_k", "seed"]) $(id).disabled = isBeam;
    $("n-label").textContent = isBeam ? "Beam width" : "Samples (n)";
    $("probabilities").checked = this.showsTokens[this.kind];
    this.showDefaults();
    this.pictures.check();
  }

  /**
   * Decides whether texts are shown as tokens: the answers that are there, as far as they have
   * probabilities, and those to come.
   */
  choose(tokens) {
    this.showsTokens[this.kind] = tokens;
    for (const exchange of this.exchanges)
      if (exchange.isChat === this.isChat) exchange.show({ tokens });
  }

  /** Takes what the server's /v1/capabilities says. */
  describe(facts) {
    const {
      sampling_defaults: stated = {},
      chat_defaults: ofChat = {},
      has_chat_template: canChat = false,
    } = facts.model;
    this.pictures.describe(facts);
    this.stated = stated;
    this.ofChat = ofChat;
    if (!this.isChosen) {
      $("form").elements.kind.value = canChat ? "chat" : "completion";
      this.turn();
    }
    this.showDefaults();
  }

  /**
   * Returns the value of a field. An empty one is the model's own; a chat has values of its own
   * where the model has none.
   */
  showDefaults() {
    const defaults = this.isChat ? this.ofChat : {};
    for (const id in NEUTRAL) $(id).placeholder = this.stated[id] ?? defaults[id] ?? NEUTRAL[id];
    const parts = [
      ...Object.entries(this.stated).map(
        ([name, value]) => `${name} ${value} (generation_config.json)`,
      ),
      ...Object.entries(defaults).map(([name, value]) => `${name} ${value} (default of chats)`),
    ];
    $("defaults").textContent = parts.length ? `Empty fields: ${parts.join(", ")}` : "";
  }

  clear() {
    this.running?.abort();
    this.history = [];
    this.exchanges = [];
    this.pictures.set([]);
    $("conversation").replaceChildren();
    this.showStart();
  }

  async send() {
    const text = $("prompt").value;
    const { isChat, history } = this;
    const { items } = this.pictures;
    if (this.running || !(text || items.length) || !this.pictures.check()) return;
    this.busy(new AbortController());
    const system = $("system").value;
    const content = contentOf(text, items);
    const body = this.body(content);
    if (isChat) $("prompt").value = "";
    this.pictures.set([]);
    const pictures = items.map(({ name, small }) => ({ name, small }));
    try {
      const exchange = await this.run(isChat ? "/v1/chat/completions" : "/v1/completions", body, {
        prompt: isChat
          ? [
              ...(system && !history.length ? [{ role: "system", content: system }] : []),
              { role: "user", content: text, pictures },
            ]
          : [{ role: "prompt", content: text }],
        signal: this.running.signal,
      });
      if (isChat && exchange.firstText)
        history.push({ role: "user", content }, { role: "assistant", content: exchange.firstText });
      else if (isChat && !$("prompt").value && !this.pictures.items.length) {
        $("prompt").value = text; // nothing came of it
        this.pictures.set(items);
      }
    } finally {
      this.busy(null); // whatever happens, another can be sent
    }
  }

  /**
   * Sends a request and shows what comes. Returns the exchange once it has ended, however it did.
   */
  async run(path, body, { prompt, signal, title, names, onText = () => {} }) {
    const isChat = path.includes("chat");
    const isBeam = Boolean(body.use_beam_search);
    const numbered = Array.from(
      { length: body.n ?? 1 },
      (_, index) => `${isBeam ? "Beam" : "Sample"} ${index + 1}`,
    );
    const showsTokens = this.showsTokens[isChat ? "chat" : "completion"];
    $("start").hidden = true;
    $("conversation").hidden = false;
    const answerer = this.names ? body.model : "";
    const exchange = new Exchange(prompt, {
      names: names ?? (body.n > 1 ? numbered : [""]),
      isBeam,
      isChat,
      title,
      showsTokens,
      answerer,
    });
    this.exchanges.push(exchange);
    const add = (part) => {
      exchange.add(part);
      if (exchange.first !== null) onText();
    };
    try {
      const response = await request(path, { body, signal });
      if (body.stream) for await (const chunk of messages(response)) add(chunk);
      else add(await readJson(response));
      exchange.end("");
    } catch (error) {
      if (error.name !== "AbortError" && !(error instanceof ApiError)) throw error;
      exchange.end(
        error.name === "AbortError" ? "stopped" : error.message,
        error instanceof ApiError,
      );
    }
    return exchange;
  }

  busy(controller) {
    const hadFocus = [$("send"), $("stop")].includes(document.activeElement);
    this.running = controller;
    $("send").disabled = Boolean(controller);
    $("stop").disabled = !controller;
    if (hadFocus) $(controller ? "stop" : "send").focus(); // one takes the place of the other
  }

  /** Returns the request with this text, or the content of a chat's message, and the fields. */
  body(content) {
    const defaults = this.isChat ? this.ofChat : {};
    const number = (id) =>
      $(id).disabled ? undefined : $(id).value === "" ? defaults[id] : Number($(id).value);
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
    const logprobs = withProbabilities ? NUM_ALTERNATIVES : undefined;
    if (!this.isChat) return { ...body, prompt: content, logprobs };
    const system = $("system").value ? [{ role: "system", content: $("system").value }] : [];
    return {
      ...body,
      messages: [...system, ...this.history, { role: "user", content }],
      ...(withProbabilities ? { logprobs: true, top_logprobs: NUM_ALTERNATIVES } : {}),
    };
  }
}
