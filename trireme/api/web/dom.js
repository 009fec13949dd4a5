// Creates DOM elements. Text is always added as text, never as HTML.

const ICONS = {
  plus: "M12 5v14M5 12h14",
  panel: "M4 5h16v14H4zM9.500 5v14",
  contrast: "M12 3a9 9 0 1 0 0 18zM12 3a9 9 0 0 1 0 18",
  download: "M12 4v11M7 11l5 5 5-5M5 20h14",
  key: "M11 13l8-8M16 8l3 3M4 16a4 4 0 1 0 8 0a4 4 0 1 0-8 0",
  sliders: "M4 7h9M17 7h3M4 17h3M11 17h9M15 5v4M9 15v4",
  down: "M12 5v14M6 13l6 6 6-6",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M8 8h8v8H8z",
  close: "M6 6l12 12M18 6L6 18",
  copy: "M9 9h10v11H9zM6 15H5V4h10v2",
  check: "M5 12.500l4.500 4.500L19 7.500",
  again: "M19 12a7 7 0 1 1-2.100-5M19 4v4h-4",
  edit: "M5 19l1-4L16 5l3 3L9 18zM14 7l3 3",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  file: "M6 3h8l4 4v14H6zM14 3v4h4",
  clip: "M8 12.500l6-6a3 3 0 0 1 4.200 4.200l-8 8a5 5 0 0 1-7-7l7.500-7.500",
  trash: "M5 7h14M10 7V5h4v2M7 7l1 13h8l1-13",
};

export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== undefined && value !== null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  svg.classList.add("glyph");
  const path = document.createElementNS(space, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

export function iconButton(name, title, onclick) {
  return element("button", { type: "button", class: "icon", title, "aria-label": title, onclick }, icon(name));
}

export function byId(id) {
  return document.getElementById(id);
}

export function paintIcons() {
  for (const node of document.querySelectorAll("[data-icon]")) node.prepend(icon(node.dataset.icon));
}

export async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = element("textarea", { class: "offscreen" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const glyph = button.querySelector(".glyph");
  if (!glyph) return;
  const done = icon("check");
  glyph.replaceWith(done);
  setTimeout(() => done.replaceWith(glyph), 1200);
}
