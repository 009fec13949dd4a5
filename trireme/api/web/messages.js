// Draws messages: a question, an answer with its reasoning and tool calls, the result of a call. `acts` has the actions on them.

import { answerOf, brokeOff } from "./answer.js";
import { callsView } from "./calls.js";
import { copyText, element, icon, iconButton } from "./dom.js";
import { renderMarkdown } from "./markdown.js";
import { oddsView } from "./odds.js";
import { loadThoughts } from "./prefs.js";
import { versions } from "./tree.js";

// Returns { node, message, show }; `show` updates the node. `acts`: regenerate, edit, goOn, choose, results.
export function messageView(conversation, message, acts) {
  if (message.role === "user") return userView(conversation, message, acts);
  return message.role === "tool" ? toolView(message) : answerView(conversation, message, acts);
}

// ‹2/3›: shown if there is more than one version.
function versionTurner(conversation, message, acts) {
  const count = element("span", { class: "faint count" });
  const turn = (step) => {
    const all = versions(conversation, message);
    acts.choose(all[all.indexOf(message) + step], step);
  };
  const back = iconButton("left", "Earlier version", () => turn(-1));
  const on = iconButton("right", "Later version", () => turn(1));
  const node = element("span", { class: "versions", hidden: true }, back, count, on);
  const show = () => {
    const all = versions(conversation, message);
    const at = all.indexOf(message);
    node.hidden = all.length < 2;
    count.textContent = `${at + 1}/${all.length}`;
    back.disabled = at <= 0;
    on.disabled = at >= all.length - 1;
  };
  return { node, show };
}

function userView(conversation, message, acts) {
  const text = element("div", { class: "text" }, message.content);
  const files = element("div", { class: "files" }, ...(message.files || []).map((file) => fileChip(file)));
  const copy = iconButton("copy", "Copy", () => copyText(message.content, copy));
  const turner = versionTurner(conversation, message, acts);
  const view = { message };
  const edit = iconButton("edit", "Edit and send again", () => editIn(view, "Send", (content) => acts.editQuestion(message, content)));
  view.node = element("article", { class: "user", "data-id": message.id }, element("h2", { class: "offscreen" }, "You"), files, text, element("div", { class: "tools" }, turner.node, copy, edit));
  text.hidden = !message.content;
  view.show = () => turner.show();
  view.show();
  return view;
}

export function fileChip(file, remove = null) {
  const size = file.text.length < 1000 ? `${file.text.length} characters` : `${Math.round(file.text.length / 1000)}k characters`;
  return element("span", { class: "chip", title: size }, icon("file"), element("span", {}, file.name), remove && iconButton("close", `Leave out ${file.name}`, remove));
}

function answerView(conversation, message, acts) {
  const view = { message };
  const parts = answerParts(conversation, message, acts, view);
  const { thoughts, summary, details, text, calls, error, broken, note, tools } = parts;
  view.node = element("article", { class: "assistant", "data-id": message.id }, element("h2", { class: "offscreen" }, "Trireme"), details, text, calls.node, error, broken, tools);
  details.open = Boolean(message.pending) && loadThoughts();
  view.show = () => {
    const run = answerOf(conversation);
    const streaming = run?.message === message;
    details.hidden = !message.reasoning;
    if (message.reasoning) {
      renderMarkdown(thoughts, message.reasoning);
      summary.textContent = message.thinking ? "Thinking…" : `Reasoning${message.thought >= 0.1 ? ` · ${message.thought.toFixed(1)} s` : ""}`;
    }
    if (parts.odds.pressed()) parts.odds.show(text);
    else renderMarkdown(text, shownText(message));
    calls.show(!streaming);
    note.textContent = message.note || "";
    error.hidden = !message.error;
    error.textContent = message.error || "";
    broken.hidden = !brokeOff(message);
    const silent = !message.content && !message.reasoning && !message.calls?.length;
    parts.goOn.hidden = streaming || !message.content || !["length", "stopped", "broken", "edited"].includes(message.finish);
    parts.odds.button.hidden = streaming || !message.odds?.length;
    parts.again.hidden = parts.edit.hidden = streaming;
    view.node.classList.toggle("waiting", Boolean(message.pending) && silent && broken.hidden);
    view.node.setAttribute("aria-busy", String(streaming));
    parts.turner.show();
  };
  view.show();
  return view;
}

function answerParts(conversation, message, acts, view) {
  const summary = element("summary", {}, "Reasoning");
  const thoughts = element("div", { class: "text" });
  const details = element("details", { class: "thoughts", hidden: true }, summary, thoughts);
  const copy = iconButton("copy", "Copy", () => copyText(message.content, copy));
  const again = iconButton("again", "Answer again", () => acts.regenerate(message));
  const edit = iconButton("edit", "Edit this answer", () => editIn(view, "Keep", (content) => acts.editAnswer(message, content)));
  const goOn = element("button", { type: "button", class: "plain strong", onclick: () => acts.goOn(message) }, "Go on");
  const odds = oddsView(message, () => view.show());
  const turner = versionTurner(conversation, message, acts);
  const note = element("span", { class: "faint note" });
  const tools = element("div", { class: "tools" }, turner.node, copy, again, edit, odds.button, goOn, note);
  const resume = element("button", { type: "button", class: "plain strong" }, "Go on");
  resume.addEventListener("click", () => (message.content ? acts.goOn(message) : acts.regenerate(message)));
  const broken = element("p", { class: "broken", hidden: true }, "This answer broke off: the page was left while it came. ", resume);
  const error = element("p", { class: "error", hidden: true });
  const text = element("div", { class: "text markdown" });
  const calls = callsView(message, (results) => acts.results(message, results));
  return { summary, thoughts, details, again, edit, goOn, odds, turner, note, tools, broken, error, text, calls };
}

// If the answer was requested as JSON, it is shown as formatted JSON.
function shownText(message) {
  if (!message.json || !message.content.trim().startsWith("{")) return message.content || "";
  try {
    return `\`\`\`json\n${JSON.stringify(JSON.parse(message.content), null, 2)}\n\`\`\``;
  } catch {
    return `\`\`\`json\n${message.content}`;
  }
}

function toolView(message) {
  const body = element("pre", { tabindex: "0" }, message.content);
  const details = element("details", { class: "result" }, element("summary", {}, `Result of ${message.name || "a call"}`), body);
  return { message, node: element("article", { class: "tool", "data-id": message.id }, details), show: () => (body.textContent = message.content) };
}

// A form that replaces the message. Calls `done` with the new text.
function editIn(view, name, done) {
  const area = element("textarea", { rows: String(Math.min(16, view.message.content.split("\n").length + 1)), "aria-label": "Edit the message" });
  area.value = view.message.content;
  const children = [...view.node.childNodes];
  const close = () => view.node.replaceChildren(...children);
  const cancel = element("button", { type: "button", class: "plain", onclick: close }, "Cancel");
  const send = element("button", { type: "submit", class: "primary" }, name);
  const form = element("form", { class: "edit" }, area, element("div", { class: "row" }, element("span", { class: "grow" }), cancel, send));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!area.value.trim()) return;
    close();
    done(area.value.trim());
  });
  area.addEventListener("keydown", (event) => {
    const submits = event.key === "Enter" && !event.shiftKey && !event.isComposing && name === "Send";
    if (event.key === "Escape") close();
    else if (submits || (event.key === "Enter" && (event.ctrlKey || event.metaKey))) form.requestSubmit();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  view.node.replaceChildren(form);
  area.focus();
}
