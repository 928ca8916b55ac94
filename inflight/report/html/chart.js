"use strict";
// Curves over steps, tokens or seconds, as SVG. The numbers under the pointer, or under the cursor that the arrow keys
// move, stand below as text.
inflight.charts = [];

inflight.Chart = class {
  /** `series`: [{name, values, colour}]; `x`: () => {label, values}; `range`: [low, high] of y; `points`: dots. */
  constructor({ title, series, x, range = null, points = false, zero = false }) {
    Object.assign(this, { title, series, x, range, points, zero, at: null, width: 0 });
    const make = inflight.element;
    this.svg = inflight.shape("svg", { role: "img", tabindex: 0, "aria-label": title });
    this.readout = make("div", { class: "readout", "aria-live": "polite" });
    const legend = make("div", { class: "legend" }, series.map((each) => {
      const swatch = make("span", { class: "swatch" });
      swatch.style.background = each.colour;
      return make("span", {}, swatch, each.name);
    }));
    this.figure = make("figure", {}, make("figcaption", {}, title), series.length > 1 ? legend : null, this.svg, this.readout);
    this.svg.addEventListener("pointermove", (event) => this.point(event.clientX - this.svg.getBoundingClientRect().left));
    this.svg.addEventListener("pointerleave", () => this.choose(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => {
      const width = this.svg.clientWidth;
      if (width && width !== this.width) this.draw();
    }).observe(this.svg);
    inflight.charts.push(this);
  }

  draw() {
    const width = this.svg.clientWidth || 600, height = 200;
    const box = { left: 52, right: width - 10, top: 8, bottom: height - 34 };
    const { label, values } = this.x();
    const [xLow, xHigh] = inflight.extent([values]);
    let [low, high] = this.range || inflight.extent(this.series.map((each) => each.values));
    if (this.zero) low = Math.min(low, 0);
    if (low === high) [low, high] = [low - 0.5, high + 0.5];
    Object.assign(this, { width, box, values });
    this.placeX = (value) => box.left + ((value - xLow) / (xHigh - xLow || 1)) * (box.right - box.left);
    this.placeY = (value) => box.bottom - ((value - low) / (high - low)) * (box.bottom - box.top);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.style.height = `${height}px`;
    this.svg.replaceChildren();
    this.axes(low, high, xLow, xHigh, label, width, height);
    this.series.forEach((each, at) => this.curve(each, at > 0));
    this.cursor = inflight.shape("line", { class: "cursor", y1: box.top, y2: box.bottom, visibility: "hidden" });
    this.svg.append(this.cursor);
    this.choose(this.at);
  }

  axes(low, high, xLow, xHigh, label, width, height) {
    const { box } = this;
    for (const tick of inflight.ticks(low, high, 5)) {
      const y = this.placeY(tick);
      this.svg.append(inflight.shape("line", { class: "grid", x1: box.left, x2: box.right, y1: y, y2: y }));
      this.text(box.left - 6, y + 4, inflight.number(tick), "end");
    }
    for (const tick of inflight.ticks(xLow, xHigh, Math.max(2, Math.floor(width / 90)))) {
      this.text(this.placeX(tick), box.bottom + 15, inflight.number(tick), "middle");
    }
    this.svg.append(inflight.shape("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
    this.text((box.left + box.right) / 2, height - 4, label, "middle");
  }

  text(x, y, text, anchor) {
    const made = inflight.shape("text", { x, y, "text-anchor": anchor });
    made.textContent = text;
    this.svg.append(made);
  }

  /** A dashed curve lets one of the same course be seen below it. */
  curve({ values, colour }, dashed) {
    let path = "", begun = false;
    values.forEach((value, at) => {
      if (value === null || this.values[at] === null || this.values[at] === undefined) {
        begun = false;
        return;
      }
      const [x, y] = [this.placeX(this.values[at]).toFixed(1), this.placeY(value).toFixed(1)];
      if (this.points || values.length === 1) path += `M${x} ${y}m-2 0a2 2 0 1 0 4 0a2 2 0 1 0 -4 0`;
      else path += `${begun ? "L" : "M"}${x} ${y}`;
      begun = true;
    });
    const dots = this.points || values.length === 1;
    this.svg.append(inflight.shape("path", { d: path || "M0 0", fill: dots ? colour : "none", stroke: colour,
      "stroke-width": dots ? 1 : 1.8, "stroke-dasharray": dashed && !dots ? "8 4" : "none" }));
  }

  point(x) {
    let best = null, distance = Infinity;
    this.values.forEach((value, at) => {
      if (value === null) return;
      const away = Math.abs(this.placeX(value) - x);
      if (away < distance) [best, distance] = [at, away];
    });
    this.choose(best);
  }

  key(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -1e9, End: 1e9 };
    if (event.key === "Escape") this.choose(null);
    if (!(event.key in moves) || !this.values.length) return;
    event.preventDefault();
    const from = this.at === null ? (moves[event.key] > 0 ? -1 : this.values.length) : this.at;
    this.choose(inflight.clamp(from + moves[event.key], 0, this.values.length - 1));
  }

  choose(at) {
    this.at = at;
    this.cursor.setAttribute("visibility", at === null ? "hidden" : "visible");
    if (at === null) {
      this.readout.textContent = "";
      return;
    }
    const x = this.placeX(this.values[at]);
    this.cursor.setAttribute("x1", x);
    this.cursor.setAttribute("x2", x);
    const said = this.series.map((each) => `${each.name} ${inflight.number(each.values[at])}`);
    this.readout.textContent = `${this.x().label} ${inflight.number(this.values[at])}: ${said.join(" · ")}`;
  }
};
