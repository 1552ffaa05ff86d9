// The filters of the list of groups, kept in the address.

import { address } from "./address.js";
import { el } from "./dom.js";

const TYPING_MS = 250;
const MARKS = {
  "": "All groups",
  any: "Out of the ordinary",
  none: "Nothing out of the ordinary",
  dropped: "Dropped, for any reason",
  generation: "Dropped: generation failed",
  reward: "Dropped: not graded",
  stale: "Dropped: too old",
  zero_variance: "Dropped: equal rewards",
  unparsable: "No answer found",
  unevaluated: "Right value, not computed",
  inapplicable: "No reward applies",
  timeout: "Grader: timeout",
  died: "Grader: died",
  error: "Grader: error",
  truncated: "Cut at the length limit",
  aborted: "Aborted",
  lost: "Lost episodes",
  reused: "Reused",
  regraded: "Graded otherwise by rlhf regrade",
};
const SORTS = {
  "-step": "newest first",
  step: "oldest first",
  "-reward": "highest reward",
  reward: "lowest reward",
  "-length": "longest",
  length: "shortest",
  "-advantage": "largest |advantage|",
  "-delta": "largest |Δ logprob|",
};
const RANGES = [
  { name: "step", label: "Step", from: "step_from", to: "step_to", step: 1, min: 0 },
  { name: "reward", label: "Reward", from: "reward_min", to: "reward_max", step: "any" },
  { name: "tokens", label: "Tokens", from: "length_min", to: "length_max", step: 1, min: 0 },
];
const NAMES = ["text", "error", ...RANGES.flatMap(({ from, to }) => [from, to])];

/** What the address asks the server for. */
export function question() {
  const asked = { sort: address.get("sort") in SORTS ? address.get("sort") : "-step" };
  for (const name of NAMES) if (address.get(name) !== "") asked[name] = address.get(name);
  return asked;
}

/** The form; `changed()` is called when the address asks for other groups, `step()` answers the step that the page shows. */
export class Filters {
  constructor(changed, step) {
    Object.assign(this, { changed, step });
    const options = (all) => Object.entries(all).map(([value, label]) => el("option", { value }, label));
    const number = ({ label, from, to, step, min }) => {
      const field = (name, said) => el("input", { type: "number", name, "aria-label": `${label} ${said}`, placeholder: said, step, min });
      return el("span", { class: "range" }, el("span", { "aria-hidden": "true" }, label), field(from, "from"), field(to, "to"));
    };
    this.follow = el("input", { type: "checkbox", name: "follow" });
    this.more = el("details", {}, el("summary", {}, "More filters"), el("div", {}, RANGES.map(number), el("label", {}, this.follow, " only the step of the overview")));
    this.element = el(
      "form",
      { class: "viewer-filters", role: "search", "aria-label": "Filter groups" },
      el("input", { type: "search", name: "text", "aria-label": "Search prompts and completions", placeholder: "Search prompts and completions" }),
      el("select", { name: "error", "aria-label": "Show" }, options(MARKS)),
      el("select", { name: "sort", "aria-label": "Order" }, options(SORTS)),
      el("button", { type: "reset" }, "Clear"),
      this.more,
    );
    let typing;
    const soon = () => {
      clearTimeout(typing);
      typing = setTimeout(() => this.write(), TYPING_MS);
    };
    this.follow.addEventListener("change", () => this.followStep());
    this.element.addEventListener("input", (event) => event.target !== this.follow && soon());
    this.element.addEventListener("change", (event) => event.target !== this.follow && soon());
    this.element.addEventListener("reset", () => setTimeout(() => this.write())); // the fields are empty only then
    this.element.addEventListener("submit", (event) => {
      event.preventDefault();
      this.write();
    });
    this.read();
  }

  /** Fills the fields from the address. */
  read() {
    const { elements } = this.element;
    for (const name of NAMES) if (document.activeElement !== elements[name]) elements[name].value = address.get(name);
    elements.sort.value = question().sort;
    this.follow.checked = address.get("follow") === "1";
    if (this.follow.checked || RANGES.some(({ from, to }) => address.get(from) || address.get(to))) this.more.open = true;
  }

  /** Takes the fields into the address. */
  write() {
    const { elements } = this.element;
    const values = Object.fromEntries(NAMES.map((name) => [name, elements[name].value.trim()]));
    const sort = elements.sort.value === "-step" ? "" : elements.sort.value;
    address.set({ ...values, sort, follow: this.follow.checked ? 1 : "", offset: "" });
    this.changed();
  }

  /** Takes over the step that is chosen on the page, if it is to be followed. */
  followStep() {
    const { elements } = this.element;
    if (!this.follow.checked && address.get("follow") !== "1") return;
    elements.step_from.value = elements.step_to.value = this.follow.checked ? (this.step() ?? "") : "";
    this.write();
  }
}
