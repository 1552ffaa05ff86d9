// A chart of one metric, drawn with uPlot. All share their steps, their cursor and the chosen step. Which there are, and where
// alarms begin, comes from the server.

import { colour, duration, el, fill, isNumber, lastUpTo, palette, percent, text, tick } from "./dom.js";

const HEIGHT = 136;
const STAGES = [7, 0, 1, 2, 3, 5, 6, 4]; // of the palette: waiting is grey, and nothing is red first

/** Exponentially smoothed over about `steps` rows; missing values stay missing. */
function smoothed(values, steps) {
  const keep = Math.exp(-1 / steps);
  let sum = 0;
  let weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = keep * sum + value;
    weight = keep * weight + 1;
    return sum / weight;
  });
}

/** How the numbers of a metric are written. */
export const format = ({ unit }) => ({ share: percent, seconds: duration })[unit] ?? text;

/** One chart in its frame: a metric as the server describes it, with `first` if it is shown even if nothing changes. `view` is what all share: `runs`, `primary`, `step`, `from`, `to`, `smoothing`, `choose`, `zoom`. */
export class Chart {
  constructor(what, view) {
    this.what = what;
    this.view = view;
    this.format = format(what);
    this.stack = what.name === "seconds"; // drawn by stage
    this.values = el("span", { class: "values" });
    this.plot = el("div", { class: "plot", role: "img" });
    this.note = el("span", { class: "note" });
    const title = el("figcaption", {}, el("b", {}, what.chart), el("span", { class: "unit" }, what.unit === "share" ? "" : what.unit), this.note, this.values);
    this.element = el("figure", { class: "chart" }, title, this.plot);
    this.uplot = null;
    this.series = [];
    this.shape = "";
    this.zoomed = 0;
  }

  /** Whether any of the runs has something to draw. */
  isThere() {
    return this.view.runs.some((data) => this.names(data).length > 0);
  }

  /** Whether the same number is all there is to see. */
  isConstant() {
    if (this.what.first) return false;
    return this.view.runs.every((data) => {
      const values = this.names(data).map((name) => new Set(data.columns[name].filter((value) => value !== null)));
      return values.every((each) => each.size < 2) && (data.low === null || values.every((each) => each.has(0)));
    });
  }

  /** Its title with the number that it always has. */
  constant() {
    const [data] = this.view.runs;
    const value = data?.columns[this.names(data)[0]]?.find(isNumber);
    return `${this.what.chart}${this.view.runs.length === 1 && isNumber(value) ? ` ${this.format(value)}` : ""}`;
  }

  /** Columns of a run that this chart shows. */
  names(data) {
    const { name } = this.what;
    if (!this.stack) return data.has(name) ? [name] : [];
    const stages = (data.facts?.stages ?? []).map((stage) => `seconds.${stage}`);
    return stages.filter((stage) => data.columns[stage]?.some((value) => value > 0));
  }

  limit() {
    return this.view.primary?.facts?.limits?.[this.what.name] ?? null;
  }

  /** The tables of uPlot: one per run, and how each of their columns is drawn. */
  tables() {
    return this.stack ? this.stacked() : this.lines();
  }

  lines() {
    const tables = [];
    const series = [];
    const several = this.view.runs.length > 1;
    for (const data of this.view.runs) {
      const columns = [data.xs(this.view.axis)];
      for (const name of this.names(data)) {
        const raw = data.columns[name];
        const stroke = palette(data.colour);
        const label = several ? data.name : "";
        columns.push(raw);
        if (this.view.smoothing > 1) {
          columns.push(smoothed(raw, this.view.smoothing));
          series.push({ stroke: `${stroke}55`, width: 1, hidden: true, data, name });
        }
        series.push({ stroke, width: this.view.smoothing > 1 ? 1.75 : 1.5, label, data, name });
      }
      tables.push(columns);
    }
    return { tables, series };
  }

  stacked() {
    const data = this.view.primary;
    const names = data ? this.names(data) : [];
    let below = Array(data?.steps.length ?? 0).fill(0);
    const layers = names.map((name, i) => {
      below = below.map((value, row) => value + (data.columns[name][row] ?? 0));
      const label = name.slice("seconds.".length);
      const stroke = palette(STAGES[i % STAGES.length]);
      return { column: below, series: { stroke, fill: stroke, width: 0, label, data, name, bars: true } };
    });
    layers.reverse(); // the whole first, so that smaller sums are drawn over it
    return { tables: [[data?.xs(this.view.axis) ?? [], ...layers.map((layer) => layer.column)]], series: layers.map((layer) => layer.series) };
  }

  /** Draws what is there now. */
  update() {
    this.element.hidden = !this.isThere();
    if (this.element.hidden) return;
    const { tables, series } = this.tables();
    this.series = series;
    const joined = tables.length > 1 ? uPlot.join(tables) : tables[0];
    const width = this.plot.clientWidth || 300;
    const shape = JSON.stringify([series.map((each) => [each.stroke, each.width, each.label]) , this.view.scheme, this.view.axis]);
    if (this.uplot === null || shape !== this.shape) {
      this.uplot?.destroy();
      this.shape = shape;
      this.uplot = new uPlot(this.options(width), joined, this.plot);
      this.uplot.over.addEventListener("click", () => this.clicked());
    } else {
      this.uplot.setData(joined);
    }
    const limit = this.limit();
    this.note.textContent = limit ? `alarm ${limit.above ? "above" : "below"} ${text(limit.value)}` : "";
    this.read();
  }

  resize() {
    const width = this.plot.clientWidth;
    if (this.uplot && width && width !== this.uplot.width) this.uplot.setSize({ width, height: HEIGHT });
  }

  options(width) {
    const font = `11px ${getComputedStyle(document.body).fontFamily}`;
    const axis = { stroke: colour("--muted"), font, ticks: { show: false }, grid: { stroke: colour("--line"), width: 1 } };
    return {
      width,
      height: HEIGHT,
      padding: [8, 16, 0, 0], // room for half of the last label
      legend: { show: false },
      scales: { x: { time: false, range: () => [this.view.from, this.view.to] }, y: { range: (u, low, high) => this.range(low, high) } },
      axes: [
        { ...axis, size: 26, gap: 7, space: 60, grid: { show: false }, values: (u, splits) => splits.map(tick), incrs: this.view.axis !== "step" ? undefined : [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5] },
        { ...axis, gap: 5, space: 28, size: 52, values: (u, splits) => splits.map((value) => (this.format === percent ? `${tick(100 * value)} %` : tick(value))) },
      ],
      cursor: {
        sync: { key: "steps" },
        y: false,
        points: { size: 5 },
        drag: { x: true, y: false, setScale: false },
        bind: { dblclick: () => () => this.view.zoom(null) },
      },
      series: [
        {},
        ...this.series.map((each) => ({
          stroke: each.stroke,
          fill: each.fill,
          width: each.width,
          spanGaps: this.view.runs.length > 1,
          points: { show: each.bars || each.hidden ? false : (u, i) => this.isLonely(u, i) },
          paths: each.bars ? uPlot.paths.bars({ size: [1, 64], gap: 1 }) : undefined,
        })),
      ],
      hooks: {
        drawClear: [() => this.under()],
        draw: [() => this.over()],
        setCursor: [() => this.read()],
        setSelect: [(u) => this.selected(u)],
      },
    };
  }

  /** A few points are shown as such: a line of one step cannot be seen. */
  isLonely(u, i) {
    return u.data[i].filter((value) => value !== null && value !== undefined).length < 24;
  }

  range(low, high) {
    if (this.what.held_out === "accuracy") return [0, 1.04];
    const include = (value) => {
      low = low === null ? value : Math.min(low, value);
      high = high === null ? value : Math.max(high, value);
    };
    for (const data of this.view.runs) {
      for (const each of this.what.held_out ? data.evaluations : []) {
        const value = this.evaluated(each);
        const x = data.x(this.view.axis, each.step);
        if (value !== null && x >= this.view.from && x <= this.view.to) include(value);
      }
      for (const part of [data.low, data.high]) {
        if (part === null || this.stack) continue;
        for (const name of this.names(data)) {
          for (let i = 0; i < data.steps.length; i++) {
            const value = part[name][i];
            const x = data.xs(this.view.axis)[i];
            if (value === null || x < this.view.from || x > this.view.to) continue;
            include(value);
          }
        }
      }
    }
    if (low === null || high === null) return [0, 1];
    const limit = this.limit()?.value;
    if (limit !== undefined && limit <= 3 * high && limit >= low / 3) [low, high] = [Math.min(low, limit), Math.max(high, limit)];
    if (low === high) return low === 0 ? [0, 1] : [low - Math.abs(low) / 10, high + Math.abs(high) / 10];
    const space = (high - low) / 12;
    const zero = low >= 0 && low < (high - low) / 2;
    return [zero || this.stack ? 0 : low - space, high + space];
  }

  /** Below the lines: where alarms begin, and the span of steps that were put together. */
  under() {
    const u = this.uplot;
    if (!u) return;
    const { ctx } = u;
    const { left, top, width, height } = u.bbox;
    ctx.save();
    ctx.beginPath();
    ctx.rect(left, top, width, height);
    ctx.clip();
    const limit = this.limit();
    if (limit) {
      const edge = u.valToPos(limit.value, "y", true);
      ctx.fillStyle = `${colour("--bad")}1c`;
      if (limit.above) ctx.fillRect(left, top, width, edge - top);
      else ctx.fillRect(left, edge, width, top + height - edge);
      ctx.strokeStyle = `${colour("--bad")}99`;
      ctx.setLineDash([6, 4]);
      ctx.beginPath();
      ctx.moveTo(left, edge);
      ctx.lineTo(left + width, edge);
      ctx.stroke();
    }
    if (!this.stack) this.view.runs.forEach((data) => this.span(ctx, data));
    ctx.restore();
  }

  span(ctx, data) {
    const u = this.uplot;
    const [name] = this.names(data);
    if (data.low === null || name === undefined) return;
    const xs = data.xs(this.view.axis);
    const at = (i, values) => [u.valToPos(xs[i], "x", true), u.valToPos(values[i], "y", true)];
    const rows = data.steps.map((_, i) => i).filter((i) => data.low[name][i] !== null);
    ctx.beginPath();
    rows.forEach((i) => ctx.lineTo(...at(i, data.high[name])));
    rows.reverse().forEach((i) => ctx.lineTo(...at(i, data.low[name])));
    ctx.closePath();
    ctx.fillStyle = `${palette(data.colour)}33`;
    ctx.fill();
  }

  /** Over the lines: evaluations, steps with an alarm, the chosen step. */
  over() {
    const u = this.uplot;
    if (!u) return;
    const { ctx } = u;
    const { left, top, width, height } = u.bbox;
    const ratio = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(left - 4, top, width + 8, height);
    ctx.clip();
    if (this.view.step !== null) {
      const x = u.valToPos(this.view.primary.x(this.view.axis, this.view.step), "x", true);
      ctx.strokeStyle = colour("--accent");
      ctx.lineWidth = ratio;
      ctx.beginPath();
      ctx.moveTo(x, top);
      ctx.lineTo(x, top + height);
      ctx.stroke();
    }
    if (this.what.held_out) this.view.runs.forEach((data, i) => this.drawEvaluations(ctx, data, i, ratio));
    const alarm = this.limit()?.alarm;
    for (const data of alarm ? this.view.runs : []) {
      const [name] = this.names(data);
      ctx.fillStyle = colour("--bad");
      data.steps.forEach((step, i) => {
        if (!data.columns[`alarm.${alarm}`]?.[i] || data.columns[name]?.[i] == null) return;
        ctx.beginPath();
        ctx.arc(u.valToPos(data.x(this.view.axis, step), "x", true), u.valToPos((data.high ?? data.columns)[name][i], "y", true), 2.5 * ratio, 0, 7);
        ctx.fill();
      });
    }
    ctx.restore();
  }

  drawEvaluations(ctx, data, index, ratio) {
    const u = this.uplot;
    ctx.strokeStyle = ctx.fillStyle = this.view.runs.length > 1 ? palette(data.colour) : palette(1);
    ctx.lineWidth = 1.5 * ratio;
    for (const each of data.evaluations) {
      const value = this.evaluated(each);
      if (value === null) continue;
      const x = u.valToPos(data.x(this.view.axis, each.step), "x", true);
      const error = this.what.held_out === "accuracy" ? (each.standard_error ?? 0) : 0;
      const [low, high] = [value - error, value + error].map((value) => u.valToPos(value, "y", true));
      ctx.beginPath();
      ctx.moveTo(x, low);
      ctx.lineTo(x, high);
      for (const y of [low, high]) {
        ctx.moveTo(x - 4 * ratio, y);
        ctx.lineTo(x + 4 * ratio, y);
      }
      ctx.stroke();
      ctx.beginPath();
      ctx.arc(x, u.valToPos(value, "y", true), 3 * ratio, 0, 7);
      ctx.fill();
    }
  }

  /** The number of an evaluation that belongs here; null: none. */
  evaluated(evaluation) {
    const value = evaluation[this.what.held_out];
    return isNumber(value) ? value : null;
  }

  /** The values under the cursor, at the chosen step, or of the newest one. */
  read() {
    const cursor = this.uplot?.cursor;
    const hovered = cursor && cursor.left >= 0 ? this.stepAt(cursor.left) : null;
    const shown = [];
    for (const each of [...this.series].reverse()) {
      if (each.hidden || each.data.steps.length === 0) continue;
      const steps = each.data.steps;
      const step = hovered === null ? (this.view.step ?? steps.at(-1)) : hovered;
      const value = each.data.columns[each.name]?.[lastUpTo(steps, step)];
      shown.push([each.stroke, each.label, this.format(value)]);
    }
    if (!this.stack) shown.reverse();
    const plain = shown.length === 1 && !shown[0][1];
    fill(this.values, ...shown.map(([stroke, label, value]) => el("span", {}, plain ? null : swatch(stroke), label ? `${label} ` : "", el("b", {}, value))));
    if (this.what.held_out) this.readEvaluations(hovered);
    this.plot.setAttribute("aria-label", `${this.what.chart}: ${shown.map(([, label, value]) => `${label} ${value}`.trim()).join(", ")}`);
  }

  /** The newest evaluation of every run up to that step, beside the dots of its colour. */
  readEvaluations(hovered) {
    const step = hovered === null ? (this.view.step ?? Infinity) : hovered;
    const several = this.view.runs.length > 1;
    for (const data of this.view.runs) {
      const found = data.evaluation(step);
      const value = found ? this.evaluated(found) : null;
      if (value === null) continue;
      const stroke = palette(several ? data.colour : 1);
      this.values.append(el("span", { title: data.name }, swatch(stroke, true), "held-out ", el("b", {}, this.format(value))));
    }
  }

  selected(u) {
    if (u.select.width < 3) return;
    const [from, to] = [u.select.left, u.select.left + u.select.width].map((left) => this.stepAt(left, false));
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.zoomed = performance.now();
    this.view.zoom([Math.floor(from), Math.ceil(to)]);
  }

  clicked() {
    const left = this.uplot.cursor.left;
    if (left < 0 || performance.now() - this.zoomed < 250) return; // it was the end of a drag
    this.view.choose(this.stepAt(left));
  }

  /** The step at a place of the plot. */
  stepAt(left, whole = true) {
    const x = this.uplot.posToVal(left, "x");
    if (this.view.axis === "step") return whole ? Math.round(x) : x;
    const { primary } = this.view;
    return primary.steps[lastUpTo(primary.xs(this.view.axis), x)] ?? 1;
  }
}

export function swatch(background, round = false) {
  const made = el("i", { class: round ? "swatch round" : "swatch", "aria-hidden": "true" });
  made.style.background = background;
  return made;
}
