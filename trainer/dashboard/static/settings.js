// The settings of the runs that are shown: where they differ first, then what was changed, all others on demand.

import { el, fill } from "./dom.js";

/** Fills `element` with tables of settings, a column for each run. */
export function showSettings(element, runs) {
  const configs = runs.map((data) => data.facts?.config ?? {});
  const names = [...new Set(configs.flatMap(Object.keys))];
  const value = (config, name) => JSON.stringify(config[name]) ?? "–";
  const differs = (name) => new Set(configs.map((config) => value(config, name))).size > 1;
  const changed = (name) => runs.some((data) => name in (data.facts?.changed ?? {}));
  const different = names.filter((name) => runs.length > 1 && differs(name));
  const own = names.filter((name) => !different.includes(name) && changed(name));
  const others = names.filter((name) => !different.includes(name) && !own.includes(name));
  const table = (chosen) =>
    el(
      "table",
      {},
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "setting"), runs.map((data) => el("th", { scope: "col" }, data.name)))),
      el("tbody", {}, chosen.map((name) => el("tr", {}, el("th", { scope: "row" }, name), configs.map((config) => el("td", {}, value(config, name)))))),
    );
  const section = (title, chosen) => (chosen.length ? el("section", { class: "panel settings" }, el("h2", {}, title), table(chosen)) : null);
  const rest = others.length ? el("details", { class: "panel settings" }, el("summary", {}, `${others.length} settings at their defaults`), table(others)) : null;
  const missing = names.length ? null : el("p", { class: "missing" }, "No settings are known: config.json is missing or damaged.");
  fill(element, section("Where these runs differ", different), section("Changed from the defaults", own), rest, missing);
}
