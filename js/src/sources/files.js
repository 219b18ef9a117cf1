// @ts-check
/** Sources of a browser: chosen or dropped files, and handles of folders. @module */
import { baseName, join } from "../names.js";
import { requirePath, storeError } from "./source.js";

/** @typedef {import("./source.js").Source} Source */
/** @typedef {import("./source.js").Entry} Entry */

/**
 * Read from files with their paths.
 *
 * @param {Map<string, Blob>} files
 * @param {string} name
 * @returns {Source}
 */
export function blobSource(files, name) {
  /** @type {Map<string, Map<string, "file" | "folder">>} the entries of each folder */
  const folders = new Map([["", new Map()]]);
  for (const path of files.keys()) {
    const parts = path.split("/");
    for (let depth = 0, folder = ""; depth < parts.length; depth += 1) {
      const entries = folders.get(folder) ?? new Map();
      folders.set(folder, entries);
      entries.set(parts[depth], depth === parts.length - 1 ? "file" : "folder");
      folder = join(folder, parts[depth]);
    }
  }
  return {
    name,
    async stat(path) {
      const file = files.get(requirePath(path));
      if (file !== undefined) return { kind: "file", nbytes: file.size };
      return folders.has(path) ? { kind: "folder" } : null;
    },
    async read(path, begin, end, signal) {
      signal?.throwIfAborted();
      const file = files.get(requirePath(path));
      if (file === undefined) throw storeError("STORE_IO", "there is no such file", path);
      return readBlob(file, begin, end, path);
    },
    async stream(path, begin) {
      const file = files.get(requirePath(path));
      if (file === undefined) throw storeError("STORE_IO", "there is no such file", path);
      return file.slice(begin).stream();
    },
    async list(path) {
      return [...(folders.get(requirePath(path)) ?? [])].map(([entry, kind]) => ({
        name: entry,
        kind,
      }));
    },
  };
}

/** @param {Blob} blob @param {number} begin @param {number} end @param {string} path */
async function readBlob(blob, begin, end, path) {
  try {
    return new Uint8Array(await blob.slice(begin, end).arrayBuffer());
  } catch (cause) {
    throw storeError("STORE_IO", "the browser can't read the file any more", path, cause);
  }
}

/**
 * Read from the files of `<input type="file" webkitdirectory>`, or from any list of files.
 *
 * The paths are those of `webkitRelativePath`, without a first folder that all files share.
 *
 * @param {Iterable<File> | ArrayLike<File>} list
 * @returns {Source}
 */
export function fileListSource(list) {
  const { files, name } = listedFiles(list);
  return blobSource(files, name);
}

/**
 * Return the files of a list by their paths, for a source in a worker.
 *
 * @param {Iterable<File> | ArrayLike<File>} list
 * @returns {{files: Map<string, Blob>, name: string}}
 */
export function listedFiles(list) {
  const files = Array.from(/** @type {ArrayLike<File>} */ (list));
  const pathOf = (/** @type {File} */ file) => file.webkitRelativePath || file.name;
  const first = files.length > 0 ? pathOf(files[0]).split("/")[0] : "";
  const isShared = files.every((file) => pathOf(file).startsWith(`${first}/`));
  const paths = files.map(
    (file) =>
      /** @type {[string, Blob]} */ ([
        isShared ? pathOf(file).slice(first.length + 1) : pathOf(file),
        file,
      ]),
  );
  return { files: new Map(paths), name: isShared ? first : "files" };
}

/**
 * Read from what was dropped onto a page. Call this within the handler of `drop`.
 *
 * A single dropped folder is the root of the source; of several entries each keeps its name.
 *
 * @param {DataTransfer} transfer
 * @returns {Promise<Source>}
 */
export async function dropSource(transfer) {
  const { files, name } = await droppedFiles(transfer);
  return blobSource(files, name);
}

/**
 * Return the dropped files by their paths, for a source in a worker. Call this within the handler.
 *
 * @param {DataTransfer} transfer
 * @returns {Promise<{files: Map<string, Blob>, name: string}>}
 */
export async function droppedFiles(transfer) {
  // The list is empty as soon as the handler has returned, so that it is read at once.
  const entries = Array.from(transfer.items).flatMap((item) => {
    const entry = item.kind === "file" ? item.webkitGetAsEntry?.() : null;
    return entry ? [entry] : [];
  });
  if (entries.length === 0) return listedFiles(transfer.files);
  /** @type {Map<string, Blob>} */
  const files = new Map();
  const visit = async (/** @type {any} */ entry, /** @type {string} */ path) => {
    if (entry.isFile) {
      files.set(path, await new Promise((resolve, reject) => entry.file(resolve, reject)));
      return;
    }
    const reader = entry.createReader();
    for (;;) {
      // A call gives a hundred entries at most, and none after the last.
      const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
      if (some.length === 0) return;
      for (const child of some) await visit(child, join(path, child.name));
    }
  };
  const isOne = entries.length === 1 && entries[0].isDirectory;
  for (const entry of entries) await visit(entry, isOne ? "" : entry.name);
  return { files, name: isOne ? entries[0].name : "dropped files" };
}

/**
 * Read from a handle of the File System Access API, such as `showDirectoryPicker` returns.
 *
 * @param {FileSystemDirectoryHandle} root
 * @returns {Source}
 */
export function handleSource(root) {
  /** @param {string} path @returns {Promise<any>} the handle of a file or folder, or null */
  const find = async (path) => {
    /** @type {any} */
    let handle = root;
    for (const part of requirePath(path) === "" ? [] : path.split("/")) {
      if (handle.kind !== "directory") return null;
      try {
        handle = await handle.getFileHandle(part);
      } catch (error) {
        const name = /** @type {Error} */ (error).name;
        if (name === "NotFoundError") return null;
        if (name !== "TypeMismatchError") {
          throw storeError("STORE_ACCESS", "the browser refuses access", path, error);
        }
        handle = await handle.getDirectoryHandle(part);
      }
    }
    return handle;
  };
  /** @param {string} path @returns {Promise<File>} */
  const fileAt = async (path) => {
    const handle = await find(path);
    if (handle === null || handle.kind !== "file") {
      throw storeError("STORE_IO", "there is no such file", baseName(path));
    }
    return handle.getFile();
  };
  return {
    name: root.name,
    async stat(path) {
      const handle = await find(path);
      if (handle === null) return null;
      return handle.kind === "directory"
        ? { kind: "folder" }
        : { kind: "file", nbytes: (await handle.getFile()).size };
    },
    async read(path, begin, end, signal) {
      signal?.throwIfAborted();
      return readBlob(await fileAt(path), begin, end, path);
    },
    async stream(path, begin) {
      return (await fileAt(path)).slice(begin).stream();
    },
    async list(path) {
      const handle = await find(path);
      /** @type {Entry[]} */
      const entries = [];
      if (handle === null || handle.kind !== "directory") return entries;
      for await (const child of handle.values()) {
        entries.push({ name: child.name, kind: child.kind === "directory" ? "folder" : "file" });
      }
      return entries;
    },
  };
}
