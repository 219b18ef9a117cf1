// @ts-check
/** A source in memory, for tests and small checkpoints. @module */
import { requirePath, storeError } from "./source.js";

/**
 * Read from files in memory.
 *
 * @param {Map<string, Uint8Array> | Record<string, Uint8Array>} files by their paths
 * @param {string} [name] for messages
 * @returns {import("./source.js").Source}
 */
export function memorySource(files, name = "memory") {
  const byPath = files instanceof Map ? files : new Map(Object.entries(files));
  const isFolder = (/** @type {string} */ path) =>
    path === "" || [...byPath.keys()].some((own) => own.startsWith(`${path}/`));
  return {
    name,
    async stat(path) {
      const file = byPath.get(requirePath(path));
      if (file !== undefined) return { kind: "file", nbytes: file.length };
      return isFolder(path) ? { kind: "folder" } : null;
    },
    async read(path, begin, end, signal) {
      signal?.throwIfAborted();
      const file = byPath.get(requirePath(path));
      if (file === undefined) throw storeError("STORE_IO", "there is no such file", path);
      return file.subarray(begin, end);
    },
    async list(path) {
      const prefix = requirePath(path) === "" ? "" : `${path}/`;
      /** @type {Map<string, "file" | "folder">} */
      const entries = new Map();
      for (const own of byPath.keys()) {
        if (!own.startsWith(prefix)) continue;
        const [first, ...rest] = own.slice(prefix.length).split("/");
        entries.set(first, rest.length > 0 ? "folder" : "file");
      }
      return [...entries].map(([entry, kind]) => ({ name: entry, kind }));
    },
  };
}
