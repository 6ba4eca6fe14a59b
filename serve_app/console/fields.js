// The settings of a conversation: the form's fields, and the request body made from them.

const AS_IT_DOES = ["", "as the model does"];
const ON_OFF = [AS_IT_DOES, ["true", "on"], ["false", "off"]];
const FORMATS = [["", "free text"], ["json_object", "JSON"], ["json_schema", "JSON by the schema"]];
const EFFORTS = ["none", "minimal", "low", "medium", "high", "xhigh"].map((effort) => [effort, effort]);

/** `kind` says how the form's text is converted to the body's value. "" is omitted. */
export const GROUPS = [
  {
    title: "Model",
    fields: [
      { name: "system", label: "System prompt", kind: "own", area: 4, hint: "Said to the model before the conversation." },
    ],
  },
  {
    title: "Sampling",
    fields: [
      { name: "temperature", label: "Temperature", kind: "number", initial: "0.7", min: 0, max: 2, step: 0.1, placeholder: "1" },
      { name: "top_p", label: "Top p", kind: "number", min: 0, max: 1, step: 0.01, placeholder: "1" },
      { name: "top_k", label: "Top k", kind: "number", min: -1, step: 1, placeholder: "all" },
      { name: "min_p", label: "Min p", kind: "number", min: 0, max: 1, step: 0.01, placeholder: "0" },
      { name: "repetition_penalty", label: "Repetition penalty", kind: "number", min: 0.01, max: 10, step: 0.05, placeholder: "1" },
      { name: "presence_penalty", label: "Presence penalty", kind: "number", min: -2, max: 2, step: 0.1, placeholder: "0" },
      { name: "frequency_penalty", label: "Frequency penalty", kind: "number", min: -2, max: 2, step: 0.1, placeholder: "0" },
      { name: "seed", label: "Seed", kind: "number", step: 1, placeholder: "random" },
      { name: "n", label: "Answers", kind: "number", min: 1, max: 128, step: 1, placeholder: "1", hint: "All are kept, as variants." },
    ],
  },
  {
    title: "Length and end",
    fields: [
      { name: "max_tokens", label: "Max tokens", kind: "number", min: 1, step: 1, placeholder: "to the end" },
      { name: "min_tokens", label: "Min tokens", kind: "number", min: 0, step: 1, placeholder: "0" },
      { name: "ignore_eos", label: "Go on at the end", kind: "json", options: [["", "no"], ["true", "yes"]] },
      { name: "stop", label: "Stop at", kind: "lines", area: 2, hint: "A text per line that ends the answer." },
      { name: "stop_token_ids", label: "Stop at token ids", kind: "ids", placeholder: "2, 49152" },
    ],
  },
  {
    title: "Form of the answer",
    fields: [
      { name: "format", label: "Answer", kind: "own", options: FORMATS },
      { name: "schema", label: "JSON schema", kind: "own", area: 5, code: true, placeholder: '{"type": "object", "properties": {}}' },
    ],
  },
  {
    title: "Tools",
    fields: [
      { name: "tools", label: "Tools", kind: "json", area: 5, code: true, hint: "As in OpenAI's API: a list of functions. You give their results." },
      { name: "tool_choice", label: "Tool choice", kind: "text", options: [["", "auto"], ["none", "none"], ["required", "required"]] },
      { name: "parallel_tool_calls", label: "Several calls at once", kind: "json", options: [["", "yes"], ["false", "no"]] },
    ],
  },
  {
    title: "Reasoning",
    fields: [
      { name: "enable_thinking", label: "Reasoning", kind: "own", options: ON_OFF },
      { name: "reasoning_effort", label: "Effort", kind: "text", options: [AS_IT_DOES, ...EFFORTS] },
      { name: "thinking_token_budget", label: "Tokens at most", kind: "number", min: 0, step: 1, placeholder: "any" },
    ],
  },
  {
    title: "Tokens and queue",
    fields: [
      { name: "logit_bias", label: "Logit bias", kind: "json", code: true, placeholder: '{"42": -100}' },
      { name: "allowed_token_ids", label: "Allowed token ids", kind: "ids", placeholder: "all" },
      { name: "bad_words", label: "Words that may not come", kind: "lines", area: 2, hint: "One per line." },
      { name: "priority", label: "Priority", kind: "number", step: 1, placeholder: "0" },
      { name: "cache_salt", label: "Cache salt", kind: "text" },
    ],
  },
];

export const FIELDS = GROUPS.flatMap((group) => group.fields);

export const initialSettings = () =>
  Object.fromEntries(FIELDS.filter((field) => field.initial).map((field) => [field.name, field.initial]));

export class SettingError extends Error {
  constructor(field, message) {
    super(`${field.label}: ${message}`);
    this.field = field.name;
  }
}

/**
 * Returns the body's fields for the settings.
 * Throws SettingError for values that cannot be sent; the server checks the rest.
 */
export function bodyOf(settings) {
  const body = {};
  for (const field of FIELDS) {
    const value = settings[field.name] ?? "";
    if (value.trim() !== "" && field.kind !== "own") body[field.name] = READ[field.kind](value, field);
  }
  if (!body.tools) {
    delete body.tool_choice;
    delete body.parallel_tool_calls;
  }
  if (settings.enable_thinking) body.chat_template_kwargs = { enable_thinking: settings.enable_thinking === "true" };
  if (settings.format) body.response_format = responseFormat(settings);
  return body;
}

function responseFormat({ format, schema = "" }) {
  if (format !== "json_schema") return { type: format };
  const field = FIELDS.find(({ name }) => name === "schema");
  if (!schema.trim()) throw new SettingError(field, "is needed for an answer by the schema");
  return { type: format, json_schema: { name: "answer", schema: READ.json(schema, field) } };
}

const READ = {
  text: (value) => value,
  lines: (value) => value.split("\n").filter((line) => line !== ""),
  number(value, field) {
    if (!Number.isFinite(Number(value))) throw new SettingError(field, "must be a number");
    return Number(value);
  },
  ids(value, field) {
    const ids = value.split(/[\s,]+/).filter(Boolean).map(Number);
    if (!ids.every(Number.isInteger)) throw new SettingError(field, "must be numbers with commas between them");
    return ids;
  },
  json(value, field) {
    try {
      return JSON.parse(value);
    } catch (error) {
      throw new SettingError(field, `is not JSON (${error.message})`);
    }
  },
};
