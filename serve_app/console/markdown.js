// Shows Markdown: the server renders and sanitizes it, the page exchanges only the blocks that have changed.

import { postJson } from "./api.js";
import { copyButton, element } from "./dom.js";

const PERIOD_MS = 250;
const KEPT = 300;
const rendered = new Map(); // text to blocks, the latest KEPT
let last = Promise.resolve(); // one request at a time: a long conversation must not fill the server's queue

/** `[first line, HTML]` of each block; null where the server does not render the text. */
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
 * A text in a box. While it grows, at most four times a second its end is rendered: a block that two others follow is
 * closed, and neither sent nor touched again, so what is selected in it stays selected.
 */
export class MarkdownView {
  constructor(box) {
    this.box = box;
    this.shown = []; // the HTML of each child of the box
    this.closed = 0; // so many of these are as they will be
    this.start = 0; // of the text behind them
  }

  /** Shows a text that may grow. */
  grow(text) {
    this.text = text;
    this.box.setAttribute("aria-busy", "true");
    if (!this.isRendered) this.showPlain(text); // until it comes
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
    // A server that has much to do is asked less often.
    setTimeout(() => {
      this.busy = false;
      if (this.text !== text && !this.isFinal) this.renderEnd();
    }, Math.max(PERIOD_MS, 3 * (performance.now() - sentAt)));
  }

  /** Shows the whole text, which grows no more; plain where the server does not render it. */
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

  /** Puts blocks behind the closed ones; false, and nothing is done, if a selection would be lost. */
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

/** A block of sanitized HTML, with what the page adds to code and tables. */
function elementOf(html) {
  const template = document.createElement("template");
  template.innerHTML = html;
  for (const pre of template.content.querySelectorAll("pre")) {
    const bar = element("div", { class: "code-bar" }, element("span", {}, pre.dataset.language || "text"));
    bar.append(copyButton(() => pre.textContent, "Copy the code"));
    const box = element("div", { class: "code" });
    pre.replaceWith(box);
    pre.tabIndex = 0; // wide code is scrolled by keyboard too
    box.append(bar, pre);
  }
  for (const table of template.content.querySelectorAll("table")) {
    const box = element("div", { class: "table", role: "region", "aria-label": "Table", tabIndex: 0 });
    table.replaceWith(box);
    box.append(table);
  }
  return template.content.firstElementChild ?? element("div");
}
