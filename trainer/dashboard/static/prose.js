// What a model wrote, for reading: paragraphs, code, and formulas by KaTeX. It builds elements; no text becomes markup.

import { el } from "./dom.js";
import { visible } from "./viewer_text.js";

const MOST_FORMULAS = 400;
const PARTS = new RegExp(
  [
    /```(?<language>[^\n`]{0,40})\n(?<code>[\s\S]*?)(?:```|(?![\s\S]))/,
    /`(?<inline>[^`\n]{1,500})`/,
    /<think>(?<thought>[\s\S]*?)(?:<\/think>|(?![\s\S]))/,
    /<tool_call>(?<call>[\s\S]*?)(?:<\/tool_call>|(?![\s\S]))/,
    /\$\$(?<display>[\s\S]{1,2000}?)\$\$/,
    /\\\[(?<bracket>[\s\S]{1,2000}?)\\\]/,
    /(?<environment>\\begin\{(?<name>equation|align|aligned|gather|gathered|cases|array|[pbv]?matrix)\*?\}[\s\S]{1,2000}?\\end\{\k<name>\*?\})/,
    /\\\((?<round>[\s\S]{1,2000}?)\\\)/,
    /(?<![\\$\w])\$(?!\s)(?<dollar>(?:[^$\n\\]|\\.){1,500}?)(?<!\s)\$(?![\d$])/,
    /(?<boxed>\\boxed\{(?:[^{}]|\{(?:[^{}]|\{[^{}]{0,200}\}){0,200}\}){0,500}\})/,
    /\*\*(?<strong>[^*\n]{1,300})\*\*/,
    /^#{1,3} (?<heading>[^\n]{1,300})$/, // "#### 18" is GSM8K's form of a final answer
  ]
    .map((part) => part.source)
    .join("|"),
  "gm",
);
const TEX = {
  output: "mathml", // needs no fonts and no style of its own, and is read aloud
  throwOnError: true,
  trust: false, // no links, no images, no attributes
  strict: "ignore",
  maxExpand: 500,
  maxSize: 20,
  macros: { "\\pmb": "\\mathbf{#1}", "\\fcolorbox": "\\boxed{#3}" }, // the page permits no style attributes
};
let library = null;

/** KaTeX, loaded when the first formula is met. */
function katex() {
  library ??= new Promise((done, failed) => {
    const script = el("script", { src: new URL("katex.min.js", import.meta.url).href });
    script.addEventListener("load", () => done(window.katex));
    script.addEventListener("error", () => failed(new Error("katex.min.js cannot be loaded")));
    document.head.append(script);
  });
  return library;
}

/** A formula; its source where it is none, or too much of one. */
function formula(source, tex, display, budget) {
  const shown = el("span", { class: display ? "formula display" : "formula" }, visible(source, false));
  budget.formulas += 1;
  if (budget.formulas > MOST_FORMULAS) return shown;
  katex()
    .then((made) => {
      const math = el("span", {});
      made.render(tex, math, { ...TEX, displayMode: display });
      shown.replaceChildren(...math.childNodes);
    })
    .catch(() => shown.classList.add("unset"));
  return shown;
}

function pretty(call) {
  try {
    return JSON.stringify(JSON.parse(call), null, 2);
  } catch {
    return call.trim();
  }
}

const code = (text, language) =>
  el("pre", { tabindex: "0", "aria-label": language ? `Code, ${language}` : "Code" }, el("code", {}, visible(text.replace(/\n$/, ""), false)));

function part(match, budget) {
  const g = match.groups;
  if (g.code !== undefined) return code(g.code, g.language.trim());
  if (g.inline !== undefined) return el("code", {}, visible(g.inline, false));
  if (g.thought !== undefined) {
    return el("details", { class: "thought", open: true }, el("summary", {}, "Thought"), nodes(g.thought.trim(), budget));
  }
  if (g.call !== undefined) return el("div", { class: "call" }, el("b", {}, "Tool call"), code(pretty(g.call), "JSON"));
  if (g.strong !== undefined) return el("strong", {}, visible(g.strong, false));
  if (g.heading !== undefined) return el("strong", { class: "heading" }, nodes(g.heading, budget));
  const tex = g.display ?? g.bracket ?? g.environment ?? g.round ?? g.dollar ?? g.boxed;
  const display = g.display !== undefined || g.bracket !== undefined || g.environment !== undefined;
  return formula(match[0], tex, display, budget);
}

function nodes(text, budget) {
  const found = [];
  let end = 0;
  for (const match of text.matchAll(PARTS)) {
    if (match.index > end) found.push(...visible(text.slice(end, match.index), false));
    found.push(part(match, budget));
    end = match.index + match[0].length;
  }
  if (end < text.length) found.push(...visible(text.slice(end), false));
  return found;
}

/** A text at reading width. */
export const reading = (text) => el("div", { class: "prose" }, nodes(text, { formulas: 0 }));
