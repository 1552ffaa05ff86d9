// The page: its tabs, the runs that are shown, and what is asked of the server when.

import { swatch } from "./charts.js";
import { RunData } from "./data.js";
import { duration, el, fill, isNumber, palette } from "./dom.js";
import { Overview } from "./overview.js";
import { fetchJson } from "./server.js";
import { Services } from "./services.js";
import { showSettings } from "./settings.js";

const SERIES_MS = 2000;
const HEALTH_MS = 1500; // with HEALTH_PATIENCE_MS, what is dead is red within five seconds
const HEALTH_PATIENCE_MS = 3000;
const RUNS_MS = 5000;
const TABS = ["overview", "rollouts", "settings"];
const byId = (id) => document.getElementById(id);

const overview = new Overview(byId("overview"), (data, step) => fetchJson(`steps/${step}`, { run: data.run }));
const services = new Services();
const problems = el("ul", { class: "verdict warn problems", hidden: true });
overview.side.prepend(services.element);
byId("alarms").append(services.alarm, problems);

const runs = [];
let primary = 0;
let viewer = null;

const shown = () => [runs[primary], ...runs.filter((data, i) => i !== primary && data.visible)].filter(Boolean);

/** Which runs there are, their settings, and what is wrong with their directories. */
async function readRuns() {
  for (const found of await fetchJson("runs")) {
    const data = (runs[found.run] ??= Object.assign(new RunData(found), { colour: found.run, visible: true }));
    data.problems = found.problems;
    if (!data.facts?.config) {
      const before = data.facts;
      data.facts = await fetchJson("facts", { run: data.run });
      if (!before || data.facts.config) settings();
    }
  }
  sayProblems();
}

/** New steps of all runs. */
async function readSeries() {
  const answers = runs.map(async (data) => {
    const question = data.question();
    return question !== null && data.take(await fetchJson("series", question));
  });
  if ((await Promise.all(answers)).some(Boolean)) overview.show(shown());
  head();
}

async function readHealth() {
  services.show(await fetchJson("health", { run: primary }, HEALTH_PATIENCE_MS));
}

/** Steps that were put together are asked for as they are, as far as they are zoomed into. */
overview.onZoom = (span) => {
  const changed = runs.map((data) => data.zoom(span));
  if (changed.some(Boolean)) readSeries();
};

/** The line at the top: how far this run is, when that was, how long it will take. */
function head() {
  const data = runs[primary];
  if (!data) return;
  document.title = `${data.name} · rlhf-math`;
  const seconds = (data.columns.seconds ?? []).slice(-20).filter(isNumber);
  const each = seconds.reduce((a, b) => a + b, 0) / Math.max(1, seconds.length);
  const total = data.columns.total_steps?.findLast(isNumber);
  const time = data.times.at(-1);
  const ago = isNumber(time) ? Math.max(0, Date.now() / 1000 - time) : null;
  const goesOn = total > data.newest && ago !== null && ago < 60 + 5 * each;
  const parts = [
    data.newest === null ? "no step yet" : `step ${data.newest.toLocaleString("en")}${total ? ` of ${total.toLocaleString("en")}` : ""}`,
    ago === null ? "" : ago < 2 ? "just now" : `${ago < 100 ? `${Math.round(ago)} s` : duration(ago)} ago`,
    seconds.length ? `${duration(each)} a step` : "",
    goesOn ? `about ${duration((total - data.newest) * each)} left` : "",
  ];
  byId("progress").textContent = parts.filter(Boolean).join(" · ");
}

function sayProblems() {
  const said = runs.flatMap((data) => data.problems.map((problem) => (runs.length > 1 ? `${data.name}: ${problem}` : problem)));
  if (said.join("\n") === problems.dataset.said) return;
  problems.dataset.said = said.join("\n");
  problems.hidden = said.length === 0;
  fill(problems, said.map((problem) => el("li", {}, problem)));
}

/** The runs to choose from; only its name where there is one. */
function chooser() {
  if (runs.length === 1) return fill(byId("runs"), el("b", { title: runs[0].directory }, runs[0].name));
  const select = el("select", { "aria-label": "Run" }, runs.map((data, i) => el("option", { value: i }, data.name)));
  select.addEventListener("change", () => {
    primary = Number(select.value);
    overview.show(shown());
    overview.choose(null);
    head();
    settings();
  });
  const boxes = runs.map((data) => {
    const box = el("input", { type: "checkbox", checked: data.visible });
    box.addEventListener("change", () => {
      data.visible = box.checked;
      overview.show(shown());
      settings();
    });
    return el("label", { title: data.directory }, box, swatch(palette(data.colour)), data.name);
  });
  return fill(byId("runs"), select, boxes);
}

const settings = () => showSettings(byId("settings"), shown());

/** Shows one tab. */
async function open(name) {
  for (const tab of TABS) {
    byId(tab).hidden = tab !== name;
    byId(`tab-${tab}`).tabIndex = tab === name ? 0 : -1;
    byId(`tab-${tab}`).setAttribute("aria-selected", String(tab === name));
  }
  if (location.hash.slice(1) !== name) history.replaceState(null, "", `#${name}`);
  if (name === "overview") overview.draw(); // it had no width before
  if (name === "rollouts") await openViewer();
}

async function openViewer() {
  const context = {
    run: () => primary,
    fetchJson: (path, parameters = {}) => fetchJson(path, { run: primary, ...parameters }),
    step: () => overview.view.step,
    onStep: (callback) => overview.onStep(callback),
  };
  viewer ??= import("./viewer.js").then(({ mount }) => mount(byId("rollouts"), context));
  await viewer.catch((error) => fill(byId("rollouts"), el("p", { class: "missing" }, `The rollouts cannot be shown: ${error.message}`)));
}

function tabs() {
  const buttons = TABS.map((name) => byId(`tab-${name}`));
  buttons.forEach((button, i) => {
    button.addEventListener("click", () => open(TABS[i]));
    button.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by) return;
      const next = (i + by + TABS.length) % TABS.length;
      buttons[next].focus();
      open(TABS[next]);
    });
  });
  const asked = () => open(TABS.find((name) => location.hash === `#${name}`) ?? TABS[0]);
  window.addEventListener("hashchange", asked);
  asked();
}

/** Calls `act` now and again, never twice at once, and not while nobody looks. */
async function repeat(act, milliseconds) {
  for (;;) {
    try {
      if (!document.hidden) await act();
    } catch (error) {
      if (error.status === undefined) services.lost();
      else services.tell(error.message);
    }
    await new Promise((done) => setTimeout(done, milliseconds));
  }
}

tabs();
repeat(async () => {
  const before = runs.length;
  await readRuns();
  if (runs.length !== before) {
    chooser();
    await readSeries();
  }
}, RUNS_MS);
repeat(readSeries, SERIES_MS);
repeat(readHealth, HEALTH_MS);
