// One group to read: a completion at reading width, the others beside it or below, its prompt, and the same prompt in other steps.

import { address } from "./address.js";
import { el, fill } from "./dom.js";
import { reading } from "./prose.js";
import { VIEWS, body, facts, summary, tone, verdict } from "./viewer_completion.js";
import { acrossSteps } from "./viewer_history.js";
import { SHADES, legend, prose, short, visible } from "./viewer_text.js";

const ORDERS = {
  "": { label: "as sampled", by: () => 0 },
  reward: { label: "reward", by: (c) => c.reward },
  advantage: { label: "advantage", by: (c) => c.advantage },
  length: { label: "length", by: (c) => c.token_ids.length },
};
const BEGINNING = 160;

/** The view of a group. `context` has `open(row)`, `close()` and `move(by)`, which shows a neighbour in the list. */
export class GroupView {
  constructor(group, history, context) {
    Object.assign(this, { group, context, bodies: [] });
    this.tip = el("output", { class: "viewer-tip", hidden: true });
    this.title = el("h3", { tabindex: "-1", id: "viewer-title" }, heading(group));
    this.place = el("span", { class: "viewer-muted viewer-place" });
    this.main = el("div", { class: "reader-main" });
    this.list = el("ol", { class: "reader-list" });
    this.key = el("div", { class: "viewer-key" });
    this.element = el(
      "section",
      { class: "reader", "aria-labelledby": "viewer-title" },
      this.bar(),
      el(
        "div",
        { class: "reader-columns" },
        el("div", { class: "reader-left" }, this.trouble(), problem(group), this.main),
        this.side(history),
      ),
      this.tip,
    );
    this.draw();
  }

  bar() {
    const { close, move } = this.context;
    const button = (label, title, act) => el("button", { type: "button", title, "aria-label": title, onclick: act }, label);
    return el(
      "div",
      { class: "reader-bar" },
      el("button", { type: "button", class: "viewer-close", title: "Back to the list (Escape)", onclick: close }, "‹ All groups"),
      this.title,
      this.place,
      el("span", { class: "buttons" }, button("↑", "Previous group (K)", () => move(-1)), button("↓", "Next group (J)", () => move(1))),
    );
  }

  trouble() {
    const { group } = this;
    return [
      group.reason && el("p", { class: "viewer-bad" }, `Dropped (${group.reason}): `, visible(group.detail ?? "")),
      group.lost_episodes.length > 0 && el("ul", { class: "viewer-missing" }, group.lost_episodes.map((each) => el("li", {}, "Lost episode: ", visible(each)))),
      group.missing.length > 0 && el("ul", { class: "viewer-missing" }, group.missing.map((each) => el("li", {}, `Not known: ${each}`))),
    ];
  }

  side(history) {
    const sort = el("select", { name: "order" }, Object.entries(ORDERS).map(([value, { label }]) => el("option", { value }, label)));
    sort.value = this.order;
    sort.addEventListener("change", () => {
      address.set({ order: sort.value });
      this.draw();
    });
    const count = this.group.completions.length;
    return el(
      "aside",
      { class: "reader-side", "aria-label": "Completions of the group" },
      el("div", { class: "reader-sort" }, el("h4", {}, `${count} completion${count === 1 ? "" : "s"}`), el("label", {}, "by ", sort)),
      this.list,
      el("details", {}, el("summary", {}, "About this group"), about(this.group)),
      acrossSteps(this.group, history, this.context.open),
      el("p", { class: "viewer-muted viewer-keys" }, "Keys: ← → completion, J K group, T text or tokens, A all, Escape list"),
    );
  }

  get order() {
    return address.get("order") in ORDERS ? address.get("order") : "";
  }

  get view() {
    return address.get("show") in VIEWS ? address.get("show") : "text";
  }

  get all() {
    return address.get("all") === "1";
  }

  /** Indices of the completions in the order that is asked for; what is not known comes last. */
  sorted() {
    const { by } = ORDERS[this.order];
    const value = (i) => by(this.group.completions[i]) ?? -Infinity;
    return this.group.completions.map((_, i) => i).sort((a, b) => value(b) - value(a) || a - b);
  }

  /** The completion of the address, or the first in order. */
  get chosen() {
    const number = address.whole("completion");
    return number !== null && number >= 1 && number <= this.group.completions.length ? number - 1 : this.sorted()[0];
  }

  choose(i) {
    address.set({ completion: i + 1 });
    this.draw();
    if (this.all) this.main.children[this.sorted().indexOf(i) + 1]?.scrollIntoView({ block: "start" });
  }

  step(by) {
    const order = this.sorted();
    const next = order[order.indexOf(this.chosen) + by];
    if (next !== undefined) this.choose(next);
  }

  /** Shows what the address says. */
  draw() {
    const { completions } = this.group;
    const order = this.sorted();
    const shown = this.all ? order : order.length ? [this.chosen] : [];
    this.tip.hidden = true;
    const cards = shown.map((i) => this.card(completions[i], i));
    fill(this.main, this.controls(), cards.map((card) => card.element), completions.length === 0 && el("p", {}, "There are no completions."));
    this.main.classList.toggle("all", this.all);
    this.bodies = cards;
    this.shade();
    const focused = this.list.contains(document.activeElement);
    fill(this.list, order.map((i) => this.entry(completions[i], i)));
    const current = this.list.querySelector("[aria-current]");
    if (focused) current?.focus({ preventScroll: true });
    if (current && this.list.scrollHeight > this.list.clientHeight) {
      const line = current.closest("li");
      const low = line.offsetTop - this.list.offsetTop;
      if (low < this.list.scrollTop || low + line.offsetHeight > this.list.scrollTop + this.list.clientHeight) this.list.scrollTop = low - 40;
    }
  }

  controls() {
    const views = Object.entries(VIEWS).map(([name, label]) => {
      const missing = name === "tokens" && !this.group.completions.some((completion) => completion.tokens);
      const pressed = String(this.view === name);
      return el("button", { type: "button", "aria-pressed": pressed, disabled: missing, onclick: () => this.show(name) }, label);
    });
    const all = el("button", { type: "button", "aria-pressed": String(this.all), title: "All completions (A)", onclick: () => this.toggle() }, "All");
    const back = el("button", { type: "button", "aria-label": "Previous completion (←)", title: "Previous completion (←)", onclick: () => this.step(-1) }, "‹");
    const on = el("button", { type: "button", "aria-label": "Next completion (→)", title: "Next completion (→)", onclick: () => this.step(1) }, "›");
    return el(
      "div",
      { class: "reader-controls" },
      this.group.completions.length > 1 && el("span", { class: "buttons" }, back, on, all),
      el("span", { class: "buttons", role: "group", "aria-label": "View" }, views),
      this.view === "tokens" && this.shades(),
    );
  }

  show(view) {
    address.set({ show: view === "text" ? "" : view });
    this.draw();
  }

  toggle() {
    address.set({ all: this.all ? "" : 1 });
    this.draw();
  }

  shades() {
    const perToken = this.group.completions.some((completion) => completion.advantages);
    const names = Object.keys(SHADES).filter((name) => name !== "advantage" || perToken);
    const shade = names.includes(address.get("shade")) ? address.get("shade") : "rollout";
    const select = el("select", { name: "shade" }, names.map((name) => el("option", { value: name, selected: name === shade }, SHADES[name].label)));
    select.addEventListener("change", () => {
      address.set({ shade: select.value === "rollout" ? "" : select.value });
      this.shade();
    });
    return [el("label", {}, "Shaded by ", select), this.key];
  }

  shade() {
    if (this.view !== "tokens") return;
    const name = address.get("shade") in SHADES ? address.get("shade") : "rollout";
    this.bodies.forEach((each) => each.shade(name));
    fill(this.key, legend(name, this.group.completions.some((completion) => completion.mask !== null)));
  }

  card(completion, i) {
    const label = `Completion ${i + 1}`;
    const text = body(completion, i + 1, this.view, (said, span) => tell(this.tip, said, span));
    const sequences = this.group.completions.filter((each) => each.episode !== null && each.episode === completion.episode).length;
    const element = el(
      "article",
      { class: "reader-card", "aria-label": label },
      el(
        "header",
        {},
        el("h4", {}, `${label} of ${this.group.completions.length} `, el("span", { class: tone(completion) }, verdict(completion))),
        el("p", { class: "viewer-muted" }, summary(completion).join(" · "), sequences > 1 ? ` · one of ${sequences} sequences of episode ${completion.episode + 1}` : ""),
      ),
      completion.prompt_tokens && el("details", {}, el("summary", {}, "Its own prompt"), prose(completion.prompt_tokens.join(""))),
      text.element,
      el("details", { class: "viewer-facts" }, el("summary", {}, "Reward, advantage, weights"), facts(completion)),
    );
    return { element, shade: text.shade };
  }

  /** A line of the list of completions. */
  entry(completion, i) {
    const said = summary(completion);
    const button = el(
      "button",
      { type: "button", "data-completion": i + 1, "aria-current": i === this.chosen && "true", onclick: () => this.choose(i) },
      el("b", {}, String(i + 1)),
      el("span", { class: tone(completion) }, verdict(completion)),
      el("span", { class: "viewer-muted" }, said.slice(0, -1).join(" · ") || said.join(" · ")),
      el("span", { class: "reader-begin" }, visible(completion.text.slice(0, BEGINNING).replace(/\s+/g, " "), false)),
    );
    return el("li", {}, button);
  }

  /** A key that was pressed anywhere on the page; returns whether it meant something here. */
  pressed(key) {
    const acts = {
      ArrowLeft: () => this.step(-1),
      ArrowRight: () => this.step(1),
      j: () => this.context.move(1),
      k: () => this.context.move(-1),
      t: () => this.show(this.view === "text" ? "tokens" : "text"),
      a: () => this.toggle(),
      Escape: () => this.context.close(),
    };
    acts[key]?.();
    return key in acts;
  }
}

function heading(group) {
  return `${group.reason ? "Dropped group" : "Group"} of step ${group.step.toLocaleString("en")}`;
}

function about(group) {
  const rows = [
    ["Prompt", group.prompt_id],
    ["Position", short(group.position)],
    ["Epoch", short(group.epoch)],
    ["Made", group.created_at === null ? "–" : new Date(1000 * group.created_at).toLocaleString()],
    ...(group.reused ? [["Reused", `with weight ${short(group.weight)}`]] : []),
    ["Id", group.id],
    ...Object.entries(group.metadata ?? {}).map(([name, value]) => [`· ${name}`, typeof value === "string" ? value : JSON.stringify(value)]),
  ];
  return el("dl", {}, rows.map(([name, value]) => [el("dt", {}, visible(name)), el("dd", {}, visible(String(value)))]));
}

function problem(group) {
  const seen = group.prompt_tokens?.join("");
  return el(
    "div",
    { class: "viewer-problem" },
    el("h4", {}, "Prompt"),
    reading(group.prompt),
    el("h4", {}, "Ground truth"),
    reading(group.ground_truth),
    seen && el("details", {}, el("summary", {}, `As the model got it (${group.prompt_tokens.length} tokens)`), prose(seen)),
  );
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
