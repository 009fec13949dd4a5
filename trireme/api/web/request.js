// Builds a request's fields from a conversation's settings. Settings without a value take the server's advice for the model.

// The models as /v1/models lists them, and whether the server is loading one now.
export const served = { models: [], loading: false };

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "max_tokens", "seed"];
const TOP_ODDS = 5;

export function modelOf(conversation) {
  const wanted = conversation?.settings.model;
  return served.models.find((model) => model.id === wanted) || served.models[0] || null;
}

// The values that apply to settings without a value: { temperature, top_p, ... }, and where they come from.
export function advised(conversation) {
  const { sampling = {}, sampling_source: source = "" } = modelOf(conversation) || {};
  return { sampling, source };
}

export function requestOf(conversation) {
  const settings = conversation.settings;
  const body = { model: modelOf(conversation)?.id, ...advised(conversation).sampling };
  for (const name of NUMBERS) if (settings[name] !== undefined) body[name] = settings[name];
  const stop = (settings.stop || "").split("\n").filter((line) => line);
  if (stop.length) body.stop = stop;
  const schema = parsed(settings.schema);
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  const tools = parsed(settings.tools);
  if (Array.isArray(tools) && tools.length) body.tools = tools.map(asTool);
  if (settings.odds) Object.assign(body, { logprobs: true, top_logprobs: TOP_ODDS });
  return body;
}

// Tools may be given with or without the wrapper that the API requires.
function asTool(tool) {
  return tool.type === "function" && tool.function ? tool : { type: "function", function: tool };
}

function parsed(text) {
  try {
    return text?.trim() ? JSON.parse(text) : null;
  } catch {
    return null;
  }
}

// Says what is wrong with a text that should be JSON of this kind. Returns "" if it is valid.
export function jsonMistake(text, list) {
  if (!text.trim()) return "";
  try {
    const value = JSON.parse(text);
    if (typeof value !== "object" || value === null || Array.isArray(value) !== list) return list ? "This must be a list: [ ... ]" : "This must be an object: { ... }";
    return "";
  } catch (error) {
    return `This is no JSON: ${error.message}`;
  }
}
