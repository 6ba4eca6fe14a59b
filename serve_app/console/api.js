// Talks to this server: JSON calls, and streams of server-sent events.

export class ApiError extends Error {
  constructor(message, requestId) {
    super(message);
    this.requestId = requestId;
  }
}

const KEY = "serve_app API key";
let asked = false;

/** `fetch` with the API key of this tab's session. A server that wants one has it asked for, once. */
export async function ask(path, options) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { ...options.headers, authorization: `Bearer ${key}` } : options.headers;
  const response = await fetch(path, { ...options, headers });
  if (response.status !== 401 || asked) return response;
  asked = true;
  const given = prompt("This server wants an API key (an admin's, for the timeline):");
  if (!given) return response;
  sessionStorage.setItem(KEY, given.trim());
  return ask(path, options);
}

/** The parsed answer of a GET. Throws ApiError with the server's own words. */
export async function getJson(path) {
  const response = await ask(path, { headers: { accept: "application/json" } });
  if (!response.ok) throw await refusal(response);
  return response.json();
}

/**
 * POST a streamed generation. Calls onChunk for every chunk; resolves to the request's id after [DONE].
 * Throws ApiError for a refusal, an error event, or a stream that ends early; AbortError when `signal` aborts it.
 */
export async function streamJson(path, body, signal, onChunk) {
  const response = await ask(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
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
    return new ApiError((await response.json()).error.message, requestId);
  } catch {
    return new ApiError(`the server answered ${response.status}`, requestId);
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
