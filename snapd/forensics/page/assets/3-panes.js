// Panes share the time on their x axis, and the mouse and keys that move it.

const GUTTER = 64, RIGHT = 12, AXIS = 20;

const tip = {
  show(x, y, ...children) {
    const box = $("tip");
    box.replaceChildren(...children.filter(Boolean));
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    const left = x + 14 + width > innerWidth - 8 ? x - 14 - width : x + 14;
    const top = y + 14 + height > innerHeight - 8 ? y - 14 - height : y + 14;
    box.style.transform = `translate(${Math.max(4, left)}px, ${Math.max(4, top)}px)`;
  },
  hide() { $("tip").hidden = true; },
};

/** A canvas that is as sharp as the screen. `draw(ctx, width, height)` draws in CSS pixels. */
class Canvas {
  constructor(host, label, heightPx) {
    this.element = h("canvas", { role: "img", "aria-label": label });
    this.heightPx = heightPx;
    host.append(this.element);
  }
  begin() {
    const width = Math.max(1, this.element.clientWidth), height = this.heightPx;
    const ratio = Math.min(devicePixelRatio || 1, 2);
    const w = Math.round(width * ratio), hh = Math.round(height * ratio);
    if (this.element.width !== w || this.element.height !== hh) { this.element.width = w; this.element.height = hh; }
    const ctx = this.element.getContext("2d");
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    ctx.clearRect(0, 0, width, height);
    ctx.font = "11px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
    ctx.lineWidth = 1;
    return { ctx, width, height, ratio };
  }
}

class Pane {
  constructor(model, host, { label, height, axis = true }) {
    Object.assign(this, { model, host, height, axis });
    host.style.height = `${height}px`;
    host.tabIndex = 0;
    host.setAttribute("role", "group");
    host.setAttribute("aria-label", `${label}. Arrow keys pan, plus and minus zoom, 0 shows everything.`);
    this.canvas = new Canvas(host, label, height);
    this.cross = h("div", { class: "cross", hidden: true });
    this.brush = h("div", { class: "brush", hidden: true });
    host.append(this.cross, this.brush);
    Pane.all.push(this);
    this.listen();
  }
  get plotHeight() { return this.height - (this.axis ? AXIS : 0); }
  get range() { return [this.model.t0, this.model.t1]; }
  x(t) { const [a, b] = this.range; return GUTTER + ((t - a) / (b - a)) * (this.width - GUTTER - RIGHT); }
  t(x) { const [a, b] = this.range; return a + ((x - GUTTER) / (this.width - GUTTER - RIGHT)) * (b - a); }

  draw() {
    const frame = this.canvas.begin();
    this.width = frame.width;
    this.paint(frame.ctx, frame);
    this.paintTime(frame.ctx);
  }

  /** Ticks, their labels, and a mark at every start of the daemon. */
  paintTime(ctx) {
    const [a, b] = this.range, base = this.model.page.begin_unix_s;
    const step = stepFor(b - a, Math.max(2, (this.width - GUTTER - RIGHT) / 110));
    const shift = zoneShiftS(base + a);
    ctx.textBaseline = "alphabetic";
    ctx.textAlign = "left";
    for (const restart of this.model.page.epochs.slice(1)) {
      if (restart.start_s < a || restart.start_s > b) continue;
      const x = Math.round(this.x(restart.start_s)) + 0.5;
      ctx.strokeStyle = cssVar("--bad");
      ctx.setLineDash([4, 3]);
      ctx.beginPath(); ctx.moveTo(x, 0); ctx.lineTo(x, this.plotHeight); ctx.stroke();
      ctx.setLineDash([]);
    }
    if (!this.axis) return;
    ctx.fillStyle = cssVar("--ink-3");
    ctx.strokeStyle = cssVar("--line");
    ctx.beginPath(); ctx.moveTo(GUTTER, this.plotHeight + 0.5); ctx.lineTo(this.width - RIGHT, this.plotHeight + 0.5); ctx.stroke();
    let day = "";
    for (let tick = Math.ceil((base + a + shift) / step) * step - shift; tick <= base + b; tick += step) {
      const x = Math.round(this.x(tick - base)) + 0.5, date = formatDate(tick);
      ctx.beginPath(); ctx.moveTo(x, this.plotHeight); ctx.lineTo(x, this.plotHeight + 4); ctx.stroke();
      const label = step >= 86400 ? date.slice(5) : date !== day ? `${date.slice(5)} ${formatClock(tick, step)}` : formatClock(tick, step);
      if (x + ctx.measureText(label).width < this.width) ctx.fillText(label, x + 3, this.height - 6);
      day = date;
    }
  }

  yLabel(ctx, text, y) {
    ctx.fillStyle = cssVar("--ink-3");
    ctx.textAlign = "right";
    ctx.textBaseline = "middle";
    ctx.fillText(text, GUTTER - 7, y);
    ctx.textAlign = "left";
  }

  // --- mouse and keys ------------------------------------------------------------------------

  listen() {
    const { host, model } = this;
    const place = (event) => { const box = host.getBoundingClientRect(); return [event.clientX - box.left - host.clientLeft, event.clientY - box.top - host.clientTop]; };
    let drag = null;
    host.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      const [x] = place(event);
      host.setPointerCapture(event.pointerId);
      drag = { x, moved: false, pan: event.shiftKey, t0: model.t0, t1: model.t1, ...this.grab(x) };
      tip.hide();
    });
    host.addEventListener("pointermove", (event) => {
      const [x, y] = place(event);
      if (!drag) { Pane.crossAt(this.t(x), this, x); this.hover(x, y, event); return; }
      if (Math.abs(x - drag.x) > 3) drag.moved = true;
      if (!drag.moved) return;
      const by = this.t(x) - this.t(drag.x);
      if (drag.move) drag.move(by);
      else if (drag.pan) { const scale = (drag.t1 - drag.t0) / (this.width - GUTTER - RIGHT); model.setWindow(drag.t0 - (x - drag.x) * scale, drag.t1 - (x - drag.x) * scale); }
      else {
        const [from, to] = [Math.min(x, drag.x), Math.max(x, drag.x)].map((edge) => Math.min(Math.max(edge, GUTTER), this.width - RIGHT));
        this.brush.hidden = false;
        this.brush.style.transform = `translateX(${from}px)`;
        this.brush.style.width = `${to - from}px`;
      }
    });
    const up = (event, cancelled) => {
      if (!drag) return;
      const [x, y] = place(event), was = drag;
      drag = null;
      this.brush.hidden = true;
      if (cancelled) return;
      if (!was.moved) { this.click(x, y); return; }
      if (was.move || was.pan) return;
      const [a, b] = [this.t(was.x), this.t(x)].sort((p, q) => p - q);
      model.setWindow(Math.max(a, this.range[0]), Math.min(b, this.range[1]));
    };
    host.addEventListener("pointerup", (event) => up(event, false));
    host.addEventListener("pointercancel", (event) => up(event, true));
    host.addEventListener("pointerleave", () => { Pane.crossAt(NaN); tip.hide(); });
    host.addEventListener("dblclick", () => model.setWindow(0, model.spanS));
    host.addEventListener("wheel", (event) => {
      const [x] = place(event);
      if (event.ctrlKey || event.metaKey) { event.preventDefault(); model.zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.01), Math.min(Math.max(this.t(x), model.t0), model.t1)); }
      else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) { event.preventDefault(); model.pan((event.deltaX || event.deltaY) / this.width); }
    }, { passive: false });
    host.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const act = { ArrowLeft: () => model.pan(-0.15), ArrowRight: () => model.pan(0.15), "+": () => model.zoom(0.6), "=": () => model.zoom(0.6), "-": () => model.zoom(1 / 0.6), 0: () => model.setWindow(0, model.spanS), Home: () => model.setWindow(0, model.spanS) }[event.key];
      if (act) { act(); event.preventDefault(); }
    });
  }
  grab() { return {}; }
  hover() {}
  click() {}

  /** Show where in time the mouse is, in every pane. */
  static crossAt(t) {
    for (const pane of Pane.all) {
      const [a, b] = pane.range;
      pane.cross.hidden = !(t >= a && t <= b) || !pane.width;
      if (!pane.cross.hidden) pane.cross.style.transform = `translateX(${pane.x(t)}px)`;
    }
  }
}
Pane.all = [];

/** Bars of outcomes, stacked by reason: ok at the bottom. */
function paintStacks(ctx, model, bins, { x0, x1, top, bottom, most, alpha }) {
  const barWidth = x1(0) - x0(0);
  const gap = barWidth > 5 ? 1 : 0;
  for (let bin = 0; bin < bins.count; bin++) {
    let y = bottom;
    for (const reason of model.stackOrder) {
      const count = bins.at(reason, bin);
      if (!count) continue;
      const height = (count / most) * (bottom - top);
      ctx.globalAlpha = alpha ? alpha(reason) : 1;
      ctx.fillStyle = model.colours[reason];
      const left = Math.max(x0(bin), GUTTER);
      // At least half a pixel: one failure among thousands is still to be seen.
      const drawn = Math.max(height, 0.6);
      ctx.fillRect(left, y - drawn, Math.max(x1(bin) - left - gap, 0.7), drawn);
      y -= height;
    }
  }
  ctx.globalAlpha = 1;
}

class Overview extends Pane {
  constructor(model, host) {
    super(model, host, { label: "All of the log: drag the window or its edges", height: 62 });
    this.shades = [h("div", { class: "shade" }), h("div", { class: "shade" })];
    this.grips = [h("div", { class: "grip" }), h("div", { class: "grip" })];
    host.append(...this.shades, ...this.grips);
  }
  get range() { return [0, this.model.spanS]; }
  paint(ctx) {
    const { model } = this, page = model.page, n = page.bin_count;
    const at = (reason, bin) => page.columns.bins[reason * n + bin];
    let most = 1;
    for (let bin = 0; bin < n; bin++) { let sum = 0; for (const r of model.stackOrder) sum += at(r, bin); most = Math.max(most, sum); }
    const width = (this.width - GUTTER - RIGHT) / n;
    paintStacks(ctx, model, { count: n, at }, { x0: (i) => GUTTER + i * width, x1: (i) => GUTTER + (i + 1) * width, top: 4, bottom: this.plotHeight, most });
    const left = this.x(model.t0), right = this.x(model.t1), bounds = [[GUTTER, left], [right, this.width - RIGHT]];
    this.shades.forEach((shade, i) => { shade.style.left = `${bounds[i][0]}px`; shade.style.width = `${Math.max(0, bounds[i][1] - bounds[i][0])}px`; });
    this.grips.forEach((grip, i) => { grip.hidden = model.isFull; grip.style.left = `${i ? right : left}px`; });
    this.yLabel(ctx, "all", this.plotHeight / 2);
  }
  part(x) {
    const { model } = this, left = this.x(model.t0), right = this.x(model.t1);
    if (model.isFull) return "";
    if (Math.abs(x - left) < 6) return "left";
    if (Math.abs(x - right) < 6) return "right";
    return x > left && x < right ? "window" : "";
  }
  grab(x) {
    const { model } = this, { t0, t1 } = model, part = this.part(x);
    const moves = { left: (by) => model.setWindow(Math.min(t0 + by, t1), t1), right: (by) => model.setWindow(t0, Math.max(t1 + by, t0)), window: (by) => model.setWindow(t0 + by, t1 + by) };
    return part ? { move: moves[part] } : {};
  }
  hover(x) {
    const part = this.part(x);
    this.host.classList.toggle("over-window", part === "window");
    this.host.classList.toggle("over-edge", part === "left" || part === "right");
  }
}

class Outcomes extends Pane {
  constructor(model, host) { super(model, host, { label: "Outcomes over time, stacked by reason", height: 150 }); }
  paint(ctx) {
    const { model } = this, [a, b] = this.range, base = model.page.begin_unix_s;
    const step = stepFor(b - a, Math.min(160, (this.width - GUTTER - RIGHT) / 5)), shift = zoneShiftS(base + a);
    const first = Math.floor((base + a + shift) / step) * step - shift - base, count = Math.ceil((b - first) / step);
    const sums = new Float64Array(count * model.reasons.length), totals = new Float64Array(count);
    for (let i = 0; i < model.n; i++) {
      const t = model.end[i];
      if (!model.passes[i] || t < a || t > b || model.reason[i] === model.open) continue;
      const bin = Math.min(count - 1, Math.floor((t - first) / step));
      sums[model.reason[i] * count + bin] += model.weight[model.reason[i]];
      totals[bin] += model.weight[model.reason[i]];
    }
    const most = Math.max(1, ...totals), top = 8, bottom = this.plotHeight;
    this.bins = { first, step, count, sums, totals };
    const marks = niceMarks(most);
    for (const mark of marks) {
      const y = Math.round(bottom - (mark / most) * (bottom - top)) + 0.5;
      ctx.strokeStyle = cssVar("--line-2");
      ctx.beginPath(); ctx.moveTo(GUTTER, y); ctx.lineTo(this.width - RIGHT, y); ctx.stroke();
      this.yLabel(ctx, figures(mark), y);
    }
    ctx.save();
    ctx.beginPath(); ctx.rect(GUTTER, 0, this.width - GUTTER - RIGHT, this.height); ctx.clip();
    paintStacks(ctx, model, { count, at: (r, bin) => sums[r * count + bin] }, { x0: (i) => this.x(first + i * step), x1: (i) => this.x(first + (i + 1) * step), top, bottom, most });
    ctx.restore();
    $("outcomes-scope").textContent = `by when they ended, each bar ${formatMs(step * 1000)}`;
  }
  hover(x, y, event) {
    const { bins, model } = this;
    const bin = bins ? Math.floor((this.t(x) - bins.first) / bins.step) : -1;
    if (bin < 0 || bin >= bins.count || x < GUTTER) { tip.hide(); return; }
    const at = model.page.begin_unix_s + bins.first + bin * bins.step;
    const rows = model.stackOrder.filter((r) => bins.sums[r * bins.count + bin] > 0).reverse();
    tip.show(event.clientX, event.clientY, h("b", {}, `${formatTime(at, bins.step)}, ${formatMs(bins.step * 1000)}`),
      ...(rows.length ? rows : []).map((r) => h("div", { class: "row" }, h("span", { class: "tag" }, swatch(model.colours[r]), visible(model.reasons[r])), h("span", {}, (model.isSampled ? "≈\u202f" : "") + formatCount(bins.sums[r * bins.count + bin])))),
      rows.length ? null : h("div", { class: "quiet" }, "nothing ended"));
  }
}

function niceMarks(most) {
  const step = [1, 2, 5].flatMap((m) => Array.from({ length: 12 }, (_, e) => m * 10 ** e)).sort((p, q) => p - q).find((s) => most / s <= 4);
  return Array.from({ length: Math.floor(most / step) }, (_, i) => (i + 1) * step);
}

function swatch(colour) { const s = h("span", { class: "swatch" }); s.style.background = colour; return s; }
