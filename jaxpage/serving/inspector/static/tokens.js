// Text as tokens: each a little brighter or darker by its probability, with the likeliest alternatives in a box beside the pointer.

import { $, el } from "./dom.js";

/** The tokens of a choice of a completion or chat chunk: [{token, logprob, top: [[token, logprob], ...]}]; [] without log probabilities. */
export function tokensOf(logprobs) {
  if (logprobs?.content)
    return logprobs.content.map(({ token, logprob, top_logprobs }) => ({
      token, logprob, top: (top_logprobs ?? []).map((one) => [one.token, one.logprob]),
    }));
  return (logprobs?.tokens ?? []).map((token, index) => ({
    token, logprob: logprobs.token_logprobs[index], top: Object.entries(logprobs.top_logprobs?.[index] ?? {}),
  }));
}

/** Spans for a piece of text. Where the tokens do not spell the text (half a character), the piece has one span for all of them. */
export function spansOf(text, tokens) {
  const spelled = tokens.map(({ token }) => token).join("") === text;
  const parts = spelled ? tokens.map((one) => [one.token, [one]]) : text ? [[text, tokens]] : [];
  return parts.map(([part, own]) => {
    if (!own.length) return el("span", {}, part);
    const probability = Math.exp(Math.min(...own.map(({ logprob }) => logprob ?? 0)));
    const show = (event) => showTip(event.currentTarget, own);
    const span = el("span", { class: "token", tabindex: "-1", pointerenter: show, pointerleave: hideTip, focus: show, blur: hideTip }, part);
    span.style.setProperty("--doubt", (1 - probability).toFixed(3));
    return span;
  });
}

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(logprob < -4.6 ? 2 : 1)} %`;
const visible = (token) => token.replaceAll(" ", "␣").replaceAll("\n", "⏎") || "∅";

function showTip(span, tokens) {
  const tip = $("tooltip");
  const rows = tokens.flatMap(({ token, logprob, top }) => {
    const listed = top.some(([other]) => other === token) ? top : [[token, logprob], ...top];
    return listed
      .filter(([, one]) => one !== null)
      .sort((a, b) => b[1] - a[1])
      .map(([other, one]) => {
        const bar = el("span", { class: "tip-bar" });
        bar.style.width = `${Math.max(2, 90 * Math.exp(one))}px`;
        return el("div", { class: other === token ? "tip-row chosen" : "tip-row" }, el("code", {}, visible(other)), bar, percent(one));
      });
  });
  tip.replaceChildren(...rows);
  tip.hidden = false;
  const box = span.getClientRects()[0] ?? span.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
  const below = box.bottom + 6;
  tip.style.top = `${below + tip.offsetHeight < innerHeight ? below : box.top - tip.offsetHeight - 6}px`;
}

function hideTip() {
  $("tooltip").hidden = true;
}

/** Arrow keys walk over the tokens, with the box of each. */
export function walkTokens(event) {
  const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
  if (!step) return;
  const here = document.activeElement.closest(".token");
  const next = here ? here[step] : event.currentTarget.querySelector(".token");
  next?.focus();
  event.preventDefault();
}
