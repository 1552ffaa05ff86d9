// A report: the overview of one run out of numbers that are in the file itself, its evaluations, answers and settings.

import { RunData } from "./data.js";
import { el, fill, isNumber, percent, text } from "./dom.js";
import { Overview, fromColumns } from "./overview.js";
import { showSettings } from "./settings.js";

const content = JSON.parse(document.getElementById("data").textContent);
const report = Object.assign(new RunData(content.run), { colour: 0, facts: content.facts });
report.take(content.series);

const place = document.getElementById("overview");
const look = async (data, step) => {
  const record = fromColumns(data, step);
  return { ...record, notes: content.notes.filter((note) => note.step === record.step) };
};
new Overview(place, look).show([report]);

/** A table with these titles; cells that are numbers stand right. */
function grid(title, heads, rows) {
  const cells = (row) => row.map((cell) => el("td", {}, typeof cell === "string" ? cell : text(cell)));
  const body = rows.map((row) => el("tr", {}, cells(row)));
  const head = el("thead", {}, el("tr", {}, heads.map((name) => el("th", { scope: "col" }, name))));
  return rows.length ? el("section", { class: "panel settings" }, el("h2", {}, title), el("table", {}, head, el("tbody", {}, body))) : null;
}

const evaluations = report.evaluations.map((each) => [
  text(each.step),
  `${percent(each.accuracy)}${isNumber(each.standard_error) ? ` ± ${(100 * each.standard_error).toFixed(1)}` : ""}`,
  text(each.num_samples),
  isNumber(each.pass_at_k) ? `${percent(each.pass_at_k)} of ${each.k}` : "–",
]);
const verdict = (right) => (right ? "right" : "wrong");
const answers = content.answers.map((each) => [
  `${each.prompt}\n(${each.ground_truth})`,
  `${each.before}\n[${verdict(each.was_right)}]`,
  `${each.after}\n[${verdict(each.is_right)}]`,
]);
const notes = content.notes.map((note) => [text(note.step), note.kind, note.text]);

fill(
  document.getElementById("tables"),
  content.problems.length ? el("ul", { class: "verdict warn problems" }, content.problems.map((problem) => el("li", {}, problem))) : null,
  grid("Evaluations", ["step", "held-out accuracy", "problems", "pass@k"], evaluations),
  grid("Answers before and after", ["problem", "first evaluation", "last evaluation"], answers),
  grid("What the trainer said", ["step", "", ""], notes),
);
showSettings(document.getElementById("settings"), [report]);
