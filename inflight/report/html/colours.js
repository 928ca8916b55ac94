"use strict";
// Colours of versions. `distinct`: those of Okabe and Ito, which colour-blind people can tell apart; neighbouring
// versions never share one. `ordered`: viridis, from the oldest version to the newest.
inflight.DISTINCT = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442"];
inflight.VIRIDIS = ["#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725"];

inflight.channels = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));

inflight.mixed = (from, to, share) => {
  const [a, b] = [inflight.channels(from), inflight.channels(to)];
  return "#" + a.map((each, at) => Math.round(each + (b[at] - each) * share).toString(16).padStart(2, "0")).join("");
};

/** version → colour, for versions from `least` to `most`. */
inflight.colouring = (kind, least, most) => {
  if (kind === "distinct") {
    const colours = inflight.DISTINCT;
    return (version) => (version === null ? "#888888" : colours[((version % colours.length) + colours.length) % colours.length]);
  }
  const stops = inflight.VIRIDIS;
  return (version) => {
    if (version === null) return "#888888";
    const place = most > least ? ((version - least) / (most - least)) * (stops.length - 1) : 0;
    const below = inflight.clamp(Math.floor(place), 0, stops.length - 2);
    return inflight.mixed(stops[below], stops[below + 1], inflight.clamp(place - below, 0, 1));
  };
};

/** Black or white, whichever is easier to read on the colour (relative luminance as in WCAG 2). */
inflight.inkOn = (colour) => {
  const linear = inflight.channels(colour).map((each) => {
    const share = each / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  const luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  return luminance > 0.179 ? "#000000" : "#ffffff";
};

/** The page's own colours, as the theme has them now. */
inflight.themed = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

inflight.themes = {
  listeners: [],
  isDark() {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  },
  start(button) {
    const tell = () => {
      button.textContent = this.isDark() ? "light" : "dark";
      button.setAttribute("aria-label", `Switch to the ${button.textContent} theme`);
      this.listeners.forEach((listener) => listener());
    };
    button.addEventListener("click", () => {
      document.documentElement.dataset.theme = this.isDark() ? "light" : "dark";
      tell();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", tell);
    tell();
  },
};
