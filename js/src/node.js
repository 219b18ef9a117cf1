// @ts-check
/** A source in the file system, for Node. Browsers use `ckptfmt` without this module. @module */
import { constants } from "node:fs";
import { lstat, open, readdir, realpath } from "node:fs/promises";
import { basename, dirname, join as joinPath } from "node:path";
import { requirePath, storeError } from "./sources/source.js";

/** @param {unknown} error */
const codeOf = (error) => /** @type {NodeJS.ErrnoException} */ (error).code ?? "";

/** @param {unknown} error @param {string} path @returns {import("./errors.js").CkptError} */
const failure = (error, path) =>
  /^E(ACCES|PERM)$/.test(codeOf(error))
    ? storeError("STORE_ACCESS", "permission denied", path, error)
    : storeError("STORE_IO", `the storage reported ${codeOf(error) || error}`, path, error);

/** @param {{isFile(): boolean, isDirectory(): boolean}} stats */
const kindOf = (stats) => (stats.isFile() ? "file" : stats.isDirectory() ? "folder" : "other");

/**
 * Read from a directory. Links below the directory are never followed.
 *
 * @param {string} directory its own links are resolved
 * @returns {import("./sources/source.js").Source}
 */
export function directorySource(directory) {
  /** @type {Promise<string> | null} */
  let root = null;
  const placeOf = async (/** @type {string} */ path) => {
    root ??= realpath(directory);
    try {
      return joinPath(await root, ...requirePath(path).split("/"));
    } catch (error) {
      root = null;
      if (codeOf(error) === "ENOENT") return joinPath(directory, path);
      throw error;
    }
  };
  /** Whether a folder above a path is a link or no folder. @param {string} path */
  const isBehindLink = async (path) => {
    const parts = path.split("/");
    for (let depth = 1; depth < parts.length; depth += 1) {
      try {
        const stats = await lstat(await placeOf(parts.slice(0, depth).join("/")));
        if (!stats.isDirectory()) return true;
      } catch (error) {
        if (codeOf(error) === "ENOENT" || codeOf(error) === "ENOTDIR") return false;
        throw error;
      }
    }
    return false;
  };
  return {
    name: directory,
    async stat(path) {
      try {
        if (await isBehindLink(path)) return { kind: "other" };
        const stats = await lstat(await placeOf(path));
        const kind = kindOf(stats);
        return kind === "file" ? { kind, nbytes: stats.size } : { kind };
      } catch (error) {
        if (codeOf(error) === "ENOENT" || codeOf(error) === "ENOTDIR") return null;
        throw error instanceof Error && "where" in error ? error : failure(error, path);
      }
    },
    async read(path, begin, end, signal) {
      signal?.throwIfAborted();
      let file = null;
      try {
        // A pipe or a device in the place of the file neither blocks nor is read.
        const flags =
          constants.O_RDONLY | (constants.O_NOFOLLOW ?? 0) | (constants.O_NONBLOCK ?? 0);
        file = await open(await placeOf(path), flags);
        const bytes = new Uint8Array(Math.max(0, end - begin));
        let count = 0;
        while (count < bytes.length) {
          const { bytesRead } = await file.read(bytes, count, bytes.length - count, begin + count);
          if (bytesRead === 0) break;
          count += bytesRead;
        }
        return bytes.subarray(0, count);
      } catch (error) {
        throw error instanceof Error && "where" in error ? error : failure(error, path);
      } finally {
        await file?.close();
      }
    },
    async list(path) {
      try {
        const entries = await readdir(await placeOf(path), { withFileTypes: true });
        return entries.map((entry) => ({ name: entry.name, kind: kindOf(entry) }));
      } catch (error) {
        if (codeOf(error) === "ENOENT" || codeOf(error) === "ENOTDIR") return [];
        throw error instanceof Error && "where" in error ? error : failure(error, path);
      }
    },
  };
}

/**
 * Return source and path of the checkpoint in a directory: the source is the directory around it,
 * so that `run.json` and the bases of a delta are found.
 *
 * @param {string} directory
 * @returns {Promise<{source: import("./sources/source.js").Source, path: string}>}
 */
export async function locate(directory) {
  let resolved = directory;
  try {
    resolved = await realpath(directory);
  } catch (error) {
    if (codeOf(error) !== "ENOENT" && codeOf(error) !== "ENOTDIR") throw failure(error, directory);
    resolved = joinPath(
      await realpath(dirname(directory)).catch(() => dirname(directory)),
      basename(directory),
    );
  }
  return { source: directorySource(dirname(resolved)), path: basename(resolved) };
}
