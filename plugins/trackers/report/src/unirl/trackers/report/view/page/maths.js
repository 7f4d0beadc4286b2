"use strict";
// Numbers of the page: nothing here touches the document.

/**
 * Exponential moving average: a point counts half as much after `halfLife` steps. The first value is the first mean.
 * steps, values: of equal length, steps rising. halfLife: steps; 0 leaves the values as they are.
 */
function ema(steps, values, halfLife) {
  if (!(halfLife > 0)) return values.slice();
  let mean = 0;
  return values.map((value, at) => {
    const weight = at ? 0.5 ** ((steps[at] - steps[at - 1]) / halfLife) : 0;
    mean = weight * mean + (1 - weight) * value;
    return mean;
  });
}

/** Keys whose values are not the same in all recipes, with the values: [key, [text, or null where it is absent]]. */
function differences(recipes) {
  const keys = new Set(recipes.flatMap((recipe) => Object.keys(recipe)));
  const rows = [...keys].map((key) => [key, recipes.map((recipe) => (Object.hasOwn(recipe, key) ? recipe[key] : null))]);
  return rows.filter(([, values]) => values.some((value) => value !== values[0]));
}

/** Round numbers from `low` to `high`, about `count` of them. */
function ticks(low, high, count) {
  const rough = (high - low) / count;
  if (!(rough > 0) || !Number.isFinite(rough)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((one) => 1.5 * one * power >= rough);
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, at) => (first + at) * step);
}

/** The last index whose step is not above `step`; -1 when there is none. */
function indexAt(steps, step) {
  let low = 0;
  let high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** A number as people read it: 4 significant digits. */
function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return value.toLocaleString("en");
  if (size < 1e-3 || size >= 1e7) return value.toExponential(2).replace(/\.?0*e\+?/, "e");
  return String(Number(value.toPrecision(4)));
}

/** `12.3 s`, `3 min 05 s`, `2 h 07 min`, `3 d 04 h`. */
function duration(seconds) {
  const two = (value) => String(value).padStart(2, "0");
  if (seconds < 1) return `${number(seconds * 1000)} ms`;
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
  return `${Math.floor(whole / 86400)} d ${two(Math.floor((whole % 86400) / 3600))} h`;
}

/** `812 B`, `3.1 MiB`. */
function bytes(size) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (size >= 1024 && at < units.length - 1) {
    size /= 1024;
    at += 1;
  }
  return `${Number(size.toPrecision(3))} ${units[at]}`;
}
