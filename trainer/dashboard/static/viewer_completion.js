// One completion: as text to read, as it is, or token by token; an episode turn by turn.

import { el } from "./dom.js";
import { reading } from "./prose.js";
import { prose, short, tokens } from "./viewer_text.js";

export const VIEWS = { text: "Text", source: "Source", tokens: "Tokens" };

export const verdict = (completion) =>
  ({ true: "✓ right", false: "✗ wrong" })[completion.correct] ?? (completion.reward === null ? "not graded" : "");
export const tone = (completion) => ({ true: "viewer-good", false: "viewer-bad" })[completion.correct] ?? "viewer-muted";

/** What stands beside the number of a completion. */
export function summary(completion) {
  return [
    `reward ${short(completion.reward)}`,
    completion.regraded ? `regraded ${regraded(completion.regraded)}` : "",
    completion.advantage === null ? "" : `advantage ${short(completion.advantage)}`,
    `${short(completion.token_ids.length)} tokens`,
    completion.turns.length > 1 ? `${completion.turns.length} turns` : "",
    { length: "cut at the limit", abort: "aborted" }[completion.finish_reason] ?? "",
    completion.status === null || completion.status === "ok" ? "" : completion.status,
  ].filter(Boolean);
}

/** Pieces of an episode: what the model sampled and what it was told, in order; null for a single answer. `said` is their text
 * for a reader: without what ends a turn, and without empty lines around it. */
function pieces(completion) {
  const { mask, turns, tokens: texts } = completion;
  if (texts === null || (mask === null && turns.length < 2)) return null;
  const count = texts.length;
  const special = new Set(completion.special);
  const own = turns.length ? turns : spans(mask);
  const found = [];
  let end = 0;
  own.forEach(([start, stop], i) => {
    if (start > end) found.push({ start: end, end: start, turn: null });
    found.push({ start, end: stop, turn: i + 1 });
    end = stop;
  });
  if (end < count) found.push({ start: end, end: count, turn: null });
  return found.map((piece) => ({
    ...piece,
    text: texts.slice(piece.start, piece.end).join(""),
    said: texts.filter((_, i) => i >= piece.start && i < piece.end && !(piece.turn && special.has(i))).join("").replace(/^\n+|\n+$/g, ""),
    trained: mask === null || mask.slice(piece.start, piece.end).some((kept) => kept === 1),
  }));
}

function spans(mask) {
  const found = [];
  mask.forEach((kept, i) => {
    if (kept !== 1) return;
    if (found.at(-1)?.[1] === i) found.at(-1)[1] = i + 1;
    else found.push([i, i + 1]);
  });
  return found;
}

/** A turn of the model, or what it was told between two. */
function turn(piece, show) {
  const size = `${short(piece.end - piece.start)} tokens`;
  const who = piece.turn === null ? "Tool, environment or template" : `Turn ${piece.turn} of the model`;
  const trained = piece.trained ? "trained" : "not trained";
  return el(
    "section",
    { class: piece.turn === null ? "turn told" : "turn", "aria-label": who },
    el("h5", {}, who, el("span", { class: "viewer-muted" }, ` ${size}, ${trained}`)),
    show(piece),
  );
}

/** The text of a completion in one of `VIEWS`; `tell` as in `tokens`. Returns `element` and `shade(name)`. */
export function body(completion, number, view, tell) {
  if (view === "tokens" && completion.tokens) {
    const text = tokens(completion, `Tokens of completion ${number}; arrow keys choose one`, tell);
    return { element: text.box, shade: text.shade };
  }
  const episode = pieces(completion);
  const [single, several] = view === "text" ? [reading, (piece) => reading(piece.said)] : [prose, (piece) => prose(piece.text)];
  const element = episode ? el("div", { class: "turns" }, episode.map((piece) => turn(piece, several))) : single(completion.text);
  return { element, shade: () => {} };
}

/** What `rlhf regrade` says of a completion. */
function regraded(grade) {
  const sign = { true: "right", false: "wrong" }[grade.correct];
  return [short(grade.reward), sign, grade.answer !== null && `read as ${grade.answer}`, grade.reason].filter(Boolean).join(", ");
}

/** What is known of a completion beside its text. */
export function facts(completion) {
  const components = Object.entries(completion.components).map(([name, value]) => [`· ${name}`, short(value)]);
  const versions = completion.weight_versions.map(([version, start, end]) => `${version} (${start + 1}–${end})`);
  const one = completion.weight_versions.length === 1;
  const trained = completion.mask?.filter((kept) => kept === 1).length;
  const rows = [
    ["Reward", short(completion.reward)],
    ...components,
    ["Advantage", short(completion.advantage)],
    ["Extracted answer", completion.extracted_answer === null ? "–" : prose(completion.extracted_answer)],
    ["Status", completion.status ?? "not graded"],
    ["Finish reason", completion.finish_reason],
    ["Tokens", short(completion.token_ids.length) + (trained === undefined ? "" : `, ${short(trained)} of them trained`)],
    ["Weights", one ? String(completion.weight_versions[0][0]) : versions.join(", ")],
    ...(completion.episode === null ? [] : [["Episode", String(completion.episode + 1)]]),
  ];
  return el("dl", {}, rows.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}
