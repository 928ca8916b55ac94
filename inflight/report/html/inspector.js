"use strict";
// What is known about the chosen token, and the answer that it is part of.
inflight.AROUND = 600;  // tokens of a long answer that are shown before and behind the chosen one

inflight.inspect = (bands, data, box, spoken) => {
  const make = inflight.element;
  if (bands.chosen === null) {
    box.replaceChildren(make("p", { class: "soft" }, "Point at a token, or choose one with the arrow keys: its text, log-probability and version stand here."));
    spoken.textContent = "";
    return;
  }
  const { index, token } = bands.chosen, each = bands.rows[index], row = each.row;
  const version = each.versionOf(token), logprob = row.logprobs[token];
  const text = row.texts ? `“${inflight.visible(row.texts[token])}”` : `id ${row.ids[token]}`;
  const probability = logprob === null || logprob === undefined ? "" : ` (p = ${inflight.number(Math.exp(logprob))})`;
  const lag = row.trained_at === null || version === null ? "" : `, lag ${row.trained_at - version} when trained on`;
  spoken.textContent = `${row.id}, token ${token + 1}: ${text}, version ${version ?? "unknown"}, log-probability ${inflight.number(logprob)}`;
  const fact = (name, value) => make("span", {}, `${name} `, make("b", {}, value));
  const facts = make("div", { class: "facts" },
    fact("token", `${token + 1} of ${row.count}`), fact("text", text), fact("id", row.ids[token]),
    fact("log-probability", inflight.number(logprob) + probability), fact("version", (version ?? "unknown") + lag));
  const more = make("div", { class: "facts" },
    fact("rollout", inflight.visible(row.id)), fact("reward", inflight.number(row.reward)), fact("generator", inflight.visible(row.generator)),
    fact("ended by", inflight.visible(row.finish)), fact("", inflight.visible(row.fate)));
  box.replaceChildren(facts, more, inflight.answer(bands, each, token));
  const chosen = box.querySelector(".chosen"), around = box.querySelector(".answer");
  if (chosen && around) around.scrollTop = chosen.offsetTop - around.offsetTop - 40;
};

/** The prompt and the answer, each run of tokens on the colour of the version that sampled it. */
inflight.answer = (bands, each, token) => {
  const make = inflight.element, row = each.row;
  const [from, to] = [Math.max(token - inflight.AROUND, 0), Math.min(token + inflight.AROUND, each.shown)];
  const text = (start, end) => (row.texts ? inflight.lines(row.texts.slice(start, end).join("")) : row.ids.slice(start, end).join(" ") + " ");
  const made = make("div", { class: "answer" });
  if (row.prompt !== null) made.append(make("span", { class: "soft" }, inflight.lines(row.prompt)));
  if (from > 0) made.append(make("span", { class: "label" }, `… ${from} tokens before`));
  for (const [start, end, version] of each.runs) {
    const [first, last] = [Math.max(start, from), Math.min(end, to)];
    if (first >= last) continue;
    const colour = bands.colour(version), run = make("span", { class: "run" });
    run.style.background = colour;
    run.style.color = inflight.inkOn(colour);
    made.append(make("span", { class: "label" }, version === null ? "version unknown" : `v${version}`), run);
    if (token < first || token >= last) {
      run.append(text(first, last));
      continue;
    }
    run.append(text(first, token), make("span", { class: "chosen" }, text(token, token + 1) || "∅"), text(token + 1, last));
  }
  if (to < row.count) made.append(make("span", { class: "label" }, `… ${row.count - to} tokens more`));
  return made;
};

/** Text whose line breaks are shown and made. */
inflight.lines = (text) => text.split("\n").map(inflight.visible).join("↵\n");
