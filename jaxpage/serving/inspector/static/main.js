// Puts the page together: the chat, the inspector over the running engine or over a log, the tour,
// the key and the colours.

import { $, el } from "./dom.js";
import { forgetTheme } from "./colors.js";
import { ApiError, request, setKeyDialog } from "./api.js";
import { Live } from "./live.js";
import { Playground } from "./playground.js";
import { Replay } from "./replay.js";
import { Tour } from "./tour.js";
import { InspectorView } from "./view.js";
import { drawLegends } from "./legend.js";

const dark = matchMedia("(prefers-color-scheme: dark)");
document.documentElement.dataset.theme = dark.matches ? "dark" : "light";
const view = new InspectorView({ onStep: (step) => replay.goToStep(step) });
const playground = new Playground();
const tour = new Tour(playground, { applyPace, pathOf: (path) => live.pathOf(path) });
const live = new Live({
  model: playground.model,
  onModels: showModels,
  onFacts: showFacts,
  onSnapshot: take,
  onState: showState,
});
let latest = null; // the last snapshot of the running engine
let shown = {}; // the state of the engine that the page shows: {state, text, time}
let failure = ""; // why the chosen model could not be loaded
const replay = new Replay(view, { onClose: showLatest, onProblem: showProblem });
drawLegends();
dark.addEventListener("change", () => setTheme(dark.matches));
$("theme").addEventListener("click", () =>
  setTheme(document.documentElement.dataset.theme !== "dark"),
);
$("pace").addEventListener("change", () => {
  tour.check();
  applyPace();
});
$("models").addEventListener("change", () => choose($("models").value));
$("notice-act").addEventListener("click", act);
$("go-to-tour").addEventListener("click", () => {
  document.querySelector("[name=pane][value=cache]").checked = true;
  showPane();
  tour.focus();
});
for (const radio of document.querySelectorAll("[name=pane]"))
  radio.addEventListener("change", showPane);
showPane();
setKeyDialog(askForKey);
live.follow();

function setTheme(isDark) {
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  forgetTheme();
  view.redraw();
}

/** Shows, on a small screen, the chat or the inspector. */
function showPane() {
  document.body.dataset.pane = document.querySelector("[name=pane]:checked").value;
}

function showProblem(message) {
  $("problem").textContent = message ?? "";
  $("problem").hidden = !message;
}

function showLatest() {
  if (latest) view.show(latest, true);
}

/** Asks for the slow motion that is chosen; that of the tour lasts as long as a preset runs. */
async function applyPace() {
  const seconds = $("pace").value === "tour" && !tour.running ? 0 : tour.pace;
  if (seconds !== (live.pace ?? 0)) await live.setPace(seconds);
}

const STATUS = {
  live: "live",
  unloaded: "not loaded",
  loading: "loading",
  key: "needs a key",
  lost: "not live",
  refused: "refused",
  none: "no engine",
};
const ACTS = { unloaded: "Load it now", key: "Type the key" };

/**
 * Shows what the header and the notice say of the engine. Where it is lost, its last state is pale.
 */
function showState(state, text = state === "unloaded" ? failure : "") {
  if (state !== shown.state || text !== shown.text)
    shown = { state, text, time: new Date().toLocaleTimeString() };
  const pace = latest?.pace.seconds_per_step;
  $("status").textContent = state === "live" && pace ? `live, ${pace} s per step` : STATUS[state];
  $("status").dataset.kind = document.body.dataset.engine = state;
  $("notice").hidden = state === "live";
  $("notice-text").textContent = noticeOf(state, text);
  $("notice").classList.toggle("problem", ["lost", "refused"].includes(state) || Boolean(failure));
  $("notice-act").hidden = !ACTS[state];
  $("notice-act").textContent = ACTS[state] ?? "";
  $("tour").inert = state !== "live";
  if (["unloaded", "loading"].includes(state)) forget();
}

function noticeOf(state, text) {
  const name = live.engine;
  const last = latest ? `; what is shown is its last state, of ${shown.time}` : "";
  return {
    live: "",
    unloaded:
      text ||
      `${name} is not loaded: a request to it loads it, and then its blocks, requests and steps ` +
        "are shown here.",
    loading: `${name} is being loaded.`,
    key: "The live view needs the API key of this server.",
    lost: `${text} The page tries again${last}.`,
    refused: text,
    none: "There is no engine here: open the snapshots of an event log.",
  }[state];
}

async function act() {
  if (shown.state === "key") return live.again();
  failure = "";
  try {
    showState("loading");
    await request("/wake_up", { body: { model: live.engine } });
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    failure = error.message;
  }
  live.again();
}

/** Forgets what was shown: the engine is another one from now on. */
function forget() {
  if (!latest) return;
  latest = null;
  view.forget();
  tour.forget();
}

function take(snapshot) {
  latest = snapshot;
  failure = "";
  $("pace-label").hidden = !snapshot.pace.can_be_slow;
  showState("live");
  tour.show(snapshot);
  if (!replay.recording) showLatest();
}

/**
 * Shows the names of the models. One has its name in the header; of several, adapters too, one is
 * chosen there.
 */
function showModels(cards) {
  const { id } = live.card;
  playground.model = id;
  playground.names = cards.length > 1;
  $("model").textContent = cards.length > 1 ? "" : id;
  $("models").hidden = cards.length < 2;
  if ($("models").length !== cards.length)
    $("models").replaceChildren(...cards.map((card) => el("option", { value: card.id }, card.id)));
  $("models").value = id;
}

function choose(id) {
  const before = live.engine;
  failure = "";
  live.choose(id);
  playground.model = id;
  if (live.engine !== before) forget();
}

function showFacts(facts) {
  playground.describe(facts);
  if (facts.limits) tour.describe(facts);
}

let asking = null; // one dialog, however many requests wait for the key

function askForKey(isAgain) {
  asking ??= new Promise((resolve) => {
    const dialog = $("key-dialog");
    if (isAgain) $("key-text").textContent = "The server refused this key. Type another one.";
    $("key-text").classList.toggle("problem", isAgain);
    $("key").value = "";
    dialog.returnValue = "cancel";
    dialog.addEventListener(
      "close",
      () => resolve(dialog.returnValue === "ok" ? $("key").value.trim() : ""),
      { once: true },
    );
    dialog.showModal();
  }).then((key) => {
    asking = null;
    if (key && shown.state === "key") live.again(); // the chat asked for it
    return key;
  });
  return asking;
}
