// How likely the model found each token: the answer's tokens, coloured, and the alternatives of the selected one.

import { element } from "./dom.js";

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(Math.exp(logprob) > 0.0995 ? 0 : 1)}%`;
const visible = (text) => text.replace(/\n/g, "↵").replace(/ /g, "·") || "∅";

// Returns { button, pressed, show }; `show(container)` replaces the text by the tokens.
export function oddsView(message, changed) {
  let on = false;
  const button = element("button", { type: "button", class: "plain", "aria-pressed": "false", title: "How sure the model was of each word" }, "Odds");
  button.addEventListener("click", () => {
    on = !on;
    button.setAttribute("aria-pressed", String(on));
    changed();
  });
  const show = (container) => {
    if (container.querySelector(".odds")) return;
    container.blocks = undefined; // the nodes that Markdown had drawn are gone
    container.replaceChildren(...tokenNodes(message.odds || []));
  };
  const pressed = () => {
    if (on && !message.odds?.length) on = false;
    return on;
  };
  return { button, pressed, show };
}

function tokenNodes(odds) {
  const told = element("p", { class: "faint odds-of", "aria-live": "polite" }, "Choose a word to see what else it might have been.");
  const buttons = odds.map(([text, logprob, others], at) => {
    const level = Math.min(4, Math.floor(-logprob / 0.7));
    const tell = () => {
      told.textContent = `“${visible(text)}” ${percent(logprob)} · ${others.filter(([other]) => other !== text).map(([other, its]) => `“${visible(other)}” ${percent(its)}`).join(" · ") || "no alternatives"}`;
    };
    const node = element("button", { type: "button", class: `odd odd-${level}`, tabindex: at ? "-1" : "0", title: percent(logprob), onclick: tell, onfocus: tell }, text);
    return node;
  });
  const row = element("div", { class: "odds", role: "group", "aria-label": "Words with their odds" }, ...buttons);
  row.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const next = step && buttons[buttons.indexOf(document.activeElement) + step];
    if (!next) return;
    event.preventDefault();
    document.activeElement.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
  return [row, told];
}
