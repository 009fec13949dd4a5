// Messages to the user: a bar that disappears by itself, a line above the input that stays, and text for screen readers.

import { byId, element, iconButton } from "./dom.js";

const SECONDS = 10;
let timer = null;

// `action`: [label, function]. The bar stays while the pointer or the focus is on it.
export function toast(text, action = null, seconds = SECONDS) {
  const bar = byId("toast");
  const close = () => {
    clearTimeout(timer);
    bar.hidden = true;
  };
  const wait = () => {
    clearTimeout(timer);
    timer = setTimeout(() => (bar.matches(":hover, :focus-within") ? wait() : close()), seconds * 1000);
  };
  const button = action && element("button", { type: "button", class: "plain strong", onclick: () => (close(), action[1]()) }, action[0]);
  bar.replaceChildren(element("span", {}, text), button || "", iconButton("close", "Close this message", close));
  bar.hidden = false;
  wait();
}

// Shows a line above the input until it is closed or replaced.
export function notice(text, actions = []) {
  const line = byId("notice");
  const buttons = actions.map(([name, act]) => element("button", { type: "button", class: "plain strong", onclick: () => (clearNotice(), act()) }, name));
  line.replaceChildren(element("span", { class: "grow" }, text), ...buttons, iconButton("close", "Close this notice", clearNotice));
  line.hidden = false;
}

export function clearNotice() {
  byId("notice").hidden = true;
}

// Text that only screen readers present.
export function announce(text) {
  byId("announce").textContent = text;
}
