"use strict";
/* The fleet's timeline: one lane per device. Everything of a kind is one filled path (polygons with gaps between them), so
   that thousands of trips are some thirty elements for the browser; shapes of fixed size are made anew after each zoom. */
const Timeline = (() => {
  const HALF = 0.36, BINS = 12;
  let place, tip, data, lanes, spans, view, bounds, alphas, typical, running = false;

  const shape = () => ({ x: [], y: [] });
  function polygon(path, points) {
    if (path.x.length) { path.x.push(null); path.y.push(null); }
    for (const [x, y] of points) { path.x.push(x); path.y.push(y); }
    path.x.push(points[0][0]); path.y.push(points[0][1]);
  }
  function box(path, from, to, lane, half = HALF) {
    if (to > from) polygon(path, [[from, lane - half], [to, lane - half], [to, lane + half], [from, lane + half]]);
  }
  const GLYPHS = {
    dot: Array.from({ length: 10 }, (_, i) => [Math.cos(i * Math.PI / 5), Math.sin(i * Math.PI / 5)]),
    diamond: [[0, -1.25], [1, 0], [0, 1.25], [-1, 0]],
    cross: [[-1, -.55], [-.55, -1], [0, -.45], [.55, -1], [1, -.55], [.45, 0], [1, .55], [.55, 1], [0, .45], [-.55, 1], [-1, .55], [-.45, 0]],
    triangle: [[-1, -.8], [1, -.8], [0, 1]],
    square: [[-.85, -.85], [.85, -.85], [.85, .85], [-.85, .85]],
  };

  function setup(element, tooltip) {
    place = element; tip = tooltip;
    place.addEventListener("pointermove", point);
    place.addEventListener("pointerdown", point);
    place.addEventListener("pointerleave", () => { tip.hidden = true; });
    window.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
  }

  /* Takes in a run; the zoom is kept while the same run grows. */
  function load(timeline, order, keep) {
    data = timeline;
    tip.hidden = true;
    if (!data) { view = null; return Theme.draw(place.id, null, "The log of this run has no trips."); }
    const seconds = data.seconds, devices = [...Array(data.devices).keys()];
    if (order === "speed") {
      const counts = new Map();
      for (const device of data.trips.device) counts.set(device, (counts.get(device) || 0) + 1);
      const slow = (d) => (seconds ? seconds[d] : -(counts.get(d) || 0));
      devices.sort((a, b) => slow(a) - slow(b) || a - b);
    }
    lanes = { order: devices, of: new Map(devices.map((device, lane) => [device, lane])) };
    spans = devices.map(() => []);
    data.trips.device.forEach((device, index) => { const lane = lanes.of.get(device); if (lane !== undefined) spans[lane].push(index); });
    const whole = [data.first || 0, Math.max(data.end, (data.first || 0) + 1e-6)];
    const before = bounds;
    bounds = whole;
    if (!keep || !view || (before && view.x[0] === before[0] && view.x[1] === before[1])) view = { x: whole, y: [devices.length - 0.4, -0.6] };
    const known = data.trips.alpha.filter((value) => value !== null).sort((a, b) => a - b);
    const at = (share) => known[Math.min(known.length - 1, Math.floor(share * known.length))];
    alphas = known.length ? [at(0.01), at(0.99)] : null;
    const long = data.trips.end.map((stop, i) => (stop ?? data.end) - data.trips.start[i]).sort((a, b) => a - b);
    typical = long[Math.floor(long.length / 2)];
    place.dataset.lanes = devices.length;
    return show();
  }

  function size() {
    const rows = lanes.order.length, height = Math.min(1100, Math.max(200, rows * Math.min(18, Math.max(8, 1000 / rows)))) + 56;
    const margin = Theme.narrow() ? { l: 38, r: 8, t: 6, b: 46 } : { l: 52, r: 12, t: 6, b: 48 };
    return { height, margin, width: Math.max(120, place.clientWidth - margin.l - margin.r), inner: height - margin.t - margin.b };
  }

  function shade(alpha) {
    if (!alphas || alpha === null) return Math.floor(BINS / 2);
    const [low, high] = alphas, log = low > 0;
    const share = high <= low ? 0.5 : log ? Math.log(Math.max(alpha, low) / low) / Math.log(high / low) : (alpha - low) / (high - low);
    return Math.max(0, Math.min(BINS - 1, Math.floor(share * BINS)));
  }

  /* All shapes in view, and one screen to either side of it. */
  function build() {
    const { width, inner } = size(), t = data.trips, end = data.end;
    const px = (view.x[1] - view.x[0]) / width, py = Math.abs(view.y[0] - view.y[1]) / inner;
    const from = 2 * view.x[0] - view.x[1], to = 2 * view.x[1] - view.x[0];
    const radius = Math.max(1.5, Math.min(4.2, 0.3 / py, 0.15 * typical / px));
    const paths = { down: shape(), train: shape(), retrain: shape(), fresh: shape(), lostbar: shape(), urgent: shape() };
    const uploads = Array.from({ length: BINS }, shape);
    const marks = { asked: shape(), merged: shape(), discarded: shape(), lost: shape(), rejected: shape() };
    const mark = (path, glyph, x, lane, scale = 1) => polygon(path, GLYPHS[glyph].map(([a, b]) => [x + a * radius * scale * px, lane + b * radius * scale * py]));
    for (let i = 0; i < t.device.length; i++) {
      const lane = lanes.of.get(t.device[i]), start = t.start[i], stop = t.end[i] ?? end;
      if (lane === undefined || stop < from || start > to) continue;
      const outcome = data.outcomes[t.outcome[i]], train = t.train[i] ?? start, sent = t.sent[i] ?? stop;
      const asked = t.asked[i] ?? t.answered[i];
      box(paths.down, start, Math.max(Math.min(train, stop), start + px), lane);
      if (asked === null) box(paths.train, train, sent, lane);
      else {
        const resume = t.resume[i] ?? (t.fresh[i] === null ? asked : stop);
        box(paths.train, train, asked, lane);
        if (t.fresh[i] !== null) box(paths.fresh, t.answered[i], Math.max(resume, t.answered[i] + 1.5 * px), lane);
        if (resume < sent) box(t.merged[i] !== null ? paths.retrain : paths.train, resume, sent, lane);
        mark(marks.asked, "dot", asked, lane, 0.8);
        if (t.merged[i] !== null) mark(marks.merged, "diamond", t.merged[i], lane);
      }
      if (t.urgent[i] !== null) box(paths.urgent, t.urgent[i] - px, t.urgent[i] + px, lane, 0.48);
      if (t.end[i] === null) continue;
      if (outcome === "aggregated" || outcome === "waiting") box(uploads[shade(t.alpha[i])], Math.min(sent, stop - 3 * px), stop, lane, 0.46);
      else {
        box(paths.lostbar, Math.min(sent, stop - 2 * px), stop, lane);
        mark(marks[outcome], { discarded: "cross", lost: "triangle", rejected: "square" }[outcome], stop, lane, 1.25);
      }
    }
    const theme = Theme.now(), bin = (index) => Theme.mix(theme.scale, (index + 0.5) / BINS);
    return [
      [paths.down, theme.down], [paths.train, theme.train], [paths.retrain, theme.retrain], [paths.fresh, theme.fresh],
      [paths.lostbar, theme.muted], [paths.urgent, theme.c[6]], ...uploads.map((path, index) => [path, bin(index)]),
      [marks.asked, theme.ink], [marks.merged, theme.c[1]], [marks.discarded, theme.bad], [marks.lost, theme.ink], [marks.rejected, theme.c[6]],
    ].map(([path, fillcolor]) => ({ type: "scatter", mode: "none", fill: "toself", fillcolor, hoverinfo: "skip", ...path }));
  }

  function labels(inner) {
    const rows = lanes.order.length, visible = Math.abs(view.y[0] - view.y[1]);
    const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000].find((n) => (inner / visible) * n >= 13) || 10000;
    const tickvals = lanes.order.map((_, lane) => lane).filter((lane) => lane % step === 0 && lane < rows);
    return { tickvals, ticktext: tickvals.map((lane) => String(lanes.order[lane])) };
  }

  function show() {
    const { height, margin, inner } = size(), theme = Theme.now();
    const layout = Theme.layout({
      height, margin, hovermode: false, uirevision: null,
      xaxis: { title: { text: "virtual time (s)" }, range: [...view.x] },
      yaxis: { range: [...view.y], showgrid: false, ...labels(inner), title: { text: Theme.narrow() ? "" : "device", standoff: 4 } },
    });
    layout.plot_bgcolor = theme.fleet;
    if (!place.data) place.replaceChildren();
    running = true;
    return Plotly.react(place, build(), layout, Theme.CONFIG).then(() => {
      running = false;
      if (!place.dataset.bound) { place.dataset.bound = "yes"; place.on("plotly_relayout", moved); }
    });
  }

  /* After a zoom by mouse, by button, or a new width of the window. */
  function moved(change) {
    if (running || !data || !view) return;
    const full = place.layout;
    if (change["xaxis.autorange"] || change["yaxis.autorange"]) view = { x: [...bounds], y: [lanes.order.length - 0.4, -0.6] };
    else view = { x: [...full.xaxis.range], y: [...full.yaxis.range] };
    show();
  }
  function move(how) {
    if (!view) return;
    const [a, b] = view.x, span = b - a, middle = (a + b) / 2;
    const set = { left: [a - span / 2, b - span / 2], right: [a + span / 2, b + span / 2], in: [middle - span / 4, middle + span / 4], out: [middle - span, middle + span], all: [...bounds] }[how];
    const wide = Math.min(set[1] - set[0], bounds[1] - bounds[0]), left = Math.max(bounds[0], Math.min(set[0], bounds[1] - wide));
    view = { x: [left, left + wide], y: how === "all" ? [lanes.order.length - 0.4, -0.6] : view.y };
    tip.hidden = true;
    show();
  }

  // ---- what is under the pointer

  function find(clientX, clientY) {
    const { width, inner, margin } = size(), frame = place.getBoundingClientRect();
    const fx = (clientX - frame.left - margin.l) / width, fy = (clientY - frame.top - margin.t) / inner;
    if (fx < 0 || fx > 1 || fy < 0 || fy > 1) return null;
    const time = view.x[0] + fx * (view.x[1] - view.x[0]), lane = Math.round(view.y[1] + fy * (view.y[0] - view.y[1]));
    const slack = 4 * (view.x[1] - view.x[0]) / width, t = data.trips;
    if (lane < 0 || lane >= spans.length) return null;
    const inside = spans[lane].filter((i) => t.start[i] - slack <= time && time <= (t.end[i] ?? data.end) + slack);
    const far = (i) => Math.max(t.start[i] - time, time - (t.end[i] ?? data.end), 0);
    inside.sort((a, b) => far(a) - far(b));
    return inside.length ? inside[0] : null;
  }
  const s = (value) => `${value.toFixed(value < 100 ? 2 : 1)} s`;
  function facts(i) {
    const t = data.trips, rows = [["triggered", `${s(t.start[i])}, version ${t.base[i] ?? "?"}`]];
    const outcome = data.outcomes[t.outcome[i]];
    if (t.asked[i] !== null || t.answered[i] !== null) rows.push(["asked", `${s(t.asked[i] ?? t.answered[i])}${t.slot[i] === null ? "" : `, before epoch ${t.slot[i]}`}`]);
    if (t.merged[i] !== null) rows.push(["merged", `${s(t.merged[i])}, version ${t.fresh[i]}${t.beta[i] === null ? "" : `, β ${t.beta[i]}`}`]);
    else if (t.answered[i] !== null && t.fresh[i] === null) rows.push(["answer", "nothing newer"]);
    if (t.urgent[i] !== null) rows.push(["hurried", s(t.urgent[i])]);
    if (t.end[i] !== null) rows.push([outcome === "lost" ? "lost" : "uploaded", s(t.end[i])]);
    if (t.staleness[i] !== null) rows.push(["staleness", String(t.staleness[i])]);
    if (t.alpha[i] !== null) rows.push(["weight α", String(t.alpha[i])]);
    const words = { aggregated: null, waiting: "uploaded, not used yet", flying: "still under way" }[outcome];
    if (words !== null) rows.push(["outcome", (words ?? outcome) + (t.reason[i] === null ? "" : `: ${data.reasons[t.reason[i]]}`)]);
    return rows;
  }
  function point(event) {
    if (!data || !view || (event.buttons && event.type === "pointermove")) { tip.hidden = true; return; }
    const i = find(event.clientX, event.clientY);
    if (i === null) { tip.hidden = true; return; }
    const t = data.trips, device = t.device[i], head = document.createElement("b"), list = document.createElement("dl");
    head.textContent = `Device ${device}, trip ${t.number[i]}${data.seconds ? ` (trains ${data.seconds[device].toFixed(1)} s)` : ""}`;
    for (const [term, value] of facts(i)) {
      const dt = document.createElement("dt"), dd = document.createElement("dd");
      dt.textContent = term; dd.textContent = value;
      list.append(dt, dd);
    }
    tip.replaceChildren(head, list);
    tip.hidden = false;
    const frame = tip.getBoundingClientRect(), gap = 16;
    const left = event.clientX + gap + frame.width > window.innerWidth ? event.clientX - gap - frame.width : event.clientX + gap;
    tip.style.left = `${Math.max(8, Math.min(left, window.innerWidth - frame.width - 8))}px`;
    tip.style.top = `${Math.max(8, Math.min(event.clientY + gap, window.innerHeight - frame.height - 8))}px`;
  }

  /* What the shapes mean. */
  function keys(holder) {
    const theme = Theme.now(), t = data && data.trips, has = (name) => t && t.outcome.some((o) => data.outcomes[o] === name);
    const item = (sign, words) => { const span = document.createElement("span"); span.append(sign, words); return span; };
    const swatch = (background) => { const i = document.createElement("i"); i.style.background = background; return i; };
    function glyph(name, fill) {
      const space = "http://www.w3.org/2000/svg", svg = document.createElementNS(space, "svg"), shape = document.createElementNS(space, "polygon");
      svg.setAttribute("viewBox", "-1.4 -1.4 2.8 2.8");
      shape.setAttribute("points", GLYPHS[name].map((p) => p.join(",")).join(" "));
      shape.setAttribute("fill", fill);
      svg.append(shape);
      return svg;
    }
    const items = [];
    if (data) {
      if (data.legs) items.push(item(swatch(theme.down), "download"));
      items.push(item(swatch(theme.train), data.legs ? "training" : "trip"));
      if (t.answered.some((v) => v !== null)) items.push(item(glyph("dot", theme.ink), "asks"), item(swatch(theme.fresh), "fresh model comes"), item(glyph("diamond", theme.c[1]), "merge"), item(swatch(theme.retrain), "trains on"));
      if (alphas) {
        const one = alphas[0] === alphas[1], g = swatch(`linear-gradient(90deg, ${theme.scale.join(",")})`);
        g.className = "gradient";
        items.push(item(one ? swatch(Theme.mix(theme.scale, 0.5)) : g, one ? `upload, α ${alphas[0]}` : `upload, α ${alphas[0].toPrecision(2)} to ${alphas[1].toPrecision(2)}${alphas[0] > 0 ? " (log)" : ""}`));
      }
      if (t.urgent.some((v) => v !== null)) items.push(item(swatch(theme.c[6]), "hurried"));
      for (const [name, sign, fill] of [["discarded", "cross", theme.bad], ["lost", "triangle", theme.ink], ["rejected", "square", theme.c[6]]]) if (has(name)) items.push(item(glyph(sign, fill), name));
    }
    holder.replaceChildren(...items);
  }
  return { setup, load, show: () => { if (data && view) show(); }, move, keys };
})();
