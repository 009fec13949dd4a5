// Exports and imports conversations as files, one or all. An import is merged with what exists and overwrites nothing.

import { byId, element } from "./dom.js";
import { toast } from "./notices.js";
import { conversations, save } from "./store.js";
import { asConversation } from "./tree.js";

export function exportOne(conversation) {
  offer(conversation.title || "chat", [conversation]);
}

export function exportAll() {
  offer(`trireme-conversations-${new Date().toISOString().slice(0, 10)}`, [...conversations.values()].filter((one) => one.messages.length));
}

function offer(name, some) {
  const file = new Blob([JSON.stringify({ format: "trireme-conversations-1", conversations: some }, null, 2)], { type: "application/json" });
  const address = URL.createObjectURL(file);
  element("a", { href: address, download: `${name.replace(/[^\p{L}\p{N}-]+/gu, "-").slice(0, 60)}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

// Asks the user for files. Calls `done(conversation)` with the last one imported.
export function wireImport(done) {
  const chooser = byId("import-file");
  byId("import").addEventListener("click", () => chooser.click());
  chooser.addEventListener("change", async () => {
    let last = null;
    let count = 0;
    for (const file of chooser.files) {
      for (const one of conversationsIn(await file.text())) {
        last = await takeIn(one);
        count += 1;
      }
    }
    chooser.value = "";
    toast(count ? `${count} ${count === 1 ? "conversation" : "conversations"} came in.` : "No conversation was found in this file. Fix: choose one that this page has saved.");
    if (last) done(last);
  });
}

// The conversations in a file: the format of this page, a list of conversations, or a single one with its messages.
function conversationsIn(text) {
  try {
    const given = JSON.parse(text);
    const list = Array.isArray(given) ? given : Array.isArray(given?.conversations) ? given.conversations : [given];
    return list.map(asConversation).filter((one) => one?.messages.length);
  } catch {
    return [];
  }
}

async function takeIn(conversation) {
  await save(conversation); // merges it with the record of the same id
  return conversations.get(conversation.id);
}
