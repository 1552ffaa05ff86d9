// The overview: whether it learns, the key figures, the steps to scrub through, and all charts. Live and in a report alike.

import { address } from "./address.js";
import { Chart, format } from "./charts.js";
import { colour, el, fill, isNumber, lastUpTo, percent, text } from "./dom.js";
import { heldOut } from "./runs.js";

/** What stands beside a key figure, below it, and whether it must catch the eye; by metric. */
const NOTES = {
  reward: (n, { verdict: { start, end, window, level } }) => ({
    below: isNumber(start) ? `${text(start)} → ${text(end)} (mean of ${window} steps)` : "of this step",
    state: level,
  }),
  accuracy: () => ({ below: "of training samples" }),
  completion_tokens: (n) => ({
    more: " tokens",
    below: isNumber(n.truncated) ? `${percent(n.truncated)} cut at the limit` : "mean of an answer",
    state: n.truncated > 0.5 ? "warn" : "",
  }),
  seconds: (n) => {
    const stages = Object.entries(n).filter(([name]) => name.startsWith("seconds."));
    const [name, most] = stages.reduce((a, b) => (b[1] > a[1] ? b : a), ["", 0]);
    return { below: most > 0 ? `${percent(most / n.seconds)} ${name.slice("seconds.".length)}` : "" };
  },
  zero_variance_groups: (n, { facts }) => {
    const groups = facts?.config?.["trainer.batch_size"];
    return {
      more: isNumber(groups) ? ` of ${groups}` : "",
      below: `no gradient; ${text(n.dropped)} groups dropped`,
      state: n.zero_variance_groups > 0.8 * groups && !(n.accuracy >= 0.95) ? "warn" : "",
    };
  },
  "update.entropy": (n) => ({ more: " nats", below: `clip fraction ${percent(n["update.clip_fraction"])}` }),
  "update.delta_logprob_current": (n) => ({
    below: `sample size ${text(n["update.effective_sample_size"])}, staleness ${text(n.staleness)}`,
    state: n.alarms > 0 ? "bad" : "",
  }),
};

/** The key figures of a step. */
function cards(numbers, data, step) {
  const metrics = Object.values(data.facts?.sections ?? {}).flat();
  const wanted = ({ name, card }) => data.has(name) && (card || (name === "update.loss" && !data.has("reward")));
  const found = metrics.filter(wanted).map((metric) => {
    const { more, below, state } = NOTES[metric.name]?.(numbers, data) ?? { below: "of this step" };
    return { title: metric.chart, value: format(metric)(numbers[metric.name]), more, below, state };
  });
  const evaluation = data.evaluation(step);
  if (evaluation) {
    const { what, value, error } = heldOut(evaluation);
    const passed = isNumber(evaluation.pass_at_k) ? `, pass@${evaluation.k} ${percent(evaluation.pass_at_k)}` : "";
    const below = `${error && "± standard error, "}${text(evaluation.num_samples)} problems at step ${text(evaluation.step)}${passed}`;
    found.splice(1, 0, { title: `Held-out ${what}`, value, more: error, below });
  }
  return found;
}

const AXES = { step: "steps", time: "hours", tokens: "tokens" };
const SMOOTHINGS = [1, 5, 20, 100];

export class Overview {
  /** `record(data, step)` answers `{step, time, numbers, notes}` or null, `csv(data)` all numbers of a run. */
  constructor(element, record, csv) {
    Object.assign(this, { record, csv });
    this.view = { runs: [], primary: null, step: null, from: 0, to: 1, zoomed: null, smoothing: 1, axis: "step", scheme: 0 };
    this.view.choose = (step) => this.choose(step);
    this.view.zoom = (span) => this.zoom(span);
    this.callbacks = [];
    this.onZoom = () => {};
    this.shown = null;
    this.verdicts = el("div", { role: "status" });
    this.charts = [];
    this.sections = [];
    this.figures = el("div", { class: "figures" });
    this.details = el("section", { class: "panel details" }, el("h2", {}, "Step"));
    this.note = el("p", { class: "missing" });
    this.build(element);
    new ResizeObserver(() => this.charts.forEach((chart) => chart.resize())).observe(this.main);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.view.scheme++;
      this.draw();
    });
  }

  build(element) {
    const place = el("div", { class: "charts" });
    this.constant = { summary: el("summary", {}), place };
    this.constant.section = el("details", { class: "group", id: "constant" }, this.constant.summary, place);
    this.constant.section.addEventListener("toggle", () => this.draw()); // they had no width before
    this.main = el("div", { class: "main" }, this.figures, this.scrubber(), this.constant.section, this.note);
    this.side = el("aside", { class: "side", "aria-label": "Services and the chosen step" }, this.details);
    element.append(this.verdicts, el("div", { class: "columns" }, this.main, this.side));
    document.addEventListener("keydown", (event) => this.pressed(event));
  }

  /** Makes the charts that the server names. */
  makeCharts(sections) {
    for (const [title, metrics] of Object.entries(sections)) {
      const first = this.sections.length === 0;
      const charts = metrics.filter(({ chart }) => chart).map((metric) => new Chart({ ...metric, first }, this.view));
      const place = el("div", { class: "charts" });
      const section = el("section", { class: first ? "group first" : "group" }, el("h2", {}, title), place);
      this.constant.section.before(section);
      this.charts.push(...charts);
      this.sections.push({ section, place, charts });
    }
  }

  scrubber() {
    const button = (label, title, act) => el("button", { type: "button", title, "aria-label": title, onclick: act }, label);
    this.slider = el("input", { type: "range", min: 0, max: 0, step: 1, "aria-label": "Step" });
    this.slider.addEventListener("input", () => this.choose(Number(this.slider.value)));
    this.marks = el("canvas", { class: "marks", "aria-hidden": "true" });
    this.number = el("output", { class: "number" });
    this.follow = button("newest", "Follow the newest step (L)", () => this.choose(null));
    this.reset = button("all steps", "Show all steps (0)", () => this.zoom(null));
    const choice = (name, label, options) => {
      const made = el("select", { "aria-label": label, name }, options.map(([value, said]) => el("option", { value }, said)));
      made.addEventListener("change", () => {
        address.set({ [name]: made.value === String(options[0][0]) ? "" : made.value });
        this.restore();
        this.draw();
      });
      return made;
    };
    this.axis = choice("x", "Horizontal axis", Object.entries(AXES).map(([name, said]) => [name, `by ${said}`]));
    this.smoothing = choice("smooth", "Smoothing", SMOOTHINGS.map((steps) => [steps, steps === 1 ? "not smoothed" : `over ${steps} steps`]));
    const download = button("CSV", "All numbers of this run as CSV", () => this.download());
    return el(
      "div",
      { class: "scrubber panel" },
      el("span", { class: "buttons" }, button("‹", "One step back (←)", () => this.move(-1)), button("›", "One step on (→)", () => this.move(1))),
      this.number,
      el("span", { class: "track" }, this.slider, this.marks),
      this.follow,
      this.reset,
      el("span", { class: "buttons choices" }, this.axis, this.smoothing, download),
    );
  }

  /** Shows these runs; the first is the one whose figures and steps are shown. */
  show(runs) {
    const before = this.view.primary;
    this.view.runs = runs;
    this.view.primary = runs[0] ?? null;
    if (before !== this.view.primary) this.shown = null;
    if (this.charts.length === 0) this.makeCharts(runs[0]?.facts?.sections ?? {});
    this.draw();
  }

  /** Takes step, zoom, axis and smoothing from the address. */
  restore() {
    const [from, to, smoothing] = ["from", "to", "smooth"].map((name) => address.whole(name));
    const zoomed = from !== null && to !== null && from < to ? [from, to] : null;
    this.view.axis = address.get("x") in AXES ? address.get("x") : "step";
    this.view.smoothing = SMOOTHINGS.includes(smoothing) ? smoothing : 1;
    Object.assign(this.axis, { value: this.view.axis });
    Object.assign(this.smoothing, { value: String(this.view.smoothing) });
    const moved = JSON.stringify(zoomed) !== JSON.stringify(this.view.zoomed);
    this.view.zoomed = zoomed;
    if (moved) this.onZoom(zoomed);
    const step = address.whole("step");
    if (step === this.view.step) return;
    this.view.step = step;
    this.callbacks.forEach((callback) => callback(step));
  }

  /** Hands the numbers of the run to the person as a file. */
  async download() {
    const { primary } = this.view;
    if (!primary) return;
    const place = URL.createObjectURL(new Blob([await this.csv(primary)], { type: "text/csv" }));
    el("a", { href: place, download: `${primary.name.replaceAll("/", "-")}.csv` }).click();
    setTimeout(() => URL.revokeObjectURL(place), 10000);
  }

  onStep(callback) {
    this.callbacks.push(callback);
  }

  choose(step) {
    const steps = this.view.primary?.steps ?? [];
    if (step !== null && steps.length) step = Math.min(Math.max(step, steps[0]), this.view.primary.newest);
    this.view.step = step;
    address.set({ step });
    this.callbacks.forEach((callback) => callback(step));
    this.charts.forEach((chart) => {
      chart.uplot?.redraw(false);
      if (!chart.element.hidden) chart.read();
    });
    this.scrub();
    this.look();
  }

  move(by) {
    const { primary, step } = this.view;
    if (primary?.steps.length) this.choose((step ?? primary.newest) + by);
  }

  zoom(span) {
    this.view.zoomed = span;
    address.set({ from: span?.[0], to: span?.[1] }, { push: true });
    this.draw();
    this.onZoom(span);
  }

  pressed(event) {
    const taken = event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog, [role=tab]");
    if (taken || this.main.offsetParent === null) return;
    const ends = { Home: this.view.primary?.steps[0], End: this.view.primary?.newest };
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") this.move((event.key === "ArrowLeft" ? -1 : 1) * (event.shiftKey ? 10 : 1));
    else if (event.key in ends && ends[event.key] !== undefined) this.choose(ends[event.key]);
    else if (event.key === "l" || event.key === "Escape") this.choose(null);
    else if (event.key === "0") this.zoom(null);
    else return;
    event.preventDefault();
  }

  /** Everything anew, from the data that is there. */
  draw() {
    const { runs, primary, zoomed } = this.view;
    const firsts = runs.flatMap((data) => [data.steps[0], data.evaluations[0]?.step]).filter(isNumber);
    const lasts = runs.flatMap((data) => [data.newest]).filter(isNumber);
    const { axis } = this.view;
    const span = zoomed ?? [Math.min(...firsts, 1), Math.max(...lasts, 2)];
    const xs = runs.flatMap((data) => (data.steps.length ? span.map((step) => data.x(axis, step)) : []));
    [this.view.from, this.view.to] = axis === "step" || !xs.length ? span : [Math.min(...xs), Math.max(...xs, Math.min(...xs) + 1e-6)];
    this.reset.hidden = zoomed === null;
    const constant = this.arrange();
    this.charts.forEach((chart) => {
      if (this.constant.section.open || !constant.includes(chart)) chart.update();
    });
    const absent = this.charts.filter((chart) => !chart.isThere() && !chart.what.name.startsWith("critic."));
    const names = absent.map((chart) => chart.what.chart).join(", ");
    this.note.textContent = primary?.steps.length && names ? `Not recorded in this run directory: ${names}.` : "";
    this.scrub();
    this.look();
  }

  /** Puts every chart into its section, those that never change into a folded one; returns the latter. */
  arrange() {
    const constant = this.charts.filter((chart) => chart.isThere() && chart.isConstant());
    const place = (parent, charts) => {
      const elements = charts.map((chart) => chart.element);
      if (elements.some((element, i) => parent.children[i] !== element) || parent.children.length !== elements.length) parent.replaceChildren(...elements);
    };
    for (const { section, place: parent, charts } of this.sections) {
      const here = charts.filter((chart) => !constant.includes(chart));
      place(parent, here);
      section.hidden = !here.some((chart) => chart.isThere());
    }
    place(this.constant.place, constant);
    this.constant.section.hidden = constant.length === 0;
    this.constant.summary.textContent = `Constant: ${constant.map((chart) => chart.constant()).join(", ")}`;
    return constant;
  }

  scrub() {
    const { primary, step } = this.view;
    const steps = primary?.steps ?? [];
    Object.assign(this.slider, { disabled: steps.length === 0, min: steps[0] ?? 0, max: primary?.newest ?? 0 });
    this.slider.value = step ?? primary?.newest ?? 0;
    const total = primary?.columns.total_steps?.findLast(isNumber);
    const shown = step ?? primary?.newest;
    this.number.textContent = isNumber(shown) ? `step ${shown.toLocaleString("en")}${total ? ` of ${total.toLocaleString("en")}` : ""}` : "no step yet";
    this.slider.setAttribute("aria-valuetext", this.number.textContent);
    this.follow.setAttribute("aria-pressed", String(step === null));
    this.mark(primary, steps);
  }

  /** Under the slider: red where there was an alarm, a tick at every evaluation. */
  mark(data, steps) {
    const { width, height } = this.marks.getBoundingClientRect();
    const ratio = devicePixelRatio;
    Object.assign(this.marks, { width: width * ratio, height: height * ratio });
    if (!steps.length || data.newest === steps[0]) return;
    const context = this.marks.getContext("2d");
    const at = (step) => 8 * ratio + ((step - steps[0]) / (data.newest - steps[0])) * (this.marks.width - 16 * ratio);
    context.fillStyle = colour("--muted");
    data.evaluations.filter((each) => each.step >= steps[0]).forEach((each) => context.fillRect(at(each.step), 0, ratio, this.marks.height));
    context.fillStyle = colour("--bad");
    steps.forEach((step, i) => {
      if (data.columns.alarms?.[i] > 0) context.fillRect(at(step) - ratio, 0, 2 * ratio, this.marks.height);
    });
  }

  /** Figures and details of the chosen step; of several that are asked for in a row, the last. */
  async look() {
    const { primary } = this.view;
    const step = this.view.step ?? primary?.newest ?? null;
    const key = primary && `${primary.run} ${primary.generation} ${step}`;
    this.say();
    if (key !== null && key === this.shown?.key) return this.write(this.shown.record);
    if (this.looking) {
      this.again = true;
      return undefined;
    }
    this.looking = true;
    const record = primary && step !== null ? await this.record(primary, step).catch(() => fromColumns(primary, step)) : null;
    this.looking = false;
    this.shown = { key, record };
    this.write(record);
    if (this.again) {
      this.again = false;
      return this.look();
    }
    return undefined;
  }

  /** Whether each run learns; with its name where there are several. */
  say() {
    const judged = this.view.runs.filter(({ verdict }) => verdict.text);
    const said = judged.map(({ name, verdict }) => [verdict.level, this.view.runs.length > 1 ? `${name}: ${verdict.text}` : verdict.text]);
    if (JSON.stringify(said) === this.verdicts.dataset.said) return;
    this.verdicts.dataset.said = JSON.stringify(said);
    fill(this.verdicts, said.map(([level, sentence]) => el("p", { class: `verdict ${level}` }, sentence)));
  }

  write(record) {
    const data = this.view.primary;
    const numbers = record?.numbers ?? {};
    const step = record?.step ?? this.view.step ?? Infinity;
    const figures = data ? cards(numbers, data, step) : [];
    this.figures.hidden = figures.length === 0;
    this.figures.style.setProperty("--columns", figures.length > 5 ? Math.ceil(figures.length / 2) : figures.length);
    this.figures.classList.toggle("uneven", figures.length > 5 && figures.length % 2 === 1);
    fill(
      this.figures,
      figures.map(({ title, value, more, below, state }) => {
        const value_ = el("span", { class: "value" }, value, el("small", {}, more ?? ""));
        return el("div", { class: `figure ${state ?? ""}` }, el("span", { class: "title" }, title), value_, el("span", { class: "below" }, below ?? ""));
      }),
    );
    fill(this.details, el("h2", {}, record ? `Step ${record.step.toLocaleString("en")}` : "Step", when(record?.time)), this.notes(record), table(numbers, data?.facts?.sections));
  }

  notes(record) {
    const found = record?.notes ?? [];
    return found.length ? el("ul", { class: "notes" }, found.map(({ kind, text: said }) => el("li", { class: kind }, el("b", {}, kind), ` ${said}`))) : null;
  }
}

function when(time) {
  return isNumber(time) ? el("time", { datetime: new Date(1000 * time).toISOString() }, new Date(1000 * time).toLocaleString()) : null;
}

/** What a number is, in a few words: the title of its chart, or the beginning of what the server says of it. */
function label({ chart, text: said, unit }) {
  const words = chart || said.split(/[:;,]/)[0];
  return unit && unit !== "share" ? `${words}, ${unit}` : words;
}

/** All numbers of a step, by what they belong to; `sections` describe them, as far as they are known. */
function table(numbers, sections = {}) {
  const known = new Map(Object.values(sections ?? {}).flat().map((metric) => [metric.name, metric]));
  const parts = new Map();
  for (const [name, value] of Object.entries(numbers)) {
    if (name === "time" || name.startsWith("alarm") || (name === "gpus" && value === 0)) continue;
    const [part, rest] = name.includes(".") ? [name.slice(0, name.indexOf(".")), name.slice(name.indexOf(".") + 1)] : ["", name];
    if (!parts.has(part)) parts.set(part, []);
    const metric = known.get(name);
    parts.get(part).push([metric ? label(metric) : rest.replaceAll("_", " "), value, metric?.text]);
  }
  return [...parts].map(([part, rows]) =>
    el(
      "table",
      {},
      part ? el("caption", {}, known.get(part)?.text ?? part.replaceAll("_", " ")) : null,
      el("tbody", {}, rows.map(([name, value, title]) => el("tr", {}, el("th", { scope: "row", title }, name), el("td", {}, text(value))))),
    ),
  );
}

/** The numbers of a step out of the columns of its run, where the line itself is not at hand. */
export function fromColumns(data, step) {
  const row = lastUpTo(data.steps, step);
  const numbers = {};
  for (const [name, values] of Object.entries(data.columns)) if (isNumber(values[row])) numbers[name] = values[row];
  return { step: data.steps[row], time: data.times[row], numbers };
}
