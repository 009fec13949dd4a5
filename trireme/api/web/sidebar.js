// The list of conversations: search, open, rename, delete, and undo a deletion.

import { answerOf, stopAnswer } from "./answer.js";
import { byId, element, iconButton } from "./dom.js";
import { toast } from "./notices.js";
import { conversations, remove, save } from "./store.js";

const SNIPPET = 60; // characters shown around a search result

export class Sidebar {
  // `open(conversation)` shows one; `current()` returns the open one; `fresh()` opens another after the open one was deleted.
  constructor({ open, current, fresh }) {
    Object.assign(this, { open, current, fresh });
    byId("search").addEventListener("input", () => this.show());
  }

  show() {
    const wanted = byId("search").value.trim().toLowerCase();
    const found = [...conversations.values()].filter((one) => one.messages.length || one === this.current()).sort((a, b) => b.changed - a.changed);
    const rows = found.map((one) => ({ one, snippet: wanted ? snippetOf(one, wanted) : "" })).filter(({ snippet }) => snippet !== null);
    const groups = new Map();
    for (const row of rows) groups.set(ageOf(row.one), [...(groups.get(ageOf(row.one)) || []), row]);
    const nodes = [...groups].flatMap(([name, some]) => [element("h2", {}, name), element("ul", {}, ...some.map((row) => this.row(row)))]);
    byId("conversations").replaceChildren(...(nodes.length ? nodes : [element("p", { class: "faint" }, wanted ? "Nothing was found." : "No conversation yet.")]));
  }

  row({ one, snippet }) {
    const title = one.title || "New chat";
    const current = one === this.current();
    const open = element("button", { type: "button", class: "title", title, "aria-current": current ? "true" : null, onclick: () => this.open(one) }, element("span", {}, title));
    if (snippet) open.append(element("small", { class: "faint" }, snippet));
    if (answerOf(one)) open.prepend(element("i", { class: "busy", title: "An answer is being written" }));
    const row = element("li", { class: current ? "conversation current" : "conversation" }, open);
    open.addEventListener("dblclick", () => this.rename(row, one));
    row.append(iconButton("edit", `Rename ${title}`, () => this.rename(row, one)), iconButton("trash", `Delete ${title}`, () => this.remove([one])));
    return row;
  }

  rename(row, conversation) {
    const field = element("input", { value: conversation.title, "aria-label": "Title", maxlength: "80" });
    const before = conversation.title;
    const done = () => {
      conversation.title = field.value.trim() || before;
      save(conversation);
      this.show();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") field.value = before;
      if (event.key === "Enter" || event.key === "Escape") {
        event.stopPropagation();
        field.blur();
      }
    });
    field.addEventListener("blur", done);
    row.replaceChildren(field);
    field.focus();
    field.select();
  }

  remove(some) {
    for (const one of some) {
      stopAnswer(one);
      remove(one);
    }
    if (some.includes(this.current())) this.fresh();
    this.show();
    const back = () => {
      for (const one of some) save(one);
      this.open(some[0]);
    };
    toast(some.length === 1 ? `“${some[0].title || "New chat"}” was deleted.` : `${some.length} conversations were deleted.`, ["Undo", back]);
  }
}

function ageOf(conversation) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  const days = Math.floor((midnight - new Date(conversation.changed).setHours(0, 0, 0, 0)) / 86400000);
  return days <= 0 ? "Today" : days === 1 ? "Yesterday" : days < 7 ? "This week" : "Earlier";
}

// Where a conversation contains the search words: the text around them, "" if they are in its title, null if nowhere.
function snippetOf(conversation, wanted) {
  if ((conversation.title || "").toLowerCase().includes(wanted)) return "";
  for (const { content, dropped } of conversation.messages) {
    const at = dropped ? -1 : content.toLowerCase().indexOf(wanted);
    if (at >= 0) return `…${content.slice(Math.max(0, at - SNIPPET / 2), at + SNIPPET).replace(/\s+/g, " ")}…`;
  }
  return null;
}
