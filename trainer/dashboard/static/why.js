// The tab "Why": what `rlhf why` found about a run.

import { el, fill, percent, text } from "./dom.js";

/** Fills `element` with an answer of the call `why`; `open(step, id)` shows a group. */
export function showWhy(element, answer, open) {
  if (answer === null) {
    const said = "Nobody has asked yet. With the run's directory: ";
    return fill(element, el("p", { class: "missing" }, said, el("code", {}, "rlhf why RUN_DIR")));
  }
  const link = ([step, id], label = `step ${step}: ${id}`) => el("button", { type: "button", onclick: () => open(step, id) }, label);
  const causes = answer.causes.map((cause, i) =>
    el(
      "section",
      { class: "panel settings" },
      el("h2", {}, `${i === 0 ? "Likely cause" : "Also"}: ${cause.name}`),
      el("p", {}, cause.what),
      el("p", {}, `Remedy: ${cause.remedy}`),
      cause.groups.length > 0 && el("p", {}, cause.groups.map((place) => link(place))),
    ),
  );
  const cells = (row) => [percent(row.share), text(row.norm), text(row.without), row.rewards.map((reward) => text(reward)).join(" ")];
  const heads = ["problem", "share", "norm", "norm without it", "rewards"];
  const table = el(
    "table",
    {},
    el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
    el("tbody", {}, answer.groups.map((row) => el("tr", {}, el("th", { scope: "row" }, row.prompt, " ", link([row.step, row.id], "Open")), cells(row).map((cell) => el("td", {}, cell))))),
  );
  const carriers = el("section", { class: "panel settings" }, el("h2", {}, `Step ${answer.step}: what carries its update`), el("p", {}, answer.how), table, el("ul", {}, (answer.traits ?? []).map((trait) => el("li", {}, trait))));
  const changes = answer.changes.map((change) => el("p", {}, `Settings changed at ${change}`));
  fill(element, el("p", { class: "verdict warn" }, answer.jump ?? "No number jumps by more than chance."), causes, changes, answer.groups.length > 0 && carriers);
}
