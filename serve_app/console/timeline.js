// The timeline panel: one picture per replica, controls, the item at the pointer, a summary in
// words.

import { attemptOf, drawReplica, prepare } from "./timeline-draw.js";

const SPANS_S = [2, 5, 15, 30, 60, 300];

export class TimelineView {
  /** `following`: the picture ends at the present until the user pauses or moves it. */
  constructor(box, { following }) {
    this.box = box;
    this.replicas = [];
    this.now = 0;
    this.span = 30;
    this.axis = "time";
    this.end = following ? null : 0;
    this.pictures = new Map();
    this.build(following);
    new ResizeObserver(() => this.draw()).observe(box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  build(following) {
    const bar = element("div", "buttons timeline-bar");
    this.spanSelect = element("select");
    this.spanSelect.append(...SPANS_S.map((span) => new Option(`${span} s`, span, false, span === this.span)));
    this.spanSelect.addEventListener("change", () => this.zoomTo(Number(this.spanSelect.value)));
    this.axisSelect = element("select");
    this.axisSelect.append(new Option("time", "time"), new Option("steps", "steps"));
    this.axisSelect.addEventListener("change", () => {
      this.axis = this.axisSelect.value;
      this.draw();
    });
    bar.append(labelled("Span", this.spanSelect), labelled("Axis", this.axisSelect));
    const button = (text, act) => {
      const made = element("button", "quiet", text);
      made.type = "button";
      made.addEventListener("click", act);
      bar.append(made);
      return made;
    };
    button("Earlier", () => this.move(-this.span / 2));
    button("Later", () => this.move(this.span / 2));
    if (following) {
      this.pause = button("Pause", () => {
        this.end = this.end === null ? this.now : null;
        this.draw();
      });
    }
    this.figures = element("div", "pictures");
    this.tip = element("pre", "tip");
    this.tip.hidden = true;
    this.box.append(bar, legend(), this.figures, this.tip);
  }

  update(replicas, now) {
    this.replicas = replicas;
    this.now = now;
    if (this.end === null) this.draw();
  }

  /** Shows all recorded steps. */
  fit() {
    const records = this.replicas.flatMap((replica) => replica.records.map(prepare));
    const from = records.reduce((least, record) => Math.min(least, record.started_at), this.now);
    this.end = records.reduce((most, record) => Math.max(most, record.end), from + 1);
    this.span = SPANS_S.find((span) => span >= this.end - from) ?? SPANS_S.at(-1);
    this.spanSelect.value = this.span;
    this.draw();
  }

  zoomTo(span) {
    if (this.end !== null) this.end += (span - this.span) / 2; // keep the centre
    this.span = span;
    this.draw();
  }

  move(seconds) {
    this.end = (this.end ?? this.now) + seconds;
    this.draw();
  }

  draw() {
    const to = this.end ?? this.now;
    const view = { from: to - this.span, to, axis: this.axis };
    if (this.pause) {
      this.pause.textContent = this.end === null ? "Pause" : "Follow";
      this.pause.setAttribute("aria-pressed", String(this.end !== null));
    }
    const shown = new Set();
    for (const replica of this.replicas) {
      shown.add(replica.replica);
      this.drawOne(replica, view);
    }
    for (const [name, { figure }] of this.pictures) {
      if (!shown.has(name)) {
        figure.remove();
        this.pictures.delete(name);
      }
    }
  }

  drawOne(replica, view) {
    if (!this.pictures.has(replica.replica)) this.pictures.set(replica.replica, this.picture());
    const picture = this.pictures.get(replica.replica);
    const summary = summarize(replica, view);
    picture.caption.textContent = summary;
    picture.canvas.setAttribute("aria-label", summary);
    picture.lookUp = drawReplica(picture.canvas, replica, view);
  }

  picture() {
    const figure = element("figure");
    const caption = element("figcaption");
    const canvas = element("canvas");
    canvas.setAttribute("role", "img");
    figure.append(caption, canvas);
    this.figures.append(figure);
    const picture = { figure, caption, canvas, lookUp: () => null };
    canvas.addEventListener("pointermove", (event) => this.point(picture, event));
    canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
    return picture;
  }

  point(picture, event) {
    const text = picture.lookUp(event.offsetX, event.offsetY);
    this.tip.hidden = text === null;
    this.tip.textContent = text ?? "";
    const room = document.documentElement.clientWidth - this.tip.offsetWidth - 8;
    this.tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, room))}px`;
    this.tip.style.top = `${event.clientY + 16}px`;
  }
}

/** Returns a summary of the picture in words, for users who cannot see it or want the numbers. */
function summarize(replica, { from, to }) {
  const records = replica.records.filter((record) => prepare(record).end > from && record.started_at < to);
  const count = (value) => records.reduce((total, record) => total + value(record), 0);
  const busy = count((record) => record.end - record.started_at);
  const moved = count((record) => record.admitted.filter(([request]) => attemptOf(request) > 1).length);
  const slots = count((record) => record.rows.length) / Math.max(1, records.length);
  return (
    `Replica ${replica.replica}${replica.gone ? " (gone)" : ""}: ${records.length} steps in ${(to - from).toFixed(0)} s, ` +
    `busy ${Math.round((100 * Math.min(busy, to - from)) / (to - from))} % of the time, ` +
    `${slots.toFixed(1)} of ${replica.num_slots} slots in a step on average; ` +
    `${count((record) => record.num_prefill_tokens)} prefill and ${count((record) => record.num_decode_tokens)} decode tokens; ` +
    `${count((record) => record.admitted.length)} admitted, ${count((record) => record.preempted.length)} preempted, ` +
    `${moved} moved here from another replica; ` +
    `gate closed in ${count((record) => (record.gate_open ? 0 : 1))} steps.`
  );
}

function legend() {
  const list = element("ul", "legend timeline-legend");
  const entries = [
    ["prefill", "prefill chunk, with its tokens"],
    ["decode", "decode"],
    ["constrained", "decode by a grammar"],
    ["admitted", "admitted"],
    ["preempted", "preempted"],
    ["moved", "moved here from another replica"],
    ["finished", "finished"],
    ["open", "gate open"],
    ["closed", "gate closed"],
  ];
  for (const [kind, text] of entries) {
    const entry = element("li");
    entry.append(element("i", kind, { preempted: "×", moved: "◆", admitted: "◤" }[kind] ?? ""), text);
    list.append(entry);
  }
  return list;
}

function labelled(text, control) {
  const label = element("label", "inline", text);
  label.append(control);
  return label;
}

function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}
