"use strict";
// Tables and bars.

/** A table in a box that scrolls; numbers stand right. `marked`: which rows are highlighted. */
inflight.table = (head, rows, { label, marked = () => false } = {}) => {
  const make = inflight.element;
  const cell = (value, at) => {
    const text = typeof value === "number" || value === null ? inflight.number(value) : inflight.visible(String(value));
    if (at === 0) return make("th", { scope: "row" }, text);
    return make("td", { class: typeof value === "number" ? "number" : null }, text);
  };
  const body = rows.map((row) => make("tr", { class: marked(row) ? "differs" : null }, row.map(cell)));
  return make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label || head.join(", ") },
    make("table", {}, make("thead", {}, make("tr", {}, head.map((each, at) => make("th", { scope: "col", class: at && rows.length && typeof rows[0][at] === "number" ? "number" : null }, each)))),
      make("tbody", {}, body)));
};

/** One bar for each [label, value]; `unit` follows the value, with its share of the total. */
inflight.bars = (rows, { unit = "", title = "" } = {}) => {
  const make = inflight.element;
  const most = Math.max(...rows.map((row) => row[1]), 0) || 1;
  const total = rows.reduce((sum, row) => sum + row[1], 0) || 1;
  const made = rows.map(([label, value]) => {
    const fill = make("div", { class: "fill" });
    fill.style.width = `${(100 * value) / most}%`;
    const share = `${((100 * value) / total).toFixed(value / total < 0.1 ? 1 : 0)} %`;
    return make("div", { class: "bar" }, make("span", {}, inflight.visible(String(label))),
      make("div", { class: "track" }, fill), make("span", {}, `${inflight.number(value)}${unit} · ${share}`));
  });
  return make("figure", {}, title ? make("figcaption", {}, title) : null, made);
};

/** Rows of two texts. */
inflight.facts = (rows) => inflight.element("table", {}, inflight.element("tbody", {}, rows.map(([name, text]) =>
  inflight.element("tr", {}, inflight.element("th", { scope: "row" }, name),
    inflight.element("td", {}, inflight.visible(text))))));
