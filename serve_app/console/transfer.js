// Conversations as one JSON file: "Export" writes it, "Import" checks every field.

import { FIELDS } from "./fields.js";

const FORMAT = "serve_app conversations";
const VERSION = 1;
const ROLES = ["user", "assistant", "tool"];
const TEXTS = { user: [], assistant: ["reasoning", "model", "finish", "error", "requestId", "format"], tool: ["toolCallId", "name"] };

export function toFile(conversations) {
  const file = { format: FORMAT, version: VERSION, exported: new Date().toISOString(), conversations };
  return new Blob([JSON.stringify(file, null, 1)], { type: "application/json" });
}

/**
 * Returns the conversations in a file's text. Unknown fields are dropped. Throws an Error that says
 * what is wrong.
 */
export function fromFile(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("this is not a JSON file");
  }
  if (file?.format !== FORMAT) throw new Error("this is not a file of exported conversations");
  if (file.version !== VERSION) throw new Error(`version ${file.version} of the file is not known here (${VERSION} is)`);
  need(Array.isArray(file.conversations), "conversations", "a list");
  return file.conversations.map((conversation, i) => readConversation(conversation, `conversations[${i}]`));
}

function readConversation(given, at) {
  need(isObject(given), at, "an object");
  need(isObject(given.messages), `${at}.messages`, "an object");
  const messages = {};
  for (const [id, message] of Object.entries(given.messages)) {
    messages[id] = readMessage(id, message, `${at}.messages.${id}`);
  }
  for (const message of Object.values(messages)) checkParents(messages, message, at);
  const chosen = {};
  for (const [parent, id] of Object.entries(isObject(given.chosen) ? given.chosen : {})) {
    const expected = parent === "root" ? null : parent;
    need(Object.hasOwn(messages, id) && messages[id].parent === expected, `${at}.chosen.${parent}`, "one of its children");
    chosen[parent] = id;
  }
  return {
    id: text(given.id, `${at}.id`),
    title: text(given.title, `${at}.title`),
    created: number(given.created, `${at}.created`),
    updated: number(given.updated, `${at}.updated`),
    settings: readSettings(given.settings, `${at}.settings`),
    messages,
    chosen,
  };
}

function readMessage(id, given, at) {
  need(isObject(given), at, "an object");
  need(/^[0-9a-f]{24}$/.test(id) && given.id === id, `${at}.id`, "24 hexadecimal digits, as its key");
  need(ROLES.includes(given.role), `${at}.role`, `one of ${ROLES.join(", ")}`);
  need(given.parent === null || typeof given.parent === "string", `${at}.parent`, "null or an id");
  const message = { id, parent: given.parent, role: given.role, content: text(given.content, `${at}.content`) };
  for (const name of TEXTS[given.role]) {
    if (given[name] !== undefined && given[name] !== null) message[name] = text(given[name], `${at}.${name}`);
  }
  if (given.toolCalls !== undefined) {
    message.toolCalls = list(given.toolCalls, `${at}.toolCalls`).map((call, i) => readCall(call, `${at}.toolCalls[${i}]`));
  }
  if (given.figures !== undefined) {
    need(isObject(given.figures), `${at}.figures`, "an object");
    message.figures = {};
    for (const [name, value] of Object.entries(given.figures)) message.figures[name] = number(value, `${at}.figures.${name}`);
  }
  return message;
}

function readCall(given, at) {
  need(isObject(given), at, "an object");
  const [id, name] = [text(given.id, `${at}.id`), text(given.name, `${at}.name`)];
  return { id, name, arguments: text(given.arguments, `${at}.arguments`) };
}

function readSettings(given, at) {
  need(isObject(given), at, "an object");
  const known = FIELDS.filter((field) => given[field.name] !== undefined);
  return Object.fromEntries(known.map(({ name }) => [name, text(given[name], `${at}.${name}`)]));
}

function checkParents(messages, message, at) {
  const seen = new Set();
  for (let next = message; next.parent !== null; next = messages[next.parent]) {
    need(Object.hasOwn(messages, next.parent) && !seen.has(next.id), `${at}.messages.${message.id}.parent`, "a message before it");
    seen.add(next.id);
  }
}

function need(condition, at, what) {
  if (!condition) throw new Error(`\`${at}\` must be ${what}`);
}

function text(value, at) {
  need(typeof value === "string", at, "a text");
  return value;
}

function number(value, at) {
  need(Number.isFinite(value), at, "a number");
  return value;
}

function list(value, at) {
  need(Array.isArray(value), at, "a list");
  return value;
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
