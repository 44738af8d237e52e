"use strict";
/* The experiments of a grid: figures, and per world a table of results and one of traffic. */
const Experiments = (() => {
  const { el, cell, small, row, panel, swatch, percent, whole, mega, seconds, signed, ratio, diverged } = Words;
  const { RATIO, KINDS } = Words;
  const told = (value, show) => cell(value === null ? "—" : show(value));

  function who(line) {
    const name = el("div", { class: "who" }, swatch(line.style), el("span", {}, line.label));
    return el("td", { class: "name" }, name, diverged(line.diverged));
  }
  function outcome(world) {
    const paper = world.lines.some((line) => line.published);
    const rows = world.lines.map((line) => {
      const missing = line.reference ? "—" : "·", theirs = line.published || { accuracy: null, time: null };
      const time = line.ratio === null ? missing : ratio(line.ratio, line.bound);
      const cells = [
        who(line), cell(`${line.ended}/${line.all}`), told(line.accuracy, percent), told(line.time_raw, whole),
        cell(time, small(line.reference && `of ${line.reference}`)),
        told(line.difference, signed), told(line.p, (p) => p.toPrecision(2)),
        ...world.columns.map(({ key, kind }) => told(line[key], KINDS[kind][0])),
      ];
      return row(...cells, ...(paper ? [told(theirs.accuracy, percent), told(theirs.time, whole)] : []));
    });
    const headings = ["method", "runs", "accuracy (%)", `to ${percent(world.target)} % (s)`, "time vs reference"];
    const extra = world.columns.map(({ title, kind }) => [title, KINDS[kind][1]].join(" ").trim());
    headings.push("accuracy vs it", "p", ...extra, ...(paper ? ["published (%)", "published time"] : []));
    return panel(Words.table(headings, rows));
  }
  function devices(world) {
    const rows = world.lines.map((line) => {
      return row(who(line), ...world.devices.map(({ key, kind }) => told(line[key], KINDS[kind][0])));
    });
    const headings = world.devices.map(({ title, kind }) => [title, KINDS[kind][1]].join(" ").trim());
    const said = el("p", { class: "fine" }, "Accuracy on the devices, medians over seeds.");
    return world.devices.length ? [said, panel(Words.table(["method", ...headings], rows))] : [];
  }
  function traffic(world) {
    const rows = world.lines.map((line) => {
      const bytes = [line.bytes_up, line.bytes_down, line.bytes_fresh].map((value) => told(value, mega));
      return row(who(line), ...bytes, told(line.overhead, (share) => `+${percent(share)} %`));
    });
    const headings = ["method", "up (MB)", "down (MB)", "of it fresh models (MB)", "on top of the rest"];
    return panel(Words.table(headings, rows));
  }
  function world(found) {
    const said = el("p", { class: "fine" }, "Communication overhead, medians over seeds.");
    return el("div", {}, el("h3", {}, `${found.name}, ${seconds(found.until)}`), outcome(found),
      ...devices(found), said, traffic(found));
  }
  /* The trials of a tuning, best first. */
  function tuning(item) {
    const short = (value) => String(Number(value.toPrecision(4)));
    const rows = item.trials.map((trial, at) => {
      const score = el("td", at ? {} : { class: "top-value" }, trial.score === null ? "—" : percent(trial.score));
      return row(cell(String(at + 1)), score, cell(trial.state), ...trial.values.map((value) => told(value, short)));
    });
    const more = item.left_out ? [`${item.left_out} more trials are not shown.`] : [];
    return el(
      "div", {}, el("h2", {}, item.title), panel(Words.table(["rank", "score (%)", "state", ...item.keys], rows)),
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
    const reading = `${RATIO} Dashed curves: synchronous methods. –: target not reached. ✕: a run diverged.`;
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
