// @ts-check
/** Headers of shards: the strict profile of safetensors (page 50). @module */
import { exactProduct } from "./boxes.js";
import { TAGS, dtypeOf } from "./dtypes.js";
import { refuse } from "./errors.js";
import { jsonDepth, parseJson } from "./json.js";
import * as limits from "./limits.js";
import { fromUtf8 } from "./text.js";

/**
 * A box in a header, with its bytes counted from the begin of the file.
 *
 * @typedef {{key: string, tag: string, shape: number[], begin: number, end: number}} HeaderBox
 */

/** @param {string} detail @returns {never} */
const badSyntax = (detail) => refuse("SHARD_HEADER_SYNTAX", "REQ-SHD-004", detail);
/** @param {string} detail @returns {never} */
const badMember = (detail) => refuse("SHARD_HEADER_SCHEMA", "REQ-SHD-006", detail);
/** @param {string} detail @returns {never} */
const badOffsets = (detail) => refuse("SHARD_OFFSETS", "REQ-SHD-008", detail);

/**
 * Check the length of a header.
 *
 * @param {Uint8Array} head the first eight bytes of the file, or fewer if it has fewer
 * @param {number} fileNbytes
 * @returns {number} bytes of length, JSON and padding
 */
export function headerNbytesOf(head, fileNbytes) {
  const wrong = (/** @type {string} */ detail) =>
    refuse("SHARD_HEADER_NBYTES", "REQ-SHD-001", detail);
  if (head.length < 8) wrong("the file has no length of a header");
  const view = new DataView(head.buffer, head.byteOffset, 8);
  const length = view.getUint32(0, true) + view.getUint32(4, true) * 2 ** 32;
  if (length < 1 || 8 + length > fileNbytes || (8 + length) % limits.SHARD_ALIGN_NBYTES !== 0) {
    wrong(`a header of ${length} bytes isn't aligned within the file`);
  }
  if (length > limits.SHARD_HEADER_NBYTES) {
    refuse("LIMIT_EXCEEDED", "REQ-SHD-001", "the header is too long");
  }
  return 8 + length;
}

/**
 * Parse the header of a shard.
 *
 * @param {Uint8Array} header length, JSON and padding
 * @param {number} fileNbytes
 * @returns {HeaderBox[]} in the order of their bytes
 */
export function parseHeader(header, fileNbytes) {
  if (headerNbytesOf(header, fileNbytes) !== header.length) {
    refuse(
      "SHARD_HEADER_NBYTES",
      "REQ-SHD-001",
      "the header has another length than the part states",
    );
  }
  let end = header.length;
  while (end > 8 && header[end - 1] === 0x20) end -= 1;
  const raw = header.subarray(8, end);
  if (raw[0] !== 0x7b || raw[raw.length - 1] !== 0x7d)
    badSyntax("the header isn't a padded object");
  if (jsonDepth(raw) > 3) badSyntax("the header nests too deeply");
  const text = fromUtf8(raw);
  if (text === null) return badSyntax("the header isn't UTF-8");
  const parsed = parseJson(text, {
    syntax: badSyntax,
    duplicate: (key) => refuse("DOC_DUPLICATE_KEY", "REQ-SHD-005", `the key ${key} is there twice`),
    number: (spelling) => {
      if (!/^-?[0-9]+$/.test(spelling) || spelling === "-0" || spelling.length > 20) {
        badSyntax(`${spelling.slice(0, 40)} isn't an integer in range`);
      }
      return Number(spelling);
    },
  });
  const entries = Object.entries(/** @type {Record<string, any>} */ (parsed));
  checkText(parsed);
  /** @type {HeaderBox[]} */
  const boxes = [];
  for (const [key, box] of entries) {
    if (key === "__metadata__") checkMetadata(box);
    else boxes.push(readBox(key, box, header.length));
  }
  boxes.sort((a, b) => a.begin - b.begin || a.end - b.end);
  let at = header.length;
  for (const { begin, end: boxEnd } of boxes) {
    if (begin !== at) badOffsets("the boxes of the header don't follow each other");
    at = boxEnd;
  }
  if (at !== fileNbytes) badOffsets("the boxes of the header don't end with the file");
  return boxes;
}

/** Refuse halves of surrogate pairs, which no UTF-8 has. @param {any} value */
function checkText(value) {
  const isWhole = (/** @type {string} */ text) =>
    !/[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/.test(text);
  if (typeof value === "string") {
    if (!isWhole(value)) badSyntax("a string has half of a surrogate pair");
  } else if (value !== null && typeof value === "object") {
    for (const [key, member] of Object.entries(value)) {
      checkText(key);
      checkText(member);
    }
  }
}

/** @param {any} value whether it is an object of JSON */
const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

/** @param {any} metadata */
function checkMetadata(metadata) {
  if (!isObject(metadata) || !Object.values(metadata).every((value) => typeof value === "string")) {
    badMember("__metadata__ doesn't map strings to strings");
  }
}

/** @param {string} key @param {any} box @param {number} begin of the data @returns {HeaderBox} */
function readBox(key, box, begin) {
  const place = JSON.stringify(key);
  if (!isObject(box) || Object.keys(box).sort().join() !== "data_offsets,dtype,shape") {
    badMember(`${place} isn't dtype, shape and data_offsets`);
  }
  const { dtype, shape, data_offsets: range } = box;
  if (typeof dtype !== "string" || !TAGS.has(dtype)) {
    refuse("SHARD_DTYPE", "REQ-SHD-006", `${place} has an unknown dtype`);
  }
  if (
    !Array.isArray(shape) ||
    shape.length > limits.NDIM ||
    !shape.every((extent) => Number.isInteger(extent) && extent >= 0 && extent <= limits.DIM) ||
    exactProduct(shape.filter((extent) => extent > 0)) > limits.ELEMENTS
  ) {
    refuse("SHARD_SHAPE", "REQ-SHD-007", `${place} has a shape out of range`);
  }
  if (
    !Array.isArray(range) ||
    range.length !== 2 ||
    !range.every((offset) => Number.isInteger(offset) && offset >= 0) ||
    range[0] > range[1]
  ) {
    badMember(`${place} hasn't two ascending offsets`);
  }
  const width = /** @type {import("./dtypes.js").Dtype} */ (TAGS.get(dtype)).nbytes;
  if (BigInt(range[1] - range[0]) !== exactProduct(shape) * BigInt(width)) {
    badOffsets(`${place} has other bytes than shape and dtype need`);
  }
  return { key, tag: dtype, shape, begin: begin + range[0], end: begin + range[1] };
}

/**
 * Check that a header lists exactly a part's extents in the file (REQ-SHD-010).
 *
 * @param {HeaderBox[]} boxes @param {import("./parts.js").Part} part @param {number} file
 */
export function compareHeader(boxes, part, file) {
  const { extents, tensors } = part;
  const differs = (/** @type {string} */ detail) => refuse("SHARD_MISMATCH", "REQ-SHD-010", detail);
  const byKey = new Map(boxes.map((box) => [box.key, box]));
  let count = 0;
  for (let row = 0; row < extents.count; row += 1) {
    if (extents.file[row] !== file) continue;
    count += 1;
    const box = extents.box[row];
    const tensor = part.boxTensor[box];
    const key = extents.key[row] === "" ? tensors.name[tensor] : extents.key[row];
    const listed = byKey.get(key);
    if (listed === undefined) return differs(`the header lacks ${JSON.stringify(key)}`);
    byKey.delete(key);
    const dtype = dtypeOf(part.dtypes[tensors.dtype[tensor]]);
    const nbytes = part.boxNbytes[box];
    const shape =
      dtype.tag === null
        ? [nbytes]
        : Array.from(part.boxShape.subarray(part.boxDims[box], part.boxDims[box + 1]));
    if (
      listed.tag !== (dtype.tag ?? "U8") ||
      listed.shape.length !== shape.length ||
      listed.shape.some((extent, dim) => extent !== shape[dim]) ||
      listed.begin !== extents.byteBegin[row] ||
      listed.end !== extents.byteBegin[row] + nbytes ||
      extents.nbytes[row] !== nbytes
    ) {
      differs(`the header describes ${JSON.stringify(key)} otherwise than the part`);
    }
  }
  if (count !== boxes.length) differs("the header lists more boxes than the part");
}
