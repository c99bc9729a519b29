// Follows the running engine of the chosen model: which models there are, its snapshots, and what
// there is to say where none come.

import { ApiError, messages, request } from "./api.js";

const MS_BEFORE_TRYING_AGAIN = 2000;
const MS_OF_A_CHANGE = 2000; // until another pace is seen, at most
const ABSENT = ["unloaded", "loading"]; // states of a model of several that has no engine

export class Live {
  /**
   * Follows `model` first, if there is one of this name. onModels(cards): of /v1/models.
   * onFacts(facts): of the chosen model, from /v1/capabilities. onSnapshot(snapshot).
   * onState(state, text): "live"; "unloaded" or "loading"; "key": one is missing; "lost": it is
   * tried again; "refused"; "none": there is no engine.
   */
  constructor({ model, onModels, onFacts, onSnapshot, onState }) {
    Object.assign(this, { model, onModels, onFacts, onSnapshot, onState });
    this.card = null; // the chosen model's of /v1/models
    this.pace = 0; // seconds for each step, at least
    this.connection = new AbortController();
    this.connected = () => {}; // told of the next stream's first snapshot
    this.goOn = () => {};
  }

  /** Returns the model that has the engine: an adapter has its parent's. */
  get engine() {
    return this.card?.parent ?? this.card?.id;
  }

  /** Returns whether the model is one of several: only those have a state. */
  get isOfSeveral() {
    return this.card?.state !== undefined;
  }

  /** Returns a path of the engine that is followed. */
  pathOf(path) {
    return this.isOfSeveral ? `${path}?model=${encodeURIComponent(this.engine)}` : path;
  }

  choose(id) {
    const before = this.engine;
    this.model = id;
    this.card = this.cards.find((card) => card.id === id);
    if (this.engine !== before) this.again();
  }

  /** Looks again at once, whatever it waits for. */
  again() {
    this.connection.abort();
    this.goOn();
  }

  /** Asks for at least so many seconds for each step, as long as this page is connected. */
  async setPace(seconds) {
    this.pace = seconds;
    const firstSnapshot = new Promise((resolve) => (this.connected = resolve));
    this.again();
    await Promise.race([
      firstSnapshot,
      new Promise((resolve) => setTimeout(resolve, MS_OF_A_CHANGE)),
    ]);
  }

  async follow() {
    for (;;) {
      this.connection = new AbortController();
      const wait = new Promise((resolve) => (this.goOn = resolve));
      try {
        await this.describe();
        if (ABSENT.includes(this.card?.state)) this.onState(this.card.state);
        else await this.stream();
      } catch (error) {
        if (error.name === "AbortError") continue; // for another pace, or another model
        this.onState(stateOf(error), error.message);
        if (error.status === 401) {
          await wait;
          continue;
        }
        if (["refused", "none"].includes(stateOf(error))) return;
      }
      await Promise.race([
        wait,
        new Promise((resolve) => setTimeout(resolve, MS_BEFORE_TRYING_AGAIN)),
      ]);
    }
  }

  async describe() {
    const { signal } = this.connection;
    try {
      const { data } = await (await request("/v1/models", { signal })).json();
      this.cards = data;
      this.card = data.find(({ id }) => id === this.model) ?? data[0];
      this.onModels(data);
      if (ABSENT.includes(this.card.state)) return;
      const facts = await (await request("/v1/capabilities", { signal })).json();
      const modelFacts = this.isOfSeveral ? facts.models[this.engine] : facts;
      if (modelFacts?.model) this.onFacts(modelFacts);
    } catch (error) {
      // 404 comes from a server of the page's files alone, which may still have snapshots.
      if (error.status !== 404) throw error;
    }
  }

  async stream() {
    const body = this.pace ? { seconds_per_step: this.pace } : undefined;
    const response = await request(this.pathOf("/debug/events"), {
      signal: this.connection.signal,
      body,
    });
    for await (const snapshot of messages(response)) {
      this.onState("live");
      this.take(snapshot);
      this.connected();
    }
    if (!this.isOfSeveral) throw new ApiError("The server ended the connection.", 0);
  }

  /** Draws a snapshot. An error in drawing is told as what it is, and ends no stream. */
  take(snapshot) {
    try {
      this.onSnapshot(snapshot);
    } catch (error) {
      reportError(error);
    }
  }
}

const stateOf = ({ status }) => ({ 401: "key", 403: "refused", 404: "none" })[status] ?? "lost";
