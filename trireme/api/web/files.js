// Files attached to a question: text files become part of it, others are refused with a reason. Knows no elements.

const MOST = 1 << 20; // bytes in one file

// Returns [{ name, text }] for the files that can be read as text, and a sentence for each other file.
export async function readFiles(list) {
  const [files, refused] = [[], []];
  for (const file of list) {
    const cause = whyNot(file);
    const text = cause ? null : await textOf(file);
    if (text === null) refused.push(`${file.name || "This file"} was not added: ${cause || "it is not text."}`);
    else files.push({ name: file.name || "pasted.txt", text });
  }
  return { files, refused };
}

function whyNot(file) {
  if (file.type.startsWith("image/")) return "the model that is served reads text, no images.";
  if (file.size > MOST) return `it has ${(file.size / MOST).toFixed(1)} MB; at most 1 MB of text is taken.`;
  return "";
}

async function textOf(file) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}

// The text to send for a question: its words, then each file between code fences that do not occur in the file.
export function contentOf(message) {
  const parts = (message.files || []).map(({ name, text }) => {
    const longest = Math.max(2, ...(text.match(/`+/g) || []).map((run) => run.length));
    const fence = "`".repeat(longest + 1);
    return `${name}\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
  });
  return [message.content, ...parts].filter((part) => part).join("\n\n");
}
