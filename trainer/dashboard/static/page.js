// The page: its tabs, the runs that are shown, and what is asked of the server when.

import { address } from "./address.js";
import { swatch } from "./charts.js";
import { RunData } from "./data.js";
import { duration, el, fill, isNumber, palette } from "./dom.js";
import { Overview } from "./overview.js";
import { RunsTable } from "./runs.js";
import { fetchJson, fetchText, put } from "./server.js";
import { Services } from "./services.js";
import { showSettings } from "./settings.js";
import { showWhy } from "./why.js";

const SERIES_MS = 2000;
const HEALTH_MS = 1500; // with HEALTH_PATIENCE_MS, what is dead is red within five seconds
const HEALTH_PATIENCE_MS = 3000;
const RUNS_MS = 5000;
const FEW = 4; // runs that are overlaid without being asked for
const PANELS = { overview: "overview", rollouts: "rollouts", runs: "runs-table", settings: "settings", why: "why" };
const TABS = Object.keys(PANELS);
const byId = (id) => document.getElementById(id);

const overview = new Overview(byId("overview"), (data, step) => fetchJson(`steps/${step}`, { run: data.run }), (data) => fetchText("csv", { run: data.run }));
const services = new Services();
const problems = el("ul", { class: "verdict warn problems", hidden: true });
overview.side.prepend(services.element);
const diagnosis = el("p", { class: "verdict bad diagnosis", role: "status", hidden: true });
byId("alarms").append(diagnosis, services.alarm, problems);
const table = new RunsTable(byId("runs-table"), { choose, overlay, keep: (run, text) => put("note", { run }, { text }) });

const runs = [];
let viewer = null;
let colours = 0;

const encoded = (data) => encodeURIComponent(data.name);

/** The run whose figures and rollouts are shown: that of the address, or the first. */
function primary() {
  return runs.find((data) => encoded(data) === address.get("run")) ?? runs[0];
}

/** The runs of the charts, the primary one first. */
function shown() {
  const first = primary();
  if (!first) return [];
  const named = address.get("with");
  const others = named ? runs.filter((data) => named.split(",").includes(encoded(data))) : runs.length <= FEW ? runs : [];
  const found = [first, ...others.filter((data) => data !== first)];
  found.forEach((data) => (data.colour ??= runs.length <= FEW ? data.run : colours++));
  return found;
}

/** Shows another run's figures. */
function choose(data, to = address.tab) {
  const others = shown().filter((each) => each !== data);
  address.set({ run: encoded(data), with: others.map(encoded).join(",") || ".", step: "", group: "", at: "", completion: "", offset: "" }, { push: true, to });
  refresh();
}

/** Draws a run over the others, or no longer. */
function overlay(data, wanted) {
  const others = shown().filter((each) => each !== data && each !== primary());
  if (wanted) others.push(data);
  address.set({ with: others.map(encoded).join(",") || "." }, { push: true });
  refresh();
}

/** Everything as the address says, as after Back. */
function refresh() {
  const name = TABS.includes(address.tab) ? address.tab : runs.length > FEW ? "runs" : "overview";
  for (const tab of TABS) {
    byId(PANELS[tab]).hidden = tab !== name;
    byId(`tab-${tab}`).tabIndex = tab === name ? 0 : -1;
    byId(`tab-${tab}`).setAttribute("aria-selected", String(tab === name));
  }
  chooser();
  head();
  sayProblems();
  if (name === "settings") showSettings(byId("settings"), shown());
  if (name === "runs") table.show(runs, primary(), shown());
  if (runs.length === 0) return;
  overview.restore();
  overview.show(shown());
  if (name === "rollouts") openViewer();
  if (name === "why") readWhy();
  readSeries().catch(() => {}); // the next round says why
}

/** Which runs there are, their settings, and what is wrong with their directories. */
async function readRuns() {
  const before = runs.length;
  for (const found of await fetchJson("runs", {}, 120000)) {
    const data = (runs[found.run] ??= new RunData(found));
    data.summary = found;
    data.problems = found.problems;
  }
  await Promise.all(shown().map(readFacts));
  if (runs.length !== before) refresh();
  else if (!byId("runs-table").hidden) table.show(runs, primary(), shown());
  sayProblems();
}

async function readFacts(data) {
  if (data.facts?.config) return;
  const before = data.facts;
  data.facts = await fetchJson("facts", { run: data.run });
  if (!byId("settings").hidden && (!before || data.facts.config)) showSettings(byId("settings"), shown());
}

/** New steps of the runs that are shown. */
async function readSeries() {
  const answers = shown().map(async (data) => {
    await readFacts(data);
    return data.take(await fetchJson("series", data.question()));
  });
  if ((await Promise.all(answers)).some(Boolean)) overview.show(shown());
  head();
}

async function readHealth() {
  if (primary()) services.show(await fetchJson("health", { run: primary().run }, HEALTH_PATIENCE_MS));
}

/** The first finding about this run, above everything else. */
async function readDiagnosis() {
  if (!primary()) return;
  const { first_line: said, findings } = await fetchJson("diagnosis", { run: primary().run });
  const [first] = findings;
  diagnosis.hidden = !first;
  if (!first) return;
  diagnosis.className = `verdict diagnosis ${first.level === "slow" ? "warn" : "bad"}`;
  fill(diagnosis, [said, el("br"), `Remedy: ${first.remedy}`]);
}

/** The answer of `rlhf why`, and a way to its groups. */
async function readWhy() {
  const answer = await fetchJson("why", { run: primary().run });
  const openGroup = (step, id) => {
    address.set({ group: id, at: step, completion: "" }, { push: true, to: "rollouts" });
    refresh();
  };
  showWhy(byId("why"), answer, openGroup);
}

/** Steps that were put together are asked for as they are, as far as they are zoomed into. */
overview.onZoom = (span) => {
  const changed = shown().map((data) => data.zoom(span));
  if (changed.some(Boolean)) readSeries();
};

/** The line at the top: how far this run is, when that was, how long it will take. */
function head() {
  const data = primary();
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
  const named = address.get("run");
  const said = shown().flatMap((data) => data.problems.map((problem) => (runs.length > 1 ? `${data.name}: ${problem}` : problem)));
  if (named && runs.length && encoded(primary()) !== named) said.unshift(`The link is to the run ${decodeURIComponent(named)}, which is not on this page.`);
  if (said.join("\n") === problems.dataset.said) return;
  problems.dataset.said = said.join("\n");
  problems.hidden = said.length === 0;
  fill(problems, said.map((problem) => el("li", {}, problem)));
}

/** The runs to choose from; only its name where there is one. */
function chooser() {
  const now = JSON.stringify([runs.map((data) => data.name), shown().map((data) => data.run)]);
  if (now === byId("runs").dataset.now || runs.length === 0) return;
  byId("runs").dataset.now = now;
  if (runs.length === 1) return void fill(byId("runs"), el("b", { title: runs[0].directory }, runs[0].name));
  const select = el("select", { "aria-label": "Run" }, runs.map((data, i) => el("option", { value: i, selected: data === primary() }, data.name)));
  select.addEventListener("change", () => choose(runs[select.value]));
  const others = runs.length <= FEW ? runs : shown();
  const boxes = others.map((data) => {
    const box = el("input", { type: "checkbox", checked: shown().includes(data), disabled: data === primary() });
    box.addEventListener("change", () => overlay(data, box.checked));
    return el("label", { title: data.directory }, box, box.checked && swatch(palette(data.colour)), data.name);
  });
  fill(byId("runs"), select, boxes);
}

/** Goes to a tab. */
function open(name) {
  address.set({}, { push: address.tab !== "" || name !== TABS[0], to: name });
  refresh();
}

async function openViewer() {
  const context = {
    run: () => primary().run,
    fetchJson,
    step: () => overview.view.step,
    onStep: (callback) => overview.onStep(callback),
  };
  if (viewer) return (await viewer)?.go();
  viewer = import("./viewer.js").then(({ mount }) => mount(byId("rollouts"), context));
  return viewer.catch((error) => fill(byId("rollouts"), el("p", { class: "missing" }, `The rollouts cannot be shown: ${error.message}`)));
}

function tabs() {
  const buttons = TABS.map((name) => byId(`tab-${name}`));
  buttons.forEach((button, i) => {
    button.addEventListener("click", () => open(TABS[i]));
    button.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by) return;
      event.preventDefault();
      const next = (i + by + TABS.length) % TABS.length;
      buttons[next].focus();
      open(TABS[next]);
    });
  });
  address.onMove(refresh);
  refresh();
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
repeat(readRuns, RUNS_MS);
repeat(readSeries, SERIES_MS);
repeat(readHealth, HEALTH_MS);
repeat(readDiagnosis, RUNS_MS);
