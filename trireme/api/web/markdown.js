// Markdown to DOM nodes. A model's text becomes text nodes and a fixed set of elements; HTML in it stays text, and the only
// addresses that are followed are http, https and mailto. This file knows blocks; what is in a line is in `inline`.

import { element, iconButton, copyText } from "./dom.js";
import { highlighted } from "./highlight.js";
import { inline } from "./inline.js";
import { endOfMath, mathBlock, opensMath } from "./math.js";

const MAX_NESTING = 16;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}(?:(?:-\s*){3,}|(?:\*\s*){3,}|(?:_\s*){3,})$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const QUOTE = /^ {0,3}> ?/;
const TABLE_RULE = /^ *\|? *:?-+:? *(?:\| *:?-+:? *)*\|? *$/;

// Updates `container` to show `source`. Blocks whose text has not changed keep their nodes, so that the cost per token stays low
// in a long answer.
export function renderMarkdown(container, source) {
  const blocks = splitBlocks(source.replace(/\r\n?/g, "\n").split("\n"));
  if (container.blocks && container.source === source) return;
  if (!container.blocks) container.replaceChildren();
  container.source = source;
  const kept = container.blocks || [];
  let same = 0;
  while (same < kept.length && same < blocks.length && kept[same].source === blocks[same].source) same += 1;
  for (const block of kept.splice(same)) block.node.remove();
  for (const block of blocks.slice(same)) {
    const node = renderBlock(block, 0);
    container.append(node);
    kept.push({ source: block.source, node });
  }
  container.blocks = kept;
}

function splitBlocks(lines) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const begin = at;
    const kind = kindAt(lines, at);
    at = endOf(kind, lines, at);
    const own = lines.slice(begin, at);
    blocks.push({ kind, lines: own, source: own.join("\n") });
  }
  return blocks;
}

function kindAt(lines, at) {
  const line = lines[at];
  if (FENCE.test(line)) return "code";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (opensMath(line)) return "math";
  if (QUOTE.test(line)) return "quote";
  if (ITEM.test(line)) return "list";
  if (line.includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") && TABLE_RULE.test(lines[at + 1])) return "table";
  return "text";
}

function endOf(kind, lines, begin) {
  let at = begin + 1;
  if (kind === "code") {
    const mark = lines[begin].trim().match(/^(`+|~+)/)[1];
    while (at < lines.length && !isClosing(lines[at], mark)) at += 1;
    return Math.min(at + 1, lines.length);
  }
  if (kind === "heading" || kind === "rule") return at;
  if (kind === "table") {
    at += 1;
    while (at < lines.length && lines[at].includes("|") && lines[at].trim()) at += 1;
    return at;
  }
  if (kind === "quote") {
    while (at < lines.length && lines[at].trim() && (QUOTE.test(lines[at]) || kindAt(lines, at) === "text")) at += 1;
    return at;
  }
  if (kind === "list") return endOfList(lines, begin);
  if (kind === "math") return endOfMath(lines, begin);
  while (at < lines.length && lines[at].trim() && kindAt(lines, at) === "text") at += 1;
  return at;
}

function isClosing(line, mark) {
  const bare = line.trim();
  return bare.length >= mark.length && bare[0] === mark[0] && bare === bare[0].repeat(bare.length);
}

function endOfList(lines, begin) {
  const [, indent, marker] = lines[begin].match(ITEM);
  const ordered = /\d/.test(marker);
  let at = begin + 1;
  let fence = null;
  while (at < lines.length) {
    const line = lines[at];
    const opening = line.trim().match(/^(`{3,}|~{3,})/);
    if (fence !== null) {
      if (isClosing(line, fence)) fence = null;
    } else if (!line.trim()) {
      const next = lines.slice(at + 1, at + 3).find((other) => other.trim());
      if (next === undefined || !(/^ {2,}/.test(next) || sameList(next, indent, ordered))) return at;
    } else if (!/^ +\S/.test(line) && !sameList(line, indent, ordered) && kindAt(lines, at) !== "text") {
      return at;
    } else if (opening) {
      fence = opening[1];
    }
    at += 1;
  }
  return at;
}

function sameList(line, indent, ordered) {
  const item = line.match(ITEM);
  return item !== null && (item[1].length > indent.length || /\d/.test(item[2]) === ordered);
}

// --- blocks ------------------------------------------------------------------------------------------------------------------

function renderBlocks(lines, depth) {
  if (depth > MAX_NESTING) return [element("p", {}, lines.join("\n"))];
  return splitBlocks(lines).map((block) => renderBlock(block, depth));
}

function renderBlock(block, depth) {
  if (block.kind === "code") return renderCode(block.lines);
  if (block.kind === "heading") {
    const [, marks, text] = block.lines[0].match(HEADING);
    return element(`h${Math.min(marks.length + 1, 6)}`, {}, ...inline(text));
  }
  if (block.kind === "rule") return element("hr");
  if (block.kind === "math") return mathBlock(block.source);
  if (block.kind === "quote") {
    return element("blockquote", {}, ...renderBlocks(block.lines.map((line) => line.replace(QUOTE, "")), depth + 1));
  }
  if (block.kind === "list") return renderList(block.lines, depth);
  if (block.kind === "table") return renderTable(block.lines);
  return element("p", {}, ...inline(block.lines.map((line) => line.trimStart()).join("\n")));
}

function renderCode(lines) {
  const [, mark, language] = lines[0].match(FENCE);
  const closed = lines.length > 1 && isClosing(lines[lines.length - 1], mark);
  const text = lines.slice(1, closed ? -1 : undefined).join("\n");
  const name = language.slice(0, 24);
  const copy = iconButton("copy", "Copy the code", () => copyText(text, copy));
  return element(
    "figure",
    { class: "code" },
    element("figcaption", {}, element("span", {}, name || "text"), copy),
    element("pre", { tabindex: "0" }, element("code", {}, ...highlighted(text, name.toLowerCase()))),
  );
}

function renderList(lines, depth) {
  const [, indent, marker] = lines[0].match(ITEM);
  const ordered = /\d/.test(marker);
  const items = [];
  for (const line of lines) {
    const item = line.match(ITEM);
    if (item && item[1].length <= indent.length + 1 && (items.length === 0 || item[1].length < items[items.length - 1].width)) {
      items.push({ width: Math.max(item[0].length, item[1].length + 2), lines: [line.slice(item[0].length)] });
    } else {
      const last = items[items.length - 1];
      const spaces = line.length - line.trimStart().length;
      last.lines.push(line.slice(Math.min(spaces, last.width)));
    }
  }
  const attributes = ordered && parseInt(marker, 10) !== 1 ? { start: parseInt(marker, 10) } : {};
  return element(ordered ? "ol" : "ul", attributes, ...items.map((item) => renderItem(item.lines, depth)));
}

function renderItem(lines, depth) {
  const task = lines[0].match(/^\[([ xX])\] +/);
  if (task) lines = [lines[0].slice(task[0].length), ...lines.slice(1)];
  const blocks = renderBlocks(lines, depth + 1);
  const tight = !lines.some((line, at) => at > 0 && !line.trim());
  const children = blocks.flatMap((node) => (tight && node.tagName === "P" ? [...node.childNodes] : [node]));
  if (!task) return element("li", {}, ...children);
  return element("li", { class: "task" }, element("input", { type: "checkbox", disabled: true, checked: task[1] !== " ", "aria-label": task[1] === " " ? "to do" : "done" }), ...children);
}

function renderTable(lines) {
  const aligns = cells(lines[1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left"));
  const row = (line, tag) =>
    element("tr", {}, ...cells(line).slice(0, 64).map((cell, at) => element(tag, { class: aligns[at] || "left" }, ...inline(cell))));
  const head = element("thead", {}, row(lines[0], "th"));
  const body = element("tbody", {}, ...lines.slice(2).map((line) => row(line, "td")));
  return element("div", { class: "table" }, element("table", {}, head, body));
}

function cells(line) {
  const found = [];
  let cell = "";
  let code = false;
  const bare = line.trim().replace(/^\|/, "");
  for (let at = 0; at < bare.length; at += 1) {
    if (bare[at] === "\\" && bare[at + 1] === "|") {
      cell += "|";
      at += 1;
    } else if (bare[at] === "|" && !code) {
      found.push(cell.trim());
      cell = "";
    } else {
      if (bare[at] === "`") code = !code;
      cell += bare[at];
    }
  }
  if (cell.trim()) found.push(cell.trim());
  return found;
}
