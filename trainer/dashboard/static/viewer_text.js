// What models wrote, as text: never markup, nothing invisible, tokens shaded by a number that is shown exactly on demand.

import { el } from "./dom.js";

const HIDDEN =
  /[\u0000-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb\u{e0000}-\u{e0fff}]/gu;
const FOLDED_CHARS = 20000;
const FOLDED_TOKENS = 8192;
const PAGE = 10;

/** A number for people; "–" where there is none. */
export function short(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Math.abs(value) < 1e-3 ? value.toExponential(1) : value.toFixed(digits);
}

/** All digits that a 32-bit number has. */
const exact = (value) => (value === null || value === undefined ? "–" : String(Number(value.toPrecision(9))));

function picture(character) {
  const code = character.codePointAt(0);
  if (character === "\n") return "↵";
  if (character === "\t") return "⇥";
  if (code < 32) return String.fromCodePoint(0x2400 + code);
  if (code === 127) return "␡";
  return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
}

/** Nodes that show a text with its control characters; lines break where they do, with a sign for it if `breaks`. */
export function visible(text, breaks = true) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(HIDDEN)) {
    if (!breaks && (match[0] === "\n" || match[0] === "\t")) continue;
    if (match.index > end) nodes.push(text.slice(end, match.index));
    nodes.push(el("span", { class: "viewer-control" }, picture(match[0])));
    if (match[0] === "\n" || match[0] === "\t") nodes.push(match[0]);
    end = match.index + match[0].length;
  }
  if (end < text.length) nodes.push(text.slice(end));
  return nodes;
}

/** A text whose end is folded away when it is very long. */
export function prose(text) {
  const shown = el("div", { class: "viewer-prose" }, visible(text.slice(0, FOLDED_CHARS)));
  if (text.length <= FOLDED_CHARS) return shown;
  const label = `Show all ${text.length.toLocaleString("en")} characters`;
  const more = el("button", { type: "button", class: "viewer-more" }, label);
  more.addEventListener("click", () => shown.replaceChildren(...visible(text)));
  shown.append("… ", more);
  return shown;
}

const surprise = { bounds: [0.05, 0.5, 1, 2, 4, 8], size: (value) => -value, kind: () => "low" };
const signed = (bounds) => ({ bounds, size: Math.abs, kind: (value) => (value > 0 ? "up" : "down") });
/** What tokens can be shaded by: where numbers are, in which steps, and how the legend says it. */
export const SHADES = {
  rollout: {
    label: "Log-probability, rollout",
    scale: surprise,
    of: (completion, i) => completion.logprobs[i],
    legend: (bound) => `below −${bound}`,
  },
  trainer: {
    label: "Log-probability, trainer",
    scale: surprise,
    of: (completion, i) => completion.trainer_logprobs?.[i],
    legend: (bound) => `below −${bound}`,
  },
  difference: {
    label: "Difference, trainer − rollout",
    scale: signed([0.001, 0.01, 0.1, 1]),
    of: (completion, i) => difference(completion, i),
    legend: (bound, kind) => `${kind === "up" ? "above " : "below −"}${bound}`,
  },
  advantage: {
    label: "Advantage of each token",
    scale: signed([0.1, 0.5, 1, 2]),
    of: (completion, i) => (completion.advantages ? completion.advantages[i] : completion.advantage),
    legend: (bound, kind) => `${kind === "up" ? "above " : "below −"}${bound}`,
  },
  none: { label: "None", scale: signed([]), of: () => 0, legend: () => "" },
};

function difference(completion, i) {
  const theirs = completion.trainer_logprobs?.[i];
  return theirs === null || theirs === undefined ? null : theirs - completion.logprobs[i];
}

const masked = (completion, i) => completion.mask !== null && completion.mask[i] === 0;

function shadeClass(shade, value) {
  if (value === null || value === undefined) return "viewer-unknown";
  const level = shade.scale.bounds.filter((bound) => shade.scale.size(value) > bound).length;
  return level ? `viewer-${shade.scale.kind(value)}${level}` : "";
}

/** What the colours of a shade mean. */
export function legend(name, hasMask) {
  const shade = SHADES[name];
  const kinds = shade.scale === surprise ? ["low"] : ["down", "up"];
  const items = kinds.flatMap((kind) => {
    const swatches = shade.scale.bounds.map((bound, i) =>
      el("li", {}, el("span", { class: `viewer-swatch viewer-${kind}${i + 1}` }, "a"), ` ${shade.legend(bound, kind)}`),
    );
    return kind === "down" ? swatches.reverse() : swatches;
  });
  if (hasMask) items.push(el("li", {}, el("span", { class: "viewer-swatch viewer-masked" }, "a"), " not trained"));
  if (name !== "none") items.push(el("li", {}, el("span", { class: "viewer-swatch viewer-unknown" }, "a"), " not known"));
  return el("ul", { class: "viewer-legend", "aria-label": "what the colours mean, in nats" }, items);
}

/** The numbers of one token, exactly. */
function facts(completion, i) {
  const version = completion.weight_versions.find(([, start, end]) => start <= i && i < end)?.[0];
  const advantage = completion.advantages ? completion.advantages[i] : completion.advantage;
  return [
    `token ${i + 1} of ${completion.tokens.length}`,
    `id ${completion.token_ids[i]}`,
    ...(masked(completion, i) ? ["not trained: of the template, a tool or the environment"] : []),
    `rollout ${exact(completion.logprobs[i])}`,
    `trainer ${exact(completion.trainer_logprobs?.[i])}`,
    `difference ${exact(difference(completion, i))}`,
    `advantage ${exact(advantage)}`,
    `weights ${version ?? "–"}`,
  ].join(" · ");
}

/**
 * The tokens of a completion, shaded. The pointer or the arrow keys choose one; `tell(text, span)` gets its numbers, and
 * nothing when none is chosen.
 */
export function tokens(completion, label, tell) {
  const box = el("div", { class: "viewer-tokens", tabindex: "0", role: "group", "aria-label": label });
  const count = completion.tokens.length;
  const spans = [];
  let shade = SHADES.none;
  let current = -1;

  function add(until) {
    const made = document.createDocumentFragment();
    for (let i = spans.length; i < until; i += 1) {
      const text = completion.tokens[i];
      const span = el("span", { "data-token": i }, text === "" ? "·" : visible(text));
      span.className = masked(completion, i) ? "viewer-masked" : shadeClass(shade, shade.of(completion, i));
      if (text === "") span.classList.add("viewer-part");
      spans.push(span);
      made.append(span);
    }
    box.append(made);
  }

  function fold() {
    const label = `Show all ${count.toLocaleString("en")} tokens`;
    const more = el("button", { type: "button", class: "viewer-more" }, label);
    more.addEventListener("click", () => {
      more.remove();
      add(count);
      box.focus();
    });
    box.append(more);
  }

  function choose(i) {
    spans[current]?.classList.remove("viewer-current");
    current = i;
    const span = spans[i];
    span?.classList.add("viewer-current");
    span?.scrollIntoView({ block: "nearest" });
    tell(span ? facts(completion, i) : "", span);
  }

  box.addEventListener("click", (event) => {
    const span = event.target.closest("[data-token]");
    if (span) choose(Number(span.dataset.token));
  });
  box.addEventListener("mouseover", (event) => {
    const span = event.target.closest("[data-token]");
    if (span) tell(facts(completion, Number(span.dataset.token)), span);
  });
  box.addEventListener("mouseleave", () => tell(current < 0 ? "" : facts(completion, current), spans[current]));
  box.addEventListener("focus", () => box.matches(":focus-visible") && choose(Math.max(0, current)));
  box.addEventListener("blur", () => choose(-1));
  box.addEventListener("keydown", (event) => {
    const last = spans.length - 1;
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: PAGE, ArrowUp: -PAGE, Home: -last, End: last };
    if (event.target !== box || !(event.key in moves)) return;
    event.preventDefault();
    choose(Math.min(last, Math.max(0, current + moves[event.key])));
  });
  add(Math.min(FOLDED_TOKENS, count));
  if (count > FOLDED_TOKENS) fold();
  return {
    box,
    /** Shades anew. */
    shade(name) {
      shade = SHADES[name];
      spans.forEach((span, i) => {
        const kept = ["viewer-current", "viewer-part"].filter((each) => span.classList.contains(each));
        const how = masked(completion, i) ? "viewer-masked" : shadeClass(shade, shade.of(completion, i));
        span.className = [how, ...kept].join(" ");
      });
    },
  };
}
