// @ts-check
/** Groups: their rules, predictions bit by bit, and the encoding `gradient` (page 56). @module */
import { fromBfloat16, fromFloat16 } from "./dtypes.js";
import { CkptError } from "./errors.js";
import { decodeBlock, malformed } from "./encodings.js";
import { dictEntries, parseTree, toPlain } from "./tree.js";

const fround = Math.fround;

/** Members of a rule in their order: the kinds that have each, and its values; null for a float. */
const MEMBERS = /** @type {[string, string, unknown[] | null][]} */ ([
  ["kind", "adam sgd cast", ["adam", "sgd", "cast"]],
  ["gradient", "adam sgd", ["float32", "bfloat16", "float16"]],
  ["arithmetic", "adam sgd", ["separate", "fused", "double"]],
  ["moment", "adam", ["lerp", "sum"]],
  ["square", "adam", ["gain_first", "gain_last"]],
  ["update", "adam", ["product", "quotient"]],
  ["copy", "adam sgd cast", ["bfloat16", "float16", ""]],
  ["amsgrad", "adam", [true, false]],
  ["nesterov", "sgd", [true, false]],
  ["clip", "adam sgd", null],
  ["l2", "adam sgd", null],
  ["decay", "adam sgd", null],
  ["gain", "adam sgd", null],
  ["square_decay", "adam", null],
  ["square_gain", "adam", null],
  ["shrink", "adam", null],
  ["step_size", "adam sgd", null],
  ["bias", "adam", null],
  ["eps", "adam", null],
]);

/**
 * The computation of a group's predictions.
 *
 * @typedef {object} Rule
 * @property {"adam" | "sgd" | "cast"} kind
 * @property {string[]} roles in the order of decoding
 * @property {Record<string, any>} values by the names of the members
 */

/**
 * Parse a rule.
 *
 * @param {Uint8Array} bytes a tree
 * @param {string} kind of the group
 * @returns {Rule}
 * @throws {CkptError} `ENCODED_FORM`
 */
export function parseRule(bytes, kind) {
  const clause = "REQ-PRE-006";
  if (bytes.length > 4096) malformed(clause, "a rule has more than 4096 bytes");
  /** @type {import("./tree.js").Tree} */
  let tree;
  try {
    tree = parseTree(bytes);
  } catch (error) {
    if (!(error instanceof CkptError)) throw error;
    return malformed(clause, `a rule isn't a tree: ${error.detail}`);
  }
  const members = MEMBERS.filter(([, kinds]) => kinds.split(" ").includes(kind));
  const entries = dictEntries(tree);
  if (entries === null || entries.length !== members.length) {
    return malformed(clause, "a rule isn't a dict of the members of its kind");
  }
  /** @type {Record<string, any>} */
  const values = {};
  members.forEach(([name, , allowed], at) => {
    const [key, value] = entries[at];
    if (key !== name) malformed(clause, `a rule lacks ${name}, or has it in another place`);
    const plain = toPlain(value);
    if (allowed === null) {
      const isFloat =
        value !== null && typeof value === "object" && "kind" in value && value.kind === "float";
      if (!isFloat) malformed(clause, `${name} of a rule isn't a float`);
      if (!Number.isFinite(plain)) malformed("REQ-PRE-008", `${name} of a rule isn't finite`);
    } else if (
      !allowed.includes(plain) ||
      (name === "kind" && plain !== kind) ||
      (name === "arithmetic" && plain === "double" && kind !== "adam") ||
      (name === "copy" && plain === "" && kind === "cast")
    ) {
      malformed(
        typeof allowed[0] === "boolean" ? clause : "REQ-PRE-007",
        `${name} of a rule has another value than its kind allows`,
      );
    }
    values[name] = plain;
  });
  const copy = values.copy ? ["copy"] : [];
  const roles =
    kind === "cast"
      ? ["master", "weight"]
      : kind === "sgd"
        ? ["momentum_buffer", "weight", ...copy]
        : [
            "exp_avg",
            "exp_avg_sq",
            ...(values.amsgrad ? ["max_exp_avg_sq"] : []),
            "weight",
            ...copy,
          ];
  return { kind: /** @type {Rule["kind"]} */ (kind), roles, values };
}

/**
 * Check that boxes can be the members of a rule's group.
 *
 * @param {Rule} rule @param {string[]} dtypes of the boxes
 */
export function checkRoles(rule, dtypes) {
  const { roles, values, kind } = rule;
  const isCopy = (/** @type {string} */ role) =>
    role === "copy" || (kind === "cast" && role === "weight");
  if (
    dtypes.length !== roles.length ||
    !roles.every((role, at) => dtypes[at] === (isCopy(role) ? values.copy : "float32"))
  ) {
    malformed("REQ-PRE-001", "the boxes of a group don't have the roles of its rule");
  }
}

/**
 * The roles whose base blocks the prediction of a role needs.
 *
 * @param {Rule} rule
 * @param {string} role
 */
export function baseRoles({ kind, values }, role) {
  if (kind === "cast") return [];
  const first = kind === "adam" ? "exp_avg" : "momentum_buffer";
  if (role === first) return [first];
  if (role === "copy") return [];
  // The second moment, and the weight of nesterov, are predicted from the gradient.
  const usesGradient = role === "exp_avg_sq" || (kind === "sgd" && values.nesterov);
  const usesWeight = usesGradient && values.l2 !== 0 && values.gradient !== "float32";
  return [...new Set([role, ...(usesGradient ? [first] : []), ...(usesWeight ? ["weight"] : [])])];
}

/**
 * The roles whose new blocks the prediction of a role needs.
 *
 * @param {Rule} rule
 * @param {string} role
 */
export function newRoles({ kind, values }, role) {
  if (kind === "cast") return role === "weight" ? ["master"] : [];
  const first = kind === "adam" ? "exp_avg" : "momentum_buffer";
  if (role === first) return [];
  if (role === "copy") return ["weight"];
  if (role === "exp_avg_sq") return [first];
  if (role === "max_exp_avg_sq") return ["exp_avg_sq"];
  if (kind === "sgd") return [first];
  return [first, values.amsgrad ? "max_exp_avg_sq" : "exp_avg_sq"];
}

const scratchFloats = new Float32Array(1);
const scratchBits = new Uint32Array(scratchFloats.buffer);

/** Round a binary32, given by its bits, to bfloat16. @param {number} bits */
function toBfloat16(bits) {
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return ((bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16) & 0xffff;
}

/** Round a binary32, given by its bits, to binary16. @param {number} bits */
function toFloat16(bits) {
  const sign = (bits >>> 16) & 0x8000;
  const rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return 0x7e00;
  if (rest >= 0x47800000) return sign | 0x7c00;
  if (rest < 0x38800000) {
    // A denormal: its unit is 2^-24, and adding 0.5 rounds it there, to nearest with ties to even.
    scratchBits[0] = rest;
    scratchFloats[0] += 0.5;
    return sign | (scratchBits[0] - 0x3f000000);
  }
  return sign | ((rest - 0x38000000 + 0xfff + ((rest >>> 13) & 1)) >>> 13);
}

/** @param {string} dtype @returns {(bits: number) => number} */
const rounder = (dtype) => (dtype === "bfloat16" ? toBfloat16 : toFloat16);

/** @param {string} dtype @returns {(bits: number) => number} */
const widener = (dtype) => (dtype === "bfloat16" ? fromBfloat16 : fromFloat16);

/**
 * fma of page 56: with `separate`, product and sum are each rounded to binary32.
 *
 * @param {boolean} isSeparate
 * @returns {(a: number, x: number, y: number) => number}
 */
const fmaOf = (isSeparate) =>
  isSeparate ? (a, x, y) => fround(fround(a * x) + y) : (a, x, y) => fround(a * x + y);

/**
 * The scalars of a rule as they are used: `wide` ones stay binary64 with `double`.
 *
 * @param {Rule} rule
 */
function scalarsOf({ values }) {
  const isDouble = values.arithmetic === "double";
  const product = isDouble
    ? (/** @type {number} */ a, /** @type {number} */ b) => a * b
    : (/** @type {number} */ a, /** @type {number} */ b) => fround(a * b);
  return {
    isDouble,
    /** A product that stays binary64 with `double`. */
    product,
    fma: fmaOf(values.arithmetic === "separate"),
    narrow: (/** @type {string} */ name) => fround(values[name]),
    wide: (/** @type {string} */ name) => (isDouble ? values[name] : fround(values[name])),
  };
}

/** Elements of float32 by role. @typedef {Map<string, Float32Array>} Blocks */

/**
 * Compute the gradient from new and old first moment (REQ-PRE-009).
 *
 * @param {Rule} rule @param {Float32Array} now @param {Float32Array} before
 * @param {Float32Array | undefined} weight the old one, where l2 needs it
 * @returns {Float32Array}
 */
function gradientOf(rule, now, before, weight) {
  const { values } = rule;
  const { fma, narrow } = scalarsOf(rule);
  const [gain, decay, l2, clip] = ["gain", "decay", "l2", "clip"].map(narrow);
  const isLerp = values.moment === "lerp";
  const isRounded = values.gradient !== "float32";
  const round = rounder(values.gradient);
  const widen = widener(values.gradient);
  const gradient = new Float32Array(now.length);
  for (let at = 0; at < now.length; at += 1) {
    const m = before[at];
    let e = isLerp
      ? fround(fround(fround(now[at] - m) / gain) + m)
      : fround(fround(now[at] - fround(decay * m)) / gain);
    if (isRounded) {
      const w = weight === undefined ? 0 : weight[at];
      if (values.l2 !== 0) e = fround(e - fround(l2 * w));
      if (values.clip !== 1) e = fround(e / clip);
      scratchFloats[0] = e;
      e = widen(round(scratchBits[0]));
      if (values.clip !== 1) e = fround(e * clip);
      if (values.l2 !== 0) e = fma(l2, w, e);
    }
    gradient[at] = e;
  }
  return gradient;
}

/** Use the bits of the base where a prediction is a NaN. @param {Float32Array} prediction
 *  @param {Float32Array} base */
function replaceNans(prediction, base) {
  const to = new Uint32Array(prediction.buffer, prediction.byteOffset, prediction.length);
  const from = new Uint32Array(base.buffer, base.byteOffset, base.length);
  for (let at = 0; at < prediction.length; at += 1) {
    if (Number.isNaN(prediction[at])) to[at] = from[at];
  }
  return prediction;
}

/**
 * Compute the first moment that a gradient leads to (REQ-PRE-011).
 *
 * @param {Rule} rule @param {Float32Array} before @param {Float32Array | null} gradient null for 0
 * @returns {Float32Array}
 */
function firstMoment(rule, before, gradient) {
  const { isDouble, product, fma, wide } = scalarsOf(rule);
  const gain = wide("gain");
  const decay = wide("decay");
  const isLerp = rule.values.moment === "lerp";
  const isInner = gain > -0.5 && gain < 0.5;
  const outer = isDouble ? gain - 1 : fround(gain - 1);
  const now = new Float32Array(before.length);
  for (let at = 0; at < before.length; at += 1) {
    const m = before[at];
    const g = gradient === null ? 0 : gradient[at];
    if (!isLerp) now[at] = fma(gain, g, product(decay, m));
    else {
      const difference = fround(g - m);
      now[at] = isInner ? fma(gain, difference, m) : fma(outer, difference, g);
    }
  }
  return replaceNans(now, before);
}

/** @param {Float32Array} from @param {string} dtype @returns {Uint8Array} rounded to 16 bits */
function roundBlock(from, dtype) {
  const bits = new Uint32Array(from.buffer, from.byteOffset, from.length);
  const round = rounder(dtype);
  return new Uint8Array(Uint16Array.from(bits, round).buffer);
}

/**
 * Predict the elements of a member.
 *
 * @param {Rule} rule @param {string} role
 * @param {Blocks} bases the roles of `baseRoles` @param {Blocks} news the roles of `newRoles`
 * @returns {Uint8Array} as many elements as the blocks given
 */
export function predict(rule, role, bases, news) {
  const { kind, values } = rule;
  const block = (/** @type {Blocks} */ blocks, /** @type {string} */ name) =>
    /** @type {Float32Array} */ (blocks.get(name));
  const bytes = (/** @type {Float32Array} */ floats) => new Uint8Array(floats.buffer);
  if (kind === "cast") return roundBlock(block(news, "master"), values.copy);
  if (role === "copy") return roundBlock(block(news, "weight"), values.copy);
  const first = kind === "adam" ? "exp_avg" : "momentum_buffer";
  if (role === first) return bytes(firstMoment(rule, block(bases, first), null));
  const { fma, product, narrow, wide } = scalarsOf(rule);
  const gradient = () =>
    gradientOf(rule, block(news, first), block(bases, first), bases.get("weight"));
  const old = block(bases, role);
  const now = new Float32Array(old.length);
  if (role === "exp_avg_sq") {
    const g = gradient();
    const [gain, decay] = [wide("square_gain"), wide("square_decay")];
    const isFirst = values.square === "gain_first";
    for (let at = 0; at < now.length; at += 1) {
      const rest = product(decay, old[at]);
      now[at] = isFirst
        ? fma(product(gain, g[at]), g[at], rest)
        : fma(gain, product(g[at], g[at]), rest);
    }
  } else if (role === "max_exp_avg_sq") {
    const square = block(news, "exp_avg_sq");
    for (let at = 0; at < now.length; at += 1)
      now[at] = square[at] > old[at] ? square[at] : old[at];
  } else if (kind === "adam") {
    const moment = block(news, first);
    const square = block(news, values.amsgrad ? "max_exp_avg_sq" : "exp_avg_sq");
    const [bias, eps, stepSize] = ["bias", "eps", "step_size"].map(narrow);
    const shrink = wide("shrink");
    const isProduct = values.update === "product";
    for (let at = 0; at < now.length; at += 1) {
      const r = fround(fround(fround(Math.sqrt(square[at])) / bias) + eps);
      const u = values.shrink === 1 ? old[at] : fround(shrink * old[at]);
      now[at] = isProduct
        ? fround(u - fround(fround(stepSize * moment[at]) / r))
        : fma(-stepSize, fround(moment[at] / r), u);
    }
  } else {
    const moment = block(news, first);
    const g = values.nesterov ? gradient() : null;
    const [decay, stepSize] = ["decay", "step_size"].map(narrow);
    for (let at = 0; at < now.length; at += 1) {
      const d = g === null ? moment[at] : fma(decay, moment[at], g[at]);
      now[at] = fma(-stepSize, d, old[at]);
    }
  }
  return bytes(replaceNans(now, old));
}

/**
 * Decode a block with the encoding `gradient`.
 *
 * @param {Rule} rule @param {string} role @param {Uint8Array} stored @param {number} nbytes
 * @param {Blocks} bases
 * @returns {Uint8Array}
 */
export function decodeGradient(rule, role, stored, nbytes, bases) {
  const { values, roles } = rule;
  if (role !== roles[0] || rule.kind === "cast" || values.gradient === "float32") {
    malformed("REQ-PRE-013", "a block of this role can't be stored as a gradient");
  }
  if (stored.length < 5) malformed("REQ-PRE-014", "the stored bytes end early");
  const form = stored[0];
  const count = new DataView(stored.buffer, stored.byteOffset).getUint32(1, true);
  if (form > 1 || 5 + count > stored.length) {
    malformed("REQ-PRE-014", "a stored gradient has an unknown form, or ends early");
  }
  const raw = stored.subarray(5, 5 + count);
  if (form === 0 && count !== nbytes / 2) malformed("REQ-PRE-014", "a stored gradient isn't whole");
  const halves =
    form === 0 ? raw.slice() : decodeBlock("planes", raw, nbytes / 2, values.gradient, null);
  const before = /** @type {Float32Array} */ (bases.get(role));
  const { fma, narrow } = scalarsOf(rule);
  const [clip, l2] = ["clip", "l2"].map(narrow);
  const weight = bases.get("weight");
  const widen = widener(values.gradient);
  const gradient = Float32Array.from(
    new Uint16Array(halves.buffer, halves.byteOffset, nbytes / 4),
    widen,
  );
  for (let at = 0; at < gradient.length; at += 1) {
    if (values.clip !== 1) gradient[at] = fround(gradient[at] * clip);
    if (values.l2 !== 0) {
      gradient[at] = fma(l2, /** @type {Float32Array} */ (weight)[at], gradient[at]);
    }
  }
  const moment = firstMoment(rule, before, gradient);
  const base = new Uint8Array(moment.buffer);
  return decodeBlock("sparse", stored.subarray(5 + count), nbytes, "float32", base);
}

/**
 * The roles whose base blocks the decoding of a `gradient` block needs.
 *
 * @param {Rule} rule @param {string} role
 */
export const gradientRoles = ({ values }, role) =>
  values.l2 !== 0 && values.gradient !== "float32" ? [role, "weight"] : [role];
