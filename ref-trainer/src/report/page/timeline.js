"use strict";
// The timeline: a canvas of every rank's spans, with zoom and pan by pointer and keyboard, and the arrows of messages.

function timeline(source) {
  const tick = source.unit; // nanoseconds
  const nest = new Set(["step", "phase"]);
  const ranks = source.ranks.map((rank) => {
    const [compute, outer, comm] = [[], [], []];
    for (let i = 0, at = 0; i < rank.c.length; i += 4) {
      at += rank.c[i + 2];
      const span = { name: source.names[rank.c[i]], kind: source.kinds[rank.c[i + 1]], begin: at, end: at + rank.c[i + 3] };
      (nest.has(span.kind) ? outer : compute).push(span);
    }
    let lanes = 0;
    for (let i = 0, at = 0; i < rank.m.length; i += 5) {
      at += rank.m[i + 3];
      lanes = Math.max(lanes, rank.m[i] + 1);
      comm.push({ lane: rank.m[i], name: source.names[rank.m[i + 1]], kind: source.kinds[rank.m[i + 2]], begin: at, end: at + rank.m[i + 4] });
    }
    return { compute, outer, comm, lanes };
  });
  const flows = [];
  for (let i = 0; i < source.flows.length; i += 4) {
    const [r, a, t, b] = source.flows.slice(i, i + 4);
    const [from, to] = [ranks[r].comm[a], ranks[t].comm[b]];
    if (from && to) flows.push({ r, t, from, to });
  }
  const total = Math.max(1, ...ranks.flatMap((rank) => [rank.outer, rank.compute, rank.comm].map((list) => list.reduce((m, span) => Math.max(m, span.end), 0))));
  const view = { begin: 0, end: total };
  const chosen = { rank: 0, index: -1 };
  let arrows = true, redraw = () => {};
  const [left, head, tall, gap] = [44, 26, 14, 6];
  const thin = 6;
  const rowOf = []; // y of each rank
  let height = head + 6;
  for (const rank of ranks) {
    rowOf.push(height);
    height += tall + 2 + Math.min(Math.max(rank.lanes, 1), 4) * thin + gap;
  }

  const canvas = h("canvas", { tabindex: 0, role: "img", "aria-label": `Timeline of ${ranks.length} ranks. Arrow keys move, plus and minus zoom, comma and full stop step through spans.` });
  const map = h("canvas", { "aria-hidden": "true", style: "cursor:pointer" });
  const holder = h("div", { class: "plot", style: "overflow-y:auto;max-height:74vh" }, canvas);
  const readout = h("p", { class: "readout", "aria-live": "polite", "data-hint": "Point at a span, or focus the timeline: \u2190 \u2192 move, + \u2212 zoom, \u2191 \u2193 rank, comma and full stop step through spans, 0 fits all." });

  function prepare(node, width, tallness) {
    const ratio = window.devicePixelRatio || 1;
    node.width = Math.round(width * ratio); node.height = Math.round(tallness * ratio);
    node.style.height = tallness + "px";
    const pen = node.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.font = "11px " + getComputedStyle(document.body).fontFamily;
    return pen;
  }
  const micros = (t) => (t * tick) / 1000;

  function draw(width) {
    const pen = prepare(canvas, width, height);
    const palette = Object.fromEntries(source.kinds.map((kind) => [kind, css("--" + kind)]));
    const scale = (width - left - 8) / (view.end - view.begin);
    const px = (t) => left + (t - view.begin) * scale;
    pen.clearRect(0, 0, width, height);
    pen.textBaseline = "middle";
    // Time along the top.
    pen.strokeStyle = css("--rule"); pen.fillStyle = css("--soft"); pen.textAlign = "center";
    for (const t of ticks(micros(view.begin), micros(view.end), Math.max(2, width / 130))) {
      const x = Math.round(px((t * 1000) / tick)) + 0.5;
      if (x < left) continue;
      pen.beginPath(); pen.moveTo(x, head - 6); pen.lineTo(x, height); pen.stroke();
      if (x > left + 20 && x < width - 26) pen.fillText(show.time(t), x, 10);
    }
    pen.save();
    pen.beginPath(); pen.rect(left, 0, width - left, height); pen.clip();
    const bars = (list, top, size) => {
      let [reach, last] = [-1, ""];
      for (const span of list) {
        if (span.end < view.begin || span.begin > view.end) continue;
        const x = px(span.begin), w = Math.max((span.end - span.begin) * scale, 0.4);
        // Of what falls on one pixel the first is drawn.
        if (x + w < reach + 0.3 && span.kind === last) continue;
        pen.fillStyle = palette[span.kind];
        pen.fillRect(x, top(span), w > 2 ? w - 0.5 : w, size);
        [reach, last] = [x + w, span.kind];
        if (size >= 12 && w > 16) {
          // Short names for short bars: the kind is in the colour.
          const words = [span.name, span.name.replace(" mb", ""), span.name.split(" ")[0]].find((text) => pen.measureText(text).width < w - 6);
          if (words && span.kind !== "receive") { pen.fillStyle = css(span.kind === "phase" ? "--ink" : "--raised"); pen.textAlign = "left"; pen.fillText(words, x + 3, top(span) + size / 2 + 0.5); }
        }
      }
    };
    ranks.forEach((rank, r) => {
      const y = rowOf[r];
      const phases = rank.outer.filter((span) => span.kind === "phase" && span.name !== "pipeline");
      bars(phases, () => y, tall);
      bars(rank.compute, () => y, tall);
      bars(rank.comm, (span) => y + tall + 2 + Math.min(span.lane, 3) * thin, thin - 1);
    });
    pen.strokeStyle = css("--faint"); pen.setLineDash([3, 3]);
    for (const [, begin] of source.steps) {
      const x = Math.round(px(begin)) + 0.5;
      pen.beginPath(); pen.moveTo(x, head - 8); pen.lineTo(x, height); pen.stroke();
    }
    pen.setLineDash([]);
    if (arrows && (view.end - view.begin) / total < 0.55) {
      pen.strokeStyle = css("--send"); pen.fillStyle = css("--send"); pen.lineWidth = 1; pen.globalAlpha = 0.75;
      for (const { r, t, from, to } of flows) {
        if (to.end < view.begin || from.begin > view.end) continue;
        const [x1, x2] = [px(from.begin), px(to.end)];
        const [y1, y2] = [rowOf[r] + tall + 2 + Math.min(from.lane, 3) * thin + 2, rowOf[t] + (t > r ? 0 : tall)];
        pen.beginPath(); pen.moveTo(x1, y1); pen.bezierCurveTo(x1 + 10, y1 + (y2 - y1) * 0.3, x2 - 10, y2 - (y2 - y1) * 0.3, x2, y2); pen.stroke();
        const up = t > r ? -5 : 5;
        pen.beginPath(); pen.moveTo(x2, y2); pen.lineTo(x2 - 3, y2 + up); pen.lineTo(x2 + 3, y2 + up); pen.fill();
      }
      pen.globalAlpha = 1;
    }
    const span = list(chosen.rank)[chosen.index];
    if (span) {
      const y = rowOf[chosen.rank];
      const [top, size] = span.lane === undefined ? [y, tall] : [y + tall + 2 + Math.min(span.lane, 3) * thin, thin - 1];
      pen.strokeStyle = css("--focus"); pen.lineWidth = 2;
      pen.strokeRect(px(span.begin) - 1, top - 1, Math.max((span.end - span.begin) * scale, 1) + 2, size + 2);
    }
    pen.restore();
    pen.textAlign = "right";
    ranks.forEach((rank, r) => {
      pen.fillStyle = r === chosen.rank && chosen.index >= 0 ? css("--ink") : css("--soft");
      pen.fillText(String(r), left - 10, rowOf[r] + tall / 2 + 0.5);
    });
    pen.textAlign = "left"; pen.fillStyle = css("--soft"); pen.fillText("rank", 8, 10);
    overview();
  }
  function overview() {
    const width = map.clientWidth;
    if (!width) return;
    const pen = prepare(map, width, 22), scale = (width - left - 8) / total;
    pen.clearRect(0, 0, width, 22);
    for (const span of ranks.length ? ranks[0].compute : []) {
      pen.fillStyle = css("--" + span.kind); pen.fillRect(left + span.begin * scale, 7, Math.max((span.end - span.begin) * scale, 0.4), 9);
    }
    pen.fillStyle = css("--soft"); pen.textBaseline = "middle"; pen.fillText("all", 8, 12);
    pen.strokeStyle = css("--ink"); pen.lineWidth = 1.5;
    pen.strokeRect(left + view.begin * scale, 3, Math.max((view.end - view.begin) * scale, 3), 17);
  }

  function show_(begin, end) {
    const least = 50; // ticks
    let length = Math.min(Math.max(end - begin, least), total);
    const start = Math.min(Math.max(begin, 0), total - length);
    view.begin = start; view.end = start + length;
    redraw();
  }
  function zoom(factor, around) {
    const middle = around === undefined ? (view.begin + view.end) / 2 : around;
    show_(middle - (middle - view.begin) * factor, middle + (view.end - middle) * factor);
  }
  const pan = (share) => { const by = (view.end - view.begin) * share; show_(view.begin + by, view.end + by); };
  // What the keys walk over: the spans that hold no others.
  const walked = ranks.map((rank) => rank.compute.concat(rank.outer.filter((span) => span.kind === "phase" && span.name !== "pipeline"), rank.comm).sort((a, b) => a.begin - b.begin));
  const list = (rank) => walked[rank] || [];
  function tell(rank, index) {
    chosen.rank = rank; chosen.index = index;
    const span = list(rank)[index];
    if (!span) { readout.textContent = ""; return; }
    const place = data.places[rank] ? ` (${data.places[rank]})` : "";
    readout.textContent = `rank ${rank}${place}: ${span.name}, ${show.time(micros(span.end - span.begin))}, begins at ${show.time(micros(span.begin))}`;
  }
  function walk(by) {
    const spans = list(chosen.rank);
    let index = chosen.index + by;
    if (chosen.index < 0 || spans[chosen.index].end < view.begin || spans[chosen.index].begin > view.end) index = spans.findIndex((span) => span.begin >= view.begin);
    index = Math.max(0, Math.min(spans.length - 1, index));
    tell(chosen.rank, index);
    const span = spans[index], length = view.end - view.begin;
    // A span too short to be seen is come closer to.
    const seen = span && (span.end - span.begin) / length > 0.004 ? length : Math.max((span.end - span.begin) * 40, length / 8);
    if (span && (seen < length || span.begin < view.begin || span.end > view.end)) show_(span.begin - seen / 3, span.begin + (seen * 2) / 3);
    else redraw();
  }
  function rank(by) {
    const spans = list(chosen.rank), now = chosen.index >= 0 && spans[chosen.index] ? spans[chosen.index].begin : view.begin;
    const next = Math.max(0, Math.min(ranks.length - 1, chosen.rank + by));
    let best = 0;
    list(next).forEach((span, i) => { if (Math.abs(span.begin - now) < Math.abs(list(next)[best].begin - now)) best = i; });
    tell(next, list(next).length ? best : -1);
    const y = rowOf[next];
    if (y < holder.scrollTop || y + 40 > holder.scrollTop + holder.clientHeight) holder.scrollTop = y - 40;
    redraw();
  }
  const keys = {
    ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), ArrowUp: () => rank(-1), ArrowDown: () => rank(1),
    "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), 0: () => show_(0, total), Home: () => show_(0, view.end - view.begin), End: () => show_(total, total + view.end - view.begin),
    ".": () => walk(1), ",": () => walk(-1), Escape: () => { tell(chosen.rank, -1); redraw(); },
  };
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    keys[event.key](); event.preventDefault();
  });
  const at = (x) => view.begin + ((x - left) / (canvas.clientWidth - left - 8)) * (view.end - view.begin);
  function under(event) {
    const [x, y] = inside(canvas, event), t = at(x);
    const near = ((view.end - view.begin) / canvas.clientWidth) * 2;
    const r = rowOf.findIndex((top, i) => y >= top - 2 && y < (rowOf[i + 1] || height) - 2);
    if (r < 0 || x < left) return null;
    const comm = y >= rowOf[r] + tall + 1, lane = Math.floor((y - rowOf[r] - tall - 2) / thin);
    let best = -1;
    list(r).forEach((span, i) => {
      if ((span.lane !== undefined) !== comm || span.begin - near > t || span.end + near < t) return;
      if (comm && Math.min(span.lane, 3) !== lane) return;
      if (best < 0 || span.end - span.begin < list(r)[best].end - list(r)[best].begin) best = i;
    });
    return best < 0 ? null : [r, best];
  }
  let grip = null;
  canvas.addEventListener("pointerdown", (event) => { grip = { x: event.clientX, begin: view.begin, end: view.end }; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    if (grip && event.buttons) {
      const by = ((grip.x - event.clientX) / (canvas.clientWidth - left - 8)) * (grip.end - grip.begin);
      show_(grip.begin + by, grip.end + by);
      return;
    }
    const found = under(event);
    if (found && (found[0] !== chosen.rank || found[1] !== chosen.index)) { tell(...found); redraw(); }
  });
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => { grip = null; });
  canvas.addEventListener("dblclick", (event) => zoom(0.4, at(inside(canvas, event)[0])));
  canvas.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) { zoom(event.deltaY > 0 ? 1.25 : 0.8, at(inside(canvas, event)[0])); event.preventDefault(); }
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) { pan(event.deltaX / canvas.clientWidth); event.preventDefault(); }
  }, { passive: false });
  map.addEventListener("pointerdown", (event) => {
    const t = ((inside(map, event)[0] - left) / (map.clientWidth - left - 8)) * total, half = (view.end - view.begin) / 2;
    show_(t - half, t + half);
  });

  redraw = responsive(holder, draw);
  const button = (text, label, onclick) => h("button", { type: "button", "aria-label": label, text, onclick });
  const steps = source.steps.length > 1 && source.steps.map(([number, begin, end]) => button(`step ${number}`, `Show step ${number}`, () => show_(begin - (end - begin) * 0.01, end + (end - begin) * 0.01)));
  const toggle = h("button", { type: "button", "aria-pressed": "true", text: "arrows", onclick: () => { arrows = !arrows; toggle.setAttribute("aria-pressed", String(arrows)); redraw(); } });
  const tools = h("div", { class: "tools", role: "toolbar", "aria-label": "Timeline" },
    button("\u2212", "Zoom out", () => zoom(1 / 0.6)), button("+", "Zoom in", () => zoom(0.6)), button("fit", "Fit all", () => show_(0, total)), steps || [], flows.length ? toggle : []);
  const first = source.steps[0];
  if (first) requestAnimationFrame(() => { const last = source.steps[source.steps.length - 1]; show_(last[1], last[2]); });
  return h("div", {}, tools, h("figure", {}, holder, h("div", { class: "plot", style: "margin-top:4px" }, map), readout));
}

// Of each rank: time in each kind of span and share of waiting, over the recorded steps.
function shares(source) {
  const kinds = source.kinds.filter((kind) => !["step", "phase", "collective", "message"].includes(kind));
  return source.ranks.map((rank, r) => {
    const sums = Object.fromEntries(source.kinds.map((kind) => [kind, 0]));
    for (let i = 0; i < rank.c.length; i += 4) sums[source.kinds[rank.c[i + 1]]] += rank.c[i + 3];
    for (let i = 0; i < rank.m.length; i += 5) sums[source.kinds[rank.m[i + 2]]] += rank.m[i + 4];
    return { rank: r, sums, kinds };
  });
}
