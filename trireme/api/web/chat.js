// The conversation on the page and its actions: ask, regenerate, continue, edit, choose a version, and queue questions.

import { answer, answerOf, brokeOff, numRunning, stopAnswer } from "./answer.js";
import { Painter } from "./clock.js";
import { byId, element, iconButton } from "./dom.js";
import { messageView } from "./messages.js";
import { announce, clearNotice, notice } from "./notices.js";
import { rememberOpen } from "./prefs.js";
import { modelOf, served } from "./request.js";
import { conversations, save } from "./store.js";
import { add, choose, drop, leaveOutOldest, path, versions } from "./tree.js";

export class Chat {
  // `hooks`: changed() when the list of conversations must be drawn again, refused() when the server requires a key,
  // giveBack(message) when a question returns to the input field.
  constructor(hooks) {
    this.hooks = hooks;
    this.conversation = null;
    this.views = new Map(); // message id -> view
    this.following = true;
    const scroller = byId("scroller");
    scroller.addEventListener("scroll", () => {
      this.following = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 60;
      byId("to-end").hidden = this.following;
    });
    byId("to-end").addEventListener("click", () => this.toEnd());
    this.painter = new Painter(() => this.paint());
  }

  open(conversation) {
    if (conversation !== this.conversation) {
      this.views.clear();
      clearNotice();
    }
    this.conversation = conversation;
    rememberOpen(conversation.id);
    this.draw();
    this.toEnd();
  }

  // --- showing -------------------------------------------------------------------------------------------------------------

  draw() {
    const shown = path(this.conversation);
    const nodes = shown.map((message) => this.viewOf(message).node);
    const box = byId("messages");
    if (nodes.length !== box.children.length || nodes.some((node, at) => node !== box.children[at])) box.replaceChildren(...nodes);
    for (const message of shown) this.views.get(message.id).show();
    this.markLeftOut(shown);
    byId("title").textContent = this.conversation.title || "New chat";
    byId("empty").hidden = shown.length > 0;
    byId("title").hidden = shown.length === 0;
    this.drawQueue();
    this.showRun();
    this.showContext();
    const elsewhere = shown.find((message) => message.pending && !answerOf(this.conversation) && !brokeOff(message));
    if (elsewhere) setTimeout(() => this.draw(), 5000); // another tab writes it: check again later whether that tab is still there
  }

  viewOf(message) {
    let view = this.views.get(message.id);
    if (!view || view.message !== message) {
      view = messageView(this.conversation, message, this.acts(this.conversation));
      this.views.set(message.id, view);
    }
    return view;
  }

  markLeftOut(shown) {
    const { from } = this.conversation;
    const begin = from === "none" ? shown.length : Math.max(0, shown.findIndex((message) => message.id === from));
    shown.forEach((message, at) => this.views.get(message.id).node.classList.toggle("left-out", at < begin));
  }

  paint() {
    const run = answerOf(this.conversation);
    if (!run) return;
    this.views.get(run.message.id)?.show();
    byId("live").textContent = run.clock.live(served.loading);
    if (this.following) this.toEnd();
  }

  showRun() {
    const run = answerOf(this.conversation);
    byId("stop").hidden = !run;
    byId("live").textContent = run ? run.clock.live(served.loading) : "";
    if (run && !this.timer) this.timer = setInterval(() => this.painter.soon(), 1000);
    if (!numRunning()) this.timer = clearInterval(this.timer);
    this.hooks.running(Boolean(run));
  }

  showContext() {
    const last = path(this.conversation).findLast((message) => message.usage);
    const used = last ? last.usage.prompt + last.usage.completion : 0;
    const most = modelOf(this.conversation)?.max_model_len || 0;
    byId("context").textContent = used ? `${used.toLocaleString()}${most ? ` of ${most.toLocaleString()}` : ""} tokens` : "";
    byId("context").classList.toggle("nearly-full", most > 0 && used > 0.9 * most);
  }

  toEnd() {
    const scroller = byId("scroller");
    scroller.scrollTop = scroller.scrollHeight;
    this.following = true;
    byId("to-end").hidden = true;
  }

  // --- asking --------------------------------------------------------------------------------------------------------------

  // Asks a question, or puts it in the queue while an answer is being written.
  ask(content, files = []) {
    const conversation = this.conversation;
    clearNotice();
    if (answerOf(conversation)) {
      conversation.queue.push({ content, files });
      this.keep(conversation);
      this.drawQueue();
      return;
    }
    this.put(conversation, content, files);
    this.run(conversation);
  }

  put(conversation, content, files) {
    add(conversation, { role: "user", content, ...(files.length ? { files } : {}) });
    if (!conversation.title) conversation.title = (content || files[0].name).split("\n")[0].slice(0, 80);
    conversation.draft = "";
  }

  async run(conversation, message = null) {
    announce("Trireme answers.");
    let first = true;
    const showing = answer(
      conversation,
      () => {
        if (!first) return this.conversation === conversation && this.painter.soon();
        first = false;
        this.shownAnew(conversation);
      },
      message,
    );
    const { message: made, error } = await showing;
    announce(error ? made.error || "The answer was stopped." : `The answer is complete: ${made.content.split(/\s+/).filter(Boolean).length} words.`);
    if (error?.status === 401) this.hooks.refused();
    if (error?.code === "context_length_exceeded" && message === null && !made.content) this.tooLong(conversation, made, error);
    this.shownAnew(conversation);
    if (!error && made.finish !== "tool_calls") this.next(conversation);
  }

  shownAnew(conversation) {
    if (this.conversation === conversation) {
      this.draw();
      if (this.following) this.toEnd();
    }
    this.hooks.changed();
  }

  stop() {
    stopAnswer(this.conversation);
  }

  // Returns a question that is too long to the input. If it stayed in the conversation, every later question would fail too.
  tooLong(conversation, made, error) {
    const question = conversation.messages.find((message) => message.id === made.parent);
    if (question?.role !== "user" || versions(conversation, made).length > 1) return;
    drop(conversation, made);
    drop(conversation, question);
    this.keep(conversation);
    if (this.conversation !== conversation) return;
    this.hooks.giveBack(question);
    const retry = () => {
      leaveOutOldest(conversation);
      this.hooks.takeBack();
      this.ask(question.content, question.files || []);
    };
    notice(error.message, path(conversation).length && conversation.from !== "none" ? [["Leave out the oldest and send", retry]] : []);
  }

  // --- the line of questions ---------------------------------------------------------------------------------------------------

  next(conversation) {
    const waiting = conversation.queue.shift();
    if (!waiting) return;
    this.put(conversation, waiting.content, waiting.files || []);
    this.run(conversation);
  }

  drawQueue() {
    const { queue } = this.conversation;
    const conversation = this.conversation;
    const rows = queue.map((waiting, at) => {
      const remove = iconButton("close", "Take out of the line", () => {
        queue.splice(at, 1);
        this.keep(conversation);
        this.drawQueue();
      });
      return element("li", {}, element("span", { class: "faint" }, "Next: "), element("span", { class: "grow" }, waiting.content || waiting.files[0].name), remove);
    });
    const idle = queue.length && !answerOf(conversation);
    const send = idle && element("button", { type: "button", class: "plain strong", onclick: () => this.next(conversation) }, "Send now");
    byId("queue").replaceChildren(...rows, ...(send ? [element("li", {}, send)] : []));
    byId("queue").hidden = !queue.length;
  }

  // --- what is done with a message -----------------------------------------------------------------------------------------------

  acts(conversation) {
    const free = (act) => (...given) => !answerOf(conversation) && act(...given);
    return {
      regenerate: free((message) => {
        conversation.leaf = message.parent;
        this.run(conversation);
      }),
      goOn: free((message) => this.run(conversation, message)),
      editQuestion: free((message, content) => {
        conversation.leaf = message.parent;
        this.put(conversation, content, message.files || []);
        this.run(conversation);
      }),
      editAnswer: free((message, content) => {
        conversation.leaf = message.parent;
        add(conversation, { role: "assistant", content, finish: "edited", note: "edited" });
        this.keep(conversation);
        this.draw();
      }),
      choose: free((message) => {
        choose(conversation, message);
        this.keep(conversation);
        this.draw();
      }),
      results: free((message, results) => {
        Object.assign(message, { answered: true, stamp: Date.now() });
        for (const result of results) add(conversation, { role: "tool", ...result });
        this.run(conversation);
      }),
    };
  }

  keep(conversation) {
    if (conversations.has(conversation.id) || conversation.messages.length) save(conversation);
  }
}
