// A conversation as a tree: editing a message or asking again adds a branch beside the old one. Nothing here knows the page.

const ROOT = "root"; // the parent of those that begin a conversation, as a key of `chosen`
const MAX_TITLE = 60;

export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");

export function newConversation(settings) {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, settings: { ...settings }, messages: {}, chosen: {} };
}

/** Adds a message under `parent` (an id, null for the beginning) and makes its branch the shown one. */
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

/** The messages of the shown branch, from the first to the last. */
export function path(conversation) {
  const found = [];
  let next = conversation.messages[conversation.chosen[ROOT]];
  while (next) {
    found.push(next);
    next = conversation.messages[conversation.chosen[next.id]];
  }
  return found;
}

/** All messages that stand where this one does, in the order in which they came. */
export function variants(conversation, message) {
  return Object.values(conversation.messages).filter((other) => other.parent === message.parent);
}

/** The messages up to and without `id`, on the branch that leads there. */
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

/** Messages as the API takes them. Answers that failed before they said anything are left out. */
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
