// Small helpers. Text of the log only ever becomes a text node: nothing here builds HTML from a string.

const $ = (id) => document.getElementById(id);

/** Make an element. `props` are properties, but for `class`, `aria-*`, `data-*`, `role` and `on*`. */
function h(tag, props, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name.includes("-") || name === "role" || name === "colspan") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

// Characters that cannot be seen, or that turn the direction of others, are shown as escapes.
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]/g;
const PAIRED = /[\ud800-\udbff][\udc00-\udfff]/;
function visible(text) {
  if (text.search(UNSEEN) < 0) return text;
  const escape = (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0");
  if (!PAIRED.test(text)) return text.replace(UNSEEN, escape);
  return Array.from(text, (c) => (c.length > 1 ? c : c.replace(UNSEEN, escape))).join("");
}

const KIB = 1024;
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
function figures(value, digits = 3) {
  if (value >= 1000 || value === 0) return Math.round(value).toLocaleString("en-GB");
  return String(Number(value.toPrecision(digits)));
}
function formatBytes(bytes) {
  let unit = 0;
  while (bytes >= KIB && unit < UNITS.length - 1) { bytes /= KIB; unit++; }
  return `${figures(bytes)}\u202f${UNITS[unit]}`;
}
function formatMs(ms) {
  if (!(ms >= 0)) return "";
  if (ms < 1) return ms === 0 ? "0\u202fms" : ms < 0.001 ? "<\u202f1\u202fµs" : `${figures(ms * 1000)}\u202fµs`;
  if (ms < 1000) return `${figures(ms)}\u202fms`;
  if (ms < 120000) return `${figures(ms / 1000)}\u202fs`;
  if (ms < 7200000) return `${figures(ms / 60000)}\u202fmin`;
  return ms < 172800000 ? `${figures(ms / 3600000)}\u202fh` : `${figures(ms / 86400000)}\u202fdays`;
}
const formatGbs = (gbs) => (gbs > 0 ? `${figures(gbs)}\u202fGB/s` : "");
const formatCount = (n) => Math.round(n).toLocaleString("en-GB");
function formatShare(part, whole) {
  if (!whole) return "";
  const percent = (100 * part) / whole;
  if (part > 0 && percent < 0.1) return "<\u202f0.1\u202f%";
  // Never round a share that is not everything up to everything.
  return `${(part < whole ? Math.min(percent, 99.9) : 100).toFixed(percent === 100 || percent === 0 ? 0 : 1)}\u202f%`;
}

// --- time ------------------------------------------------------------------------------------

const zone = { utc: true };
const two = (n) => String(n).padStart(2, "0");
function parts(unixS) {
  const d = new Date(unixS * 1000);
  return zone.utc
    ? [d.getUTCFullYear(), d.getUTCMonth() + 1, d.getUTCDate(), d.getUTCHours(), d.getUTCMinutes(), d.getUTCSeconds()]
    : [d.getFullYear(), d.getMonth() + 1, d.getDate(), d.getHours(), d.getMinutes(), d.getSeconds()];
}
function formatDate(unixS) { const [y, m, d] = parts(unixS); return `${y}-${two(m)}-${two(d)}`; }
/** The clock, with as many digits as a step of `stepS` needs. */
function formatClock(unixS, stepS = 1) {
  const decimals = stepS >= 1 ? 0 : Math.min(6, Math.ceil(-Math.log10(stepS) - 1e-9));
  const rounded = Math.round(unixS * 10 ** decimals) / 10 ** decimals;
  const [, , , hh, mm, ss] = parts(Math.floor(rounded + 1e-9));
  if (stepS >= 60) return `${two(hh)}:${two(mm)}`;
  const fraction = decimals ? (rounded - Math.floor(rounded + 1e-9)).toFixed(decimals).slice(1) : "";
  return `${two(hh)}:${two(mm)}:${two(ss)}${fraction}`;
}
const formatTime = (unixS, stepS = 1) => `${formatDate(unixS)} ${formatClock(unixS, stepS)}`;

const STEPS_S = [1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5,
  1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800, 2592000];
const stepFor = (spanS, count) => STEPS_S.find((step) => spanS / step <= count) || 31536000;
/** Local midnight differs from UTC's: ticks of hours and days start there. */
function zoneShiftS(unixS) { return zone.utc ? 0 : -new Date(unixS * 1000).getTimezoneOffset() * 60; }

// --- colour ----------------------------------------------------------------------------------

const isDark = () => matchMedia("(prefers-color-scheme: dark)").matches;
let cssVars = new Map();
/** A colour of the style sheet. They are kept until the theme changes: asking the browser each time is slow. */
function cssVar(name) {
  if (!cssVars.has(name)) cssVars.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return cssVars.get(name);
}
function rgb(hex) {
  const n = parseInt(hex.slice(1, 7), 16);
  return [n >> 16, (n >> 8) & 255, n & 255];
}
/** A pixel of ImageData: `hex` over the ground at `alpha`. Little-endian, as every browser's machine is. */
function pixel(hex, ground, alpha = 1) {
  const [r, g, b] = rgb(hex).map((c, i) => Math.round(c * alpha + rgb(ground)[i] * (1 - alpha)));
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
}

/** How light a colour over the ground looks, 0 to 1. */
function lightness(hex, ground, alpha) {
  const [r, g, b] = rgb(hex).map((c, i) => (c * alpha + rgb(ground)[i] * (1 - alpha)) / 255);
  return 0.299 * r + 0.587 * g + 0.114 * b;
}

// --- reading the payload ---------------------------------------------------------------------

const ARRAYS = { u8: Uint8Array, u16: Uint16Array, u32: Uint32Array, f32: Float32Array, f64: Float64Array };

/** Unpack base64(gzip(u32 length, JSON, columns)): a header object whose `columns` are typed arrays. */
async function unpack(base64) {
  const text = atob(base64.trim());
  const zipped = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) zipped[i] = text.charCodeAt(i);
  const stream = new Blob([zipped]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const columns = {};
  for (const [name, type, offset, count] of header.columns) columns[name] = new ARRAYS[type](buffer, offset, count);
  header.columns = columns;
  return header;
}
