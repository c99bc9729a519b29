// Text as tokens: the less likely one was, the darker it is, with the most likely alternatives in a
// box next to it.

import { el } from "./dom.js";
import { hideTip, showTip } from "./tip.js";

/**
 * Returns the tokens of a choice of a completion or chat chunk: [{token, logprob, top: [[token,
 * logprob], ...]}]; [] without log probabilities.
 */
export function tokensOf(logprobs) {
  if (logprobs?.content)
    return logprobs.content.map(({ token, logprob, top_logprobs }) => ({
      token,
      logprob,
      top: (top_logprobs ?? []).map((alternative) => [alternative.token, alternative.logprob]),
    }));
  return (logprobs?.tokens ?? []).map((token, index) => ({
    token,
    logprob: logprobs.token_logprobs[index],
    top: Object.entries(logprobs.top_logprobs?.[index] ?? {}),
  }));
}

/**
 * Returns spans for a piece of text. Where the tokens do not spell the text (half a character), the
 * piece has one span for all of them.
 */
export function spansOf(text, tokens) {
  const spelled = tokens.map(({ token }) => token).join("") === text;
  const parts = spelled
    ? tokens.map((entry) => [entry.token, [entry]])
    : text
      ? [[text, tokens]]
      : [];
  return parts.map(([part, covered]) => {
    if (!covered.length) return el("span", {}, part);
    const probability = Math.exp(Math.min(...covered.map(({ logprob }) => logprob ?? 0)));
    const show = ({ currentTarget }) =>
      showTip(
        currentTarget.getClientRects()[0] ?? currentTarget.getBoundingClientRect(),
        ...rowsOf(covered),
      );
    const span = el(
      "span",
      {
        class: "token",
        tabindex: "-1",
        pointerenter: show,
        pointerleave: hideTip,
        focus: show,
        blur: hideTip,
      },
      part,
    );
    span.style.setProperty("--doubt", (1 - probability).toFixed(3));
    return span;
  });
}

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(logprob < -4.6 ? 2 : 1)} %`;
const visible = (token) => String(token).replaceAll(" ", "␣").replaceAll("\n", "⏎") || "∅";

/** Returns the alternatives of tokens with their probabilities, the most likely first. */
export function rowsOf(tokens) {
  return tokens.flatMap(({ token, logprob, top }) => {
    const listed =
      top.some(([other]) => other === token) || logprob === null ? top : [[token, logprob], ...top];
    return listed
      .filter(([, value]) => value !== null)
      .sort((a, b) => b[1] - a[1])
      .map(([other, value]) => {
        const bar = el("span", { class: "tip-bar" });
        bar.style.width = `${Math.max(2, 90 * Math.exp(value))}px`;
        return el(
          "div",
          { class: other === token ? "tip-row chosen" : "tip-row" },
          el("code", {}, visible(other)),
          bar,
          percent(value),
        );
      });
  });
}

/** Walks over the tokens with the arrow keys, and shows the box of each. */
export function walkTokens(event) {
  const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
  if (!step) return;
  const here = document.activeElement.closest(".token");
  const next = here ? here[step] : event.currentTarget.querySelector(".token");
  next?.focus();
  event.preventDefault();
}
