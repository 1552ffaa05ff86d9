// The tab "Runs": what each run is and how far it came, which to lay over each other, and notes that are kept with it.

import { swatch } from "./charts.js";
import { duration, el, fill, isNumber, palette, percent, text } from "./dom.js";

const FEW_CHANGES = 4;
const COLUMNS = ["model.name", "data.source", "algorithm.name"]; // which have a column of their own
const last = (path) => path?.split("/").filter(Boolean).slice(-2).join("/") ?? "–";

/** Wall time of all steps, and what it took of GPUs, as far as it is known. */
export function cost({ hours, gpu_hours: held }) {
  const gpus = held === 0 ? ", no GPU" : isNumber(held) ? `, ${text(held)} GPU-hours` : "";
  return duration(3600 * hours) + gpus;
}

/** How good an evaluation was: what was measured, the number, and its standard error; that is 0, and says nothing, where all answers are alike. */
export function heldOut({ accuracy, standard_error: error, mean_reward: reward, loss }) {
  if (isNumber(accuracy)) return { what: "accuracy", value: percent(accuracy), error: error > 0 ? ` ± ${(100 * error).toFixed(1)}` : "" };
  return isNumber(reward) ? { what: "reward", value: text(reward), error: "" } : { what: "loss", value: text(loss), error: "" };
}

/** The same as text. */
export function result(evaluation) {
  if (!evaluation) return "–";
  const { what, value, error } = heldOut(evaluation);
  return what === "accuracy" ? value + error : `${what} ${value}`;
}

export class RunsTable {
  /** `actions` has `choose(run, tab)`, `overlay(run, wanted)` and `keep(index, note)`. */
  constructor(element, actions) {
    Object.assign(this, { actions, shown: "", editing: null });
    this.element = element;
  }

  show(runs, primary, overlaid) {
    const now = JSON.stringify([runs.map((data) => ({ ...data.summary, problems: 0 })), primary?.run, overlaid.map((data) => data.run)]);
    if (now === this.shown || this.editing !== null) return;
    this.shown = now;
    this.runs = runs;
    const heads = ["", "Run", "State", "Model", "Data", "Recipe", "Step", "Held-out", "Reward, last 10 steps", "Cost", "Changed settings", "Note"];
    const focused = document.activeElement?.closest?.("[data-run]")?.dataset.run;
    fill(
      this.element,
      el("p", { class: "missing" }, "Open a run by its name; the boxes lay runs over each other in the overview."),
      el(
        "table",
        { class: "runs" },
        el("caption", { class: "unseen" }, "Runs"),
        el("thead", {}, el("tr", {}, heads.map((name) => (name ? el("th", { scope: "col" }, name) : el("td", {}))))),
        el("tbody", {}, runs.filter((data) => data.summary).map((data) => this.row(data, data === primary, overlaid.includes(data)))),
      ),
    );
    if (focused) this.element.querySelector(`[data-run="${focused}"] button`)?.focus();
  }

  row(data, first, overlaid) {
    const { summary } = data;
    const box = el("input", { type: "checkbox", checked: overlaid, disabled: first, "aria-label": `Lay ${data.name} over the others` });
    box.addEventListener("change", () => this.actions.overlay(data, box.checked));
    const open = el("button", { type: "button", class: "link", onclick: () => this.actions.choose(data, "overview") }, data.name);
    const total = summary.total_steps ? ` of ${text(summary.total_steps)}` : "";
    const cell = (label, ...content) => el("td", { "data-label": label }, ...content);
    return el(
      "tr",
      { "data-run": data.run, "aria-current": first ? "true" : null },
      el("td", {}, el("label", { class: "box" }, box, overlaid && swatch(palette(data.colour)))),
      el("th", { scope: "row", title: summary.directory }, open),
      cell("State", el("span", { class: `state ${summary.state}` }, summary.state)),
      cell("Model", el("span", { title: summary.model ?? "" }, last(summary.model))),
      cell("Data", el("span", { title: summary.data ?? "" }, last(summary.data))),
      cell("Recipe", summary.recipe ?? "–"),
      cell("Step", summary.step === null ? "–" : `${text(summary.step)}${total}`),
      cell("Held-out", result(summary.held_out)),
      cell("Reward, last 10 steps", text(summary.reward)),
      cell("Cost", cost(summary)),
      cell("Changed settings", this.changes(summary.changed)),
      cell("Note", this.note(data)),
    );
  }

  /** Where this run is not like all others first; the rest on demand. */
  changes(changed) {
    const values = (name) => new Set(this.runs.map((data) => JSON.stringify(data.summary?.changed[name])));
    const names = Object.keys(changed).filter((name) => !COLUMNS.includes(name)).sort((a, b) => (values(b).size > 1) - (values(a).size > 1));
    const line = (name) => el("li", {}, `${name} `, el("b", {}, short(changed[name])));
    const rest = names.slice(FEW_CHANGES);
    return [
      el("ul", { class: "changes" }, names.slice(0, FEW_CHANGES).map(line)),
      rest.length > 0 && el("details", {}, el("summary", {}, `${rest.length} more`), el("ul", { class: "changes" }, rest.map(line))),
    ];
  }

  note(data) {
    const { note } = data.summary;
    const edit = el("button", { type: "button", "aria-label": `${note ? "Edit" : "Add a note"} about ${data.name}` }, note ? "Edit" : "Add a note");
    const place = el("div", { class: "note-text" }, note, " ", edit);
    edit.addEventListener("click", () => {
      this.editing = data.run;
      const field = el("textarea", { rows: 4, maxlength: 20000, "aria-label": `Note about ${data.name}` });
      field.value = note;
      const said = el("span", { role: "alert", class: "viewer-bad" });
      const done = () => {
        this.editing = null;
        this.shown = "";
      };
      const keep = async () => {
        try {
          await this.actions.keep(data.run, field.value);
          data.summary.note = field.value;
          done();
          place.replaceWith(this.note(data));
        } catch (error) {
          said.textContent = error.message;
        }
      };
      const drop = () => {
        done();
        place.replaceWith(this.note(data));
      };
      fill(place, field, el("button", { type: "button", onclick: keep }, "Keep"), el("button", { type: "button", onclick: drop }, "Cancel"), said);
      field.focus();
    });
    return place;
  }
}

function short(value) {
  const said = typeof value === "string" ? value : JSON.stringify(value);
  return said.length > 40 ? `${said.slice(0, 38)}…` : said;
}
