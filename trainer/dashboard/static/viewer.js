// The tab "Rollouts": groups of completions, searched, filtered and paged, and one of them in full.

import { groupView } from "./viewer_group.js";
import { el, short, visible } from "./viewer_text.js";

const LIMIT = 50;
const TYPING_MS = 250;
const POLL_MS = 3000;
const ERRORS = {
  "": "All groups",
  any: "Out of the ordinary",
  none: "Nothing out of the ordinary",
  dropped: "Dropped, for any reason",
  generation: "Dropped: generation failed",
  reward: "Dropped: not graded",
  stale: "Dropped: too old",
  zero_variance: "Dropped: equal rewards",
  unparsable: "No answer found",
  timeout: "Grader: timeout",
  died: "Grader: died",
  error: "Grader: error",
  truncated: "Cut at the length limit",
  aborted: "Aborted",
  reused: "Reused",
  waiting: "Waiting to be trained on",
};
const COLUMNS = [
  { title: "Step", sort: "step", show: (row) => (row.step === null ? "waits" : String(row.step)) },
  { title: "Prompt" },
  { title: "Reward", sort: "reward", show: (row) => short(row.reward) },
  { title: "Right", show: (row) => (row.completions === null ? "–" : `${short(row.correct)}/${row.completions}`) },
  { title: "Longest", sort: "length", show: (row) => short(row.tokens), hint: "tokens of the longest completion" },
  { title: "|Advantage|", sort: "advantage", show: (row) => short(row.advantage), hint: "mean over the tokens" },
  { title: "|Δ logprob|", sort: "delta", show: (row) => short(row.delta), hint: "trainer − rollout, mean over the tokens" },
  { title: "Weights", show: (row) => versions(row), hint: "versions that sampled" },
  { title: "Marks", show: (row) => row.marks.join(", ") },
];
const FILTERS = [
  { name: "prompt", label: "Prompt contains", type: "search", size: 24 },
  { name: "step_from", label: "Step from", type: "number", min: 0, step: 1 },
  { name: "step_to", label: "to", type: "number", min: 0, step: 1 },
  { name: "reward_min", label: "Reward from", type: "number", step: "any" },
  { name: "reward_max", label: "to", type: "number", step: "any" },
  { name: "length_min", label: "Tokens from", type: "number", min: 0, step: 1 },
  { name: "length_max", label: "to", type: "number", min: 0, step: 1 },
];

const versions = ({ oldest, newest }) => (newest === null || newest === oldest ? short(oldest) : `${oldest}–${newest}`);
const keyOf = (row) => `${row.step}/${row.id}`;

/**
 * Fills `element`. `context` has `run()`, `fetchJson(path, params)`, `step()` and `onStep(callback)`; paths are below
 * `/dashboard/api/`.
 */
export function mount(element, context) {
  const viewer = new Viewer(element, context);
  context.onStep?.(() => viewer.followStep());
  const timer = setInterval(() => {
    if (!element.isConnected) clearInterval(timer);
    else if (!document.hidden && element.offsetParent !== null && !viewer.waiting) viewer.load();
  }, POLL_MS);
  viewer.load();
}

class Viewer {
  constructor(element, context) {
    Object.assign(this, { context, offset: 0, sort: "-step", total: 0, asked: 0, waiting: 0, shown: "" });
    Object.assign(this, { run: context.run(), opened: null });
    style();
    this.form = this.makeForm();
    this.alert = el("p", { role: "alert", class: "viewer-bad" });
    this.problems = el("ul", { class: "viewer-missing" });
    this.body = el("tbody");
    this.head = el("tr");
    this.count = el("span", { role: "status" });
    this.pager = this.makePager();
    this.detail = el("div");
    const caption = el("caption", { class: "viewer-muted" }, "Groups: a prompt and its completions");
    const table = el("table", { class: "viewer-table" }, caption, el("thead", {}, this.head), this.body);
    const list = el("div", { class: "viewer-list" }, table);
    element.classList.add("viewer");
    element.replaceChildren(this.form, this.alert, this.problems, list, this.pager.element, this.detail);
    this.makeHead();
    this.body.addEventListener("keydown", (event) => this.moveBetweenRows(event));
  }

  makeForm() {
    const field = ({ name, label, ...input }) => el("label", {}, `${label} `, el("input", { name, ...input }));
    const options = Object.entries(ERRORS).map(([value, label]) => el("option", { value }, label));
    this.follow = el("input", { type: "checkbox", name: "follow" });
    const form = el(
      "form",
      { class: "viewer-filters", role: "search", "aria-label": "Filter groups" },
      FILTERS.map(field),
      el("label", {}, "Show ", el("select", { name: "error" }, options)),
      el("label", {}, this.follow, " only the step chosen above"),
      el("button", { type: "reset" }, "Clear"),
    );
    let typing;
    const changed = () => {
      clearTimeout(typing);
      typing = setTimeout(() => this.load(0), TYPING_MS);
    };
    this.follow.addEventListener("change", () => this.followStep());
    form.addEventListener("input", changed);
    form.addEventListener("reset", () => setTimeout(changed)); // the fields are empty only then
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.load(0);
    });
    return form;
  }

  makeHead() {
    this.head.replaceChildren(
      ...COLUMNS.map(({ title, sort, hint }) => {
        if (!sort) return el("th", { scope: "col", title: hint }, title);
        const state = { [sort]: "ascending", [`-${sort}`]: "descending" }[this.sort];
        const mark = { ascending: " ▲", descending: " ▼" }[state] ?? "";
        const button = el("button", { type: "button", "data-sort": sort, onclick: () => this.sortBy(sort) }, title + mark);
        return el("th", { scope: "col", title: hint, "aria-sort": state }, button);
      }),
    );
  }

  makePager() {
    const go = (label, offset) => el("button", { type: "button", onclick: () => this.load(Math.max(0, offset())) }, label);
    const last = () => Math.floor(Math.max(0, this.total - 1) / LIMIT) * LIMIT;
    const back = [go("First", () => 0), go("Previous", () => this.offset - LIMIT)];
    const on = [go("Next", () => this.offset + LIMIT), go("Last", last)];
    const element = el("nav", { class: "viewer-pager", "aria-label": "Pages of groups" }, back, this.count, on);
    return { element, back, on };
  }

  sortBy(column) {
    this.sort = this.sort === `-${column}` ? column : `-${column}`;
    this.makeHead();
    this.head.querySelector(`[data-sort=${column}]`).focus();
    this.load(0);
  }

  /** Takes over the step that is chosen on the page, if it is to be followed. */
  followStep() {
    if (!this.follow.checked) return;
    const step = this.context.step?.() ?? "";
    this.form.elements.step_from.value = step;
    this.form.elements.step_to.value = step;
    this.load(0);
  }

  question(offset) {
    const question = { run: this.context.run(), offset, limit: LIMIT, sort: this.sort };
    for (const name of [...FILTERS.map((filter) => filter.name), "error"]) {
      const value = this.form.elements[name].value.trim();
      if (value !== "") question[name] = value;
    }
    return question;
  }

  /** Asks for the groups from `offset` on, and shows them if they are others than before. */
  async load(offset = this.offset) {
    this.asked += 1;
    const mine = this.asked;
    const same = this.run === this.context.run();
    if (!same) this.changeRun();
    const question = this.question(same ? offset : 0);
    this.waiting += 1;
    try {
      const answer = await this.context.fetchJson("groups", question);
      if (mine !== this.asked) return;
      this.alert.textContent = "";
      this.offset = question.offset;
      this.show(answer);
    } catch (error) {
      if (mine === this.asked) this.alert.textContent = error.message;
    } finally {
      this.waiting -= 1;
    }
  }

  changeRun() {
    this.run = this.context.run();
    this.offset = 0;
    this.opened = null;
    this.detail.replaceChildren();
  }

  show(answer) {
    const text = JSON.stringify([this.offset, answer]);
    if (text === this.shown) return;
    this.shown = text;
    this.total = answer.total;
    this.problems.replaceChildren(...answer.problems.map((each) => el("li", {}, visible(each))));
    const focused = this.body.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    this.body.replaceChildren(...answer.groups.map((row) => this.row(row)));
    if (focused !== null) this.buttonOf(focused)?.focus();
    const end = this.offset + answer.groups.length;
    const none = "no group is as asked for";
    const said = `${(this.offset + 1).toLocaleString("en")}–${end.toLocaleString("en")} of ${this.total.toLocaleString("en")}`;
    this.count.textContent = answer.groups.length ? said : none;
    this.pager.back.forEach((button) => (button.disabled = this.offset === 0));
    this.pager.on.forEach((button) => (button.disabled = end >= this.total));
  }

  row(row) {
    const prompt = row.prompt ?? row.prompt_id ?? row.id;
    const button = el("button", { type: "button", class: "viewer-open", "data-key": keyOf(row) }, visible(prompt.replace(/\s+/g, " ")));
    button.addEventListener("click", () => this.open(row));
    const cells = COLUMNS.map(({ title, show }) => el("td", { "data-column": title }, show ? show(row) : button));
    const here = this.opened !== null && keyOf(this.opened) === keyOf(row);
    return el("tr", { class: row.reason ? "viewer-dropped" : null, "aria-current": here && "true" }, cells);
  }

  buttonOf(key) {
    return [...this.body.querySelectorAll(".viewer-open")].find((button) => button.dataset.key === key);
  }

  moveBetweenRows(event) {
    const moves = { ArrowDown: 1, ArrowUp: -1 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const buttons = [...this.body.querySelectorAll(".viewer-open")];
    buttons[buttons.indexOf(document.activeElement) + moves[event.key]]?.focus();
  }

  /** Shows a group of the list, or another one of its prompt. */
  async open(row) {
    const { fetchJson } = this.context;
    const run = this.context.run();
    this.opened = row;
    this.markOpened();
    const step = row.step === null ? {} : { step: row.step };
    const others = this.ofPrompt(row.prompt_id, run);
    try {
      const group = await fetchJson(`groups/${encodeURIComponent(row.id)}`, { run, ...step });
      const { view, title } = groupView(group, await others, (other) => this.open(other), () => this.close());
      if (this.opened !== row) return;
      this.detail.replaceChildren(view);
      title.focus({ preventScroll: true });
      this.detail.scrollIntoView();
    } catch (error) {
      if (this.opened !== row) return;
      const close = el("button", { type: "button", class: "viewer-close", onclick: () => this.close() }, "Close");
      this.detail.replaceChildren(el("p", { role: "alert", class: "viewer-bad" }, visible(error.message), " ", close));
    }
  }

  /** The groups of a prompt; none where that cannot be had: the group itself is worth more. */
  async ofPrompt(id, run) {
    if (id === null) return [];
    const path = `prompts/${encodeURIComponent(id)}`;
    return this.context.fetchJson(path, { run }).then((answer) => answer.groups, () => []);
  }

  close() {
    const row = this.opened;
    this.opened = null;
    this.detail.replaceChildren();
    this.markOpened();
    if (row) this.buttonOf(keyOf(row))?.focus();
  }

  markOpened() {
    for (const button of this.body.querySelectorAll(".viewer-open")) {
      const here = this.opened !== null && button.dataset.key === keyOf(this.opened);
      const line = button.closest("tr");
      if (here) line.setAttribute("aria-current", "true");
      else line.removeAttribute("aria-current");
    }
  }
}

function style() {
  const href = new URL("viewer.css", import.meta.url).href;
  if ([...document.styleSheets].some((sheet) => sheet.href === href) || document.querySelector("link[data-viewer]")) return;
  document.head.append(el("link", { rel: "stylesheet", href, "data-viewer": true }));
}
