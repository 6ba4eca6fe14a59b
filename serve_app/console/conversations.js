// Connects the chat's parts: stored conversations, the shown one, its settings.

import { Chat } from "./chat.js";
import { find } from "./dom.js";
import { initialSettings } from "./fields.js";
import { SettingsDialog } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { StorageFullError } from "./store.js";
import { newConversation } from "./tree.js";

const SHOWN = "serve_app conversation";

export class Conversations {
  /** `kept`: the conversations in the store. */
  constructor(store, kept, { onKey }) {
    this.store = store;
    this.all = new Map(kept.map((conversation) => [conversation.id, conversation]));
    this.settings = new SettingsDialog({ onKey, onChange: () => this.save(this.shown) });
    find("settings-toggle").addEventListener("click", () => this.settings.open());
    this.chat = new Chat({
      save: (conversation) => this.save(conversation),
      complain: (error) => this.settings.complain(error),
    });
    this.sidebar = new Sidebar({
      choose: (id) => this.show(this.all.get(id)),
      create: () => this.create(),
      rename: (conversation, title) => this.save(Object.assign(conversation, { title })),
      remove: (conversation) => this.remove(conversation),
      restore: (conversation) => this.save(conversation, true),
      add: (conversations) => this.add(conversations),
    });
    store.onChange((id) => this.reload(id));
    const last = this.all.get(sessionStorage.getItem(SHOWN) ?? localStorage.getItem(SHOWN));
    if (last) this.show(last);
    else this.create();
  }

  show(conversation) {
    this.shown = conversation;
    for (const storage of [sessionStorage, localStorage]) storage.setItem(SHOWN, conversation.id);
    this.settings.show(conversation.settings);
    this.chat.show(conversation);
    this.draw();
    document.body.classList.remove("sidebar-open");
    find("prompt").focus();
  }

  draw() {
    this.sidebar.update(this.all, this.shown.id);
    find("title").textContent = this.shown.title || "New chat";
  }

  /**
   * Creates a conversation with the settings of the shown one. It is stored after its first
   * message.
   */
  create() {
    const settings = this.shown?.settings ?? latest(this.all)?.settings ?? initialSettings();
    this.show(newConversation(settings));
  }

  async save(conversation, isBack = false) {
    if (!isBack && !this.all.has(conversation.id) && Object.keys(conversation.messages).length === 0) return;
    if (conversation.isGone && !isBack) return;
    delete conversation.isGone;
    this.all.set(conversation.id, conversation);
    this.draw();
    await this.keep(() => this.store.put(conversation));
  }

  async remove(conversation) {
    conversation.isGone = true; // a running answer must not store it again
    if (this.chat.running?.conversation === conversation) this.chat.stop();
    this.all.delete(conversation.id);
    if (conversation === this.shown) this.create();
    else this.draw();
    await this.keep(() => this.store.delete(conversation.id));
  }

  async add(conversations) {
    for (const conversation of conversations) {
      this.all.set(conversation.id, conversation);
      await this.keep(() => this.store.put(conversation));
    }
    this.draw();
  }

  async keep(act) {
    try {
      await act();
      find("notice").textContent = this.store.keeps ? "" : "This browser keeps nothing: conversations are gone with the page.";
    } catch (error) {
      find("notice").textContent = error instanceof StorageFullError ? error.message : `Not kept: ${error.message}`;
    }
  }

  /** Another tab has changed or deleted a conversation. */
  async reload(id) {
    if (this.chat.running?.conversation.id === id) return;
    const conversation = await this.store.get(id);
    if (conversation) this.all.set(id, conversation);
    else this.all.delete(id);
    if (this.shown.id !== id) this.draw();
    else if (conversation) this.show(conversation);
    else this.create();
  }
}

const latest = (all) => [...all.values()].sort((a, b) => b.updated - a.updated)[0];
