"use strict";
/* The results of runs that are ranked with each other: cards and a table. */
const Results = (() => {
  const { el, cell, small, row, table, percent, whole, mega, count, clip, ratio, diverged, swatch } = Words;
  const { RATIO, KINDS, share, target, change } = Words;
  const median = (key) => (line) => line[key].median;

  function card(what, value, unit, lines, more) {
    const names = lines.map((line) => el("span", { class: "who" }, swatch(line.style), line.label));
    const said = more || (lines.length > 1 ? [small("a tie"), ...names] : names);
    return el("div", { class: "card" }, el("div", { class: "what" }, what),
      el("div", { class: "value" }, value, small(unit)), el("div", { class: "who" }, ...[said].flat()));
  }
  function bytes(line) {
    const up = line.bytes_up.median, down = line.bytes_down.median;
    return up === null || down === null ? null : up + down;
  }
  /* The best lines: all that show the same number as the best one. */
  function best(lines, get, show, sign) {
    const there = lines.filter((line) => get(line) !== null).sort((a, b) => sign * (get(a) - get(b)));
    const top = there.length ? show(get(there[0])) : null;
    return { top, lines: there.filter((line) => show(get(line)) === top) };
  }
  function cards(world, run) {
    const lines = world.lines.filter((line) => line.runs), items = [], several = lines.length > 1;
    const add = (one, many, unit, get, show, sign) => {
      const found = best(lines, get, show, sign);
      if (found.lines.length) items.push(card(several ? many : one, found.top, unit, found.lines));
      return found.lines.length > 0;
    };
    const time = `Time to ${target(world)}`, lasting = "First to stay there (5-point mean)";
    const { name, direction } = world.metric, shown = share(world), less = direction === "min";
    add(`Final ${name}`, `${less ? "Lowest" : "Highest"} final ${name}`, shown ? "%" : "", median("accuracy"),
      shown ? percent : KINDS.value[0], less ? 1 : -1);
    const there = add(time, `First to ${target(world)}`, "s", median("time_raw"), whole, 1);
    add(`${time}, 5-point mean`, lasting, "s", median("time_mean"), whole, 1);
    const timed = world.target !== null;
    if (timed && !there && lines.length) items.push(card(time, "—", "", [], "not reached by the median run"));
    add("Worst device", "Best worst device", "%", median("devices_worst"), percent, -1);
    add("Traffic", "Least traffic", "MB", bytes, mega, 1);
    return el("div", { class: "cards" }, ...items, ...(!lines.length && run ? soFar(run) : []));
  }
  function soFar(run) {
    const tested = run.accuracy !== null, seed = run.seed === null ? "" : `seed ${run.seed}`;
    const shown = run.metric === "accuracy";
    const value = tested ? (shown ? percent : KINDS.value[0])(run.accuracy) : "—";
    const uploads = run.uploads === null ? "—" : whole(run.uploads);
    return [
      card(`${run.metric} so far`, value, tested && shown ? "%" : "", [], run.label),
      card(Words.capital(run.clock), whole(run.end), run.until ? `of ${whole(run.until)} s` : "s", [], run.status),
      card("Uploads", uploads, "", [], seed),
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
    const top = there && best !== null && show(found.median) === show(best);
    const look = top ? { class: "top-value" } : {};
    return el("td", look, there ? show(found.median) : "—", small(range));
  }
  function against(held, world) {
    const timed = world.target !== null;
    if (!held) return timed ? [cell("·"), cell("·")] : [cell("·")];
    const time = held.time_raw ? ratio(held.time_raw.ratio, held.time_raw.bound) : "—";
    const test = held.p === null || held.pairs < 2 ? count(held.pairs, "seed") : `p = ${held.p.toPrecision(2)}`;
    const difference = held.pairs ? cell(change(world, held.difference), small(test)) : cell("·");
    return timed ? [cell(time, small(`of ${clip(held.reference, 16)}`)), difference] : [difference];
  }
  /* One line per method that has ended runs. */
  function outcome(world, columns, compare) {
    const rows = world.lines.filter((line) => line.runs).map((line) => {
      const seeds = line.seeds.length ? `seed${line.seeds.length > 1 ? "s" : ""} ${line.seeds.join(", ")}` : "";
      const who = el("div", { class: "who" }, swatch(line.style), el("span", {}, line.label));
      const name = el("td", { class: "name" }, who, small(seeds), diverged(line.diverged.map((each) => each.time)));
      const cells = columns.map((column) => spread(line, column));
      return row(name, ...cells, ...(compare ? against(line.against, world) : []));
    });
    const headings = [heading("", "method"), ...columns.map(titled)];
    const timed = world.target !== null, whom = timed ? "it" : "reference";
    if (compare && timed) headings.push(heading("time vs", "reference"));
    if (compare) headings.push(heading(`${world.metric.name} vs`, share(world) ? `${whom} (points)` : whom));
    return table(headings, rows);
  }
  const framed = (look, found) => Words.panel(found, look);
  function headline(world, live) {
    const lines = world.lines.filter((line) => line.runs);
    const none = live ? "The table fills when the run has finished."
      : "No run has finished: there is nothing to average.";
    const found = lines.length ? outcome(world, world.columns, compared(lines)) : el("div", { class: "empty" }, none);
    return framed("headline", found);
  }
  const compared = (lines) => lines.some((line) => line.against && line.against.pairs > 1);
  function reading(world) {
    const lines = world.lines.filter((line) => line.runs);
    const { name } = world.metric, timed = world.target !== null;
    const medians = `Medians over seeds of runs that have ended, least and greatest below; best final ${name} first.`;
    const unit = world.clock === "virtual time" ? "virtual seconds" : "seconds";
    const times = timed && `Times are ${unit} to ${target(world)} on a common test grid: raw first crossing, `
      + "and first crossing of the trailing 5-point mean; a dash if the median seed never gets there.";
    const ratios = compared(lines) && timed && RATIO;
    const test = compared(lines) && `${name[0].toUpperCase()}${name.slice(1)} against ${timed ? "the same" : "a"} `
      + `reference: mean difference of final ${name}${share(world) ? " in points" : ""} over common seeds, with the `
      + "exact two-sided sign-flip p-value (n seeds cannot give less than 2 / 2ⁿ).";
    return el("p", { class: "fine" }, lines.length ? [medians, times, ratios, test].filter(Boolean).join(" ") : "");
  }
  function devices(world) {
    if (!world.devices.length) return [];
    const said = "The last model, tested for each device on its own test set or on the classes that it holds. "
      + "Jain index: 1 if all devices are equal, 1/n if one has everything. Personalised: after local steps.";
    return [
      el("h3", {}, "On the devices"), framed("headline", outcome(world, world.devices, false)),
      el("p", { class: "fine" }, said),
    ];
  }
  /* All of one world; ``run`` is the only run of the page while it has not ended. */
  function block(world, several, live, run) {
    const title = several ? el("h2", {}, world.name) : null;
    return el("div", { class: "world" }, title, cards(world, run), headline(world, live), reading(world),
      ...devices(world));
  }
  return { block };
})();
