// The settings of the runs that are shown; where they differ comes first.

import { el, fill } from "./dom.js";

/** `{"trainer": {"port": 1}}` as [["trainer.port", "1"]]. */
function flat(config, prefix = "") {
  return Object.entries(config ?? {}).flatMap(([name, value]) =>
    value !== null && typeof value === "object" && !Array.isArray(value) ? flat(value, `${prefix}${name}.`) : [[prefix + name, JSON.stringify(value)]],
  );
}

/** Fills `element` with a table of all settings, a column for each run. */
export function showSettings(element, runs) {
  const columns = runs.map((data) => new Map(flat(data.facts?.config)));
  const names = [...new Set(columns.flatMap((column) => [...column.keys()]))];
  const differs = (name) => new Set(columns.map((column) => column.get(name))).size > 1;
  const rows = (chosen) =>
    chosen.map((name) => el("tr", {}, el("th", { scope: "row" }, name), columns.map((column) => el("td", {}, column.get(name) ?? "–"))));
  const table = (title, chosen) =>
    chosen.length === 0
      ? null
      : el(
          "section",
          { class: "panel settings" },
          el("h2", {}, title),
          el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "setting"), runs.map((data) => el("th", { scope: "col" }, data.name)))), el("tbody", {}, rows(chosen))),
        );
  const missing = names.length ? null : el("p", { class: "missing" }, "No settings are known: config.json is missing or damaged.");
  fill(element, table("Where these runs differ", names.filter(differs)), table("Settings", names.filter((name) => !differs(name))), missing);
}
