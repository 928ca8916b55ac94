"use strict";
inflight.SECTIONS = [
  ["overview", "Overview", inflight.overview],
  ["reward", "Reward", inflight.rewards],
  ["evaluations", "Evaluations", inflight.evaluating],
  ["bands", "Version bands", inflight.bandsOf],
  ["lag", "Lag at training", inflight.lagging],
  ["swaps", "Swaps", inflight.swapping],
  ["age", "Effect of staleness", inflight.ageing],
  ["waits", "Where the time went", inflight.waiting],
  ["gate", "Gate", inflight.gating],
  ["audit", "Audit", inflight.auditing],
];

inflight.start = () => {
  const make = inflight.element;
  const { runs, inflight: version } = JSON.parse(document.getElementById("data").textContent);
  const main = document.getElementById("report"), contents = document.getElementById("contents");
  const names = runs.map((run) => inflight.visible(run.name));
  document.getElementById("title").textContent = names.join(" and ");
  document.title = `${names.join(" and ")}: inflight report`;
  main.replaceChildren();
  const section = (id, title, parts) => {
    contents.append(make("a", { href: `#${id}` }, title));
    main.append(make("section", { id, "aria-label": title }, make("h2", {}, title), parts));
  };
  for (const [id, title, show] of inflight.SECTIONS) {
    const columns = make("div", { class: runs.length > 1 ? "columns two" : "columns" }, runs.map((run, at) =>
      make("div", {}, runs.length > 1 ? make("h3", {}, names[at]) : null, show(run, runs).flat())));
    section(id, title, [columns]);
  }
  section("configuration", "Configuration", inflight.settings(runs, "config"));
  section("environment", "Environment", inflight.settings(runs, "environment"));
  main.append(make("footer", { class: "soft" }, `Made by inflight ${version}. Secrets in the configuration and the environment are redacted; prompts and answers are not.`));
  inflight.themes.start(document.getElementById("theme"));
  inflight.themes.listeners.push(() => inflight.charts.forEach((chart) => chart.draw()));
  document.getElementById("axis").addEventListener("change", () => inflight.charts.forEach((chart) => chart.draw()));
};

inflight.start();
document.documentElement.dataset.ready = "yes";
