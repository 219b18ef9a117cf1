// @ts-check
/** Reads that follow each other, from streams. @module */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { fileListSource, httpSource, memorySource, readAhead } from "../src/index.js";
import { serve } from "./server.mjs";

const MIB = 2 ** 20;
const content = new Uint8Array(9 * MIB + 77).map((_, at) => (at * 31 + (at >> 9)) & 255);
const files = new Map([
  ["a", content],
  ["b", content.slice().reverse()],
]);
const chosen = () =>
  fileListSource([...files].map(([path, bytes]) => new File([/** @type {any} */ (bytes)], path)));

/**
 * Count the calls of a source.
 *
 * @param {any} source @returns {{source: any, counts: {reads: number, streams: number}}}
 */
function counted(source) {
  const counts = { reads: 0, streams: 0 };
  return {
    counts,
    source: {
      ...source,
      read(/** @type {any[]} */ ...rest) {
        counts.reads += 1;
        return source.read(...rest);
      },
      stream(/** @type {any[]} */ ...rest) {
        counts.streams += 1;
        return source.stream(...rest);
      },
    },
  };
}

/** Read both files piece by piece, two pieces at once, and compare. @param {any} source */
async function readBoth(source) {
  const sizes = [10, MIB, 500, MIB, MIB + 1, MIB];
  let at = 0;
  for (const nbytes of sizes) {
    const reads = [...files].flatMap(([path, bytes]) =>
      [at, at + nbytes].map(async (begin) => {
        const read = await source.read(path, begin, begin + nbytes);
        assert.deepEqual(read, bytes.slice(begin, begin + nbytes), `${path} at ${begin}`);
        source.release?.(read);
      }),
    );
    await Promise.all(reads);
    at += 2 * nbytes;
  }
  assert.deepEqual(await source.read("a", 7, 99), content.slice(7, 99));
  // A read beyond the end has the rest of the file, as without a stream.
  await source.read("a", 8 * MIB, 9 * MIB);
  assert.deepEqual(await source.read("a", 9 * MIB, 11 * MIB), content.slice(9 * MIB));
}

describe("reading ahead", () => {
  test("reads of chosen files that follow each other come from one stream", async () => {
    const { source, counts } = counted(chosen());
    const ahead = readAhead(source);
    await readBoth(ahead);
    assert.ok(counts.streams <= 5, `${counts.streams} streams`);
    assert.ok(counts.reads <= 8, `${counts.reads} single reads`);
  });

  test("reads of a web server that follow each other are one request", async () => {
    const server = await serve(files);
    const ahead = readAhead(httpSource(server.url));
    await ahead.read("a", 0, MIB);
    for (let at = MIB; at < 9 * MIB; at += MIB) {
      assert.deepEqual(await ahead.read("a", at, at + MIB), content.slice(at, at + MIB));
    }
    await readBoth(ahead);
    await server.close();
    assert.deepEqual(server.requests.slice(0, 2), [
      `GET a bytes=0-${MIB - 1}`,
      `GET a bytes=${MIB}-`,
    ]);
    assert.ok(server.requests.length <= 16, `${server.requests.length} requests`);
  });

  test("released buffers are filled again, and others never", async () => {
    const ahead = readAhead(chosen());
    await ahead.read("a", 0, MIB);
    const kept = await ahead.read("a", MIB, 2 * MIB);
    let before = await ahead.read("a", 2 * MIB, 3 * MIB);
    for (let at = 3 * MIB; at < 9 * MIB; at += MIB) {
      ahead.release?.(before);
      assert.ok(before.length > 0);
      const { buffer } = before;
      before = await ahead.read("a", at, at + MIB);
      assert.equal(/** @type {any} */ (buffer).detached ?? buffer.byteLength === 0, true);
    }
    assert.deepEqual(kept, content.slice(MIB, 2 * MIB));
    // Bytes that no stream gave are somebody else's.
    const memory = memorySource(files);
    const foreign = readAhead({ ...chosen(), read: memory.read });
    foreign.release?.(await foreign.read("a", 0, MIB));
    for (let at = MIB; at < 4 * MIB; at += MIB) await foreign.read("a", at, at + MIB);
    assert.deepEqual(files.get("a"), content);
    assert.equal(content.byteLength, 9 * MIB + 77);
  });

  for (const [name, streamOf] of /** @type {[string, () => any][]} */ ([
    ["a stream that fails", () => failing(new TypeError("network error"))],
    ["a stream that ends early", () => failing(null)],
    ["a stream of an older browser", () => new ReadableStream({})],
    ["a stream that can't be opened", () => Promise.reject(new TypeError("no answer"))],
  ])) {
    test(`${name} is replaced by single reads`, async () => {
      const ahead = readAhead({ ...chosen(), stream: async () => streamOf() });
      await readBoth(ahead);
    });
  }

  test("a source without streams is itself", () => {
    const source = memorySource(files);
    assert.equal(readAhead(source), source);
  });
});

/** Return a byte stream of no bytes. @param {Error | null} error at its end */
const failing = (error) =>
  new ReadableStream({
    type: "bytes",
    pull(controller) {
      if (error) controller.error(error);
      else {
        controller.close();
        controller.byobRequest?.respond(0);
      }
    },
  });
