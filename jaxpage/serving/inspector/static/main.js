// Puts the page together: the chat, the inspector over the running engine or over a log, the tour, the key and the colours.

import { $ } from "./dom.js";
import { forgetTheme } from "./colors.js";
import { ApiError, messages, request, setKeyDialog } from "./api.js";
import { Playground } from "./playground.js";
import { Replay } from "./replay.js";
import { Tour } from "./tour.js";
import { InspectorView } from "./view.js";
import { drawLegends } from "./legend.js";

const MS_BEFORE_TRYING_AGAIN = 2000;

const dark = matchMedia("(prefers-color-scheme: dark)");
document.documentElement.dataset.theme = dark.matches ? "dark" : "light";
const view = new InspectorView({ onStep: (step) => replay.goToStep(step) });
const playground = new Playground();
const tour = new Tour(playground, setPace);
let latest = null; // the last snapshot of the running engine
let connection = null; // an AbortController of the stream of snapshots
let connected = () => {}; // told of the next stream's first snapshot
const replay = new Replay(view, { onClose: showLatest, onProblem: showProblem });
drawLegends();
dark.addEventListener("change", () => setTheme(dark.matches));
$("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme !== "dark"));
$("pace").addEventListener("change", () => connection?.abort());
for (const radio of document.querySelectorAll("[name=pane]")) radio.addEventListener("change", showPane);
showPane();
setKeyDialog(askForKey);
describeServer();
follow();

function setTheme(isDark) {
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  forgetTheme();
  view.redraw();
}

/** On a small screen: the chat or the inspector. */
function showPane() {
  document.body.dataset.pane = document.querySelector("[name=pane]:checked").value;
}

function showProblem(message) {
  $("problem").textContent = message ?? "";
  $("problem").hidden = !message;
}

function showStatus(text, kind = "") {
  $("status").textContent = text;
  $("status").dataset.kind = kind;
}

function showLatest() {
  if (latest) view.show(latest, true);
}

/** Slow motion: at least so many seconds for each step, as long as this page is connected. Resolves to what it was before. */
async function setPace(seconds) {
  const before = $("pace").value;
  if (Number(seconds) === Number(before) || (Number(seconds) && Number(before)) || $("pace-label").hidden) return before;
  $("pace").value = String(seconds);
  const shown = new Promise((resolve) => (connected = resolve));
  connection?.abort();
  await Promise.race([shown, new Promise((resolve) => setTimeout(resolve, MS_BEFORE_TRYING_AGAIN))]);
  return before;
}

/** Shows the engine for as long as there is one; a server that went away is asked again. */
async function follow() {
  for (;;) {
    try {
      connection = new AbortController();
      const pace = Number($("pace").value);
      const response = await request("/debug/events", { signal: connection.signal, body: pace ? { seconds_per_step: pace } : undefined });
      showStatus("live", "live");
      for await (const snapshot of messages(response)) taken(snapshot);
      showStatus("the server ended the connection", "lost");
    } catch (error) {
      if (error.name === "AbortError") continue; // for another pace
      const isFinal = error instanceof ApiError && [401, 403, 404].includes(error.status);
      showStatus(error.status === 404 ? "no engine here: open an event log" : error.message, "lost");
      if (isFinal) return;
    }
    await new Promise((resolve) => setTimeout(resolve, MS_BEFORE_TRYING_AGAIN));
  }
}

/** What goes wrong in drawing is told as what it is, and ends no stream. */
function taken(snapshot) {
  try {
    take(snapshot);
  } catch (error) {
    reportError(error);
  }
}

function take(snapshot) {
  latest = snapshot;
  const { seconds_per_step: pace, can_be_slow: canBeSlow } = snapshot.pace;
  $("pace-label").hidden = !canBeSlow;
  showStatus(pace ? `live, ${pace} s per step` : "live", "live");
  connected();
  tour.show(snapshot);
  if (!replay.recording) showLatest();
}

async function describeServer() {
  try {
    const { data } = await (await request("/v1/models")).json();
    playground.model = data[0].id;
    $("model").textContent = data[0].id;
    const facts = await (await request("/v1/capabilities")).json();
    if (facts.model) playground.describe(facts.model);
    if (facts.limits) tour.describe(facts);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    $("model").textContent = "";
  }
}

let asking = null; // one dialog, however many requests wait for the key

function askForKey(isAgain) {
  asking ??= new Promise((resolve) => {
    const dialog = $("key-dialog");
    if (isAgain) $("key-text").textContent = "The server refused this key. Type another one.";
    $("key").value = "";
    dialog.returnValue = "cancel";
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "ok" ? $("key").value.trim() : ""), { once: true });
    dialog.showModal();
  }).finally(() => (asking = null));
  return asking;
}
