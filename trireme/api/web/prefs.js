// What this browser stores besides conversations: settings for new chats, presets, the key, the appearance.

const PREFIX = "trireme.";

function read(name, fallback) {
  try {
    const text = localStorage.getItem(PREFIX + name);
    return text === null ? fallback : JSON.parse(text);
  } catch {
    return fallback;
  }
}

function write(name, value) {
  try {
    localStorage.setItem(PREFIX + name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

// The settings of a new conversation.
export const loadDefaults = () => read("settings", {});
export const saveDefaults = (settings) => write("settings", settings);
export const loadPresets = () => read("presets", []).filter((one) => one && typeof one.name === "string" && one.settings);
export const savePresets = (presets) => write("presets", presets);
export const loadKey = () => read("key", "");
export const saveKey = (key) => write("key", key);
export const loadTheme = () => read("theme", "auto");
export const saveTheme = (theme) => write("theme", theme);
export const loadThoughts = () => read("thoughts", true);
export const saveThoughts = (shown) => write("thoughts", shown);

// Conversations that an earlier version of this page stored in one entry. They are imported once.
export function takeOlderConversations() {
  const found = read("conversations", []).filter((one) => one && Array.isArray(one.messages));
  return { found, forget: () => localStorage.removeItem(`${PREFIX}conversations`) };
}

export function newId() {
  if (crypto.randomUUID) return crypto.randomUUID(); // exists only in secure contexts
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

// The id of this tab. It stays the same after a reload.
export const TAB = (() => {
  try {
    const known = sessionStorage.getItem(`${PREFIX}tab`) || newId();
    sessionStorage.setItem(`${PREFIX}tab`, known);
    return known;
  } catch {
    return newId();
  }
})();

export function rememberOpen(id) {
  try {
    sessionStorage.setItem(`${PREFIX}open`, id);
  } catch {
    return; // the newest conversation is opened instead
  }
}

export function openBefore() {
  try {
    return sessionStorage.getItem(`${PREFIX}open`);
  } catch {
    return null;
  }
}
