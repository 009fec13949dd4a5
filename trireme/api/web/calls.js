// Tool calls of a model: shows what it calls, and fields for the results. The page itself runs no tools.

import { element } from "./dom.js";

// Calls `send` with [{ call, name, content }] once every field is filled.
export function callsView(message, send) {
  const node = element("div", { class: "calls" });
  let shownCalls = "";
  const show = (whole) => {
    const calls = message.calls || [];
    const now = JSON.stringify([calls, whole, message.answered]);
    if (now === shownCalls) return;
    shownCalls = now;
    node.replaceChildren(...calls.map((call) => callCard(call)), ...(whole && calls.length && !message.answered ? [resultForm(calls, send)] : []));
  };
  return { node, show };
}

function callCard(call) {
  return element("pre", { tabindex: "0" }, element("b", {}, call.name), `(${pretty(call.arguments)})`);
}

function pretty(text) {
  try {
    const value = JSON.parse(text);
    return Object.keys(value).length > 1 ? JSON.stringify(value, null, 2) : text;
  } catch {
    return text;
  }
}

function resultForm(calls, send) {
  const fields = calls.map((call) => element("textarea", { rows: "2", required: true, "aria-label": `Result of ${call.name}`, placeholder: `What ${call.name} answered` }));
  const form = element("form", { class: "edit" }, ...fields, element("div", { class: "row" }, element("span", { class: "grow" }), element("button", { type: "submit", class: "primary" }, "Send results")));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(calls.map((call, at) => ({ call: call.id, name: call.name, content: fields[at].value })));
  });
  return form;
}
