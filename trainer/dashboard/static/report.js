// A report: the overview of one run out of numbers that are in the file itself, its evaluations, answers and settings.

import { RunData } from "./data.js";
import { el, fill, isNumber, percent, text } from "./dom.js";
import { Overview, fromColumns } from "./overview.js";
import { cost, result } from "./runs.js";
import { showSettings } from "./settings.js";

const content = JSON.parse(document.getElementById("data").textContent);
const report = Object.assign(new RunData(content.run), { colour: 0, facts: content.facts });
report.take(content.series);

const place = document.getElementById("overview");
const look = async (data, step) => {
  const record = fromColumns(data, step);
  return { ...record, notes: content.notes.filter((note) => note.step === record.step) };
};
const overview = new Overview(place, look, csv);
overview.restore();
overview.show([report]);

/** The numbers of the charts, for a table of one's own; the run directory has every step. */
function csv({ steps, columns }) {
  const names = Object.keys(columns).sort();
  return [["step", ...names.map(quoted)], ...steps.map((step, i) => [step, ...names.map((name) => columns[name][i] ?? "")])].map((row) => row.join(",")).join("\r\n");
}

/** A name as a cell that no spreadsheet takes for a formula. */
function quoted(name) {
  const safe = /^[=+\-@\t\r]/.test(name) ? `'${name}` : name;
  return /[,"\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

/** What one would say about the run in a few lines. */
function summary({ model, data, recipe, step, total_steps: total, state, note, changed, ...more }) {
  const [first, newest] = [content.series.evaluations[0], content.series.evaluations.at(-1)];
  const before = first && newest && first !== newest ? `${result(first)} → ${result(newest)}` : result(newest);
  const rows = [
    ["Model", model ?? "–"],
    ["Data", data ?? "–"],
    ["Recipe", recipe ?? "–"],
    ["Steps", step === null ? "none" : `${text(step)}${total ? ` of ${text(total)}` : ""}, ${state}`],
    ["Held-out", before],
    ["Reward", report.verdict.text || `${text(more.reward)} (mean of the last 10 steps)`],
    ["Cost", cost(more)],
    ["Changed settings", Object.entries(changed).map(([name, value]) => `${name} ${JSON.stringify(value)}`).join("\n") || "none"],
    ...(note ? [["Note", note]] : []),
  ];
  const lines = rows.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]);
  return el("section", { class: "panel summary" }, el("h2", {}, "The run"), el("dl", {}, lines));
}

fill(document.getElementById("summary"), summary(content.run));

/** A table with these titles; cells that are numbers stand right. */
function grid(title, heads, rows) {
  const cells = (row) => row.map((cell) => el("td", {}, typeof cell === "string" ? cell : text(cell)));
  const body = rows.map((row) => el("tr", {}, cells(row)));
  const head = el("thead", {}, el("tr", {}, heads.map((name) => el("th", { scope: "col" }, name))));
  return rows.length ? el("section", { class: "panel settings" }, el("h2", {}, title), el("table", {}, head, el("tbody", {}, body))) : null;
}

const evaluations = report.evaluations.map((each) => [
  text(each.step),
  result(each),
  text(each.num_samples),
  isNumber(each.pass_at_k) ? `${percent(each.pass_at_k)} of ${each.k}` : "–",
]);
const verdict = (right) => ({ true: "\n[right]", false: "\n[wrong]" })[right] ?? "";
const answers = content.answers.map((each) => [
  `${each.prompt}\n(${each.ground_truth})`,
  `${each.before}${verdict(each.was_right)}`,
  `${each.after}${verdict(each.is_right)}`,
]);
const samples = content.samples.map((each) => [`${each.prompt}\n(${each.ground_truth})`, `${each.text}${verdict(each.correct)}`, text(each.reward)]);
const notes = content.notes.map((note) => [text(note.step), note.kind, note.text]);

fill(
  document.getElementById("tables"),
  content.problems.length ? el("ul", { class: "verdict warn problems" }, content.problems.map((problem) => el("li", {}, problem))) : null,
  grid("Evaluations", ["step", "held-out", "problems", "pass@k"], evaluations),
  grid("Answers before and after", ["problem", "first evaluation", "last evaluation"], answers),
  grid(`Samples of step ${content.samples[0]?.step}`, ["problem", "completion", "reward"], samples),
  grid("What the trainer said", ["step", "", ""], notes),
);
showSettings(document.getElementById("settings"), [report]);
