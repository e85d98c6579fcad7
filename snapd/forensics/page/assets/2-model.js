// What is shown: the attempts, the window in time, and what they are filtered by.

const REFUSED = 0, RESERVED = 1, TRANSFERRING = 2, READY = 3, OLDER = 4;

class Model {
  constructor(page) {
    const c = page.columns;
    this.page = page;
    this.n = c.start_s.length;
    this.start = c.start_s;
    this.reserved = c.reserved_ms;
    this.transferring = c.transferring_ms;
    this.ready = c.ready_ms;
    this.session = c.session;
    this.handle = c.handle;
    this.bytes = c.bytes;
    this.tokens = c.tokens;
    this.tokenStart = c.token_start;
    this.reason = c.reason;
    this.epoch = c.epoch;
    this.ranks = c.ranks;
    this.lastState = c.last_state;
    this.reasons = page.reasons;
    this.sessions = page.sessions;
    this.ok = page.reasons.indexOf("ok");
    this.open = page.reasons.indexOf("open");
    this.weight = Float64Array.from(page.reasons, (_, r) => (r === this.ok ? page.weight_ok : page.weight_other));
    this.isSampled = page.weight_ok !== 1 || page.weight_other !== 1;
    this.spanS = Math.max(page.end_s, 1e-6);
    this.end = new Float64Array(this.n);
    this.total = new Float64Array(this.n);
    this.gbs = new Float64Array(this.n);
    for (let i = 0; i < this.n; i++) {
      const ms = this.reserved[i] + this.transferring[i] + this.ready[i];
      this.total[i] = ms;
      this.end[i] = this.start[i] + ms / 1000;
      const arrived = this.lastState[i] === READY || (this.lastState[i] === OLDER && this.reason[i] === this.ok);
      this.gbs[i] = arrived && this.transferring[i] > 0 ? this.bytes[i] / this.transferring[i] / 1e6 : 0;
    }
    this.lower = this.sessions.map((id) => id.toLowerCase());
    // The window, in seconds from the page's begin.
    this.t0 = 0;
    this.t1 = this.spanS;
    this.onlyReasons = new Set();
    this.query = "";
    this.selected = -1;
    this.passes = new Uint8Array(this.n).fill(1);
    this.counts = new Float64Array(this.reasons.length);
    this.shown = 0;
    this.sorted = new Map();
    this.listeners = [];
    this._asked = 0;
    this._lanes = null;
    this.refilter();
  }

  get isFull() { return this.t0 <= 0 && this.t1 >= this.spanS; }
  get isFiltered() { return this.onlyReasons.size > 0 || this.query !== ""; }

  /** Draw soon, once, however often this is called before the next frame. */
  changed() {
    if (this._asked) return;
    this._asked = requestAnimationFrame(() => { this._asked = 0; for (const listener of this.listeners) listener(); });
  }

  setWindow(t0, t1) {
    const least = Math.min(this.spanS, Math.max(this.spanS * 1e-7, 1e-4));
    let width = Math.min(Math.max(t1 - t0, least), this.spanS);
    t0 = Math.min(Math.max(t0, 0), this.spanS - width);
    this.t0 = t0;
    this.t1 = t0 + width >= this.spanS * (1 - 1e-12) ? this.spanS : t0 + width;
    this.recount();
    this.changed();
  }

  zoom(factor, at = (this.t0 + this.t1) / 2) {
    this.setWindow(at - (at - this.t0) * factor, at + (this.t1 - at) * factor);
  }

  pan(share) {
    const by = (this.t1 - this.t0) * share;
    this.setWindow(this.t0 + by, this.t1 + by);
  }

  setQuery(text) { this.query = text.trim().toLowerCase(); this.refilter(); this.changed(); }

  toggleReason(reason) {
    if (!this.onlyReasons.delete(reason)) this.onlyReasons.add(reason);
    this.refilter();
    this.changed();
  }

  clearFilter() { this.onlyReasons.clear(); this.query = ""; this.refilter(); this.changed(); }

  select(row) { this.selected = row; this.changed(); }

  refilter() {
    const { n, query, onlyReasons, passes } = this;
    const wantedReason = Uint8Array.from(this.reasons, (_, r) => (onlyReasons.size === 0 || onlyReasons.has(r) ? 1 : 0));
    if (query === "") {
      for (let i = 0; i < n; i++) passes[i] = wantedReason[this.reason[i]];
    } else {
      const inSession = Uint8Array.from(this.lower, (id) => (id.includes(query) ? 1 : 0));
      const inReason = Uint8Array.from(this.reasons, (name) => (name.includes(query) ? 1 : 0));
      const isNumber = /^\d+$/.test(query);
      for (let i = 0; i < n; i++) {
        passes[i] = wantedReason[this.reason[i]] && (inSession[this.session[i]] || inReason[this.reason[i]] ||
          (isNumber && this.handle[i] > 0 && String(this.handle[i]).includes(query))) ? 1 : 0;
      }
    }
    this.recount();
  }

  isIn(i) { return this.start[i] <= this.t1 && this.end[i] >= this.t0; }

  /** Count what lies in the window: by reason before the choice of reasons, and all that is shown. */
  recount() {
    const { n, counts, weight, reason, passes } = this;
    const wasQuery = this.query !== "";
    counts.fill(0);
    this.shown = 0;
    const choice = this.onlyReasons;
    for (let i = 0; i < n; i++) {
      if (!this.isIn(i)) continue;
      if (passes[i]) this.shown++;
      if (!wasQuery || passes[i] || (choice.size > 0 && !choice.has(reason[i]))) counts[reason[i]] += weight[reason[i]];
    }
    // The exact ones, not those that a sample suggests.
    if (this.isFull && !wasQuery) this.page.reason_counts.forEach((count, r) => { counts[r] = count; });
  }

  // --- orders --------------------------------------------------------------------------------

  get sessionRank() {
    if (!this._sessionRank) {
      const order = Uint32Array.from(this.sessions.keys());
      const names = this.lower;
      order.sort((a, b) => (names[a] < names[b] ? -1 : names[a] > names[b] ? 1 : a - b));
      this._sessionRank = new Float64Array(order.length);
      order.forEach((session, rank) => { this._sessionRank[session] = rank; });
    }
    return this._sessionRank;
  }

  /** All rows, ascending in `key`, which gives a number for a row. */
  order(name, key) {
    let order = this.sorted.get(name);
    if (!order) {
      const values = new Float64Array(this.n);
      for (let i = 0; i < this.n; i++) values[i] = key(i);
      order = Uint32Array.from(values.keys());
      order.sort((a, b) => values[a] - values[b] || a - b);
      this.sorted.set(name, order);
    }
    return order;
  }

  // --- lanes of the timeline -----------------------------------------------------------------

  /** The lowest free lane for each attempt, as it begins; what has no duration by nature has none (-1). */
  get lanes() {
    if (this._lanes) return this._lanes;
    const lane = new Int32Array(this.n).fill(-1);
    const busy = new Heap(), free = new Heap();
    let count = 0;
    for (let i = 0; i < this.n; i++) {
      if (this.lastState[i] === REFUSED || (this.lastState[i] === OLDER && this.total[i] === 0)) continue;
      while (busy.size && busy.leastKey <= this.start[i]) { const l = busy.pop(); free.push(l, l); }
      lane[i] = free.size ? free.pop() : count++;
      busy.push(this.end[i], lane[i]);
    }
    this._lanes = { lane, count };
    return this._lanes;
  }
}

/** A binary heap of (key, value), the least key first. */
class Heap {
  constructor() { this.keys = []; this.values = []; }
  get size() { return this.keys.length; }
  get leastKey() { return this.keys[0]; }
  push(key, value) {
    const { keys, values } = this;
    let i = keys.length;
    keys.push(key); values.push(value);
    while (i > 0) {
      const up = (i - 1) >> 1;
      if (keys[up] <= key) break;
      keys[i] = keys[up]; values[i] = values[up];
      i = up;
    }
    keys[i] = key; values[i] = value;
  }
  pop() {
    const { keys, values } = this;
    const least = values[0], key = keys.pop(), value = values.pop(), n = keys.length;
    if (n) {
      let i = 0;
      for (;;) {
        let down = 2 * i + 1;
        if (down >= n) break;
        if (down + 1 < n && keys[down + 1] < keys[down]) down++;
        if (keys[down] >= key) break;
        keys[i] = keys[down]; values[i] = values[down];
        i = down;
      }
      keys[i] = key; values[i] = value;
    }
    return least;
  }
}
