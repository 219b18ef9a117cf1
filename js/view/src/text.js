// @ts-check
/** Numbers, sizes and values as text. @module */
import { toFloat32 } from "../../src/dtypes.js";

/** @typedef {import("../../src/dtypes.js").Elements} Elements */

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];

/** Return a number of bytes with three digits and a unit. @param {number} nbytes */
export function sizeText(nbytes) {
  let value = nbytes;
  let unit = 0;
  while (value >= 999.5 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  const text = unit === 0 ? String(value) : value.toPrecision(3);
  return `${text} ${UNITS[unit]}`;
}

/** Return an integer with a comma between thousands. @param {number | bigint} number */
export const countText = (number) => number.toLocaleString("en-US");

/** Return a number and a noun. @param {number} count @param {string} noun @param {string} [many] */
export const counted = (count, noun, many = `${noun}s`) =>
  `${countText(count)} ${count === 1 ? noun : many}`;

/** Return a shape with `×` between extents. @param {number[]} shape */
export const shapeText = (shape) => (shape.length === 0 ? "scalar" : shape.join(" × "));

/** Return a duration. @param {number} seconds */
export function durationText(seconds) {
  if (!Number.isFinite(seconds)) return "unknown";
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  if (seconds < 99.5) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 100 ? `${minutes} min` : `${(seconds / 3600).toFixed(1)} h`;
}

/** Return a time in UTC, to the second. @param {number} unixS */
export const timeText = (unixS) =>
  new Date(unixS * 1000)
    .toISOString()
    .replace("T", " ")
    .replace(/\.\d+Z$/, " UTC");

/**
 * Return the shortest decimal that is the same `float32`.
 *
 * @param {number} value a value of `float32`
 */
export function float32Text(value) {
  if (!Number.isFinite(value) || value === 0) return floatText(value);
  for (let digits = 1; digits < 9; digits += 1) {
    const short = Number(value.toPrecision(digits));
    if (Math.fround(short) === value) return floatText(short);
  }
  return floatText(Number(value.toPrecision(9)));
}

/** Return the shortest decimal that is the same `float64`, as a float. @param {number} value */
export function floatText(value) {
  if (Number.isNaN(value)) return "nan";
  if (value === Infinity) return "inf";
  if (value === -Infinity) return "-inf";
  if (Object.is(value, -0)) return "-0.0";
  const text = String(value);
  return /^-?\d+$/.test(text) ? `${text}.0` : text;
}

/** @param {string} real @param {string} imaginary */
const complexText = (real, imaginary) =>
  `${real}${/^[-+]/.test(imaginary) ? "" : "+"}${imaginary}i`;

/** Whether elements of a dtype are two numbers each. @param {string} dtype */
export const isComplex = (dtype) => dtype.startsWith("complex");

/** Return how many displayed numbers an element of a dtype has. @param {string} dtype */
export const lanesOf = (dtype) => (isComplex(dtype) || dtype === "float4_e2m1fn_x2" ? 2 : 1);

/**
 * Return a reader of elements: the text of each, and a number for a shade.
 *
 * @param {string} dtype
 * @param {Elements} data
 * @returns {{count: number, text: (at: number) => string, number: (at: number) => number}}
 */
export function valuesOf(dtype, data) {
  if (dtype === "bool") {
    return {
      count: data.length,
      text: (at) => (data[at] ? "true" : "false"),
      number: (at) => Number(data[at]),
    };
  }
  if (/^u?int/.test(dtype)) {
    return { count: data.length, text: (at) => String(data[at]), number: (at) => Number(data[at]) };
  }
  if (dtype === "float64") {
    return {
      count: data.length,
      text: (at) => floatText(Number(data[at])),
      number: (at) => Number(data[at]),
    };
  }
  const wide = dtype === "complex128" ? data : toFloat32(dtype, data);
  const write = dtype === "complex128" ? floatText : float32Text;
  const textAt = (/** @type {number} */ at) => write(Number(wide[at]));
  if (isComplex(dtype)) {
    return {
      count: wide.length / 2,
      text: (at) => complexText(textAt(2 * at), textAt(2 * at + 1)),
      number: (at) => Math.hypot(Number(wide[2 * at]), Number(wide[2 * at + 1])),
    };
  }
  if (dtype === "float4_e2m1fn_x2") {
    return {
      count: wide.length / 2,
      text: (at) => `${textAt(2 * at)}, ${textAt(2 * at + 1)}`,
      number: (at) => Number(wide[2 * at]),
    };
  }
  return { count: wide.length, text: textAt, number: (at) => Number(wide[at]) };
}

/**
 * Return the values of a scalar of a tree as texts.
 *
 * @param {string} dtype @param {Elements} data @param {number} most
 */
export function firstTexts(dtype, data, most) {
  const values = valuesOf(dtype, data);
  return Array.from({ length: Math.min(most, values.count) }, (_, at) => values.text(at));
}
