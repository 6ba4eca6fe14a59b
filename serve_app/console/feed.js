// Polls the server every second for engine steps and keeps the last minutes. Pauses while they are
// not shown.

import { getJson } from "./api.js";

const PERIOD_MS = 1000;
const KEPT_S = 300;
const OVERLAP_S = 2; // duplicate steps are dropped by number

/**
 * Calls `listener` with {now, queue, replicas} after each response, and with an Error if it failed.
 */
export class Feed {
  constructor(listener) {
    this.listener = listener;
    this.replicas = new Map();
    this.askedAt = Date.now() - 60_000; // the first poll gets one minute
    this.isWanted = false;
    document.addEventListener("visibilitychange", () => this.wake());
  }

  /** Sets whether anything on the page shows the data. */
  setWanted(isWanted) {
    this.isWanted = isWanted;
    this.wake();
  }

  wake() {
    if (this.isWanted && !document.hidden && !this.timer) this.poll();
  }

  async poll() {
    this.timer = true;
    try {
      const askedAt = Date.now();
      const seconds = Math.min(KEPT_S, (askedAt - this.askedAt) / 1000 + OVERLAP_S);
      const state = await getJson(`/debug/timeline?format=json&seconds=${seconds.toFixed(3)}`);
      this.askedAt = askedAt;
      this.merge(state);
      this.listener({ now: state.now, queue: state.queue, replicas: [...this.replicas.values()] });
    } catch (error) {
      this.listener(error);
    }
    this.timer = document.hidden || !this.isWanted ? null : setTimeout(() => this.poll(), PERIOD_MS);
  }

  merge(state) {
    for (const replica of this.replicas.values()) replica.gone = true;
    for (const fresh of state.replicas) {
      const known = this.replicas.get(fresh.replica)?.records ?? [];
      const last = known.at(-1)?.step ?? -1;
      const records = known.concat(fresh.records.filter((record) => record.step > last));
      this.replicas.set(fresh.replica, { ...fresh, records, gone: false });
    }
    for (const [name, replica] of this.replicas) {
      replica.records = replica.records.filter((record) => record.started_at > state.now - KEPT_S);
      // Keep a dead replica until its last step is too old to be shown.
      if (replica.gone && replica.records.length === 0) this.replicas.delete(name);
    }
  }
}
