// What happened to one attempt, step by step, and what else its session tried.

const OTHERS_MAX = 200;
const STATES = ["RESERVED", "TRANSFERRING", "READY"];

class Story {
  constructor(model, host) {
    Object.assign(this, { model, host });
    this.before = null;
    document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !host.hidden) this.close(); });
    // Where each attempt's events begin.
    const counts = model.page.columns.event_count;
    this.from = new Uint32Array(model.n + 1);
    for (let i = 0; i < model.n; i++) this.from[i + 1] = this.from[i] + counts[i];
  }

  close() {
    this.host.hidden = true;
    this.model.select(-1);
    this.before?.focus({ preventScroll: true });
  }

  open(i) {
    const { model, host } = this;
    if (host.hidden) this.before = document.activeElement;
    model.select(i);
    const reason = model.reasons[model.reason[i]], page = model.page;
    const close = h("button", { type: "button", class: "close", title: "Close (Esc)", "aria-label": "Close", onclick: () => this.close() }, "×");
    const title = h("h2", { id: "story-title", tabIndex: -1 }, visible(model.sessions[model.session[i]]) || "(no name)");
    host.replaceChildren(close, title, h("div", {}, tag(model, model.reason[i])), h("p", { class: "help" }, page.help[reason] || ""),
      ...this.phases(i), this.facts(i),
      h("h3", {}, "What happened"), this.steps(i), ...this.others(i), ...this.where(i));
    host.scrollTop = 0;
    host.hidden = false;
    title.focus({ preventScroll: true });
  }

  phases(i) {
    const { model } = this, colour = model.colours[model.reason[i]];
    const spent = [model.reserved[i], model.transferring[i], model.ready[i]];
    if (!(model.total[i] > 0)) return [];
    const bar = h("div", { class: "phases", role: "img", "aria-label": STATES.map((s, k) => `${s} ${formatMs(spent[k])}`).join(", ") });
    const legend = h("div", { class: "legend" });
    STATES.forEach((state, k) => {
      if (!(spent[k] > 0)) return;
      const part = h("div");
      part.style.cssText = `width:${(100 * spent[k]) / model.total[i]}%;background:${colour};opacity:${SHADES[k]}`;
      bar.append(part);
      const mark = swatch(colour);
      mark.style.opacity = SHADES[k];
      legend.append(h("span", {}, mark, `${state.toLowerCase()} ${formatMs(spent[k])}`));
    });
    return [bar, legend];
  }

  facts(i) {
    const { model } = this, first = model.tokenStart[i], tokens = model.tokens[i];
    const rows = [
      ["Began", formatTime(model.page.begin_unix_s + model.start[i], 1e-6)],
      model.total[i] === 0 ? null : [model.reason[i] === model.open ? "Seen for" : "Took", formatMs(model.total[i])],
      tokens ? ["Tokens", `${formatCount(tokens)}${first ? `, from ${formatCount(first)} on` : ""}`] : null,
      model.bytes[i] ? ["Bytes", `${formatBytes(model.bytes[i])} (${formatCount(model.bytes[i])})`] : null,
      model.gbs[i] > 0 ? ["Transfer", formatGbs(model.gbs[i])] : null,
      model.ranks[i] ? ["Ranks", String(model.ranks[i])] : null,
      ["Epoch", visible(model.page.epochs[model.epoch[i]]?.id || "")],
      model.handle[i] ? ["Handle", String(model.handle[i])] : null,
    ];
    return h("dl", {}, rows.filter((row) => row && row[1]).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
  }

  steps(i) {
    const { model } = this, steps = [], c = model.page.columns, last = model.lastState[i];
    const [r, t, y] = [model.reserved[i], model.transferring[i], model.ready[i]];
    const step = (at, order, text) => steps.push({ at, order, text });
    if (last === REFUSED) step(0, 0, `prepare refused: ${visible(model.reasons[model.reason[i]])}`);
    else if (last === OLDER) step(t, 0, `${model.reason[i] === model.ok ? "done" : "failed"}: ${visible(model.reasons[model.reason[i]])}. A line of an older log tells no more.`);
    else {
      step(0, 0, "RESERVED");
      if (last >= TRANSFERRING) step(r, 0.1, "TRANSFERRING");
      if (last >= READY) step(r + t, 0.2, "READY");
      if (model.reason[i] === model.open) step(r + t + y, 9, "still open at the end of the log");
      else step(r + t + y, 0.3, model.reason[i] === model.ok ? "INGESTED" : `ABORTED: ${visible(model.reasons[model.reason[i]])}`);
    }
    for (let e = this.from[i]; e < this.from[i + 1]; e++) {
      const kind = model.page.event_kinds[c.event_kind[e]], why = model.page.event_whys[c.event_why[e]];
      const extents = c.event_extents[e];
      const place = extents ? `${formatBytes(c.event_bytes[e])} ${extents > 1 ? `in ${extents} extents from byte` : "at byte"} ${formatCount(c.event_offset[e])}` : "";
      step(c.event_at_ms[e], 1, [`rank ${c.event_rank[e]}`, kind, [place, visible(why)].filter(Boolean).join(", ")].filter(Boolean).join(" · "));
    }
    steps.sort((p, q) => p.at - q.at || p.order - q.order);
    const list = h("ol", { class: "steps" }, steps.map((s) => h("li", {}, h("span", { class: "at" }, s.at > 0 ? `+${formatMs(s.at)}` : "0"), h("span", {}, s.text))));
    return this.from[i] === this.from[i + 1] && last !== REFUSED && last !== OLDER ? h("div", {}, list, h("p", { class: "quiet" }, "Its slabs and leases are not on this page, to keep it small; they are in the log.")) : list;
  }

  others(i) {
    const { model } = this, rows = [];
    let count = 0, ok = 0;
    for (let k = 0; k < model.n; k++) {
      if (model.session[k] !== model.session[i]) continue;
      count++;
      if (model.reason[k] === model.ok) ok++;
      if (count <= OTHERS_MAX) rows.push(h("button", { type: "button", "aria-current": String(k === i), onclick: () => this.open(k) },
        h("span", {}, formatTime(model.page.begin_unix_s + model.start[k]).slice(5)), tag(model, model.reason[k]), h("span", {}, formatBytes(model.bytes[k]))));
    }
    if (count < 2) return [];
    return [h("h3", {}, "This session"), h("p", { class: "quiet" }, `${formatCount(count)} attempts${model.isSampled ? " on this page" : ""}, ${formatCount(ok)} OK${count > OTHERS_MAX ? `; the first ${OTHERS_MAX}:` : ""}`), h("div", { class: "others" }, rows)];
  }

  where(i) {
    const { model } = this;
    if (!model.handle[i]) return [];
    return [h("h3", {}, "In the log"), h("code", {}, `jq -c 'select(.slab_handle == ${model.handle[i]})' d-to-p-sync.jsonl`)];
  }
}
