// One group: its prompt, its completions side by side, and the same prompt in other steps.

import { SHADES, el, legend, prose, short, tokens, visible } from "./viewer_text.js";

const SVG = "http://www.w3.org/2000/svg";
let shown = "rollout"; // stays from group to group

/**
 * The view of a group. `history` are rows of the same prompt by step; `open(row)` shows another one, `close()` none.
 */
export function groupView(group, history, open, close) {
  const tip = el("output", { class: "viewer-tip", hidden: true });
  const cards = group.completions.map((completion, i) => card(completion, i, (text, span) => tell(tip, text, span)));
  const title = el("h3", { tabindex: "-1", id: "viewer-title" }, heading(group));
  const view = el(
    "section",
    { class: "viewer-group", "aria-labelledby": "viewer-title" },
    el("div", { class: "viewer-bar" }, title, el("button", { type: "button", class: "viewer-close", onclick: close }, "Close")),
    el("p", { class: "viewer-muted" }, about(group)),
    group.reason && el("p", { class: "viewer-bad" }, `Dropped (${group.reason}): `, visible(group.detail ?? "")),
    group.missing.length > 0 && el("ul", { class: "viewer-missing" }, group.missing.map((each) => el("li", {}, `Not known: ${each}`))),
    problem(group),
    group.completions.length > 0 && shading(group, cards),
    el("div", { class: "viewer-cards" }, cards.map((each) => each.element)),
    group.completions.length === 0 && el("p", {}, "There are no completions."),
    acrossSteps(group, history, open),
    tip,
  );
  view.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
  });
  return { view, title };
}

function heading(group) {
  if (group.step === null) return `Group that waits, prompt ${group.prompt_id}`;
  return `${group.reason ? "Dropped group" : "Group"} of step ${group.step}, prompt ${group.prompt_id}`;
}

function about(group) {
  const facts = [`position ${short(group.position)}`, `epoch ${short(group.epoch)}`];
  if (group.created_at !== null) facts.push(`made ${new Date(1000 * group.created_at).toLocaleString()}`);
  if (group.reused) facts.push(`reused with weight ${short(group.weight)}`);
  return [...facts, group.source === "replay" ? "from the replay-buffer" : "from the run directory", `id ${group.id}`].join(" · ");
}

function problem(group) {
  const seen = group.prompt_tokens?.join("");
  return el(
    "div",
    { class: "viewer-problem" },
    el("h4", {}, "Prompt"),
    prose(group.prompt),
    el("h4", {}, "Ground truth"),
    prose(group.ground_truth),
    seen && el("details", {}, el("summary", {}, `As the model got it (${group.prompt_tokens.length} tokens)`), prose(seen)),
  );
}

function shading(group, cards) {
  const perToken = group.completions.some((completion) => completion.advantages);
  const names = Object.keys(SHADES).filter((name) => name !== "advantage" || perToken);
  if (!names.includes(shown)) shown = "rollout";
  const key = el("div", {});
  function choose(name) {
    shown = name;
    cards.forEach((each) => each.shade(name));
    key.replaceChildren(legend(name));
  }
  const choices = names.map((name) =>
    el(
      "label",
      {},
      el("input", { type: "radio", name: "viewer-shade", value: name, checked: name === shown, onchange: () => choose(name) }),
      ` ${SHADES[name].label}`,
    ),
  );
  choose(shown);
  return el("fieldset", { class: "viewer-shading" }, el("legend", {}, "Shade tokens by"), choices, key);
}

function card(completion, i, tell) {
  const verdict = { true: "✓ right", false: "✗ wrong" }[completion.correct] ?? "not graded";
  const tone = { true: "viewer-good", false: "viewer-bad" }[completion.correct] ?? "viewer-muted";
  const label = `Completion ${i + 1}`;
  const text = completion.tokens && tokens(completion, `Tokens of completion ${i + 1}; arrow keys choose one`, tell);
  const element = el(
    "article",
    { class: "viewer-card", "aria-label": label },
    el("h4", {}, `${label} `, el("span", { class: tone }, verdict)),
    el("dl", {}, entries(completion)),
    text ? text.box : prose(completion.text),
  );
  return { element, shade: (name) => text && text.shade(name) };
}

function entries(completion) {
  const components = Object.entries(completion.components).map(([name, value]) => [`· ${name}`, short(value)]);
  const versions = completion.weight_versions.map(([version, start, end]) => `${version} (${start + 1}–${end})`);
  const one = completion.weight_versions.length === 1;
  const rows = [
    ["Reward", short(completion.reward)],
    ...components,
    ["Advantage", short(completion.advantage)],
    ["Extracted answer", completion.extracted_answer === null ? "–" : prose(completion.extracted_answer)],
    ["Status", completion.status ?? "not graded"],
    ["Finish reason", completion.finish_reason],
    ["Tokens", short(completion.token_ids.length)],
    ["Weights", one ? String(completion.weight_versions[0][0]) : versions.join(", ")],
  ];
  return rows.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]);
}

/** Shows the numbers of a token beside it. */
function tell(tip, text, span) {
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const place = span.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(place.left, window.innerWidth - tip.offsetWidth - 4))}px`;
  const below = place.bottom + 6;
  tip.style.top = `${below + tip.offsetHeight < window.innerHeight ? below : place.top - tip.offsetHeight - 6}px`;
}

function acrossSteps(group, history, open) {
  if (history.length === 0) return null;
  const rewards = history.flatMap((row) => row.rewards).filter((reward) => reward !== null);
  const [low, high] = [Math.min(0, ...rewards), Math.max(1, ...rewards)];
  const multiples = history.map((row) => {
    const here = row.id === group.id && row.step === group.step;
    const step = row.step === null ? "waits" : `step ${row.step}`;
    const said = row.completions === null ? "" : `, ${short(row.correct)} of ${row.completions} right`;
    const label = `${step}: mean reward ${short(row.reward)}${said}${row.reason ? `, dropped: ${row.reason}` : ""}`;
    return el(
      "li",
      {},
      el(
        "button",
        { type: "button", "aria-label": label, title: label, "aria-current": here && "true", onclick: () => open(row) },
        el("span", {}, step),
        bars(row, low, high),
        el("span", { class: row.reason ? "viewer-bad" : "" }, row.reason ?? short(row.reward, 2)),
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
