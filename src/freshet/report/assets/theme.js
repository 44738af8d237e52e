"use strict";
/* Light and dark: the colours of the charts (palette.py), and every chart's common look. Colours in figures are names:
   "@c0", "@c0/18" (percent), "@ink", "@ramp/40" (a place on the ramp), "@scale" and "@ramp" as colour scales. */
const Theme = (() => {
  const THEMES = JSON.parse(document.getElementById("palette").textContent);
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  let choice = "auto";
  try {
    const kept = localStorage.getItem("freshet-theme");
    if (kept === "light" || kept === "dark") choice = kept;
  } catch { /* no storage: follow the system */ }
  const name = () => (choice === "auto" ? (system.matches ? "dark" : "light") : choice);
  const now = () => THEMES[name()] || THEMES.light;

  function parts(hex) { return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)); }
  function mix(stops, place) {
    const at = Math.max(0, Math.min(1, place)) * (stops.length - 1);
    const left = Math.min(stops.length - 2, Math.floor(at));
    const a = parts(stops[left]), b = parts(stops[left + 1]), share = at - left;
    return `rgb(${a.map((value, index) => Math.round(value + (b[index] - value) * share)).join(",")})`;
  }
  function colour(token) {
    if (typeof token !== "string" || token[0] !== "@") return token;
    const [key, percent] = token.slice(1).split("/"), theme = now();
    if (key === "ramp" || key === "scale") {
      if (percent !== undefined) return mix(theme[key], 0.12 + 0.88 * Number(percent) / 100);
      return theme[key].map((stop, index) => [index / (theme[key].length - 1), stop]);
    }
    const hex = /^c\d+$/.test(key) ? theme.c[Number(key.slice(1)) % theme.c.length] : theme[key];
    if (hex === undefined) return theme.muted;
    return percent === undefined ? hex : `rgba(${parts(hex).join(",")},${Number(percent) / 100})`;
  }
  /* Puts the theme's colours into a copy of a figure; only under keys that hold colours, never in texts. */
  function dressed(value, key) {
    const named = key && /color/i.test(key);
    if (Array.isArray(value)) return value.map(named ? colour : (item) => dressed(item));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, dressed(item, name)]));
    }
    return named ? colour(value) : value;
  }
  function axis(given) {
    const theme = now();
    return {
      gridcolor: theme.grid, zerolinecolor: theme.axis, linecolor: theme.axis, tickcolor: theme.axis, zeroline: false,
      ticks: "", ...given,
      tickfont: { size: 12, color: theme.muted },
      title: { standoff: 10, font: { size: 12.5, color: theme.soft }, ...(given && given.title) },
    };
  }
  const narrow = () => window.innerWidth < 620;
  function layout(given) {
    const theme = now();
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      height: 320, showlegend: false, uirevision: "keep",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: theme.soft },
      margin: narrow() ? { l: 50, r: 8, t: 10, b: 46 } : { l: 58, r: 14, t: 12, b: 50 },
      hoverlabel: {
        bgcolor: theme.paper, bordercolor: theme.axis, font: { color: theme.ink, size: 12.5 }, align: "left",
        namelength: 40,
      },
      dragmode: window.matchMedia("(pointer: coarse)").matches ? false : "zoom",
      legend: {
        orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12, color: theme.soft },
        traceorder: "normal",
      },
      modebar: { bgcolor: "rgba(0,0,0,0)" },
      ...given, xaxis: axis(given.xaxis), yaxis: axis(given.yaxis),
    };
  }
  const CONFIG = {
    displaylogo: false, responsive: true, showTips: false, doubleClickDelay: 350,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
    toImageButtonOptions: { format: "svg", filename: "freshet" },
  };
  /* Draws a figure, or says in words that there is nothing to draw. */
  function draw(id, figure, nothing) {
    const place = document.getElementById(id);
    if (!figure) {
      if (place.data) Plotly.purge(place);
      const note = document.createElement("div");
      note.className = "empty";
      note.textContent = nothing || "Nothing to show.";
      place.replaceChildren(note);
      return;
    }
    if (!place.data) place.replaceChildren();
    const plain = dressed(figure);
    for (const trace of plain.data) {
      if (trace.colorbar) bar(trace.colorbar);
      if (trace.marker && trace.marker.colorbar) bar(trace.marker.colorbar);
    }
    return Plotly.react(place, plain.data, layout(plain.layout), CONFIG);
  }
  function bar(given) {
    const theme = now();
    given.tickfont = { size: 11, color: theme.muted };
    given.title = { ...given.title, font: { size: 11.5, color: theme.soft } };
  }
  function cycle() {
    choice = { auto: "light", light: "dark", dark: "auto" }[choice] || "auto";
    try { localStorage.setItem("freshet-theme", choice); } catch { /* not kept */ }
  }
  function apply() {
    document.documentElement.dataset.theme = name();
    document.getElementById("theme").textContent = { auto: "◐ Auto", light: "☀ Light", dark: "☾ Dark" }[choice];
  }
  const onSystem = (listener) => system.addEventListener("change", listener);
  return { now, colour, mix, draw, layout, cycle, apply, narrow, CONFIG, onSystem };
})();
