"use strict";
// Elements and texts. Text of others reaches the page as text alone: nothing here or below sets HTML.
const inflight = {};

/** An element with attributes (`class`, `aria-label`, ...; functions listen) and children: elements or texts. */
inflight.element = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value !== null && value !== undefined) made.setAttribute(name, String(value));
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) made.append(child instanceof Node ? child : String(child));
  }
  return made;
};

inflight.shape = (tag, attributes = {}) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
  return made;
};

/** A number with about four digits. */
inflight.number = (value) => {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size !== 0 && size < 0.001) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
};

/** Text with its control characters and overrides of direction shown, so that none of them has an effect. */
inflight.visible = (text) =>
  text.replace(/\n/g, "↵").replace(/[\u0000-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)))
    .replace(/\u007f/g, "␡")
    .replace(/[\u0080-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g,
      (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));

/** The smallest and the largest of numbers, nulls aside; [0, 1] for none. */
inflight.extent = (columns) => {
  let low = Infinity, high = -Infinity;
  for (const column of columns) {
    for (const value of column) {
      if (value === null || value === undefined) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return low <= high ? [low, high] : [0, 1];
};

/** About `count` round numbers from `low` to `high`. */
inflight.ticks = (low, high, count) => {
  const span = high - low || 1;
  const power = 10 ** Math.floor(Math.log10(span / count));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => span / each <= count) || 10 * power;
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step / 1e6; at += step) {
    found.push(Number(at.toPrecision(12)));
  }
  return found;
};

inflight.clamp = (value, low, high) => Math.max(low, Math.min(high, value));
