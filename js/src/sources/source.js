// @ts-check
/**
 * What a checkpoint is read from.
 *
 * Paths are relative to the source's root, with `/` between components, and `""` for the root.
 *
 * @module
 */
import { CkptError, refuse } from "../errors.js";

/**
 * What is at a path. `other` is a link, a pipe or a device, which no reader opens.
 *
 * @typedef {{kind: "file", nbytes: number} | {kind: "folder"} | {kind: "other"}} Stat
 */

/** @typedef {{name: string, kind: "file" | "folder" | "other"}} Entry */

/**
 * A place with files. All methods fail with a `CkptError` of class `StoreError`.
 *
 * @typedef {object} Source
 * @property {string} name for messages
 * @property {(path: string, signal?: AbortSignal) => Promise<Stat | null>} stat null if nothing is
 *   there
 * @property {(path: string, begin: number, end: number, signal?: AbortSignal) =>
 *   Promise<Uint8Array>} read the bytes `[begin, end)` of a file, fewer where the file ends
 * @property {(path: string, signal?: AbortSignal) => Promise<Entry[]>} list entries of a folder,
 *   none if it doesn't exist
 * @property {(path: string, begin: number, signal?: AbortSignal) =>
 *   Promise<ReadableStream<Uint8Array>>} [stream] the bytes of a file from `begin` to its end, for
 *   `readAhead`
 * @property {(bytes: Uint8Array) => void} [release] take back what `read` gave, for another read
 */

/**
 * Refuse a path that could lead out of the source (REQ-STO-006).
 *
 * @param {string} path
 * @returns {string} the path
 */
export function requirePath(path) {
  const isSafe =
    path === "" ||
    path.split("/").every(
      (part) =>
        part !== "" &&
        part !== "." &&
        part !== ".." &&
        part.length <= 255 &&
        !part.startsWith(".tmp-") &&
        // eslint-disable-next-line no-control-regex
        !/[\\\u0000-\u001f\u007f]/.test(part),
    );
  if (!isSafe) refuse("UNSAFE_PATH", "REQ-STO-006", `${JSON.stringify(path)} isn't a safe path`);
  return path;
}

/**
 * Make an error of the storage.
 *
 * @param {string} code @param {string} detail @param {string} where @param {unknown} [cause]
 */
export const storeError = (code, detail, where, cause) =>
  new CkptError(code, detail, { where, cause });
