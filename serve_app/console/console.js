// Puts the page together: chat, live batch, timeline.

import { startChat } from "./chat.js";
import { startCrowd } from "./crowd.js";
import { Feed } from "./feed.js";
import { showLive } from "./live.js";
import { TimelineView } from "./timeline.js";

const health = document.getElementById("health");
const timeline = new TimelineView(document.getElementById("timeline-view"), { following: true });

function say(state, text) {
  if (health.textContent !== text) health.textContent = text; // a status that repeats itself would be read out again
  health.dataset.state = state;
}

new Feed((news) => {
  if (news instanceof Error) {
    say("down", "server unreachable");
    return;
  }
  const alive = news.replicas.filter((replica) => !replica.gone).length;
  say(alive ? "ready" : "down", alive ? `${alive} replica${alive > 1 ? "s" : ""} ready` : "no replica");
  showLive(news);
  timeline.update(news.replicas, news.now);
});

async function connect() {
  try {
    await startChat();
    startCrowd();
  } catch {
    setTimeout(connect, 2000);
  }
}
connect();
