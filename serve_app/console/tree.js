// A conversation as a tree: editing or regenerating a message adds a branch. Independent of the
// page.

const ROOT = "root"; // key in `chosen` of messages without a parent
const MAX_TITLE = 60;

export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");

export function newConversation(settings) {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, settings: { ...settings }, messages: {}, chosen: {} };
}

/** Adds a message under `parent` (an id, or null for the root) and shows its branch. */
export function add(conversation, parent, message) {
  const added = { id: newId(), parent, ...message };
  conversation.messages[added.id] = added;
  choose(conversation, added);
  if (!conversation.title && added.role === "user") conversation.title = titleOf(added.content);
  return added;
}

export function choose(conversation, message) {
  conversation.chosen[message.parent ?? ROOT] = message.id;
  conversation.updated = Date.now();
}

/** Returns the messages of the shown branch, first to last. */
export function path(conversation) {
  const found = [];
  let next = conversation.messages[conversation.chosen[ROOT]];
  while (next) {
    found.push(next);
    next = conversation.messages[conversation.chosen[next.id]];
  }
  return found;
}

/** Returns all messages with the same parent, in order of creation. */
export function variants(conversation, message) {
  return Object.values(conversation.messages).filter((other) => other.parent === message.parent);
}

/** Returns the messages before `id` on its branch. */
export function before(conversation, id) {
  const found = [];
  for (let parent = conversation.messages[id].parent; parent !== null; parent = conversation.messages[parent].parent) {
    found.unshift(conversation.messages[parent]);
  }
  return found;
}

export function titleOf(text) {
  const line = text.trim().split("\n", 1)[0];
  return line.length > MAX_TITLE ? `${line.slice(0, MAX_TITLE - 1)}…` : line;
}

/** Converts messages for the API. Answers that failed before any output are left out. */
export function toRequest(messages, system) {
  const said = messages.filter((message) => message.role !== "assistant" || message.content || message.toolCalls?.length);
  const sent = said.map((message) => {
    if (message.role === "user") return { role: "user", content: message.content };
    if (message.role === "tool") return { role: "tool", tool_call_id: message.toolCallId, content: message.content };
    const answer = { role: "assistant", content: message.content || null };
    if (message.reasoning) answer.reasoning_content = message.reasoning;
    if (message.toolCalls?.length) {
      answer.tool_calls = message.toolCalls.map((call) => ({
        id: call.id,
        type: "function",
        function: { name: call.name, arguments: call.arguments || "{}" },
      }));
    }
    return answer;
  });
  return system.trim() ? [{ role: "system", content: system }, ...sent] : sent;
}
