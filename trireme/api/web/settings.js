// The settings drawer: the settings that are sent with the questions of the open conversation. The model's advice fills empty ones.

import { byId, element } from "./dom.js";
import { loadPresets, loadThoughts, saveDefaults, savePresets, saveThoughts } from "./prefs.js";
import { advised, jsonMistake, modelOf, served } from "./request.js";
import { toast } from "./notices.js";

const SLIDERS = [
  ["temperature", "Temperature", 0, 2, 0.05, "How freely words are chosen; 0 takes the likeliest"],
  ["top_p", "Top p", 0, 1, 0.01, "Only the likeliest tokens that make up this share"],
  ["top_k", "Top k", 0, 200, 1, "Only the so many likeliest tokens; 0 is all"],
  ["min_p", "Min p", 0, 1, 0.01, "Only tokens at least this likely, against the likeliest"],
  ["presence_penalty", "Presence penalty", -2, 2, 0.1, "Against words that have been used"],
  ["frequency_penalty", "Frequency penalty", -2, 2, 0.1, "Against words by how often they have been used"],
  ["repetition_penalty", "Repetition penalty", 0.5, 2, 0.01, "Divides the score of what has been seen"],
];
const NEUTRAL = { temperature: 1, top_p: 1, repetition_penalty: 1 };
const NUMBERS = ["max_tokens", "seed"];
const TEXTS = ["system", "stop", "schema", "tools"];
const JSON_TEXTS = { schema: false, tools: true }; // whether a list is wanted
const SOURCES = {
  model: "those that the model's makers recommend",
  calm: "those of trireme chat, which suit small models",
  server: "those that this server was started with",
};

export class Settings {
  // `conversation()` returns the open one; `changed()` saves it.
  constructor({ conversation, changed }) {
    this.conversation = conversation;
    this.changed = changed;
    this.form = byId("settings-form");
    this.refresh = SLIDERS.map((row) => this.slider(...row));
    for (const name of [...NUMBERS, ...TEXTS, "model"]) this.field(name);
    this.box("odds");
    this.form.addEventListener("submit", (event) => event.preventDefault());
    const thoughts = this.form.elements.thoughts;
    thoughts.checked = loadThoughts();
    thoughts.addEventListener("change", () => saveThoughts(thoughts.checked));
    byId("reset").addEventListener("click", () => this.replace({ model: this.values.model }));
    byId("defaults").addEventListener("click", () => {
      saveDefaults(this.values);
      toast("New chats begin with these settings.");
    });
    this.presets();
  }

  get values() {
    return this.conversation().settings;
  }

  show() {
    for (const one of this.refresh) one();
    const { source } = advised(this.conversation());
    byId("advice").textContent = SOURCES[source] ? `Values that you do not set are ${SOURCES[source]}.` : "";
  }

  set(name, value) {
    if (value === undefined || value === "") delete this.values[name];
    else this.values[name] = value;
    this.changed();
  }

  replace(settings) {
    const values = this.values;
    for (const name of Object.keys(values)) delete values[name];
    Object.assign(values, settings);
    this.changed();
    this.show();
  }

  // --- fields ----------------------------------------------------------------------------------------------------------------

  field(name) {
    const field = this.form.elements[name];
    const mistake = byId(`${name}-mistake`);
    const check = () => mistake && (mistake.textContent = jsonMistake(field.value, JSON_TEXTS[name]));
    this.refresh.push(() => {
      field.value = this.values[name] ?? (name === "model" ? modelOf(this.conversation())?.id ?? "" : "");
      check();
    });
    field.addEventListener("input", () => {
      this.set(name, field.value && NUMBERS.includes(name) ? Math.trunc(Number(field.value)) : field.value);
      check();
      if (name === "model") this.showModel();
    });
  }

  box(name) {
    const field = this.form.elements[name];
    this.refresh.push(() => (field.checked = Boolean(this.values[name])));
    field.addEventListener("change", () => this.set(name, field.checked || undefined));
  }

  slider(name, title, least, most, step, what) {
    const range = element("input", { type: "range", min: least, max: most, step, "aria-label": title });
    const number = element("input", { type: "number", min: least, max: most, step, "aria-label": `${title}, as a number` });
    const set = (value) => {
      this.set(name, value === "" || !Number.isFinite(Number(value)) ? undefined : Math.min(most, Math.max(least, Number(value))));
      show();
    };
    const show = () => {
      const value = this.values[name];
      const applies = advised(this.conversation()).sampling[name] ?? NEUTRAL[name] ?? 0;
      range.value = value ?? applies;
      range.classList.toggle("unset", value === undefined);
      number.placeholder = String(Math.round(applies * 1000) / 1000);
      if (document.activeElement !== number) number.value = value ?? "";
    };
    range.addEventListener("input", () => set(range.value));
    number.addEventListener("input", () => set(number.value));
    byId("sliders").append(element("div", { class: "slider", title: what }, element("span", {}, title), number, range));
    return show;
  }

  // --- presets ---------------------------------------------------------------------------------------------------------------

  presets() {
    const select = byId("preset");
    const name = byId("preset-name");
    const show = (chosen = "") => {
      select.replaceChildren(element("option", { value: "" }, "Choose a preset"), ...loadPresets().map((one) => element("option", { value: one.name }, one.name)));
      select.value = chosen;
      byId("preset-remove").disabled = !chosen;
    };
    select.addEventListener("change", () => {
      const found = loadPresets().find((one) => one.name === select.value);
      byId("preset-remove").disabled = !found;
      if (!found) return;
      name.value = found.name;
      this.replace({ ...found.settings });
    });
    byId("preset-save").addEventListener("click", () => {
      const title = name.value.trim();
      if (!title) return name.focus();
      savePresets([...loadPresets().filter((one) => one.name !== title), { name: title, settings: { ...this.values } }]);
      show(title);
      toast(`The preset “${title}” is kept in this browser.`);
    });
    byId("preset-remove").addEventListener("click", () => {
      const before = loadPresets();
      const gone = select.value;
      savePresets(before.filter((one) => one.name !== gone));
      show();
      toast(`The preset “${gone}” was deleted.`, ["Undo", () => (savePresets(before), show(gone))]);
    });
    addEventListener("storage", () => show(select.value));
    show();
  }

  // --- models ----------------------------------------------------------------------------------------------------------------

  showModels() {
    const options = () => served.models.map((model) => element("option", { value: model.id }, model.id));
    this.form.elements.model.replaceChildren(...options());
    this.options = options;
    this.showModel();
    this.show();
  }

  // The model's name in the top bar. If several names are served, a choice between them.
  showModel() {
    const name = modelOf(this.conversation())?.id ?? "";
    if (served.models.length < 2) {
      byId("model").textContent = name;
      return;
    }
    const select = element("select", { "aria-label": "Model" }, ...this.options());
    select.value = name;
    select.addEventListener("change", () => {
      this.set("model", select.value);
      this.show();
    });
    byId("model").replaceChildren(select);
  }
}
