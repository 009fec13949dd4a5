// The input for questions: the text and its draft, attached files, the Enter key and the buttons.

import { byId } from "./dom.js";
import { readFiles } from "./files.js";
import { fileChip } from "./messages.js";
import { notice } from "./notices.js";

const DRAFT_WAIT = 400; // milliseconds after the last key

export class Composer {
  // `ask(text, files)` sends a question. `keepDraft(text)` is called when the user stops typing for a moment.
  constructor({ ask, stop, keepDraft }) {
    Object.assign(this, { ask, keepDraft });
    this.files = [];
    this.running = false;
    this.input = byId("input");
    byId("composer").addEventListener("submit", (event) => (event.preventDefault(), this.submit()));
    byId("stop").addEventListener("click", stop);
    byId("attach").addEventListener("click", () => byId("file").click());
    byId("file").addEventListener("change", () => this.take([...byId("file").files]).then(() => (byId("file").value = "")));
    this.input.addEventListener("input", () => this.changed());
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.submit();
    });
    this.input.addEventListener("paste", (event) => this.paste(event));
    this.wireDrop();
  }

  wireDrop() {
    const area = byId("chat");
    area.addEventListener("dragover", (event) => {
      if (![...event.dataTransfer.types].includes("Files")) return;
      event.preventDefault();
      byId("composer").classList.add("dropping");
    });
    area.addEventListener("dragleave", () => byId("composer").classList.remove("dropping"));
    area.addEventListener("drop", (event) => {
      byId("composer").classList.remove("dropping");
      if (!event.dataTransfer.files.length) return;
      event.preventDefault();
      this.take([...event.dataTransfer.files]);
    });
  }

  paste(event) {
    const files = [...event.clipboardData.files];
    if (!files.length) return;
    event.preventDefault();
    this.take(files);
  }

  async take(list) {
    const { files, refused } = await readFiles(list);
    this.files.push(...files);
    if (refused.length) notice(refused.join(" "));
    this.fit();
    this.input.focus();
  }

  submit() {
    const text = this.input.value.trim();
    if (!text && !this.files.length) return;
    const files = this.files;
    this.fill("", []);
    this.ask(text, files);
  }

  // Puts a text into the input: a saved draft, or a question that was returned.
  fill(text, files = []) {
    clearTimeout(this.timer);
    this.input.value = text;
    this.files = [...files];
    this.fit();
  }

  changed() {
    this.fit();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.flush(), DRAFT_WAIT);
  }

  flush() {
    clearTimeout(this.timer);
    this.keepDraft(this.input.value);
  }

  setRunning(running) {
    this.running = running;
    this.fit();
  }

  fit() {
    const empty = !this.input.value.trim() && !this.files.length;
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight, 260)}px`;
    byId("send").disabled = empty;
    byId("send").hidden = this.running && empty;
    byId("send").title = this.running ? "Send after this answer (Enter)" : "Send (Enter)";
    const chips = this.files.map((file, at) => fileChip(file, () => (this.files.splice(at, 1), this.fit())));
    byId("files").replaceChildren(...chips);
    byId("files").hidden = !chips.length;
  }
}
