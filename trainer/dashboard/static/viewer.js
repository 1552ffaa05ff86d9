// The tab "Rollouts": groups of completions, searched, filtered and paged, and one of them to read.

import { address } from "./address.js";
import { el, fill } from "./dom.js";
import { Filters, question } from "./viewer_filters.js";
import { GroupView } from "./viewer_group.js";
import { short, visible } from "./viewer_text.js";

const LIMIT = 50;
const POLL_MS = 3000;
const MOST_SQUARES = 32;

const keyOf = (row) => `${row.step}/${row.id}`;
const isHere = (row) => row.id === address.get("group") && row.step === address.whole("at");

/** Fills `element`. `context` has `run()`, `fetchJson(path, params)`, `step()` and `onStep(callback)`. Returns the viewer. */
export function mount(element, context) {
  const viewer = new Viewer(element, context);
  context.onStep?.(() => viewer.filters.followStep());
  setInterval(() => {
    const idle = !document.hidden && viewer.list.offsetParent !== null && !viewer.waiting;
    if (idle) viewer.load();
  }, POLL_MS);
  viewer.go();
  return viewer;
}

class Viewer {
  constructor(element, context) {
    Object.assign(this, { context, element, total: 0, offset: 0, asked: 0, waiting: 0, shown: "", rows: [], group: null, opening: "" });
    this.run = context.run();
    this.filters = new Filters(() => this.load(), () => context.step?.());
    this.alert = el("p", { role: "alert", class: "viewer-bad" });
    this.problems = el("ul", { class: "viewer-missing" });
    this.body = el("ol", { class: "viewer-rows" });
    this.count = el("span", { role: "status" });
    this.reading = el("span", { class: "viewer-muted" });
    this.pager = this.makePager();
    this.list = el("div", { class: "viewer-list" }, this.filters.element, this.problems, this.body, this.pager.element);
    this.detail = el("div", { class: "viewer-detail" });
    element.classList.add("viewer");
    element.replaceChildren(this.alert, this.list, this.detail);
    this.body.addEventListener("keydown", (event) => this.moveBetweenRows(event));
    document.addEventListener("keydown", (event) => this.pressed(event));
  }

  makePager() {
    const go = (label, offset) => el("button", { type: "button", onclick: () => this.page(Math.max(0, offset())) }, label);
    const last = () => Math.floor(Math.max(0, this.total - 1) / LIMIT) * LIMIT;
    const back = [go("First", () => 0), go("Previous", () => this.offset - LIMIT)];
    const on = [go("Next", () => this.offset + LIMIT), go("Last", last)];
    const element = el("div", { class: "viewer-pager", role: "group", "aria-label": "Pages of groups" }, back, this.count, on, this.reading);
    return { element, back, on };
  }

  async page(offset) {
    address.set({ offset: offset || "" }, { push: true });
    await this.load();
    this.element.scrollIntoView();
  }

  /** Shows what the address says, as after Back. */
  async go() {
    this.filters.read();
    const loading = this.load(address.get("group") !== "");
    if (address.get("group") === "") this.leave();
    else if (this.opening === this.wanted()) this.group?.draw();
    else await this.open({ id: address.get("group"), step: address.whole("at") }, false);
    await loading;
    this.sayPlace();
  }

  wanted() {
    return `${this.context.run()} ${address.whole("at")}/${address.get("group")}`;
  }

  /** Asks for the groups of the address, and shows them if they are others than before; `around`: the page of the open group. */
  async load(around = false) {
    this.asked += 1;
    const mine = this.asked;
    const run = this.context.run();
    const at = around ? { around: address.get("group"), around_step: address.whole("at") } : {};
    this.waiting += 1;
    try {
      const answer = await this.context.fetchJson("groups", { run, offset: address.whole("offset") ?? 0, limit: LIMIT, ...question(), ...at });
      if (mine !== this.asked) return;
      this.alert.textContent = "";
      this.run = run;
      this.show(answer);
      if (answer.reading) setTimeout(() => mine === this.asked && this.load(around), 50);
    } catch (error) {
      if (mine === this.asked) this.alert.textContent = error.message;
    } finally {
      this.waiting -= 1;
    }
  }

  show(answer) {
    const text = JSON.stringify([this.run, answer]);
    if (text === this.shown) return;
    this.shown = text;
    Object.assign(this, { total: answer.total, offset: answer.offset, rows: answer.groups });
    this.problems.replaceChildren(...answer.problems.map((each) => el("li", {}, visible(each))));
    const focused = this.body.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    this.body.replaceChildren(...answer.groups.map((row) => this.row(row)));
    if (focused !== null) this.buttonOf(focused)?.focus();
    const end = this.offset + answer.groups.length;
    const said = `${(this.offset + 1).toLocaleString("en")}–${end.toLocaleString("en")} of ${this.total.toLocaleString("en")}`;
    this.count.textContent = answer.groups.length ? said : answer.reading ? "none yet" : "no group is as asked for";
    const { reading } = answer;
    this.reading.textContent = reading ? `reading the list: ${Math.floor((100 * reading.done) / reading.of)} %` : "";
    this.pager.back.forEach((button) => (button.disabled = this.offset === 0));
    this.pager.on.forEach((button) => (button.disabled = end >= this.total));
  }

  row(row) {
    const prompt = (row.prompt ?? row.prompt_id ?? row.id).replace(/\s+/g, " ");
    const { completion } = row;
    const right = row.completions === null || row.correct === null ? null : `${short(row.correct)}/${row.completions}`;
    const [oldest, newest] = row.versions ?? [null, null];
    const weights = newest === oldest ? short(oldest) : `${oldest}–${newest}`;
    const facts = [
      row.tokens?.length ? `longest ${short(Math.max(...row.tokens))}` : "",
      row.advantage === null ? "" : `|advantage| ${short(row.advantage)}`,
      row.delta === null ? "" : `|Δ logprob| ${short(row.delta)}`,
      `weights ${weights}`,
      row.regraded ? `regraded ${row.regraded.changed}/${row.completions}` : "",
    ];
    const button = el(
      "button",
      { type: "button", class: "viewer-open", "data-key": keyOf(row), onclick: () => this.open(row, true, completion?.number) },
      el("span", { class: "row-step" }, `step ${row.step.toLocaleString("en")}`),
      el("span", { class: "row-prompt" }, highlighted(prompt, address.get("text"))),
      el("span", { class: "row-completion" }, this.beginning(completion)),
      el("span", { class: "row-reward" }, el("b", {}, short(row.reward)), right && el("span", { class: "viewer-muted" }, ` ${right}`), squares(row.rewards)),
      el("span", { class: "row-facts" }, facts.filter(Boolean).join(" · "), row.marks.length > 0 && el("b", {}, ` ${row.marks.join(", ").replaceAll("_", " ")}`)),
    );
    return el("li", { class: row.reason ? "viewer-dropped" : null }, button);
  }

  beginning(completion) {
    if (!completion) return "";
    const sign = { true: ["✓", "right: ", "viewer-good"], false: ["✗", "wrong: ", "viewer-bad"] }[completion.correct];
    const mark = sign && el("span", { class: sign[2] }, el("span", { "aria-hidden": "true" }, `${sign[0]} `), el("span", { class: "unseen" }, sign[1]));
    return [mark, visible(completion.text)].flat();
  }

  buttonOf(key) {
    return [...this.body.querySelectorAll(".viewer-open")].find((button) => button.dataset.key === key);
  }

  moveBetweenRows(event) {
    const moves = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const buttons = [...this.body.querySelectorAll(".viewer-open")];
    buttons[buttons.indexOf(document.activeElement) + moves[event.key]]?.focus();
  }

  pressed(event) {
    const taken = event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || event.target.closest("input, select, textarea, dialog, [role=tab]");
    if (taken || this.group === null || this.group.element.offsetParent === null) return;
    if (this.group.pressed(event.key.length === 1 ? event.key.toLowerCase() : event.key)) event.preventDefault();
  }

  /** Shows a group of the list, or another one of its prompt; `push`: as a new view, with this completion. */
  async open(row, push = true, completion = null) {
    if (push) address.set({ group: row.id, at: row.step, completion: completion > 1 ? completion : "" }, { push: !isHere(row) });
    const mine = (this.opening = this.wanted());
    const run = this.context.run();
    try {
      // A link may lack the step: the newest one is shown.
      const step = row.step === null ? {} : { step: row.step };
      const group = await this.context.fetchJson(`groups/${encodeURIComponent(row.id)}`, { run, ...step });
      const history = await this.ofPrompt(group.prompt_id, run);
      if (this.opening !== mine) return;
      const move = (by) => this.move(by);
      this.group = new GroupView(group, history, { open: (other) => this.open(other), close: () => this.close(), move });
      this.enter(this.group.element);
      this.group.title.focus({ preventScroll: true });
      this.sayPlace();
    } catch (error) {
      if (this.opening !== mine) return;
      this.group = null;
      const close = el("button", { type: "button", class: "viewer-close", onclick: () => this.close() }, "Close");
      this.enter(el("p", { role: "alert", class: "viewer-bad" }, visible(error.message), " ", close));
    }
  }

  enter(content) {
    this.list.hidden = true;
    fill(this.detail, content);
    if (this.element.getBoundingClientRect().top < 0) this.element.scrollIntoView();
  }

  /** The groups of a prompt; none where that cannot be had: the group itself is worth more. */
  async ofPrompt(id, run) {
    const path = `prompts/${encodeURIComponent(id)}`;
    return this.context.fetchJson(path, { run }).then((answer) => answer.groups, () => []);
  }

  /** Where the open group is in the list. */
  sayPlace() {
    const i = this.rows.findIndex(isHere);
    if (this.group === null) return;
    this.group.place.textContent = i < 0 ? "" : `${(this.offset + i + 1).toLocaleString("en")} of ${this.total.toLocaleString("en")}`;
  }

  /** Opens the group before (-1) or behind (1) the open one in the list. */
  async move(by) {
    const i = this.rows.findIndex(isHere);
    if (i < 0) return;
    let row = this.rows[i + by];
    const offset = this.offset + by * LIMIT;
    if (row === undefined && offset >= 0 && offset < this.total) {
      address.set({ offset: offset || "" });
      await this.load();
      row = by > 0 ? this.rows[0] : this.rows.at(-1);
    }
    if (row !== undefined) await this.open(row);
  }

  close() {
    const key = `${address.whole("at")}/${address.get("group")}`;
    address.set({ group: "", at: "", completion: "" }, { push: true });
    this.leave();
    this.load();
    const button = this.buttonOf(key);
    button?.focus({ preventScroll: true });
    button?.scrollIntoView({ block: "center" });
  }

  leave() {
    this.opening = "";
    this.group = null;
    this.detail.replaceChildren();
    this.list.hidden = false;
  }
}

/** A small square for the reward of every completion. */
function squares(rewards) {
  if (rewards.length === 0 || rewards.length > MOST_SQUARES) return null;
  const [low, high] = [Math.min(0, ...rewards), Math.max(1, ...rewards)];
  const level = (reward) => (reward === null ? "unknown" : `level${Math.round((4 * (reward - low)) / (high - low))}`);
  return el("span", { class: "squares", "aria-hidden": "true" }, rewards.map((reward) => el("i", { class: level(reward) })));
}

/** A text with what was searched for marked. */
function highlighted(text, wanted) {
  const at = wanted ? text.toLowerCase().indexOf(wanted.toLowerCase().replace(/\s+/g, " ")) : -1;
  if (at < 0) return visible(text);
  const end = at + wanted.replace(/\s+/g, " ").length;
  return [...visible(text.slice(0, at)), el("mark", {}, visible(text.slice(at, end))), ...visible(text.slice(end))];
}
