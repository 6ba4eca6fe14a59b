// Small helpers to build the page. Texts are only ever set as text.

export const find = (id) => document.getElementById(id);

/** An element with properties (`class`, `on` and attributes with a dash or `role` are treated as such) and children. */
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

/** A button that shows an icon and is called `label`. */
export function iconButton(name, label, act, properties = {}) {
  return element(
    "button",
    { type: "button", class: "tool", title: label, "aria-label": label, on: { click: act }, ...properties },
    icon(name),
  );
}

/** Says something to those who look and to those who listen; `undo` adds a button to the message. */
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

/** Puts a text into the clipboard; pages that did not come over HTTPS or from this machine have only the older way. */
export async function copyText(text) {
  if (navigator.clipboard && isSecureContext) return navigator.clipboard.writeText(text);
  const area = element("textarea", { value: text, class: "hidden" });
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  if (!done) throw new Error("this browser does not let the page copy");
}

/** A button that copies what `text()` returns and says so for a moment. */
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
