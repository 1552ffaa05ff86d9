// How every service and rollout node is: one line each, red at once when it does not answer.

import { duration, el, fill, isNumber, text } from "./dom.js";

const WORDS = { healthy: "healthy", warning: "not serving", dead: "dead" };

export class Services {
  constructor() {
    this.list = el("ul", { class: "services" });
    this.element = el("section", { class: "panel", id: "services", hidden: true }, el("h2", {}, "Services"), this.list);
    this.since = null;
    this.alarm = el("p", { class: "verdict bad", role: "alert", hidden: true });
  }

  /** Shows the answer of `/dashboard/api/health`. */
  show({ asked, services }) {
    this.since = null;
    this.element.classList.remove("lost");
    this.element.hidden = !asked; // a page over a run directory knows of no services
    fill(this.list, services.map(line));
    const dead = services.filter((service) => service.state === "dead");
    this.tell(dead.map(({ name, text: why, since_s }) => `${name} is dead${since(since_s)}: ${why}`).join(" · "));
  }

  /** What must be seen at once; nothing when empty. */
  tell(said) {
    if (this.alarm.textContent !== said) this.alarm.textContent = said;
    this.alarm.hidden = !said;
  }

  /** The server of this page does not answer. */
  lost() {
    this.since ??= new Date();
    this.tell(`This page's server does not answer since ${this.since.toLocaleTimeString()}. What is shown is from before.`);
    this.element.classList.add("lost");
  }
}

const since = (seconds) => (seconds < 1 ? "" : ` for ${seconds < 60 ? `${Math.round(seconds)} s` : duration(seconds)}`);

function line(service) {
  const { name, state, version, running, waiting, tokens_per_s: speed } = service;
  const numbers = [
    isNumber(version) ? ["weights", version] : null,
    isNumber(running) ? ["in work", running] : null,
    isNumber(waiting) ? ["waiting", waiting] : null,
    isNumber(speed) ? ["tokens/s", speed] : null,
  ].filter(Boolean);
  const how = state === "healthy" ? "" : `${WORDS[state]}${since(service.since_s)}: `;
  return el(
    "li",
    { class: state, "data-name": name },
    el("i", { class: "dot", role: "img", "aria-label": WORDS[state] }),
    el("b", {}, name),
    el("span", { class: "text" }, how + service.text),
    numbers.length ? el("span", { class: "numbers" }, numbers.map(([label, value]) => el("span", {}, `${label} `, el("b", {}, text(value))))) : null,
  );
}
