"use strict";
/* The fleet's timeline: one lane per device. Plotly draws the axes and handles the zoom; the trips are painted on a
   canvas beneath it, in layers of one colour, so that thousands of them follow the mouse. */
const Timeline = (() => {
  const HALF = 0.36, BINS = 12;
  let place, canvas, tip, data, lanes, spans, fresh, view, bounds, alphas, typical, layers;
  let running = false, clock = "time";

  const GLYPHS = {
    dot: Array.from({ length: 12 }, (_, i) => [Math.cos(i * Math.PI / 6), Math.sin(i * Math.PI / 6)]),
    diamond: [[0, -1.25], [1, 0], [0, 1.25], [-1, 0]],
    cross: [
      [-1, -.55], [-.55, -1], [0, -.45], [.55, -1], [1, -.55], [.45, 0],
      [1, .55], [.55, 1], [0, .45], [-.55, 1], [-1, .55], [-.45, 0],
    ],
    triangle: [[-1, -.8], [1, -.8], [0, 1]],
    wedge: [[-1.3, -1.1], [.2, 0], [-1.3, 1.1]],
    square: [[-.85, -.85], [.85, -.85], [.85, .85], [-.85, .85]],
  };

  function setup(element, painting, tooltip) {
    place = element; canvas = painting; tip = tooltip;
    place.addEventListener("pointermove", point);
    place.addEventListener("pointerdown", point);
    place.addEventListener("pointerleave", () => { tip.hidden = true; });
    window.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
  }

  /* Takes in a run; the zoom is kept while the same run grows. */
  function load(timeline, order, keep, words) {
    data = timeline;
    clock = words;
    tip.hidden = true;
    canvas.hidden = !data;
    if (!data) {
      view = null;
      delete place.dataset.bound;
      return Theme.draw(place.id, null, "The log of this run has no trips.");
    }
    const seconds = data.seconds, devices = [...Array(data.devices).keys()], t = data.trips;
    if (order === "speed") {
      const counts = new Map();
      for (const device of t.device) counts.set(device, (counts.get(device) || 0) + 1);
      const slow = (d) => (seconds ? seconds[d] : -(counts.get(d) || 0));
      devices.sort((a, b) => slow(a) - slow(b) || a - b);
    }
    lanes = { order: devices, of: new Map(devices.map((device, lane) => [device, lane])) };
    spans = devices.map(() => []);
    t.device.forEach((device, index) => {
      const lane = lanes.of.get(device);
      if (lane !== undefined) spans[lane].push(index);
    });
    fresh = t.device.map(() => []);
    const keys = Object.keys(data.fresh);
    data.fresh.trip.forEach((trip, at) => {
      fresh[trip].push(Object.fromEntries(keys.map((key) => [key, data.fresh[key][at]])));
    });
    const first = data.first || 0, whole = [first, Math.max(data.end, first + 1e-6)], before = bounds;
    bounds = whole;
    const wide = view && before && view.x[0] === before[0] && view.x[1] === before[1];
    if (!keep || !view || wide) view = { x: [...whole], y: everyone() };
    const known = t.alpha.filter((value) => value !== null).sort((a, b) => a - b);
    const at = (share) => known[Math.min(known.length - 1, Math.floor(share * known.length))];
    alphas = known.length ? [at(0.05), at(0.95)] : null;
    const long = t.end.map((stop, i) => (stop ?? data.end) - t.start[i]).sort((a, b) => a - b);
    typical = long[Math.floor(long.length / 2)];
    place.dataset.lanes = devices.length;
    layers = sorted();
    return show();
  }
  const everyone = () => [lanes.order.length - 0.4, -0.6];

  function size() {
    const rows = lanes.order.length, lane = Math.min(18, Math.max(8, 1000 / rows));
    const height = Math.min(1100, Math.max(200, rows * lane)) + 56;
    const margin = Theme.narrow() ? { l: 38, r: 8, t: 6, b: 46 } : { l: 52, r: 12, t: 6, b: 48 };
    const width = Math.max(120, place.clientWidth - margin.l - margin.r);
    return { height, margin, width, inner: height - margin.t - margin.b };
  }

  function shade(alpha) {
    if (!alphas || alpha === null) return Math.floor(BINS / 2);
    const [low, high] = alphas;
    let share = 0.5;
    if (high > low && low > 0) share = Math.log(Math.max(alpha, low) / low) / Math.log(high / low);
    else if (high > low) share = (alpha - low) / (high - low);
    return Math.max(0, Math.min(BINS - 1, Math.floor(share * BINS)));
  }

  /* All trips as boxes and glyphs, in layers of one colour. A box keeps a least width on the screen, to its left or
     right. */
  function sorted() {
    const t = data.trips, end = data.end;
    const boxes = (half, least) => ({ half, least, items: [] });
    const glyphs = (glyph, scale) => ({ glyph, scale, items: [] });
    const made = {
      down: boxes(HALF, 1), train: boxes(HALF, 0), retrain: boxes(HALF, 0), fresh: boxes(HALF, 1.5),
      pushes: boxes(HALF / 2, 1.5),
      gone: boxes(HALF, -2), urgent: boxes(0.48, 2), uploads: Array.from({ length: BINS }, () => boxes(0.46, -3)),
      asked: glyphs("dot", 0.8), pushed: glyphs("wedge", 0.8), merged: glyphs("diamond", 1),
      ...Object.fromEntries(Object.entries(SIGNS).map(([name, sign]) => [name, glyphs(sign, 1.25)])),
    };
    const box = (layer, from, to, lane) => { if (to > from || layer.least) layer.items.push(from, to, lane); };
    for (let i = 0; i < t.device.length; i++) {
      const lane = lanes.of.get(t.device[i]), start = t.start[i], stop = t.end[i] ?? end;
      if (lane === undefined) continue;
      const outcome = data.outcomes[t.outcome[i]];
      const train = Math.min(t.train[i] ?? start, stop), sent = t.sent[i] ?? stop;
      if (data.legs) box(made.down, start, train, lane);
      training(made, box, i, lane, train, sent, stop);
      if (t.urgent[i] !== null) box(made.urgent, t.urgent[i], t.urgent[i], lane);
      if (t.end[i] === null) continue;
      if (outcome === "aggregated" || outcome === "waiting") box(made.uploads[shade(t.alpha[i])], sent, stop, lane);
      else { box(made.gone, sent, stop, lane); made[outcome].items.push(stop, lane); }
    }
    return made;
  }
  /* From the first step to the upload, with what comes in between. A device waits for what it asked for; it trains on
     while a pushed model comes, whose download is a thin box inside its training. */
  function training(made, box, i, lane, train, sent, stop) {
    let from = train, layer = made.train;
    fresh[i].forEach((each, at) => {
      const { pushed, version, merged } = each, asked = each.asked ?? each.sent;
      const arrived = Math.min(each.arrived ?? each.sent, stop);
      if (pushed) {
        box(made.pushes, each.sent, arrived, lane);
        made.pushed.items.push(each.sent, lane);
        if (merged !== null) { box(layer, from, merged, lane); from = merged; }
      } else {
        box(layer, from, asked, lane);
        const next = fresh[i][at + 1], waits = version !== null && each.arrived === null;
        from = merged ?? (waits ? next?.asked ?? next?.sent ?? stop : arrived);
        if (version !== null) box(made.fresh, each.sent, from, lane);
        made.asked.items.push(asked, lane);
      }
      if (merged !== null) { made.merged.items.push(merged, lane); layer = made.retrain; }
    });
    if (from < sent) box(layer, from, sent, lane);
  }

  const refusals = (theme) => [["discarded", theme.bad], ["lost", theme.ink], ["rejected", theme.c[6]]];
  const SIGNS = { discarded: "cross", lost: "triangle", rejected: "square" };

  function paint() {
    const { width, inner, margin } = size(), dots = window.devicePixelRatio || 1, theme = Theme.now();
    const frame = { left: margin.l, top: margin.t, width, height: inner };
    for (const [side, length] of Object.entries(frame)) canvas.style[side] = `${length}px`;
    const pixels = [Math.round(width * dots), Math.round(inner * dots)];
    if (canvas.width !== pixels[0] || canvas.height !== pixels[1]) [canvas.width, canvas.height] = pixels;
    const ink = canvas.getContext("2d"), kx = width / (view.x[1] - view.x[0]), ky = inner / (view.y[0] - view.y[1]);
    const radius = Math.max(1.5, Math.min(4.2, 0.3 * ky, 0.15 * typical * kx));
    ink.setTransform(dots, 0, 0, dots, 0, 0);
    ink.fillStyle = theme.fleet;
    ink.fillRect(0, 0, width, inner);
    function boxes({ half, least, items }, fill) {
      ink.fillStyle = fill;
      for (let i = 0; i < items.length; i += 3) {
        let from = (items[i] - view.x[0]) * kx, to = (items[i + 1] - view.x[0]) * kx;
        if (least > 0) to = Math.max(to, from + least); else if (least < 0) from = Math.min(from, to + least);
        if (to < 0 || from > width) continue;
        from = Math.max(from, -5); to = Math.min(to, width + 5);
        ink.fillRect(from, (items[i + 2] - half - view.y[1]) * ky, to - from, 2 * half * ky);
      }
    }
    function glyphs({ glyph, scale, items }, fill) {
      const points = GLYPHS[glyph].map(([a, b]) => [a * radius * scale, b * radius * scale]);
      let drawn = 0;
      ink.fillStyle = fill;
      ink.beginPath();
      for (let i = 0; i < items.length; i += 2) {
        const x = (items[i] - view.x[0]) * kx, y = (items[i + 1] - view.y[1]) * ky;
        if (x < -8 || x > width + 8) continue;
        points.forEach(([a, b], index) => (index ? ink.lineTo(x + a, y + b) : ink.moveTo(x + a, y + b)));
        ink.closePath();
        if (++drawn % 40 === 0) { ink.fill(); ink.beginPath(); }  // long paths are slow to fill
      }
      ink.fill();
    }
    for (const name of ["down", "train", "retrain", "fresh"]) boxes(layers[name], theme[name]);
    boxes(layers.pushes, theme.fresh);
    boxes(layers.gone, theme.muted);
    boxes(layers.urgent, theme.c[6]);
    layers.uploads.forEach((layer, index) => boxes(layer, Theme.mix(theme.scale, (index + 0.5) / BINS)));
    glyphs(layers.asked, theme.ink);
    glyphs(layers.pushed, theme.ink);
    glyphs(layers.merged, theme.c[1]);
    for (const [name, fill] of refusals(theme)) glyphs(layers[name], fill);
  }

  function labels(inner) {
    const visible = Math.abs(view.y[0] - view.y[1]);
    const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000].find((n) => (inner / visible) * n >= 13) || 10000;
    const tickvals = lanes.order.map((_, lane) => lane).filter((lane) => lane % step === 0);
    return { tickvals, ticktext: tickvals.map((lane) => String(lanes.order[lane])) };
  }

  function show() {
    const { height, margin, inner } = size();
    const layout = Theme.layout({
      height, margin, hovermode: false, uirevision: null,
      xaxis: { title: { text: `${clock} (s)` }, range: [...view.x], gridcolor: Theme.colour("@muted/16") },
      yaxis: {
        range: [...view.y], showgrid: false, ...labels(inner),
        title: { text: Theme.narrow() ? "" : "device", standoff: 4 },
      },
    });
    if (!place.data) place.replaceChildren();
    paint();
    running = true;
    const config = { ...Theme.CONFIG, modeBarButtonsToRemove: [...Theme.CONFIG.modeBarButtonsToRemove, "toImage"] };
    return Plotly.react(place, [{ type: "scatter", x: [], y: [] }], layout, config).then(() => {
      running = false;
      if (place.dataset.bound) return;
      place.dataset.bound = "yes";
      place.on("plotly_relayout", moved);
      place.on("plotly_relayouting", moving);
    });
  }

  /* After a zoom by mouse or double click. */
  function moved(change) {
    if (running || !data || !view) return;
    if (change["xaxis.autorange"] || change["yaxis.autorange"]) view = { x: [...bounds], y: everyone() };
    else view = { x: [...place.layout.xaxis.range], y: [...place.layout.yaxis.range] };
    show();
  }
  /* While the mouse drags. */
  function moving(change) {
    const now = (axis, index, other) => change[`${axis}.range[${index}]`] ?? other;
    view = { x: [0, 1].map((i) => now("xaxis", i, view.x[i])), y: [0, 1].map((i) => now("yaxis", i, view.y[i])) };
    tip.hidden = true;
    paint();
  }
  function move(how) {
    if (!view) return;
    const [a, b] = view.x, span = b - a, middle = (a + b) / 2;
    const set = {
      left: [a - span / 2, b - span / 2], right: [a + span / 2, b + span / 2],
      in: [middle - span / 4, middle + span / 4], out: [middle - span, middle + span], all: [...bounds],
    }[how];
    const wide = Math.min(set[1] - set[0], bounds[1] - bounds[0]);
    const left = Math.max(bounds[0], Math.min(set[0], bounds[1] - wide));
    view = { x: [left, left + wide], y: how === "all" ? everyone() : view.y };
    tip.hidden = true;
    return show();
  }

  // ---- what is under the pointer

  function find(clientX, clientY) {
    const { width, inner, margin } = size(), frame = place.getBoundingClientRect();
    const fx = (clientX - frame.left - margin.l) / width, fy = (clientY - frame.top - margin.t) / inner;
    if (fx < 0 || fx > 1 || fy < 0 || fy > 1) return null;
    const time = view.x[0] + fx * (view.x[1] - view.x[0]);
    const lane = Math.round(view.y[1] + fy * (view.y[0] - view.y[1]));
    const slack = 4 * (view.x[1] - view.x[0]) / width, t = data.trips;
    if (lane < 0 || lane >= spans.length) return null;
    const inside = spans[lane].filter((i) => t.start[i] - slack <= time && time <= (t.end[i] ?? data.end) + slack);
    const far = (i) => Math.max(t.start[i] - time, time - (t.end[i] ?? data.end), 0);
    inside.sort((a, b) => far(a) - far(b));
    return inside.length ? inside[0] : null;
  }
  const s = (value) => `${value.toFixed(value < 100 ? 2 : 1)} s`;
  /* A request or push, and what came of it. A trip that was aggregated has reported all its merges. */
  function told({ pushed, asked, sent, version, slot, merged, beta }, complete) {
    const before = slot === null ? "" : `before epoch ${slot}`, weight = beta === null ? "" : `β ${beta}`;
    const join = (...parts) => parts.filter(Boolean).join(", ");
    const first = pushed ? ["pushed", `${s(sent)}, version ${version}`] : ["asked", join(s(asked ?? sent), before)];
    if (version === null) return [first, ["answer", "nothing newer"]];
    if (merged === null) return complete ? [first, ["merged", "no"]] : [first];
    const which = pushed ? before : `version ${version}`;
    return [first, ["merged", join(merged > sent && s(merged), which, weight)]];
  }
  /* So many of them fit into the box. */
  const MOST = 6;
  function facts(i) {
    const t = data.trips, rows = [["triggered", `${s(t.start[i])}, version ${t.base[i] ?? "?"}`]];
    const outcome = data.outcomes[t.outcome[i]];
    rows.push(...fresh[i].slice(0, MOST).flatMap((each) => told(each, outcome === "aggregated")));
    if (fresh[i].length > MOST) rows.push(["", `and ${fresh[i].length - MOST} more`]);
    if (t.urgent[i] !== null) rows.push(["hurried", s(t.urgent[i])]);
    if (t.end[i] !== null) rows.push([outcome === "lost" ? "lost" : "uploaded", s(t.end[i])]);
    if (t.staleness[i] !== null) rows.push(["staleness", String(t.staleness[i])]);
    if (t.alpha[i] !== null) rows.push(["weight α", String(t.alpha[i])]);
    const words = { aggregated: null, waiting: "uploaded, not used yet", flying: "still under way" }[outcome];
    const reason = t.reason[i] === null ? "" : `: ${data.reasons[t.reason[i]]}`;
    if (words !== null) rows.push(["outcome", (words ?? outcome) + reason]);
    return rows;
  }
  function point(event) {
    if (!data || !view || (event.buttons && event.type === "pointermove")) { tip.hidden = true; return; }
    const i = find(event.clientX, event.clientY);
    if (i === null) { tip.hidden = true; return; }
    const t = data.trips, device = t.device[i];
    const head = document.createElement("b"), list = document.createElement("dl");
    const speed = data.seconds ? ` (trains ${data.seconds[device].toFixed(1)} s)` : "";
    head.textContent = `Device ${device}, trip ${t.number[i]}${speed}`;
    for (const [term, value] of facts(i)) {
      const dt = document.createElement("dt"), dd = document.createElement("dd");
      dt.textContent = term; dd.textContent = value;
      list.append(dt, dd);
    }
    tip.replaceChildren(head, list);
    tip.hidden = false;
    const frame = tip.getBoundingClientRect(), gap = 16;
    const room = event.clientX + gap + frame.width <= window.innerWidth;
    const left = room ? event.clientX + gap : event.clientX - gap - frame.width;
    tip.style.left = `${Math.max(8, Math.min(left, window.innerWidth - frame.width - 8))}px`;
    tip.style.top = `${Math.max(8, Math.min(event.clientY + gap, window.innerHeight - frame.height - 8))}px`;
  }

  /* What the shapes mean. */
  function item(sign, words) {
    const span = document.createElement("span");
    span.append(sign, words);
    return span;
  }
  function swatch(background) {
    const box = document.createElement("i");
    box.style.background = background;
    return box;
  }
  function glyph(name, fill) {
    const space = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(space, "svg"), shape = document.createElementNS(space, "polygon");
    svg.setAttribute("viewBox", "-1.4 -1.4 2.8 2.8");
    shape.setAttribute("points", GLYPHS[name].map((point) => point.join(",")).join(" "));
    shape.setAttribute("fill", fill);
    svg.append(shape);
    return svg;
  }
  function weights(theme) {
    const [low, high] = alphas;
    if (low === high) return item(swatch(Theme.mix(theme.scale, 0.5)), `upload, α ${low}`);
    const gradient = swatch(`linear-gradient(90deg, ${theme.scale.join(",")})`), log = low > 0 ? " (log)" : "";
    gradient.className = "gradient";
    return item(gradient, `upload, α ${low.toPrecision(2)} or less to ${high.toPrecision(2)} or more${log}`);
  }
  function keys(holder) {
    if (!data) return holder.replaceChildren();
    const theme = Theme.now(), t = data.trips, items = [];
    const some = (column) => column.some((value) => value !== null);
    if (data.legs) items.push(item(swatch(theme.down), "download"));
    items.push(item(swatch(theme.train), data.legs ? "training" : "trip"));
    const pushes = data.fresh.pushed;
    if (pushes.length) {
      if (!pushes.every(Boolean)) items.push(item(glyph("dot", theme.ink), "asks"));
      if (pushes.some(Boolean)) items.push(item(glyph("wedge", theme.ink), "push"));
      items.push(item(swatch(theme.fresh), "fresh model comes"));
      items.push(item(glyph("diamond", theme.c[1]), "merge"), item(swatch(theme.retrain), "trains on"));
    }
    if (alphas) items.push(weights(theme));
    if (some(t.urgent)) items.push(item(swatch(theme.c[6]), "hurried"));
    for (const [name, fill] of refusals(theme)) {
      if (t.outcome.some((at) => data.outcomes[at] === name)) items.push(item(glyph(SIGNS[name], fill), name));
    }
    holder.replaceChildren(...items);
  }
  return { setup, load, show: () => { if (data && view) show(); }, move, keys };
})();
