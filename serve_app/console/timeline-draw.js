// Draws one replica's recorded steps: which request had which slot, when and why. Pure: input are
// records and a canvas, output is a lookup function.

// Okabe and Ito's colours, distinguishable with any colour vision. The eighth is a dark violet.
const PALETTE = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#8A63A8"];
const GUTTER = 62;
const IDLE_S = 0.03;
const BATCH_HEIGHT = 46;
const QUEUE_HEIGHT = 26;
const AXIS_HEIGHT = 18;

const colours = new Map();

/**
 * Returns a request's colour. Neighbours in time differ, and a request keeps its colour on another
 * replica.
 */
export function colourOf(request) {
  const name = request.split(".")[0];
  if (!colours.has(name)) {
    if (colours.size >= 5000) colours.clear();
    colours.set(name, PALETTE[colours.size % PALETTE.length]);
  }
  return colours.get(name);
}

/** Returns black or white, whichever is more readable on the colour. */
function inkOn(colour) {
  const [red, green, blue] = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  return 0.299 * red + 0.587 * green + 0.114 * blue > 110 ? "#10151b" : "#ffffff";
}

/** Returns the number of the attempt at the request; above 1 it came from another replica. */
export function attemptOf(request) {
  const number = Number(request.split(".")[1] ?? 1);
  return Number.isInteger(number) ? number : 1;
}

export function endOf(record) {
  return record.started_at + record.schedule_s + record.model_s + record.update_s;
}

/** Returns the record with rows as objects. Cached per record. */
export function prepare(record) {
  if (!record.prepared) {
    record.prepared = true;
    record.end = endOf(record);
    record.rows = record.rows.map(([slot, request, choice, start, tokens, samples, prefill, constrained]) => ({
      slot, request, choice, start, tokens, samples, prefill, constrained, end: start + tokens,
    }));
  }
  return record;
}

/** Returns the height of a replica's picture in CSS pixels. */
export function heightOf(replica) {
  return laneHeight(replica) * replica.num_slots + 14 + BATCH_HEIGHT + QUEUE_HEIGHT + AXIS_HEIGHT;
}

function laneHeight(replica) {
  return Math.max(4, Math.min(16, Math.floor(288 / replica.num_slots)));
}

/**
 * Draws the records between `from` and `to` (Unix seconds). `axis` is "time", or "steps" for steps
 * of equal width and idle times of one step.
 * Returns a function that describes what is at (x, y), as text or null.
 */
export function drawReplica(canvas, replica, { from, to, axis }) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = heightOf(replica);
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const style = getComputedStyle(canvas);
  context.font = `11px ${style.fontFamily}`;
  const records = replica.records.filter((record) => prepare(record).end > from && record.started_at < to);
  const columns = axis === "steps" ? byStep(records, width) : byTime(records, width, from, to);
  const picture = { context, width, columns, replica, lane: laneHeight(replica), css: (name) => style.getPropertyValue(name) };
  drawLanes(picture, axis === "time" ? unfinished(replica, width, from, to) : null);
  drawRows(picture);
  drawMarks(picture);
  const lanesEnd = picture.lane * replica.num_slots;
  drawGate(picture, lanesEnd + 3);
  drawTokens(picture, lanesEnd + 14);
  drawQueue(picture, lanesEnd + 14 + BATCH_HEIGHT);
  drawAxis(picture, height - AXIS_HEIGHT, { from, to, axis });
  return (x, y) => lookUp(picture, x, y);
}

/** Returns one column per step: {record, x, end}. Gaps are idle times. */
function byTime(records, width, from, to) {
  const x = (time) => Math.max(GUTTER, GUTTER + ((time - from) / (to - from)) * (width - GUTTER));
  return records.map((record, i) => {
    const next = records[i + 1];
    // Short pauses between two steps are not shown as gaps.
    const end = next && next.started_at - record.end <= IDLE_S ? next.started_at : record.end;
    return { record, x: x(record.started_at), end: Math.min(width, x(end)) };
  });
}

/** Returns the position of the running step. Its content is known only at its end. */
function unfinished(replica, width, from, to) {
  if (replica.gone || replica.step_age_s === null) return null;
  const x = (time) => Math.min(width, Math.max(GUTTER, GUTTER + ((time - from) / (to - from)) * (width - GUTTER)));
  return { x: x(replica.now - replica.step_age_s), end: x(replica.now) };
}

function byStep(records, width) {
  const gap = (i) => i > 0 && records[i].started_at - records[i - 1].end > IDLE_S;
  const gaps = records.filter((_, i) => gap(i)).length;
  const unit = (width - GUTTER) / Math.max(1, records.length + gaps);
  let x = GUTTER;
  return records.map((record, i) => {
    x += gap(i) ? 2 * unit : unit;
    return { record, x: x - unit, end: x };
  });
}

/** Draws slots only while the engine runs: a pale lane is an idle slot, white is an idle engine. */
function drawLanes({ context, width, columns, replica, lane, css }, running) {
  context.textBaseline = "middle";
  const labelEvery = Math.max(1, Math.ceil(12 / lane));
  const runs = [];
  for (const { x, end } of running ? [...columns, running] : columns) {
    if (runs.length && x - runs.at(-1).end < 0.5) runs.at(-1).end = end;
    else runs.push({ x, end });
  }
  for (let slot = 0; slot < replica.num_slots; slot++) {
    context.fillStyle = css("--lane");
    for (const { x, end } of runs) context.fillRect(x, slot * lane, end - x, lane - 1);
    context.fillRect(GUTTER, (slot + 1) * lane - 1, width - GUTTER, 0.5);
    context.fillStyle = css("--soft");
    if (slot % labelEvery === 0) context.fillText(`slot ${slot}`, 0, slot * lane + lane / 2);
  }
  context.fillStyle = css("--soft");
  const edges = [{ end: GUTTER }, ...runs, { x: width }];
  for (let i = 1; i < edges.length; i++) {
    const room = edges[i].x - edges[i - 1].end;
    const word = replica.gone && i === edges.length - 1 ? "gone" : "idle";
    if (room > 40) context.fillText(word, edges[i - 1].end + room / 2 - 10, (lane * replica.num_slots) / 2);
  }
}

/**
 * Draws prefill as a full lane with its number of tokens, and decode as a band, underlined if a
 * grammar constrains it.
 */
function drawRows({ context, columns, lane, css }) {
  const bands = new Map();
  const finish = (band) => {
    const decodes = !band.prefill;
    const top = band.slot * lane + (decodes ? Math.round(lane * 0.3) : 0);
    const wide = Math.max(band.end - band.x, 0.75);
    context.fillStyle = colourOf(band.request);
    context.globalAlpha = decodes ? 0.75 : 1;
    context.fillRect(band.x, top, wide, lane - 1 - (decodes ? Math.round(lane * 0.3) : 0));
    context.globalAlpha = 1;
    if (decodes && band.constrained) {
      const line = Math.max(1, Math.round(lane * 0.15));
      context.fillStyle = css("--ink");
      context.fillRect(band.x, (band.slot + 1) * lane - 1 - line, wide, line);
    }
    if (decodes || lane < 9) return;
    const label = String(band.tokens);
    if (wide > 7 * label.length + 9) {
      context.fillStyle = inkOn(colourOf(band.request));
      context.fillText(label, band.x + (attemptOf(band.request) > 1 ? 8 : 3), top + lane / 2);
    }
  };
  for (const { record, x, end } of columns) {
    for (const row of record.rows) {
      const band = bands.get(row.slot);
      const same = band && band.request === row.request && band.choice === row.choice;
      if (same && !row.prefill && !band.prefill && band.step === record.step - 1) {
        band.end = end;
        band.step = record.step;
        continue;
      }
      if (band) finish(band);
      bands.set(row.slot, { ...row, x, end, step: record.step });
    }
  }
  bands.forEach(finish);
}

function drawMarks({ context, columns, lane, css }) {
  const slots = new Map();
  for (const { record, x, end } of columns) {
    const preempted = record.preempted.map(([request, choice]) => slots.get(`${request}#${choice}`));
    for (const row of record.rows) slots.set(`${row.request}#${row.choice}`, row.slot);
    for (const slot of preempted) if (slot !== undefined) cross(context, x, slot * lane + lane / 2, css("--danger"));
    for (const [request, choice] of record.admitted) {
      const slot = slots.get(`${request}#${choice}`);
      if (slot === undefined) continue;
      if (attemptOf(request) > 1) diamond(context, x, slot * lane + lane / 2, css("--ink"), css("--card"));
      else notch(context, x, slot * lane, lane, css("--ink"));
    }
    for (const [request, choice] of record.finished) {
      const slot = slots.get(`${request}#${choice}`);
      context.fillStyle = css("--ink");
      if (slot !== undefined) context.fillRect(end - 1, slot * lane, 1.5, lane - 1);
    }
  }
}

function notch(context, x, y, lane, colour) {
  const size = Math.min(5, lane / 2);
  context.fillStyle = colour;
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(x + size, y);
  context.lineTo(x, y + size);
  context.fill();
}

function cross(context, x, y, colour) {
  context.strokeStyle = colour;
  context.lineWidth = 2;
  context.beginPath();
  context.moveTo(x - 4, y - 4);
  context.lineTo(x + 4, y + 4);
  context.moveTo(x + 4, y - 4);
  context.lineTo(x - 4, y + 4);
  context.stroke();
}

function diamond(context, x, y, colour, edge) {
  context.fillStyle = colour;
  context.strokeStyle = edge;
  context.lineWidth = 1.5;
  context.beginPath();
  context.moveTo(x, y - 6);
  context.lineTo(x + 6, y);
  context.lineTo(x, y + 6);
  context.lineTo(x - 6, y);
  context.closePath();
  context.fill();
  context.stroke();
}

function drawGate({ context, columns, css }, top) {
  context.fillStyle = css("--soft");
  context.fillText("gate", 0, top + 4);
  for (const { record, x, end } of columns) {
    context.fillStyle = css(record.gate_open ? "--good" : "--closed");
    const thick = record.gate_open ? 2 : 7; // shape as well as colour
    context.fillRect(x, top + 4 - thick / 2, Math.max(end - x, 0.75), thick);
  }
}

function drawTokens({ context, columns, css }, top) {
  const most = Math.max(1, ...columns.map(({ record }) => record.num_prefill_tokens + record.num_decode_tokens));
  const scale = (BATCH_HEIGHT - 8) / most;
  const base = top + BATCH_HEIGHT - 4;
  context.fillStyle = css("--soft");
  context.fillText("tokens", 0, top + 12);
  context.fillText(`≤ ${most}`, 0, top + 26);
  for (const { record, x, end } of columns) {
    const wide = Math.max(end - x, 0.75);
    const decode = record.num_decode_tokens * scale;
    const prefill = record.num_prefill_tokens * scale;
    context.fillStyle = css("--cached");
    context.fillRect(x, base - decode, wide, decode);
    context.fillStyle = css("--used");
    context.fillRect(x, base - decode - prefill, wide, prefill);
  }
}

function drawQueue({ context, columns, css }, top) {
  const most = Math.max(1, ...columns.map(({ record }) => record.stats.waiting));
  context.fillStyle = css("--soft");
  context.fillText("waiting", 0, top + 8);
  context.fillText(`≤ ${most}`, 0, top + 20);
  context.fillStyle = css("--closed");
  for (const { record, x, end } of columns) {
    const high = (record.stats.waiting / most) * (QUEUE_HEIGHT - 6);
    context.fillRect(x, top + QUEUE_HEIGHT - 3 - high, Math.max(end - x, 0.75), high);
  }
}

function drawAxis({ context, width, columns, css }, top, { from, to, axis }) {
  context.fillStyle = css("--soft");
  const tick = (x, label) => {
    context.fillRect(x, top, 1, 4);
    const left = Math.min(x + 3, width - context.measureText(label).width);
    context.fillText(label, left, top + 10);
  };
  const room = Math.max(1, Math.floor((width - GUTTER) / 90));
  if (axis === "steps") {
    const every = Math.max(1, Math.ceil(columns.length / room));
    columns.forEach(({ record, x }, i) => i % every === 0 && tick(x, `step ${record.step}`));
    return;
  }
  const rough = (to - from) / room;
  const every = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300].find((size) => size >= rough) ?? 600;
  for (let time = Math.ceil(from / every) * every; time < to; time += every) {
    const clock = new Date(time * 1000);
    const label = clock.toLocaleTimeString([], { hour12: false }) + (every < 1 ? `.${String(clock.getMilliseconds()).padStart(3, "0")}` : "");
    tick(GUTTER + ((time - from) / (to - from)) * (width - GUTTER), label);
  }
}

function lookUp({ columns, lane, replica }, x, y) {
  const column = columns.find((candidate) => x >= candidate.x && x <= Math.max(candidate.end, candidate.x + 1));
  if (!column) return null;
  const { record } = column;
  const milliseconds = ((record.end - record.started_at) * 1000).toFixed(1);
  const lines = [
    `step ${record.step}, ${milliseconds} ms: ${record.num_prefill_tokens} prefill and ${record.num_decode_tokens} decode tokens`,
    `${record.stats.running} running, ${record.stats.waiting} waiting, gate ${record.gate_open ? "open" : "closed"}`,
  ];
  const slot = Math.floor(y / lane);
  const row = slot < replica.num_slots && record.rows.find((candidate) => candidate.slot === slot);
  if (row) lines.unshift(`slot ${slot}: ${row.request}${row.choice ? ` choice ${row.choice}` : ""}, ${row.prefill ? "prefill" : "decode"} of tokens ${row.start} to ${row.end - 1}${row.constrained ? ", by a grammar" : ""}`);
  return lines.join("\n");
}
