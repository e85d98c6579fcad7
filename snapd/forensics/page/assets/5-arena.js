// What each arena held: addresses upwards, time to the right. Below it how much, and the largest hole.

class ArenaPane extends Pane {
  constructor(model, host, arena) {
    super(model, host, { label: `Arena of rank ${arena.rank}: live and quarantined bytes by address, over time`, height: 170, axis: false });
    this.arena = arena;
    const c = model.page.columns, prefix = `arena${arena.index}_`;
    this.cells = { live: c[prefix + "live"], quarantined: c[prefix + "quarantined"] };
    this.boxes = arena.has_boxes ? { t0: c[prefix + "t0"], t1: c[prefix + "t1"], low: c[prefix + "low"], high: c[prefix + "high"], kind: c[prefix + "kind"], row: c[prefix + "row"] } : null;
  }
  /** Boxes are exact, the raster is dense: it is for logs, and windows, where boxes are less than pixels. */
  get drawsBoxes() {
    const { model, boxes } = this;
    return boxes !== null && (boxes.t0.length <= 4000 || (model.t1 - model.t0) < model.spanS * 0.5);
  }
  paint(ctx, frame) {
    const { arena } = this, top = 4, height = this.height - 8;
    const raster = new Raster(frame, GUTTER, top, this.width - GUTTER - RIGHT, height);
    raster.pixels.fill(pixel(cssVar("--panel"), cssVar("--panel")));
    if (this.drawsBoxes) this.paintBoxes(raster); else this.paintCells(raster);
    raster.show(ctx);
    this.yLabel(ctx, formatBytes(arena.size_bytes), top + 6);
    this.yLabel(ctx, "0", top + height - 6);
    this.paintSelected(ctx, top, height);
  }
  paintBoxes(raster) {
    const { boxes, model } = this, [a, b] = this.range, scale = raster.width / (b - a), H = raster.height;
    const ground = cssVar("--panel"), inks = [pixel(cssVar("--live"), ground), pixel(cssVar("--quarantined"), ground)];
    const faint = [pixel(cssVar("--live"), ground, 0.18), pixel(cssVar("--quarantined"), ground, 0.18)];
    const edges = [pixel(cssVar("--live"), ground, 0.55), pixel(cssVar("--quarantined"), ground, 0.55)];
    for (let i = 0; i < boxes.t0.length; i++) {
      if (boxes.t1[i] < a || boxes.t0[i] > b) continue;
      const x0 = (boxes.t0[i] - a) * scale, x1 = (boxes.t1[i] - a) * scale, y0 = (1 - boxes.high[i]) * H, y1 = (1 - boxes.low[i]) * H;
      const row = boxes.row[i], dim = model.isFiltered && (row >= model.n || !model.passes[row]);
      raster.fill(x0, x1, y0, y1, (dim ? faint : inks)[boxes.kind[i]]);
      // A seam tells neighbours apart.
      if (!dim && x1 - x0 > 6 && y1 - y0 > 4) { raster.fill(x0, x0 + 1, y0, y1, edges[boxes.kind[i]]); raster.fill(x0, x1, y0, y0 + 1, edges[boxes.kind[i]]); }
    }
  }
  paintCells(raster) {
    const { arena, cells, model } = this, { columns, rows } = arena, [a, b] = this.range;
    const ground = rgb(cssVar("--panel")), live = rgb(cssVar("--live")), quarantined = rgb(cssVar("--quarantined"));
    const width = raster.width, bytes = new Uint8Array(raster.image.data.buffer);
    const column = Int32Array.from({ length: width }, (_, x) => Math.floor(((a + ((x + 0.5) / width) * (b - a)) / model.spanS) * columns));
    for (let y = 0; y < raster.height; y++) {
      const row = Math.min(rows - 1, Math.floor((1 - (y + 0.5) / raster.height) * rows));
      for (let x = 0; x < width; x++) {
        if (column[x] < 0 || column[x] >= columns) continue;
        const at = row * columns + column[x], l = cells.live[at] / 255, q = cells.quarantined[at] / 255;
        if (l === 0 && q === 0) continue;
        const g = Math.max(0, 1 - l - q), o = (y * width + x) * 4;
        for (let c = 0; c < 3; c++) bytes[o + c] = ground[c] * g + live[c] * l + quarantined[c] * q;
      }
    }
  }
  paintSelected(ctx, top, height) {
    const { boxes, model } = this;
    if (!boxes || model.selected < 0) return;
    ctx.strokeStyle = cssVar("--ink");
    ctx.lineWidth = 1.5;
    for (let i = 0; i < boxes.t0.length; i++) {
      if (boxes.row[i] !== model.selected || boxes.t1[i] < model.t0 || boxes.t0[i] > model.t1) continue;
      const x0 = Math.max(GUTTER, this.x(boxes.t0[i])), x1 = Math.min(this.width - RIGHT, this.x(boxes.t1[i]));
      ctx.strokeRect(x0, top + (1 - boxes.high[i]) * height, Math.max(2, x1 - x0), Math.max(2, (boxes.high[i] - boxes.low[i]) * height));
    }
    ctx.lineWidth = 1;
  }
  /** The box at a place, or the nearest within two pixels: many are no higher than one. */
  at(x, y) {
    const { boxes } = this;
    if (!boxes || x < GUTTER) return -1;
    const height = this.height - 8, t = this.t(x), second = this.t(x + 1) - t, address = 1 - (y + 0.5 - 4) / height;
    let best = -1, bestAway = 2;
    for (let i = boxes.t0.length - 1; i >= 0; i--) {
      const aside = Math.max(boxes.t0[i] - t, t - boxes.t1[i]) / second;
      if (aside > bestAway) continue;
      const away = Math.max(0, aside, (boxes.low[i] - address) * height, (address - boxes.high[i]) * height);
      if (away < bestAway) { best = i; bestAway = away; }
    }
    return best;
  }
  hover(x, y, event) {
    const i = this.at(x, y), { boxes, model, arena } = this;
    this.host.classList.toggle("hit", i >= 0);
    if (i < 0) { tip.hide(); return; }
    const row = boxes.row[i], size = (boxes.high[i] - boxes.low[i]) * arena.size_bytes;
    tip.show(event.clientX, event.clientY,
      h("div", { class: "row" }, h("span", { class: "tag" }, swatch(cssVar(boxes.kind[i] ? "--quarantined" : "--live")), boxes.kind[i] ? "quarantined" : "live"), h("span", {}, `${formatMs((boxes.t1[i] - boxes.t0[i]) * 1000)}`)),
      h("div", { class: "quiet" }, `about ${formatBytes(size)} at ${formatBytes(boxes.low[i] * arena.size_bytes)}`),
      ...(row < model.n ? attemptLines(model, row) : []));
  }
  click(x, y) { const i = this.at(x, y); if (i >= 0 && this.boxes.row[i] < this.model.n) this.model.openStory(this.boxes.row[i]); }
}

class OccupancyPane extends Pane {
  constructor(model, host, arena, axis) {
    super(model, host, { label: `Arena of rank ${arena.rank}: live and quarantined bytes and the largest hole, over time`, height: axis ? 84 : 64, axis });
    this.arena = arena;
    const c = model.page.columns, prefix = `arena${arena.index}_`;
    this.at_s = c[prefix + "at_s"];
    this.live = c[prefix + "live_share"];
    this.quarantined = c[prefix + "quarantined_share"];
    this.hole = c[prefix + "hole_share"];
  }
  paint(ctx) {
    const { at_s, live, quarantined, hole } = this, n = at_s.length, top = 5, bottom = this.plotHeight - 1;
    const y = (share) => bottom - share * (bottom - top);
    const [a, b] = this.range;
    let from = 0, to = n;
    while (from + 1 < n && at_s[from + 1] < a) from++;
    while (to > from + 1 && at_s[to - 2] > b) to--;
    ctx.save();
    ctx.beginPath(); ctx.rect(GUTTER, 0, this.width - GUTTER - RIGHT, this.height); ctx.clip();
    const area = (low, high, colour) => {
      ctx.fillStyle = colour;
      ctx.beginPath();
      for (let i = from; i < to; i++) { const x = this.x(at_s[i]); if (i > from) ctx.lineTo(x, y(high(i - 1))); ctx.lineTo(x, y(high(i))); }
      for (let i = to - 1; i >= from; i--) { const x = this.x(at_s[i]); ctx.lineTo(x, y(low(i))); if (i > from) ctx.lineTo(x, y(low(i - 1))); }
      ctx.fill();
    };
    if (n) {
      area(() => 0, (i) => live[i], cssVar("--live"));
      area((i) => live[i], (i) => live[i] + quarantined[i], cssVar("--quarantined"));
      ctx.strokeStyle = cssVar("--hole");
      ctx.lineWidth = 1.2;
      ctx.beginPath();
      // Not a number: there was no arena, or the log does not tell how large it was.
      for (let i = from; i < to; i++) {
        const x = this.x(at_s[i]), before = i > from ? hole[i - 1] : NaN;
        if (!isNaN(before)) ctx.lineTo(x, y(before));
        if (isNaN(hole[i])) continue;
        if (isNaN(before)) ctx.moveTo(x, y(hole[i])); else ctx.lineTo(x, y(hole[i]));
      }
      ctx.stroke();
      ctx.lineWidth = 1;
    }
    ctx.restore();
    this.yLabel(ctx, "100\u202f%", top + 4);
    this.yLabel(ctx, "0", bottom - 5);
  }
  hover(x, y, event) {
    const { at_s, arena } = this, t = this.t(x);
    if (!at_s.length || x < GUTTER || t < at_s[0]) { tip.hide(); return; }
    let low = 0, high = at_s.length - 1;
    while (low < high) { const mid = (low + high + 1) >> 1; if (at_s[mid] <= t) low = mid; else high = mid - 1; }
    const line = (name, colour, share) => h("div", { class: "row" }, h("span", { class: "tag" }, swatch(cssVar(colour)), name), h("span", {}, `${formatBytes(share * arena.size_bytes)}, ${formatShare(share, 1)}`));
    tip.show(event.clientX, event.clientY, h("b", {}, formatTime(this.model.page.begin_unix_s + t)),
      line("live", "--live", this.live[low]), line("quarantined", "--quarantined", this.quarantined[low]), isNaN(this.hole[low]) ? null : line("largest hole", "--hole", this.hole[low]));
  }
}

/** One map and one strip of figures for each arena; more than a few are chosen from. */
function buildArenas(model, host) {
  const arenas = model.page.arenas;
  if (!arenas.length) { host.append(h("p", { class: "quiet" }, "The log says nothing about arenas.")); return; }
  const legend = () => h("span", { class: "legend" }, ...[["live", "--live"], ["quarantined", "--quarantined"], ["largest hole", "--hole"]].map(([name, colour]) => {
    const mark = h("span", { class: "swatch" });
    mark.style.background = `var(${colour})`;
    return h("span", {}, mark, name);
  }));
  const blocks = arenas.map((arena) => {
    const map = h("div", { class: "pane" }), strip = h("div", { class: "pane" });
    const block = h("div", { class: "arena" }, h("h3", {}, `Arena, rank ${arena.rank}`, h("span", { class: "scope" }, `${visible(arena.device)}, ${formatBytes(arena.size_bytes)}, addresses upwards`), legend()), map, strip);
    strip.style.marginTop = "-1px";
    return { arena, block, map, strip, panes: null };
  });
  const show = (block) => {
    host.append(block.block);
    block.panes ||= [new ArenaPane(model, block.map, block.arena), new OccupancyPane(model, block.strip, block.arena, true)];
  };
  if (arenas.length <= 4) { blocks.forEach(show); return; }
  const choose = h("select", { "aria-label": "Rank", onchange: () => { blocks.forEach((b) => b.block.remove()); show(blocks[choose.selectedIndex]); model.changed(); } }, ...arenas.map((a) => h("option", {}, `rank ${a.rank}`)));
  host.append(h("p", {}, choose));
  show(blocks[0]);
}
