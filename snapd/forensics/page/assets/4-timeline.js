// Every attempt is a bar: its colour says how it ended, its shades where the time went.
// Bars are written pixel by pixel, so that the cost is bounded by the picture and not by the log.

const SHADES = [0.32, 1, 0.62]; // reserved, transferring, ready
const TIMELINE_MAX = 280, REFUSED_STRIP = 16, BAR_MAX = 18, LABELS_MAX = 400;

/** Device pixels of a rectangle of the page. */
class Raster {
  constructor(frame, left, top, width, height) {
    this.ratio = frame.ratio;
    this.left = Math.round(left * frame.ratio);
    this.top = Math.round(top * frame.ratio);
    this.width = Math.max(1, Math.round(width * frame.ratio));
    this.height = Math.max(1, Math.round(height * frame.ratio));
    this.image = frame.ctx.createImageData(this.width, this.height);
    this.pixels = new Uint32Array(this.image.data.buffer);
  }
  /** Fill [x0, x1) x [y0, y1), in device pixels of this raster; at least one pixel. */
  fill(x0, x1, y0, y1, colour) {
    const left = Math.max(0, Math.floor(x0)), right = Math.min(this.width, Math.max(Math.floor(x0) + 1, Math.floor(x1)));
    if (right <= left) return;
    const top = Math.max(0, Math.floor(y0)), bottom = Math.min(this.height, Math.max(Math.floor(y0) + 1, Math.floor(y1)));
    const { pixels, width } = this;
    for (let at = top * width + left, end = bottom * width, span = right - left; at < end; at += width) {
      // Most are a pixel or two wide: calling fill for these takes longer than doing it.
      if (span > 8) pixels.fill(colour, at, at + span);
      else for (let k = 0; k < span; k++) pixels[at + k] = colour;
    }
  }
  show(ctx) { ctx.putImageData(this.image, this.left, this.top); }
}

class Timeline extends Pane {
  constructor(model, host) {
    const strip = model.page.strip ? REFUSED_STRIP : 0;
    const height = Math.min(TIMELINE_MAX, Math.max(3, model.lanes.count) * BAR_MAX + strip + AXIS + 4);
    super(model, host, { label: "Attempts over time, one bar each", height });
  }

  /** Lanes that are used inside the window get a row each, in their order. */
  rows() {
    const { model } = this, { lane, count } = model.lanes;
    const used = new Uint8Array(count), rowOf = new Int32Array(count);
    for (let i = 0; i < model.n; i++) if (lane[i] >= 0 && model.isIn(i)) used[lane[i]] = 1;
    let rows = 0;
    for (let l = 0; l < count; l++) if (used[l]) rowOf[l] = rows++;
    return { rowOf, rows };
  }

  /** The rows inside the window: those that do not pass the filter, those that ended OK, all others. */
  layers() {
    const { model } = this, layers = [0, 1, 2].map(() => new Uint32Array(model.n)), counts = [0, 0, 0];
    for (let i = 0; i < model.n; i++) {
      if (!model.isIn(i)) continue;
      const layer = !model.passes[i] ? 0 : model.reason[i] === model.ok ? 1 : 2;
      layers[layer][counts[layer]++] = i;
    }
    return layers.map((rows, layer) => rows.subarray(0, counts[layer]));
  }

  paint(ctx, frame) {
    const { model } = this, { lane } = model.lanes;
    const hasRefused = model.page.strip !== "";
    const height = this.plotHeight - (hasRefused ? REFUSED_STRIP : 0) - 2;
    const { rowOf, rows } = this.rows();
    const fits = height / Math.max(rows, 1);
    const pitch = fits >= 3 ? Math.min(BAR_MAX, Math.floor(fits)) : fits;
    const raster = new Raster(frame, GUTTER, 0, this.width - GUTTER - RIGHT, this.plotHeight - 1);
    const ratio = frame.ratio, [a, b] = this.range, scale = raster.width / (b - a);
    const ground = cssVar("--panel");
    const inks = model.colours.map((c) => SHADES.map((shade) => pixel(c, ground, shade)));
    const faint = model.colours.map((c) => pixel(c, ground, 0.13));
    const barHeight = pitch >= 3 ? pitch - 1 : pitch;
    this.geometry = { rowOf, rows, pitch, height, hasRefused };
    const stripTop = (this.plotHeight - REFUSED_STRIP + 3) * ratio, stripBottom = (this.plotHeight - 3) * ratio;
    // First what does not pass the filter, then ok, then the rest: a failure is never hidden under an ok.
    this.layers().forEach((layerRows, layer) => {
      for (const i of layerRows) {
        const passes = layer > 0, reason = model.reason[i];
        const x = (model.start[i] - a) * scale;
        if (lane[i] < 0) { raster.fill(x - 0.5, x + Math.max(1, ratio), stripTop, stripBottom, passes ? inks[reason][1] : faint[reason]); continue; }
        const y0 = (rowOf[lane[i]] * pitch + 1) * ratio, y1 = y0 + barHeight * ratio;
        const x3 = x + (model.total[i] / 1000) * scale;
        if (!passes) { raster.fill(x, x3, y0, y1, faint[reason]); continue; }
        const x1 = x + (model.reserved[i] / 1000) * scale, x2 = x1 + (model.transferring[i] / 1000) * scale;
        // The weakest shade first: where there is no room for all, the transfer is what remains.
        raster.fill(x, Math.max(x3, x + (layer === 2 ? 1.5 * ratio : 1)), y0, y1, inks[reason][layer === 2 ? 1 : 2]);
        if (x3 - x < 1.5) continue;
        raster.fill(x2, x3, y0, y1, inks[reason][2]);
        if (x1 - x >= 1) raster.fill(x, x1, y0, y1, inks[reason][0]);
        if (x2 - x1 > 0) raster.fill(x1, x2, y0, y1, inks[reason][1]);
      }
    });
    raster.show(ctx);
    this.paintLabels(ctx, pitch);
    this.paintSelected(ctx);
    if (hasRefused) this.yLabel(ctx, model.page.strip, this.plotHeight - REFUSED_STRIP / 2);
    if (rows) this.yLabel(ctx, `${formatCount(rows)} lane${rows === 1 ? "" : "s"}`, Math.min(height / 2, Math.max(8, (rows * pitch) / 2)));
    else { ctx.fillStyle = cssVar("--ink-3"); ctx.fillText("no attempt was under way here", GUTTER + 10, 20); }
  }

  paintLabels(ctx, pitch) {
    if (pitch < 13) return;
    const { model } = this, { lane } = model.lanes, { rowOf } = this.geometry;
    const ground = cssVar("--panel");
    const inks = model.colours.map((c) => SHADES.map((shade) => (lightness(c, ground, shade) > 0.55 ? "#14171a" : "#ffffff")));
    ctx.textBaseline = "middle";
    let labels = 0;
    for (let i = 0; i < model.n && labels < LABELS_MAX; i++) {
      if (lane[i] < 0 || !model.passes[i] || !model.isIn(i)) continue;
      const x = Math.max(this.x(model.start[i]), GUTTER), right = Math.min(this.x(model.end[i]), this.width - RIGHT);
      if (right - x < 46) continue;
      labels++;
      const y = rowOf[lane[i]] * pitch + 1;
      const into = (this.t(x + 5) - model.start[i]) * 1000 - model.reserved[i];
      ctx.fillStyle = inks[model.reason[i]][into < 0 ? 0 : into < model.transferring[i] ? 1 : 2];
      ctx.save();
      ctx.beginPath(); ctx.rect(x, y, right - x - 3, pitch); ctx.clip();
      ctx.fillText(visible(model.sessions[model.session[i]].slice(0, 80)), x + 5, y + pitch / 2);
      ctx.restore();
    }
  }

  paintSelected(ctx) {
    const { model } = this, i = model.selected;
    if (i < 0 || !model.isIn(i)) return;
    const lane = model.lanes.lane[i], { rowOf, pitch } = this.geometry;
    const y = lane < 0 ? this.plotHeight - REFUSED_STRIP + 2 : rowOf[lane] * pitch;
    const x = Math.max(this.x(model.start[i]), GUTTER), right = Math.min(this.x(model.end[i]), this.width - RIGHT);
    ctx.strokeStyle = cssVar("--ink");
    ctx.lineWidth = 1.5;
    ctx.strokeRect(x - 2, y - 0.5, Math.max(right - x, 1) + 4, (lane < 0 ? REFUSED_STRIP - 4 : Math.max(pitch, 3)) + 2);
    ctx.lineWidth = 1;
  }

  /** The attempt at a place, or the nearest within a few pixels; -1: none. Failures before oks. */
  at(x, y) {
    const { model, geometry } = this;
    if (!geometry || x < GUTTER - 4 || y > this.plotHeight) return -1;
    const { lane } = model.lanes, t = this.t(x), near = 4 * (this.t(x + 1) - t);
    const refused = geometry.hasRefused && y > this.plotHeight - REFUSED_STRIP;
    const row = (y - 1) / geometry.pitch, slack = Math.max(0, (3 / geometry.pitch - 1) / 2);
    let best = -1, bestScore = Infinity;
    for (let i = 0; i < model.n; i++) {
      if (!model.passes[i] || model.start[i] > t + near || model.end[i] < t - near) continue;
      if (refused !== (lane[i] < 0)) continue;
      if (!refused) { const off = row - geometry.rowOf[lane[i]]; if (off < -slack || off >= 1 + slack) continue; }
      const away = Math.max(0, model.start[i] - t, t - model.end[i]);
      const score = away / near + (model.reason[i] === model.ok ? 0.5 : 0);
      if (score < bestScore) { best = i; bestScore = score; }
    }
    return best;
  }

  hover(x, y, event) {
    const i = this.at(x, y);
    this.host.classList.toggle("hit", i >= 0);
    if (i < 0) tip.hide(); else tip.show(event.clientX, event.clientY, ...attemptLines(this.model, i));
  }
  click(x, y) { const i = this.at(x, y); if (i >= 0) this.model.openStory(i); }
}

/** What is said about an attempt in passing. */
function attemptLines(model, i) {
  const times = [["reserved", model.reserved[i]], ["transferring", model.transferring[i]], ["ready", model.ready[i]]].filter(([, ms]) => ms > 0);
  return [
    h("b", {}, visible(model.sessions[model.session[i]])),
    h("div", { class: "tag" }, swatch(model.colours[model.reason[i]]), visible(model.reasons[model.reason[i]])),
    h("div", { class: "quiet" }, formatTime(model.page.begin_unix_s + model.start[i], 0.001)),
    ...times.map(([name, ms]) => h("div", { class: "row" }, h("span", {}, name), h("span", {}, formatMs(ms)))),
    h("div", { class: "row" }, h("span", {}, "bytes"), h("span", {}, formatBytes(model.bytes[i]))),
  ];
}
