// The shown conversation: sends messages, streams and stops answers, switches branches.

import { streamJson } from "./api.js";
import { Answer } from "./answer.js";
import { element, find } from "./dom.js";
import { SettingError, bodyOf } from "./fields.js";
import { viewOf } from "./message-view.js";
import { Scroll } from "./scroll.js";
import { add, before, choose, path, toRequest, variants } from "./tree.js";

const SAVE_PERIOD_MS = 2000;
const IDEAS = [
  "Explain how a KV cache makes generation faster.",
  "Write a Python function that merges two sorted lists.",
  "Compare three ways to brew coffee in a table.",
  "Give me a plan to learn a language in six months.",
];

export class Chat {
  /** `save(conversation)` stores it; `complain(error)` shows an invalid setting. */
  constructor({ save, complain }) {
    this.save = save;
    this.complain = complain;
    this.running = null;
    this.views = new Map();
    this.scroll = new Scroll(find("messages"), find("jump"));
    this.actions = {
      edit: (message, text) => this.branch(message.parent, text),
      regenerate: (message) => this.answer(this.conversation.messages[message.parent]),
      choose: (message, label) => this.choose(message, label),
      answerCalls: (message, results) => this.answerCalls(message, results),
    };
    this.listen();
  }

  listen() {
    const prompt = find("prompt");
    find("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    find("chat").addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
    });
    find("halt").addEventListener("click", () => this.stop());
  }

  show(conversation) {
    this.conversation = conversation;
    this.views.clear();
    this.redraw();
    this.scroll.toEnd();
  }

  redraw() {
    const messages = path(this.conversation);
    const shown = messages.length ? messages.map((message) => this.viewOf(message).element) : [welcome()];
    // Moving an element would lose its focus and selection.
    const old = [...find("messages").children];
    const same = shown.findIndex((box, i) => box !== old[i]);
    for (const box of old.slice(same < 0 ? shown.length : same)) box.remove();
    if (same >= 0) find("messages").append(...shown.slice(same));
    messages.forEach((message, i) => {
      const view = this.viewOf(message);
      view.showVariants(variants(this.conversation, message));
      view.offerResults?.(i === messages.length - 1 && !this.isRunning(message));
    });
    setBusy(this.running);
  }

  viewOf(message) {
    if (!this.views.has(message.id)) {
      const view = viewOf(message, this.actions);
      this.views.set(message.id, view);
      if (this.isRunning(message)) view.update();
      else view.finish();
    }
    return this.views.get(message.id);
  }

  isRunning(message) {
    return Boolean(this.running?.messages.includes(message));
  }

  send() {
    const text = find("prompt").value.trim();
    if (text && this.branch(path(this.conversation).at(-1)?.id ?? null, text)) find("prompt").value = "";
  }

  /** Sends a message after `parent` (an id or null). Returns false if it cannot be sent now. */
  branch(parent, content) {
    const body = this.body();
    if (!body) return false;
    this.generate(body, add(this.conversation, parent, { role: "user", content }));
    return true;
  }

  answer(question) {
    const body = this.body();
    if (body) this.generate(body, question);
  }

  answerCalls(message, results) {
    const body = this.body();
    if (!body) return;
    const last = message.toolCalls.reduce((parent, call, i) => {
      const result = { role: "tool", toolCallId: call.id, name: call.name, content: results[i] };
      return add(this.conversation, parent.id, result);
    }, message);
    this.generate(body, last);
  }

  choose(message, label) {
    choose(this.conversation, message);
    this.redraw();
    this.save(this.conversation);
    // The clicked arrow no longer exists. Move the focus to the same arrow of the new message, or
    // to another one.
    const { element: box } = this.viewOf(message);
    (box.querySelector(`[aria-label="${label}"]:enabled`) ?? box.querySelector(".branch button:enabled")).focus();
  }

  body() {
    if (this.running) return null;
    try {
      return bodyOf(this.conversation.settings);
    } catch (error) {
      if (!(error instanceof SettingError)) throw error;
      this.complain(error);
      return null;
    }
  }

  async generate(body, question) {
    const { conversation } = this;
    const model = find("model").value;
    const blank = { role: "assistant", content: "", model, format: conversation.settings.format };
    const messages = Array.from({ length: body.n ?? 1 }, () => add(conversation, question.id, { ...blank }));
    choose(conversation, messages[0]);
    const answers = messages.map((message) => new Answer(message));
    const history = toRequest(before(conversation, messages[0].id), conversation.settings.system ?? "");
    const request = { model, ...body, messages: history, stream: true };
    request.stream_options = { include_usage: true, continuous_usage_stats: true };
    this.running = { conversation, messages, abort: new AbortController() };
    this.redraw();
    this.scroll.toEnd();
    this.save(conversation);
    const { signal } = this.running.abort;
    try {
      const id = await streamJson("/v1/chat/completions", request, signal, (chunk) => this.take(answers, chunk));
      for (const message of messages) message.requestId = id;
      announce("The answer is complete.");
    } catch (error) {
      this.fail(messages, error);
    }
    this.end();
  }

  take(answers, chunk) {
    const choice = chunk.choices[0];
    const answer = answers[choice?.index ?? 0];
    answer.take(choice, chunk.usage);
    this.views.get(answer.message.id)?.update();
    if (performance.now() - (this.running.savedAt ?? 0) < SAVE_PERIOD_MS) return;
    this.running.savedAt = performance.now();
    this.save(this.running.conversation);
  }

  fail(messages, error) {
    const stopped = error.name === "AbortError";
    for (const message of messages) {
      if (message.finish) continue; // this answer was complete
      message.finish = stopped ? "stopped" : "error";
      if (!stopped) message.error = error.message;
      if (error.requestId) message.requestId = error.requestId;
    }
    announce(stopped ? "Stopped." : `Error: ${error.message}`);
  }

  end() {
    const { conversation, messages } = this.running;
    this.running = null;
    for (const message of messages) this.views.get(message.id)?.finish();
    this.redraw();
    this.save(conversation);
  }

  stop() {
    this.running?.abort.abort();
  }
}

function welcome() {
  const idea = (text) => {
    const fill = () => {
      find("prompt").value = text;
      find("prompt").focus();
    };
    return element("button", { type: "button", class: "idea", on: { click: fill } }, text);
  };
  return element(
    "div",
    { class: "welcome" },
    element("p", { class: "welcome-title" }, "What would you like to know?"),
    element("p", { class: "hint" }, "Conversations stay in this browser."),
    element("div", { class: "ideas" }, ...IDEAS.map(idea)),
  );
}

function setBusy(running) {
  // Screen readers read a busy log when it is complete, not piece by piece.
  find("messages").setAttribute("aria-busy", String(Boolean(running)));
  find("send").hidden = Boolean(running);
  find("halt").hidden = !running;
}

function announce(text) {
  find("chat-status").textContent = text;
}
