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
  const dot = (group) => el("span", { class: "dot", style: { background: Theme.colour(`@c${group % 8}`) } });
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
    ["mean_staleness", "mean\nstaleness", fixed(1)], ["uploads", "\nuploads", whole], ["discards", "dis-\ncarded", whole], ["lost", "\nlost", whole],
    ["bytes_up", "up\n(MB)", mega], ["bytes_down", "down\n(MB)", mega], ["wall_seconds", "compute\n(s)", whole],
  ];
  function headline() {
    const lines = doc.lines.filter((line) => line.runs), compare = lines.some((line) => line.against && line.against.pairs > 1);
    const heading = (words) => el("th", {}, ...words.split("\n").flatMap((word, index) => (index ? [el("br"), word] : [word])));
    const top = Object.fromEntries(COLUMNS.filter((column) => column[3]).map(([key, , , sign]) => [key, lines.map((line) => line[key].median).filter((v) => v !== null).sort((a, b) => sign * (a - b))[0]]));
    const rows = lines.map((line) => {
      const group = doc.lines.indexOf(line);
      const cells = COLUMNS.map(([key, , show]) => {
        const spread = line[key];
        const value = spread.median === null ? "—" : show(spread.median);
        const partial = key.startsWith("time_") && spread.count < spread.of && spread.count ? `${spread.count} of ${spread.of} seeds` : null;
        const range = partial || (spread.of > 1 && spread.low !== null && show(spread.low) !== show(spread.high) ? `${show(spread.low)} – ${show(spread.high)}` : null);
        return el("td", lines.length > 1 && spread.median !== null && spread.median === top[key] ? { class: "top-value" } : {}, value, range ? el("small", {}, range) : null);
      });
      if (compare) {
        const a = line.against;
        cells.push(a && a.pairs ? el("td", {}, `${a.difference >= 0 ? "+" : "−"}${Math.abs(100 * a.difference).toFixed(1)}`, el("small", {}, a.p === null || a.pairs < 2 ? `${a.pairs} seed${a.pairs > 1 ? "s" : ""}` : `p = ${a.p.toPrecision(2)}`)) : el("td", {}, "·"));
      }
      const seeds = line.seeds.length > 1 ? `seeds ${line.seeds.join(", ")}` : line.seeds.length ? `seed ${line.seeds[0]}` : "";
      return el("tr", {}, el("td", { class: "name" }, el("div", { class: "who" }, dot(group), el("span", {}, line.label)), el("small", {}, seeds)), ...cells);
    });
    const headings = [heading("\nmethod"), ...COLUMNS.map(([, words]) => heading(words)), compare ? heading(`against\n${clip(doc.lines[0].label, 16)}`) : null];
    const empty = el("div", { class: "empty" }, live ? "The table fills when the run has finished." : "No run has finished: there is nothing to average.");
    $$("headline").replaceChildren(lines.length ? el("table", {}, el("thead", {}, el("tr", {}, ...headings.filter(Boolean))), el("tbody", {}, ...rows)) : empty);
    const test = compare ? ` Against ${doc.lines[0].label}: mean difference of final accuracy in points over common seeds, with the exact two-sided sign-flip p-value (n seeds cannot give less than 2 / 2ⁿ).` : "";
    $$("headline-note").textContent = lines.length ? `Medians over seeds of finished runs, least and greatest below. Times are virtual seconds to ${(100 * doc.target).toFixed(0)} % on a common test grid: raw first crossing, and first crossing of the trailing 5-point mean; a dash if the median seed never gets there.${test}` : "";
    const others = doc.runs.filter((run) => run.status !== "finished");
    $$("uncounted").replaceChildren(...(others.length && !(live && doc.runs.length === 1) ? [el("h3", {}, "Not finished, not counted"), el("div", { class: "panel flush" }, el("div", { class: "scroll" }, el("table", { class: "left" }, el("thead", {}, el("tr", {}, ...["run", "method", "seed", "status", "reached"].map((w) => el("th", {}, w)))), el("tbody", {}, ...others.map((run) => el("tr", {}, el("td", {}, run.name), el("td", {}, run.label), el("td", {}, String(run.seed ?? "–")), el("td", {}, el("span", { class: "status" }, run.status)), el("td", {}, `${whole(run.end)} s${run.until ? ` of ${whole(run.until)} s` : ""}${run.accuracy === null ? "" : `, ${percent(run.accuracy)} %`}`)))))))] : []));
    $$("notes").replaceChildren(...doc.notes.map((note) => el("li", {}, note)));
  }
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
      const chip = el("button", { type: "button", class: "chip", "aria-pressed": String(!hidden.has(index)) }, el("span", { class: "stroke", style: { borderTopColor: Theme.colour(`@c${index % 8}`), borderTopStyle: { dash: "dashed", dot: "dotted" }[group.dash] || "solid" } }), group.label);
      chip.addEventListener("click", () => { if (!hidden.delete(index)) hidden.add(index); comparison(); });
      return chip;
    }));
    const bands = doc.lines.some((line) => line.runs > 1), broken = doc.runs.some((run) => run.status !== "finished");
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

  // ---- settings

  function settings() {
    const { common, differing } = doc.settings;
    $$("settings-note").textContent = differing.length ? "First what differs, then what all runs share." : "As written to config.toml, defaults included.";
    $$("differing").replaceChildren(...(differing.length ? [el("div", { class: "panel flush" }, el("div", { class: "scroll" }, el("table", { class: "left differs" }, el("thead", {}, el("tr", {}, el("th", {}, "setting"), ...doc.groups.map((group) => el("th", {}, group.label)))), el("tbody", {}, ...differing.map((row) => el("tr", {}, el("td", {}, el("span", {}, `${row.section}.`), row.key), ...row.values.map((value) => el("td", value === row.values[0] ? {} : { class: "other" }, value))))))))] : []));
    $$("common").replaceChildren(...Object.entries(common).map(([section, rows]) => el("div", { class: "panel" }, el("h3", {}, section, section === "method" && doc.groups.length > 1 ? el("span", {}, "where a method has it") : null), el("table", {}, el("tbody", {}, ...rows.map((row) => el("tr", {}, el("td", {}, row.key), el("td", {}, row.value, section !== "method" && row.in < doc.groups.length ? el("small", {}, `in ${row.in} of ${doc.groups.length}`) : null))))))));
  }

  function render(keep) {
    head(); cards(); headline(); comparison(); choices(); settings();
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
