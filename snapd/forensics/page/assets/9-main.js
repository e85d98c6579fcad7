// Put the parts together, and draw what has changed.

const SETTLED_MS = 90;

function applyTheme(model) {
  cssVars = new Map();
  const dark = isDark();
  model.colours = model.page.colours.map(([light, darkOne]) => (dark ? darkOne : light));
}

function buildSummary(model) {
  const page = model.page;
  $("title").textContent = visible(page.title);
  const notices = page.notices.filter(({ level }) => level !== "info").map(({ level, text, details }) => {
    const kind = level === "bad" ? "notice bad" : "notice";
    return details.length
      ? h("details", { class: kind }, h("summary", {}, visible(text)), h("ul", {}, details.map((line) => h("li", {}, visible(line)))))
      : h("p", { class: kind, role: "note" }, visible(text));
  });
  $("notices").replaceChildren(...notices);
  $("footer").replaceChildren(...page.notices.filter(({ level }) => level === "info").map(({ text }) => h("p", {}, visible(text))),
    h("p", {}, `Made by snapd ${page.version}. This page is whole in itself: it fetches nothing.`));
  const decided = page.attempts - page.attempts_open;
  $("ok-rate").textContent = decided ? formatShare(page.attempts_ok, decided) : "–";
  $("ok-text").textContent = decided ? `${formatCount(page.attempts_ok)} of ${formatCount(decided)} attempts ended OK` : "no attempt has ended";
  $("counters").replaceChildren(...page.counters.map(({ name, value, unit }) => {
    const text = unit === "bytes" ? formatBytes(value) : unit === "ms" ? formatMs(value) : unit === "gbs" ? formatGbs(value) : unit === "share" ? formatShare(value, 1) : formatCount(value);
    return h("div", {}, h("dt", {}, visible(name)), h("dd", {}, text || "–"));
  }));
}

function drawSubtitle(model) {
  const page = model.page, a = page.begin_unix_s, b = a + page.end_s;
  const until = formatDate(a) === formatDate(b) ? formatClock(b) : formatTime(b);
  const epochs = page.epochs.length;
  $("subtitle").textContent = [
    `${formatTime(a)} to ${until} ${zone.utc ? "UTC" : "local time"} (${formatMs(page.end_s * 1000)})`,
    ...(epochs > 1 ? [`${epochs} epochs: ${epochs - 1} restart${epochs > 2 ? "s" : ""}, dashed`] : epochs ? ["1 epoch"] : []),
    `${formatCount(page.lines)} lines`, ...page.about.map(visible),
  ].join(" · ");
}

/** One sentence: when most attempts failed, of what, and a way there. */
function drawWorst(model) {
  const page = model.page, n = page.bin_count, bins = page.columns.bins, groups = 60, size = n / groups;
  let worst = -1, most = 0;
  for (let g = 0; g < groups; g++) {
    let bad = 0;
    for (const r of model.stackOrder) if (r !== model.ok) for (let k = 0; k < size; k++) bad += bins[r * n + g * size + k];
    if (bad > most) { most = bad; worst = g; }
  }
  if (worst < 0) { $("worst").hidden = true; return; }
  let all = 0, main = -1, mainCount = 0;
  for (const r of model.stackOrder) {
    let count = 0;
    for (let k = 0; k < size; k++) count += bins[r * n + worst * size + k];
    all += count;
    if (r !== model.ok && count > mainCount) { mainCount = count; main = r; }
  }
  const from = (worst / groups) * model.spanS, to = ((worst + 1) / groups) * model.spanS, step = (to - from) / 50;
  const clock = (t) => formatClock(page.begin_unix_s + t, step > 1 ? Math.max(step, 1) : step);
  const look = h("button", { type: "button", onclick: () => model.setWindow(from - (to - from) / 2, to + (to - from) / 2) }, `${clock(from)} to ${clock(to)}`);
  $("worst").replaceChildren("Most went wrong from ", look, `: ${formatCount(most)} of ${formatCount(all)} not OK, mostly `, h("b", {}, visible(model.reasons[main])), mainCount < most ? ` (${formatCount(mainCount)}).` : ".");
}

class Reasons {
  constructor(model, host) {
    this.model = model;
    this.rows = model.reasonOrder.map((reason) => {
      const name = model.reasons[reason], fill = h("div", { class: "fill" }), mark = h("span", { class: "swatch" });
      const row = {
        reason, fill, mark, count: h("span", { class: "num" }), share: h("span", { class: "share" }),
        button: h("button", { type: "button", title: model.page.help[name] || "", "aria-pressed": "false", onclick: () => model.toggleReason(reason) }),
      };
      row.button.append(h("span", { class: "name" }, mark, visible(name)), row.count, row.share, h("span", { class: "track" }, fill));
      row.canvas = new Canvas(row.button, `${visible(name)} over time`, 20);
      host.append(h("li", {}, row.button));
      return row;
    });
    this.host = host;
  }
  draw() {
    const { model } = this, most = Math.max(1, ...model.counts.filter((_, r) => r !== model.ok)), sum = model.counts.reduce((p, q) => p + q, 0);
    const about = model.isSampled && !(model.isFull && model.query === "") ? "≈\u202f" : "";
    this.host.classList.toggle("filtered", model.onlyReasons.size > 0);
    for (const { reason, fill, mark, count, share, button, canvas } of this.rows) {
      const n = model.counts[reason], colour = model.colours[reason];
      // Beside ok all others would be specks: their bars are drawn against each other, the share says the rest.
      fill.parentElement.style.visibility = reason === model.ok ? "hidden" : "visible";
      fill.style.width = `${(100 * n) / most}%`;
      fill.style.minWidth = n ? "2px" : "0";
      fill.style.background = mark.style.background = colour;
      count.textContent = about + formatCount(n);
      share.textContent = formatShare(n, sum);
      button.setAttribute("aria-pressed", String(model.onlyReasons.has(reason)));
      this.spark(canvas, reason, colour);
    }
    $("reasons-scope").textContent = `${model.isFull ? "all of the log" : "in the chosen time"}${model.query ? ", that match the search" : ""}; bars: what is not ok; choose a reason to see only it`;
  }
  /** When it happened: each row against its own peak, over all of the log. */
  spark(canvas, reason, colour) {
    const { model } = this, page = model.page, n = page.bin_count, { ctx, width, height } = canvas.begin();
    if (!canvas.element.clientWidth) return;
    const groups = Math.min(n, Math.max(1, Math.floor(width / 3))), sums = new Float64Array(groups);
    for (let bin = 0; bin < n; bin++) sums[Math.floor((bin * groups) / n)] += page.columns.bins[reason * n + bin];
    const most = Math.max(...sums), step = width / groups;
    ctx.fillStyle = cssVar("--line");
    ctx.fillRect(0, height - 1, width, 1);
    ctx.fillStyle = colour;
    for (let g = 0; g < groups; g++) if (sums[g]) { const up = Math.max(1.5, (sums[g] / most) * (height - 3)); ctx.fillRect(g * step, height - 1 - up, Math.max(step - 0.7, 1), up); }
    if (!model.isFull) {
      ctx.fillStyle = cssVar("--accent-soft");
      ctx.fillRect((model.t0 / model.spanS) * width, 0, Math.max(2, ((model.t1 - model.t0) / model.spanS) * width), height);
    }
  }
}

function drawScopes(model, table) {
  const base = model.page.begin_unix_s, span = model.t1 - model.t0, step = span / 1000;
  const fine = step >= 1 ? 1 : step;
  $("time-scope").textContent = model.isFull ? "all of the log" : `${formatTime(base + model.t0, fine)} to ${formatClock(base + model.t1, fine)} (${formatMs(span * 1000)})`;
  const sampled = model.isSampled ? " on this page" : "";
  $("table-scope").textContent = table.mode === "attempts"
    ? `${formatCount(model.shown)} of ${formatCount(model.n)}${sampled}` : `${formatCount(table.groups.length)} sessions of ${formatCount(model.sessions.length)}${sampled}`;
  $("dist-scope").textContent = `${formatCount(model.shown)} attempts${sampled}; green: OK, red: not; lines: p50 and, dashed, p99`;
  const chips = [];
  for (const reason of model.onlyReasons) chips.push(h("button", { type: "button", onclick: () => model.toggleReason(reason) }, `${visible(model.reasons[reason])} ×`));
  if (!model.isFull) chips.push(h("button", { type: "button", onclick: () => model.setWindow(0, model.spanS) }, "only the chosen time ×"));
  $("chips").replaceChildren(...chips);
}

function connectControls(model, table, drawAll) {
  $("zoom-in").addEventListener("click", () => model.zoom(0.5));
  $("zoom-out").addEventListener("click", () => model.zoom(2));
  $("zoom-all").addEventListener("click", () => model.setWindow(0, model.spanS));
  $("search").addEventListener("input", () => model.setQuery($("search").value));
  const pressed = (on, off) => { $(on).setAttribute("aria-pressed", "true"); $(off).setAttribute("aria-pressed", "false"); };
  $("by-attempt").addEventListener("click", () => { pressed("by-attempt", "by-session"); table.setMode("attempts"); drawScopes(model, table); });
  $("by-session").addEventListener("click", () => { pressed("by-session", "by-attempt"); table.setMode("sessions"); drawScopes(model, table); });
  $("zone-utc").addEventListener("click", () => { pressed("zone-utc", "zone-local"); zone.utc = true; drawAll(); });
  $("zone-local").addEventListener("click", () => { pressed("zone-local", "zone-utc"); zone.utc = false; drawAll(); });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) { event.preventDefault(); $("search").focus(); }
  });
}

async function main() {
  const page = await unpack($("data").textContent);
  $("data").remove();
  const model = new Model(page);
  applyTheme(model);
  // The most frequent first; ok is the ground that the others stand on.
  model.reasonOrder = [...page.reasons.keys()].sort((p, q) => page.reason_counts[q] - page.reason_counts[p] || p - q);
  model.stackOrder = [...model.reasonOrder].sort((p, q) => (q === model.ok) - (p === model.ok)).filter((r) => r !== model.open);
  $("loading").hidden = true;
  $("page").hidden = false;
  buildSummary(model);
  const reasons = new Reasons(model, $("reasons"));
  new Overview(model, $("overview"));
  new Outcomes(model, $("outcomes"));
  new Timeline(model, $("timeline"));
  buildArenas(model, $("arenas"));
  const histograms = buildHistograms(model, $("histograms"));
  const table = new Table(model, $("table"));
  const story = new Story(model, $("story"));
  model.openStory = (i) => story.open(i);
  const shade = (name, alpha) => { const s = swatch("var(--ink-2)"); s.style.opacity = alpha; return h("span", {}, s, name); };
  $("timeline-legend").replaceChildren(shade("reserved", SHADES[0]), shade("transferring", SHADES[1]), shade("ready", SHADES[2]), h("span", {}, "hue: the outcome; a click tells the story"));
  let settle = 0, tableState = "";
  const draw = () => {
    for (const pane of Pane.all) if (pane.host.isConnected) pane.draw();
    reasons.draw();
    const state = [model.t0, model.t1, model.query, [...model.onlyReasons]].join("|");
    if (state !== tableState) { if (tableState) { $("table").scrollTop = 0; table.current = -1; } tableState = state; table.update(); }
    drawScopes(model, table);
    clearTimeout(settle);
    // One at a time, when nothing has changed for a moment: together they would take longer than a frame may.
    const next = (k) => { settle = setTimeout(() => { histograms[k].draw(); if (k + 1 < histograms.length) next(k + 1); }, k ? 0 : SETTLED_MS); };
    next(0);
  };
  const drawAll = () => { drawSubtitle(model); buildSummary(model); drawWorst(model); tableState = ""; draw(); table.update(); };
  model.listeners.push(draw);
  connectControls(model, table, drawAll);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { applyTheme(model); drawAll(); });
  new ResizeObserver(() => model.changed()).observe($("page"));
  drawAll();
  document.body.setAttribute("data-ready", String(Math.round(performance.now())));
}

main().catch((error) => {
  $("loading").textContent = typeof DecompressionStream === "undefined"
    ? "This browser is too old to unpack the page: it needs DecompressionStream (Chrome 80, Firefox 113, Safari 16.4)."
    : `The page could not be drawn: ${error}`;
  throw error;
});
