// The page: what belongs to neither the conversation nor the dashboard.

import { getJson, readiness, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { buildDashboard, redrawDashboard, watchLoad } from "./dashboard.js";
import { byId, element, iconButton, paintIcons } from "./dom.js";
import { buildSettings, showModels } from "./settings.js";
import * as store from "./store.js";

const SUGGESTIONS = [
  ["Explain", "Explain how attention works to someone who knows spreadsheets."],
  ["Write", "Write a polite reminder for an invoice that is two weeks late."],
  ["Code", "Write a Python function that merges overlapping intervals, with tests."],
  ["Plan", "Plan a three-day walking trip for beginners, with what to pack."],
];
const THEMES = ["auto", "light", "dark"];
const SMALL = matchMedia("(max-width: 800px)"); // as in style.css
const WAIT = 2000; // milliseconds between looks at the server's state

const chat = new Chat(showConversations, askForKey);
let keyAsked = false;

// --- conversations ---------------------------------------------------------------------------------------------------------

function showConversations() {
  const now = new Date();
  const groups = new Map();
  for (const one of [...store.conversations].sort((a, b) => b.changed - a.changed)) {
    if (!one.messages.length && one !== chat.conversation) continue;
    const days = Math.floor((now.setHours(0, 0, 0, 0) - new Date(one.changed).setHours(0, 0, 0, 0)) / 86400000);
    const name = days <= 0 ? "Today" : days === 1 ? "Yesterday" : days < 7 ? "This week" : "Earlier";
    groups.set(name, [...(groups.get(name) || []), one]);
  }
  byId("conversations").replaceChildren(...[...groups].flatMap(([name, ones]) => [element("h3", {}, name), ...ones.map(conversationRow)]));
}

function conversationRow(conversation) {
  const open = element("button", { type: "button", class: "title", title: conversation.title || "New chat" }, conversation.title || "New chat");
  open.addEventListener("click", () => openConversation(conversation));
  open.addEventListener("dblclick", () => rename(row, conversation));
  const remove = iconButton("trash", "Delete this conversation", () => {
    store.removeConversation(conversation);
    if (conversation === chat.conversation) openConversation(store.conversations[0] || store.newConversation());
    else showConversations();
  });
  const row = element("div", { class: conversation === chat.conversation ? "conversation current" : "conversation" }, open, remove);
  return row;
}

function rename(row, conversation) {
  const field = element("input", { value: conversation.title, "aria-label": "Title", maxlength: "80" });
  const done = () => {
    conversation.title = field.value.trim() || conversation.title;
    store.saveConversations();
    showConversations();
  };
  field.addEventListener("keydown", (event) => event.key === "Enter" && field.blur());
  field.addEventListener("blur", done);
  row.replaceChildren(field);
  field.select();
}

function openConversation(conversation) {
  chat.open(conversation);
  showConversations();
  document.body.classList.remove("sidebar-open");
  showTab("chat");
  byId("input").focus();
}

function newChat() {
  openConversation(store.conversations.find((one) => !one.messages.length) || store.newConversation());
}

function exportConversation() {
  const { title, messages } = chat.conversation;
  const plain = messages.map(({ role, content, reasoning }) => ({ role, content, ...(reasoning ? { reasoning_content: reasoning } : {}) }));
  const file = new Blob([JSON.stringify({ title, messages: plain }, null, 2)], { type: "application/json" });
  const address = URL.createObjectURL(file);
  element("a", { href: address, download: `${(title || "chat").replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60)}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

// --- composer --------------------------------------------------------------------------------------------------------------

function fitInput() {
  const input = byId("input");
  input.style.height = "auto";
  input.style.height = `${Math.min(input.scrollHeight, 260)}px`;
  byId("send").disabled = !input.value.trim();
}

function submit() {
  const input = byId("input");
  const text = input.value.trim();
  if (!text || chat.answering) return;
  input.value = "";
  fitInput();
  chat.send(text);
}

// --- the server ------------------------------------------------------------------------------------------------------------

async function watchState() {
  const pill = byId("state");
  let known = false;
  for (;;) {
    try {
      const state = await readiness();
      pill.dataset.state = state.ok ? "ready" : state.status || "starting";
      pill.textContent = state.ok ? "ready" : state.status === "starting" ? `starting${state.percent ? ` ${Math.round(state.percent)}%` : ""}` : state.status;
      pill.title = state.reason || state.phase || "";
      if (state.ok && !known) known = await loadModels();
    } catch {
      pill.dataset.state = "failed";
      pill.textContent = "no connection";
      known = false;
    }
    await new Promise((resolve) => setTimeout(resolve, document.visibilityState === "visible" ? WAIT : 5 * WAIT));
  }
}

async function loadModels() {
  try {
    const { data } = await getJson("v1/models");
    showModels(data);
    chat.contextLength = data[0]?.max_model_len || 0;
    chat.showContext();
    const { version } = await getJson("version");
    byId("version").textContent = version ? `v${version}` : "";
    watchLoad((error) => error.status === 401 && askForKey());
    return true;
  } catch (error) {
    if (error.status === 401) askForKey();
    return false;
  }
}

function askForKey(again = false) {
  const dialog = byId("key-dialog");
  if (dialog.open || (keyAsked && !again)) return;
  keyAsked = true;
  byId("key-input").value = store.loadKey();
  dialog.showModal();
}

function saveKey() {
  const key = byId("key-input").value.trim();
  store.saveKey(key);
  setKey(key);
  keyAsked = false;
  byId("key-dialog").close();
  loadModels();
}

// --- looks -----------------------------------------------------------------------------------------------------------------

function showTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").title = `Theme: ${theme}`;
  redrawDashboard();
}

function nextTheme() {
  const theme = THEMES[(THEMES.indexOf(store.loadTheme()) + 1) % THEMES.length];
  store.saveTheme(theme);
  showTheme(theme);
}

function showTab(name) {
  for (const tab of ["chat", "dashboard"]) {
    byId(tab).hidden = tab !== name;
    byId(`tab-${tab}`).setAttribute("aria-selected", String(tab === name));
  }
  history.replaceState(null, "", name === "chat" ? "#" : `#${name}`);
  if (name === "dashboard") redrawDashboard();
}

// On a small window the sidebar lies over the page and is closed until asked for; on a large one it is the other way round.
function showSidebar(shown) {
  if (shown && SMALL.matches) byId("settings").hidden = true;
  document.body.classList.toggle("sidebar-open", shown);
  document.body.classList.toggle("sidebar-closed", !shown);
}

function toggleSettings() {
  const drawer = byId("settings");
  drawer.hidden = !drawer.hidden;
}

// Stops an answer that is being written; else puts away what lies over the page.
function escape() {
  if (!byId("stop").hidden) return chat.stop();
  byId("settings").hidden = true;
  if (SMALL.matches) showSidebar(false);
}

// --- beginning -------------------------------------------------------------------------------------------------------------

function wire() {
  const on = (id, event, action) => byId(id).addEventListener(event, action);
  on("new-chat", "click", newChat);
  on("export", "click", exportConversation);
  on("theme", "click", nextTheme);
  on("key", "click", () => askForKey(true));
  on("key-form", "submit", (event) => (event.preventDefault(), saveKey()));
  on("key-cancel", "click", () => byId("key-dialog").close());
  on("open-settings", "click", toggleSettings);
  on("close-settings", "click", toggleSettings);
  on("forget", "click", forgetAll);
  on("tab-chat", "click", () => showTab("chat"));
  on("tab-dashboard", "click", () => showTab("dashboard"));
  on("open-sidebar", "click", () => showSidebar(true));
  on("close-sidebar", "click", () => showSidebar(false));
  on("composer", "submit", (event) => (event.preventDefault(), submit()));
  on("stop", "click", () => chat.stop());
  on("input", "input", fitInput);
  on("input", "keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") escape();
    if (event.key.toLowerCase() === "o" && event.shiftKey && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      newChat();
    }
  });
}

function forgetAll() {
  if (!window.confirm("Delete all conversations in this browser?")) return;
  store.conversations.splice(0);
  store.saveConversations();
  newChat();
}

function suggest() {
  const cards = SUGGESTIONS.map(([title, text]) => {
    const use = () => {
      byId("input").value = text;
      fitInput();
      submit();
    };
    return element("button", { type: "button", onclick: use }, element("b", {}, title), text);
  });
  byId("suggestions").append(...cards);
}

paintIcons();
setKey(store.loadKey());
buildSettings();
buildDashboard();
showTheme(store.loadTheme());
suggest();
wire();
openConversation(store.conversations[0] || store.newConversation());
showTab(location.hash === "#dashboard" ? "dashboard" : "chat");
fitInput();
watchState();
