"use strict";
// The picture of the version bands on a canvas: a row for each sequence, a cell for each token, coloured by the version
// that sampled it. By time, each swap is a vertical line through the sequences that ran on its generator.
inflight.Bands = class {
  constructor(canvas, data, swaps) {
    this.canvas = canvas;
    const times = data.rows.map((row) => row.started).filter((time) => time !== null);
    this.origin = times.length ? Math.min(...times) : 0;
    const swapTimes = inflight.swapTimes(swaps);
    this.every = data.rows.map((row) => new inflight.Timeline(row, swapTimes, this.origin));
    this.swaps = [...swapTimes].map(([key, time]) => {
      const at = key.lastIndexOf(" ");
      return { generator: key.slice(0, at), version: Number(key.slice(at + 1)), time: time - this.origin };
    });
    const versions = this.every.flatMap((each) => each.runs.map((run) => run[2])).filter((version) => version !== null);
    [this.least, this.most] = [versions.reduce((a, b) => Math.min(a, b), Infinity), versions.reduce((a, b) => Math.max(a, b), -Infinity)];
    this.versions = [...new Set(versions)].sort((a, b) => a - b);
    this.byTime = true;
    this.gutter = 46;
    this.axis = 20;
    this.chosen = null;
    this.paint("distinct");
    this.select(0);
  }

  paint(kind) {
    this.colour = inflight.colouring(kind, this.least, this.most);
  }

  /** Shows the sequences of one stretch, in the order in which they began on each generator. */
  select(stretch) {
    this.rows = this.every.filter((each) => each.row.stretch === stretch)
      .sort((a, b) => (a.row.generator < b.row.generator ? -1 : a.row.generator > b.row.generator ? 1 : a.submitted - b.submitted));
    this.top = 0;
    this.fit();
  }

  fit() {
    const ends = this.rows.map((each) => each.end(this.byTime));
    this.left = this.byTime ? Math.min(...this.rows.map((each) => each.submitted)) : 0;
    this.right = Math.max(...ends);
    if (!(this.right > this.left)) [this.left, this.right] = [0, 1];
    this.whole = [this.left, this.right];
    this.top = 0;
    this.rowHeight = this.lowest();
  }

  /** The height of rows at which all of them are in sight, if that can be seen. */
  lowest() {
    return inflight.clamp(460 / this.rows.length, 2.5, 14);
  }

  /** Zooms by `factor` around a place on the horizontal axis and a row, which keep their places on the screen. */
  zoom(factor, around = (this.left + this.right) / 2, row = this.middle()) {
    const least = (this.whole[1] - this.whole[0]) / 20000;
    const span = inflight.clamp((this.right - this.left) / factor, least, this.whole[1] - this.whole[0]);
    const share = (around - this.left) / (this.right - this.left);
    this.left = around - share * span;
    this.heighten(inflight.clamp(this.rowHeight * Math.sqrt(factor), this.lowest(), Math.max(this.rowHeight, 16)), row);
    this.pan(0, 0, span);
  }

  middle() {
    return this.top + this.visibleRows() / 2;
  }

  /** Sets the height of rows; `row` keeps its place on the screen. */
  heighten(height, row = this.middle()) {
    this.top = row - ((row - this.top) * this.rowHeight) / height;
    this.rowHeight = height;
    this.height = this.fullHeight();
    this.pan(0, 0);
  }

  fullHeight() {
    return inflight.clamp(this.rows.length * this.rowHeight, 60, 480) + this.axis;
  }

  pan(pixels, rows, span = this.right - this.left) {
    const left = this.left + (pixels * span) / (this.width - this.gutter || 1);
    this.left = inflight.clamp(left, this.whole[0], Math.max(this.whole[1] - span, this.whole[0]));
    this.right = this.left + span;
    this.top = inflight.clamp(this.top + rows, 0, Math.max(this.rows.length - this.visibleRows(), 0));
  }

  visibleRows() {
    return (this.height - this.axis) / this.rowHeight;
  }

  x(place) {
    return this.gutter + ((place - this.left) / (this.right - this.left)) * (this.width - this.gutter);
  }

  placeAt(x) {
    return this.left + ((x - this.gutter) / (this.width - this.gutter)) * (this.right - this.left);
  }

  y(index) {
    return (index - this.top) * this.rowHeight;
  }

  /** {index of the row, token} under a point of the canvas; null beside the sequences. */
  hit(x, y) {
    const index = Math.floor(this.top + y / this.rowHeight);
    if (x < this.gutter || y > this.height - this.axis || index < 0 || index >= this.rows.length) return null;
    const token = this.rows[index].tokenAt(this.placeAt(x), this.byTime);
    return token === null ? null : { index, token };
  }

  draw() {
    this.width = this.canvas.clientWidth;
    this.height = this.fullHeight();
    const ratio = window.devicePixelRatio || 1;
    this.canvas.style.height = `${this.height}px`;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.ink = { back: inflight.themed("--back"), ink: inflight.themed("--ink"), soft: inflight.themed("--soft"), line: inflight.themed("--line") };
    context.fillStyle = this.ink.back;
    context.fillRect(0, 0, this.width, this.height);
    context.save();
    context.beginPath();
    context.rect(0, 0, this.width, this.height - this.axis);
    context.clip();
    const first = Math.floor(this.top), last = Math.min(this.rows.length, Math.ceil(this.top + this.visibleRows()));
    for (let index = first; index < last; index += 1) this.row(context, index);
    if (this.byTime) this.cuts(context);
    this.mark(context);
    for (let index = first; index < last; index += 1) this.reward(context, index);
    context.restore();
    this.scale(context);
  }

  row(context, index) {
    const each = this.rows[index], y = this.y(index), gap = this.rowHeight > 6 ? 1 : 0;
    const height = this.rowHeight - gap;
    if (this.byTime) {  // submitted, but without a token yet
      const [from, to] = [this.x(each.submitted), this.x(each.place(0, true))];
      context.fillStyle = this.ink.line;
      context.fillRect(from, y + height / 2 - 0.5, to - from, 1);
    }
    for (const [start, end, version] of each.runs) {
      const [from, to] = [this.x(each.place(start, this.byTime)), this.x(each.place(end, this.byTime))];
      if (to < this.gutter || from > this.width) continue;
      const colour = this.colour(version);
      context.fillStyle = colour;
      context.fillRect(from, y, Math.max(to - from, 1), height);
      const cell = (to - from) / (end - start);
      if (cell >= 4) this.cells(context, each, start, end, y, height, cell, colour);
      if (start > 0) {
        context.fillStyle = this.ink.back;
        context.fillRect(from - 1, y, 2, height);
      }
    }
  }

  cells(context, each, start, end, y, height, cell, colour) {
    const ink = inflight.inkOn(colour), texts = each.row.texts;
    context.font = `${Math.min(height - 2, 12)}px ui-monospace, monospace`;
    context.textBaseline = "middle";
    for (let token = start; token < end; token += 1) {
      const x = this.x(each.place(token, this.byTime));
      if (x + cell < this.gutter) continue;
      if (x > this.width) break;
      context.fillStyle = ink;
      context.globalAlpha = 0.25;
      context.fillRect(x, y, 0.5, height);
      context.globalAlpha = 1;
      if (cell < 8 || height < 9) continue;
      const text = inflight.visible(texts ? texts[token] : String(each.row.ids[token])).trim();
      const fits = Math.floor((cell - 2) / (Math.min(height - 2, 12) * 0.61));
      if (fits > 0) context.fillText(text.length > fits ? text.slice(0, Math.max(fits - 1, 1)) + (fits > 1 ? "…" : "") : text, x + 2, y + height / 2 + 0.5);
    }
  }

  cuts(context) {
    context.font = "600 11px system-ui, sans-serif";
    context.textBaseline = "top";
    for (const generator of new Set(this.rows.map((each) => each.row.generator))) {
      const indices = this.rows.map((each, at) => (each.row.generator === generator ? at : -1)).filter((at) => at >= 0);
      const [top, bottom] = [this.y(indices[0]), this.y(indices[indices.length - 1] + 1)];
      const shown = this.swaps.filter((each) => each.generator === generator).map((each) => [this.x(each.time), `v${each.version}`])
        .filter(([x]) => x >= this.gutter && x <= this.width);
      context.fillStyle = this.ink.ink;
      for (const [x] of shown) context.fillRect(x - 0.75, top, 1.5, bottom - top);
      this.labels(context, shown, Math.max(top, 0));
    }
  }

  /** Beside their lines, above the lines that follow; those without room are left out. */
  labels(context, shown, top) {
    let end = -Infinity;
    for (const [x, label] of shown) {
      const width = context.measureText(label).width + 6;
      const left = x + 1 + width > this.width ? x - 1 - width : x + 1;  // at the right edge, on the other side
      if (left < end) continue;
      end = left + width;
      context.fillStyle = this.ink.back;
      context.fillRect(left, top + 1, width, 13);
      context.fillStyle = this.ink.ink;
      context.fillText(label, left + 3, top + 2);
    }
  }

  mark(context) {
    if (this.chosen === null || this.chosen.index >= this.rows.length) return;
    const { index, token } = this.chosen, each = this.rows[index];
    const from = this.x(each.place(token, this.byTime)), to = this.x(each.place(token + 1, this.byTime));
    context.strokeStyle = this.ink.back;
    context.lineWidth = 5;
    context.strokeRect(from - 1, this.y(index) - 0.5, Math.max(to - from, 2) + 2, this.rowHeight);
    context.strokeStyle = this.ink.ink;
    context.lineWidth = 2;
    context.strokeRect(from - 1, this.y(index) - 0.5, Math.max(to - from, 2) + 2, this.rowHeight);
  }

  reward(context, index) {
    context.fillStyle = this.ink.back;
    context.fillRect(0, this.y(index), this.gutter - 2, this.rowHeight);
    if (this.rowHeight < 10) return;
    context.fillStyle = this.ink.soft;
    context.font = "10px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "right";
    context.fillText(inflight.number(this.rows[index].row.reward), this.gutter - 6, this.y(index) + this.rowHeight / 2);
    context.textAlign = "left";
  }

  scale(context) {
    context.fillStyle = this.ink.soft;
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "alphabetic";
    if (this.rowHeight >= 10) context.fillText("reward", 2, this.height - 5);
    const unit = this.byTime ? " s" : "";
    let room = this.width - 20;
    if (this.visibleRows() < this.rows.length - 0.5) {  // the rest is reached by dragging
      const hidden = `rows ${Math.floor(this.top) + 1} to ${Math.min(Math.ceil(this.top + this.visibleRows()), this.rows.length)} of ${this.rows.length}`;
      room = this.width - context.measureText(hidden).width - 30;
      context.fillText(hidden, room + 26, this.height - 5);
    }
    for (const tick of inflight.ticks(this.left, this.right, Math.max(2, Math.floor(this.width / 110)))) {
      const x = this.x(tick), label = inflight.number(tick) + unit;
      if (x < this.gutter + 8 || x > room) continue;
      context.fillRect(x, this.height - this.axis, 1, 4);
      context.fillText(label, x - context.measureText(label).width / 2, this.height - 5);
    }
  }
};
