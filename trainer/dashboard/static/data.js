// The numbers of one run as the server answers them.

import { isNumber, lastUpTo } from "./dom.js";

export const POINTS = 600;
const HOUR = 3600;

export class RunData {
  constructor({ run, name, directory, live }) {
    Object.assign(this, { run, name, directory, live, facts: null, colour: null, verdict: { level: "none", text: "" } });
    Object.assign(this, { problems: [], span: null, summary: null, generation: -1, newest: null });
    Object.assign(this, { steps: [], times: [], columns: {}, low: null, high: null, evaluations: [] });
  }

  /** Shows the steps of `span` alone, as they are; null: all. Returns whether something has to be asked for. */
  zoom(span) {
    if (span === this.span || (span !== null && this.span === null && this.low === null)) return false;
    this.span = span;
    this.generation = -1;
    return true;
  }

  /** What to ask for. */
  question() {
    const [first, last] = this.span ?? [];
    return { run: this.run, known: this.generation, first, last, points: this.span ? 2 * POINTS : POINTS };
  }

  /** Takes the answer to `question()`; returns whether anything is new. */
  take(answer) {
    if (answer.generation === this.generation) return false;
    Object.assign(this, { low: null, high: null, ...answer });
    return true;
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
