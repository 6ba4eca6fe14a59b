// Calls this server: JSON requests and streams of server-sent events.

export class ApiError extends Error {
  constructor(message, requestId, status = null) {
    super(message);
    this.requestId = requestId;
    this.status = status;
  }
}

const KEY = "serve_app API key";
let whenWanted = () => apiKey.set(prompt("This server wants an API key:")?.trim() ?? "", false);
let asked = false;

/** The API key for all requests, kept for this tab's session or in the browser. */
export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "",
  isKept: () => localStorage.getItem(KEY) !== null,
  set(key, kept) {
    sessionStorage.removeItem(KEY);
    localStorage.removeItem(KEY);
    if (key) (kept ? localStorage : sessionStorage).setItem(KEY, key);
    asked = false;
  },
};

/**
 * Sets the function to call when the server requires a key or refuses the current one.
 * It is called only once until another key is set.
 */
export function onKeyWanted(handler) {
  whenWanted = handler;
}

/** `fetch` with the API key. */
export async function ask(path, options) {
  const key = apiKey.get();
  const headers = key ? { ...options.headers, authorization: `Bearer ${key}` } : options.headers;
  const response = await fetch(path, { ...options, headers });
  if (response.status !== 401 || asked) return response;
  whenWanted();
  asked = true;
  return apiKey.get() === key ? response : ask(path, options);
}

/** Returns the parsed response of a GET. Throws ApiError with the server's message. */
export async function getJson(path) {
  return (await get(path)).json();
}

/** Returns the body of a GET's response, for saving. Throws as `getJson` does. */
export async function getBlob(path) {
  return (await get(path)).blob();
}

async function get(path) {
  const response = await ask(path, { headers: {} });
  if (!response.ok) throw await refusal(response);
  return response;
}

/** Returns the parsed response of a POST. Throws as `getJson` does. */
export async function postJson(path, body) {
  const response = await post(path, body);
  if (!response.ok) throw await refusal(response);
  return response.json();
}

function post(path, body, signal) {
  const headers = { "content-type": "application/json" };
  return ask(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

/**
 * Sends a POST for a streamed generation. Calls onChunk for every chunk. Returns the request's id
 * after [DONE].
 * Throws ApiError for a refusal, an error event or a stream that ends early, and AbortError when
 * `signal` aborts it.
 */
export async function streamJson(path, body, signal, onChunk) {
  const response = await post(path, body, signal);
  if (!response.ok) throw await refusal(response);
  const requestId = response.headers.get("x-request-id");
  for await (const data of serverSentEvents(response.body)) {
    if (data === "[DONE]") return requestId;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, chunk.error.request_id);
    onChunk(chunk);
  }
  throw new ApiError("the stream ended before the answer was complete", requestId);
}

async function refusal(response) {
  const requestId = response.headers.get("x-request-id");
  try {
    return new ApiError((await response.json()).error.message, requestId, response.status);
  } catch {
    return new ApiError(`the server answered ${response.status}`, requestId, response.status);
  }
}

async function* serverSentEvents(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      for (const line of event.split("\n")) {
        if (line.startsWith("data: ")) yield line.slice(6);
      }
    }
  }
}
