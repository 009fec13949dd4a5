// A line of Markdown to text nodes and a fixed set of elements: code, emphasis, links, mathematics. HTML in it stays text. Every pass
// looks at a character a bounded number of times.

import { element } from "./dom.js";
import { inlineMath } from "./math.js";

const MAX_NESTING = 16;
const MAX_MISSES = 50; // brackets without an end; after so many, brackets are treated as text
const ADDRESS = /^https?:\/\/[^\s<>"'`]+/;
const MARKS = { "**": "strong", __: "strong", "*": "em", _: "em", "~~": "del" };

export function inline(text, depth = 0) {
  if (depth > MAX_NESTING) return [text];
  const nodes = [];
  let plain = "";
  let at = 0;
  const misses = new Set(); // marks without a partner further on, so that each is searched for only once
  const put = (node, length) => {
    if (plain) nodes.push(plain);
    plain = "";
    nodes.push(node);
    at += length;
  };
  while (at < text.length) {
    const character = text[at];
    const found =
      inlineMath(text, at, misses) ||
      (character === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] || "")
        ? { literal: text[at + 1], length: 2 }
        : character === "`"
          ? codeSpan(text, at, misses)
          : character === "[" || (character === "!" && text[at + 1] === "[")
            ? link(text, at, depth, misses)
            : character === "<"
              ? autolink(text, at)
              : character === "h"
                ? bareLink(text, at)
                : "*_~".includes(character)
                  ? emphasis(text, at, depth, misses)
                  : character === "\n" && plain.endsWith("  ")
                    ? { node: element("br"), length: 1 }
                    : null);
    if (found?.node) put(found.node, found.length);
    else if (found) {
      plain += found.literal;
      at += found.length;
    } else {
      plain += character;
      at += 1;
    }
  }
  if (plain) nodes.push(plain);
  return nodes;
}

function codeSpan(text, at, misses) {
  let length = 1;
  while (text[at + length] === "`") length += 1;
  const mark = "`".repeat(length);
  let end = misses.has(mark) ? -1 : text.indexOf(mark, at + length);
  while (end >= 0 && text[end + length] === "`") {
    let past = end + length;
    while (text[past] === "`") past += 1;
    end = text.indexOf(mark, past);
  }
  if (end < 0) {
    misses.add(mark);
    return { literal: mark, length };
  }
  const inner = text.slice(at + length, end);
  return { node: element("code", {}, inner.trim() ? inner.replace(/^ (.*) $/s, "$1") : inner), length: end + length - at };
}

function emphasis(text, at, depth, misses) {
  const mark = text[at] === text[at + 1] ? text[at].repeat(2) : text[at];
  if (!(mark in MARKS)) return null;
  const word = (character) => character !== undefined && /[\p{L}\p{N}]/u.test(character);
  const after = text[at + mark.length];
  if (after === undefined || /\s/.test(after) || (mark[0] === "_" && word(text[at - 1])) || misses.has(mark)) {
    return { literal: mark, length: mark.length };
  }
  let end = text.indexOf(mark, at + mark.length);
  while (end >= 0) {
    const longer = mark.length === 1 && text[end + 1] === mark && text[end - 1] !== mark;
    const fits = end > at + mark.length && !/\s/.test(text[end - 1]) && !(mark[0] === "_" && word(text[end + mark.length])) && !longer;
    if (fits) break;
    end = text.indexOf(mark, end + (longer ? 2 : 1));
  }
  if (end < 0) {
    misses.add(mark);
    return { literal: mark, length: mark.length };
  }
  const inner = inline(text.slice(at + mark.length, end), depth + 1);
  return { node: element(MARKS[mark], {}, ...inner), length: end + mark.length - at };
}

function link(text, at, depth, misses) {
  if (misses.links > MAX_MISSES) return null;
  const image = text[at] === "!";
  const begin = at + (image ? 2 : 1);
  let nesting = 1;
  let end = begin;
  const limit = Math.min(text.length, begin + 2000);
  for (; end < limit && nesting; end += 1) {
    if (text[end] === "\\") end += 1;
    else if (text[end] === "[") nesting += 1;
    else if (text[end] === "]") nesting -= 1;
  }
  if (nesting) misses.links = (misses.links || 0) + 1;
  if (nesting || text[end] !== "(") return null;
  let close = end + 1;
  for (nesting = 1; close < Math.min(text.length, end + 4000) && nesting; close += 1) {
    if (text[close] === "(") nesting += 1;
    else if (text[close] === ")") nesting -= 1;
    else if (text[close] === "\n") return null;
  }
  if (nesting) return null;
  const address = safeAddress(text.slice(end + 1, close - 1).trim().split(/\s/)[0].replace(/^<|>$/g, ""));
  const label = text.slice(begin, end - 1);
  const children = image ? [label || "image"] : inline(label, depth + 1);
  if (!address) return { node: element("span", {}, ...children), length: close - at };
  return { node: anchor(address, children), length: close - at };
}

function autolink(text, at) {
  const end = text.indexOf(">", at);
  if (end < 0 || end - at > 2000) return null;
  const address = text.slice(at + 1, end);
  if (/[\s<]/.test(address) || !/^(https?:\/\/|mailto:)/i.test(address) || !safeAddress(address)) return null;
  return { node: anchor(safeAddress(address), [address]), length: end + 1 - at };
}

function bareLink(text, at) {
  if (!text.startsWith("http", at) || (at > 0 && /[\p{L}\p{N}]/u.test(text[at - 1]))) return null;
  const found = text.slice(at, at + 2000).match(ADDRESS);
  if (!found) return null;
  let address = found[0].replace(/[.,;:!?*_~\]]+$/, "");
  while (address.endsWith(")") && address.split(")").length > address.split("(").length) address = address.slice(0, -1);
  const safe = safeAddress(address);
  return safe ? { node: anchor(safe, [address]), length: address.length } : null;
}

export function safeAddress(address) {
  try {
    const parsed = new URL(address);
    return ["http:", "https:", "mailto:"].includes(parsed.protocol) ? parsed.href : null;
  } catch {
    return null;
  }
}

function anchor(address, children) {
  return element("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}
