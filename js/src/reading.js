// @ts-check
/** Reading of files as wholes and in pieces, with sizes checked before bytes. @module */
import { CkptError, refuse } from "./errors.js";

/** @typedef {import("./sources/source.js").Source} Source */

/** Bytes read at once from a file of tensors, or one block if a block is larger. */
export const CHUNK_NBYTES = 4 * 1024 * 1024;

/**
 * Return the size of a file.
 *
 * @param {Source} source @param {string} path @param {AbortSignal} [signal]
 * @returns {Promise<number | null>} null if it doesn't exist
 */
export async function sizeOf(source, path, signal) {
  const stat = await source.stat(path, signal);
  if (stat === null) return null;
  if (stat.kind !== "file") {
    throw new CkptError("UNSAFE_FILE", "this is a link, pipe, device or directory, and no file", {
      clause: "REQ-CKP-002",
      where: path,
    });
  }
  return stat.nbytes;
}

/**
 * Read `[begin, end)` of a file, all of it.
 *
 * @param {Source} source @param {string} path @param {number} begin @param {number} end
 * @param {AbortSignal} [signal]
 */
export async function readExactly(source, path, begin, end, signal) {
  const bytes = await source.read(path, begin, end, signal);
  if (bytes.length !== end - begin) {
    refuse("FILE_NBYTES", "REQ-CKP-003", "the file ends early", path);
  }
  return bytes;
}

/**
 * Read a small file.
 *
 * @param {Source} source @param {string} path @param {number} most refused above this size
 * @param {AbortSignal} [signal]
 * @returns {Promise<Uint8Array | null>} null if it doesn't exist
 */
export async function readSmall(source, path, most, signal) {
  const nbytes = await sizeOf(source, path, signal);
  if (nbytes === null) return null;
  return readLimited(source, path, nbytes, most, signal);
}

/**
 * Read all bytes of a document, unless it is too large.
 *
 * @param {Source} source @param {string} path @param {number} nbytes @param {number} most
 * @param {AbortSignal} [signal]
 */
function readLimited(source, path, nbytes, most, signal) {
  if (nbytes > most) {
    refuse(
      "LIMIT_EXCEEDED",
      "REQ-DOC-008",
      `the document has ${nbytes} bytes, above ${most}`,
      path,
    );
  }
  return readExactly(source, path, 0, nbytes, signal);
}

/**
 * Read a document whose size is stated where it is named.
 *
 * @param {Source} source @param {string} path @param {number} nbytes @param {number} most
 * @param {AbortSignal} [signal]
 */
export async function readNamed(source, path, nbytes, most, signal) {
  const found = await sizeOf(source, path, signal);
  if (found === null) refuse("FILE_MISSING", "REQ-CKP-004", "the file isn't there", path);
  if (found !== nbytes) {
    refuse("FILE_NBYTES", "REQ-CKP-003", `the file has ${found} bytes instead of ${nbytes}`, path);
  }
  return readLimited(source, path, nbytes, most, signal);
}

/**
 * Read consecutive pieces of a file, some at once, and the next ones while these are used. A piece
 * may be overwritten as soon as the next one is asked for.
 *
 * @param {Source} source @param {string} path @param {number} begin
 * @param {number} count of pieces @param {(piece: number) => number} nbytesOf
 * @param {AbortSignal} [signal]
 * @returns {AsyncGenerator<Uint8Array>}
 */
export async function* readPieces(source, path, begin, count, nbytesOf, signal) {
  let piece = 0;
  let at = begin;
  const request = () => {
    if (piece >= count) return null;
    /** @type {number[]} */
    const sizes = [];
    let nbytes = 0;
    while (piece < count && (sizes.length === 0 || nbytes + nbytesOf(piece) <= CHUNK_NBYTES)) {
      sizes.push(nbytesOf(piece));
      nbytes += nbytesOf(piece);
      piece += 1;
    }
    const reading = readExactly(source, path, at, at + nbytes, signal);
    reading.catch(() => {}); // reported when it is awaited, if it ever is
    at += nbytes;
    return { sizes, reading };
  };
  let current = request();
  while (current !== null) {
    const bytes = await current.reading;
    const next = request();
    let from = 0;
    for (const nbytes of current.sizes) {
      yield bytes.subarray(from, from + nbytes);
      from += nbytes;
    }
    source.release?.(bytes);
    current = next;
  }
}
