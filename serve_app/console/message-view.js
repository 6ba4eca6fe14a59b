// One message on the page: its text, collapsed details and actions.

import { figuresOf } from "./answer.js";
import { copyButton, element, iconButton } from "./dom.js";
import { MarkdownView } from "./markdown.js";

const NOTES = { stopped: "Stopped.", length: "Cut off: no more tokens were allowed." };

/** `actions`: edit(message, text), regenerate(message), choose(message), answerCalls(message, results). */
export function viewOf(message, actions) {
  const kinds = { user: UserView, assistant: AnswerView, tool: ToolView };
  return new kinds[message.role](message, actions);
}

class View {
  constructor(message, actions, name) {
    this.message = message;
    this.actions = actions;
    this.tools = element("div", { class: "tools" });
    this.element = element("article", { class: `message ${message.role}`, "aria-label": name });
  }

  /** Shows arrows between the variants of this message. */
  showVariants(variants) {
    this.branch?.remove();
    if (variants.length < 2) return;
    const at = variants.indexOf(this.message);
    const arrow = (name, label, step) => {
      const other = variants[at + step];
      return iconButton(name, label, () => this.actions.choose(other, label), { disabled: !other });
    };
    this.branch = element(
      "div",
      { class: "branch", role: "group", "aria-label": "Variants" },
      arrow("left", "Earlier variant", -1),
      element("span", {}, `${at + 1}/${variants.length}`),
      arrow("right", "Later variant", 1),
    );
    this.tools.append(this.branch);
  }

  update() {}

  finish() {}
}

class UserView extends View {
  constructor(message, actions) {
    super(message, actions, "You");
    this.text = element("div", { class: "text" }, message.content);
    this.tools.append(copyButton(() => message.content, "Copy the message"));
    this.tools.append(iconButton("edit", "Edit the message", () => this.edit()));
    this.element.append(this.text, this.tools);
  }

  edit() {
    const area = element("textarea", { value: this.message.content, rows: 4, "aria-label": "Edited message" });
    const done = () => {
      form.replaceWith(this.text);
      this.tools.hidden = false;
    };
    const form = element(
      "form",
      { class: "edit" },
      area,
      element("div", { class: "buttons" }, element("button", { type: "submit" }, "Send"), button("Cancel", done)),
    );
    const send = (event) => {
      event.preventDefault();
      if (area.value.trim() && this.actions.edit(this.message, area.value.trim())) done();
    };
    form.addEventListener("submit", send);
    area.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
      if (event.key !== "Escape") return;
      event.stopPropagation();
      done();
    });
    this.tools.hidden = true;
    this.text.replaceWith(form);
    area.focus();
  }
}

class AnswerView extends View {
  constructor(message, actions) {
    super(message, actions, message.model || "Answer");
    this.reasoning = element("pre", { class: "folded-text", tabIndex: 0 });
    this.thought = element("summary", {}, "Reasoning");
    this.thinking = element("details", { class: "folded reasoning", hidden: true }, this.thought, this.reasoning);
    this.text = element("div", { class: "markdown" });
    this.markdown = new MarkdownView(this.text);
    this.calls = element("div", { class: "calls" });
    this.note = element("p", { class: "hint", hidden: true });
    this.error = element("p", { class: "error", hidden: true });
    this.waiting = element("p", { class: "waiting" }, element("span", { class: "hidden" }, "The answer is coming."));
    this.element.append(this.thinking, this.text, this.calls, this.waiting, this.note, this.error, this.tools);
    this.tools.hidden = true;
  }

  update() {
    const { content, reasoning, toolCalls } = this.message;
    this.waiting.hidden = Boolean(content || toolCalls?.length);
    this.showReasoning(reasoning, !content && !toolCalls?.length);
    if (content) this.markdown.grow(markdownOf(this.message));
    if (toolCalls) this.showCalls(toolCalls);
  }

  showReasoning(reasoning, isGoingOn) {
    if (!reasoning) return;
    this.thinking.hidden = false;
    this.thought.textContent = isGoingOn ? "Reasoning…" : "Reasoning";
    const shown = this.reasoning.textContent;
    if (reasoning.startsWith(shown)) this.reasoning.append(reasoning.slice(shown.length));
    else this.reasoning.textContent = reasoning;
  }

  showCalls(calls) {
    calls.forEach((call, i) => {
      if (!this.calls.children[i]) {
        const text = element("pre", { class: "folded-text", tabIndex: 0 });
        this.calls.append(element("details", { class: "folded call" }, element("summary"), text));
      }
      const [summary, text] = this.calls.children[i].children;
      summary.textContent = `Calls ${call.name}`;
      text.textContent = prettyJson(call.arguments);
    });
  }

  /** Shows the complete answer. */
  finish() {
    const { message } = this;
    this.update();
    this.waiting.hidden = true;
    this.showReasoning(message.reasoning, false);
    if (message.content) this.markdown.finish(markdownOf(message));
    say(this.error, message.error);
    say(this.note, message.finish ? NOTES[message.finish] : "This answer was interrupted.");
    this.tools.replaceChildren(
      copyButton(() => message.content, "Copy the answer"),
      iconButton("again", "Ask again", () => this.actions.regenerate(message)),
      figuresView(message),
    );
    this.tools.hidden = false;
  }

  /** Shows a form for tool results, on the last message only. */
  offerResults(isLast) {
    this.form?.remove();
    if (!isLast || !this.message.toolCalls?.length || this.message.finish !== "tool_calls") return;
    const areas = this.message.toolCalls.map(({ name }) =>
      element("textarea", { rows: 2, "aria-label": `Result of ${name}`, placeholder: `What ${name} answers` }),
    );
    const send = element("div", { class: "buttons" }, element("button", { type: "submit" }, "Send results"));
    this.form = element("form", { class: "results" }, ...areas, send);
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.actions.answerCalls(this.message, areas.map((area) => area.value));
    });
    this.tools.before(this.form);
  }
}

class ToolView extends View {
  constructor(message, actions) {
    super(message, actions, `Result of ${message.name}`);
    const summary = element("summary", {}, `${message.name} answered`);
    const text = element("pre", { class: "folded-text", tabIndex: 0 }, prettyJson(message.content));
    this.element.append(element("details", { class: "folded" }, summary, text), this.tools);
  }
}

function figuresView(message) {
  const figures = figuresOf(message);
  const list = element("dl");
  for (const [name, value] of figures) list.append(element("div", {}, element("dt", {}, name), element("dd", {}, value)));
  return element("details", { class: "answer-figures" }, element("summary", {}, "Figures"), list);
}

/** Shows a JSON answer as code. */
function markdownOf({ content, format }) {
  return format ? `\`\`\`json\n${prettyJson(content)}\n\`\`\`` : content;
}

function say(place, text) {
  place.hidden = !text;
  place.textContent = text ?? "";
}

function prettyJson(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // incomplete or not JSON
  }
}

function button(text, act) {
  return element("button", { type: "button", class: "quiet", on: { click: act } }, text);
}
