// One answer of the server: builds the request and the message, and saves the message every second. Knows no elements.

import { ApiError, streamChat } from "./api.js";
import { Clock } from "./clock.js";
import { TAB } from "./prefs.js";
import { contentOf } from "./files.js";
import { requestOf } from "./request.js";
import { save } from "./store.js";
import { add, sent } from "./tree.js";

const SAVE_EVERY = 1000; // milliseconds
const SIGNS = 30000; // milliseconds; a tab that is writing an answer saves it within this time
const running = new Map(); // conversation id -> { controller, message, clock }

export const answerOf = (conversation) => running.get(conversation.id);
export const stopAnswer = (conversation) => running.get(conversation.id)?.controller.abort();
export const numRunning = () => running.size;

// Whether an unfinished answer has been left: no tab writes it any more.
export function brokeOff(message) {
  if (!message.pending || [...running.values()].some((one) => one.message === message)) return false;
  return message.pending === TAB || Date.now() - message.stamp > SIGNS;
}

// Requests an answer to the last message shown, or continues `message`. Calls `shown` for every piece. Resolves to the message
// and the error, if there was one.
export async function answer(conversation, shown, message = null) {
  const goOn = message !== null;
  const body = { ...requestOf(conversation), messages: prompt(conversation) };
  if (goOn) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  message = message ?? add(conversation, { role: "assistant", json: Boolean(body.response_format) });
  Object.assign(message, { pending: TAB, error: "", finish: "", note: "" });
  const run = { controller: new AbortController(), message, clock: new Clock() };
  running.set(conversation.id, run);
  const keeper = new Keeper(conversation, message);
  keeper.keep();
  shown(message);
  let problem = null;
  try {
    await streamChat(body, run.controller.signal, (chunk) => {
      if (chunk === null) run.clock.heard = performance.now();
      else takeChunk(message, chunk, run.clock);
      keeper.soon();
      shown(message);
    });
    message.note = run.clock.told(message);
  } catch (error) {
    problem = error;
    fail(message, error, run.clock);
  }
  running.delete(conversation.id);
  Object.assign(message, { pending: "", thinking: false });
  conversation.changed = Date.now();
  keeper.keep();
  return { message, error: problem };
}

function fail(message, error, clock) {
  message.note = clock.told(message);
  if (error.name === "AbortError") {
    message.finish = "stopped";
    message.note = `${message.note ? `${message.note} · ` : ""}stopped`;
  } else {
    message.finish = "broken";
    message.error = error instanceof ApiError ? error.message : "The server cannot be reached.";
  }
}

class Keeper {
  constructor(conversation, message) {
    this.conversation = conversation;
    this.message = message;
    this.at = 0;
  }

  soon() {
    if (performance.now() - this.at > SAVE_EVERY) this.keep();
  }

  keep() {
    this.at = performance.now();
    this.message.stamp = Date.now();
    save(this.conversation);
  }
}

// --- the request ---------------------------------------------------------------------------------------------------------------

function prompt(conversation) {
  const messages = sent(conversation).map(written).filter((message) => message !== null);
  const system = conversation.settings.system;
  return system ? [{ role: "system", content: system }, ...messages] : messages;
}

function written(message) {
  if (message.role === "tool") return { role: "tool", tool_call_id: message.call, content: message.content };
  if (message.role === "user") return { role: "user", content: contentOf(message) };
  const calls = (message.calls || []).map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
  if (calls.length) return { role: "assistant", content: message.content, tool_calls: calls };
  return message.content ? { role: "assistant", content: message.content } : null;
}

// --- the answer ----------------------------------------------------------------------------------------------------------------

function takeChunk(message, chunk, clock) {
  if (chunk.usage) {
    message.usage = { prompt: chunk.usage.prompt_tokens, completion: chunk.usage.completion_tokens };
    clock.tokens = chunk.usage.completion_tokens;
  }
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const delta = choice.delta || {};
  const thought = delta.reasoning_content ?? delta.reasoning;
  if (thought || delta.content || delta.tool_calls) clock.tick();
  if (thought) {
    message.reasoning = (message.reasoning || "") + thought;
    message.thinking = true;
  }
  if (delta.content) {
    if (message.thinking) message.thought = clock.elapsed();
    message.thinking = false;
    message.content += delta.content;
  }
  for (const call of delta.tool_calls || []) takeCall(message, call);
  const odds = choice.logprobs?.content;
  if (odds?.length) message.odds = [...(message.odds || []), ...odds.map(oddsOf)];
  if (choice.finish_reason) message.finish = choice.finish_reason;
}

function takeCall(message, call) {
  message.calls = message.calls || [];
  const known = (message.calls[call.index] = message.calls[call.index] || { id: "", name: "", arguments: "" });
  known.id = known.id || call.id || "";
  known.name += call.function?.name || "";
  known.arguments += call.function?.arguments || "";
}

// [text, log-probability, [[other text, its log-probability], ...]]
function oddsOf({ token, logprob, top_logprobs: others }) {
  return [token, logprob, (others || []).map((other) => [other.token, other.logprob])];
}
