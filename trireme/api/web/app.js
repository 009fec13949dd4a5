// The page itself: everything outside the conversation and the dashboard.

import { getJson, readiness, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { buildDashboard, redrawDashboard, watchLoad } from "./dashboard.js";
import { byId, element, paintIcons } from "./dom.js";
import { notice } from "./notices.js";
import * as prefs from "./prefs.js";
import { served } from "./request.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { conversations, openStore, save } from "./store.js";
import { exportAll, exportOne, wireImport } from "./transfer.js";
import { newConversation } from "./tree.js";

const SUGGESTIONS = [
  ["Explain", "Explain how attention works to someone who knows spreadsheets."],
  ["Write", "Write a polite reminder for an invoice that is two weeks late."],
  ["Code", "Write a Python function that merges overlapping intervals, with tests."],
  ["Plan", "Plan a three-day walking trip for beginners, with what to pack."],
];
const THEMES = ["auto", "light", "dark"];
const TABS = ["chat", "dashboard"];
const SMALL = matchMedia("(max-width: 800px)"); // the same width as in style.css
const WAIT = 2000; // milliseconds between checks of the server's state

const chat = new Chat({
  changed: () => sidebar.show(),
  refused: () => askForKey(),
  running: (running) => composer.setRunning(running),
  giveBack: (message) => composer.fill(message.content, message.files),
  takeBack: () => composer.fill(""),
});
const composer = new Composer({ ask: (text, files) => chat.ask(text, files), stop: () => chat.stop(), keepDraft });
const sidebar = new Sidebar({ open: openConversation, current: () => chat.conversation, fresh: () => openConversation(latest() || fresh()) });
let settings = null;
let keyAsked = false;

// --- conversations ---------------------------------------------------------------------------------------------------------

const fresh = () => newConversation(prefs.loadDefaults());
const latest = () => [...conversations.values()].sort((a, b) => b.changed - a.changed)[0];

function openConversation(conversation) {
  if (chat.conversation && chat.conversation !== conversation) composer.flush();
  chat.open(conversation);
  composer.fill(conversation.draft || "");
  settings?.showModel();
  settings?.show();
  sidebar.show();
  document.body.classList.remove("sidebar-open");
  showTab("chat");
  if (!SMALL.matches) byId("input").focus();
}

function newChat() {
  const empty = [...conversations.values(), chat.conversation].find((one) => !one.messages.length && !one.draft);
  if (empty && empty !== chat.conversation) empty.settings = prefs.loadDefaults();
  openConversation(empty || fresh());
}

function keepDraft(text) {
  const conversation = chat.conversation;
  if ((conversation.draft || "") === text) return;
  conversation.draft = text;
  save(conversation);
}

// Another tab has saved or removed (null) a conversation.
function changedElsewhere(conversation, removed) {
  if (removed === chat.conversation) openConversation(latest() || fresh());
  else if (conversation === chat.conversation) {
    chat.draw();
    settings?.show();
  }
  sidebar.show();
}

function notKept(error) {
  const full = error?.name === "QuotaExceededError";
  const cause = full ? "This browser's storage is full" : "This browser does not keep conversations for this page";
  notice(`${cause}: what is written now lasts only until the page is closed.${full ? " Fix: export and delete conversations that you do not need." : ""}`, [["Export all", exportAll]]);
}

// --- the server ------------------------------------------------------------------------------------------------------------

async function watchState() {
  const pill = byId("state");
  let known = false;
  for (;;) {
    try {
      const state = await readiness();
      pill.dataset.state = state.ok ? "ready" : state.status || "starting";
      served.loading = !state.ok || isWaking(state);
      pill.textContent = stateText(state);
      pill.title = state.reason || state.phase || (state.status === "sleeping" ? "The model was put away while nobody asked; it is loaded for the next question." : "");
      if (state.ok && !known) known = await loadModels();
    } catch {
      pill.dataset.state = "failed";
      pill.textContent = "no connection";
      known = false;
    }
    await new Promise((resolve) => setTimeout(resolve, document.visibilityState === "visible" ? WAIT : 5 * WAIT));
  }
}

// Whether a sleeping server is loading the model again for a question.
function isWaking(state) {
  return state.status === "sleeping" && Boolean(state.phase);
}

function stateText(state) {
  if (state.status === "sleeping") return isWaking(state) ? "loading" : "asleep";
  if (state.ok) return "ready";
  return state.status === "starting" ? `starting${state.percent ? ` ${Math.round(state.percent)}%` : ""}` : state.status || "starting";
}

async function loadModels() {
  try {
    served.models = (await getJson("v1/models")).data;
    settings.showModels();
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
  byId("key-input").value = prefs.loadKey();
  dialog.showModal();
}

function saveKey() {
  const key = byId("key-input").value.trim();
  prefs.saveKey(key);
  setKey(key);
  keyAsked = false;
  byId("key-dialog").close();
  loadModels();
}

// --- looks -----------------------------------------------------------------------------------------------------------------

function showTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").title = `Theme: ${theme}`;
  byId("theme").setAttribute("aria-label", `Theme: ${theme}`);
  redrawDashboard();
}

function nextTheme() {
  const theme = THEMES[(THEMES.indexOf(prefs.loadTheme()) + 1) % THEMES.length];
  prefs.saveTheme(theme);
  showTheme(theme);
}

function showTab(name) {
  for (const tab of TABS) {
    const chosen = tab === name;
    byId(tab).hidden = !chosen;
    byId(`tab-${tab}`).setAttribute("aria-selected", String(chosen));
    byId(`tab-${tab}`).tabIndex = chosen ? 0 : -1;
  }
  history.replaceState(null, "", name === "chat" ? "#" : `#${name}`);
  if (name === "dashboard") redrawDashboard();
}

function turnTab(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1, Home: -TABS.length, End: TABS.length }[event.key];
  if (!step) return;
  event.preventDefault();
  const at = TABS.findIndex((tab) => `tab-${tab}` === event.target.id);
  const next = TABS[Math.abs(step) > 1 ? (step > 0 ? TABS.length - 1 : 0) : (at + step + TABS.length) % TABS.length];
  showTab(next);
  byId(`tab-${next}`).focus();
}

// In a small window the sidebar covers the page and is closed at first. In a large window it is open at first.
function showSidebar(shown) {
  if (shown && SMALL.matches) byId("settings").hidden = true;
  document.body.classList.toggle("sidebar-open", shown);
  document.body.classList.toggle("sidebar-closed", !shown);
  byId(shown ? "close-sidebar" : "open-sidebar").focus();
}

function toggleSettings() {
  const drawer = byId("settings");
  drawer.hidden = !drawer.hidden;
  byId("open-settings").setAttribute("aria-expanded", String(!drawer.hidden));
  byId(drawer.hidden ? "open-settings" : "close-settings").focus();
}

const isCovered = () => SMALL.matches && document.body.classList.contains("sidebar-open");

// In a small window a tap beside the open sidebar closes it and does nothing else.
function uncover(event) {
  if (!isCovered()) return;
  event.stopPropagation();
  event.preventDefault();
  showSidebar(false);
}

// Stops an answer that is being written. If there is none, closes whatever covers the page.
function escape() {
  if (!byId("stop").hidden) return chat.stop();
  if (!byId("settings").hidden) toggleSettings();
  else if (isCovered()) showSidebar(false);
}

// --- beginning -------------------------------------------------------------------------------------------------------------

function wire() {
  const on = (id, event, action) => byId(id).addEventListener(event, action);
  document.querySelector("main").addEventListener("click", uncover, true);
  on("new-chat", "click", newChat);
  on("export", "click", () => exportOne(chat.conversation));
  on("export-all", "click", exportAll);
  on("theme", "click", nextTheme);
  on("key", "click", () => askForKey(true));
  on("key-form", "submit", (event) => (event.preventDefault(), saveKey()));
  on("key-cancel", "click", () => byId("key-dialog").close());
  on("open-settings", "click", toggleSettings);
  on("close-settings", "click", toggleSettings);
  on("forget", "click", () => sidebar.remove([...conversations.values()]));
  for (const tab of TABS) {
    on(`tab-${tab}`, "click", () => showTab(tab));
    on(`tab-${tab}`, "keydown", turnTab);
  }
  on("open-sidebar", "click", () => showSidebar(true));
  on("close-sidebar", "click", () => showSidebar(false));
  wireImport(openConversation);
  addEventListener("pagehide", () => composer.flush());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") escape();
    if (event.key.toLowerCase() === "o" && event.shiftKey && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      newChat();
    }
  });
}

function suggest() {
  const cards = SUGGESTIONS.map(([title, text]) => element("button", { type: "button", onclick: () => chat.ask(text) }, element("b", {}, title), text));
  byId("suggestions").append(...cards);
}

async function begin() {
  const tab = location.hash === "#dashboard" ? "dashboard" : "chat";
  byId("stuck").remove();
  paintIcons();
  setKey(prefs.loadKey());
  buildDashboard();
  showTheme(prefs.loadTheme());
  suggest();
  await openStore(changedElsewhere, notKept);
  chat.conversation = conversations.get(prefs.openBefore()) || latest() || fresh();
  settings = new Settings({ conversation: () => chat.conversation, changed: () => save(chat.conversation) });
  wire();
  openConversation(chat.conversation);
  showTab(tab);
  watchState();
}

begin();
