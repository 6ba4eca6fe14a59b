// Collects one streamed answer: its message and its figures.

export class Answer {
  constructor(message) {
    this.message = message;
    this.sentAt = performance.now();
  }

  take(choice, usage) {
    const { message } = this;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice?.delta ?? {};
    if (content || reasoning || calls) {
      this.lastAt = performance.now();
      this.firstAt ??= this.lastAt;
    }
    if (content) message.content += content;
    if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
    for (const part of calls ?? []) this.takeCall(part);
    if (choice?.finish_reason) message.finish = choice.finish_reason;
    if (usage) message.figures = this.figures(usage);
  }

  takeCall(part) {
    const calls = (this.message.toolCalls ??= []);
    const call = (calls[part.index] ??= { id: part.id, name: "", arguments: "" });
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }

  figures(usage) {
    const { completion_tokens: tokens, prompt_tokens: prompt } = usage;
    const figures = { tokens, prompt };
    const cached = usage.prompt_tokens_details?.cached_tokens;
    const reasoning = usage.completion_tokens_details?.reasoning_tokens;
    if (cached) figures.cached = cached;
    if (reasoning) figures.reasoning = reasoning;
    if (this.firstAt) figures.firstToken = (this.firstAt - this.sentAt) / 1000;
    const seconds = (this.lastAt - this.firstAt) / 1000;
    // Tokens that arrive at the same time give no rate.
    if (tokens > 1 && seconds > 0.1) figures.pace = (tokens - 1) / seconds;
    return figures;
  }
}

/** Names and values of an answer's figures, as shown. */
export function figuresOf({ figures = {}, finish, requestId, model }) {
  const shown = [];
  const show = (name, value) => value !== undefined && value !== null && shown.push([name, String(value)]);
  show("first token", figures.firstToken && `${figures.firstToken.toFixed(2)} s`);
  show("pace", figures.pace && `${figures.pace.toFixed(1)} tokens/s`);
  show("answer", figures.tokens && `${figures.tokens} tokens`);
  show("reasoning", figures.reasoning && `${figures.reasoning} tokens`);
  show("prompt", figures.prompt && `${figures.prompt} tokens${figures.cached ? `, ${figures.cached} cached` : ""}`);
  show("ended by", finish);
  show("model", model);
  show("request", requestId);
  return shown;
}
