"use strict";
// The sections of the report. Each is made for every run: side by side where there are two.
inflight.SERIES = { first: "var(--first)", second: "var(--second)", third: "var(--third)", fourth: "var(--fourth)" };

/** The range of y that both runs' curves share, so that they can be compared. */
inflight.shared = (runs, names) => inflight.extent(runs.flatMap((run) => names.map((name) => run.steps[name] || [])));

inflight.curves = (run, runs, title, named, options = {}) => {
  const present = named.filter(([name]) => run.steps[name]);
  if (!present.length) return null;
  const colours = Object.values(inflight.SERIES);
  return new inflight.Chart({
    title, x: () => inflight.axis(run),
    series: present.map(([name, label], at) => ({ name: label, values: run.steps[name], colour: colours[at % colours.length] })),
    range: inflight.shared(runs, named.map(([name]) => name)), ...options,
  }).figure;
};

/** The horizontal axis that is chosen at the top of the page. */
inflight.axis = (run) => {
  const kind = document.getElementById("axis").value;
  return { label: { step: "step", tokens: "tokens trained on or masked", time: "seconds" }[kind], values: run.steps[kind] || [] };
};

inflight.none = (text) => inflight.element("p", { class: "soft" }, text);

inflight.overview = (run) => [
  inflight.element("p", {}, run.state),
  run.notes.map((note) => inflight.element("p", { class: "bad" }, inflight.visible(note))),
  run.summary.length ? inflight.facts(run.summary) : inflight.none("No step was finished."),
];

inflight.rewards = (run, runs) => [inflight.element("div", { class: "charts" },
  inflight.curves(run, runs, "Reward", [["reward", "of the groups trained on"], ["reward_all", "of all groups"]]),
  inflight.curves(run, runs, "Loss", [["loss", "loss"]]),
  inflight.curves(run, runs, "Entropy", [["entropy", "nats per token"]]),
  inflight.curves(run, runs, "Tokens per second", [["tokens_per_s", "sampled tokens"]], { zero: true }))];

inflight.evaluating = (run) => {
  const { version = [], reward = [], given_up = [], best = [] } = run.evaluations;
  if (!version.length && !given_up.length) return [inflight.none("Not evaluated (eval.every=0), or no evaluation has ended yet.")];
  const parts = [];
  if (version.length) {
    const x = () => ({ label: "version", values: version });
    const single = (title, name, values, colour) => new inflight.Chart({ title, x, points: true, series: [{ name, values, colour }] }).figure;
    parts.push(inflight.element("div", { class: "charts" },
      single("Held-out reward", "mean over questions", reward, inflight.SERIES.first),
      single("Tokens of an answer", "mean", run.evaluations.tokens, inflight.SERIES.second)));
    const names = ["reward", "reward_stderr", "questions", "answers", "mixed", "failed", "truncated", "seconds"];
    const rows = version.map((each, at) => [`version ${each}${best[at] ? ", the best so far" : ""}`, ...names.map((name) => run.evaluations[name][at])]);
    parts.push(inflight.table(["", "reward", "± error", ...names.slice(2)], rows.slice(-50), { label: "Evaluations, the last 50" }));
  }
  for (const reason of given_up) parts.push(inflight.element("p", { class: "bad" }, `Given up: ${inflight.visible(reason)}`));
  return parts;
};

inflight.bandsOf = (run) => {
  const data = run.bands;
  if (!data || !data.rows.length) return [inflight.none("No rollouts were recorded (rollout.keep=false), or none has come yet.")];
  const sampled = data.shown < data.of ? `${data.shown} of ${inflight.number(data.of)} sequences are shown, in consecutive stretches from several parts of the run` : `All ${data.shown} sequences`;
  return [
    inflight.element("p", {}, `${sampled}${data.note ? `; ${data.note}` : ""}. A row is a sequence, a cell a token, a colour the version that sampled it; a vertical line is a swap, through sequences that continued. `,
      inflight.element("span", { class: "soft" }, "Tokens are spaced evenly between the times that were recorded: submission, first token, swaps and last token.")),
    new inflight.BandsView(run).node,
  ];
};

inflight.lagging = (run, runs) => [
  inflight.element("div", { class: "charts" },
    inflight.curves(run, runs, "Lag of tokens when trained on, in versions", [["lag_mean", "mean"], ["lag_max", "largest"]], { zero: true }),
    inflight.curves(run, runs, "Effective sample size", [["ess", "share of the tokens"]]),
    inflight.curves(run, runs, "KL from sampling to training", [["kl", "nats"]])),
  run.lags.length ? inflight.bars(run.lags.map(([lag, count]) => [`lag ${lag}`, count]), { unit: " tokens", title: "Tokens by lag" }) : inflight.none("No token was trained on."),
];

inflight.swapping = (run) => {
  const { committed, total, others } = run.swaps;
  const parts = [];
  if (committed.version.length) {
    const milliseconds = committed.gap_s.map((value) => (value === null ? null : value * 1000));
    const x = () => ({ label: "version", values: committed.version });
    const single = (title, name, values, colour) => new inflight.Chart({ title, x, points: true, zero: true, series: [{ name, values, colour }] }).figure;
    parts.push(inflight.element("p", {}, `${inflight.number(total)} versions became live in a generator.`), inflight.element("div", { class: "charts" },
      single("Gap: how long a swap stalled the step loop", "ms", milliseconds, inflight.SERIES.first),
      single("From packed to ready in the generator", "seconds", committed.ready_s, inflight.SERIES.second),
      single("Sequences that ran through the swap", "sequences", committed.running, inflight.SERIES.third)));
  } else parts.push(inflight.none("No version became live."));
  if (others.length) parts.push(inflight.table(["outcome", "generator", "reason", "versions"], others, { label: "Versions that did not become live" }));
  return parts;
};

inflight.ageing = (run) => {
  const head = ["", "tokens", "gated", "log-ratio", "± std", "max", "tail", "ESS", "KL", "clipped", "entropy"];
  const row = (each, name) => [`${name} ${each.key}`, each.tokens, each.gated_share, each.log_ratio_mean, each.log_ratio_std,
    each.log_ratio_max, each.tail_share, each.ess, each.kl, each.clip_share, each.entropy];
  if (!run.by_lag.length) return [inflight.none("No token was trained on.")];
  return [
    inflight.element("p", { class: "soft" }, "Lag 0 is the noise floor: trainer and generator had the same weights, so its log-ratios are the difference between two implementations."),
    inflight.table(["lag", ...head.slice(1)], run.by_lag.map((each) => row(each, "lag")), { label: "Figures by lag" }),
    inflight.table(["version", ...head.slice(1)], run.by_version.map((each) => row(each, "version")), { label: "Figures by version" }),
  ];
};

inflight.waiting = (run, runs) => {
  const parts = [], seconds = Object.entries(run.waits), total = seconds.reduce((sum, each) => sum + each[1], 0);
  if (total > 0) {
    const share = (name) => Math.round((100 * run.waits[name]) / total);
    parts.push(inflight.element("p", {}, `The trainer trained for ${share("train")} % of its time, waited for rollouts for ${share("wait for rollouts")} %, and for the version before for ${share("wait for the version before")} %.`));
    parts.push(inflight.bars(seconds, { unit: " s", title: "The trainer's time" }));
  }
  const { start, end, generators } = run.busy;
  const span = end - start;
  for (const { name, idle_s } of generators) {
    if (span > 0) parts.push(inflight.element("p", {}, `${inflight.visible(name)} had no sequence for ${inflight.number(idle_s)} s of ${inflight.number(span)} s (${Math.round((100 * idle_s) / span)} %): meanwhile it waited for the trainer (the lag bound), for rewards, or for a new version.`));
  }
  const charts = [inflight.curves(run, runs, "Seconds of each step", [["wait_s", "wait for rollouts"], ["train_s", "train"], ["publish_wait_s", "wait for the version before"]], { zero: true }),
    inflight.curves(run, runs, "Groups in the buffer and being sampled", [["buffer", "in the buffer"], ["groups_in_flight", "being sampled or scored"]], { zero: true })];
  if (generators.length) {
    const colours = Object.values(inflight.SERIES), points = generators[0].running.length;
    charts.push(new inflight.Chart({
      title: "Sequences running in each generator", zero: true,
      x: () => ({ label: "seconds since the first request", values: Array.from({ length: points }, (_, at) => ((at + 0.5) * span) / points) }),
      series: generators.slice(0, 4).map((each, at) => ({ name: inflight.visible(each.name), values: each.running, colour: colours[at] })),
    }).figure);
  }
  parts.push(inflight.element("div", { class: "charts" }, charts));
  const scores = run.scores;
  if (scores.count) {
    const time = (name) => `${inflight.number(scores[name])} s`;
    parts.push(inflight.element("p", {}, `Scoring a sequence took ${time("median")} (median), ${time("p99")} (99th percentile) and ${time("most")} at most; the ${inflight.number(scores.count)} scores took ${time("sum")} in all, many at once.`));
  } else parts.push(inflight.none("How long scores took was not recorded."));
  return parts;
};

inflight.gating = (run) => {
  const kinds = Object.entries(run.gate).map(([kind, counts]) => [kind, Object.entries(counts)]).filter(([, counts]) => counts.length);
  if (!kinds.length) return [inflight.none("The gate left nothing out, and no group failed.")];
  return kinds.map(([kind, counts]) => inflight.bars(counts, { title: kind }));
};

inflight.auditing = (run) => {
  if (!run.audit) return [inflight.none("Not audited. A run that kept its versions (audit.keep_versions=true) is audited by: inflight audit RUN")];
  const { outcome, faults, open, rows } = run.audit;
  const list = (lines) => inflight.element("ul", {}, lines.map((line) => inflight.element("li", {}, inflight.visible(line))));
  return [
    inflight.element("p", { class: outcome === "passed" ? "good" : "bad" }, `The audit says: ${outcome}.`),
    faults.length ? list(faults) : null, open.length ? list(open) : null, inflight.facts(rows),
  ];
};

/** All runs in one table; what differs is marked. */
inflight.settings = (runs, part) => {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run[part])))];
  if (!names.length) return [inflight.none("Not recorded.")];
  const rows = names.map((name) => [name, ...runs.map((run) => run[part][name] ?? "–")]);
  const differs = (row) => row.length > 2 && row[1] !== row[2];
  return [inflight.table(["", ...runs.map((run) => run.name)], rows, { label: part, marked: differs })];
};
