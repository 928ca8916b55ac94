"use strict";
// The version bands with their controls: zoom and pan, a token that the pointer or the arrow keys choose, and what is
// known about it.
inflight.views = [];

inflight.BandsView = class {
  constructor(run) {
    const make = inflight.element;
    this.data = run.bands;
    this.canvas = make("canvas", { tabindex: 0, role: "application", "aria-label":
      "Version bands. Arrow keys choose a token, N and P the next and the previous swap in a sequence, plus and minus zoom, F fits." });
    this.inspector = make("div", { class: "inspector" });
    this.spoken = make("div", { class: "readout", "aria-live": "polite" });
    this.legend = make("div", { class: "legend" });
    this.bands = new inflight.Bands(this.canvas, this.data, run.swaps);
    this.pinned = false;
    inflight.views.push(this);
    this.node = make("div", { class: "bands" }, this.controls(), this.legend, this.canvas, this.spoken, this.inspector, this.help());
    this.listen();
    this.tell();
    new ResizeObserver(() => {
      if (this.canvas.clientWidth && this.canvas.clientWidth !== this.bands.width) this.draw();
    }).observe(this.canvas);
    inflight.themes.listeners.push(() => this.draw());
  }

  controls() {
    const make = inflight.element, bands = this.bands;
    const button = (label, text, act) => make("button", { type: "button", "aria-label": label, title: label, click: () => { act(); this.draw(); } }, text);
    const choice = (label, options, act) => {
      const made = make("select", { "aria-label": label, change: () => { act(made.value); this.draw(); } },
        options.map(([value, text]) => make("option", { value }, text)));
      return made;
    };
    const stretches = [...new Set(this.data.rows.map((row) => row.stretch))];
    return make("div", { class: "controls" },
      choice("Horizontal axis", [["time", "by time"], ["token", "by token"]], (value) => { bands.byTime = value === "time"; bands.fit(); }),
      choice("Colours", [["distinct", "distinct colours"], ["ordered", "ordered colours"]], (value) => { bands.paint(value); }),
      stretches.length > 1 ? choice("Part of the run", stretches.map((at) => [at, `part ${at + 1} of ${stretches.length}`]),
        (value) => { bands.chosen = null; bands.select(Number(value)); this.tell(); }) : null,
      button("Zoom in", "+", () => bands.zoom(1.6, this.centre(), this.row())), button("Zoom out", "−", () => bands.zoom(1 / 1.6, this.centre(), this.row())),
      button("Taller rows", "rows +", () => { this.heighten(1.4); }), button("Lower rows", "rows −", () => { this.heighten(1 / 1.4); }),
      button("Fit", "fit", () => bands.fit()));
  }

  help() {
    const make = inflight.element, key = (text) => make("kbd", {}, text);
    return make("p", { class: "soft" }, "Drag to move, ", key("ctrl"), " + wheel to zoom, click to hold a token. Keys: arrows, ",
      key("n"), " ", key("p"), " next and previous swap in a sequence, ", key("+"), " ", key("-"), " zoom, ", key("f"), " fit, ", key("Esc"), " let go.");
  }

  heighten(factor) {
    this.bands.heighten(inflight.clamp(this.bands.rowHeight * factor, 2, 28), this.row());
  }

  draw() {
    this.bands.draw();
    const shown = this.bands.versions.slice(0, 40);
    this.legend.replaceChildren(...shown.map((version) => {
      const swatch = inflight.element("span", { class: "swatch" });
      swatch.style.background = this.bands.colour(version);
      return inflight.element("span", {}, swatch, `v${version}`);
    }), shown.length < this.bands.versions.length ? `… v${this.bands.most}` : "");
  }

  listen() {
    const place = (event) => {
      const box = this.canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    let dragged = null;
    this.canvas.addEventListener("pointerdown", (event) => {
      dragged = { x: event.clientX, y: event.clientY, moved: false };
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (!dragged) {
        const hit = this.bands.hit(...place(event));  // beside all tokens the last one stays, so that it can be read
        if (hit && !this.pinned) this.choose(hit);
        return;
      }
      const [dx, dy] = [event.clientX - dragged.x, event.clientY - dragged.y];
      if (!dragged.moved && Math.hypot(dx, dy) < 4) return;
      this.bands.pan(-dx, -dy / this.bands.rowHeight);
      dragged = { x: event.clientX, y: event.clientY, moved: true };
      this.draw();
    });
    this.canvas.addEventListener("pointerup", (event) => {
      if (dragged && !dragged.moved) {
        const hit = this.bands.hit(...place(event));
        this.pinned = hit !== null;
        this.choose(hit);
      }
      dragged = null;
    });
    this.canvas.addEventListener("pointercancel", () => { dragged = null; });
    this.canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const [x, y] = place(event);
      this.bands.zoom(event.deltaY < 0 ? 1.25 : 0.8, this.bands.placeAt(x), this.bands.top + y / this.bands.rowHeight);
      this.draw();
    }, { passive: false });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const bands = this.bands;
    const acts = {
      "+": () => bands.zoom(1.6, this.centre(), this.row()), "=": () => bands.zoom(1.6, this.centre(), this.row()), "-": () => bands.zoom(1 / 1.6, this.centre(), this.row()),
      f: () => bands.fit(), Escape: () => { this.pinned = false; this.choose(null); },
      ArrowLeft: () => this.move(0, -1), ArrowRight: () => this.move(0, 1), ArrowUp: () => this.move(-1, 0), ArrowDown: () => this.move(1, 0),
      PageUp: () => this.move(-10, 0), PageDown: () => this.move(10, 0), Home: () => this.move(0, -1e9), End: () => this.move(0, 1e9),
      n: () => this.swap(1), p: () => this.swap(-1),
    };
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in acts)) return;
    event.preventDefault();
    acts[event.key]();
    this.draw();
  }

  centre() {
    const { chosen, rows, byTime } = this.bands;
    return chosen === null ? undefined : rows[chosen.index].place(chosen.token, byTime);
  }

  /** The row of the chosen token, where there is one. */
  row() {
    return this.bands.chosen === null ? undefined : this.bands.chosen.index;
  }

  /** Chooses the token so many rows and tokens away; between rows, the one at the same place. */
  move(rows, tokens) {
    const bands = this.bands;
    this.pinned = true;
    if (bands.chosen === null) {
      this.choose({ index: Math.floor(bands.top), token: 0 });
      return;
    }
    const index = inflight.clamp(bands.chosen.index + rows, 0, bands.rows.length - 1), each = bands.rows[index];
    let token = bands.chosen.token + tokens;
    if (rows) token = each.tokenAt(this.centre(), bands.byTime) ?? (this.centre() < each.place(0, bands.byTime) ? 0 : each.shown - 1);
    this.choose({ index, token: inflight.clamp(token, 0, Math.max(each.shown - 1, 0)) });
  }

  /** Chooses the next or previous token before which a new version became live, over all rows. */
  swap(way) {
    const bands = this.bands, all = bands.rows.flatMap((each, index) => each.runs.slice(1).map(([token]) => ({ index, token })));
    const from = bands.chosen || { index: way > 0 ? -1 : Infinity, token: 0 };
    const after = (each) => Math.sign(each.index - from.index || each.token - from.token) === way;
    const found = way > 0 ? all.find(after) : all.reverse().find(after);
    if (found) {
      this.pinned = true;
      this.choose(found);
    }
  }

  choose(chosen) {
    const bands = this.bands;
    bands.chosen = chosen;
    if (chosen && this.pinned) this.reveal(chosen);
    this.tell();
    bands.draw();
  }

  /** Scrolls so that the chosen token is in sight. */
  reveal({ index, token }) {
    const bands = this.bands, visible = bands.visibleRows();
    if (index < bands.top) bands.top = index;
    if (index + 1 > bands.top + visible) bands.top = index + 1 - visible;
    const place = bands.rows[index].place(token, bands.byTime), span = bands.right - bands.left;
    if (place < bands.left || place > bands.right) {
      bands.left = place - span / 2;
      bands.pan(0, 0, span);
    }
  }

  tell() {
    inflight.inspect(this.bands, this.data, this.inspector, this.spoken);
  }
};
