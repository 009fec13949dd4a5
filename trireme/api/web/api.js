// The server's API for this page: JSON requests and the stream of a chat answer.

export class ApiError extends Error {
  constructor(status, message, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

let key = "";

export function setKey(value) {
  key = value;
}

function headers(more = {}) {
  return key ? { authorization: `Bearer ${key}`, ...more } : more;
}

async function failure(response) {
  const body = await response.json().catch(() => null);
  const text = body?.error?.message || body?.message || `The server answered ${response.status}.`;
  return new ApiError(response.status, text, body?.error?.code);
}

export async function getJson(path) {
  const response = await fetch(path, { headers: headers(), cache: "no-store" });
  if (!response.ok) throw await failure(response);
  return response.json();
}

// /ready has a JSON body for every state, also with an error status.
export async function readiness() {
  const response = await fetch("ready", { cache: "no-store" });
  try {
    return { ok: response.ok, ...(await response.json()) };
  } catch {
    return { ok: response.ok };
  }
}

// Calls `take` with every chunk of the answer, and with null for a comment, which shows that the server is alive. Ends with the
// answer, or earlier if `signal` is aborted.
export async function streamChat(body, signal, take) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: headers({ "content-type": "application/json" }),
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } }),
    signal,
  });
  if (!response.ok) throw await failure(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new ApiError(0, "The connection broke before the answer was whole.");
    held += value;
    const events = held.split("\n\n");
    held = events.pop();
    for (const event of events) {
      const data = dataOf(event);
      if (data === "[DONE]") return;
      const chunk = data ? JSON.parse(data) : null;
      if (chunk?.error) throw new ApiError(chunk.error.status || 500, chunk.error.message || "The answer broke off.", chunk.error.code);
      take(chunk);
    }
  }
}

function dataOf(event) {
  const lines = event.split("\n").filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).trimStart()).join("\n");
}
