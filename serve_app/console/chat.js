// The conversation: sends it, shows the answer as it comes, stops it. Model output is only ever set as text.

import { getJson, streamJson } from "./api.js";

const NUMBERS = ["temperature", "top_p", "top_k", "repetition_penalty", "max_tokens", "seed"];
const find = (id) => document.getElementById(id);

export async function startChat() {
  const models = (await getJson("/v1/models")).data;
  find("model").replaceChildren(...models.map((model) => new Option(model.id, model.id)));
  new Chat();
}

class Chat {
  constructor() {
    this.history = [];
    this.running = null;
    find("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    find("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    find("chat").addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
    });
    find("halt").addEventListener("click", () => this.stop());
    find("fresh").addEventListener("click", () => this.forget());
  }

  async send() {
    const text = find("prompt").value.trim();
    if (!text || this.running) return;
    find("prompt").value = "";
    document.querySelector("#messages .empty")?.remove();
    addMessage("user", "You").text.textContent = text;
    const history = this.history; // "New chat" puts another one in its place
    history.push({ role: "user", content: text });
    const answer = addMessage("assistant", find("model").value);
    const run = new Run(answer);
    this.running = new AbortController();
    setBusy(true);
    try {
      const body = { ...readSettings(), messages: withSystem(history), stream: true };
      body.stream_options = { include_usage: true, continuous_usage_stats: true };
      const { signal } = this.running;
      run.requestId = await streamJson("/v1/chat/completions", body, signal, (chunk) => run.take(chunk));
      announce("The answer is complete.");
    } catch (error) {
      if (error.name === "AbortError") run.finish = "stopped by you";
      else run.fail(error);
      announce(error.name === "AbortError" ? "Stopped." : `Error: ${error.message}`);
    }
    run.show();
    if (run.text) history.push({ role: "assistant", content: run.text });
    else history.pop(); // a question without any answer would only confuse the next one
    this.running = null;
    setBusy(false);
  }

  stop() {
    this.running?.abort();
  }

  forget() {
    this.stop();
    this.history = [];
    find("messages").replaceChildren();
    find("prompt").focus();
  }
}

/** One answer in the making: its text and its figures. */
class Run {
  constructor(answer) {
    this.answer = answer;
    this.sentAt = performance.now();
    this.text = "";
    this.finish = null;
  }

  take(chunk) {
    const choice = chunk.choices[0];
    if (choice?.delta?.content) {
      this.lastAt = performance.now();
      this.firstAt ??= this.lastAt;
      this.text += choice.delta.content;
      append(this.answer.text, choice.delta.content);
    }
    this.finish = choice?.finish_reason ?? this.finish;
    this.usage = chunk.usage ?? this.usage;
    this.show();
  }

  fail(error) {
    const note = document.createElement("p");
    note.className = "error";
    note.textContent = error.message;
    this.answer.text.after(note);
    this.requestId = error.requestId ?? this.requestId;
    this.finish = "error";
  }

  show() {
    const parts = [];
    if (this.firstAt) parts.push(`first token ${((this.firstAt - this.sentAt) / 1000).toFixed(2)} s`);
    const tokens = this.usage?.completion_tokens;
    const seconds = (this.lastAt - this.firstAt) / 1000;
    // Pieces that reach the page in one go tell nothing of the pace.
    if (tokens > 1 && seconds > 0.1) parts.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
    if (tokens) parts.push(`${tokens} tokens`);
    if (this.usage) {
      const cached = this.usage.prompt_tokens_details?.cached_tokens;
      parts.push(`prompt ${this.usage.prompt_tokens}${cached ? ` (${cached} cached)` : ""}`);
    }
    if (this.finish) parts.push(this.finish);
    if (this.requestId) parts.push(this.requestId);
    this.answer.figures.textContent = parts.join(" · ");
  }
}

function readSettings() {
  const body = { model: find("model").value };
  for (const name of NUMBERS) {
    const value = find(name).value;
    if (value !== "") body[name] = Number(value);
  }
  if (find("stop").value) body.stop = [find("stop").value];
  return body;
}

function withSystem(history) {
  const system = find("system").value.trim();
  return system ? [{ role: "system", content: system }, ...history] : history;
}

function addMessage(role, name) {
  const message = document.createElement("article");
  message.className = `message ${role}`;
  const parts = {};
  for (const part of ["who", "text", "figures"]) {
    parts[part] = document.createElement("div");
    parts[part].className = part === "figures" ? "figures-line" : part;
    message.append(parts[part]);
  }
  parts.who.textContent = name;
  find("messages").append(message);
  scrollDown();
  return parts;
}

function append(element, text) {
  const box = find("messages");
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  element.append(text);
  if (atEnd) scrollDown();
}

function scrollDown() {
  const box = find("messages");
  box.scrollTop = box.scrollHeight;
}

function setBusy(busy) {
  // A log that is busy is read out once it is done, not token by token.
  find("messages").setAttribute("aria-busy", String(busy));
  find("send").disabled = busy;
  find("halt").disabled = !busy;
}

function announce(text) {
  find("chat-status").textContent = text;
}
