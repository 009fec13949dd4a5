// Highlights code: comments, strings, numbers and keywords. One scanner handles all languages in one pass.

import { element } from "./dom.js";

const WORDS = {
  python:
    "and as assert async await break class continue def del elif else except finally for from global if import in is lambda match None nonlocal not or pass raise return True False try while with yield case self",
  javascript:
    "async await break case catch class const continue default delete do else export extends false finally for from function get if import in instanceof let new null of return set static super switch this throw true try typeof undefined var void while yield interface type enum implements private public readonly",
  c: "auto bool break case catch char class const constexpr continue default delete do double else enum extern false float for goto if inline int long namespace new nullptr private protected public return short signed sizeof static struct switch template this throw true try typedef typename union unsigned using virtual void volatile while fn let mut impl pub use match trait where mod self Self crate move ref dyn package import func var chan go defer map range interface type nil final abstract extends implements String boolean byte",
  shell: "if then else elif fi for while do done case esac in function return local export sudo cd echo exit set unset source",
  sql: "select from where and or not insert into values update set delete create table drop alter join left right inner outer on group by order having limit as distinct union all null is in like between case when then end primary key references index view with count sum avg min max",
};
const ALIASES = {
  py: "python", python3: "python", js: "javascript", jsx: "javascript", ts: "javascript", tsx: "javascript", typescript: "javascript",
  json: "javascript", java: "c", cpp: "c", "c++": "c", cc: "c", h: "c", cs: "c", csharp: "c", rust: "c", rs: "c", go: "c", golang: "c",
  kotlin: "c", swift: "c", php: "c", bash: "shell", sh: "shell", zsh: "shell", console: "shell", dockerfile: "shell", yaml: "shell",
  yml: "shell", toml: "shell", ini: "shell", postgresql: "sql", mysql: "sql", sqlite: "sql",
};
const SETS = Object.fromEntries(Object.entries(WORDS).map(([name, words]) => [name, new Set(words.split(" "))]));
const MAX_COLOURED = 60000;

export function highlighted(text, language) {
  const family = ALIASES[language] || language;
  const words = SETS[family];
  if (!words || text.length > MAX_COLOURED) return [text];
  const nodes = [];
  let plain = "";
  let at = 0;
  const put = (kind, length) => {
    if (plain) nodes.push(plain);
    plain = "";
    nodes.push(element("span", { class: `c-${kind}` }, text.slice(at, at + length)));
    at += length;
  };
  while (at < text.length) {
    const found = tokenAt(text, at, family, words);
    if (found.kind) put(found.kind, found.length);
    else {
      plain += text.slice(at, at + found.length);
      at += found.length;
    }
  }
  if (plain) nodes.push(plain);
  return nodes;
}

function tokenAt(text, at, family, words) {
  const character = text[at];
  const comment = commentLength(text, at, family);
  if (comment) return { kind: "comment", length: comment };
  if (character === '"' || character === "'" || (character === "`" && family === "javascript")) {
    return { kind: "string", length: stringLength(text, at, family) };
  }
  if (/[A-Za-z_$]/.test(character)) {
    let end = at + 1;
    while (end < text.length && /[\w$]/.test(text[end])) end += 1;
    const word = text.slice(at, end);
    if (words.has(family === "sql" ? word.toLowerCase() : word)) return { kind: "word", length: end - at };
    return { kind: text[end] === "(" ? "call" : null, length: end - at };
  }
  if (/\d/.test(character)) {
    let end = at + 1;
    while (end < text.length && /[\w.]/.test(text[end])) end += 1;
    return { kind: "number", length: end - at };
  }
  return { kind: null, length: 1 };
}

function commentLength(text, at, family) {
  const two = text.slice(at, at + 2);
  const line =
    (text[at] === "#" && (family === "python" || family === "shell")) ||
    (two === "//" && (family === "javascript" || family === "c")) ||
    (two === "--" && family === "sql");
  if (line) {
    const end = text.indexOf("\n", at);
    return (end < 0 ? text.length : end) - at;
  }
  if (two === "/*" && family !== "python" && family !== "shell") {
    const end = text.indexOf("*/", at + 2);
    return (end < 0 ? text.length : end + 2) - at;
  }
  return 0;
}

function stringLength(text, at, family) {
  const quote = text[at];
  if (family === "python" && text.slice(at, at + 3) === quote.repeat(3)) {
    const end = text.indexOf(quote.repeat(3), at + 3);
    return (end < 0 ? text.length : end + 3) - at;
  }
  for (let end = at + 1; end < text.length; end += 1) {
    if (text[end] === "\\") end += 1;
    else if (text[end] === quote) return end + 1 - at;
    else if (text[end] === "\n" && quote !== "`") return end - at;
  }
  return text.length - at;
}
