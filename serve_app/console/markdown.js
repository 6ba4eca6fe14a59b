// Shows Markdown. The server renders and sanitizes it; the page replaces only changed blocks.

import { postJson } from "./api.js";
import { copyButton, element } from "./dom.js";

const PERIOD_MS = 250;
const KEPT = 300;
const rendered = new Map(); // blocks by text, the newest KEPT
let last = Promise.resolve(); // one request at a time, so as not to fill the server's queue

/** Returns `[first line, HTML]` of each block, or null if the server does not render the text. */
function blocksOf(text) {
  last = last.then(() => postJson("/markdown", { text })).catch(() => null);
  return last;
}

async function keptBlocksOf(text) {
  const blocks = rendered.get(text) ?? (await blocksOf(text));
  if (blocks) rendered.set(text, blocks);
  if (rendered.size > KEPT) rendered.delete(rendered.keys().next().value);
  return blocks;
}

/**
 * A text in a box. While it grows, its end is rendered at most four times per second.
 * A block followed by two others is closed: it is not sent or changed again, so a selection in it
 * is kept.
 */
export class MarkdownView {
  constructor(box) {
    this.box = box;
    this.shown = []; // HTML of each child of the box
    this.closed = 0; // number of closed blocks
    this.start = 0; // start of the text after them
  }

  /** Shows a text that may still grow. */
  grow(text) {
    this.text = text;
    this.box.setAttribute("aria-busy", "true");
    if (!this.isRendered) this.showPlain(text); // until the first blocks arrive
    if (!this.busy) this.renderEnd();
  }

  async renderEnd() {
    this.busy = true;
    const { text, start } = this;
    const sentAt = performance.now();
    const tail = text.slice(start);
    const blocks = await blocksOf(tail);
    if (this.isFinal) return;
    if (!blocks) this.showPlain(tail);
    else if (this.exchange(blocks) && blocks.length > 2) {
      this.closed += blocks.length - 2;
      this.start = start + offsetOfLine(tail, blocks.at(-2)[0]);
    }
    // Send fewer requests to a slow server.
    setTimeout(() => {
      this.busy = false;
      if (this.text !== text && !this.isFinal) this.renderEnd();
    }, Math.max(PERIOD_MS, 3 * (performance.now() - sentAt)));
  }

  /** Shows the complete text, as plain text if the server does not render it. */
  async finish(text) {
    this.isFinal = true;
    this.box.setAttribute("aria-busy", "true");
    if (!this.isRendered) this.showPlain(text);
    const blocks = await keptBlocksOf(text);
    [this.closed, this.start] = [0, 0];
    if (!blocks) this.showPlain(text);
    else if (!this.exchange(blocks)) return this.waitForSelection(text);
    this.box.setAttribute("aria-busy", "false");
  }

  waitForSelection(text) {
    document.addEventListener("selectionchange", () => this.finish(text), { once: true });
  }

  /**
   * Replaces the blocks after the closed ones. Returns false without a change if a selection would
   * be lost.
   */
  exchange(blocks) {
    const wanted = blocks.map(([, html]) => html);
    const isShown = (html, i) => this.shown[this.closed + i] === html;
    const children = [...this.box.children].slice(this.closed);
    const leaving = children.filter((_, i) => i >= wanted.length || !isShown(wanted[i], i));
    if (isSelected(leaving)) return false;
    wanted.forEach((html, i) => {
      if (isShown(html, i)) return;
      const block = elementOf(html);
      if (children[i]) children[i].replaceWith(block);
      else this.box.append(block);
    });
    for (const child of children.slice(wanted.length)) child.remove();
    this.shown.splice(this.closed, Infinity, ...wanted);
    this.isRendered = true;
    return true;
  }

  showPlain(text) {
    const children = [...this.box.children].slice(this.closed);
    if (isSelected(children)) return;
    for (const child of children) child.remove();
    this.box.append(element("p", { class: "plain" }, text));
    this.shown.splice(this.closed, Infinity, null);
  }
}

function isSelected(elements) {
  const selection = getSelection();
  return !selection.isCollapsed && elements.some((one) => selection.containsNode(one, true));
}

function offsetOfLine(text, line) {
  const breaks = /\r\n?|\n/g;
  for (let i = 0; i < line; i++) breaks.exec(text);
  return breaks.lastIndex;
}

/** Creates a block from sanitized HTML. Code gets a copy button, and tables a scrolling box. */
function elementOf(html) {
  const template = document.createElement("template");
  template.innerHTML = html;
  for (const pre of template.content.querySelectorAll("pre")) {
    const bar = element("div", { class: "code-bar" }, element("span", {}, pre.dataset.language || "text"));
    bar.append(copyButton(() => pre.textContent, "Copy the code"));
    const box = element("div", { class: "code" });
    pre.replaceWith(box);
    pre.tabIndex = 0; // to scroll wide code with the keyboard
    box.append(bar, pre);
  }
  for (const table of template.content.querySelectorAll("table")) {
    const box = element("div", { class: "table", role: "region", "aria-label": "Table", tabIndex: 0 });
    table.replaceWith(box);
    box.append(table);
  }
  return template.content.firstElementChild ?? element("div");
}
