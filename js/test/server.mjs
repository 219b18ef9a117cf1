// @ts-check
/** A web server for tests, which answers requests for ranges. @module */
import { createServer } from "node:http";

/**
 * Serve files from memory.
 *
 * @param {Map<string, Uint8Array>} files
 * @param {{ignoreRanges?: boolean, status?: number, wrongRange?: boolean, requireToken?: string}
 *   } [options] faults
 */
export async function serve(files, options = {}) {
  /** @type {string[]} */
  const requests = [];
  const server = createServer((request, response) => {
    const path = decodeURIComponent(new URL(request.url ?? "", "http://x").pathname.slice(1));
    requests.push(`${request.method} ${path} ${request.headers.range ?? ""}`.trim());
    const send = (
      /** @type {number} */ status,
      /** @type {any} */ headers,
      /** @type {any} */ body,
    ) => {
      response.writeHead(status, headers);
      response.end(request.method === "HEAD" ? undefined : body);
    };
    if (options.status) return void send(options.status, {}, "");
    if (options.requireToken && request.headers.authorization !== options.requireToken) {
      return void send(403, {}, "");
    }
    const file = files.get(path);
    if (file === undefined) return void send(404, {}, "");
    const range = /^bytes=(\d+)-(\d*)$/.exec(request.headers.range ?? "");
    if (range === null || options.ignoreRanges) {
      return void send(200, { "content-length": file.length }, Buffer.from(file));
    }
    const begin = Number(range[1]) + (options.wrongRange ? 1 : 0);
    if (begin >= file.length) return void send(416, {}, "");
    const body = file.subarray(begin, range[2] === "" ? file.length : Number(range[2]) + 1);
    return void send(
      206,
      {
        "content-length": body.length,
        "content-range": `bytes ${begin}-${begin + body.length - 1}/${file.length}`,
      },
      Buffer.from(body),
    );
  });
  await new Promise((resolve) => {
    server.listen(0, "127.0.0.1", () => resolve(undefined));
  });
  const { port } = /** @type {import("node:net").AddressInfo} */ (server.address());
  return {
    url: `http://127.0.0.1:${port}/`,
    requests,
    close: () =>
      new Promise((resolve) => {
        server.closeAllConnections();
        server.close(resolve);
      }),
  };
}
