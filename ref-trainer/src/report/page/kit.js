"use strict";
// Small tools that the pages share: elements, numbers, tables, line charts, a cursor for keyboard and pointer.

const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === "text") node.textContent = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== undefined && child !== null && child !== false));
  return node;
}
const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const digits3 = (x) => (x >= 99.95 ? x.toFixed(0) : x >= 9.995 ? x.toFixed(1) : x.toFixed(2));
function scaled(x, base, units) {
  let unit = 0;
  while (Math.abs(x) >= 999.5 && unit + 1 < units.length) { x /= base; unit += 1; }
  const text = unit === 0 ? whole.format(x) : digits3(x);
  return units[unit] ? text + "\u00a0" + units[unit] : text;
}
const show = {
  whole: (n) => (n === null || n === undefined ? "\u2013" : whole.format(n)),
  bytes: (n) => (n === null || n === undefined ? "\u2013" : scaled(n, 1000, ["B", "kB", "MB", "GB", "TB", "PB"])),
  count: (n) => scaled(n, 1000, ["", "k", "M", "B", "T"]).replace("\u00a0", ""),
  percent: (x) => (Number.isFinite(x) ? (100 * x).toFixed(x < 0.0995 ? 1 : 0) + "\u00a0%" : "\u2013"),
  time: (us) => (us < 999.5 ? digits3(us) + "\u00a0\u00b5s" : us < 999500 ? digits3(us / 1e3) + "\u00a0ms" : digits3(us / 1e6) + "\u00a0s"),
  loss: (x) => (Number.isFinite(x) ? x.toFixed(4) : "\u2013"),
  tiny: (x) => (x === 0 ? "0" : Number.isFinite(x) ? x.toExponential(1).replace("e", "e").replace("-", "\u2212") : "\u2013"),
};

// A table; columns are [title, function of a row, is it text].
function table(caption, columns, rows) {
  const head = columns.map(([title, , text]) => h("th", { scope: "col", class: text && "text", text: title }));
  const line = (row) => h("tr", {}, columns.map(([, of, text], i) => {
    const value = of(row);
    const attributes = { class: text && (text === "wrap" ? "text wrap" : "text"), scope: i === 0 ? "row" : undefined };
    return h(i === 0 ? "th" : "td", attributes, value instanceof Node ? value : String(value));
  }));
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h("table", {}, h("caption", { class: "skip", text: caption }), h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows.map(line))));
}
const folded = (title, node) => h("details", {}, h("summary", { text: title }), node);
const legend = (entries) => h("ul", { class: "legend", "aria-hidden": "true" }, entries.map(([name, colour, shape]) =>
  h("li", {}, h("i", { class: shape || "", style: `background:${colour};border-color:${colour}` }), name)));
const same = (a, b) => h("span", { class: a === b ? "mark ok" : "mark bad", text: a === b ? "equal" : "DIFFERS" });

function section(id, title, lede, ...children) {
  document.querySelector("nav").append(h("a", { href: "#" + id, text: title }));
  const body = h("section", { id, "aria-labelledby": id + "-title" }, h("h2", { id: id + "-title", text: title }), lede && h("p", { class: "note", text: lede }), children);
  document.querySelector("main").append(body);
  return body;
}

// Round numbers that cover lo..hi, about `count` of them.
function ticks(lo, hi, count) {
  const rough = (hi - lo || 1) / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((m) => m >= rough * 0.999);
  const list = [];
  for (let i = Math.ceil(lo / step - 1e-9); i * step <= hi + step * 1e-6; i += 1) list.push(+(i * step).toPrecision(12));
  return list;
}

// Where in a node the pointer is.
function inside(node, event) {
  const box = node.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}

// Draws again when the width or the colours change. `draw` takes the width in CSS pixels.
function responsive(node, draw) {
  let last = 0;
  const again = (force) => {
    const width = Math.floor(node.clientWidth);
    if (width > 0 && (force || width !== last)) { last = width; draw(width); }
  };
  new ResizeObserver(() => again(false)).observe(node);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => again(true));
  requestAnimationFrame(() => again(false));
  return () => again(true);
}

// A line chart. series: {name, colour (a CSS variable), points: [[x, y]], shape: line | dot | ring}; marks: {name, y}.
function lineChart({ title, series, marks, unit, height, format, zero }) {
  const plot = h("div", { class: "plot" });
  const readout = h("p", { class: "readout", "aria-live": "polite", "data-hint": "Point at the chart, or focus it and use \u2190 and \u2192." });
  const all = series.flatMap((one) => one.points).filter(([, y]) => Number.isFinite(y));
  if (all.length === 0) return h("p", { class: "note", text: "Nothing was recorded." });
  const xs = [...new Set(series[0].points.map(([x]) => x))].sort((a, b) => a - b);
  const values = all.map(([, y]) => y).concat((marks || []).map((mark) => mark.y));
  let [low, high] = [Math.min(...values), Math.max(...values)];
  const air = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1;
  low = low >= 0 && (zero || low < air * 4) ? 0 : low - air; high += air;
  const [first, last] = [xs[0], xs[xs.length - 1]];
  const narrow = (width) => width < 520;
  let cursor = -1, place = null;
  const svg = s("svg", { role: "img", tabindex: 0, "aria-label": title, height });
  const draw = (width) => {
    const [left, right, top, bottom] = [54, 16, 14, 34];
    const px = (x) => left + (first === last ? 0.5 : (x - first) / (last - first)) * (width - left - right);
    const py = (y) => top + (1 - (y - low) / (high - low)) * (height - top - bottom);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.replaceChildren();
    for (const y of ticks(low, high, 5)) {
      svg.append(s("line", { class: "grid", x1: left, x2: width - right, y1: py(y), y2: py(y) }),
        s("text", { x: left - 8, y: py(y) + 4, "text-anchor": "end", text: format.tick ? format.tick(y) : y }));
    }
    for (const x of ticks(first, last, narrow(width) ? 4 : 8).filter(Number.isInteger)) {
      svg.append(s("text", { x: px(x), y: height - 12, "text-anchor": "middle", text: x }));
    }
    svg.append(s("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
    for (const mark of marks || []) {
      svg.append(s("line", { x1: left, x2: width - right, y1: py(mark.y), y2: py(mark.y), stroke: css("--faint"), "stroke-dasharray": "6 5" }),
        s("text", { x: width - right - 4, y: py(mark.y) - 6, "text-anchor": "end", text: mark.name }));
    }
    for (const one of series) {
      const points = one.points.filter(([, y]) => Number.isFinite(y)), colour = css(one.colour);
      if (one.shape === "line" && points.length > 1) {
        const path = points.map(([x, y], i) => `${i ? "L" : "M"}${px(x).toFixed(1)} ${py(y).toFixed(1)}`).join("");
        svg.append(s("path", { d: path, fill: "none", stroke: colour, "stroke-width": 1.7, "stroke-linejoin": "round" }));
      } else for (const [x, y] of points) {
        svg.append(one.shape === "ring"
          ? s("circle", { cx: px(x), cy: py(y), r: 6.5, fill: "none", stroke: colour, "stroke-width": 2 })
          : s("circle", { cx: px(x), cy: py(y), r: 3, fill: colour }));
      }
    }
    place = s("line", { y1: top, y2: height - bottom, stroke: css("--accent"), visibility: "hidden" });
    svg.append(place);
    const to = (index) => {
      cursor = Math.max(0, Math.min(xs.length - 1, index));
      const x = xs[cursor];
      place.setAttribute("x1", px(x)); place.setAttribute("x2", px(x)); place.setAttribute("visibility", "visible");
      const told = series.map((one) => [one.name, one.points.find(([at]) => at === x)]).filter(([, point]) => point);
      readout.textContent = `${unit} ${x}: ` + told.map(([name, point]) => `${name} ${format.value(point[1])}`).join(", ");
    };
    svg.onpointermove = (event) => {
      const x = first + ((inside(svg, event)[0] - left) / (width - left - right)) * (last - first);
      let best = 0;
      xs.forEach((at, i) => { if (Math.abs(at - x) < Math.abs(xs[best] - x)) best = i; });
      to(best);
    };
    svg.onkeydown = (event) => {
      const pace = event.shiftKey ? Math.max(1, Math.round(xs.length / 20)) : 1;
      const moves = { ArrowLeft: cursor - pace, ArrowRight: cursor + pace, Home: 0, End: xs.length - 1 };
      if (event.key in moves) { to(moves[event.key]); event.preventDefault(); }
    };
    if (cursor >= 0) to(cursor);
  };
  plot.append(svg);
  responsive(plot, draw);
  return h("div", { class: "chart" }, plot, readout);
}

// A grid of squares coloured by value, walked by the arrow keys. cell(row, column) is a value or null, tell(row, column) its words.
function heatGrid({ title, rows, columns, cell, tell, label, write, bounds, rowTitle, columnTitle }) {
  const plot = h("div", { class: "plot" });
  const readout = h("p", { class: "readout", "aria-live": "polite", "data-hint": "Point at a square, or focus the grid and use the arrow keys." });
  const svg = s("svg", { role: "img", tabindex: 0, "aria-label": title });
  let at = [0, -1];
  const draw = (width) => {
    const [left, top] = [label ? 92 : 46, 36];
    const side = Math.min(44, (width - left - 14) / columns);
    const tall = label ? Math.min(34, side) : side;
    const height = top + tall * rows + 12;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`); svg.setAttribute("height", height);
    svg.replaceChildren();
    let most = 0;
    for (let r = 0; r < rows; r += 1) for (let c = 0; c < columns; c += 1) most = Math.max(most, cell(r, c) || 0);
    const each = Math.ceil(26 / side);
    for (let c = 0; c < columns; c += each) svg.append(s("text", { x: left + (c + 0.5) * side, y: top - 7, "text-anchor": "middle", text: c }));
    const down = Math.ceil(15 / tall);
    for (let r = 0; r < rows; r += down) svg.append(s("text", { x: left - 8, y: top + (r + 0.5) * tall + 4, "text-anchor": "end", text: label ? label(r) : r }));
    svg.append(s("text", { x: left + 14, y: 13, text: `${columnTitle} \u2192` }), s("text", { x: 8, y: 13, text: `${rowTitle} \u2193` }));
    for (let r = 0; r < rows; r += 1) for (let c = 0; c < columns; c += 1) {
      const value = cell(r, c);
      const share = value && most ? 0.1 + 0.9 * Math.sqrt(value / most) : 0;
      svg.append(s("rect", { x: left + c * side + 0.5, y: top + r * tall + 0.5, width: Math.max(side - 1, 0.5), height: Math.max(tall - 1, 0.5), rx: side > 12 ? 2 : 0, fill: share ? `rgba(${css("--heat")}, ${share.toFixed(3)})` : css("--wash") }));
      if (write && value && side >= 38) svg.append(s("text", { x: left + (c + 0.5) * side, y: top + (r + 0.5) * tall + 4, "text-anchor": "middle", "font-size": 10.5, style: `fill:${share > 0.55 ? css("--raised") : css("--ink")}`, text: write(value) }));
    }
    for (const bound of bounds ? bounds() : []) {
      const [x, y, w, t] = bound;
      svg.append(s("rect", { x: left + x * side, y: top + y * tall, width: w * side, height: t * tall, fill: "none", stroke: css("--soft"), "stroke-width": 1.5 }));
    }
    const ring = s("rect", { width: side, height: tall, fill: "none", stroke: css("--focus"), "stroke-width": 2, visibility: "hidden" });
    svg.append(ring);
    const to = (r, c) => {
      at = [Math.max(0, Math.min(rows - 1, r)), Math.max(0, Math.min(columns - 1, c))];
      ring.setAttribute("x", left + at[1] * side); ring.setAttribute("y", top + at[0] * tall); ring.setAttribute("visibility", "visible");
      readout.textContent = tell(at[0], at[1]);
    };
    svg.onpointermove = (event) => {
      const [x, y] = inside(svg, event);
      const [c, r] = [Math.floor((x - left) / side), Math.floor((y - top) / tall)];
      if (c >= 0 && c < columns && r >= 0 && r < rows) to(r, c);
    };
    svg.onkeydown = (event) => {
      const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
      const move = moves[event.key];
      if (move) { to(at[0] + move[0], at[1] + move[1]); event.preventDefault(); }
    };
    if (at[1] >= 0) to(at[0], at[1]);
  };
  plot.append(svg);
  const redraw = responsive(plot, draw);
  return { node: h("div", {}, plot, readout), redraw };
}
