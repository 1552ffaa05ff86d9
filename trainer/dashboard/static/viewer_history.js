// The same prompt in other steps: a bar for the reward of every completion.

import { el } from "./dom.js";
import { short } from "./viewer_text.js";

const SVG = "http://www.w3.org/2000/svg";

/** The groups of the prompt by step; `open(row)` shows another one. */
export function acrossSteps(group, history, open) {
  if (history.length === 0) return null;
  const rewards = history.flatMap((row) => row.rewards).filter((reward) => reward !== null);
  const [low, high] = [Math.min(0, ...rewards), Math.max(1, ...rewards)];
  const multiples = history.map((row) => {
    const here = row.id === group.id && row.step === group.step;
    const step = `step ${row.step}`;
    const said = row.completions === null || row.correct === null ? "" : `, ${short(row.correct)} of ${row.completions} right`;
    const label = `${step}: mean reward ${short(row.reward)}${said}${row.reason ? `, dropped: ${row.reason}` : ""}`;
    return el(
      "li",
      {},
      el(
        "button",
        { type: "button", title: label, "aria-current": here && "true", onclick: () => open(row) },
        el("span", {}, step),
        bars(row, low, high),
        el("span", { class: row.reason ? "viewer-bad" : "" }, row.reason || short(row.reward, 2)),
      ),
    );
  });
  return el(
    "section",
    { class: "viewer-history", "aria-label": "This prompt across steps" },
    el("h4", {}, `This prompt across steps (${history.length})`),
    el("p", { class: "viewer-muted" }, "A bar for the reward of every completion."),
    el("ol", {}, multiples),
  );
}

/** A bar for every reward. */
function bars(row, low, high) {
  const [width, height] = [64, 32];
  const image = document.createElementNS(SVG, "svg");
  image.setAttribute("viewBox", `0 0 ${width} ${height}`);
  image.setAttribute("aria-hidden", "true");
  const place = (reward) => height - 1 - ((reward - low) / (high - low)) * (height - 2);
  const step = width / Math.max(1, row.rewards.length);
  row.rewards.forEach((reward, i) => {
    const bar = document.createElementNS(SVG, "rect");
    const [top, bottom] = reward === null ? [0, height] : [place(Math.max(0, reward)), place(Math.min(0, reward)) + 1];
    const size = { x: i * step, y: top, width: Math.max(0.5, step - 1), height: Math.max(1, bottom - top) };
    Object.entries(size).forEach(([name, value]) => bar.setAttribute(name, value));
    bar.setAttribute("class", reward === null ? "viewer-ungraded" : "viewer-reward");
    image.append(bar);
  });
  return image;
}
