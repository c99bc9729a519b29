// The plan of a step as a table: which rows it has, and the block table of each; and, where a log
// has them, what was drawn with which probability.

import { count, el } from "./dom.js";
import { requestColor } from "./colors.js";
import { rowsOf } from "./tokens.js";

const MAX_ROWS = 64;
const MAX_DRAWS = 24;
const MAX_BLOCKS = 48;
const HEAD = ["Request", "Sequence", "Positions", "Query tokens", "Block table"];

/** Returns elements that show the plan of a snapshot's last step. */
export function planOf({ step, requests }) {
  if (!step) return [el("p", { class: "muted" }, "No step yet.")];
  const sequences = new Map(
    requests.flatMap((request) => request.sequences.map((sequence) => [sequence.id, sequence])),
  );
  const tableOf = (row, index) => step.tables?.[index] ?? sequences.get(row[1])?.blocks ?? [];
  const rows = step.rows
    .slice(0, MAX_ROWS)
    .map((row, index) => rowOf(row, tableOf(row, index), step.accepted?.[index]));
  const more =
    step.rows.length > MAX_ROWS
      ? [el("p", { class: "muted small" }, `and ${step.rows.length - MAX_ROWS} more rows`)]
      : [];
  const head = el("tr", {}, ...HEAD.map((name) => el("th", { scope: "col" }, name)));
  const table = el("table", { class: "plan" }, el("thead", {}, head), el("tbody", {}, ...rows));
  const box = el(
    "div",
    { class: "wide", tabindex: "0", role: "group", "aria-label": "Rows of the step" },
    table,
  );
  return [box, ...more, ...commandsOf(step), ...drawsOf(step)];
}

function nameOf(number) {
  const dot = el("span", { class: "dot" });
  dot.style.background = requestColor(number);
  return [dot, `#${number}`];
}

function rowOf([number, id, start, tokens, drafts], blocks, accepted) {
  const acceptance = accepted === undefined ? "" : `, ${accepted} accepted`;
  const query = drafts ? `${tokens} (${drafts} drafts${acceptance})` : String(tokens);
  const table = blocks.length > MAX_BLOCKS ? ["…", ...blocks.slice(-MAX_BLOCKS)] : blocks;
  const text = table.length ? table.map((block) => block || "–").join(" ") : "released";
  const cells = [
    nameOf(number),
    [String(id)],
    [tokens > 1 ? `${start}–${start + tokens - 1}` : String(start)],
    [query],
    [text],
  ];
  return el(
    "tr",
    {},
    ...cells.map((cell, index) =>
      el("td", { class: index === 4 ? "mono blocks" : false }, ...cell),
    ),
  );
}

/** Returns what happens to blocks before the step. */
function commandsOf({ copies, swap_out, swap_in, preempted }) {
  const pairs = (list) => list.map(([from, to]) => `${from} → ${to}`).join(", ");
  const parts = [
    preempted.length && `Preempted: ${preempted.map((number) => `#${number}`).join(", ")}.`,
    copies.length && `Copy-on-write: ${pairs(copies)}.`,
    swap_out.length && `Swapped out (block → host block): ${pairs(swap_out)}.`,
    swap_in.length && `Swapped in (host block → block): ${pairs(swap_in)}.`,
  ];
  return parts.filter(Boolean).map((text) => el("p", { class: "small" }, text));
}

/**
 * Returns the draws of a step, which only a log has. Those have probabilities whose requests asked
 * for them.
 */
function drawsOf({ draws, results, rows }) {
  if (!results) return [];
  const known = results.filter(({ top }) => top.length);
  const title = el(
    "h3",
    {},
    `Draws `,
    el("span", { class: "muted" }, count(results.length, "token")),
  );
  if (!known.length)
    return [
      title,
      el(
        "p",
        { class: "muted small" },
        `Tokens ${results.map(({ token }) => token ?? "left out").join(", ")}. The log has ` +
          "probabilities of requests with logprobs, and of beam searches.",
      ),
    ];
  const items = known.slice(0, MAX_DRAWS).map((draw) => {
    const row = rows[draws[draw.index]];
    const rank = draw.rank > 0 ? `, rank ${draw.rank}` : "";
    const name = el(
      "p",
      { class: "small" },
      ...nameOf(row[0]),
      ` sequence ${row[1]}: `,
      draw.token === null ? "candidates" : `token ${draw.token}${rank}`,
    );
    return el(
      "li",
      {},
      name,
      ...rowsOf([{ token: draw.token, logprob: draw.logprob, top: draw.top }]),
    );
  });
  return [title, el("ol", { class: "draws" }, ...items)];
}
