// The conversation: messages on the page, an answer as it streams in, and what may be done with each of them.

import { ApiError, streamChat } from "./api.js";
import { byId, copyText, element, iconButton } from "./dom.js";
import { renderMarkdown } from "./markdown.js";
import { requestSettings } from "./settings.js";
import { saveConversations, settings } from "./store.js";

export class Chat {
  // `changed` is called when the list of conversations should be shown anew; `refused` when the server wants a key.
  constructor(changed, refused) {
    this.changed = changed;
    this.refused = refused;
    this.conversation = null;
    this.answering = null;
    this.contextLength = 0;
    this.following = true;
    const scroller = byId("scroller");
    scroller.addEventListener("scroll", () => {
      this.following = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 60;
      byId("to-end").hidden = this.following;
    });
    byId("to-end").addEventListener("click", () => this.toEnd());
  }

  open(conversation) {
    this.stop();
    this.conversation = conversation;
    this.draw();
    this.toEnd();
  }

  draw() {
    const views = this.conversation.messages.map((message, index) => this.view(message, index));
    byId("messages").replaceChildren(...views.map((view) => view.node));
    byId("empty").hidden = this.conversation.messages.length > 0;
    this.showContext();
    return views;
  }

  showContext() {
    const last = this.conversation.messages.findLast((message) => message.usage);
    const used = last ? last.usage.prompt + last.usage.completion : 0;
    byId("context").textContent = used ? `${used.toLocaleString()}${this.contextLength ? ` of ${this.contextLength.toLocaleString()}` : ""} tokens` : "";
  }

  toEnd() {
    const scroller = byId("scroller");
    scroller.scrollTop = scroller.scrollHeight;
    this.following = true;
    byId("to-end").hidden = true;
  }

  // --- one message ---------------------------------------------------------------------------------------------------------

  view(message, index) {
    return message.role === "user" ? this.userView(message, index) : this.answerView(message, index);
  }

  userView(message, index) {
    const text = element("div", { class: "text" }, message.content);
    const copy = iconButton("copy", "Copy", () => copyText(message.content, copy));
    const edit = iconButton("edit", "Edit and send again", () => this.edit(node, message, index));
    const node = element("article", { class: "user" }, text, element("div", { class: "tools" }, copy, edit));
    return { node };
  }

  edit(node, message, index) {
    if (this.answering) return;
    const area = element("textarea", { rows: String(Math.min(12, message.content.split("\n").length + 1)), "aria-label": "Edit the message" });
    area.value = message.content;
    const cancel = element("button", { type: "button", class: "plain", onclick: () => this.draw() }, "Cancel");
    const send = element("button", { type: "submit", class: "primary" }, "Send");
    const form = element("form", { class: "edit" }, area, element("div", { class: "row" }, element("span", { class: "grow" }), cancel, send));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!area.value.trim()) return;
      this.conversation.messages.splice(index);
      this.send(area.value.trim());
    });
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.draw();
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    node.replaceChildren(form);
    area.focus();
  }

  answerView(message, index) {
    const thoughts = element("div", { class: "text" });
    const summary = element("summary", {}, "Reasoning");
    const details = element("details", { class: "thoughts", hidden: true }, summary, thoughts);
    const text = element("div", { class: "text markdown" });
    const calls = element("div", { class: "calls" });
    const note = element("span", { class: "faint note" });
    const copy = iconButton("copy", "Copy", () => copyText(message.content, copy));
    const again = iconButton("again", "Answer again", () => this.regenerate(index));
    const tools = element("div", { class: "tools" }, copy, again, note);
    const error = element("p", { class: "error", hidden: true });
    const node = element("article", { class: "assistant" }, details, text, calls, error, tools);
    const show = () => {
      details.hidden = !message.reasoning;
      if (message.reasoning) {
        renderMarkdown(thoughts, message.reasoning);
        summary.textContent = message.thinking ? "Thinking…" : `Reasoning${message.thought >= 0.1 ? ` · ${message.thought.toFixed(1)} s` : ""}`;
      }
      renderMarkdown(text, message.content || "");
      calls.replaceChildren(...(message.calls || []).map((call) => element("pre", {}, element("b", {}, call.name), `(${call.arguments})`)));
      note.textContent = message.note || "";
      error.hidden = !message.error;
      error.textContent = message.error || "";
      node.classList.toggle("waiting", Boolean(message.pending) && !message.content && !message.reasoning);
    };
    show();
    return { node, show, details };
  }

  regenerate(index) {
    if (this.answering) return;
    this.conversation.messages.splice(index);
    this.answer();
  }

  // --- asking --------------------------------------------------------------------------------------------------------------

  send(text) {
    if (this.answering) return;
    const conversation = this.conversation;
    conversation.messages.push({ role: "user", content: text });
    if (!conversation.title) conversation.title = text.split("\n")[0].slice(0, 80);
    this.answer();
  }

  stop() {
    this.answering?.abort();
  }

  async answer() {
    const conversation = this.conversation;
    const message = { role: "assistant", content: "", pending: true };
    const sent = this.prompt();
    conversation.messages.push(message);
    conversation.changed = Date.now();
    this.answering = new AbortController();
    this.changed();
    const view = this.draw().at(-1);
    if (settings.thoughts !== false) view.details.open = true;
    this.toEnd();
    byId("send").hidden = true;
    byId("stop").hidden = false;
    const clock = new Clock();
    const painter = new Painter(() => {
      view.show();
      byId("live").textContent = clock.live();
      if (this.following && this.conversation === conversation) this.toEnd();
    });
    try {
      await streamChat({ ...requestSettings(), messages: sent }, this.answering.signal, (chunk) => {
        takeChunk(message, chunk, clock);
        painter.soon();
      });
      message.note = clock.told(message);
    } catch (error) {
      message.note = clock.told(message);
      if (error.name === "AbortError") message.note = `${message.note ? `${message.note} · ` : ""}stopped`;
      else message.error = error instanceof ApiError ? error.message : "The server cannot be reached.";
      if (error.status === 401) this.refused();
    }
    delete message.pending;
    delete message.thinking;
    painter.now();
    this.ended(conversation);
  }

  prompt() {
    const messages = this.conversation.messages
      .filter((message) => message.content)
      .map((message) => ({ role: message.role, content: message.content }));
    return settings.system ? [{ role: "system", content: settings.system }, ...messages] : messages;
  }

  ended(conversation) {
    this.answering = null;
    byId("send").hidden = false;
    byId("stop").hidden = true;
    byId("live").textContent = "";
    conversation.changed = Date.now();
    saveConversations();
    if (this.conversation === conversation) this.showContext();
    this.changed();
  }
}

function takeChunk(message, chunk, clock) {
  if (chunk.usage) {
    message.usage = { prompt: chunk.usage.prompt_tokens, completion: chunk.usage.completion_tokens };
    clock.tokens = chunk.usage.completion_tokens;
  }
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const delta = choice.delta || {};
  const thought = delta.reasoning_content ?? delta.reasoning;
  if (thought || delta.content || delta.tool_calls) clock.tick();
  if (thought) {
    message.reasoning = (message.reasoning || "") + thought;
    message.thinking = true;
  }
  if (delta.content) {
    if (message.thinking) message.thought = clock.elapsed();
    message.thinking = false;
    message.content += delta.content;
  }
  for (const call of delta.tool_calls || []) {
    message.calls = message.calls || [];
    const known = (message.calls[call.index] = message.calls[call.index] || { name: "", arguments: "" });
    known.name += call.function?.name || "";
    known.arguments += call.function?.arguments || "";
  }
  if (choice.finish_reason) message.finish = choice.finish_reason;
}

class Clock {
  constructor() {
    this.begun = performance.now();
    this.first = null;
    this.last = null;
    this.tokens = 0;
    this.pieces = 0;
  }

  tick() {
    this.last = performance.now();
    this.first = this.first ?? this.last;
    this.pieces += 1;
  }

  elapsed() {
    return (performance.now() - (this.first ?? this.begun)) / 1000;
  }

  speed() {
    const made = (this.tokens || this.pieces) - 1;
    const seconds = (this.last - this.first) / 1000;
    return made > 0 && seconds > 0.05 ? made / seconds : null;
  }

  live() {
    const speed = this.first === null ? null : this.speed();
    return speed === null ? "" : `${this.tokens || this.pieces} tokens · ${speed.toFixed(1)}/s`;
  }

  told(message) {
    if (this.first === null) return "";
    const parts = [`${this.tokens || this.pieces} tokens`];
    const speed = this.speed();
    if (speed !== null) parts.push(`${speed.toFixed(1)} tokens/s`);
    parts.push(`first after ${Math.round(this.first - this.begun).toLocaleString()} ms`);
    if (message.finish === "length") parts.push("cut at the limit");
    return parts.join(" · ");
  }
}

// Paints at most once a frame, however fast tokens come.
class Painter {
  constructor(paint) {
    this.paint = paint;
    this.due = false;
  }

  soon() {
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => this.due && this.now());
  }

  now() {
    this.due = false;
    this.paint();
  }
}
