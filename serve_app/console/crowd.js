// Sends twelve prompts at once, to show batching. They stop when the page is closed.

import { streamJson } from "./api.js";

const STORY = "The train left the station late, and everybody on board looked at the rain. ".repeat(16);
// Three requests with several prompts each: browsers open at most six connections per server, and
// the page needs some.
const REQUESTS = [
  { max_tokens: 32, prompt: ["The capital of France is", "Water boils at", "My favourite animal is", "2 + 2 =", "Hello,", STORY] },
  { max_tokens: 110, prompt: ["The sky is blue because", "Three uses of a paper clip:", "Once upon a time", `${STORY}Then`] },
  { max_tokens: 240, prompt: ["A lighthouse keeper found a letter.", "Dear colleague, you asked how a steam engine works."] },
];
const COUNT = REQUESTS.flatMap((request) => request.prompt).length;
const find = (id) => document.getElementById(id);

export function startCrowd() {
  find("crowd").addEventListener("click", async () => {
    find("crowd").disabled = true;
    let done = 0;
    let failure = "";
    const show = () => {
      find("crowd-status").textContent = `${done} of ${COUNT} answered${failure && `; ${failure}`}`;
    };
    show();
    const count = (chunk) => {
      const ended = chunk.choices.filter((choice) => choice.finish_reason !== null).length;
      done += ended;
      if (ended) show();
    };
    const runs = REQUESTS.map(async (request) => {
      const body = { ...request, model: find("model").value, ignore_eos: true, stream: true };
      try {
        await streamJson("/v1/completions", body, undefined, count);
      } catch (error) {
        failure = error.message;
        show();
      }
    });
    await Promise.all(runs);
    find("crowd").disabled = false;
  });
}
