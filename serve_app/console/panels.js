// The panels beside the chat, live batch and timeline, each with a key. Data are polled only while
// one is open.

import { getBlob } from "./api.js";
import { startCrowd } from "./crowd.js";
import { find, save, toast } from "./dom.js";
import { Feed } from "./feed.js";
import { showLive } from "./live.js";
import { TimelineView } from "./timeline.js";

const PANELS = [
  { name: "live", key: "F2" },
  { name: "timeline", key: "F4" },
];
const OPEN = "serve_app panels";

export function startPanels() {
  const timeline = new TimelineView(find("timeline-view"), { following: true });
  const feed = new Feed((news) => {
    sayWhy(news instanceof Error ? news : null);
    if (news instanceof Error) return;
    showLive(news);
    timeline.update(news.replicas, news.now);
  });
  const kept = (localStorage.getItem(OPEN) ?? "").split(" ");
  for (const { name } of PANELS) open(name, kept.includes(name));
  const toggle = (name) => {
    open(name, find(name).hidden);
    localStorage.setItem(OPEN, opened().join(" "));
    feed.setWanted(opened().length > 0);
  };
  for (const { name } of PANELS) find(`${name}-toggle`).addEventListener("click", () => toggle(name));
  for (const { name } of PANELS) find(`${name}-close`).addEventListener("click", () => toggle(name));
  document.addEventListener("keydown", (event) => {
    const panel = PANELS.find(({ key }) => key === event.key);
    if (!panel || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    toggle(panel.name);
  });
  find("timeline").addEventListener("click", saveTimeline);
  startCrowd();
  feed.setWanted(opened().length > 0);
}

/** Saves a timeline file. Following the link itself would send no API key. */
async function saveTimeline(event) {
  const link = event.target.closest("a[download]");
  if (!link) return;
  event.preventDefault();
  try {
    save(await getBlob(link.href), link.download);
  } catch (error) {
    toast(`Not saved: ${error.message}`);
  }
}

const opened = () => PANELS.map(({ name }) => name).filter((name) => !find(name).hidden);

function open(name, isOpen) {
  find(name).hidden = !isOpen;
  find(`${name}-toggle`).setAttribute("aria-pressed", String(isOpen));
}

function sayWhy(error) {
  const why = !error ? "" : error.status === 401 || error.status === 403 ? "This needs an admin's API key." : "No news from the server.";
  for (const note of document.querySelectorAll(".panel-note")) {
    if (note.textContent !== why) note.textContent = why; // avoids a repeated announcement
  }
}
