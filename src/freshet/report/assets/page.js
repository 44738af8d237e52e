"use strict";
/* Fills the page from its data. */
(() => {
  const { el, cell, small, row, table, panel, shade, local, percent, whole, mega, seconds, count } = Words;
  const { signed, clip, ratio, diverged, RATIO, KINDS } = Words;
  const $$ = (id) => document.getElementById(id);
  const live = document.documentElement.dataset.mode === "live";
  let doc = live ? null : JSON.parse($$("data").textContent), axis = "time", chosen = null, version = "";
  const hidden = new Set();
  const dot = (group) => Words.swatch(doc.groups[group].style);
  const target = () => `${(100 * doc.target).toFixed(0)} %`;
  const ended = (run) => run.status === "finished" || run.status === "diverged";
  const sentences = (...parts) => parts.filter(Boolean).join(" ");

  // ---- head and results

  function head() {
    const about = doc.subject, several = about.configurations > about.methods;
    const number = several ? count(about.configurations, "configuration") : count(about.methods, "method");
    const title = `${doc.runs.length === 1 ? doc.runs[0].label : number} on ${about.data.join(", ")}`;
    document.title = `${title} · Freshet`;
    $$("title").textContent = title;
    const facts = [
      count(about.runs, "run"), `${about.devices.map((n) => local(n)).join(" / ")} devices`,
      `network ${about.models.join(", ")}`, `${seconds(about.end)} of virtual time`,
    ];
    if (about.finished < about.runs) facts.push(`${about.runs - about.finished} not finished`);
    $$("subtitle").textContent = facts.join(" · ");
    $$("footer").textContent = `Made by Freshet ${doc.freshet}, ${doc.made}. `
      + "This file is complete in itself: it loads nothing and sends nothing.";
  }

  function card(what, value, unit, line, more) {
    const who = el("div", { class: "who" }, line ? dot(line.group) : null, more || (line ? line.label : ""));
    return el("div", { class: "card" }, el("div", { class: "what" }, what),
      el("div", { class: "value" }, value, small(unit)), who);
  }
  function bytes(line) {
    const up = line.bytes_up.median, down = line.bytes_down.median;
    return up === null || down === null ? null : up + down;
  }
  function cards() {
    const lines = doc.lines.filter((line) => line.runs), items = [], several = lines.length > 1;
    const least = (get) => {
      return lines.filter((line) => get(line) !== null).sort((a, b) => get(a) - get(b))[0];
    };
    const top = least((line) => (line.accuracy.median === null ? null : -line.accuracy.median));
    const raw = least((line) => line.time_raw.median), fast = least((line) => line.time_mean.median);
    const cheap = least(bytes), time = `Time to ${target()}`;
    const add = (one, many, ...rest) => items.push(card(several ? many : one, ...rest));
    if (top) add("Final accuracy", "Highest final accuracy", percent(top.accuracy.median), "%", top);
    if (raw) add(time, `First to ${target()}`, whole(raw.time_raw.median), "s", raw);
    const lasting = "First to stay there (5-point mean)";
    if (fast) add(`${time}, 5-point mean`, lasting, whole(fast.time_mean.median), "s", fast);
    if (!raw && lines.length) add(time, time, "—", "", null, "not reached by the median run");
    if (cheap) add("Traffic", "Least traffic", mega(bytes(cheap)), "MB", cheap);
    if (!lines.length && doc.runs.length === 1) items.push(...soFar(doc.runs[0]));
    $$("cards").replaceChildren(...items);
  }
  function soFar(run) {
    const tested = run.accuracy !== null, seed = run.seed === null ? "" : `seed ${run.seed}`;
    const accuracy = tested ? percent(run.accuracy) : "—";
    const uploads = run.uploads === null ? "—" : whole(run.uploads);
    return [
      card("Accuracy so far", accuracy, tested ? "%" : "", null, run.label),
      card("Virtual time", whole(run.end), run.until ? `of ${whole(run.until)} s` : "s", null, run.status),
      card("Uploads", uploads, "", null, seed),
    ];
  }

  function heading(above, below) { return el("th", {}, above, el("br"), below); }
  function titled({ title, kind }) {
    const [first, ...rest] = title.split(" "), unit = KINDS[kind][1];
    const below = [...rest, ...(unit ? [unit] : [])].join(" ");
    return below ? heading(first, below) : heading("", first);
  }
  function spread(line, { key, kind, best }) {
    const found = line[key], show = KINDS[kind][0], there = found.median !== null;
    const some = key.startsWith("time_") && found.count && found.count < found.of;
    let range = some ? `${found.count} of ${found.of} seeds` : null;
    if (!some && found.of > 1 && found.low !== null && show(found.low) !== show(found.high)) {
      range = `${show(found.low)} – ${show(found.high)}`;
    }
    const look = there && found.median === best ? { class: "top-value" } : {};
    return el("td", look, there ? show(found.median) : "—", small(range));
  }
  function against(held) {
    if (!held) return [cell("·"), cell("·")];
    const time = held.time_raw ? ratio(held.time_raw.ratio, held.time_raw.bound) : "—";
    const test = held.p === null || held.pairs < 2 ? count(held.pairs, "seed") : `p = ${held.p.toPrecision(2)}`;
    return [
      cell(time, small(`of ${clip(held.reference, 16)}`)),
      held.pairs ? cell(signed(held.difference), small(test)) : cell("·"),
    ];
  }
  function headline() {
    const lines = doc.lines.filter((line) => line.runs);
    const compare = lines.some((line) => line.against && line.against.pairs > 1);
    const rows = lines.map((line) => {
      const seeds = line.seeds.length ? `seed${line.seeds.length > 1 ? "s" : ""} ${line.seeds.join(", ")}` : "";
      const who = el("div", { class: "who" }, dot(line.group), el("span", {}, line.label));
      const name = el("td", { class: "name" }, who, small(seeds), diverged(line.diverged.map((each) => each.time)));
      const cells = doc.columns.map((column) => spread(line, column));
      return row(name, ...cells, ...(compare ? against(line.against) : []));
    });
    const headings = [heading("", "method"), ...doc.columns.map(titled)];
    if (compare) headings.push(heading("time vs", "reference"), heading("accuracy vs", "it (points)"));
    const none = live ? "The table fills when the run has finished."
      : "No run has finished: there is nothing to average.";
    $$("headline").replaceChildren(lines.length ? table(headings, rows) : el("div", { class: "empty" }, none));
    const reading = "Medians over seeds of runs that have ended, least and greatest below. Times are virtual seconds "
      + `to ${target()} on a common test grid: raw first crossing, and first crossing of the trailing 5-point mean; a `
      + "dash if the median seed never gets there.";
    const test = `${RATIO} Accuracy against the same reference: mean difference of final accuracy in points over `
      + "common seeds, with the exact two-sided sign-flip p-value (n seeds cannot give less than 2 / 2ⁿ).";
    $$("headline-note").textContent = lines.length ? sentences(reading, compare && test) : "";
    uncounted(doc.runs.filter((run) => !ended(run)));
    $$("notes").replaceChildren(...doc.notes.map((note) => el("li", {}, note)));
  }
  function uncounted(others) {
    const rows = others.map((run) => {
      const until = run.until ? ` of ${whole(run.until)} s` : "";
      const accuracy = run.accuracy === null ? "" : `, ${percent(run.accuracy)} %`;
      const status = el("span", { class: "status" }, run.status);
      const reached = `${whole(run.end)} s${until}${accuracy}`;
      return row(cell(run.name), cell(run.label), cell(String(run.seed ?? "–")), cell(status), cell(reached));
    });
    const shown = others.length && !(live && doc.runs.length === 1);
    const found = () => panel(table(["run", "method", "seed", "status", "reached"], rows, "left"));
    $$("uncounted").replaceChildren(...(shown ? [el("h3", {}, "Not finished, not counted"), found()] : []));
  }

  // ---- comparison

  const AXES = { time: "virtual time", bytes: "traffic", wall: "wall time" };
  const STROKES = { dash: "dashed", dot: "dotted" };
  function axes() {
    return Object.entries(AXES).map(([key, words]) => {
      const button = el("button", { type: "button", "aria-pressed": String(key === axis) }, words);
      if (!doc.accuracy[key]) { button.disabled = true; button.title = "These runs' logs do not have it"; }
      button.addEventListener("click", () => { axis = key; comparison(); });
      return button;
    });
  }
  function chips() {
    return doc.groups.map((group, index) => {
      const look = { borderTopColor: shade(group.style), borderTopStyle: STROKES[group.dash] || "solid" };
      const attributes = { type: "button", class: "chip", "aria-pressed": String(!hidden.has(index)) };
      const chip = el("button", attributes, el("span", { class: "stroke", style: look }), group.label);
      chip.addEventListener("click", () => { if (!hidden.delete(index)) hidden.add(index); comparison(); });
      return chip;
    });
  }
  function comparison() {
    $$("axis").replaceChildren(...axes());
    $$("legend").hidden = doc.groups.length < 2;
    $$("legend").replaceChildren(...chips());
    const bands = doc.lines.some((line) => line.runs > 1), broken = doc.runs.some((run) => !ended(run));
    $$("accuracy-note").textContent = sentences(
      bands ? "Line: median over seeds; band: least to greatest." : "On the test set.",
      broken && "Thin dashes: runs that have not finished.",
    );
    const tall = Theme.narrow() ? 320 : 430, beside = doc.time_to_target ? doc.time_to_target.layout.height : 0;
    Theme.draw("chart-accuracy", sized(shown(doc.accuracy[axis]), tall), "The model has not been tested yet.");
    $$("target-note").textContent =
      `Virtual time until ${target()} accuracy. Full bar: first crossing; pale: 5-point mean.`;
    const any = doc.lines.some((line) => line.runs);
    const never = any ? `— no finished run reached ${target()}` : "No finished run yet.";
    Theme.draw("chart-target", doc.time_to_target, never);
    $$("staleness-note").textContent = sentences(
      "Versions the global model had moved on when an upload was used.", doc.staleness && doc.staleness.note,
    );
    const staleness = sized(shown(doc.staleness), Math.max(300, beside));
    Theme.draw("chart-staleness", staleness, "No upload has been used yet.");
  }
  function shown(figure) {
    const seen = (trace) => (hidden.has(trace.meta.group) ? { ...trace, visible: false } : trace);
    return figure && { ...figure, data: figure.data.map(seen) };
  }
  const sized = (figure, height) => figure && { ...figure, layout: { ...figure.layout, height } };

  // ---- one run

  function choices() {
    const select = $$("run"), named = doc.closeups.map((item) => doc.runs[item.run].name);
    if (!named.includes(chosen)) chosen = named[0];
    select.replaceChildren(...doc.closeups.map((item) => {
      const run = doc.runs[item.run], seed = run.seed === null ? "" : `, seed ${run.seed}`;
      const status = run.status === "finished" ? "" : ` (${run.status})`;
      const option = el("option", { value: run.name }, clip(`${run.label}${seed}${status} · ${run.name}`, 70));
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
    if (line && !line.legs) said.push("How long downloads and uploads took is not known: bars span whole trips.");
    if (line && line.left_out) {
      const there = line.trips.device.length;
      said.push(`The last ${count(there, "trip")} of ${local(line.left_out + there)}.`);
    }
    if (left) said.push(`${count(left, "run")} left out to keep this file small.`);
    $$("fleet-note").textContent = said.join(" ");
    Timeline.load(line, $$("order").value, keep);
    Timeline.keys($$("timeline-keys"));
    $$("alpha-note").textContent = sentences(
      "α against staleness, one point per upload.", item.alpha && item.alpha.note && `Shown: ${item.alpha.note}.`,
      doc.closeups.length > 1 && `Run: ${run.label}, seed ${run.seed ?? "–"}.`,
    );
    Theme.draw("chart-alpha", item.alpha, "No upload of this run has a weight.");
    $$("partition-part").hidden = !item.partition;
    $$("partition-part").parentNode.classList.toggle("pair", Boolean(item.partition));
    if (item.partition) Theme.draw("chart-partition", sized(item.partition, 320));
    $$("slots-part").hidden = !item.slots;
    if (item.slots) {
      Theme.draw("chart-slots", item.slots);
      Theme.draw("chart-choosers", item.choosers, "The log does not say.");
    }
    controls(item.controls);
  }
  function controls(found) {
    $$("controls-part").hidden = !found.length;
    const names = found.map((control) => control.name).join(" "), grid = $$("controls");
    if (grid.dataset.names !== names) {
      grid.dataset.names = names;
      grid.replaceChildren(...found.map((control) => {
        const title = el("h3", {}, `${control.symbol} ${control.name}`, el("span", {}, control.meaning));
        return el("div", { class: "panel" }, title, el("div", { class: "chart", id: `control-${control.name}` }));
      }));
    }
    const margin = { l: 8, r: 10, t: 8, b: Theme.narrow() ? 42 : 44 };
    for (const control of found) {
      Theme.draw(`control-${control.name}`, { ...control, layout: { ...control.layout, margin } });
    }
  }

  // ---- settings

  function settings() {
    const { common, differing } = doc.settings;
    $$("settings-note").textContent = differing.length ? "First what differs, then what all runs share."
      : "As written to config.toml, defaults included.";
    const rows = differing.map((setting) => {
      const look = (value) => (value === setting.values[0] ? {} : { class: "other" });
      const values = setting.values.map((value) => el("td", look(value), value));
      return row(cell(el("span", {}, `${setting.section}.`), setting.key), ...values);
    });
    const labels = ["setting", ...doc.groups.map((group) => group.label)];
    $$("differing").replaceChildren(...(rows.length ? [panel(table(labels, rows, "left differs"))] : []));
    $$("common").replaceChildren(...Object.entries(common).map(([section, shared]) => {
      const several = doc.groups.length > 1, own = section === "method";
      const title = el("h3", {}, section, own && several ? el("span", {}, "where a method has it") : null);
      const lines = shared.map((setting) => {
        const some = !own && setting.in < doc.groups.length && `in ${setting.in} of ${doc.groups.length}`;
        return row(cell(setting.key), cell(setting.value, small(some)));
      });
      return el("div", { class: "panel" }, title, el("table", {}, el("tbody", {}, ...lines)));
    }));
  }

  function render(keep) {
    const found = doc.experiments || [];
    $$("experiments").hidden = $$("experiments-link").hidden = !found.length;
    head(); cards(); headline(); Experiments.show($$("experiments"), found); comparison(); choices(); settings();
    requestAnimationFrame(() => { closeup(keep); document.documentElement.dataset.ready = "yes"; });
  }
  function again() { Theme.apply(); if (doc) render(true); }

  // ---- live

  function badge(words, still) {
    const place = $$("live");
    place.hidden = false;
    place.textContent = words;
    place.className = still ? "badge still" : "badge";
  }
  function take(answer) {
    version = answer.version;
    doc = answer.document;
    for (const run of doc.runs) if (run.status === "unfinished") run.status = "running";
    render(true);
  }
  async function poll() {
    let wait = 1000;
    try {
      const answer = await fetch(`data.json?have=${encodeURIComponent(version)}`, { cache: "no-store" });
      if (answer.status === 200) take(await answer.json());
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
  for (const button of document.querySelectorAll("[data-move]")) {
    button.addEventListener("click", () => Timeline.move(button.dataset.move));
  }
  let width = window.innerWidth, timer;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    clearTimeout(timer);
    timer = setTimeout(() => { if (doc) render(true); }, 150);
  });
  Theme.apply();
  if (live) { badge("connecting", true); poll(); } else render(false);
})();
