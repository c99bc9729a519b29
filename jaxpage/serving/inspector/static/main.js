// Puts the page together: the playground, the inspector over the running engine or over a log, the key and the colours.

import { $ } from "./dom.js";
import { forgetTheme } from "./colors.js";
import { ApiError, messages, request, setKeyDialog } from "./api.js";
import { Playground } from "./playground.js";
import { Replay } from "./replay.js";
import { InspectorView, drawLegends } from "./view.js";

const MS_BEFORE_TRYING_AGAIN = 2000;

const dark = matchMedia("(prefers-color-scheme: dark)");
document.documentElement.dataset.theme = dark.matches ? "dark" : "light";
const view = new InspectorView();
const playground = new Playground();
let latest = null; // the last snapshot of the running engine
const replay = new Replay(view, { onClose: showLatest, onProblem: showProblem });
drawLegends();
dark.addEventListener("change", () => setTheme(dark.matches));
$("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme !== "dark"));
setKeyDialog(askForKey);
nameModel();
follow();

function setTheme(isDark) {
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  forgetTheme();
  view.redraw();
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

/** Shows the engine for as long as there is one; a server that went away is asked again. */
async function follow() {
  for (;;) {
    try {
      const response = await request("/debug/events");
      showStatus("live", "live");
      for await (const snapshot of messages(response)) {
        latest = snapshot;
        if (!replay.recording) showLatest();
      }
      showStatus("the server ended the connection", "lost");
    } catch (error) {
      const isFinal = error instanceof ApiError && [401, 403, 404].includes(error.status);
      showStatus(error.status === 404 ? "no engine here: open an event log" : error.message, "lost");
      if (isFinal) return;
    }
    await new Promise((resolve) => setTimeout(resolve, MS_BEFORE_TRYING_AGAIN));
  }
}

async function nameModel() {
  try {
    const { data } = await (await request("/v1/models")).json();
    playground.model = data[0].id;
    $("model").textContent = data[0].id;
    const { model } = await (await request("/v1/capabilities")).json();
    if (model) playground.describe(model);
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
