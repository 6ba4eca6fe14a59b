// The live batch: fleet figures, each replica's slots and KV blocks, throughput of the last minute.

import { colourOf, endOf, prepare } from "./timeline-draw.js";

const SPARK_S = 60;
const MAX_CELLS = 240;
const find = (id) => document.getElementById(id);

export function showLive(state) {
  const alive = state.replicas.filter((replica) => !replica.gone);
  const running = sum(alive, (replica) => replica.stats.running);
  const waiting = sum(alive, (replica) => replica.stats.waiting);
  const rates = throughput(state.replicas, state.now);
  showFigures(find("fleet"), {
    running: [running, `of ${sum(alive, (replica) => replica.num_slots)} slots`],
    "waiting in engines": [waiting],
    "queue at ingress": [state.queue.waiting],
    "waiting-served ratio": [((waiting + state.queue.waiting) / Math.max(running, 1)).toFixed(2)],
    "tokens per second": [mean(rates.slice(-6, -1)).toFixed(1)],
    replicas: [alive.length],
  });
  drawSpark(find("throughput"), rates);
  showReplicas(state);
}

function showReplicas(state) {
  const box = find("replicas");
  const cards = new Map([...box.children].map((card) => [card.dataset.replica, card]));
  for (const replica of state.replicas) {
    const card = cards.get(replica.replica) ?? newCard(replica.replica);
    cards.delete(replica.replica);
    if (!card.isConnected) box.append(card);
    fillCard(card, replica, state.now);
  }
  for (const card of cards.values()) card.remove();
}

function newCard(name) {
  const card = document.createElement("section");
  card.className = "replica";
  card.dataset.replica = name;
  card.setAttribute("aria-label", `Replica ${name}`);
  const part = (tag, className) => {
    const element = document.createElement(tag);
    element.className = className;
    card.append(element);
    return element;
  };
  part("h3", "name");
  part("dl", "figures");
  part("ul", "slots").setAttribute("aria-label", "Slots");
  part("canvas", "blocks").setAttribute("role", "img");
  const legend = part("p", "legend");
  for (const kind of ["used", "cached", "free"]) {
    const entry = document.createElement("span");
    entry.append(Object.assign(document.createElement("i"), { className: kind }), document.createElement("b"));
    legend.append(entry);
  }
  return card;
}

function fillCard(card, replica, now) {
  const { stats } = replica;
  const recent = replica.records.filter((record) => record.started_at > now - 5);
  const stepMs = 1000 * mean(recent.map((record) => endOf(record) - record.started_at));
  const last = replica.records.at(-1);
  card.classList.toggle("gone", replica.gone);
  card.querySelector(".name").textContent = `Replica ${replica.replica}${replica.gone ? ": gone, its requests go on elsewhere" : ""}`;
  if (replica.gone) return;
  showFigures(card.querySelector(".figures"), {
    running: [stats.running, `of ${replica.num_slots}`],
    waiting: [stats.waiting],
    "waiting-served ratio": [(stats.waiting / Math.max(stats.running, 1)).toFixed(2)],
    step: recent.length ? [stepMs.toFixed(stepMs < 10 ? 1 : 0), "ms"] : [stats.running ? "busy" : "idle"],
    gate: [last && !last.gate_open && stats.running ? "closed" : "open"],
    preempted: [sum(replica.records, (record) => record.preempted.length), "in 5 min"],
  });
  showSlots(card.querySelector(".slots"), replica);
  drawBlocks(card.querySelector(".blocks"), stats);
  const free = stats.blocks_total - stats.blocks_used - stats.blocks_cached;
  const counts = [["in use", stats.blocks_used], ["cached prefixes", stats.blocks_cached], ["free", free]];
  card.querySelectorAll(".legend b").forEach((entry, i) => {
    entry.textContent = `${counts[i][1]} KV blocks ${counts[i][0]}`;
  });
}

function showSlots(list, replica) {
  const rows = currentRows(replica);
  while (list.children.length < replica.num_slots) list.append(document.createElement("li"));
  while (list.children.length > replica.num_slots) list.lastChild.remove();
  [...list.children].forEach((item, slot) => {
    const row = rows.get(slot);
    item.className = row ? "busy" : "";
    item.style.borderLeftColor = row ? colourOf(row.request) : "";
    const name = document.createElement("b");
    const work = document.createElement("span");
    name.textContent = row ? row.request.slice(0, 6) + (row.choice ? `#${row.choice}` : "") : "";
    work.textContent = row ? `${row.prefill ? "prefill" : "decode"} ${row.end}` : "idle";
    item.replaceChildren(name, work);
  });
}

/**
 * Returns slot -> latest row of its current request. A step need not have a row for every request.
 */
function currentRows(replica) {
  const rows = new Map();
  for (const record of replica.records.slice(-32)) {
    const left = new Set([...record.finished, ...record.preempted].map(([request, choice]) => `${request}#${choice}`));
    for (const row of prepare(record).rows) rows.set(row.slot, { ...row, step: record.step });
    for (const [slot, row] of rows) if (left.has(`${row.request}#${row.choice}`)) rows.delete(slot);
  }
  // A request whose client disconnected ends without a record. So keep only the most recently seen
  // ones.
  const latest = [...rows].sort(([, a], [, b]) => b.step - a.step);
  return new Map(latest.slice(0, replica.stats.running));
}

function showFigures(list, figures) {
  const names = Object.keys(figures);
  if (list.children.length !== names.length) {
    list.replaceChildren(...names.map((name) => {
      const group = document.createElement("div");
      group.append(document.createElement("dt"), document.createElement("dd"));
      group.firstChild.textContent = name;
      return group;
    }));
  }
  names.forEach((name, i) => {
    const [value, unit] = figures[name];
    const small = document.createElement("small");
    small.textContent = unit === undefined ? "" : ` ${unit}`;
    list.children[i].lastChild.replaceChildren(String(value), small);
  });
}

/**
 * Output tokens per second over the last SPARK_S seconds, all replicas together; the last second is
 * incomplete.
 */
function throughput(replicas, now) {
  const rates = new Array(SPARK_S + 1).fill(0);
  for (const replica of replicas) {
    for (const record of replica.records) {
      const age = Math.floor(now) - Math.floor(endOf(record));
      if (age >= 0 && age <= SPARK_S) rates[SPARK_S - age] += record.num_output_tokens;
    }
  }
  return rates;
}

function drawSpark(canvas, rates) {
  const { context, width, height, style } = open(canvas);
  const top = Math.max(...rates, 1);
  const x = (i) => (i / (rates.length - 2)) * width;
  const y = (rate) => height - 2 - (rate / top) * (height - 18);
  context.beginPath();
  context.moveTo(0, height);
  rates.slice(0, -1).forEach((rate, i) => context.lineTo(x(i), y(rate)));
  context.lineTo(width, height);
  context.fillStyle = style.getPropertyValue("--lane");
  context.fill();
  context.beginPath();
  rates.slice(0, -1).forEach((rate, i) => context.lineTo(x(i), y(rate)));
  context.strokeStyle = style.getPropertyValue("--used");
  context.lineWidth = 2;
  context.stroke();
  context.fillStyle = style.getPropertyValue("--soft");
  context.fillText(`output tokens per second, last minute; highest ${top}`, 0, 10);
  canvas.setAttribute("aria-label", `Throughput of the last minute, at most ${top} tokens per second`);
}

function drawBlocks(canvas, stats) {
  const { context, width, height, style } = open(canvas);
  const cells = Math.min(MAX_CELLS, stats.blocks_total);
  const perCell = stats.blocks_total / cells;
  const columns = Math.ceil(cells / Math.max(1, Math.floor(Math.sqrt((cells * height) / width))));
  const size = Math.min(width / columns, height / Math.ceil(cells / columns));
  for (let i = 0; i < cells; i++) {
    const middle = (i + 0.5) * perCell;
    const kind = middle < stats.blocks_used ? "--used" : middle < stats.blocks_used + stats.blocks_cached ? "--cached" : "--free";
    context.fillStyle = style.getPropertyValue(kind);
    context.fillRect((i % columns) * size, Math.floor(i / columns) * size, size - 1.5, size - 1.5);
  }
  const share = Math.round((100 * stats.blocks_used) / stats.blocks_total);
  canvas.setAttribute("aria-label", `KV blocks: ${share} % of ${stats.blocks_total} in use`);
  canvas.title = `each cell shows ${perCell.toFixed(1)} blocks`;
}

function open(canvas) {
  const scale = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const style = getComputedStyle(canvas);
  context.font = `11px ${style.fontFamily}`;
  return { context, width, height, style };
}

const sum = (items, value) => items.reduce((total, item) => total + value(item), 0);
const mean = (numbers) => (numbers.length ? numbers.reduce((a, b) => a + b, 0) / numbers.length : 0);
