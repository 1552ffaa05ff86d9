// What is shown, as the part of the address behind #: `#rollouts?group=…&completion=3`. Every view can be sent as a link, and
// Back returns to the one before.

class Address {
  constructor() {
    this.callbacks = [];
    this.read();
    window.addEventListener("popstate", () => {
      this.read();
      this.callbacks.forEach((callback) => callback());
    });
  }

  read() {
    const [tab, ...rest] = location.hash.slice(1).split("?");
    Object.assign(this, { tab, parameters: new URLSearchParams(rest.join("?")) });
  }

  /** A parameter; `fallback` when there is none. */
  get(name, fallback = "") {
    return this.parameters.get(name) ?? fallback;
  }

  /** A parameter that is a whole number; null when there is none. */
  whole(name) {
    const text = this.get(name);
    return /^\d{1,15}$/.test(text) ? Number(text) : null;
  }

  /**
   * Changes parameters; empty ones leave the address. With `push` Back returns to the view before, else it is the same view.
   * `to` is another tab.
   */
  set(changes, { push = false, to = this.tab } = {}) {
    for (const [name, value] of Object.entries(changes)) {
      if (value === null || value === undefined || value === "") this.parameters.delete(name);
      else this.parameters.set(name, String(value));
    }
    this.tab = to;
    const query = this.parameters.toString().replaceAll("%2F", "/").replaceAll("%2C", ",");
    const hash = `#${to}${query ? `?${query}` : ""}`;
    if (hash === location.hash || (hash === "#" && !location.hash)) return;
    if (push) history.pushState(null, "", hash);
    else history.replaceState(null, "", hash);
  }

  /** Calls back when the person has gone back, forward, or to another address. */
  onMove(callback) {
    this.callbacks.push(callback);
  }
}

export const address = new Address();
