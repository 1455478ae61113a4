// The step as a chart that can be zoomed and pointed at. Only what is in view is drawn, so that it
// does not matter how many ranks or events there are.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const [frame, room, chart, tip] = ["frame", "room", "chart", "tip"].map((id) => document.getElementById(id));
  const pen = chart.getContext("2d");
  const LEFT = data.names.length > 1 ? 150 : 120, RIGHT = 16, TOP = 26;
  const SHORTEST = data.length / 1e6;
  const view = { from: 0, to: data.length, memory: data.kinds.length > 0, compact: data.ranks.length > 12 };
  const pointer = { at: null, grip: null, part: null }; // where it is; what it drags; what it marks
  let rows = [], joins = [], size = { width: 0, height: 0 }, ink = {}, drawn = 0, asked = false;

  // --- words ------------------------------------------------------------------------------------

  const digits = (value) => String(Number(value.toPrecision(3)));
  const UNITS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];
  const unitOf = (longest) => (data.whole ? [1, "units"] : UNITS.find(([u]) => longest >= u) || UNITS[3]);
  function seconds(value) {
    const [unit, name] = unitOf(Math.abs(value));
    return `${data.whole ? Math.round(value * 100) / 100 : digits(value / unit)} ${name}`;
  }
  const BYTES = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
  function bytes(value) {
    const found = BYTES.find(([unit]) => value >= unit);
    return found ? `${(value / found[0]).toFixed(1)} ${found[1]}` : `${value} B`;
  }
  function parsed(action) {
    const [, stage, kind, microBatch, way, peer, replica] =
      /^(\d+)([A-Z])(\d*)(?:([<>])(\d+))?(?:@(\d+))?/.exec(action);
    return { stage, kind, microBatch, way, peer, replica: replica || "0" };
  }

  // --- where things lie -------------------------------------------------------------------------

  // An event is [start, stop, style, action]; a count of bytes [seconds, one number per kind].
  function layOut() {
    const [bar, thin, high, gap] = view.compact ? [11, 3, 18, 7] : [24, 5, 44, 14];
    rows = [];
    let y = TOP + 8;
    data.ranks.forEach((_, rank) => {
      data.sides.forEach((_, side) => {
        rows.push({ rank, side, y, bar, thin, high: bar + thin + 3, memory: false });
        y += bar + thin + (view.compact ? 2 : 5);
      });
      const side = data.charted;
      if (view.memory && side !== null) {
        rows.push({ rank, side, y: y + 1, high, memory: true });
        y += high + 3;
      }
      y += gap;
    });
    const style = getComputedStyle(document.documentElement);
    for (const name of ["paper", "ink", "soft", "grid", "floor", "edge", "glow"]) ink[name] = style.getPropertyValue(`--${name}`).trim();
    const most = Math.max(260, window.innerHeight - 190);
    frame.style.height = `${Math.min(y, most) + 2}px`;
    room.style.height = `${y}px`;
    size = { width: frame.clientWidth, height: Math.min(y, most) }; // beside the scroll bar, if there is one
    const dots = window.devicePixelRatio || 1;
    chart.width = size.width * dots;
    chart.height = size.height * dots;
    chart.style.width = `${size.width}px`;
    chart.style.height = `${size.height}px`;
    pen.setTransform(dots, 0, 0, dots, 0, 0);
    draw();
  }
  const span = () => view.to - view.from;
  const across = (t) => LEFT + ((t - view.from) / span()) * (size.width - LEFT - RIGHT);
  const timeAt = (x) => view.from + ((x - LEFT) / (size.width - LEFT - RIGHT)) * span();
  const eventsOf = (row) => data.sides[row.side].events[row.rank];
  const countsOf = (row) => data.sides[row.side].memory[row.rank] || [];

  // The first of a sorted list that `late` says yes to.
  function first(list, late) {
    let low = 0, high = list.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (late(list[middle])) high = middle; else low = middle + 1;
    }
    return low;
  }

  function look(from, to) {
    const wide = Math.min(Math.max(to - from, SHORTEST), data.length);
    view.from = Math.min(Math.max(from, 0), data.length - wide);
    view.to = view.from + wide;
    draw();
  }
  function zoom(factor, x) {
    const t = timeAt(Math.min(Math.max(x, LEFT), size.width - RIGHT));
    look(t - (t - view.from) * factor, t + (view.to - t) * factor);
  }

  // --- what is drawn ----------------------------------------------------------------------------

  function draw() {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; paint(); });
  }

  function paint() {
    const { width, height } = size, under = frame.scrollTop, right = width - RIGHT;
    drawn = 0;
    pen.fillStyle = ink.paper;
    pen.fillRect(0, 0, width, height);
    const seen = rows.filter((row) => row.y + row.high > under + TOP && row.y < under + height);
    for (const row of seen) {
      pen.fillStyle = ink.floor;
      pen.fillRect(LEFT, row.y - under, right - LEFT, row.memory ? row.high : row.bar);
    }
    ticks(height);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, right - LEFT, height);
    pen.clip();
    for (const row of seen) row.memory ? stack(row, row.y - under) : boxes(row, row.y - under);
    pointed(under, height);
    pen.restore();
    for (const row of seen) named(row, row.y - under);
    axis(width);
    const share = data.length / span();
    document.getElementById("shown").textContent =
      share > 1.0001 ? `${seconds(view.from)} to ${seconds(view.to)} (${digits(share)}×)` : `all ${seconds(data.length)}`;
    document.getElementById("reset").disabled = share <= 1.0001;
  }

  function boxes(row, y) {
    const events = eventsOf(row), last = { wide: -1, thin: -1 };
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.font = `${view.compact ? 9 : 12}px ${FONT}`;
    // An event may begin before the view and reach into it: go back by the longest there is.
    const begin = first(events, (e) => e[0] > view.from - data.longest);
    for (let n = begin; n < events.length && events[n][0] <= view.to; n++) {
      const [start, stop, style, action] = events[n];
      if (stop < view.from) continue;
      const [, fill, text, computes] = data.styles[style];
      const left = across(start), lane = computes ? "wide" : "thin";
      const wide = Math.max(across(stop) - left, computes ? 0.7 : 1.5);
      if (left + wide < last[lane] + 0.7) continue; // less than a pixel beside what is there
      last[lane] = left + wide;
      drawn += 1;
      pen.fillStyle = fill;
      const gap = Math.min(0.8, wide / 4);
      if (computes) pen.fillRect(left + gap / 2, y, wide - gap, row.bar);
      else pen.fillRect(left, y + row.bar + 2, wide, row.thin);
      if (!computes || wide < 10) continue;
      const { stage, kind, microBatch } = parsed(action);
      const said = [`${stage}${kind}${microBatch}`, `${kind}${microBatch}`, microBatch];
      const fits = said.slice(data.several ? 0 : 1).find((s) => wide >= s.length * (view.compact ? 5.6 : 7.4) + 3);
      if (!fits) continue;
      pen.fillStyle = text;
      const [a, b] = [Math.max(left, LEFT), Math.min(left + wide, size.width - RIGHT)];
      pen.fillText(fits, (a + b) / 2, y + row.bar / 2 + 0.5);
    }
  }

  function stack(row, y) {
    const counts = countsOf(row), floor = y + row.high, scale = row.high / (data.most || 1);
    const begin = Math.max(first(counts, (c) => c[0] > view.from) - 1, 0);
    const end = Math.min(first(counts, (c) => c[0] > view.to) + 1, counts.length);
    const steps = thinned(counts, begin, end);
    const base = steps.map(() => 0);
    data.kinds.forEach(([, fill], kind) => {
      pen.fillStyle = fill;
      pen.beginPath();
      const upper = steps.map((s, n) => base[n] + s.values[kind]);
      steps.forEach((s, n) => { pen.lineTo(s.x, floor - upper[n] * scale); pen.lineTo(s.until, floor - upper[n] * scale); });
      for (let n = steps.length - 1; n >= 0; n--) { pen.lineTo(steps[n].until, floor - base[n] * scale); pen.lineTo(steps[n].x, floor - base[n] * scale); }
      pen.fill();
      upper.forEach((value, n) => { base[n] = value; });
    });
    if (data.lined === null) return;
    const other = data.sides[data.lined].memory[row.rank] || [];
    pen.strokeStyle = ink.glow;
    pen.lineWidth = 1.4;
    pen.beginPath();
    other.forEach((c, n) => {
      const level = floor - c.slice(1).reduce((a, b) => a + b, 0) * scale;
      pen.lineTo(across(c[0]), level);
      pen.lineTo(n + 1 < other.length ? across(other[n + 1][0]) : size.width, level);
    });
    pen.stroke();
  }

  // Counts closer than half a pixel become one, the most of each kind, so that no peak is lost.
  function thinned(counts, begin, end) {
    const steps = [];
    for (let n = begin; n < end; n++) {
      const x = across(counts[n][0]), until = n + 1 < counts.length ? across(counts[n + 1][0]) : size.width;
      const last = steps[steps.length - 1];
      if (last && until - last.x < 0.5) {
        last.until = until;
        last.values = last.values.map((value, kind) => Math.max(value, counts[n][kind + 1]));
      } else steps.push({ x, until, values: counts[n].slice(1) });
    }
    return steps;
  }

  function named(row, y) {
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    const small = `${view.compact ? 9 : 10}px ${FONT}`, x = LEFT - 10;
    if (row.memory) {
      pen.font = small;
      pen.fillStyle = ink.soft;
      const peak = data.sides[row.side].peaks[row.rank];
      if (peak !== undefined) pen.fillText(`peak ${bytes(peak)}`, x, y + row.high / 2);
      return;
    }
    const about = data.ranks[row.rank], two = !view.compact && about && data.names.length === 1;
    if (data.names.length > 1) {
      pen.font = small;
      pen.fillStyle = ink.soft;
      pen.fillText(data.names[row.side], x, y + row.bar / 2);
    }
    if (row.side > 0) return;
    pen.font = `${view.compact ? 10 : 12}px ${FONT}`;
    pen.fillStyle = ink.ink;
    const beside = data.names.length > 1 ? LEFT - 85 : x;
    pen.fillText(`rank ${row.rank}`, beside, y + (two ? 7 : row.bar / 2));
    if (!two) return;
    pen.font = small;
    pen.fillStyle = ink.soft;
    pen.fillText(about, x, y + 20);
  }

  function tickStep(length, room) {
    const power = 10 ** Math.floor(Math.log10(length / 10)), many = Math.max(room / 90, 2);
    const step = [1, 2, 5, 10, 20].map((n) => n * power).find((s) => length / s <= many) || length;
    return data.whole ? Math.max(step, 1) : step;
  }
  function eachTick(call) {
    const [unit, name] = unitOf(view.to), step = tickStep(span() / unit, size.width - LEFT - RIGHT);
    for (let n = Math.ceil(view.from / unit / step - 1e-9); n * step * unit <= view.to * (1 + 1e-9); n++)
      call(across(n * step * unit), Number((n * step).toPrecision(9)), name);
  }
  function ticks(height) {
    pen.fillStyle = ink.grid;
    eachTick((x) => pen.fillRect(Math.round(x), TOP, 1, height));
  }
  function axis(width) {
    pen.fillStyle = ink.paper;
    pen.fillRect(0, 0, width, TOP);
    pen.fillStyle = ink.soft;
    pen.font = `11px ${FONT}`;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    eachTick((x, value, name) => pen.fillText(`${value} ${name}`, Math.min(x, width - 28), TOP / 2));
    pen.fillStyle = ink.edge;
    pen.fillRect(LEFT, TOP - 1, width - LEFT - RIGHT, 1);
  }

  // The pointer's line over all ranks, the part it marks, and what the box under it is joined to.
  function pointed(under, height) {
    if (pointer.part) {
      pen.globalAlpha = 0.18;
      pen.fillStyle = ink.glow;
      pen.fillRect(Math.min(...pointer.part), TOP, Math.abs(pointer.part[1] - pointer.part[0]), height);
      pen.globalAlpha = 1;
    }
    if (!pointer.at || pointer.grip) return;
    pen.fillStyle = ink.soft;
    pen.fillRect(pointer.at.x, TOP, 1, height);
    const hit = hitAt(pointer.at);
    if (!hit || hit.index === null) return;
    const same = parsed(eventsOf(hit.row)[hit.index][3]).microBatch;
    pen.strokeStyle = ink.glow;
    pen.lineWidth = 1.2;
    if (same !== "") for (const row of rows.filter((r) => !r.memory && r.side === hit.row.side)) outline(row, row.y - under, same, height);
    pen.lineWidth = 2.4;
    frameOf(hit.row, hit.index, under, pen.strokeRect.bind(pen));
    joined(hit, under);
  }
  function outline(row, y, microBatch, height) {
    if (y > height || y + row.high < TOP) return;
    const events = eventsOf(row);
    for (let n = first(events, (e) => e[0] > view.from - data.longest); n < events.length && events[n][0] <= view.to; n++)
      if (data.styles[events[n][2]][3] && parsed(events[n][3]).microBatch === microBatch) frameOf(row, n, row.y - y, pen.strokeRect.bind(pen));
  }
  function frameOf(row, index, under, call) {
    const [start, stop, style] = eventsOf(row)[index], computes = data.styles[style][3];
    const left = across(start), wide = Math.max(across(stop) - left, 1.5), y = row.y - under;
    return computes ? call(left, y, wide, row.bar) : call(left, y + row.bar + 2, wide, row.thin);
  }
  function joined(hit, under) {
    joins = [];
    const { events, arrows } = data.sides[hit.row.side], { rank } = hit.row;
    const work = (action) => action.replace(/[<>]\d+/, ""); // 2F0>3 sends what 2F0 made
    const mine = work(events[rank][hit.index][3]);
    const place = (rank, index) => {
      const row = rows.find((r) => !r.memory && r.rank === rank && r.side === hit.row.side);
      return frameOf(row, index, under, (x, y, wide, high) => ({ x, y: y + high / 2, end: x + wide }));
    };
    for (const [fromRank, from, toRank, to] of arrows) {
      const gives = fromRank === rank && work(events[rank][from][3]) === mine;
      if (!gives && !(toRank === rank && to === hit.index)) continue;
      joins.push([events[fromRank][from][3], events[toRank][to][3]]);
      const a = place(fromRank, from), b = place(toRank, to), bend = Math.max(18, Math.abs(b.x - a.end) / 2);
      pen.strokeStyle = ink.paper;
      for (const thick of [4, 1.8]) {
        pen.lineWidth = thick;
        pen.beginPath();
        pen.moveTo(a.end, a.y);
        pen.bezierCurveTo(a.end + bend, a.y, b.x - bend, b.y, b.x, b.y);
        pen.stroke();
        pen.strokeStyle = ink.glow;
      }
      pen.fillStyle = ink.glow;
      pen.beginPath();
      pen.moveTo(b.x + 1, b.y);
      pen.lineTo(b.x - 7, b.y - 4);
      pen.lineTo(b.x - 7, b.y + 4);
      pen.fill();
    }
  }

  // --- what is pointed at -----------------------------------------------------------------------

  function hitAt({ x, y }) {
    const down = y + frame.scrollTop, row = rows.find((r) => down >= r.y - 1 && down < r.y + r.high);
    if (!row || y < TOP || x < LEFT || x > size.width - RIGHT) return null;
    return { row, index: row.memory ? null : hitOf(row, x, down - row.y), t: timeAt(x) };
  }
  function hitOf(row, x, down) {
    const events = eventsOf(row), t = timeAt(x), near = (span() / size.width) * 2, wide = down < row.bar + 1;
    for (let n = first(events, (e) => e[0] > t + near) - 1; n >= 0 && events[n][0] >= t - data.longest - near; n--) {
      const [start, stop, style] = events[n];
      const slack = data.styles[style][3] ? 0 : near;
      if (data.styles[style][3] === wide && t >= start - slack && t <= stop + slack) return n;
    }
    return null;
  }

  const node = (tag, text, ...inside) => {
    const made = document.createElement(tag);
    if (text) made.textContent = text;
    made.append(...inside);
    return made;
  };
  function swatch(fill) {
    const made = node("i");
    made.style.background = fill;
    return made;
  }
  function show() {
    const hit = pointer.at && !pointer.grip && hitAt(pointer.at);
    tip.hidden = !hit;
    if (!hit) return;
    tip.replaceChildren(...(hit.index === null ? idle(hit) : told(hit)), ...live(hit));
    const at = chart.getBoundingClientRect(), { width, height } = tip.getBoundingClientRect();
    const x = at.left + pointer.at.x, y = at.top + pointer.at.y;
    tip.style.left = `${x + 16 + width > window.innerWidth ? Math.max(x - width - 12, 4) : x + 16}px`;
    tip.style.top = `${Math.max(Math.min(y + 14, window.innerHeight - height - 6), 4)}px`;
  }
  function idle({ row, t }) {
    const what = row.memory ? "live bytes" : "idle";
    return [node("b", `rank ${row.rank}: ${what}`), node("div", `at ${seconds(t)}`)];
  }
  function told({ row, index }) {
    const [start, stop, style, action] = eventsOf(row)[index], { stage, microBatch, way, peer, replica } = parsed(action);
    const kind = way ? `${way === ">" ? "send to" : "receive from"} stage ${peer}` : data.styles[style][0];
    const where = [`rank ${row.rank}`, `stage ${stage}`];
    if (microBatch !== "") where.push(`micro-batch ${microBatch}`);
    if (data.replicas) where.push(`replica ${replica}`);
    const lines = [node("b", action), ` ${kind}`, node("div", where.join(" · ")), node("div", `from ${seconds(start)}, lasts ${seconds(stop - start)}`)];
    const other = data.sides.length > 1 && data.sides[1 - row.side].events[row.rank].find((e) => e[3] === action);
    if (other) {
      const lasts = [stop - start, other[1] - other[0]], [before, after] = row.side ? lasts.reverse() : lasts;
      const change = before ? Math.round((after / before - 1) * 100) : 0;
      const by = `${data.names[1]} ${change > 0 ? "+" : ""}${change}%`;
      lines.push(node("div", `${data.names[1 - row.side]}: from ${seconds(other[0])}, lasts ${seconds(other[1] - other[0])} (${by})`));
    }
    return lines;
  }
  function live({ row, t }) {
    const counts = countsOf(row), count = counts[first(counts, (c) => c[0] > t) - 1];
    if (!count) return [];
    const line = (fill, name, value) => node("tr", "", node("td", "", ...(fill ? [swatch(fill)] : []), name), node("td", bytes(value)));
    const lines = data.kinds.map(([name, fill], n) => line(fill, name, count[n + 1]));
    lines.push(line("", "in all", count.slice(1).reduce((a, b) => a + b, 0)));
    return [node("table", "", ...lines)];
  }

  // --- what people do ---------------------------------------------------------------------------

  const spot = (event) => {
    const at = chart.getBoundingClientRect();
    return { x: event.clientX - at.left, y: event.clientY - at.top };
  };
  chart.addEventListener("wheel", (event) => {
    if (event.shiftKey && !event.deltaX) return; // scroll the ranks
    event.preventDefault();
    pointer.at = spot(event);
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) look(view.from + (event.deltaX / size.width) * span(), view.to + (event.deltaX / size.width) * span());
    else zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))), pointer.at.x);
    show();
  }, { passive: false });
  chart.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    chart.setPointerCapture(event.pointerId);
    const at = spot(event);
    if (event.shiftKey) pointer.part = [at.x, at.x];
    pointer.grip = { ...at, from: view.from, scroll: frame.scrollTop };
    chart.classList.add("moving");
    show();
  });
  chart.addEventListener("pointermove", (event) => {
    const at = (pointer.at = spot(event)), grip = pointer.grip;
    if (pointer.part) pointer.part[1] = at.x;
    else if (grip) {
      frame.scrollTop = grip.scroll + grip.y - at.y;
      const from = grip.from - ((at.x - grip.x) / (size.width - LEFT - RIGHT)) * span();
      look(from, from + span());
    }
    show();
    draw();
  });
  const letGo = () => {
    if (pointer.part && Math.abs(pointer.part[1] - pointer.part[0]) > 4) look(timeAt(Math.min(...pointer.part)), timeAt(Math.max(...pointer.part)));
    pointer.grip = pointer.part = null;
    chart.classList.remove("moving");
    draw();
  };
  chart.addEventListener("pointerup", letGo);
  chart.addEventListener("pointercancel", letGo);
  chart.addEventListener("pointerleave", () => { pointer.at = null; show(); draw(); });
  const all = () => look(0, data.length);
  chart.addEventListener("dblclick", all);
  document.getElementById("reset").addEventListener("click", all);
  const KEYS = {
    0: all, Home: all,
    "+": () => zoom(0.7, middle()), "=": () => zoom(0.7, middle()), "-": () => zoom(1 / 0.7, middle()),
    ArrowLeft: () => look(view.from - span() / 8, view.to - span() / 8),
    ArrowRight: () => look(view.from + span() / 8, view.to + span() / 8),
    ArrowUp: () => { frame.scrollTop -= 60; }, ArrowDown: () => { frame.scrollTop += 60; },
  };
  const middle = () => (LEFT + size.width - RIGHT) / 2;
  chart.addEventListener("keydown", (event) => {
    if (!KEYS[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  frame.addEventListener("scroll", () => { show(); draw(); });
  window.addEventListener("resize", layOut);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", layOut);
  for (const name of ["memory", "compact"]) {
    const box = document.getElementById(name);
    box.checked = view[name];
    box.addEventListener("change", () => { view[name] = box.checked; layOut(); });
  }
  document.getElementById("memory-switch").hidden = data.charted === null;

  const FONT = getComputedStyle(document.body).fontFamily;
  const entry = ([fill, name]) => node("li", "", swatch(fill), name);
  const legend = document.getElementById("legend");
  legend.append(...data.legend.map(entry));
  if (data.kinds.length) {
    const title = node("li", "live bytes:");
    title.className = "title";
    legend.append(title, ...data.kinds.map(([name, fill]) => entry([fill, name])));
  }
  layOut();

  // For whoever drives the page from outside: where a box is, and what is in view.
  window.gems = {
    view, data,
    get drawn() { return drawn; },
    get rows() { return rows; },
    get joins() { return joins; },
    paint,
    place(rank, action, side = 0) {
      const row = rows.find((r) => !r.memory && r.rank === rank && r.side === side), at = chart.getBoundingClientRect();
      const index = eventsOf(row).findIndex((e) => e[3] === action);
      return frameOf(row, index, frame.scrollTop, (x, y, wide, high) => ({ x: at.left + x + wide / 2, y: at.top + y + high / 2, wide, high }));
    },
  };
})();
