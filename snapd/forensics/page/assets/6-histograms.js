// Distributions on a logarithmic axis, of what is in the window and passes the filter.

const PER_DECADE = 8, BYTES_BASE = Math.log10(2);

class Histogram {
  constructor(model, host, { title, key, format, ticks }) {
    Object.assign(this, { model, key, format, ticks, title });
    this.note = h("span", { class: "scope" });
    const box = h("div", {}, h("h3", {}, title, this.note));
    host.append(box);
    this.canvas = new Canvas(box, `${title}, histogram`, 118);
  }
  draw() {
    const { model, key } = this, values = new Float64Array(model.n), ok = new Uint8Array(model.n);
    let count = 0, least = Infinity, most = 0;
    for (let i = 0; i < model.n; i++) {
      if (!model.passes[i] || !model.isIn(i)) continue;
      const value = key(i);
      if (!(value > 0)) continue;
      ok[count] = model.reason[i] === model.ok ? 1 : 0;
      values[count++] = value;
      if (value < least) least = value;
      if (value > most) most = value;
    }
    const { ctx, width, height } = this.canvas.begin(), bottom = height - 20, left = 4, right = width - 4, top = 8;
    this.note.textContent = "";
    if (!count) { ctx.fillStyle = cssVar("--ink-3"); ctx.fillText("nothing here", left, bottom - 8); return; }
    const low = Math.floor(Math.log10(least) * PER_DECADE), bins = Math.max(Math.floor(Math.log10(most) * PER_DECADE) - low + 1, 8);
    const sums = [new Float64Array(bins), new Float64Array(bins)];
    for (let i = 0; i < count; i++) sums[ok[i]][Math.min(bins - 1, Math.floor(Math.log10(values[i]) * PER_DECADE) - low)] += ok[i] ? model.page.weight_ok : model.page.weight_other;
    const x = (value) => left + ((Math.log10(value) * PER_DECADE - low) / bins) * (right - left);
    let highest = 0;
    for (let bin = 0; bin < bins; bin++) highest = Math.max(highest, sums[0][bin] + sums[1][bin]);
    const barWidth = (right - left) / bins, y = (n) => (n / highest) * (bottom - top);
    for (let bin = 0; bin < bins; bin++) {
      const at = left + bin * barWidth, okHeight = y(sums[1][bin]), otherHeight = y(sums[0][bin]);
      ctx.fillStyle = cssVar("--good");
      if (okHeight) ctx.fillRect(at, bottom - Math.max(okHeight, 0.6), Math.max(barWidth - 1, 0.7), Math.max(okHeight, 0.6));
      ctx.fillStyle = cssVar("--bad");
      if (otherHeight) ctx.fillRect(at, bottom - okHeight - Math.max(otherHeight, 0.6), Math.max(barWidth - 1, 0.7), Math.max(otherHeight, 0.6));
    }
    ctx.strokeStyle = cssVar("--line");
    ctx.beginPath(); ctx.moveTo(left, bottom + 0.5); ctx.lineTo(right, bottom + 0.5); ctx.stroke();
    const sorted = values.subarray(0, count).sort(), quantile = (q) => sorted[Math.min(count - 1, Math.floor(q * count))];
    const p50 = quantile(0.5), p99 = quantile(0.99);
    this.note.textContent = `p50 ${this.format(p50)}, p99 ${this.format(p99)}`;
    ctx.strokeStyle = cssVar("--ink");
    for (const p of [p50, p99]) { const at = Math.round(x(p)) + 0.5; ctx.setLineDash(p === p50 ? [] : [3, 2]); ctx.beginPath(); ctx.moveTo(at, top - 6); ctx.lineTo(at, bottom); ctx.stroke(); }
    ctx.setLineDash([]);
    ctx.fillStyle = cssVar("--ink-3");
    ctx.textAlign = "center"; ctx.textBaseline = "alphabetic";
    let free = -Infinity;
    for (const tick of this.ticks) {
      const at = x(tick);
      if (at < left || at > right) continue;
      const label = this.format(tick), half = ctx.measureText(label).width / 2;
      ctx.fillRect(Math.round(at), bottom, 1, 3);
      if (at - half < Math.max(free, 0) || at + half > width) continue;
      ctx.fillText(label, at, height - 5);
      free = at + half + 10;
    }
  }
}

function buildHistograms(model, host) {
  const decades = Array.from({ length: 16 }, (_, e) => 10 ** (e - 4));
  const binary = Array.from({ length: 50 }, (_, e) => 2 ** e).filter((_, e) => e % 10 === 0 || e % 10 === 4 || e % 10 === 7);
  const ms = { format: formatMs, ticks: decades };
  return [
    { title: "Reserved", key: (i) => model.reserved[i], ...ms },
    { title: "Transferring", key: (i) => model.transferring[i], ...ms },
    { title: "Ready", key: (i) => model.ready[i], ...ms },
    { title: "From first to last", key: (i) => model.total[i], ...ms },
    { title: "Bytes", key: (i) => model.bytes[i], format: formatBytes, ticks: binary },
    { title: "Transfer", key: (i) => model.gbs[i], format: formatGbs, ticks: decades },
  ].map((options) => new Histogram(model, host, options));
}
