// @ts-check
/** Least, greatest and mean value of elements, added piece by piece. @module */
import { toFloat32 } from "../../src/dtypes.js";
import { float32Text, floatText } from "./text.js";

/** @typedef {import("../../src/dtypes.js").Elements} Elements */
/**
 * The numbers of a summary, as texts where they are values.
 *
 * @typedef {object} Summary
 * @property {number} count elements, or numbers of complex elements
 * @property {number} nans
 * @property {number} infinities
 * @property {number} zeros
 * @property {string | null} min of the numbers that aren't NaN; null without any
 * @property {string | null} max
 * @property {string | null} mean of the finite numbers
 * @property {string | null} deviation the standard deviation of the finite numbers
 */

/** Adds pieces of a tensor. Complex elements count as two numbers. */
export class Stats {
  #count = 0;
  #nans = 0;
  #infinities = 0;
  #zeros = 0;
  /** @type {number | bigint} */
  #min = Infinity;
  /** @type {number | bigint} */
  #max = -Infinity;
  #finite = 0;
  #mean = 0;
  #squares = 0;

  /** @param {string} dtype */
  constructor(dtype) {
    this.dtype = dtype;
  }

  /** Add a piece. @param {Elements} data as `readTensor` returns them */
  add(data) {
    if (data instanceof BigInt64Array || data instanceof BigUint64Array) this.#addIntegers(data);
    else if (/^(u?int|bool|float64|complex128)/.test(this.dtype)) this.#addNumbers(data);
    else this.#addNumbers(toFloat32(this.dtype, data));
  }

  /** @param {BigInt64Array | BigUint64Array} data */
  #addIntegers(data) {
    const numbers = new Float64Array(data.length);
    let min = this.#min;
    let max = this.#max;
    for (let at = 0; at < data.length; at += 1) {
      const value = data[at];
      if (value < min) min = value;
      if (value > max) max = value;
      numbers[at] = Number(value);
    }
    this.#addNumbers(numbers);
    this.#min = min; // all digits, which the numbers may lack
    this.#max = max;
  }

  /** @param {ArrayLike<any>} data numbers */
  #addNumbers(data) {
    let min = Number(this.#min);
    let max = Number(this.#max);
    let sum = 0;
    let nans = 0;
    let infinities = 0;
    let zeros = 0;
    for (let at = 0; at < data.length; at += 1) {
      const value = data[at];
      if (value !== value) {
        nans += 1;
        continue;
      }
      if (value < min) min = value;
      if (value > max) max = value;
      if (value === 0) zeros += 1;
      if (value - value === 0) sum += value;
      else infinities += 1;
    }
    const finite = data.length - nans - infinities;
    this.#count += data.length;
    this.#nans += nans;
    this.#infinities += infinities;
    this.#zeros += zeros;
    if (data.length > nans) {
      this.#min = min;
      this.#max = max;
    }
    if (finite === 0) return;
    // Deviations from the piece's own mean, joined by the formula of Chan and others.
    const mean = sum / finite;
    let squares = 0;
    for (let at = 0; at < data.length; at += 1) {
      const distance = data[at] - mean;
      if (distance - distance === 0) squares += distance * distance;
    }
    const total = this.#finite + finite;
    const step = mean - this.#mean;
    this.#squares += squares + (step * step * this.#finite * finite) / total;
    this.#mean += (step * finite) / total;
    this.#finite = total;
  }

  /** Return what was added so far. @returns {Summary} */
  summary() {
    const isInteger = /^(u?int|bool)/.test(this.dtype);
    const isWide = /^(float64|complex128)$/.test(this.dtype);
    const write = (/** @type {number | bigint} */ value) =>
      isInteger ? String(value) : isWide ? floatText(Number(value)) : float32Text(Number(value));
    const hasOrder = this.#count > this.#nans;
    const rounded = (/** @type {number} */ value) => floatText(Number(value.toPrecision(7)));
    return {
      count: this.#count,
      nans: this.#nans,
      infinities: this.#infinities,
      zeros: this.#zeros,
      min: hasOrder ? write(this.#min) : null,
      max: hasOrder ? write(this.#max) : null,
      mean: this.#finite > 0 ? rounded(this.#mean) : null,
      deviation: this.#finite > 0 ? rounded(Math.sqrt(this.#squares / this.#finite)) : null,
    };
  }
}
