"use strict";
// The page of `quintet plan --html`: the ranked layouts, where the ranks of one of them sit, what each holds and where its
// seconds go. `data` is the object that `--json` prints.

const axes = (l) => {
  const expert = l.ep * l.etp > 1;
  const list = [["tp", 1, l.tp], ["cp", l.tp, l.cp], ["dp", l.tp * l.cp, l.dp], ["pp", l.tp * l.cp * l.dp, l.pp]];
  if (expert) list.push(["etp", 1, l.etp], ["ep", l.etp, l.ep], ["edp", l.etp * l.ep, (l.dp * l.cp * l.tp) / (l.etp * l.ep)]);
  return list.filter(([, , degree]) => degree > 1).map(([name, stride, degree]) => ({ name, stride, degree }));
};
const named = (l) => axes(l).filter((a) => a.name !== "edp").map((a) => `${a.name} ${a.degree}`).join(" \u00d7 ") || "one rank";
const way = (l) => [`ZeRO ${l.zero_stage}`, l.pp > 1 && l.schedule + (l.virtual_stages > 1 ? ` \u00d7${l.virtual_stages}` : ""), l.cp > 1 && l.cp_comm, l.sequence_parallel && "sp",
  `microbatch ${l.micro_batch_size}`, l.recompute !== "none" && `recompute ${l.recompute}`].filter(Boolean).join(", ");
const gib = (bytes) => (bytes / 2 ** 30).toFixed(1) + "\u00a0GiB";
const sumOf = (list, key) => list.reduce((sum, one) => sum + one[key], 0);
const node = data.cluster.gpus_per_node, gpus = data.cluster.gpus;
const layouts = data.layouts;
let chosen = 0;
const listeners = [];
const choose = (index) => { chosen = index; listeners.forEach((tell) => tell()); };

document.querySelector("#facts").append(...[
  ["model", `${data.model.name}, ${show.count(+data.model.parameters)} parameters` + (data.model.active_parameters !== data.model.parameters ? `, ${show.count(+data.model.active_parameters)} of them active for a token` : "")],
  ["cluster", `${show.whole(gpus)} ${data.cluster.name} in nodes of ${node}, ${gib(data.cluster.usable_bytes)} each to a model`],
  ["job", `${show.whole(data.job.global_batch_size)} sequences of ${show.whole(data.job.seq_length)} tokens a step`],
  ["searched", `${show.whole(data.considered)} layouts, of which ${show.whole(data.fitting)} fit, on ${show.whole(data.meshes)} meshes`],
  ["MFU", data.flops.formula],
].flatMap(([name, text]) => [h("dt", { text: name }), h("dd", { text })]));
const best = layouts[0];
document.querySelector("#figures").append(...[
  [show.percent(best.mfu), "MFU of the first"], [show.count(best.tokens_per_second), "tokens/s"], [gib(best.memory_bytes_total), "on its fullest rank"],
  [show.percent(best.bubble), "bubble"], [show.time(best.step_seconds * 1e6), "a step"],
].map(([value, words]) => h("li", {}, h("b", { text: value }), h("span", { text: words }))));

// The ranked table.
{
  const body = section("layouts", "Layouts", "The fastest way of each of the best meshes, fastest first. Choose one to see it below.");
  const radio = (l, i) => h("input", { type: "radio", name: "layout", value: i, checked: i === 0, "aria-label": `layout ${i + 1}: ${named(l)}`, onchange: () => choose(i) });
  body.append(table("Layouts, fastest first", [
    ["", (r) => radio(r.l, r.i)], ["", (r) => r.i + 1], ["mesh", (r) => h("span", {}, named(r.l), h("br"), h("span", { class: "note", text: way(r.l) })), true], ["MFU", (r) => show.percent(r.l.mfu)],
    ["tokens/s/GPU", (r) => show.whole(r.l.tokens_per_second / gpus)], ["memory", (r) => gib(r.l.memory_bytes_total)], ["bubble", (r) => show.percent(r.l.bubble)],
    ["inside nodes", (r) => show.bytes(sumOf(r.l.traffic, "bytes_inside_nodes"))], ["between nodes", (r) => show.bytes(sumOf(r.l.traffic, "bytes_between_nodes"))],
  ], layouts.map((l, i) => ({ l, i }))), h("p", { class: "note", style: "margin-top:6px", text: "Memory is of the fullest rank, bytes are what a rank of the fullest stage sends in a step." }));
  const said = h("div", {});
  const tell = () => {
    const list = layouts[chosen].advice;
    said.replaceChildren(h("h3", { text: `What the rules of the craft say of layout ${chosen + 1}` }), list.length
      ? h("ul", { style: "margin:0;padding-left:20px;font-size:14px" }, list.map((one) => h("li", {}, h("b", { text: one.rule.replaceAll("-", " ") }), ": " + one.text)))
      : h("p", { class: "note", text: "Nothing." }));
  };
  listeners.push(tell); tell(); body.append(said);
}

// Where the ranks sit.
{
  const body = section("mesh", "Where the ranks sit", "Each square is a GPU, each frame a node; ranks are dealt to nodes in order. The colour is the place on the chosen axis, the ring marks the group of one rank.");
  const pick = h("select", { id: "axis" });
  const plot = h("div", { class: "plot" }), svg = s("svg", { role: "img", tabindex: 0, "aria-label": "Nodes and the ranks on them; arrow keys choose a rank" });
  const readout = h("p", { class: "readout", "aria-live": "polite", "data-hint": "Point at a GPU, or focus the drawing and use the arrow keys." });
  const links = h("div", {}), caption = h("figcaption", {});
  let [axis, rank] = [null, 0];
  const place = (r, a) => Math.floor(r / a.stride) % a.degree;
  const group = (r, a) => { const first = r - place(r, a) * a.stride; return Array.from({ length: a.degree }, (_, i) => first + i * a.stride); };
  const nodeOf = (r) => Math.floor(r / node);
  const shownNodes = (members, most) => {
    const total = Math.ceil(gpus / node), list = [...new Set(members.map(nodeOf))].slice(0, most);
    for (let n = 0; list.length < Math.min(most, total) && n < total; n += 1) if (!list.includes(n)) list.push(n);
    return list.sort((a, b) => a - b);
  };
  const tell = () => {
    const members = group(rank, axis), nodes = new Set(members.map(nodeOf)).size;
    const l = layouts[chosen], where = axes(l).map((a) => `${a.name} ${place(rank, a)}`).join(", ");
    const few = members.slice(0, 8).join(", ") + (members.length > 8 ? ", \u2026" : "");
    readout.textContent = `rank ${rank} on node ${nodeOf(rank)} (${where}). Its ${axis.name} group: ${few}; ${members.length} members on ${nodes === 1 ? "one node" : show.whole(nodes) + " nodes"}.`;
  };
  const draw = (width) => {
    if (!axis) return;
    const members = new Set(group(rank, axis)), nodes = shownNodes([...members], width < 520 ? 8 : 16);
    const all = Math.ceil(gpus / node);
    caption.textContent = nodes.length < all ? `${nodes.length} of ${show.whole(all)} nodes: those of the group first.` : "";
    const per = node <= 4 ? node : width < 520 ? 4 : Math.min(node, 8), rows = Math.ceil(node / per);
    const side = 24, pad = 8, frame = per * side + 2 * pad, tall = rows * side + 2 * pad + 18;
    const across = Math.max(1, Math.floor((width - 16) / (frame + 12)));
    const height = Math.ceil(nodes.length / across) * (tall + 12) + 14;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`); svg.setAttribute("height", height);
    svg.replaceChildren();
    nodes.forEach((n, i) => {
      const [x0, y0] = [10 + (i % across) * (frame + 12), 10 + Math.floor(i / across) * (tall + 12)];
      svg.append(s("rect", { x: x0, y: y0, width: frame, height: tall, rx: 5, fill: css("--wash"), stroke: css("--rule") }),
        s("text", { x: x0 + pad, y: y0 + 15, "font-size": 11, text: `node ${n}` }));
      for (let g = 0; g < node && n * node + g < gpus; g += 1) {
        const r = n * node + g, [x, y] = [x0 + pad + (g % per) * side, y0 + 22 + Math.floor(g / per) * side];
        const share = axis.degree > 1 ? 0.16 + (0.84 * place(r, axis)) / (axis.degree - 1) : 1;
        const square = s("rect", { x: x + 1.5, y: y + 1.5, width: side - 3, height: side - 3, rx: 3, fill: `rgba(${css("--heat")}, ${share.toFixed(3)})`, onpointerenter: () => { rank = r; redraw(); tell(); } });
        svg.append(square);
        if (members.has(r)) svg.append(s("rect", { x: x + 1.5, y: y + 1.5, width: side - 3, height: side - 3, rx: 3, fill: "none", stroke: css(r === rank ? "--focus" : "--backward"), "stroke-width": 2.5, style: "pointer-events:none" }));
        svg.append(s("text", { x: x + side / 2, y: y + side / 2 + 3.5, "text-anchor": "middle", "font-size": r > 999 ? 8 : 9.5, style: `pointer-events:none;fill:${share > 0.55 ? css("--raised") : css("--ink")}`, text: r }));
      }
    });
  };
  const redraw = responsive(plot, draw);
  const crossing = () => {
    const l = layouts[chosen];
    // Gradients are summed over dp and cp together.
    const wide = (a) => (a.name === "dp" && l.cp > 1 ? { ...a, stride: l.tp, degree: l.dp * l.cp, title: "dp \u00d7 cp" } : a);
    const rows = axes(l).map(wide).map((a) => {
      const members = group(0, a), nodes = new Set(members.map(nodeOf)).size;
      const sent = l.traffic.filter((t) => t.group === a.name);
      const [inside, between] = [sumOf(sent, "bytes_inside_nodes"), sumOf(sent, "bytes_between_nodes")];
      const [near, far] = inside + between > 0 ? [inside > 0, between > 0] : [nodes < members.length, nodes > 1];
      return { ...a, nodes, link: near && far ? "both" : far ? "between nodes" : "inside a node", inside, between };
    });
    links.replaceChildren(h("h3", { text: "Which group crosses which link" }), table("Groups and links", [
      ["axis", (r) => r.title || r.name, true], ["ranks", (r) => show.whole(r.degree)], ["apart", (r) => show.whole(r.stride)], ["nodes", (r) => show.whole(r.nodes)], ["goes", (r) => r.link, true],
      ["bytes inside", (r) => show.bytes(r.inside)], ["bytes between", (r) => show.bytes(r.between)],
    ], rows), folded("By collective", table("Bytes by collective", [
      ["group", (r) => r.group, true], ["collective", (r) => r.collective, true], ["calls", (r) => show.whole(r.calls)], ["inside nodes", (r) => show.bytes(r.bytes_inside_nodes)], ["between nodes", (r) => show.bytes(r.bytes_between_nodes)],
    ], l.traffic)));
  };
  const renew = () => {
    const list = axes(layouts[chosen]);
    pick.replaceChildren(...list.map((a, i) => h("option", { value: i, text: `${a.name} ${a.degree}` })));
    axis = list[0] || { name: "tp", stride: 1, degree: 1 };
    rank = 0; readout.textContent = "";
    crossing(); redraw();
  };
  pick.addEventListener("change", () => { axis = axes(layouts[chosen])[+pick.value]; redraw(); tell(); });
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -node, ArrowDown: node }[event.key];
    if (!move) return;
    rank = Math.max(0, Math.min(gpus - 1, rank + move));
    redraw(); tell(); event.preventDefault();
  });
  plot.append(svg);
  body.append(h("div", { class: "tools" }, h("label", { for: "axis", text: "axis" }), pick), h("figure", {}, plot, readout, caption), links);
  listeners.push(renew); renew();
}

// Bars: one for each layout, its parts in order, a line where the room ends.
function stacked(label, rows, most, limit, write) {
  const bars = h("div", { class: "plot bars named", role: "img", "aria-label": `${label}; the table below has the numbers` });
  rows.forEach((parts, i) => {
    let at = 0;
    const bar = h("div", { class: "bar" }, parts.map(([name, value, colour]) => {
      const part = h("i", { style: `left:${(100 * at) / most}%;width:${(100 * value) / most}%;background:${colour}`, title: `${name}: ${write(value)}` });
      at += value;
      return part;
    }));
    if (limit) bar.append(h("b", { style: `left:calc(${(100 * limit) / most}% - 1px)`, title: `room: ${write(limit)}` }));
    bars.append(h("span", { class: "who", text: `${i + 1}  ${named(layouts[i])}` }), bar, h("span", { class: "sum", text: write(at) }));
  });
  return bars;
}
const stack = (key, order, colours) => layouts.map((l) => order.map((name) => [name, l[key][name] || 0, `var(${colours[name]})`]));

{
  const body = section("memory", "Memory", "Of the fullest rank, each category at its highest; the line is what the GPU leaves to a model.");
  const order = ["parameters", "gradients", "optimizer", "activations", "buffers"];
  const colours = { parameters: "--c-parameters", gradients: "--c-gradients", optimizer: "--c-optimizer", activations: "--c-activations", buffers: "--c-communication" };
  const most = Math.max(data.cluster.usable_bytes, ...layouts.map((l) => l.memory_bytes_total)) * 1.02;
  body.append(h("figure", {}, stacked("Memory by layout", stack("memory_bytes", order, colours), most, data.cluster.usable_bytes, gib)), legend([...order.map((name) => [name, `var(${colours[name]})`]), ["room", "", "outline"]]),
    folded("As a table", table("Memory by layout", [["", (r) => r.i + 1], ["mesh", (r) => named(r.l), true], ...order.map((name) => [name, (r) => gib(r.l.memory_bytes[name])]), ["all", (r) => gib(r.l.memory_bytes_total)]], layouts.map((l, i) => ({ l, i })))));
}
{
  const body = section("time", "Where the seconds go", "Of a step, on the slowest stage, by a stated model of time; traffic counts where nothing hides it.");
  const order = ["compute", "recompute", "tp", "cp", "ep", "pp", "dp", "bubble", "optimizer"];
  const colours = { compute: "--forward", recompute: "--gradients", tp: "--collective", cp: "--message", ep: "--parameters", pp: "--send", dp: "--backward", bubble: "--receive", optimizer: "--weight" };
  const seconds = (x) => (x < 100 ? x.toFixed(2) : x.toFixed(0)) + "\u00a0s";
  const used = order.filter((name) => layouts.some((l) => l.seconds[name] > 0));
  body.append(h("figure", {}, stacked("Seconds by layout", stack("seconds", used, colours), Math.max(...layouts.map((l) => l.step_seconds)) * 1.02, 0, seconds)), legend(used.map((name) => [name, `var(${colours[name]})`])),
    folded("As a table", table("Seconds by layout", [["", (r) => r.i + 1], ["mesh", (r) => named(r.l), true], ...used.map((name) => [name, (r) => (r.l.seconds[name] || 0).toFixed(3)]), ["step", (r) => r.l.step_seconds.toFixed(3)]], layouts.map((l, i) => ({ l, i })))));
}
if (data.rejected.length) {
  section("rejected", "Why others do not go", "").append(table("Rules that layouts broke", [
    ["layouts", (r) => show.whole(r.count)], ["rule, and for example", (r) => h("span", {}, r.rule, h("br"), h("span", { class: "note", text: r.example })), "wrap"],
  ], data.rejected));
}
