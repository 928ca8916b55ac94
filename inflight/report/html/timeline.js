"use strict";
// Where a token stands on the horizontal axis: by its index, or by its time. A run records when a sequence was
// submitted, when its first token came and when its last; and when each version was swapped in. Between these times
// tokens are spaced evenly.

/** "generator version" → when that version became live there, Unix seconds. */
inflight.swapTimes = (swaps) => {
  const { generator, version, time } = swaps.committed;
  const found = new Map();
  generator.forEach((name, at) => {
    if (time[at] !== null && version[at] !== null) found.set(`${name} ${version[at]}`, time[at]);
  });
  return found;
};

inflight.Timeline = class {
  /** `row`: a sequence of the report's data. Adds `runs`: [first token, one past the last, version]. */
  constructor(row, swapTimes, origin) {
    this.row = row;
    this.shown = row.ids.length;
    const spans = row.spans.length ? row.spans : [[0, null]];
    this.runs = spans.map(([start, version], at) => [start, Math.min(at + 1 < spans.length ? spans[at + 1][0] : row.count, this.shown), version])
      .filter(([start, end]) => start < end);
    this.submitted = row.started === null ? 0 : row.started - origin;
    const first = row.first === null ? this.submitted : Math.max(row.first - origin, this.submitted);
    const last = row.finished === null ? first : Math.max(row.finished - origin, first);
    this.known = [[0, first]];
    for (const [start, version] of spans.slice(1)) {
      const swapped = swapTimes.get(`${row.generator} ${version}`);
      const before = this.known[this.known.length - 1];
      const time = swapped === undefined ? null : swapped - origin;
      if (time !== null && start > before[0] && time > before[1] && time < last) this.known.push([start, time]);
    }
    this.known.push([Math.max(row.count, 1), last]);
  }

  versionOf(token) {
    const run = this.runs.find(([start, end]) => start <= token && token < end);
    return run ? run[2] : null;
  }

  /** Where token `index` begins; the number of tokens gives the end of the last one. */
  place(index, byTime) {
    if (!byTime) return index;
    let at = 1;
    while (at < this.known.length - 1 && this.known[at][0] < index) at += 1;
    const [[fromToken, fromTime], [toToken, toTime]] = [this.known[at - 1], this.known[at]];
    return fromTime + ((index - fromToken) / (toToken - fromToken || 1)) * (toTime - fromTime);
  }

  /** The token at a place; null beside the sequence. */
  tokenAt(place, byTime) {
    if (!this.shown || place < this.place(0, byTime) || place > this.place(this.shown, byTime)) return null;
    let low = 0, high = this.shown - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.place(middle, byTime) <= place) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  begin(byTime) {
    return byTime ? this.submitted : 0;
  }

  end(byTime) {
    return this.place(this.shown, byTime);
  }
};
