// Starts the page: conversations, panels and the server's health.

import { getJson, onKeyWanted } from "./api.js";
import { Conversations } from "./conversations.js";
import { find } from "./dom.js";
import { startPanels } from "./panels.js";
import { openStore } from "./store.js";

const HEALTH_PERIOD_MS = 5000;

async function showHealth() {
  if (!document.hidden) {
    const ready = await fetch("/health/ready").then((answer) => answer.ok, () => null);
    say(ready === null ? "server unreachable" : ready ? "ready" : "no replica is ready", ready ? "ready" : "down");
  }
  setTimeout(showHealth, HEALTH_PERIOD_MS);
}

function say(text, state) {
  const health = find("health");
  if (health.textContent !== text) health.textContent = text; // avoids a repeated announcement
  health.dataset.state = state;
}

async function showModels() {
  try {
    const models = (await getJson("/v1/models")).data;
    find("model").replaceChildren(...models.map((model) => new Option(model.id, model.id)));
  } catch (error) {
    if (error.status === null || error.status === undefined || error.status >= 500) setTimeout(showModels, 2000);
  }
}

/** The sidebar: beside the chat on wide screens, above it on phones. */
function startSidebar() {
  const wide = matchMedia("(min-width: 52rem)");
  const { classList } = document.body;
  const update = () => {
    const isOpen = wide.matches ? !classList.contains("sidebar-closed") : classList.contains("sidebar-open");
    find("sidebar-toggle").setAttribute("aria-expanded", String(isOpen));
  };
  new MutationObserver(update).observe(document.body, { attributeFilter: ["class"] });
  wide.addEventListener("change", update);
  find("sidebar-toggle").addEventListener("click", () => classList.toggle(wide.matches ? "sidebar-closed" : "sidebar-open"));
  find("backdrop").addEventListener("click", () => classList.remove("sidebar-open"));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") classList.remove("sidebar-open");
  });
  update();
}

// Start what needs no conversation first: opening the store takes longer than loading the page.
startSidebar();
startPanels();
showHealth();
const store = await openStore();
const conversations = new Conversations(store, await store.all(), { onKey: showModels });
onKeyWanted(() => conversations.settings.askForKey());
showModels();
