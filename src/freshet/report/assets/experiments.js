"use strict";
/* The experiments of a grid: figures, and per world a table of results and one of traffic. */
const Experiments = (() => {
  const { el, cell, small, row, panel, swatch, percent, whole, mega, seconds, ratio, diverged } = Words;
  const { RATIO, KINDS, target, change } = Words;
  const told = (value, show) => cell(value === null ? "—" : show(value));

  function who(line) {
    const name = el("div", { class: "who" }, swatch(line.style), el("span", {}, line.label));
    return el("td", { class: "name" }, name, diverged(line.diverged));
  }
  const titled = ({ title, kind }, world) => {
    return [title.replace("{target}", world && target(world)), KINDS[kind][1]].join(" ").trim();
  };
  /* What a method is held against its reference by: the time where there is a target, and the difference. */
  function against(world, line) {
    const whose = small(line.reference && `of ${line.reference}`);
    const time = line.ratio === null ? (line.reference ? "—" : "·") : ratio(line.ratio, line.bound);
    const found = line.difference === null ? "—" : change(world, line.difference);
    return world.target === null ? [cell(found, whose)] : [cell(time, whose), cell(found)];
  }
  function outcome(world) {
    const paper = world.lines.some((line) => line.published), shown = KINDS[world.measures[0].kind];
    const rows = world.lines.map((line) => {
      const theirs = line.published || { accuracy: null, time: null };
      const cells = [
        who(line), cell(`${line.ended}/${line.all}`),
        ...world.measures.map(({ key, kind }) => told(line[key], KINDS[kind][0])),
        ...against(world, line), told(line.p, (p) => p.toPrecision(2)),
        ...world.columns.map(({ key, kind }) => told(line[key], KINDS[kind][0])),
      ];
      return row(...cells, ...(paper ? [told(theirs.accuracy, shown[0]), told(theirs.time, whole)] : []));
    });
    const { name } = world.metric;
    const held = world.target === null ? [`${name} vs reference`] : ["time vs reference", `${name} vs it`];
    const headings = ["method", "runs", ...world.measures.map((column) => titled(column, world)), ...held, "p"];
    headings.push(...world.columns.map((column) => titled(column)));
    return panel(Words.table([...headings, ...(paper ? [`published ${shown[1]}`, "published time"] : [])], rows));
  }
  function devices(world) {
    const rows = world.lines.map((line) => {
      return row(who(line), ...world.devices.map(({ key, kind }) => told(line[key], KINDS[kind][0])));
    });
    const headings = world.devices.map((column) => titled(column));
    const said = el("p", { class: "fine" }, "Accuracy on the devices, medians over seeds.");
    return world.devices.length ? [said, panel(Words.table(["method", ...headings], rows))] : [];
  }
  function traffic(world) {
    const rows = world.lines.map((line) => {
      const bytes = [line.bytes_up, line.bytes_down, line.bytes_fresh].map((value) => told(value, mega));
      return row(who(line), ...bytes, told(line.overhead, (share) => `+${percent(share)} %`));
    });
    const headings = ["method", "up (MB)", "down (MB)", "of which fresh models (MB)", "relative to the rest"];
    return panel(Words.table(headings, rows));
  }
  function world(found) {
    const said = el("p", { class: "fine" }, "Communication overhead, medians over seeds.");
    return el("div", {}, el("h3", {}, `${found.name}, ${seconds(found.until)}`), outcome(found),
      ...devices(found), said, traffic(found));
  }
  /* The trials of a tuning, best first. */
  function tuning(item) {
    const short = KINDS.value[0], score = KINDS[item.score.kind][0];
    const rows = item.trials.map((trial, at) => {
      const found = el("td", at ? {} : { class: "top-value" }, trial.score === null ? "—" : score(trial.score));
      return row(cell(String(at + 1)), found, cell(trial.state), ...trial.values.map((value) => told(value, short)));
    });
    const more = item.left_out ? [`${item.left_out} more trials are not shown.`] : [];
    return el(
      "div", {}, el("h2", {}, item.title),
      panel(Words.table(["rank", titled(item.score), "state", ...item.keys], rows)),
      el("ul", { class: "plain" }, ...[...item.notes, ...more].map((note) => el("li", {}, note))),
    );
  }
  function experiment(item, ids) {
    if (item.look === "tuning") return tuning(item);
    const figures = item.rows.flat().map((figure, index) => {
      return el("div", { class: "panel" }, el("h3", {}, figure.title), el("div", { class: "chart", id: ids[index] }));
    });
    const lines = [...new Map(item.worlds.flatMap((each) => each.lines.map((line) => [line.label, line]))).values()];
    const names = lines.map((line) => el("span", { class: "who" }, swatch(line.style), line.label));
    const timed = item.worlds.some((each) => each.target !== null);
    const [ratios, never] = timed ? [`${RATIO} `, "–: target not reached. "] : ["", ""];
    const reading = `${ratios}Dashed curves: synchronous methods. ${never}✕: a run diverged.`;
    return el(
      "div", {}, el("h2", {}, item.title), el("div", { class: "keys legend" }, ...names),
      el("div", { class: item.look === "curves" ? "grid" : "grid duo" }, ...figures),
      el("p", { class: "fine" }, reading),
      ...item.worlds.map(world), el("ul", { class: "plain" }, ...item.notes.map((note) => el("li", {}, note))),
    );
  }
  function show(place, found) {
    const ids = found.map((item, at) => item.rows.flat().map((_, index) => `experiment-${at}-${index}`));
    place.replaceChildren(...found.map((item, at) => experiment(item, ids[at])));
    requestAnimationFrame(() => {
      found.forEach((item, at) => item.rows.flat().forEach((figure, index) => Theme.draw(ids[at][index], figure)));
    });
  }
  return { show };
})();
