// Where mathematics stands in a text: \( \), \[ \], $ $, $$ $$ and \begin ... \end. Finds it and has it drawn; what cannot be drawn, or
// has no end yet, keeps every character of its source.

import { element } from "./dom.js";
import { mathNode } from "./tex.js";

const MOST = 4000; // characters between the beginning and the end
const OPENING = /^ {0,8}(\\\[|\$\$|\\begin\{(?:align|equation|gather|eqnarray|multline)\*?\})/;

// Returns an element for the mathematics that begins here, and its length. Returns null if none begins here.
export function inlineMath(text, at, misses) {
  const character = text[at];
  if (character !== "$" && character !== "\\") return null;
  const two = text.slice(at, at + 2);
  if (two === "\\(" || two === "\\[") return between(text, at, two, two === "\\(" ? "\\)" : "\\]", misses);
  if (two === "$$") return between(text, at, "$$", "$$", misses);
  return character === "$" ? dollars(text, at, misses) : null;
}

function between(text, at, open, close, misses) {
  const end = misses.has(open) ? -1 : text.indexOf(close, at + 2);
  if (end < 0 || end - at > MOST) {
    misses.add(open);
    return { literal: open, length: 2 };
  }
  const source = text.slice(at, end + 2);
  return { node: drawn(source, source.slice(2, -2), open !== "\\("), length: source.length };
}

// $...$ on one line, but not prices: no space inside the dollar signs, no digit or letter after them, and not a plain word inside.
function dollars(text, at, misses) {
  if (misses.has("$") || /[\s\d.,]?\d/.test(text[at - 1] || "") || !/[^\s$]/.test(text[at + 1] || " ")) return null;
  for (let end = at + 2; end < Math.min(text.length, at + MOST); end += 1) {
    if (text[end] === "\n") return null;
    if (text[end] === "\\") end += 1;
    else if (text[end] === "$") {
      if (/\s/.test(text[end - 1]) || /[\d\p{L}]/u.test(text[end + 1] || "")) return null;
      const inner = text.slice(at + 1, end);
      const node = mathNode(inner, false) || (/[\\^_]/.test(inner) ? element("code", { class: "tex" }, `$${inner}$`) : null);
      return node && { node, length: end + 1 - at };
    }
  }
  misses.add("$");
  return null;
}

function drawn(source, inner, display) {
  return mathNode(inner, display) || element("code", { class: "tex" }, source);
}

// --- blocks of their own -------------------------------------------------------------------------------------------------------

export function opensMath(line) {
  return OPENING.test(line);
}

// The line after the block that begins here. The block ends at its end mark, or at the first empty line.
export function endOfMath(lines, begin) {
  const close = closingOf(lines[begin]);
  const first = lines[begin].replace(OPENING, "");
  if (first.includes(close)) return begin + 1;
  for (let at = begin + 1; at < lines.length; at += 1) {
    if (lines[at].includes(close)) return at + 1;
    if (!lines[at].trim()) return at;
  }
  return lines.length;
}

function closingOf(line) {
  const [, open] = line.match(OPENING);
  return open === "\\[" ? "\\]" : open === "$$" ? "$$" : open.replace("begin", "end");
}

// Mathematics in a block of its own. If there is text before or after it, `inline` handles the line.
export function mathBlock(source) {
  const [head, open] = source.match(OPENING);
  const close = closingOf(source);
  const end = source.indexOf(close, head.length);
  const inner = open.startsWith("\\begin") ? source : source.slice(head.length, end);
  const after = end < 0 ? "" : source.slice(end + close.length).trim();
  const node = end < 0 ? null : mathNode(open.startsWith("\\begin") ? source.slice(0, end + close.length) : inner, true);
  const shown = node || element("code", { class: "tex" }, end < 0 ? source : source.slice(0, end + close.length));
  return element("div", { class: "math", tabindex: "0", role: "group", "aria-label": "Formula" }, shown, after && !/^[.,;:]?$/.test(after) ? element("p", {}, after) : after);
}
