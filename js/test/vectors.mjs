// @ts-check
/** The cases of the conformance suite, as files in memory. @module */
import { readFileSync, readdirSync } from "node:fs";

const FOLDER = new URL("../../conformance/vectors/", import.meta.url);

/**
 * Read all cases of some areas.
 *
 * @param {string[]} [areas] by default all
 * @returns {any[]} cases, whose `files` are a `Map` from path to bytes
 */
export function readCases(areas) {
  const names =
    areas ??
    readdirSync(FOLDER)
      .filter((name) => name.endsWith(".json"))
      .map((name) => name.slice(0, -5));
  return names.flatMap((area) => {
    const cases = JSON.parse(readFileSync(new URL(`${area}.json`, FOLDER), "utf8"));
    const contents = JSON.parse(readFileSync(new URL(`files/${area}.json`, FOLDER), "utf8"));
    /** @type {Map<string, Uint8Array>} */
    const decoded = new Map();
    for (const [key, entry] of Object.entries(contents)) {
      const { text, base64 } = /** @type {any} */ (entry);
      decoded.set(
        key,
        new Uint8Array(Buffer.from(text ?? base64, text === undefined ? "base64" : "utf8")),
      );
    }
    return cases.map((/** @type {any} */ own) => ({
      ...own,
      files: new Map(
        Object.entries(own.files).map(([path, key]) => [path, decoded.get(String(key))]),
      ),
    }));
  });
}

/** A generator of random numbers from a seed: mulberry32. @param {number} seed */
export function randomFrom(seed) {
  let state = seed >>> 0;
  const next = () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = state;
    t = Math.imul(t ^ (t >>> 15), t | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
  return {
    next,
    /** An integer from 0 to below `end`. @param {number} end */
    below: (end) => Math.floor(next() * end),
    /** One of several. @template T @param {readonly T[]} list @returns {T} */
    pick: (list) => list[Math.floor(next() * list.length)],
  };
}

/**
 * Write a value as canonical msgpack, maps included.
 *
 * @param {any} value @returns {Uint8Array}
 */
export function dumpMsgpack(value) {
  /** @type {number[]} */
  const out = [];
  const big = (/** @type {number | bigint} */ number, /** @type {number} */ width) => {
    const bits = BigInt.asUintN(64, BigInt(number));
    for (let k = width - 1; k >= 0; k -= 1) out.push(Number((bits >> BigInt(8 * k)) & 255n));
  };
  const head = (
    /** @type {number} */ count,
    /** @type {number} */ short,
    /** @type {number} */ most,
    /** @type {[number, number][]} */ forms,
  ) => {
    if (count <= most) {
      out.push(short | count);
      return;
    }
    for (const [tag, width] of forms) {
      if (count < 2 ** (8 * width)) {
        out.push(tag);
        big(count, width);
        return;
      }
    }
  };
  const bytesOf = (/** @type {Uint8Array} */ bytes) => {
    for (const byte of bytes) out.push(byte);
  };
  const write = (/** @type {any} */ entry) => {
    if (entry === null) out.push(0xc0);
    else if (typeof entry === "boolean") out.push(entry ? 0xc3 : 0xc2);
    else if (typeof entry === "string") {
      const raw = new TextEncoder().encode(entry);
      head(raw.length, 0xa0, 31, [
        [0xd9, 1],
        [0xda, 2],
        [0xdb, 4],
      ]);
      bytesOf(raw);
    } else if (entry instanceof Uint8Array) {
      head(entry.length, 0, -1, [
        [0xc4, 1],
        [0xc5, 2],
        [0xc6, 4],
      ]);
      bytesOf(entry);
    } else if (Array.isArray(entry)) {
      head(entry.length, 0x90, 15, [
        [0xdc, 2],
        [0xdd, 4],
      ]);
      entry.forEach(write);
    } else if (entry instanceof Map) {
      head(entry.size, 0x80, 15, [
        [0xde, 2],
        [0xdf, 4],
      ]);
      const keys = [...entry.keys()].sort((a, b) =>
        Buffer.compare(Buffer.from(String(a)), Buffer.from(String(b))),
      );
      for (const key of keys) {
        write(key);
        write(entry.get(key));
      }
    } else if (entry >= 0) {
      const width = entry < 128 ? 0 : entry < 256 ? 1 : entry < 65536 ? 2 : entry < 2 ** 32 ? 4 : 8;
      if (width === 0) out.push(Number(entry));
      else {
        out.push({ 1: 0xcc, 2: 0xcd, 4: 0xce, 8: 0xcf }[width] ?? 0);
        big(entry, width);
      }
    } else {
      const width =
        entry >= -32 ? 0 : entry >= -128 ? 1 : entry >= -32768 ? 2 : entry >= -(2 ** 31) ? 4 : 8;
      if (width === 0) out.push(Number(entry) + 256);
      else {
        out.push({ 1: 0xd0, 2: 0xd1, 4: 0xd2, 8: 0xd3 }[width] ?? 0);
        big(entry, width);
      }
    }
  };
  write(value);
  return Uint8Array.from(out);
}

/** Pack integers below 2^53, as page 10 says. @param {number[]} numbers */
export function pack(numbers) {
  const most = Math.max(0, ...numbers);
  const width = most < 256 ? 1 : most < 65536 ? 2 : most < 2 ** 32 ? 4 : 8;
  const planes = new Uint8Array(width * numbers.length);
  numbers.forEach((number, at) => {
    let rest = number;
    for (let plane = 0; plane < width; plane += 1) {
      planes[plane * numbers.length + at] = rest % 256;
      rest = Math.floor(rest / 256);
    }
  });
  return [width, planes];
}
