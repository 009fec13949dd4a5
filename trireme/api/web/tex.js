// Converts common TeX mathematics to MathML. If any part is not supported, nothing is converted and the page shows the source.

import {
  ACCENTS, ALPHABETS, ENVIRONMENTS, FENCES, FUNCTIONS, INTEGRALS, LARGE, LETTERS, LIMITS, OPERATORS, OVER, SPACES, UNDER,
} from "./tex_symbols.js";

const SPACE = "http://www.w3.org/1998/Math/MathML";
const MOST = 8000; // characters
const DEEPEST = 40;
const TOKEN = /\\(?:operatorname\*|[A-Za-z]+|[\s\S])|\s+|%[^\n]*|\d+(?:\.\d+)?|[\s\S]/gu;

function node(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SPACE, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const row = (nodes) => (nodes.length === 1 ? nodes[0] : node("mrow", {}, ...nodes));
const operator = (text, attributes = {}) => node("mo", attributes, text);

// Returns a <math> element, or null if the source is not supported.
export function mathNode(source, display) {
  if (source.length > MOST) return null;
  try {
    const nodes = new Parser(source.match(TOKEN) || []).all();
    return node("math", display ? { display: "block" } : {}, row(nodes));
  } catch {
    return null;
  }
}

class Parser {
  constructor(tokens) {
    this.tokens = tokens.filter((token) => !token.startsWith("%"));
    this.at = 0;
    this.depth = 0;
  }

  peek() {
    return this.tokens[this.at];
  }

  blank() {
    while (/^\s+$/.test(this.peek() ?? "")) this.at += 1;
  }

  take(wanted = null) {
    this.blank();
    const token = this.tokens[this.at];
    if (token === undefined || (wanted !== null && token !== wanted)) throw new Error(`wanted ${wanted}, found ${token}`);
    this.at += 1;
    return token;
  }

  all() {
    const nodes = this.list([]);
    if (this.peek() !== undefined) throw new Error(`left over: ${this.peek()}`);
    return nodes;
  }

  // Parses everything up to one of `ends`, which is not consumed.
  list(ends) {
    this.depth += 1;
    if (this.depth > DEEPEST) throw new Error("too deep");
    const nodes = [];
    for (this.blank(); this.peek() !== undefined && !ends.includes(this.peek()); this.blank()) {
      if (["}", "&", "\\\\", "\\end", "\\right"].includes(this.peek())) throw new Error(`stray ${this.peek()}`);
      nodes.push(...this.scripted());
    }
    this.depth -= 1;
    return nodes;
  }

  // Parses one item with its subscript and superscript.
  scripted() {
    const base = ["^", "_", "'"].includes(this.peek()) ? { node: node("mrow") } : this.atom();
    if (base === null) return [];
    let [below, above] = [null, null];
    for (this.blank(); ; this.blank()) {
      const token = this.peek();
      if (token === "\\limits" || token === "\\nolimits") base.limits = this.take() === "\\limits";
      else if (token === "_" && !below) below = (this.take(), this.argument());
      else if (token === "^" && !above) above = (this.take(), this.argument());
      else if (token === "'" && !above) above = operator(this.primes());
      else break;
    }
    const after = base.named && !"([{^_}".includes(this.peek() ?? "}") && this.peek() !== "\\left" ? [node("mspace", { width: "0.167em" })] : [];
    if (!below && !above) return [...(base.nodes || [base.node]), ...after];
    const kind = base.limits ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
    const tag = below && above ? kind[2] : below ? kind[0] : kind[1];
    return [node(tag, {}, base.node, ...[below, above].filter((part) => part)), ...after];
  }

  primes() {
    let marks = "";
    for (; this.peek() === "'"; this.at += 1) marks += "′";
    return marks;
  }

  // Parses a group in braces, or a single item, as one node.
  argument() {
    this.blank();
    if (/^\d\d/.test(this.peek() ?? "")) {
      const [first, ...rest] = this.take();
      this.at -= 1;
      this.tokens[this.at] = rest.join(""); // \frac12 takes one digit for each argument
      return node("mn", {}, first);
    }
    if (this.peek() !== "{") {
      const found = this.atom();
      if (found === null) throw new Error("nothing to take");
      return found.node;
    }
    return this.group();
  }

  group() {
    this.take("{");
    const nodes = this.list(["}"]);
    this.take("}");
    return row(nodes);
  }

  // The plain text of a group, as \text and \begin need it.
  raw() {
    this.take("{");
    let text = "";
    for (let open = 1; ; this.at += 1) {
      const token = this.peek();
      if (token === undefined) throw new Error("no end of a text");
      if (token === "{") open += 1;
      if (token === "}") open -= 1;
      if (!open) break;
      text += token.replace(/^\\([ %$#&_{}])$/, "$1");
    }
    this.at += 1;
    return text;
  }

  atom() {
    const token = this.take();
    if (token === "{") {
      this.at -= 1;
      return { node: this.group() };
    }
    if (token.startsWith("\\") && token.length > 1) return this.command(token.slice(1));
    if (/^\d/.test(token)) return { node: node("mn", {}, token) };
    if (/^\p{L}$/u.test(token)) return { node: node("mi", {}, token) };
    if (token === "~") return this.space(0.25);
    if (["^", "_", "}", "$", "#"].includes(token)) throw new Error(`stray ${token}`);
    const fence = "()[]|".includes(token);
    return { node: operator({ "-": "−", "*": "∗" }[token] || token, fence ? { stretchy: "false" } : {}) };
  }

  space(width) {
    return { node: node("mspace", { width: `${width}em` }) };
  }

  command(name) {
    if (Object.hasOwn(LETTERS, name)) return { node: node("mi", {}, LETTERS[name]) };
    if (Object.hasOwn(OPERATORS, name)) return { node: operator(OPERATORS[name]) };
    if (Object.hasOwn(LARGE, name)) return { node: operator(LARGE[name], { largeop: "true", movablelimits: "true" }), limits: true };
    if (Object.hasOwn(INTEGRALS, name)) return { node: operator(INTEGRALS[name], { largeop: "true" }) };
    if (FUNCTIONS.has(name)) return { node: named(name), limits: LIMITS.has(name), named: true };
    if (Object.hasOwn(SPACES, name)) return this.space(SPACES[name]);
    if (Object.hasOwn(FENCES, name)) return { node: operator(FENCES[name], { stretchy: "false" }) };
    if (Object.hasOwn(ALPHABETS, name)) return { node: inAlphabet(this.argument(), name) };
    if (Object.hasOwn(ACCENTS, name)) return { node: node("mover", { accent: "true" }, this.argument(), operator(ACCENTS[name], { stretchy: String(/wide|over/.test(name)) })) };
    if (Object.hasOwn(OVER, name)) return { node: node("mover", {}, this.argument(), operator(OVER[name])), limits: true };
    if (Object.hasOwn(UNDER, name)) return { node: node("munder", {}, this.argument(), operator(UNDER[name])), limits: true };
    if (/^[{}%$#&_|]$/.test(name)) return { node: operator(name === "|" ? "‖" : name, { stretchy: "false" }) };
    if (Object.hasOwn(COMMANDS, name)) return COMMANDS[name](this);
    throw new Error(`\\${name} is not known`);
  }

  fence() {
    const token = this.take();
    const name = token.slice(1);
    if (token === ".") return "";
    if (token.startsWith("\\")) return "{}|".includes(name) ? { "|": "‖" }[name] || name : FENCES[name] ?? fail(name);
    return token;
  }

  table(kind) {
    const rows = [[]];
    for (;;) {
      rows.at(-1).push(this.list(["&", "\\\\", "\\end"]));
      const end = this.take();
      if (end === "\\end") break;
      if (end !== "\\\\") continue;
      if (this.peek() === "[") while (this.take() !== "]");
      rows.push([]);
    }
    if (rows.length > 1 && rows.at(-1).length === 1 && !rows.at(-1)[0].length) rows.pop();
    const side = (at) => (kind === "aligned" ? (at % 2 ? "tex-left" : "tex-right") : kind === "cases" ? "tex-left" : "tex-center");
    const cells = (cell, at) => node("mtd", { class: side(at) }, ...cell);
    return node("mtable", kind === "aligned" ? { displaystyle: "true" } : {}, ...rows.map((some) => node("mtr", {}, ...some.map(cells))));
  }
}

function fail(name) {
  throw new Error(`\\${name} is not known here`);
}

function named(name) {
  return node("mi", { mathvariant: "normal" }, { liminf: "lim inf", limsup: "lim sup", argmax: "arg max", argmin: "arg min" }[name] || name);
}

function inAlphabet(given, name) {
  const [upper, lower, digits, others] = ALPHABETS[name];
  const turn = (character) => {
    if (others[character]) return others[character];
    if (/[A-Z]/.test(character)) return String.fromCodePoint(upper + character.charCodeAt(0) - 65);
    if (/[a-z]/.test(character)) return String.fromCodePoint(lower + character.charCodeAt(0) - 97);
    return /\d/.test(character) && digits ? String.fromCodePoint(digits + Number(character)) : character;
  };
  const leaves = given.children.length ? [...given.querySelectorAll("mi, mn")] : [given];
  for (const leaf of leaves) leaf.textContent = [...leaf.textContent].map(turn).join("");
  return given;
}

const fraction = (style) => (parser) => {
  const made = node("mfrac", {}, parser.argument(), parser.argument());
  return { node: style ? node("mstyle", { displaystyle: style }, made) : made };
};
const binomial = (parser) => ({
  node: node("mrow", {}, operator("("), node("mfrac", { linethickness: "0" }, parser.argument(), parser.argument()), operator(")")),
});
const text = (attributes) => (parser) => ({ node: node("mtext", attributes, parser.raw().replace(/^ | $/g, "\u00a0")) });
const upright = (parser) => {
  const given = parser.argument();
  const leaves = given.children.length ? [...given.querySelectorAll("mi")] : [given];
  const word = leaves.map((leaf) => leaf.textContent).join("");
  return { node: leaves.length === given.children.length ? node("mi", { mathvariant: "normal" }, word) : given };
};
const sized = (parser) => ({ node: operator(parser.fence(), { stretchy: "true", minsize: "1.4em" }) });
const nothing = () => null;

const COMMANDS = {
  frac: fraction(""),
  dfrac: fraction("true"),
  cfrac: fraction("true"),
  tfrac: fraction("false"),
  binom: binomial,
  dbinom: binomial,
  tbinom: binomial,
  sqrt: (parser) => {
    parser.blank();
    if (parser.peek() !== "[") return { node: node("msqrt", {}, parser.argument()) };
    parser.take("[");
    const index = row(parser.list(["]"]));
    parser.take("]");
    return { node: node("mroot", {}, parser.argument(), index) };
  },
  left: (parser) => {
    const open = parser.fence();
    const inner = parser.list(["\\right", "\\middle"]);
    while (parser.peek() === "\\middle") inner.push((parser.take(), operator(parser.fence(), { stretchy: "true" })), ...parser.list(["\\right", "\\middle"]));
    parser.take("\\right");
    const close = parser.fence();
    const side = (mark, form) => (mark ? [operator(mark, { stretchy: "true", fence: "true", form })] : []);
    return { node: node("mrow", {}, ...side(open, "prefix"), ...inner, ...side(close, "postfix")) };
  },
  begin: (parser) => {
    const name = parser.raw();
    const [open, close, kind = ""] = ENVIRONMENTS[name] || fail(name);
    if (kind === "array") parser.raw(); // skips the alignment of its columns
    const table = parser.table(kind);
    if (parser.raw() !== name) throw new Error("another end");
    return { node: open || close ? node("mrow", {}, ...(open ? [operator(open)] : []), table, ...(close ? [operator(close)] : [])) : table };
  },
  text: text({}),
  textrm: text({}),
  textbf: text({ class: "tex-bold" }),
  textit: text({ class: "tex-italic" }),
  texttt: text({ class: "tex-mono" }),
  mbox: text({}),
  mathrm: upright,
  operatorname: upright,
  "operatorname*": (parser) => ({ ...upright(parser), limits: true }),
  mathit: (parser) => ({ node: parser.argument() }),
  boxed: (parser) => ({ node: node("mrow", { class: "tex-boxed" }, parser.argument()) }),
  overset: (parser) => ({ node: swapped("mover", parser) }),
  underset: (parser) => ({ node: swapped("munder", parser) }),
  stackrel: (parser) => ({ node: swapped("mover", parser) }),
  xrightarrow: (parser) => ({ node: node("mover", {}, operator("→", { stretchy: "true" }), parser.argument()) }),
  not: (parser) => ({ node: operator(`${parser.argument().textContent}\u0338`) }),
  pmod: (parser) => ({ nodes: [operator("("), node("mi", { mathvariant: "normal" }, "mod"), node("mspace", { width: "0.3em" }), parser.argument(), operator(")")], node: node("mrow") }),
  bmod: () => ({ node: operator("mod") }),
  mod: () => ({ node: operator("mod") }),
  tag: (parser) => ({ node: node("mtext", {}, `\u2003(${parser.raw()})`) }),
  label: (parser) => (parser.raw(), null),
  color: (parser) => (parser.raw(), null),
  displaystyle: nothing,
  textstyle: nothing,
  nonumber: nothing,
  notag: nothing,
  hline: nothing,
  limits: nothing,
};
for (const name of ["big", "Big", "bigg", "Bigg", "bigl", "bigr", "Bigl", "Bigr", "biggl", "biggr", "Biggl", "Biggr", "bigm"]) COMMANDS[name] = sized;

function swapped(tag, parser) {
  const mark = parser.argument();
  return node(tag, {}, parser.argument(), mark);
}
