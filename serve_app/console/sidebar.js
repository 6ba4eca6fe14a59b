// The list of conversations: select, search, rename, delete, export, import.

import { element, find, iconButton, save, toast } from "./dom.js";
import { fromFile, toFile } from "./transfer.js";
import { newId } from "./tree.js";

export class Sidebar {
  /** `actions`: choose(id), create(), rename(conversation), remove(conversation), restore(conversation), add(list). */
  constructor(actions) {
    this.actions = actions;
    this.conversations = new Map();
    this.shown = null;
    find("fresh").addEventListener("click", () => actions.create());
    find("search").addEventListener("input", () => this.draw());
    find("export").addEventListener("click", () => this.export([...this.conversations.values()]));
    find("import").addEventListener("click", () => find("import-file").click());
    find("import-file").addEventListener("change", () => this.import());
  }

  /** `conversations`: by id. `shown`: the shown one. */
  update(conversations, shown) {
    this.conversations = conversations;
    this.shown = shown;
    this.draw();
  }

  draw() {
    const words = find("search").value.trim().toLowerCase();
    const found = [...this.conversations.values()]
      .filter((conversation) => conversation.title.toLowerCase().includes(words))
      .sort((a, b) => b.updated - a.updated);
    find("conversations").replaceChildren(...found.map((conversation) => this.item(conversation)));
    find("export").disabled = this.conversations.size === 0;
    find("search").hidden = this.conversations.size < 8 && !words;
  }

  item(conversation) {
    const { id, title } = conversation;
    const current = id === this.shown;
    const act = { click: () => this.actions.choose(id) };
    const marks = { class: "conversation", "aria-current": current ? "true" : null, title };
    const open = element("button", { type: "button", ...marks, on: act }, title);
    return element(
      "li",
      { class: current ? "current" : "" },
      open,
      iconButton("edit", `Rename ${title}`, () => this.rename(conversation, open)),
      iconButton("trash", `Delete ${title}`, () => this.remove(conversation)),
    );
  }

  rename(conversation, open) {
    const input = element("input", { value: conversation.title, "aria-label": "New name", maxLength: 200 });
    let isOver = false;
    const end = (title) => {
      if (isOver) return;
      isOver = true; // Enter also causes a blur event later
      if (title && title !== conversation.title) this.actions.rename(conversation, title);
      this.draw();
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") end(input.value.trim());
      if (event.key === "Escape") end(null);
      if (event.key === "Escape") event.stopPropagation();
    });
    input.addEventListener("blur", () => end(input.value.trim()));
    open.replaceWith(input);
    input.select();
  }

  async remove(conversation) {
    await this.actions.remove(conversation);
    toast(`“${conversation.title}” deleted.`, () => this.actions.restore(conversation));
  }

  export(conversations) {
    save(toFile(conversations), `conversations-${new Date().toISOString().slice(0, 10)}.json`);
  }

  async import() {
    const [file] = find("import-file").files;
    find("import-file").value = ""; // allow to select the same file again
    try {
      const read = fromFile(await file.text());
      // Skip conversations that exist already. A different one with the same id gets a new id.
      const fresh = read.filter((one) => this.conversations.get(one.id)?.updated !== one.updated);
      for (const one of fresh) if (this.conversations.has(one.id)) one.id = newId();
      await this.actions.add(fresh);
      const known = read.length - fresh.length;
      toast(`${fresh.length} imported${known ? `, ${known} here already` : ""}.`);
    } catch (error) {
      toast(`Not imported: ${error.message}.`);
    }
  }
}
