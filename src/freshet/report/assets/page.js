"use strict";
/* Fills the page from its data. Texts of runs are put in as text nodes, never as markup. */
(() => {
  const $$ = (id) => document.getElementById(id);
  const live = document.documentElement.dataset.mode === "live";
  let doc = live ? null : JSON.parse($$("data").textContent), axis = "time", chosen = null, version = "";
  const hidden = new Set();

  function el(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name === "style") Object.assign(node.style, value); else if (name === "class") node.className = value; else node.setAttribute(name, value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  }
  const count = (n, one, many) => `${n.toLocaleString("en")} ${n === 1 ? one : many || `${one}s`}`;
  const fixed = (digits, scale = 1) => (value) => (value * scale).toFixed(digits);
  const percent = fixed(1, 100), whole = (value) => Math.round(value).toLocaleString("en");
  const mega = (value) => { const mb = value / 1e6; return mb >= 1000 ? mb.toFixed(0) : mb.toFixed(1); };
  const shade = (style) => Theme.colour(`@c${style % Theme.now().c.length}`);
  const swatch = (style) => el("span", { class: "dot", style: { background: shade(style) } });
  const dot = (group) => swatch(doc.groups[group].style);
  const seconds = (value) => (value >= 7200 ? `${(value / 3600).toFixed(1)} h` : `${Number(value.toFixed(0)).toLocaleString("en")} s`);

  // ---- head and results

  function head() {
    const about = doc.subject, single = doc.runs.length === 1;
    const over = single ? doc.runs[0].label : about.configurations > about.methods ? count(about.configurations, "configuration") : count(about.methods, "method");
    const title = `${over} on ${about.data.join(", ")}`;
    document.title = `${title} · Freshet`;
    $$("title").textContent = title;
    const facts = [count(about.runs, "run"), `${about.devices.map((n) => n.toLocaleString("en")).join(" / ")} devices`, `network ${about.models.join(", ")}`, `${seconds(about.end)} of virtual time`];
    if (about.finished < about.runs) facts.push(`${about.runs - about.finished} not finished`);
    $$("subtitle").textContent = facts.join(" · ");
    $$("footer").textContent = `Made by Freshet ${doc.freshet}, ${doc.made}. This file is complete in itself: it loads nothing and sends nothing.`;
  }

  function cards() {
    const lines = doc.lines.map((line, group) => ({ ...line, group })).filter((line) => line.runs);
    const best = (key, sign, get = (line) => line[key].median) => lines.filter((line) => get(line) !== null).sort((a, b) => sign * (get(a) - get(b)))[0];
    const card = (what, value, unit, line, more) => el("div", { class: "card" }, el("div", { class: "what" }, what), el("div", { class: "value" }, value, unit ? el("small", {}, unit) : null), el("div", { class: "who" }, line ? dot(line.group) : null, more || (line ? line.label : "")));
    const items = [], several = lines.length > 1;
    const top = best("accuracy", -1), fast = best("time_mean", 1), raw = best("time_raw", 1);
    if (top) items.push(card(several ? "Highest final accuracy" : "Final accuracy", percent(top.accuracy.median), "%", top));
    const target = `${(100 * doc.target).toFixed(0)} %`;
    if (raw) items.push(card(several ? `First to ${target}` : `Time to ${target}`, whole(raw.time_raw.median), "s", raw));
    if (fast) items.push(card(several ? `First to stay there (5-point mean)` : `Time to ${target}, 5-point mean`, whole(fast.time_mean.median), "s", fast));
    if (!raw && lines.length) items.push(card(`Time to ${target}`, "—", "", null, "not reached by the median run"));
    const traffic = (line) => (line.bytes_up.median === null || line.bytes_down.median === null ? null : line.bytes_up.median + line.bytes_down.median);
    const least = best("", 1, traffic);
    if (least) items.push(card(several ? "Least traffic" : "Traffic", mega(traffic(least)), "MB", least));
    if (!lines.length && doc.runs.length === 1) {
      const run = doc.runs[0];
      items.push(card("Accuracy so far", run.accuracy === null ? "—" : percent(run.accuracy), run.accuracy === null ? "" : "%", null, run.label), card("Virtual time", whole(run.end), run.until ? `of ${whole(run.until)} s` : "s", null, run.status), card("Uploads", run.uploads === null ? "—" : whole(run.uploads), "", null, run.seed === null ? "" : `seed ${run.seed}`));
    }
    $$("cards").replaceChildren(...items);
  }

  const COLUMNS = [
    ["accuracy", "final\naccuracy (%)", percent, -1], ["best", "best\naccuracy (%)", percent, -1], ["time_raw", "first\ncrossing (s)", whole, 1], ["time_mean", "5-point\nmean (s)", whole, 1],
    ["mean_staleness", "mean\nstaleness", fixed(1)], ["uploads", "\nuploads", whole], ["discards", "dis-\ncarded", whole], ["rejected", "re-\njected", whole, 0, true], ["lost", "\nlost", whole],
    ["bytes_up", "up\n(MB)", mega], ["bytes_down", "down\n(MB)", mega], ["wall_seconds", "compute\n(s)", whole],
  ];
  function headline() {
    const lines = doc.lines.filter((line) => line.runs), compare = lines.some((line) => line.against && line.against.pairs > 1);
    const heading = (words) => el("th", {}, ...words.split("\n").flatMap((word, index) => (index ? [el("br"), word] : [word])));
    const columns = COLUMNS.filter(([key, , , , seldom]) => !seldom || lines.some((line) => line[key].high));
    const top = Object.fromEntries(columns.filter((column) => column[3]).map(([key, , , sign]) => [key, lines.map((line) => line[key].median).filter((v) => v !== null).sort((a, b) => sign * (a - b))[0]]));
    const rows = lines.map((line) => {
      const group = doc.lines.indexOf(line);
      const cells = columns.map(([key, , show]) => {
        const spread = line[key];
        const value = spread.median === null ? "—" : show(spread.median);
        const partial = key.startsWith("time_") && spread.count < spread.of && spread.count ? `${spread.count} of ${spread.of} seeds` : null;
        const range = partial || (spread.of > 1 && spread.low !== null && show(spread.low) !== show(spread.high) ? `${show(spread.low)} – ${show(spread.high)}` : null);
        return el("td", lines.length > 1 && spread.median !== null && spread.median === top[key] ? { class: "top-value" } : {}, value, range ? el("small", {}, range) : null);
      });
      if (compare) {
        const a = line.against;
        cells.push(a ? el("td", {}, ratio(a.time_raw), el("small", {}, `of ${clip(a.reference, 16)}`)) : el("td", {}, "·"));
        cells.push(a && a.pairs ? el("td", {}, signed(a.difference), el("small", {}, a.p === null || a.pairs < 2 ? `${a.pairs} seed${a.pairs > 1 ? "s" : ""}` : `p = ${a.p.toPrecision(2)}`)) : el("td", {}, "·"));
      }
      const seeds = line.seeds.length > 1 ? `seeds ${line.seeds.join(", ")}` : line.seeds.length ? `seed ${line.seeds[0]}` : "";
      return el("tr", {}, el("td", { class: "name" }, el("div", { class: "who" }, dot(group), el("span", {}, line.label)), el("small", {}, seeds), diverged(line.diverged.map((each) => each.time))), ...cells);
    });
    const headings = [heading("\nmethod"), ...columns.map(([, words]) => heading(words)), ...(compare ? [heading("time vs\nreference"), heading("accuracy vs\nit (points)")] : [])];
    const empty = el("div", { class: "empty" }, live ? "The table fills when the run has finished." : "No run has finished: there is nothing to average.");
    $$("headline").replaceChildren(lines.length ? el("table", {}, el("thead", {}, el("tr", {}, ...headings.filter(Boolean))), el("tbody", {}, ...rows)) : empty);
    const test = compare ? ` ${RATIO} Accuracy against the same reference: mean difference of final accuracy in points over common seeds, with the exact two-sided sign-flip p-value (n seeds cannot give less than 2 / 2ⁿ).` : "";
    $$("headline-note").textContent = lines.length ? `Medians over seeds of runs that have ended, least and greatest below. Times are virtual seconds to ${(100 * doc.target).toFixed(0)} % on a common test grid: raw first crossing, and first crossing of the trailing 5-point mean; a dash if the median seed never gets there.${test}` : "";
    const others = doc.runs.filter((run) => !ended(run));
    $$("uncounted").replaceChildren(...(others.length && !(live && doc.runs.length === 1) ? [el("h3", {}, "Not finished, not counted"), el("div", { class: "panel flush" }, el("div", { class: "scroll" }, el("table", { class: "left" }, el("thead", {}, el("tr", {}, ...["run", "method", "seed", "status", "reached"].map((w) => el("th", {}, w)))), el("tbody", {}, ...others.map((run) => el("tr", {}, el("td", {}, run.name), el("td", {}, run.label), el("td", {}, String(run.seed ?? "–")), el("td", {}, el("span", { class: "status" }, run.status)), el("td", {}, `${whole(run.end)} s${run.until ? ` of ${whole(run.until)} s` : ""}${run.accuracy === null ? "" : `, ${percent(run.accuracy)} %`}`)))))))] : []));
    $$("notes").replaceChildren(...doc.notes.map((note) => el("li", {}, note)));
  }
  const RATIO = "Time vs reference: 1.60x takes 1.6 times as long to the target, 0.50x half as long; > where it had not got there when its runs ended, < where the reference had not.";
  const ratio = (value) => (value ? `${value.bound === "=" ? "" : value.bound}${value.ratio.toFixed(2)}x` : "—");
  const signed = (value) => `${value >= 0 ? "+" : "−"}${Math.abs(100 * value).toFixed(1)}`;
  const diverged = (times) => (times.length ? el("small", { class: "bad" }, `${times.length} diverged at ${times.map(whole).join(", ")} s`) : null);
  const ended = (run) => run.status === "finished" || run.status === "diverged";
  const clip = (words, most) => (words.length > most ? `${words.slice(0, most - 1)}…` : words);

  // ---- comparison

  const AXES = { time: "virtual time", bytes: "traffic", wall: "wall time" };
  function comparison() {
    $$("axis").replaceChildren(...Object.entries(AXES).map(([key, words]) => {
      const button = el("button", { type: "button", "aria-pressed": String(key === axis) }, words);
      if (!doc.accuracy[key]) { button.disabled = true; button.title = "These runs' logs do not have it"; }
      button.addEventListener("click", () => { axis = key; comparison(); });
      return button;
    }));
    $$("legend").hidden = doc.groups.length < 2;
    $$("legend").replaceChildren(...doc.groups.map((group, index) => {
      const chip = el("button", { type: "button", class: "chip", "aria-pressed": String(!hidden.has(index)) }, el("span", { class: "stroke", style: { borderTopColor: shade(group.style), borderTopStyle: { dash: "dashed", dot: "dotted" }[group.dash] || "solid" } }), group.label);
      chip.addEventListener("click", () => { if (!hidden.delete(index)) hidden.add(index); comparison(); });
      return chip;
    }));
    const bands = doc.lines.some((line) => line.runs > 1), broken = doc.runs.some((run) => !ended(run));
    $$("accuracy-note").textContent = [bands ? "Line: median over seeds; band: least to greatest." : "On the test set.", broken ? "Thin dashes: runs that have not finished." : ""].join(" ").trim();
    Theme.draw("chart-accuracy", sized(shown(doc.accuracy[axis]), Theme.narrow() ? 320 : 430), "The model has not been tested yet.");
    $$("target-note").textContent = `Virtual time until ${(100 * doc.target).toFixed(0)} % accuracy. Full bar: first crossing; pale: 5-point mean.`;
    Theme.draw("chart-target", doc.time_to_target, doc.lines.some((line) => line.runs) ? `— no finished run reached ${(100 * doc.target).toFixed(0)} %` : "No finished run yet.");
    $$("staleness-note").textContent = ["Versions the global model had moved on when an upload was used.", doc.staleness && doc.staleness.note].filter(Boolean).join(" ");
    Theme.draw("chart-staleness", sized(shown(doc.staleness), Math.max(300, doc.time_to_target ? doc.time_to_target.layout.height : 0)), "No upload has been used yet.");
  }
  const shown = (figure) => figure && { ...figure, data: figure.data.map((trace) => (hidden.has(trace.meta.group) ? { ...trace, visible: false } : trace)) };
  const sized = (figure, height) => figure && { ...figure, layout: { ...figure.layout, height } };

  // ---- one run

  function choices() {
    const select = $$("run"), named = doc.closeups.map((item) => doc.runs[item.run].name);
    if (!named.includes(chosen)) chosen = named[0];
    select.replaceChildren(...doc.closeups.map((item) => {
      const run = doc.runs[item.run], words = `${run.label}${run.seed === null ? "" : `, seed ${run.seed}`}${run.status === "finished" ? "" : ` (${run.status})`} · ${run.name}`;
      const option = el("option", { value: run.name }, clip(words, 70));
      option.selected = run.name === chosen;
      return option;
    }));
    select.disabled = doc.closeups.length < 2;
  }
  const current = () => doc.closeups.find((item) => doc.runs[item.run].name === chosen);

  function closeup(keep) {
    const item = current(), run = doc.runs[item.run], line = item.timeline;
    const left = doc.runs.length - doc.closeups.length;
    const said = ["One lane per device; point at a trip for its numbers."];
    if (line && !line.legs) said.push("How long downloads and uploads took is not in this log: bars span whole trips.");
    if (line && line.left_out) said.push(`The last ${count(line.trips.device.length, "trip")} of ${(line.left_out + line.trips.device.length).toLocaleString("en")}.`);
    if (left) said.push(`${count(left, "run")} left out to keep this file small.`);
    $$("fleet-note").textContent = said.join(" ");
    Timeline.load(line, $$("order").value, keep);
    Timeline.keys($$("timeline-keys"));
    const narrow = Theme.narrow();
    $$("alpha-note").textContent = ["α against staleness, one point per upload.", item.alpha && item.alpha.note ? `Shown: ${item.alpha.note}.` : "", doc.closeups.length > 1 ? `Run: ${run.label}, seed ${run.seed ?? "–"}.` : ""].join(" ").trim();
    Theme.draw("chart-alpha", item.alpha, "No upload of this run has a weight.");
    $$("partition-part").hidden = !item.partition;
    $$("partition-part").parentNode.classList.toggle("pair", Boolean(item.partition));
    if (item.partition) Theme.draw("chart-partition", sized(item.partition, 320));
    $$("slots-part").hidden = !item.slots;
    if (item.slots) { Theme.draw("chart-slots", item.slots); Theme.draw("chart-choosers", item.choosers, "The log does not say."); }
    $$("controls-part").hidden = !item.controls.length;
    const names = item.controls.map((control) => control.name).join(" "), grid = $$("controls");
    if (grid.dataset.names !== names) {
      grid.dataset.names = names;
      grid.replaceChildren(...item.controls.map((control) => el("div", { class: "panel" }, el("h3", {}, `${control.symbol} ${control.name}`, el("span", {}, control.meaning)), el("div", { class: "chart", id: `control-${control.name}` }))));
    }
    for (const control of item.controls) Theme.draw(`control-${control.name}`, { ...control, layout: { ...control.layout, margin: { l: 8, r: 10, t: 8, b: narrow ? 42 : 44 } } });
  }

  // ---- experiments

  const bytes = (value) => (value === null ? "—" : `${mega(value)}`);
  function table(headings, rows) {
    return el("div", { class: "panel flush" }, el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ...headings.map((words) => el("th", {}, words)))), el("tbody", {}, ...rows))));
  }
  function who(line) { return el("td", { class: "name" }, el("div", { class: "who" }, swatch(line.style), el("span", {}, line.label)), diverged(line.diverged)); }
  function outcome(world) {
    const paper = world.lines.some((line) => line.published), text = (value, show) => el("td", {}, value === null ? "—" : show(value));
    const rows = world.lines.map((line) => el("tr", {}, who(line), el("td", {}, `${line.ended}/${line.all}`), text(line.accuracy, percent), text(line.time_raw, whole), el("td", {}, line.ratio === null ? (line.reference ? "—" : "·") : `${line.bound}${line.ratio.toFixed(2)}x`, line.reference ? el("small", {}, `of ${line.reference}`) : null), text(line.difference, signed), text(line.p, (p) => p.toPrecision(2)), ...(paper ? [text(line.published && line.published.accuracy, percent), text(line.published && line.published.time, whole)] : [])));
    return table(["method", "runs", "accuracy (%)", `to ${percent(world.target)} % (s)`, "time vs reference", "accuracy vs it", "p", ...(paper ? ["published (%)", "published time"] : [])], rows);
  }
  function traffic(world) {
    const rows = world.lines.map((line) => { const rest = line.bytes_up + line.bytes_down - line.bytes_fresh; return el("tr", {}, who(line), el("td", {}, bytes(line.bytes_up)), el("td", {}, bytes(line.bytes_down)), el("td", {}, bytes(line.bytes_fresh)), el("td", {}, line.bytes_fresh !== null && rest > 0 ? `+${(100 * line.bytes_fresh / rest).toFixed(1)} %` : "—")); });
    return table(["method", "up (MB)", "down (MB)", "of it fresh models (MB)", "on top of the rest"], rows);
  }
  function experiments() {
    const place = $$("experiments"), found = doc.experiments || [];
    place.hidden = !found.length;
    $$("experiments-link").hidden = !found.length;
    const drawn = [];
    place.replaceChildren(...found.map((item, at) => {
      const panels = item.rows.flat().map((figure, index) => { const id = `experiment-${at}-${index}`; drawn.push([id, figure]); return el("div", { class: "panel" }, el("h3", {}, figure.title), el("div", { class: "chart", id })); });
      const lines = [...new Map(item.worlds.flatMap((world) => world.lines).map((line) => [line.label, line])).values()];
      const legend = el("div", { class: "keys legend" }, ...lines.map((line) => el("span", { class: "who" }, swatch(line.style), line.label)));
      const tables = item.worlds.map((world) => el("div", {}, el("h3", {}, `${world.name}, ${seconds(world.until)}`), outcome(world), el("p", { class: "fine" }, "Communication overhead, medians over seeds."), traffic(world)));
      return el("div", {}, el("h2", {}, item.title), legend, el("div", { class: item.look === "curves" ? "grid" : "grid duo" }, ...panels), el("p", { class: "fine" }, `${RATIO} Dashed curves: synchronous methods. –: target not reached. ✕: a run diverged.`), ...tables, el("ul", { class: "plain" }, ...item.notes.map((note) => el("li", {}, note))));
    }));
    requestAnimationFrame(() => { for (const [id, figure] of drawn) Theme.draw(id, figure); });
  }

  // ---- settings

  function settings() {
    const { common, differing } = doc.settings;
    $$("settings-note").textContent = differing.length ? "First what differs, then what all runs share." : "As written to config.toml, defaults included.";
    $$("differing").replaceChildren(...(differing.length ? [el("div", { class: "panel flush" }, el("div", { class: "scroll" }, el("table", { class: "left differs" }, el("thead", {}, el("tr", {}, el("th", {}, "setting"), ...doc.groups.map((group) => el("th", {}, group.label)))), el("tbody", {}, ...differing.map((row) => el("tr", {}, el("td", {}, el("span", {}, `${row.section}.`), row.key), ...row.values.map((value) => el("td", value === row.values[0] ? {} : { class: "other" }, value))))))))] : []));
    $$("common").replaceChildren(...Object.entries(common).map(([section, rows]) => el("div", { class: "panel" }, el("h3", {}, section, section === "method" && doc.groups.length > 1 ? el("span", {}, "where a method has it") : null), el("table", {}, el("tbody", {}, ...rows.map((row) => el("tr", {}, el("td", {}, row.key), el("td", {}, row.value, section !== "method" && row.in < doc.groups.length ? el("small", {}, `in ${row.in} of ${doc.groups.length}`) : null))))))));
  }

  function render(keep) {
    head(); cards(); headline(); experiments(); comparison(); choices(); settings();
    requestAnimationFrame(() => { closeup(keep); document.documentElement.dataset.ready = "yes"; });
  }
  function again() { Theme.apply(); if (doc) render(true); }

  // ---- live

  function badge(words, still) { const place = $$("live"); place.hidden = false; place.textContent = words; place.className = still ? "badge still" : "badge"; }
  async function poll() {
    let wait = 1000;
    try {
      const answer = await fetch(`data.json?have=${encodeURIComponent(version)}`, { cache: "no-store" });
      if (answer.status === 200) { const got = await answer.json(); version = got.version; doc = got.document; for (const run of doc.runs) if (run.status === "unfinished") run.status = "running"; render(true); }
      const run = doc && doc.runs[0], over = run && run.status !== "running";
      if (run) badge(over ? run.status : `live · ${whole(run.end)} s`, over);
      if (over) wait = 5000;
    } catch (error) { badge("watch has stopped", true); wait = 5000; }
    setTimeout(poll, wait);
  }

  Timeline.setup($$("chart-timeline"), $$("lanes"), $$("tip"));
  $$("theme").addEventListener("click", () => { Theme.cycle(); again(); });
  Theme.onSystem(again);
  $$("run").addEventListener("change", (event) => { chosen = event.target.value; closeup(false); });
  $$("order").addEventListener("change", () => { if (doc) closeup(false); });
  for (const button of document.querySelectorAll("[data-move]")) button.addEventListener("click", () => Timeline.move(button.dataset.move));
  let width = window.innerWidth, timer;
  window.addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; clearTimeout(timer); timer = setTimeout(() => { if (doc) render(true); }, 150); } });
  Theme.apply();
  if (live) { badge("connecting", true); poll(); } else render(false);
})();
