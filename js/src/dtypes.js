// @ts-check
/** The dtypes of page 50, and their values as numbers of JavaScript. @module */

/**
 * @typedef {object} Dtype
 * @property {string} name
 * @property {number} nbytes bytes of an element
 * @property {string | null} tag of safetensors, or null
 * @property {number} lane bytes of a lane of page 55
 * @property {boolean} isSigned whether lanes are sign and magnitude
 */

/** @type {Map<string, Dtype>} */
export const DTYPES = new Map(
  /** @type {[string, number, string | null, number, boolean][]} */ ([
    ["bool", 1, "BOOL", 1, false],
    ["uint8", 1, "U8", 1, false],
    ["int8", 1, "I8", 1, false],
    ["uint16", 2, "U16", 2, false],
    ["int16", 2, "I16", 2, false],
    ["uint32", 4, "U32", 4, false],
    ["int32", 4, "I32", 4, false],
    ["uint64", 8, "U64", 8, false],
    ["int64", 8, "I64", 8, false],
    ["float16", 2, "F16", 2, true],
    ["bfloat16", 2, "BF16", 2, true],
    ["float32", 4, "F32", 4, true],
    ["float64", 8, "F64", 8, true],
    ["complex64", 8, "C64", 4, true],
    ["float8_e4m3fn", 1, "F8_E4M3", 1, true],
    ["float8_e5m2", 1, "F8_E5M2", 1, true],
    ["float8_e8m0fnu", 1, "F8_E8M0", 1, false],
    ["float8_e4m3fnuz", 1, "F8_E4M3FNUZ", 1, true],
    ["float8_e5m2fnuz", 1, "F8_E5M2FNUZ", 1, true],
    ["complex128", 16, null, 8, true],
    ["complex32", 4, null, 2, true],
    ["float4_e2m1fn_x2", 1, null, 1, false],
  ]).map(([name, nbytes, tag, lane, isSigned]) => [name, { name, nbytes, tag, lane, isSigned }]),
);

/** @type {Map<string, Dtype>} The dtypes by their tags of safetensors. */
export const TAGS = new Map(
  [...DTYPES.values()].flatMap((dtype) => (dtype.tag === null ? [] : [[dtype.tag, dtype]])),
);

/** Return a dtype that is known to exist. @param {string} name */
export const dtypeOf = (name) => /** @type {Dtype} */ (DTYPES.get(name));

/**
 * A typed array with the elements of a dtype that JavaScript has, and otherwise their bytes.
 *
 * @typedef {Uint8Array | Int8Array | Uint16Array | Int16Array | Uint32Array | Int32Array
 *   | BigUint64Array | BigInt64Array | Float32Array | Float64Array} Elements
 */

/** @type {Record<string, {new (buffer: ArrayBuffer): Elements}>} */
const ARRAYS = {
  int8: Int8Array,
  uint16: Uint16Array,
  int16: Int16Array,
  uint32: Uint32Array,
  int32: Int32Array,
  uint64: BigUint64Array,
  int64: BigInt64Array,
  float32: Float32Array,
  float64: Float64Array,
  complex64: Float32Array,
  complex128: Float64Array,
  float16: Uint16Array,
  bfloat16: Uint16Array,
  complex32: Uint16Array,
};

/**
 * View bytes as a typed array.
 *
 * Complex elements are two numbers each. 16-bit floats are their bits, as `Uint16Array`, and floats
 * of 8 or 4 bits are their bytes: `toFloat32` gives their values.
 *
 * @param {string} dtype @param {Uint8Array} bytes from the begin of a buffer of their own
 * @returns {Elements}
 */
export function toElements(dtype, bytes) {
  const kind = ARRAYS[dtype];
  if (kind === undefined) return bytes;
  const whole = bytes.byteOffset === 0 && bytes.byteLength === bytes.buffer.byteLength;
  return new kind(/** @type {ArrayBuffer} */ (whole ? bytes.buffer : bytes.slice().buffer));
}

/** @type {DataView} */
const scratch = new DataView(new ArrayBuffer(4));

/** Return the value of a binary16. @param {number} bits */
export function fromFloat16(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

/** Return the value of a bfloat16. @param {number} bits */
export function fromBfloat16(bits) {
  scratch.setUint32(0, bits << 16);
  return scratch.getFloat32(0);
}

/**
 * Return a table of the values of a float of eight bits.
 *
 * @param {number} exponentBits @param {number} bias @param {"ieee" | "fn" | "fnuz"} kind
 */
function float8Table(exponentBits, bias, kind) {
  const fractionBits = 7 - exponentBits;
  const table = new Float32Array(256);
  for (let bits = 0; bits < 256; bits += 1) {
    const sign = bits & 128 ? -1 : 1;
    const exponent = (bits & 127) >> fractionBits;
    const fraction = (bits & ((1 << fractionBits) - 1)) / (1 << fractionBits);
    let value =
      exponent === 0 ? fraction * 2 ** (1 - bias) : (1 + fraction) * 2 ** (exponent - bias);
    if (kind === "ieee" && exponent === (1 << exponentBits) - 1) value = fraction ? NaN : Infinity;
    if (kind === "fn" && (bits & 127) === 127) value = NaN;
    if (kind === "fnuz" && bits === 128) value = NaN;
    table[bits] = sign * value;
  }
  return table;
}

/** @type {Record<string, () => Float32Array>} */
const FLOAT8 = {
  float8_e4m3fn: () => float8Table(4, 7, "fn"),
  float8_e5m2: () => float8Table(5, 15, "ieee"),
  float8_e4m3fnuz: () => float8Table(4, 8, "fnuz"),
  float8_e5m2fnuz: () => float8Table(5, 16, "fnuz"),
  float8_e8m0fnu: () =>
    Float32Array.from({ length: 256 }, (_, bits) => (bits === 255 ? NaN : 2 ** (bits - 127))),
};
const FLOAT4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6];

/**
 * Convert elements to numbers for display: any dtype, complex elements as two numbers each, and two
 * numbers for each byte of `float4_e2m1fn_x2`, the lower four bits first.
 *
 * The conversion rounds: integers above 2^24 and `float64` lose digits.
 *
 * @param {string} dtype
 * @param {Elements} elements as `readTensor` returns them, or bytes
 * @returns {Float32Array}
 */
export function toFloat32(dtype, elements) {
  if (dtype === "float32" || dtype === "complex64") {
    if (elements instanceof Float32Array) return elements;
  }
  const bytes = new Uint8Array(elements.buffer, elements.byteOffset, elements.byteLength);
  if (Object.hasOwn(FLOAT8, dtype)) {
    const table = FLOAT8[dtype]();
    return Float32Array.from(bytes, (bits) => table[bits]);
  }
  if (dtype === "float4_e2m1fn_x2") {
    const values = new Float32Array(2 * bytes.length);
    bytes.forEach((byte, at) => {
      for (const [half, bits] of [byte & 15, byte >> 4].entries()) {
        values[2 * at + half] = (bits & 8 ? -1 : 1) * FLOAT4[bits & 7];
      }
    });
    return values;
  }
  const typed = toElements(dtype, bytes);
  if (dtype === "float16" || dtype === "complex32") {
    return Float32Array.from(/** @type {Uint16Array} */ (typed), fromFloat16);
  }
  if (dtype === "bfloat16") {
    return Float32Array.from(/** @type {Uint16Array} */ (typed), fromBfloat16);
  }
  const values = new Float32Array(typed.length);
  for (let at = 0; at < typed.length; at += 1) values[at] = Number(typed[at]);
  return values;
}
