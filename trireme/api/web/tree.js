// A conversation as a tree: every message knows its parent, versions are children of one parent, and `leaf` says which path is
// shown. Messages are never taken out, only marked as dropped, so that what two tabs know can be joined. Knows no storage, no page.

import { newId } from "./prefs.js";

export function newConversation(settings = {}) {
  const now = Date.now();
  return { id: newId(), title: "", created: now, changed: now, messages: [], leaf: null, from: null, settings: { ...settings }, queue: [], draft: "" };
}

// Adds a message after the last one shown.
export function add(conversation, message) {
  const made = { id: newId(), parent: conversation.leaf, content: "", ...message, stamp: Date.now() };
  conversation.messages.push(made);
  conversation.leaf = made.id;
  conversation.changed = made.stamp;
  return made;
}

// The messages shown, from first to last.
export function path(conversation) {
  const known = new Map(conversation.messages.map((message) => [message.id, message]));
  const found = [];
  for (let id = conversation.leaf; known.has(id); id = found.at(-1).parent) {
    found.push(known.get(id));
    known.delete(id); // an imported file may have a ring
  }
  return found.reverse();
}

// A message and its other versions, oldest first.
export function versions(conversation, message) {
  return conversation.messages.filter((other) => other.parent === message.parent && other.role === message.role && !other.dropped);
}

// Shows this version and the latest messages after it.
export function choose(conversation, message) {
  let last = message;
  const seen = new Set();
  while (last && !seen.has(last.id)) {
    seen.add(last.id);
    conversation.leaf = last.id;
    last = conversation.messages.findLast((other) => other.parent === last.id && !other.dropped);
  }
}

// Removes a message: the conversation shown then ends before it.
export function drop(conversation, message) {
  message.dropped = true;
  message.stamp = Date.now();
  conversation.leaf = message.parent;
}

// The messages that are sent to the model: the path from `from` on. Users leave out the oldest when the model's context is full.
export function sent(conversation) {
  const messages = path(conversation);
  const begin = messages.findIndex((message) => message.id === conversation.from);
  return begin < 0 ? messages : messages.slice(begin);
}

// Leaves out the oldest questions and their answers until at most half of the text is left. Returns false if none can be left out.
export function leaveOutOldest(conversation) {
  const messages = sent(conversation);
  const begins = messages.flatMap((message, at) => (at > 0 && message.role === "user" ? [at] : []));
  const size = (some) => some.reduce((sum, message) => sum + (message.content || "").length, 0);
  const half = size(messages) / 2;
  const begin = begins.find((at) => size(messages.slice(at)) <= half) ?? begins.at(-1);
  if (begin === undefined) {
    if (!messages.length) return false;
    conversation.from = "none"; // nothing is sent: the next question starts without history
    return true;
  }
  conversation.from = messages[begin].id;
  return true;
}

// Merges what another tab has saved into `ours`: the messages of both, each in its latest version.
export function join(ours, theirs) {
  const known = new Map(ours.messages.map((message) => [message.id, message]));
  for (const message of theirs.messages) {
    const own = known.get(message.id);
    if (!own) ours.messages.push({ ...message });
    else if (message.stamp > own.stamp) {
      for (const name of Object.keys(own)) delete own[name];
      Object.assign(own, message);
    }
  }
}

// --- from elsewhere ----------------------------------------------------------------------------------------------------------------

const ROLES = ["user", "assistant", "tool", "system"];
// The fields that a message may have besides its role, content and place, and their types.
const FIELDS = {
  string: ["reasoning", "finish", "note", "error", "call", "name"],
  number: ["thought"],
  boolean: ["json", "dropped", "answered"],
};
const isText = (value) => typeof value === "string";
const LISTS = {
  files: (file) => isText(file?.name) && isText(file?.text),
  calls: (call) => isText(call?.id) && isText(call?.name) && isText(call?.arguments),
  odds: (odd) => Array.isArray(odd) && isText(odd[0]) && Number.isFinite(odd[1]) && Array.isArray(odd[2]) && odd[2].every((other) => Array.isArray(other) && isText(other[0])),
};

// A conversation as a record of this page, from one of an earlier version, a file, or another program: `messages` may be a plain
// list. What is not of its kind is left out. Null where it is no conversation.
export function asConversation(given) {
  if (!given || typeof given !== "object" || !Array.isArray(given.messages)) return null;
  const made = newConversation(settingsOf(given.settings));
  for (const message of given.messages) {
    if (!message || !ROLES.includes(message.role) || !isText(message.content)) continue;
    const kept = fieldsOf(message);
    if (message.role === "system") made.settings.system = made.settings.system || message.content;
    else if (!isText(message.id)) add(made, kept);
    else made.messages.push({ ...kept, id: message.id, parent: isText(message.parent) ? message.parent : null, stamp: Number(message.stamp) || 0 });
  }
  if (made.messages.some((message) => message.id === given.leaf)) made.leaf = given.leaf;
  else made.leaf = made.messages.at(-1)?.id ?? null;
  if (isText(given.id)) made.id = given.id;
  made.title = String(given.title || made.messages[0]?.content || "").split("\n")[0].slice(0, 80);
  made.changed = Number(given.changed) || Date.now();
  made.created = Number(given.created) || made.changed;
  return made;
}

function fieldsOf(message) {
  const kept = { role: message.role, content: message.content, pending: "" };
  for (const [kind, names] of Object.entries(FIELDS)) {
    for (const name of names) if (typeof message[name] === kind) kept[name] = message[name];
  }
  for (const [name, fits] of Object.entries(LISTS)) {
    if (Array.isArray(message[name])) kept[name] = message[name].filter(fits);
  }
  if (isText(message.reasoning_content)) kept.reasoning = kept.reasoning || message.reasoning_content;
  const { prompt, completion } = message.usage || {};
  if (Number.isFinite(prompt) && Number.isFinite(completion)) kept.usage = { prompt, completion };
  return kept;
}

function settingsOf(given) {
  if (!given || typeof given !== "object" || Array.isArray(given)) return {};
  return Object.fromEntries(Object.entries(given).filter(([, value]) => ["string", "number", "boolean"].includes(typeof value)));
}
