// Stores conversations in this browser, one IndexedDB record each, and tells other tabs about saves. Knows nothing of the page.

import { takeOlderConversations } from "./prefs.js";
import { asConversation, join } from "./tree.js";

const SHELF = "conversations";
export const conversations = new Map(); // id -> conversation; all that this tab knows
const channel = "BroadcastChannel" in window ? new BroadcastChannel("trireme") : null;
const saving = new Map(); // id -> whether it has changed since the current save began
let database = null;
let told = () => {};
let failed = () => {};

// Reads all conversations. Calls `onChange(conversation)` when another tab changed one (null: removed it), and
// `onFailure(error)` when something cannot be stored.
export async function openStore(onChange, onFailure) {
  [told, failed] = [onChange, onFailure];
  try {
    database = await openDatabase();
    for (const record of await wait(shelf("readonly").getAll())) conversations.set(record.id, record);
    await moveOlder();
  } catch (error) {
    failed(error);
  }
  channel?.addEventListener("message", ({ data }) => takeOver(data));
}

function openDatabase() {
  const opening = indexedDB.open("trireme", 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore(SHELF, { keyPath: "id" });
  return wait(opening);
}

function wait(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function shelf(mode) {
  return database.transaction(SHELF, mode).objectStore(SHELF);
}

async function moveOlder() {
  const { found, forget } = takeOlderConversations();
  for (const conversation of found.map(asConversation)) {
    if (conversations.has(conversation.id)) continue;
    conversations.set(conversation.id, conversation);
    await put(conversation);
  }
  if (found.length) forget();
}

// --- saving ------------------------------------------------------------------------------------------------------------------

// Saves a conversation. Saves requested while one is running are combined. Resolves to whether it is stored.
export async function save(conversation) {
  conversations.set(conversation.id, conversation);
  if (saving.has(conversation.id)) {
    saving.set(conversation.id, true);
    return true;
  }
  try {
    do {
      saving.set(conversation.id, false);
      await put(conversation);
    } while (saving.get(conversation.id) && conversations.has(conversation.id));
    channel?.postMessage({ id: conversation.id });
    return true;
  } catch (error) {
    failed(error);
    return false;
  } finally {
    saving.delete(conversation.id);
  }
}

// One transaction reads the stored record, merges it and writes it, so that no tab loses the changes of another.
function put(conversation) {
  return new Promise((resolve, reject) => {
    if (!database) throw new Error("This browser keeps nothing for this page.");
    const records = shelf("readwrite");
    const reading = records.get(conversation.id);
    let cause = null;
    reading.onsuccess = () => {
      if (reading.result) join(conversation, reading.result);
      try {
        records.put(conversation);
      } catch (error) {
        cause = error;
        records.transaction.abort();
      }
    };
    records.transaction.oncomplete = resolve;
    records.transaction.onabort = () => reject(cause || records.transaction.error);
  });
}

export async function remove(conversation) {
  conversations.delete(conversation.id);
  try {
    await wait(shelf("readwrite").delete(conversation.id));
    channel?.postMessage({ id: conversation.id });
  } catch (error) {
    failed(error);
  }
}

// --- other tabs ----------------------------------------------------------------------------------------------------------------

async function takeOver({ id }) {
  const theirs = await wait(shelf("readonly").get(id)).catch(() => null);
  const ours = conversations.get(id);
  if (!theirs) {
    if (ours && conversations.delete(id)) told(null, ours);
    return;
  }
  if (!ours) conversations.set(id, theirs);
  else {
    join(ours, theirs);
    if (theirs.changed >= ours.changed) {
      for (const name of ["title", "leaf", "from", "changed", "settings", "queue"]) ours[name] = theirs[name];
    }
  }
  told(conversations.get(id));
}
