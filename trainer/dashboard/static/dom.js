// Small things that every part of the page needs: elements, numbers as text, colours of the style sheet.

/** An element: `el("b", {class: "x", onclick: f}, "text", child)`. Text is text, never markup. */
export function el(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

/** Replaces what is in an element. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));
}

/** A number with three significant digits: 0.812, 12,300, 3.3e-7; "–" where there is none. */
export function text(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(1).replace("e+", "e");
  if (Number.isInteger(value) || size >= 1000) return Math.round(value).toLocaleString("en");
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3);
}

/** The same beside an axis, without zeros behind: 0.5, 1, 20,000, 3.3e-7. */
export function tick(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(1).replace("e+", "e");
  return Number(value.toPrecision(6)).toLocaleString("en", { maximumFractionDigits: 4 });
}

export const percent = (value) => (isNumber(value) ? `${(100 * value).toFixed(1)} %` : "–");

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** Seconds as people say them: 0.42 s, 12.3 s, 4 min, 2 h 05 min. */
export function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  if (seconds < 10) return `${seconds.toFixed(2)} s`;
  if (seconds < 100) return `${seconds.toFixed(seconds < 60 ? 1 : 0)} s`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`;
  return `${Math.floor(seconds / 3600)} h ${String(Math.floor((seconds % 3600) / 60)).padStart(2, "0")} min`;
}

/** A colour of style.css by the name of its variable. */
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** The colours of runs and of parts of a whole. */
export const palette = (index) => colour(`--series-${index % 8}`);

/** Index of the last of the sorted `values` that is not above `value`; 0 at least. */
export function lastUpTo(values, value) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return Math.max(0, low - 1);
}
