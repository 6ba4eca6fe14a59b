// Twelve requests at once, for those who want to see the batch work. They stop when the page is left.

import { streamJson } from "./api.js";

const PROMPTS = [
  ["What is the capital of France?", 24],
  ["Write a short story about a lighthouse keeper who finds a letter.", 220],
  ["List three uses of a paper clip.", 70],
  ["Explain to a child why the sky is blue.", 150],
  ["Say hello.", 8],
  ["Summarize this in one sentence: " + "The train left the station late and everybody on board looked at the rain. ".repeat(12), 60],
];
const COUNT = 12;
const find = (id) => document.getElementById(id);

export function startCrowd() {
  find("crowd").addEventListener("click", async () => {
    find("crowd").disabled = true;
    let done = 0;
    let failed = 0;
    const show = () => {
      const end = failed ? `, ${failed} failed` : "";
      find("crowd-status").textContent = `${done} of ${COUNT} answered${end}`;
    };
    show();
    const runs = Array.from({ length: COUNT }, async (_, i) => {
      const [content, max_tokens] = PROMPTS[i % PROMPTS.length];
      const body = { model: find("model").value, messages: [{ role: "user", content }], max_tokens, stream: true };
      try {
        await streamJson("/v1/chat/completions", body, undefined, () => {});
        done += 1;
      } catch {
        failed += 1;
      }
      show();
    });
    await Promise.all(runs);
    find("crowd").disabled = false;
  });
}
