"use strict";
// Elements of the page. Texts of runs are only ever set as text.

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

const make = (tag, attributes, ...children) => filled(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

/** Colour of the run at this place among the chosen ones. */
function color(place) {
  return place < 8 ? `var(--series${place})` : `hsl(${(place * 137.5) % 360} 60% 52%)`;
}

function swatch(place) {
  const mark = make("i", { class: "swatch" });
  mark.style.background = color(place);
  return mark;
}

/** A table; heads and cells are texts or elements, the first column is a heading. */
function table(heads, rows, attributes) {
  const cell = (content, at) => make(at ? "td" : "th", at ? {} : { scope: "row" }, content);
  return make("div", { class: "wide" },
    make("table", attributes || {},
      make("thead", {}, make("tr", {}, heads.map((head) => make("th", { scope: "col" }, head)))),
      make("tbody", {}, rows.map((row) => make("tr", {}, row.map(cell))))));
}

const CHART = { width: 440, height: 250, left: 52, right: 10, top: 10, bottom: 26 };

/**
 * A figure with one curve for each line. lines: [{place, name, steps, values, means}]. halfLife: of the smoothing, in
 * steps. The values themselves stay visible behind smoothed curves.
 */
function chart(title, lines, halfLife) {
  const ends = (lists) => {
    let [low, high] = [Infinity, -Infinity];
    for (const list of lists) for (const one of list) [low, high] = [Math.min(low, one), Math.max(high, one)];
    return [low, high];
  };
  const [first, last] = ends(lines.map((line) => [line.steps[0], line.steps[line.steps.length - 1]]));
  let [low, high] = ends(lines.map((line) => line.values));
  const room = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
  [low, high] = [low - room, high + room];
  const { width, height, left, right, top, bottom } = CHART;
  const x = (step) => left + (last > first ? (step - first) / (last - first) : 0.5) * (width - left - right);
  const y = (value) => height - bottom - ((value - low) / (high - low)) * (height - top - bottom);
  const path = (steps, values) =>
    values.map((value, at) => `${at ? "L" : "M"}${x(steps[at]).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  const drawn = lines.map((line) => {
    const base = line.means || line;
    const smooth = halfLife ? { steps: base.steps, values: ema(base.steps, base.values, halfLife) } : line;
    const curve = (data, kind) => styled(svg("path", { class: kind, d: path(data.steps, data.values) }), "stroke", line.place);
    const dots = smooth.steps.length > 12 ? [] : smooth.values.map((value, at) =>
      styled(svg("circle", { cx: x(smooth.steps[at]), cy: y(value), r: 3 }), "fill", line.place));
    return { line, smooth, marks: [halfLife ? curve(line, "curve faint") : null, curve(smooth, "curve"), dots] };
  });
  const grid = ticks(low, high, 5).map((value) => [
    svg("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
    svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, number(Number(value.toPrecision(6)))),
  ]);
  const steps = ticks(first, last, 5).filter(Number.isInteger).map((step) =>
    svg("text", { x: x(step), y: height - 8, "text-anchor": "middle" }, number(step)));
  const cursor = svg("line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" });
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title },
    grid.flat(), steps, drawn.flatMap((one) => one.marks.flat()), cursor);
  const readout = make("div", { class: "readout", hidden: true });
  const point = (event) => {
    const box = picture.getBoundingClientRect();
    const share = (((event.clientX - box.left) / box.width) * width - left) / (width - left - right);
    const step = Math.min(last, Math.max(first, Math.round(first + share * (last - first))));
    const rows = drawn.flatMap(({ line, smooth }) => {
      const at = indexAt(smooth.steps, step);
      return at < 0 ? [] : [make("div", {}, swatch(line.place), make("b", {}, number(smooth.values[at])), " ", make("bdi", {}, line.name))];
    });
    filled(cursor, { x1: x(step), x2: x(step), visibility: "visible" }, []);
    readout.replaceChildren(make("div", { class: "faint" }, `step ${number(step)}`), ...rows.slice(0, 12));
    readout.hidden = false;
    readout.classList.toggle("leftward", share > 0.5);
  };
  const leave = () => {
    readout.hidden = true;
    cursor.setAttribute("visibility", "hidden");
  };
  picture.addEventListener("pointermove", point);
  picture.addEventListener("pointerleave", leave);
  return make("figure", { class: "chart" }, make("figcaption", { dir: "auto" }, title), picture, readout);
}

function styled(element, property, place) {
  element.style.setProperty(property, color(place));
  return element;
}

/** The picture or the text of a sample. */
function content(sample, isLarge) {
  if (sample.image === undefined) {
    if (!sample.tail) return make("div", { class: "text", dir: "auto" }, sample.head.trim() ? sample.head : "no text");
    const whole = sample.all.length > 1 ? [sample.all[0], "\n… not shown …\n", sample.all[1]] : sample.all;
    if (isLarge) return make("div", { class: "text", dir: "auto" }, whole);
    return make("details", { class: "text", dir: "auto" },
      make("summary", {}, sample.head, make("span", { class: "more" }, ` … all ${number(sample.characters)} characters … `), sample.tail),
      whole);
  }
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const source = sample.animation && !still ? sample.animation : sample.image;
  return make("img", { src: source, alt: sample.stage ? `${sample.stage}: sample` : "sample", loading: "lazy", class: isLarge ? "large" : "tile" });
}

/** A line of facts about a sample. */
function facts(sample) {
  const reward = sample.reward === null ? null : make("b", {}, sample.reward.toFixed(3));
  const cut = sample.truncated ? make("span", { class: "cut" }, " truncated") : null;
  return make("div", { class: "facts" }, sample.stage ? `${sample.stage} ` : null, reward, cut);
}

/** A sample as a tile: a click shows where it comes from and what was made of it. */
function tile(sample, ancestors, open) {
  const button = make("button", { class: "sample", title: sample.name || "lineage of this sample", click: () => open([...ancestors, sample]) });
  if (sample.image === undefined) {
    filled(button, {}, [facts(sample)]);
    return make("div", { class: "card" }, button, content(sample, false), children(sample, ancestors, open));
  }
  filled(button, {}, [content(sample, false), facts(sample)]);
  return make("div", { class: "card" }, button, children(sample, ancestors, open));
}

function children(sample, ancestors, open) {
  if (!sample.branches.length) return null;
  return make("div", { class: "made" }, sample.branches.map((one) => tile(one, [...ancestors, sample], open)));
}

/** The dialog of a sample: its prompt, its ancestors in order, itself, and what was made from it. */
function lineage(family, path, hint) {
  const sample = path[path.length - 1];
  const part = (one) => make("section", {}, make("div", { class: "faint" }, one.name), facts(one), content(one, true));
  const down = sample.branches.length ? [make("h3", {}, "made from it"), make("div", { class: "made" }, sample.branches.map(part))] : [];
  return [
    make("form", { method: "dialog" }, make("button", {}, "close")),
    make("h3", {}, "prompt"),
    make("div", { class: "text", dir: "auto" }, family.prompt),
    make("div", { class: "made" }, family.inputs.map((source) => make("img", { src: source, alt: "image of the prompt", class: "tile" }))),
    ...path.flatMap((one, at) => [make("div", { class: "arrow" }, at ? "↓ made from it" : "↓ sampled"), part(one)]),
    ...down,
    hint ? make("p", { class: "faint" }, "All about it: ", make("code", {}, hint)) : "",
  ];
}
