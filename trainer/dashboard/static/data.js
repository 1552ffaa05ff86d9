// The numbers of one run as the server answers them, and how new ones are put behind those that are here.

import { isNumber, lastUpTo } from "./dom.js";

export const POINTS = 600;
const HOUR = 3600;

export class RunData {
  constructor({ run, name, directory, live }) {
    Object.assign(this, { run, name, directory, live, facts: null, colour: null, verdict: { level: "none", text: "" } });
    this.problems = [];
    this.span = null;
    this.summary = null;
    this.forget();
  }

  /** Everything is asked for again. */
  forget() {
    this.generation = -1;
    this.newest = null;
    this.steps = [];
    this.times = [];
    this.columns = {};
    this.low = null;
    this.high = null;
    this.evaluations = [];
  }

  /** Shows the steps of `span` alone, as they are; null: all. Returns whether something has to be asked for. */
  zoom(span) {
    if (span === this.span || (span !== null && this.span === null && this.low === null)) return false;
    this.span = span;
    this.generation = -1;
    return true;
  }

  /** What to ask for; null when that would not change. */
  question() {
    if (this.span !== null) {
      const settled = this.generation >= 0 && this.newest > this.span[1];
      return settled ? null : { run: this.run, first: this.span[0], last: this.span[1], points: 2 * POINTS };
    }
    if (this.steps.length > 2 * POINTS) this.generation = -1;
    const after = this.generation < 0 ? 0 : (this.newest ?? 0);
    return { run: this.run, after, generation: this.generation, evaluations: this.evaluations.length, points: POINTS };
  }

  /** Takes the answer to `question()`; returns whether anything is new. */
  take(answer) {
    const known = answer.generation === this.generation;
    const fresh = !known || answer.steps.length > 0 || answer.evaluations.length > 0;
    if (answer.whole) {
      Object.assign(this, { steps: answer.steps, times: answer.times, columns: answer.columns });
      Object.assign(this, { low: answer.low ?? null, high: answer.high ?? null });
    } else {
      this.append(answer);
    }
    this.evaluations = known ? this.evaluations.concat(answer.evaluations) : answer.evaluations;
    this.generation = answer.generation;
    this.newest = answer.newest;
    this.verdict = answer.verdict;
    return fresh;
  }

  append(answer) {
    const before = this.steps.length;
    this.steps = this.steps.concat(answer.steps);
    this.times = this.times.concat(answer.times);
    for (const kept of [this.columns, this.low, this.high]) {
      if (kept === null) continue;
      for (const name of new Set([...Object.keys(kept), ...Object.keys(answer.columns)])) {
        const old = kept[name] ?? Array(before).fill(null);
        kept[name] = old.concat(answer.columns[name] ?? Array(answer.steps.length).fill(null));
      }
    }
  }

  /** Where the rows are on an axis: `step`, `time` (hours since the first step began) or `tokens`. */
  xs(axis) {
    if (axis === "tokens" && this.has("tokens_total")) return this.columns.tokens_total.map((value) => value ?? 0);
    if (axis !== "time" || !this.times.every(isNumber)) return this.steps;
    const start = this.times[0] - (this.columns.seconds?.[0] ?? 0);
    return this.times.map((time) => (time - start) / HOUR);
  }

  /** Where a step is on an axis. */
  x(axis, step) {
    if (axis === "step" || this.steps.length === 0) return step;
    return step < this.steps[0] ? 0 : this.xs(axis)[lastUpTo(this.steps, step)];
  }

  has(column) {
    return (this.columns[column] ?? []).some((value) => value !== null);
  }

  /** Of the newest step that has it, up to `step`. */
  evaluation(step) {
    return this.evaluations.filter((each) => each.step <= step).at(-1) ?? null;
  }
}
