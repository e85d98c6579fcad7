// A table of any length: only the rows that can be seen are in the document.

const ROW = 28, HEAD = 30, AROUND = 6, ROWS_MIN = 5, TABLE_MAX = 520;

class Table {
  constructor(model, host) {
    Object.assign(this, { model, host, mode: "attempts", rows: new Uint32Array(0), groups: [], current: -1 });
    // As high as all attempts need, however many pass the filter: nothing jumps while somebody types.
    host.style.height = `${Math.min(TABLE_MAX, HEAD + 18 + ROW * Math.max(model.n, ROWS_MIN))}px`;
    this.by = { attempts: ["start", 1], sessions: ["others", -1] };
    this.drawn = "";
    host.addEventListener("scroll", () => this.paint());
    host.addEventListener("keydown", (event) => this.key(event));
    host.addEventListener("click", (event) => {
      const row = event.target.closest("tr[data-row]");
      if (row) { this.current = Number(row.getAttribute("data-row")); this.open(); }
    });
    new ResizeObserver(() => this.paint()).observe(host);
  }

  get columns() { return this.mode === "attempts" ? attemptColumns(this.model) : sessionColumns(this.model); }

  setMode(mode) { this.mode = mode; this.current = -1; this.host.scrollTop = 0; this.update(); }

  sortBy(name) {
    const [was, direction] = this.by[this.mode];
    const column = this.columns.find((c) => c.name === name);
    this.by[this.mode] = [name, was === name ? -direction : column.first || 1];
    this.host.scrollTop = 0;
    this.update();
    // The old head is gone with its button: go on where the keyboard was.
    this.host.querySelector(`th[data-column=${name}] button`)?.focus();
  }

  /** Take up the window, the filter and the order. */
  update() {
    const { model } = this, [name, direction] = this.by[this.mode];
    const column = this.columns.find((c) => c.name === name);
    if (this.mode === "attempts") {
      const order = model.order(name, column.key), rows = new Uint32Array(model.n);
      let count = 0;
      for (let k = 0; k < model.n; k++) {
        const i = order[direction > 0 ? k : model.n - 1 - k];
        if (model.passes[i] && model.isIn(i)) rows[count++] = i;
      }
      this.rows = rows.subarray(0, count);
    } else {
      this.groups = groupSessions(model);
      const key = column.key;
      this.groups.sort((p, q) => direction * (key(p) - key(q)) || p.session - q.session);
    }
    this.head = null;
    this.drawn = "";
    this.paint();
  }

  get length() { return this.mode === "attempts" ? this.rows.length : this.groups.length; }

  paint() {
    const { host, model, length } = this;
    const first = Math.max(0, Math.floor((host.scrollTop - HEAD) / ROW) - AROUND);
    const last = Math.min(length, first + Math.ceil(host.clientHeight / ROW) + 2 * AROUND);
    const state = `${this.mode} ${first} ${last} ${this.current} ${zone.utc}`;
    if (state === this.drawn) return;
    this.drawn = state;
    const columns = this.columns;
    if (!this.head) {
      const [name, direction] = this.by[this.mode];
      this.body = h("tbody");
      this.head = h("thead", {}, h("tr", {}, columns.map((c) => h("th", { "data-column": c.name, scope: "col", class: c.right ? "right" : "", "aria-sort": c.name === name ? (direction > 0 ? "ascending" : "descending") : "none" },
        h("button", { type: "button", onclick: () => this.sortBy(c.name) }, c.title + (c.name === name ? (direction > 0 ? " ↑" : " ↓") : ""))))));
      const widths = h("colgroup", {}, columns.map((c) => { const col = h("col"); if (c.width) col.style.width = `${c.width}px`; return col; }));
      host.replaceChildren(h("table", { "aria-rowcount": String(length + 1) }, widths, this.head, this.body));
    }
    const spacer = (rows) => { const cell = h("td", { colspan: String(columns.length) }); cell.style.height = `${rows * ROW}px`; return h("tr", { class: "spacer", "aria-hidden": "true" }, cell); };
    const lines = [];
    for (let k = first; k < last; k++) {
      const item = this.mode === "attempts" ? this.rows[k] : this.groups[k];
      lines.push(h("tr", { "data-row": String(k), "aria-rowindex": String(k + 2), class: k === this.current ? "current" : "" }, columns.map((c) => h("td", { class: c.right ? "right" : "" }, c.cell(item)))));
    }
    if (!length) lines.push(h("tr", {}, h("td", { class: "empty", colspan: String(columns.length) }, "Nothing in this window passes the filter.")));
    this.body.replaceChildren(spacer(first), ...lines, spacer(length - last));
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.host.clientHeight / ROW) - 2);
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Enter" && this.current >= 0 && event.target === this.host) { this.open(); return; }
    if (by === undefined || !this.length) return;
    event.preventDefault();
    this.current = Math.max(0, Math.min(this.length - 1, this.current < 0 ? 0 : this.current + by));
    const y = this.current * ROW;
    if (y < this.host.scrollTop) this.host.scrollTop = y;
    else if (y + ROW + HEAD > this.host.scrollTop + this.host.clientHeight) this.host.scrollTop = y + ROW + HEAD - this.host.clientHeight;
    this.paint();
  }

  open() {
    const item = this.mode === "attempts" ? this.rows[this.current] : this.groups[this.current].last;
    this.paint();
    this.model.openStory(item);
  }
}

const dash = () => h("span", { class: "dim" }, "–");
const tag = (model, reason) => h("span", { class: "tag" }, swatch(model.colours[reason]), visible(model.reasons[reason]));

function attemptColumns(model) {
  const ms = (name, title, values) => ({ name, title, right: true, width: 98, first: -1, key: (i) => values[i], cell: (i) => (values[i] > 0 ? formatMs(values[i]) : dash()) });
  return [
    { name: "start", title: "Began", width: 160, key: (i) => model.start[i], cell: (i) => formatTime(model.page.begin_unix_s + model.start[i], 0.001).slice(5) },
    { name: "session", title: "Session", key: (i) => model.sessionRank[model.session[i]], cell: (i) => h("bdi", {}, visible(model.sessions[model.session[i]])) },
    { name: "reason", title: "Outcome", width: 186, key: (i) => model.reason[i], cell: (i) => tag(model, model.reason[i]) },
    ms("reserved", "Reserved", model.reserved),
    ms("transferring", "Transferring", model.transferring),
    ms("ready", "Ready", model.ready),
    ms("total", "Total", model.total),
    { name: "bytes", title: "Bytes", right: true, width: 88, first: -1, key: (i) => model.bytes[i], cell: (i) => (model.bytes[i] > 0 ? formatBytes(model.bytes[i]) : dash()) },
    { name: "gbs", title: "Transfer", right: true, width: 92, first: -1, key: (i) => model.gbs[i], cell: (i) => formatGbs(model.gbs[i]) || dash() },
    { name: "tokens", title: "Tokens", right: true, width: 78, first: -1, key: (i) => model.tokens[i], cell: (i) => (model.tokens[i] > 0 ? formatCount(model.tokens[i]) : dash()) },
  ];
}

/** One item a session that has an attempt in the window that passes the filter. */
function groupSessions(model) {
  const groups = new Map();
  for (let i = 0; i < model.n; i++) {
    if (!model.passes[i] || !model.isIn(i)) continue;
    let group = groups.get(model.session[i]);
    if (!group) groups.set(model.session[i], (group = { session: model.session[i], count: 0, ok: 0, bytes: 0, first: i, last: i }));
    group.count++;
    group.last = i;
    if (model.reason[i] === model.ok) { group.ok++; group.bytes += model.bytes[i]; }
  }
  return [...groups.values()];
}

function sessionColumns(model) {
  const at = (i) => formatTime(model.page.begin_unix_s + model.start[i]);
  const count = (name, title, value) => ({ name, title, right: true, width: 92, first: -1, key: value, cell: (g) => formatCount(value(g)) });
  return [
    { name: "session", title: "Session", key: (g) => model.sessionRank[g.session], cell: (g) => h("bdi", {}, visible(model.sessions[g.session])) },
    count("count", "Attempts", (g) => g.count),
    count("ok", "OK", (g) => g.ok),
    count("others", "Not OK", (g) => g.count - g.ok),
    { name: "outcome", title: "Last outcome", width: 196, key: (g) => model.reason[g.last], cell: (g) => tag(model, model.reason[g.last]) },
    { name: "bytes", title: "Bytes OK", right: true, width: 96, first: -1, key: (g) => g.bytes, cell: (g) => formatBytes(g.bytes) },
    { name: "first", title: "First began", width: 156, key: (g) => model.start[g.first], cell: (g) => at(g.first) },
    { name: "last", title: "Last began", width: 156, key: (g) => model.start[g.last], cell: (g) => at(g.last) },
  ];
}
