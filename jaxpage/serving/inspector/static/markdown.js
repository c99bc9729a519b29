// The usual subset of Markdown, as DOM nodes. Text stays text: HTML in it is shown as it is, images
// are not loaded, and a link leads to http, https or mail only.

import { el } from "./dom.js";

const MAX_CHARACTERS = 200_000; // a longer text is shown as it is
const MAX_LEVELS = 6; // of lists and quotes in each other
const SAFE_ADDRESS = /^(?:https?:|mailto:)/i;
const BARE_ADDRESS = /https?:\/\/[^\s<>()[\]"'`]+[^\s<>()[\]"'`.,;:!?*_]/y;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s(.*)$/s;
const RULE = /^ {0,3}(?:(?:\* *){3,}|(?:- *){3,}|(?:_ *){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)(?:[-*+]|(\d{1,9})[.)])( +|$)/;
const STYLES = [
  ["***", "em", "strong"],
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "del"],
  ["*", "em"],
  ["_", "em"],
];

/**
 * Returns elements for a text. What is not closed yet, as while a text streams, reads as if it were
 * closed at the end or were plain.
 */
export function markdown(text) {
  if (text.length > MAX_CHARACTERS) return [el("p", {}, text)];
  return blocks(text.split("\n"), 0);
}

function blocks(lines, level) {
  const nodes = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [node, next] = blockAt(lines, at, level);
    nodes.push(node);
    at = next;
  }
  return nodes;
}

/** Returns the block that begins in a line, and the line after it. */
function blockAt(lines, at, level) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return fencedCode(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading)
    return [
      el(`h${Math.min(6, heading[1].length + 2)}`, {}, ...inline(headingText(heading[2]))),
      at + 1,
    ];
  if (RULE.test(line)) return [el("hr"), at + 1];
  if (level < MAX_LEVELS && QUOTE.test(line)) {
    const end = findEnd(lines, at, (candidate) => QUOTE.test(candidate));
    return [
      el(
        "blockquote",
        {},
        ...blocks(
          lines.slice(at, end).map((quoted) => quoted.replace(QUOTE, "")),
          level + 1,
        ),
      ),
      end,
    ];
  }
  if (level < MAX_LEVELS && ITEM.test(line)) return list(lines, at, level);
  if (isTable(lines, at)) return table(lines, at);
  const end = Math.max(
    at + 1,
    findEnd(
      lines,
      at,
      (candidate, index) => candidate.trim() && (index === at || !begins(lines, index)),
    ),
  );
  return [el("p", {}, ...inline(lines.slice(at, end).join("\n").trim())), end];
}

/** Returns what a heading says, without the number signs that may close it. */
function headingText(content) {
  const text = content.trim();
  let end = text.length;
  while (text[end - 1] === "#") end -= 1;
  return end === 0 || /\s/.test(text[end - 1]) ? text.slice(0, end).trim() : text;
}

/** Returns the first line from `at` on that does not fulfil a condition. */
function findEnd(lines, at, condition) {
  let end = at;
  while (end < lines.length && condition(lines[end], end)) end += 1;
  return end;
}

/** Returns whether a line ends the paragraph before it. */
function begins(lines, at) {
  return (
    [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(lines[at])) ||
    isTable(lines, at)
  );
}

function fencedCode(lines, at, [, mark, language]) {
  const end = findEnd(
    lines,
    at + 1,
    (line) => !(line.trim().startsWith(mark) && line.trim().replaceAll(mark[0], "") === ""),
  );
  const code = el("code", {}, lines.slice(at + 1, end).join("\n"));
  return [
    el("pre", { tabindex: "0", "aria-label": language ? `Code, ${language}` : "Code" }, code),
    end + 1,
  ];
}

function list(lines, at, level) {
  const [, indent, first] = ITEM.exec(lines[at]);
  const isOrdered = first !== undefined;
  const items = [];
  for (let next = at; next < lines.length; next = findEnd(lines, at, (line) => !line.trim())) {
    const item = ITEM.exec(lines[next]);
    if (
      !item ||
      item[1].length !== indent.length ||
      (item[2] !== undefined) !== isOrdered ||
      RULE.test(lines[next])
    )
      break;
    at = next;
    const width = item[0].length;
    const inside = (line, index) => index === at || isInside(lines, index, indent.length);
    const end = findEnd(lines, at, inside);
    const inner = lines
      .slice(at, end)
      .map((line, index) =>
        index ? line.slice(Math.min(width, line.search(/\S|$/))) : line.slice(width),
      );
    const content = blocks(inner, level + 1);
    const isTight = content.length && content[0].tagName === "P";
    items.push(
      el("li", {}, ...(isTight ? [...content[0].childNodes, ...content.slice(1)] : content)),
    );
    at = end;
  }
  return [
    el(isOrdered ? "ol" : "ul", isOrdered && first !== "1" ? { start: first } : {}, ...items),
    at,
  ];
}

/**
 * Returns whether a line goes on with an item: it is indented further, or blank before such a line.
 */
function isInside(lines, at, indent) {
  const next = findEnd(lines, at, (line) => !line.trim());
  return next < lines.length && lines[next].search(/\S/) > indent && next - at < 3;
}

const cellsOf = (line) =>
  line
    .trim()
    .replace(/^\|/, "")
    .replace(/\|$/, "")
    .split("|")
    .map((cell) => cell.trim());

function isTable(lines, at) {
  if (!lines[at].includes("|") || !lines[at + 1]?.includes("-")) return false;
  const marks = cellsOf(lines[at + 1]);
  return marks.length === cellsOf(lines[at]).length && marks.every((mark) => /^:?-+:?$/.test(mark));
}

function table(lines, at) {
  const end = findEnd(lines, at + 2, (line) => line.includes("|"));
  const row = (line, tag) =>
    el("tr", {}, ...cellsOf(line).map((cell) => el(tag, {}, ...inline(cell))));
  const body = el("tbody", {}, ...lines.slice(at + 2, end).map((line) => row(line, "td")));
  const element = el("table", {}, el("thead", {}, row(lines[at], "th")), body);
  return [
    el("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Table" }, element),
    end,
  ];
}

/** Returns nodes for a text within a block. */
function inline(text, level = 0) {
  const nodes = [];
  const dead = new Set(); // marks that nothing closes from here on
  let plain = "";
  const add = (node) => {
    if (plain) nodes.push(document.createTextNode(plain));
    plain = "";
    nodes.push(node);
  };
  for (let at = 0; at < text.length;) {
    const span = level < MAX_LEVELS ? spanAt(text, at, level, dead) : null;
    if (span) {
      add(span[0]);
      at = span[1];
    } else {
      const escaped = text[at] === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "");
      plain += text[at + (escaped ? 1 : 0)];
      at += escaped ? 2 : 1;
    }
  }
  if (plain) nodes.push(document.createTextNode(plain));
  return nodes;
}

/** Returns the node that begins at a place of a text, and the place after it; null: none does. */
function spanAt(text, at, level, dead) {
  switch (text[at]) {
    case "`":
      return codeAt(text, at, dead);
    case "!":
      return text[at + 1] === "[" ? linkAt(text, at + 1, level) : null;
    case "[":
      return linkAt(text, at, level);
    case "h":
      return addressAt(text, at);
    case "*":
    case "_":
    case "~":
      return styledAt(text, at, level, dead);
    default:
      return null;
  }
}

function codeAt(text, at, dead) {
  const mark = /`+/y;
  mark.lastIndex = at;
  const [ticks] = mark.exec(text);
  const end = closing(
    text,
    ticks,
    at + ticks.length,
    dead,
    (end) => text[end - 1] !== "`" && text[end + ticks.length] !== "`",
  );
  if (end < 0) return [document.createTextNode(ticks), at + ticks.length];
  return [el("code", {}, text.slice(at + ticks.length, end).trim()), end + ticks.length];
}

/** Returns where a mark is closed; -1: nowhere, which is remembered, so that no text takes long. */
function closing(text, mark, from, dead, isFit) {
  if (dead.has(mark)) return -1;
  for (let end = text.indexOf(mark, from); end >= 0; end = text.indexOf(mark, end + 1))
    if (isFit(end)) return end;
  dead.add(mark);
  return -1;
}

function styledAt(text, at, level, dead) {
  const style = STYLES.find(([mark]) => text.startsWith(mark, at));
  if (!style) return null;
  const [mark, tag, inner] = style;
  const isWord = (index) => /[\p{L}\p{N}]/u.test(text[index] ?? "");
  const from = at + mark.length;
  if (/\s|^$/.test(text[from] ?? "") || (mark[0] === "_" && isWord(at - 1))) return null;
  const isFit = (end) =>
    end > from &&
    !/\s/.test(text[end - 1]) &&
    !(mark[0] === "_" && isWord(end + mark.length)) &&
    (mark.length > 1 || (text[end + 1] !== mark && text[end - 1] !== mark));
  const end = closing(text, mark, from, dead, isFit);
  if (end < 0) return null;
  const nodes = inline(text.slice(from, end), level + 1);
  return [el(tag, {}, ...(inner ? [el(inner, {}, ...nodes)] : nodes)), end + mark.length];
}

const LINK =
  /\[([^[\]\n]*)\]\(\s*(?!\s)<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)?)>?(?:\s+"[^"\n]*")?\s*\)/y;

function linkAt(text, at, level) {
  LINK.lastIndex = at;
  const match = LINK.exec(text);
  if (!match) return null;
  const [whole, label, address] = match;
  const words = label ? inline(label, level + 1) : [document.createTextNode(address)];
  return [
    SAFE_ADDRESS.test(address) ? link(address, words) : el("span", {}, ...words),
    at + whole.length,
  ];
}

function addressAt(text, at) {
  if (/\w/.test(text[at - 1] ?? "")) return null;
  BARE_ADDRESS.lastIndex = at;
  const match = BARE_ADDRESS.exec(text);
  return match ? [link(match[0], [match[0]]), at + match[0].length] : null;
}

const link = (address, words) =>
  el("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow" }, ...words);
