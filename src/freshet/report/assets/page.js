"use strict";
/* Fills the page from its data. */
(() => {
  const { el, cell, small, row, table, panel, shade, local, percent, whole, seconds, count, clip, KINDS } = Words;
  const $$ = (id) => document.getElementById(id);
  const live = document.documentElement.dataset.mode === "live";
  let doc = live ? null : JSON.parse($$("data").textContent), axis = "time", chosen = null, version = "", place = 0;
  const hidden = new Set();
  const world = () => doc.worlds[place];
  const target = () => Words.target(world());
  const sentences = (...parts) => parts.filter(Boolean).join(" ");

  // ---- head and results

  function head() {
    const about = doc.subject, several = about.configurations > about.methods;
    const number = several ? count(about.configurations, "configuration") : count(about.methods, "method");
    const title = !doc.runs.length ? doc.experiments.map((each) => each.title).join(" · ")
      : `${doc.runs.length === 1 ? doc.runs[0].label : number} on ${about.data.join(", ")}`;
    document.title = `${title} · Freshet`;
    $$("title").textContent = title;
    const facts = [
      count(about.runs, "run"), `${about.devices.map((n) => local(n)).join(" / ")} devices`,
      `network ${about.models.join(", ")}`, `${seconds(about.end)} of ${about.clock}`,
    ];
    if (about.finished < about.runs) facts.push(`${about.runs - about.finished} not finished`);
    $$("subtitle").textContent = doc.runs.length ? facts.join(" · ") : "Results of a grid without its runs.";
    $$("footer").textContent = `Made by Freshet ${doc.freshet}, ${doc.made}. `
      + "This file is self-contained: it loads nothing and sends nothing.";
  }

  function results() {
    const several = doc.worlds.length > 1;
    const soFar = doc.runs.length === 1 && !doc.runs[0].finished ? doc.runs[0] : null;
    $$("worlds").replaceChildren(...doc.worlds.map((each) => Results.block(each, several, live, soFar)));
    uncounted(doc.runs.filter((run) => !run.finished));
    $$("notes").replaceChildren(...doc.notes.map((note) => el("li", {}, note)));
  }
  function uncounted(others) {
    const rows = others.map((run) => {
      const until = run.until ? ` of ${whole(run.until)} s` : "";
      const value = run.accuracy, share = run.metric === "accuracy";
      const told = value === null ? "" : share ? `, ${percent(value)} %` : `, ${run.metric} ${KINDS.value[0](value)}`;
      const status = el("span", { class: "status" }, run.status);
      const reached = `${whole(run.end)} s${until}${told}`;
      return row(cell(run.name), cell(run.label), cell(String(run.seed ?? "–")), cell(status), cell(reached));
    });
    const shown = others.length && !(live && doc.runs.length === 1);
    const found = () => panel(table(["run", "method", "seed", "status", "reached"], rows, "left"));
    $$("uncounted").replaceChildren(...(shown ? [el("h3", {}, "Not finished, not counted"), found()] : []));
  }

  // ---- comparison

  const AXES = { time: "", rounds: "rounds", bytes: "traffic", wall: "wall time" };
  const STROKES = { dash: "dashed", dot: "dotted" };
  function axes() {
    return Object.entries(AXES).map(([key, words]) => {
      const button = el("button", { type: "button", "aria-pressed": String(key === axis) }, words || world().clock);
      if (!world().accuracy[key]) { button.disabled = true; button.title = "The logs of these runs do not have it"; }
      button.addEventListener("click", () => { axis = key; comparison(); });
      return button;
    });
  }
  function chips() {
    return world().groups.map((group) => {
      const look = { borderTopColor: shade(group.style), borderTopStyle: STROKES[group.dash] || "solid" };
      const attributes = { type: "button", class: "chip", "aria-pressed": String(!hidden.has(group.label)) };
      const chip = el("button", attributes, el("span", { class: "stroke", style: look }), group.label);
      chip.addEventListener("click", () => {
        if (!hidden.delete(group.label)) hidden.add(group.label);
        comparison();
      });
      return chip;
    });
  }
  function elsewhere() {
    const select = $$("world");
    $$("world-field").hidden = doc.worlds.length < 2;
    select.replaceChildren(...doc.worlds.map((each, index) => {
      const option = el("option", { value: String(index) }, clip(each.name, 60));
      option.selected = index === place;
      return option;
    }));
  }
  function comparison() {
    const here = world();
    if (!here.accuracy[axis]) axis = "time";
    elsewhere();
    $$("axis").replaceChildren(...axes());
    $$("legend").hidden = here.groups.length < 2;
    $$("legend").replaceChildren(...chips());
    const bands = here.lines.some((line) => line.runs > 1);
    const name = here.metric.name;
    $$("accuracy-title").textContent = `${name[0].toUpperCase()}${name.slice(1)} and loss of the global model`;
    $$("accuracy-note").textContent = sentences(
      bands ? "Line: median over seeds; band: least to greatest." : "On the test set.",
      here.broken && "Thin dashes: runs that have not finished.",
    );
    const tall = Theme.narrow() ? 320 : 430, bars = here.time_to_target;
    Theme.draw("chart-accuracy", sized(shown(here.accuracy[axis]), tall), "The model has not been tested yet.");
    Theme.draw("chart-loss", sized(shown(here.loss[axis]), tall), "The log has no losses.");
    const timed = here.target !== null, any = here.lines.some((line) => line.runs);
    $$("target-note").textContent = timed
      ? `${Words.capital(here.clock)} until ${target()} ${here.metric.name}. `
        + "Full bar: first crossing; pale: 5-point mean."
      : "The runs have no target; freshet report --target sets one.";
    const never = !timed ? "— no target" : any ? `— no finished run reached ${target()}` : "No finished run yet.";
    Theme.draw("chart-target", bars, never);
    $$("staleness-note").textContent = sentences(
      "Versions the global model had moved on when an upload was used.", here.staleness && here.staleness.note,
    );
    const staleness = sized(shown(here.staleness), Math.max(300, bars ? bars.layout.height : 0));
    Theme.draw("chart-staleness", staleness, "No upload has been used yet.");
  }
  function shown(figure) {
    const gone = (trace) => hidden.has(world().groups[trace.meta.group].label);
    const seen = (trace) => (gone(trace) ? { ...trace, visible: false } : trace);
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
      const where = doc.worlds.length > 1 ? `${doc.worlds[run.world].name}: ` : "";
      const words = clip(`${where}${run.label}${seed}${status} · ${run.name}`, 70);
      const option = el("option", { value: run.name }, words);
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
    if (line && !line.legs) said.push("The times of downloads and uploads are unknown: bars span whole trips.");
    if (line && line.left_out) {
      const there = line.trips.device.length;
      said.push(`The last ${count(there, "trip")} of ${local(line.left_out + there)}.`);
    }
    if (left) said.push(`${count(left, "run")} left out to keep this file small.`);
    $$("fleet-note").textContent = said.join(" ");
    Timeline.load(line, $$("order").value, keep, item.clock);
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
    $$("choosers-part").hidden = !item.choosers;
    $$("slots-part").classList.toggle("pair", Boolean(item.choosers));
    if (item.slots) {
      $$("slots-title").textContent = item.slots.title;
      $$("slots-note").textContent = item.slots.note;
      Theme.draw("chart-slots", item.slots);
      if (item.choosers) Theme.draw("chart-choosers", item.choosers);
    }
    devices(item.devices, run);
    controls(item.controls);
  }
  function devices(found, run) {
    $$("devices").hidden = $$("devices-link").hidden = !found;
    if (!found) return;
    $$("devices-note").textContent = sentences(
      "The global model, tested for each device on its own test set or on the classes that it holds.",
      doc.closeups.length > 1 && `Run: ${run.label}, seed ${run.seed ?? "–"}.`,
    );
    Theme.draw("chart-devices", sized(found.band, Theme.narrow() ? 300 : 360));
    const at = `At ${whole(found.time)} s, one point per device`;
    const nothing = "The fleet of this run is unknown.";
    $$("speed-note").textContent = `${at}, coloured by its samples.`;
    $$("samples-note").textContent = `${at}, coloured by its training time.`;
    Theme.draw("chart-speed", sized(found.speed, 330), nothing);
    Theme.draw("chart-samples", sized(found.samples, 330), nothing);
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
    const labels = ["setting", ...doc.settings.labels];
    $$("differing").replaceChildren(...(rows.length ? [panel(table(labels, rows, "left differs"))] : []));
    $$("common").replaceChildren(...Object.entries(common).map(([section, shared]) => {
      const several = doc.settings.labels.length > 1, own = section === "method";
      const title = el("h3", {}, section, own && several ? el("span", {}, "where a method has it") : null);
      const lines = shared.map((setting) => {
        const all = doc.settings.labels.length, some = !own && setting.in < all && `in ${setting.in} of ${all}`;
        return row(cell(setting.key), cell(setting.value, small(some)));
      });
      return el("div", { class: "panel" }, title, el("table", {}, el("tbody", {}, ...lines)));
    }));
  }

  function render(keep) {
    const found = doc.experiments || [], ready = () => { document.documentElement.dataset.ready = "yes"; };
    $$("experiments").hidden = $$("experiments-link").hidden = !found.length;
    place = Math.min(place, Math.max(0, doc.worlds.length - 1));
    head(); results(); Experiments.show($$("experiments"), found);
    for (const section of document.querySelectorAll("[data-runs]")) section.hidden = !doc.runs.length;
    if (!doc.runs.length) { ready(); return; }
    comparison(); choices(); settings();
    requestAnimationFrame(() => { closeup(keep); ready(); });
  }
  function again() { Theme.apply(); if (doc) Library.then(() => render(true)); }

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
  $$("world").addEventListener("change", (event) => { place = Number(event.target.value); comparison(); });
  $$("order").addEventListener("change", () => { if (doc) closeup(false); });
  for (const button of document.querySelectorAll("[data-move]")) {
    button.addEventListener("click", () => Timeline.move(button.dataset.move));
  }
  let width = window.innerWidth, timer;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    clearTimeout(timer);
    timer = setTimeout(() => { if (doc) Library.then(() => render(true)); }, 150);
  });
  Theme.apply();
  Library.then(() => { if (live) { badge("connecting", true); poll(); } else render(false); }, (problem) => {
    $$("failed").hidden = false;
    throw problem;
  });
})();
