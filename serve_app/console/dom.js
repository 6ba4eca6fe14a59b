// Helpers to build the page. Text is only set as text, never as HTML.

export const find = (id) => document.getElementById(id);

/**
 * Creates an element with children and properties.
 * `class`, `on`, `role`, `for` and names with a dash get special treatment.
 */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name === "class") made.className = value;
    else if (name === "on") for (const [event, act] of Object.entries(value)) made.addEventListener(event, act);
    else if (name.includes("-") || name === "role" || name === "for") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `/console/icons.svg#${name}`);
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  svg.append(use);
  return svg;
}

/** Creates a button with an icon and the accessible name `label`. */
export function iconButton(name, label, act, properties = {}) {
  return element(
    "button",
    { type: "button", class: "tool", title: label, "aria-label": label, on: { click: act }, ...properties },
    icon(name),
  );
}

/** Shows a message, also to screen readers. `undo` adds a button to it. */
export function toast(text, undo = null) {
  const box = find("toast");
  const close = () => {
    if (box.firstChild === note) box.replaceChildren();
  };
  const button = undo && element("button", { type: "button", class: "quiet", on: { click: () => (undo(), close()) } }, "Undo");
  const note = element("p", {}, text, button);
  box.replaceChildren(note);
  setTimeout(close, undo ? 10_000 : 6000);
}

export function save(blob, name) {
  const url = URL.createObjectURL(blob);
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

/**
 * Copies a text to the clipboard. Pages without HTTPS, except on localhost, must use the older API.
 */
export async function copyText(text) {
  if (navigator.clipboard && isSecureContext) return navigator.clipboard.writeText(text);
  const area = element("textarea", { value: text, class: "hidden" });
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  if (!done) throw new Error("this browser does not let the page copy");
}

/** Creates a button that copies `text()` and briefly shows that it did. */
export function copyButton(text, label = "Copy") {
  const button = iconButton("copy", label, async () => {
    try {
      await copyText(text());
      button.replaceChildren(icon("check"));
      toast("Copied.");
    } catch (error) {
      toast(`Not copied: ${error.message}`);
    }
    setTimeout(() => button.replaceChildren(icon("copy")), 1500);
  });
  return button;
}
