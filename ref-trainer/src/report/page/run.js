"use strict";
// The report of a run: sections in the order in which one asks.

const verdict = data.proof
  ? data.proof.holds ? ["ok", "All ok: the run is what one device computes"] : ["bad", "The run is not what one device computes"]
  : ["unknown", "Not compared with one device (--prove does that)"];
document.querySelector("#verdict").append(h("span", { class: `verdict ${verdict[0]}`, text: verdict[1] }));
document.querySelector("#facts").append(...data.facts.flatMap(([name, text]) => [h("dt", { text: name }), h("dd", { text })]));

const last = data.steps.length - 1;
const column = (key) => data.steps.map((step) => step[key]);
const median = (list) => { const sorted = list.filter(Number.isFinite).sort((a, b) => a - b); return sorted.length ? sorted[sorted.length >> 1] : NaN; };
const figure = (value, words) => h("li", {}, h("b", { text: value }), h("span", { text: words }));
if (last >= 0) {
  const heldOut = data.held_out[data.held_out.length - 1];
  const sent = data.traffic && data.traffic.steps ? data.traffic.cells.reduce((sum, cell) => sum + cell[3], 0) / data.traffic.steps : null;
  document.querySelector("#figures").append(
    figure(show.loss(data.steps[last].loss), `loss after step ${data.steps[last].step}`),
    heldOut ? figure(show.loss(heldOut[1]), "held-out loss") : "",
    figure(show.count(median(column("tokens_per_s"))), "tokens/s, median"),
    figure(show.time(1000 * median(column("step_ms"))), "a step, median"),
    data.bubble ? figure(show.percent(median(column("bubble"))), "bubble, median") : "",
    sent ? figure(show.bytes(sent), "sent in a step") : "");
}

// Loss.
{
  const line = data.steps.map((step) => [step.step, step.loss]);
  const series = [{ name: "training", colour: "--forward", points: line, shape: "line" }];
  if (data.held_out.length) series.push({ name: "held out", colour: "--backward", points: data.held_out, shape: "dot" });
  const twins = (data.proof && data.proof.losses) || [];
  if (twins.length) series.push({ name: "one device (twin)", colour: "--weight", points: twins.map((one) => [one.step, one.twin]), shape: "ring" });
  const marks = Number.isFinite(data.unigram_entropy) ? [{ name: `unigram entropy ${data.unigram_entropy.toFixed(3)}`, y: data.unigram_entropy }] : [];
  const body = section("loss", "Loss", data.proof
    ? "Nats per token. At the proven steps one device did the same step again, from the same state: its loss is ringed."
    : "Nats per token over the whole global batch.");
  const entries = series.map((one) => [one.name, `var(${one.colour})`, one.shape]);
  if (marks.length) entries.push(["a model that only counts bytes", "var(--faint)", "dash"]);
  body.append(lineChart({ title: "Loss by step", series, marks, unit: "step", height: 300, format: { tick: (y) => y.toFixed(y % 1 ? 2 : 0).replace(/0$/, ""), value: show.loss } }), legend(entries));
  if (data.proof) {
    if (twins.length) body.append(h("h3", { text: "Loss beside one device" }), table("Loss beside one device", [
      ["step", (r) => r.step], ["this run", (r) => r.ours.toFixed(9)], ["twin: these crates, one rank", (r) => r.twin.toFixed(9)],
      ["difference", (r) => show.tiny(Math.abs(r.ours - r.twin))], ["oracle: plain f64", (r) => r.oracle.toFixed(9)], ["difference", (r) => show.tiny(Math.abs(r.ours - r.oracle))],
    ], twins));
    body.append(folded("Every quantity that was compared", table("Equality", [
      ["step", (r) => (r.step === null ? "all" : r.step)], ["quantity", (r) => r.quantity, "wrap"], ["difference", (r) => show.tiny(r.difference)],
      ["bound", (r) => (r.bound > 0 ? show.tiny(r.bound) : "bits")], ["", (r) => h("span", { class: "mark " + (r.verdict === "differs" ? "bad" : "ok"), text: r.verdict === "differs" ? "DIFFERS" : r.verdict === "bit-equal" ? "bit-equal" : "ok" })],
    ], data.proof.rows)));
  }
  body.append(folded("Steps as a table", table("Steps", [
    ["step", (r) => r.step], ["loss", (r) => show.loss(r.loss)], ["gradient norm", (r) => r.grad_norm.toFixed(4)], ["learning rate", (r) => show.tiny(r.lr)],
    ["tokens/s", (r) => show.whole(r.tokens_per_s)], ["ms", (r) => r.step_ms.toFixed(1)], ...(data.bubble ? [["bubble", (r) => show.percent(r.bubble)]] : []),
  ], data.steps.slice(-400))));
}

// Timeline.
if (data.timeline) {
  const source = data.timeline;
  const missing = source.left_out ? ` ${show.whole(source.left_out)} spans are left out to keep this page small; --trace FILE.json has all.` : "";
  const body = section("timeline", "Timeline", `What each rank did in ${source.steps.length === 1 ? "step" : "steps"} ${source.steps.map(([n]) => n).join(", ")}: above what its thread computed, below what its groups sent. F forward, B gradient of the input, W gradient of the weights, by microbatch.${missing}`);
  body.append(timeline(source));
  const names = { forward: "forward", backward: "backward, input", weight: "backward, weights", receive: "waits for a stage", phase: "between passes", collective: "collective", message: "message, and arrows between stages", parameters: "parameters gathered", gradients: "gradients handed over" };
  body.append(legend(Object.entries(names).filter(([kind]) => source.kinds.includes(kind)).map(([kind, name]) => [name, `var(--${kind})`])));
  const rows = shares(source), wall = source.steps.reduce((sum, [, b, e]) => sum + e - b, 0) || 1;
  const time = (kind) => (r) => show.time((r.sums[kind] * source.unit) / 1000);
  body.append(folded("Time by rank as a table", table("Time by rank", [
    ["rank", (r) => r.rank], ["place", (r) => data.places[r.rank] || "\u2013", true],
    ...["forward", "backward", "weight", "receive", "collective", "message"].filter((kind) => source.kinds.includes(kind)).map((kind) => [names[kind], time(kind)]),
    ["not in a pass", (r) => show.percent(1 - ["forward", "backward", "weight"].reduce((sum, kind) => sum + (r.sums[kind] || 0), 0) / wall)],
  ], rows)));
}

// Pace.
if (last > 0) {
  const body = section("pace", "Pace", "Ranks are threads of one machine here, so that waiting also means waiting for a core.");
  const paceChart = lineChart({ title: "Tokens per second by step", series: [{ name: "tokens/s", colour: "--forward", points: data.steps.map((x) => [x.step, x.tokens_per_s]), shape: "line" }], unit: "step", height: 190, zero: true, format: { tick: show.count, value: show.whole } });
  const axes = [...new Set(data.steps.flatMap((x) => Object.keys(x.wait)))].slice(0, 6);
  const colours = ["--collective", "--send", "--backward", "--weight", "--parameters", "--gradients"];
  const waits = axes.map((axis, i) => ({ name: axis, colour: colours[i], points: data.steps.map((x) => [x.step, (x.wait[axis] || 0) / x.step_ms]), shape: "line" }));
  body.append(h("div", { class: "two" },
    h("div", {}, h("h3", { text: "Tokens per second" }), paceChart),
    waits.length ? h("div", {}, h("h3", { text: "Share of a step in which a rank stands still, by group" }), lineChart({ title: "Waiting by step", series: waits, unit: "step", height: 190, zero: true, format: { tick: (y) => Math.round(100 * y) + " %", value: show.percent } }), legend(waits.map((one) => [one.name, `var(${one.colour})`, "line"]))) : ""));
}

// Memory.
if (data.memory) {
  const { categories, counted, predicted, estimate } = data.memory;
  const body = section("memory", "Memory", "The most bytes that each rank held in a step, counted as they were allocated, beside what the planner had worked out before anything was. Parameters, gradients and optimizer state are predicted to the byte; of activations " + (estimate ? "what an even routing to the experts would hold." : "the most there can be."));
  const sum = (row) => row.reduce((all, n) => all + (n || 0), 0);
  const most = Math.max(1, ...counted.map(sum), ...predicted.map(sum));
  const bars = h("div", { class: "plot bars", role: "img", "aria-label": "Memory by rank; the table below has the numbers" });
  counted.forEach((row, rank) => {
    let at = 0;
    const bar = h("div", { class: "bar" }, row.map((n, i) => {
      const part = h("i", { style: `left:${(100 * at) / most}%;width:${(100 * n) / most}%;background:var(--c-${categories[i]})`, title: `rank ${rank}, ${categories[i]}: ${show.bytes(n)}` });
      at += n;
      return part;
    }));
    const exact = categories.reduce((all, name, i) => all + (predicted[rank][i] === null || name === "activations" ? 0 : predicted[rank][i]), 0);
    bar.append(h("b", { style: `left:calc(${(100 * exact) / most}% - 1px)`, title: `predicted parameters, gradients and optimizer: ${show.bytes(exact)}` }));
    bars.append(h("span", { class: "who", text: `rank ${rank}` }), bar, h("span", { class: "sum", text: show.bytes(sum(row)) }));
  });
  body.append(h("figure", {}, bars), legend([...categories.map((name) => [name, `var(--c-${name})`]), ["predicted end of what is exact", "", "outline"]]));
  const rows = counted.flatMap((row, rank) => categories.map((name, i) => ({ rank, name, counted: row[i], predicted: predicted[rank][i] }))).filter((r) => r.counted || r.predicted);
  const judged = (r) => (r.predicted === null ? "not predicted" : r.name === "activations" && estimate ? h("span", { class: "flag", text: "estimate" }) : r.name === "activations" ? h("span", { class: r.counted <= r.predicted ? "mark ok" : "mark bad", text: r.counted <= r.predicted ? "within" : "ABOVE" }) : same(r.counted, r.predicted));
  const wrong = rows.filter((r) => r.predicted !== null && r.name !== "activations" && r.counted !== r.predicted).length;
  const exact = rows.filter((r) => r.predicted !== null && r.name !== "activations").length;
  body.append(h("p", { class: "note", style: "margin-top:8px" }, h("span", { class: "mark " + (wrong ? "bad" : "ok"), text: wrong ? `${wrong} of ${exact} exact predictions differ` : `all ${exact} exact predictions equal` }), "."));
  body.append(folded("Predicted beside counted, as a table", table("Memory by rank and category", [
    ["rank", (r) => r.rank], ["category", (r) => r.name, true], ["predicted", (r) => show.whole(r.predicted)], ["counted", (r) => show.whole(r.counted)], ["", judged],
  ], rows)));
}

// Traffic.
if (data.traffic) {
  const { groups, cells, predicted, steps, routed } = data.traffic;
  const world = data.places.length;
  const body = section("traffic", "Traffic", `Bytes that ranks sent each other in ${steps === 1 ? "one step" : `${show.whole(steps)} steps`} of training, counted as the transport took them.`);
  const empty = () => Array.from({ length: world }, () => new Float64Array(world));
  const by = groups.map(empty);
  for (const [g, from, to, bytes] of cells) by[g][from][to] += bytes;
  const all = empty();
  by.forEach((grid) => grid.forEach((row, r) => row.forEach((n, c) => { all[r][c] += n; })));
  let [shown, node] = [all, 0];
  const sizes = [...Array(world - 1).keys()].map((n) => n + 1).filter((n) => n > 1 && world % n === 0);
  node = sizes.find((n) => n >= Math.sqrt(world)) || 0;
  const grid = heatGrid({
    title: "Bytes from rank to rank", rows: world, columns: world, rowTitle: "from", columnTitle: "to",
    cell: (r, c) => shown[r][c] || null, write: (n) => show.count(n),
    tell: (r, c) => r === c ? `rank ${r} to itself: nothing is sent` : `rank ${r} \u2192 ${c}: ${show.bytes(shown[r][c])}` + (all[r][c] ? ` (${groups.map((name, g) => [name, by[g][r][c]]).filter(([, n]) => n).map(([name, n]) => `${name} ${show.bytes(n)}`).join(", ")})` : ""),
    bounds: () => (node ? Array.from({ length: world / node }, (_, i) => [i * node, i * node, node, node]) : []),
  });
  const links = h("div", {});
  const crossing = () => {
    if (!node) { links.replaceChildren(); return; }
    const rows = groups.map((name, g) => {
      let [within, between] = [0, 0];
      by[g].forEach((row, r) => row.forEach((n, c) => { if (Math.floor(r / node) === Math.floor(c / node)) within += n; else between += n; }));
      return { name, within, between };
    });
    rows.push({ name: "all", within: rows.reduce((m, r) => m + r.within, 0), between: rows.reduce((m, r) => m + r.between, 0) });
    links.replaceChildren(h("h3", { text: `By link, were ${node} ranks to sit in a node` }), table("Bytes within and between nodes", [
      ["group", (r) => r.name, true], ["within nodes", (r) => show.bytes(r.within)], ["between nodes", (r) => show.bytes(r.between)], ["share that crosses", (r) => show.percent(r.between / (r.within + r.between))],
    ], rows));
  };
  const chooseGroup = h("select", { id: "group", onchange: (event) => { shown = event.target.value === "all" ? all : by[+event.target.value]; grid.redraw(); } },
    h("option", { value: "all", text: "all" }), groups.map((name, g) => h("option", { value: g, text: name })));
  const chooseNode = h("select", { id: "node", onchange: (event) => { node = +event.target.value; grid.redraw(); crossing(); } },
    h("option", { value: 0, text: "\u2013" }), sizes.map((n) => h("option", { value: n, selected: n === node, text: n })));
  body.append(h("div", { class: "two" }, h("div", {},
    h("div", { class: "tools" }, h("label", { for: "group", text: "group" }), chooseGroup, sizes.length ? [h("label", { for: "node", text: "ranks a node" }), chooseNode] : []),
    h("figure", {}, grid.node)), h("div", {},
    h("h3", { text: "By group, predicted beside measured" }),
    table("Bytes by group", [
      ["group", (r) => r.name, true], ["predicted", (r) => (r.routed ? "by routing" : show.whole(r.predicted))], ["measured", (r) => show.whole(r.measured)], ["", (r) => (r.routed ? h("span", { class: "flag", text: "rows" }) : same(r.predicted, r.measured))],
    ], groups.map((name, g) => ({ name, routed: routed.includes(name), measured: by[g].reduce((m, row) => m + row.reduce((a, b) => a + b, 0), 0), predicted: predicted.reduce((m, row) => m + row[g], 0) }))),
    routed.length ? h("p", { class: "note", style: "margin-top:6px", text: "How many rows go to experts is decided by the router while the run goes; quintet verify feeds the planner the routing and compares those too." }) : "",
    links)));
  crossing();
  body.append(folded("Sent by each rank, predicted beside measured", table("Bytes by rank and group", [
    ["rank", (r) => r.rank], ["group", (r) => r.name, true], ["predicted", (r) => (r.routed ? "by routing" : show.whole(r.predicted))], ["measured", (r) => show.whole(r.measured)], ["", (r) => (r.routed ? "" : same(r.predicted, r.measured))],
  ], data.places.flatMap((_, rank) => groups.map((name, g) => ({ rank, name, routed: routed.includes(name), predicted: predicted[rank][g], measured: by[g][rank].reduce((a, b) => a + b, 0) }))).filter((r) => r.measured || r.predicted))));
}

// Experts.
if (data.experts) {
  const { load, layers, series } = data.experts;
  const rows = layers.map((layer, i) => ({ layer, counts: load[i], all: load[i].reduce((a, b) => a + b, 0) || 1 }));
  const fair = load[0].length;
  const body = section("experts", "Expert load", "How often each expert was chosen over the whole run, as a multiple of its fair share: 1 where all are chosen alike.");
  const grid = heatGrid({
    title: "Load of experts by layer", rows: rows.length, columns: fair, rowTitle: "layer", columnTitle: "expert", label: (r) => `layer ${rows[r].layer}`,
    cell: (r, c) => (rows[r].counts[c] * fair) / rows[r].all || null, write: (x) => x.toFixed(2),
    tell: (r, c) => `layer ${rows[r].layer}, expert ${c}: chosen ${show.whole(rows[r].counts[c])} times, ${((rows[r].counts[c] * fair) / rows[r].all).toFixed(3)} of its fair share`,
  });
  body.append(h("div", { class: "two" }, h("div", {}, h("h3", { text: "Share of each expert" }), grid.node),
    series.length > 1 ? h("div", {}, h("h3", { text: "Most loaded expert over its fair share" }), lineChart({ title: "Imbalance by step", series: [{ name: "imbalance", colour: "--collective", points: series.map((x) => [x.step, x.imbalance]), shape: "line" }], marks: [{ name: "even", y: 1 }], unit: "step", height: 190, format: { tick: (y) => +y.toFixed(2), value: (x) => x.toFixed(3) } })) : ""));
  body.append(folded("Load as a table", table("Load of experts", [["layer", (r) => r.layer], ...load[0].map((_, c) => [`expert ${c}`, (r) => show.whole(r.counts[c])])], rows)));
}
