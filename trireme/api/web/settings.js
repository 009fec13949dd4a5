// The settings drawer: what is sent with every message. A value that is not set is left to the model's makers.

import { byId, element } from "./dom.js";
import { saveSettings, settings } from "./store.js";

const SLIDERS = [
  ["temperature", "Temperature", 0, 2, 0.05, "How freely words are chosen; 0 takes the likeliest"],
  ["top_p", "Top p", 0, 1, 0.01, "Only the likeliest tokens that make up this share"],
  ["top_k", "Top k", 0, 200, 1, "Only the so many likeliest tokens; 0 is all"],
  ["min_p", "Min p", 0, 1, 0.01, "Only tokens at least this likely, against the likeliest"],
  ["presence_penalty", "Presence penalty", -2, 2, 0.1, "Against words that have been used"],
  ["frequency_penalty", "Frequency penalty", -2, 2, 0.1, "Against words by how often they have been used"],
  ["repetition_penalty", "Repetition penalty", 0.5, 2, 0.01, "Divides the score of what has been seen"],
];
const NUMBERS = ["max_tokens", "seed"];
const refresh = [];

export function buildSettings() {
  byId("sliders").append(...SLIDERS.map((row) => slider(...row)));
  const form = byId("settings-form");
  for (const name of [...NUMBERS, "system", "stop", "model"]) {
    const field = form.elements[name];
    refresh.push(() => (field.value = settings[name] ?? ""));
    field.addEventListener("input", () => {
      const value = field.value;
      if (!value) delete settings[name];
      else settings[name] = NUMBERS.includes(name) ? Math.trunc(Number(value)) : value;
      saveSettings();
    });
  }
  const thoughts = form.elements.thoughts;
  refresh.push(() => (thoughts.checked = settings.thoughts !== false));
  thoughts.addEventListener("change", () => {
    settings.thoughts = thoughts.checked;
    saveSettings();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  byId("reset").addEventListener("click", () => {
    for (const name of Object.keys(settings)) if (name !== "model") delete settings[name];
    saveSettings();
    for (const one of refresh) one();
  });
  for (const one of refresh) one();
}

function slider(name, title, least, most, step, what) {
  const range = element("input", { type: "range", min: least, max: most, step, "aria-label": title });
  const number = element("input", { type: "number", min: least, max: most, step, placeholder: "default", "aria-label": `${title}, as a number` });
  const set = (value) => {
    if (value === "" || !Number.isFinite(Number(value))) delete settings[name];
    else settings[name] = Math.min(most, Math.max(least, Number(value)));
    saveSettings();
    show();
  };
  const show = () => {
    const value = settings[name];
    range.value = value ?? (name === "temperature" || name === "top_p" || name === "repetition_penalty" ? 1 : 0);
    range.classList.toggle("unset", value === undefined);
    if (document.activeElement !== number) number.value = value ?? "";
  };
  range.addEventListener("input", () => set(range.value));
  number.addEventListener("input", () => set(number.value));
  refresh.push(show);
  return element("div", { class: "slider", title: what }, element("span", {}, title), number, range);
}

export function showModels(models) {
  const select = byId("settings-form").elements.model;
  select.replaceChildren(...models.map((model) => element("option", { value: model.id }, model.id)));
  if (!models.some((model) => model.id === settings.model)) settings.model = models[0]?.id;
  select.value = settings.model ?? "";
  byId("model").textContent = settings.model ?? "";
}

// The part of a request that the settings make up.
export function requestSettings() {
  const body = { model: settings.model };
  for (const name of [...SLIDERS.map(([name]) => name), ...NUMBERS]) if (settings[name] !== undefined) body[name] = settings[name];
  const stop = (settings.stop || "").split("\n").filter((line) => line);
  if (stop.length) body.stop = stop;
  return body;
}
