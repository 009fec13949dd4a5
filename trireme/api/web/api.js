// The server as this page sees it: JSON requests and the stream of a chat answer.

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
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
  let text = "";
  try {
    const body = await response.json();
    text = body?.error?.message || body?.message || "";
  } catch {
    text = "";
  }
  return new ApiError(response.status, text || `The server answered ${response.status}.`);
}

export async function getJson(path) {
  const response = await fetch(path, { headers: headers(), cache: "no-store" });
  if (!response.ok) throw await failure(response);
  return response.json();
}

// The states that /ready tells apart come with a body also when they are no success.
export async function readiness() {
  const response = await fetch("ready", { cache: "no-store" });
  try {
    return { ok: response.ok, ...(await response.json()) };
  } catch {
    return { ok: response.ok };
  }
}

// Calls `take` with every chunk of the answer. Ends when the answer does; an abort of `signal` ends it early.
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
    if (done) return;
    held += value;
    const events = held.split("\n\n");
    held = events.pop();
    for (const event of events) {
      const data = event
        .split("\n")
        .filter((line) => line.startsWith("data:"))
        .map((line) => line.slice(5).trimStart())
        .join("\n");
      if (!data) continue;
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.code || 500, chunk.error.message || "The answer broke off.");
      take(chunk);
    }
  }
}
