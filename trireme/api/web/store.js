// What this browser remembers: conversations, settings, the key. A full or forbidden storage costs memory, nothing else.

const CONVERSATIONS = "trireme.conversations";
const SETTINGS = "trireme.settings";
const KEY = "trireme.key";
const THEME = "trireme.theme";
const MAX_CONVERSATIONS = 200;

function read(name, fallback) {
  try {
    const text = localStorage.getItem(name);
    return text === null ? fallback : JSON.parse(text);
  } catch {
    return fallback;
  }
}

function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

export const settings = { ...read(SETTINGS, {}) };
export const saveSettings = () => write(SETTINGS, settings);
export const loadKey = () => read(KEY, "");
export const saveKey = (key) => write(KEY, key);
export const loadTheme = () => read(THEME, "auto");
export const saveTheme = (theme) => write(THEME, theme);

export const conversations = read(CONVERSATIONS, []).filter((one) => one && Array.isArray(one.messages));

export function saveConversations() {
  conversations.sort((a, b) => b.changed - a.changed);
  conversations.splice(MAX_CONVERSATIONS);
  let kept = conversations.filter((one) => one.messages.length);
  while (!write(CONVERSATIONS, kept) && kept.length > 1) kept = kept.slice(0, -1); // the oldest give way
}

export function newConversation() {
  const made = { id: crypto.randomUUID ? crypto.randomUUID() : String(Math.random()), title: "", messages: [], changed: Date.now() };
  conversations.unshift(made);
  return made;
}

export function removeConversation(conversation) {
  const at = conversations.indexOf(conversation);
  if (at >= 0) conversations.splice(at, 1);
  saveConversations();
}
