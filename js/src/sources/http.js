// @ts-check
/** A source on a web server that answers requests for ranges of bytes. @module */
import { requirePath, storeError } from "./source.js";

/**
 * @typedef {object} HttpOptions
 * @property {Record<string, string>} [headers] of every request, such as `Authorization`
 * @property {typeof globalThis.fetch} [fetch]
 * @property {(path: string) => Promise<import("./source.js").Entry[]>} [list] lists a folder;
 *   without it a run can't be opened, since HTTP has no listings
 */

/**
 * Read from a web server. Redirects are followed by `fetch`; nothing in a checkpoint is a URL here.
 *
 * @param {string | URL} base the URL of the root; a query is kept for every file
 * @param {HttpOptions} [options]
 * @returns {import("./source.js").Source}
 */
export function httpSource(base, options = {}) {
  const { headers = {}, fetch = globalThis.fetch, list } = options;
  const root = new URL(base);
  if (!root.pathname.endsWith("/")) root.pathname += "/";
  const urlOf = (/** @type {string} */ path) => {
    const url = new URL(root);
    url.pathname += requirePath(path).split("/").map(encodeURIComponent).join("/");
    return url;
  };
  /** @param {string} path @param {RequestInit} init */
  const request = async (path, init) => {
    /** @type {Response} */
    let response;
    try {
      response = await fetch(urlOf(path), { ...init, headers: { ...headers, ...init.headers } });
    } catch (cause) {
      if (init.signal?.aborted) throw init.signal.reason;
      throw storeError("STORE_NO_ANSWER", "the server didn't answer", path, cause);
    }
    if (response.status === 401 || response.status === 403) {
      throw storeError("STORE_ACCESS", `the server refuses access (${response.status})`, path);
    }
    return response;
  };
  const failed = (/** @type {Response} */ response, /** @type {string} */ path) =>
    storeError("STORE_IO", `the server answered ${response.status} ${response.statusText}`, path);
  return {
    name: root.href,
    async stat(path, signal) {
      const response = await request(path, { method: "HEAD", signal });
      if (response.status === 404 || response.status === 410) return null;
      if (!response.ok) throw failed(response, path);
      const length = response.headers.get("content-length");
      if (length !== null && !response.headers.get("content-encoding")) {
        return { kind: "file", nbytes: Number(length) };
      }
      // The size of a compressed or chunked answer stands in the answer to a range only.
      const ranged = await request(path, { headers: { Range: "bytes=0-0" }, signal });
      await ranged.body?.cancel();
      const total = /\/(\d+)$/.exec(ranged.headers.get("content-range") ?? "");
      if (total === null) throw storeError("STORE_UNSUPPORTED", "the server states no size", path);
      return { kind: "file", nbytes: Number(total[1]) };
    },
    async stream(path, begin, signal) {
      const response = await request(path, { headers: { Range: `bytes=${begin}-` }, signal });
      const range = response.headers.get("content-range") ?? "";
      if (response.status !== 206 || !range.startsWith(`bytes ${begin}-`) || !response.body) {
        await response.body?.cancel();
        throw failed(response, path);
      }
      return response.body;
    },
    async read(path, begin, end, signal) {
      if (begin >= end) return new Uint8Array(0);
      const response = await request(path, {
        headers: { Range: `bytes=${begin}-${end - 1}` },
        signal,
      });
      if (response.status === 416) return new Uint8Array(0);
      if (response.status === 200) {
        // The whole file: fine if it is small and wanted from the begin, a fault otherwise.
        const length = Number(response.headers.get("content-length") ?? Infinity);
        if (begin > 0 || length > end - begin) {
          await response.body?.cancel();
          throw storeError("STORE_UNSUPPORTED", "the server ignores requests for ranges", path);
        }
      } else if (response.status !== 206) throw failed(response, path);
      else {
        const range = /^bytes (\d+)-(\d+)\//.exec(response.headers.get("content-range") ?? "");
        if (range === null || Number(range[1]) !== begin || Number(range[2]) >= end) {
          await response.body?.cancel();
          throw storeError("STORE_IO", "the server answered with another range", path);
        }
      }
      try {
        const bytes = new Uint8Array(await response.arrayBuffer());
        return bytes.length > end - begin ? bytes.subarray(0, end - begin) : bytes;
      } catch (cause) {
        if (signal?.aborted) throw signal.reason;
        throw storeError("STORE_NO_ANSWER", "the connection ended early", path, cause);
      }
    },
    async list(path) {
      if (list === undefined) {
        throw storeError(
          "STORE_UNSUPPORTED",
          "a web server lists no folders; give httpSource an option `list`",
          path,
        );
      }
      return list(requirePath(path));
    },
  };
}
