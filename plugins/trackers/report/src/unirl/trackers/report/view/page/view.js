"use strict";
// The pages: what they ask for, when they are drawn again, and what they show.

const POLL_MS = 2000;
const MOST_CHOSEN = 24;
const FIRST_CHOSEN = 6;
const FIRST_PANELS = 12;
const FIRST_METRICS = ["score_mean", "reward_mean", "share_at_threshold", "loss", "grad_norm", "clip_fraction",
  "logp_mismatch_max", "approx_kl", "kl", "reward_std", "lr"];

const state = {
  tab: "runs", chosen: [], filter: "", sort: "began", isRising: false, metrics: "", halfLife: 0, isAll: false,
  key: "eval", step: null, perPrompt: 2, prompts: "",
};
const answers = new Map();
let runs = null;
let drawn = "";

const byId = (id) => document.getElementById(id);
const words = (text) => text.toLowerCase().split(/\s+/).filter(Boolean);
const matches = (text, filter) => words(filter).every((word) => text.toLowerCase().includes(word));
const chosen = () => state.chosen.filter((name) => Object.hasOwn(runs, name)).slice(0, MOST_CHOSEN);

/** The answer to a path: of the exported page from its data, else of the server, once for each version of the run. */
async function ask(path, version) {
  if (window.UNIRL_VIEW) return window.UNIRL_VIEW[path];
  const known = answers.get(path);
  if (known && version !== undefined && known.version === version) return known.answer;
  const reply = await fetch(`api/${path}`);
  if (!reply.ok) throw new Error(`${path}: ${reply.status}`);
  const answer = await reply.json();
  answers.set(path, { version, answer });
  return answer;
}

const ofRun = (name, what) => ask(`runs/${encodeURIComponent(name)}/${what}`, runs[name].version);

const inColumns = (names, first, cells, attributes) =>
  table([first, ...names.map((name, place) => make("span", {}, swatch(place), make("bdi", {}, name)))], cells, attributes);

const PAGES = {
  runs: {
    title: "Runs",
    tools: () => [
      field("filter", { type: "search", placeholder: "name, recipe, algorithm, model, state", value: state.filter }, "filter"),
      make("button", { click: () => choose(listed().slice(0, MOST_CHOSEN)) }, "choose the shown ones"),
      make("button", { click: () => choose([]) }, "choose none"),
    ],
    collect: async () => ({}),
    draw: () => [runsTable()],
  },
  curves: {
    title: "Curves",
    tools: () => [
      field("metrics", { type: "search", placeholder: "loss, reward, ...", value: state.metrics }, "metrics"),
      select("smoothing", "halfLife", [0, 1, 2, 5, 10, 20, 50, 100, 500].map((steps) => [steps, steps ? `half-life ${steps} steps` : "none"])),
    ],
    collect: async (names) => Promise.all(names.map((name) => ofRun(name, "curves"))),
    draw: (data, names) => panels(data, names, (curve) => curve.group !== "seconds" && matches(`${label(curve)}`, state.metrics)),
  },
  recipes: {
    title: "Recipes",
    tools: () => [],
    collect: async (names) => (await Promise.all(names.map((name) => ofRun(name, "details")))).map((one) => one.recipe),
    draw: (recipes, names) => {
      if (names.length < 2) return [note("Choose two runs or more: this page shows the settings that differ between them.")];
      const rows = differences(recipes);
      const same = Object.keys(recipes[0]).length - rows.filter(([, values]) => values[0] !== null).length;
      return [
        note(`${rows.length} settings differ, ${same} are the same.`),
        inColumns(names, "setting", rows.map(([key, values]) => [make("code", {}, key), ...values.map((value) => value ?? "–")]), { class: "texts" }),
      ];
    },
  },
  samples: {
    title: "Samples",
    tools: () => [
      select("samples of", "key", [["eval", "held-out prompts"], ["train", "training"]]),
      make("label", {}, "step ", make("input", { id: "step", type: "range", input: (event) => set({ step: Number(event.target.value) }) }), make("output", { id: "at" })),
      select("of a prompt", "perPrompt", [1, 2, 4, 8, 16].map((count) => [count, count])),
      field("prompts", { type: "search", placeholder: "words of a prompt", value: state.prompts }, "prompts"),
    ],
    collect: collectSamples,
    draw: drawSamples,
  },
  findings: {
    title: "Findings",
    tools: () => [],
    collect: async (names) => Promise.all(names.map((name) => ofRun(name, "details"))),
    draw: (data, names) => names.map((name, place) => make("section", {},
      make("h2", {}, swatch(place), make("bdi", {}, name)),
      data[place].findings.length ? null : note("none"),
      data[place].num_findings > data[place].findings.length ? note(`The last ${data[place].findings.length} of ${data[place].num_findings}.`) : null,
      make("ul", {}, data[place].findings.map((one) => make("li", { dir: "auto" }, make("span", { class: "faint" }, `step ${one.step}: `), one.text))))),
  },
  costs: {
    title: "Time and memory",
    tools: () => [],
    collect: async (names) => Promise.all(names.map(async (name) => ({ ...(await ofRun(name, "details")), curves: await ofRun(name, "curves") }))),
    draw: (data, names) => [...costTables(data, names), ...panels(data.map((one) => one.curves), names, (curve) => curve.group === "seconds")],
  },
};

const note = (text) => make("p", { class: "faint" }, text);

function field(name, attributes, key) {
  const input = make("input", { ...attributes, "aria-label": name, input: (event) => set({ [key]: event.target.value }) });
  return make("label", {}, `${name} `, input);
}

function select(name, key, options) {
  const change = (event) => set({ [key]: options[event.target.selectedIndex][0] });
  return make("label", {}, `${name} `, make("select", { change },
    options.map(([value, text]) => make("option", { selected: value === state[key] }, text))));
}

const label = ({ group, name }) => ({ train: name, "held-out": `held-out ${name}`, seconds: `${name}, seconds` })[group];

function panels(data, names, isShown) {
  const found = new Map();
  data.forEach((curves, place) => {
    for (const curve of curves.filter(isShown)) {
      const title = label(curve);
      if (!found.has(title)) found.set(title, []);
      found.get(title).push({ ...curve, place, name: names[place] });
    }
  });
  const rank = (title) => {
    const at = FIRST_METRICS.indexOf(title.split(/[ /]/).pop());
    return at < 0 || title.includes("reward/") ? FIRST_METRICS.length : at;
  };
  const titles = [...found.keys()].sort((one, other) => rank(one) - rank(other));
  if (!titles.length) return [note(names.length ? "No numbers yet." : "Choose runs on the first page.")];
  const shown = state.isAll || state.metrics ? titles : titles.slice(0, FIRST_PANELS);
  const more = titles.length - shown.length;
  return [
    make("div", { class: "charts" }, shown.map((title) => chart(title, found.get(title), state.halfLife))),
    more ? make("button", { click: () => set({ isAll: true }) }, `show ${more} more`) : null,
  ];
}

const COLUMNS = [
  ["name", "run", (name, row) => [make("button", { class: "link", click: () => choose([name]) }, make("bdi", {}, name)), row.problem ? make("div", { class: "bad" }, row.problem) : null]],
  ["state", "state", (_, row) => [make("span", { class: `state ${row.state}` }, row.state), row.read < 1 && !row.problem ? make("div", { class: "faint" }, `${Math.floor(row.read * 100)} % read`) : null]],
  ["recipe", "recipe", (_, row) => row.recipe],
  ["algorithm", "algorithm", (_, row) => row.algorithm],
  ["model", "model", (_, row) => row.model],
  ["step", "steps", (_, row) => (row.steps ? `${number(row.step)} of ${number(row.steps)}` : number(row.step))],
  ["held_out", "held-out reward", (_, row) => number(row.held_out)],
  ["best_held_out", "best", (_, row) => number(row.best_held_out)],
  ["reward", "training reward", (_, row) => number(row.reward)],
  ["best_reward", "best", (_, row) => number(row.best_reward)],
  ["seconds", "time", (_, row) => duration(row.seconds)],
  ["findings", "findings", (_, row) => number(row.findings)],
  ["began", "started", (_, row) => (row.began ? new Date(row.began * 1000).toISOString().slice(0, 16).replace("T", " ") : "–")],
];

function listed() {
  const value = (name) => (state.sort === "name" ? name : runs[name][state.sort]);
  const names = Object.keys(runs).filter((name) =>
    matches([name, runs[name].name, runs[name].recipe, runs[name].algorithm, runs[name].model, runs[name].state].join(" "), state.filter));
  const absent = (one) => one === null || one === undefined;
  return names.sort((one, other) => {
    const [left, right] = [value(one), value(other)];
    if (absent(left) || absent(right)) return absent(left) - absent(right);
    const order = typeof left === "string" ? left.localeCompare(right, "en", { numeric: true }) : left - right;
    return state.isRising ? order : -order;
  });
}

function runsTable() {
  const names = listed();
  const places = new Map(chosen().map((name, place) => [name, place]));
  const sort = (key) => set({ sort: key, isRising: state.sort === key ? !state.isRising : key === "name" });
  const mark = (key) => (state.sort === key ? (state.isRising ? " ▲" : " ▼") : "");
  const toggle = (name) => choose(state.chosen.includes(name) ? state.chosen.filter((one) => one !== name) : [...state.chosen, name]);
  const heads = COLUMNS.map(([key, title]) => make("button", { class: "link", click: () => sort(key) }, title + mark(key)));
  const rows = names.map((name) => [
    make("label", { class: "pick" },
      make("input", { type: "checkbox", "aria-label": `choose ${name}`, checked: places.has(name), change: () => toggle(name) }),
      places.has(name) ? swatch(places.get(name)) : null),
    ...COLUMNS.map(([, , cell]) => make("span", {}, ...[cell(name, runs[name])].flat().filter(Boolean))),
  ]);
  return make("div", {}, note(`${names.length} of ${Object.keys(runs).length} runs`), table(["", ...heads], rows, { class: "runs" }));
}

async function collectSamples(names) {
  const saved = await Promise.all(names.map((name) => ofRun(name, "samples")));
  const steps = [...new Set(saved.flatMap((one) => one[state.key]))].sort((one, other) => one - other);
  const at = steps.length ? steps[Math.max(0, indexAt(steps, state.step ?? Infinity))] : null;
  const columns = await Promise.all(names.map(async (name, place) => {
    const own = saved[place][state.key];
    const step = own[indexAt(own, at)];
    if (step === undefined) return { families: [], step: null, problem: saved[place].problem };
    return { step, ...(await ofRun(name, `samples/${state.key}/${step}`)) };
  }));
  return { steps, at, columns };
}

function drawSamples({ steps, at, columns }, names) {
  const slider = byId("step");
  filled(slider, { min: steps[0] ?? 0, max: steps[steps.length - 1] ?? 0 }, []);
  slider.disabled = steps.length < 2;
  slider.value = at ?? 0;
  byId("at").textContent = at ?? "–";
  if (at === null) {
    const problems = columns.filter((one) => one.problem).map((one) => make("p", { class: "bad" }, one.problem));
    return [...problems, note(names.length ? "These runs have no saved samples of this kind." : "Choose runs on the first page.")];
  }
  const questions = new Map();
  columns.forEach((column, place) => {
    for (const family of column.families) {
      const question = JSON.stringify([family.prompt, family.asked]);
      if (!questions.has(question)) questions.set(question, { family, cells: names.map(() => null) });
      questions.get(question).cells[place] = family;
    }
  });
  const shown = [...questions.values()].filter(({ family }) => matches(family.prompt, state.prompts));
  const rows = shown.map(({ family, cells }) => [
    make("div", { class: "prompt", dir: "auto" }, family.prompt, make("div", { class: "made" }, family.inputs.map((source) => make("img", { src: source, alt: "image of the prompt", class: "tile" })))),
    ...cells.map((cell, place) => cell ? make("div", { class: "cells" }, cell.branches.slice(0, state.perPrompt).map((one) => tile(one, [], (path) => open(cell, path, names[place])))) : "–"),
  ]);
  const heads = names.map((name, place) => make("span", {}, swatch(place), make("bdi", {}, name),
    make("div", { class: columns[place].problem ? "bad" : "faint" }, columns[place].problem || (columns[place].step === null ? "none yet" : `step ${columns[place].step}`))));
  return [table(["prompt", ...heads], rows, { class: "samples" })];
}

function open(family, path, name) {
  const sample = path[path.length - 1];
  const hint = state.key === "train" && sample.name ? `unirl show ${runs[name].folder} --sample ${sample.name}` : "";
  byId("dialog").replaceChildren(...lineage(family, path, hint));
  byId("dialog").showModal();
}

function costTables(data, names) {
  const rows = (key, cell) => [...new Set(data.flatMap((one) => one[key].map((item) => item.name)))].map((name) =>
    [name, ...data.map((one) => cell(one[key].find((item) => item.name === name), one))]);
  const phase = (item, one) => {
    if (!item) return "–";
    const all = one.phases.reduce((sum, each) => sum + each.total, 0);
    return `${duration(item.total / item.times)} · ${all ? Math.round((100 * item.total) / all) : 0} %`;
  };
  const size = (name, value) => (name.endsWith("_mib") ? bytes(value * 2 ** 20) : name.endsWith("_bytes") ? bytes(value) : number(value));
  const memory = (item) => (item ? `${size(item.name, item.last)} · ${size(item.name, item.highest)}` : "–");
  if (!names.length) return [];
  const sizes = rows("memory", memory);
  return [
    make("section", {}, make("h2", {}, "Phases"), note("Mean seconds, and the share of all phases."), inColumns(names, "phase", rows("phases", phase))),
    make("section", {}, make("h2", {}, "Memory"), note("The last value and the highest one, as the run recorded them."), sizes.length ? inColumns(names, "number", sizes) : note("none recorded")),
  ];
}

function set(changes) {
  Object.assign(state, changes);
  refresh();
}

function choose(names) {
  state.chosen = names;
  remember();
  refresh();
}

function remember() {
  history.replaceState(null, "", `#${new URLSearchParams([["tab", state.tab], ...state.chosen.map((name) => ["run", name])])}`);
}

function go(tab) {
  state.tab = tab;
  remember();
  byId("tabs").replaceChildren(...Object.entries(PAGES).map(([name, page]) =>
    make("button", { "aria-current": name === tab ? "page" : null, click: () => go(name) }, page.title)));
  byId("tools").replaceChildren(...PAGES[tab].tools());
  byId("body").replaceChildren();
  drawn = "";
  refresh();
}

/** Draw the page again if what it shows has changed. */
async function refresh() {
  if (runs === null) return;
  const { tab } = state;
  const names = chosen();
  const legend = state.tab === "runs" ? [] : names.map((name, place) =>
    make("button", { title: "leave this run out", click: () => choose(state.chosen.filter((one) => one !== name)) }, swatch(place), make("bdi", {}, name), " ×"));
  if (state.chosen.length > MOST_CHOSEN) legend.push(note(`The first ${MOST_CHOSEN} of ${state.chosen.length} chosen runs are shown.`));
  byId("chosen").replaceChildren(...legend);
  const problems = tab === "runs" ? [] : names.filter((name) => runs[name].problem);
  byId("problems").replaceChildren(...problems.map((name) => make("p", { class: "bad" }, runs[name].problem)));
  const data = await PAGES[tab].collect(names);
  const now = JSON.stringify([state, names, tab === "runs" ? runs : data]);
  // A later refresh may have overtaken this one.
  if (now === drawn || tab !== state.tab || names.join() !== chosen().join()) return;
  drawn = now;
  byId("body").replaceChildren(...PAGES[tab].draw(data, names).filter(Boolean));
}

async function poll() {
  let wait = POLL_MS;
  try {
    const answer = await ask("runs");
    const isFirst = runs === null;
    runs = answer.runs;
    if (isFirst && !chosen().length) {
      const began = (name) => runs[name].began ?? 0;
      state.chosen = Object.keys(runs).sort((one, other) => began(other) - began(one)).slice(0, FIRST_CHOSEN);
    }
    const running = Object.values(runs).filter((row) => row.state === "running").length;
    byId("live").textContent = window.UNIRL_VIEW ? "exported" : answer.is_more ? "reading …" : running ? `live: ${running} running` : "live";
    if (answer.is_more) wait = 500;
    await refresh();
  } catch (error) {
    byId("live").textContent = `no answer: ${error.message}`;
  }
  if (!window.UNIRL_VIEW) setTimeout(poll, wait);
}

const given = new URLSearchParams(location.hash.slice(1));
state.chosen = given.getAll("run");
go(Object.hasOwn(PAGES, given.get("tab")) ? given.get("tab") : "runs");
poll();
