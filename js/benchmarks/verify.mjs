// @ts-check
/**
 * The speed of a verification in Node.
 *
 *     node js/benchmarks/verify.mjs [--gib 1] [--directory DIR] [--keep]
 *
 * A checkpoint of random float32 tensors is written into DIR, by default a temporary one, and
 * verified three times. The first may read from the disk, the others read from the page cache.
 *
 * @module
 */
import {
  createWriteStream,
  existsSync,
  mkdirSync,
  mkdtempSync,
  rmSync,
  writeFileSync,
} from "node:fs";
import { once } from "node:events";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { randomFillSync } from "node:crypto";
import { blake3, loadBlake3, openCheckpoint } from "../src/index.js";
import { locate } from "../src/node.js";
import { SHARD, makeCheckpoint } from "../test/make.mjs";

const option = (/** @type {string} */ name, /** @type {string} */ otherwise) => {
  const at = process.argv.indexOf(name);
  return at < 0 ? otherwise : process.argv[at + 1];
};

const BLOCK = 1 << 20;
const count = Math.round(Number(option("--gib", "1")) * 16);
const tensors = Array.from({ length: count }, (_, at) => ({
  name: `w${String(at).padStart(4, "0")}`,
  shape: [16, 1024, 1024],
})); // 64 MiB each
const directory = option("--directory", "") || mkdtempSync(join(tmpdir(), "ckptfmt-bench-"));

await loadBlake3();
if (!existsSync(join(directory, "manifest.json"))) {
  const blocks = Array.from({ length: 8 }, () => randomFillSync(new Uint8Array(BLOCK)));
  const digests = blocks.map((block) => blake3(block));
  const pick = (/** @type {number} */ tensor, /** @type {number} */ block) =>
    (7 * tensor + block) % 8;
  const { files, header } = makeCheckpoint(
    tensors,
    (tensor, block) => digests[pick(tensor, block)],
  );
  for (const [path, bytes] of files) {
    mkdirSync(dirname(join(directory, path)), { recursive: true });
    writeFileSync(join(directory, path), bytes);
  }
  const stream = createWriteStream(join(directory, SHARD));
  stream.write(header);
  for (let tensor = 0; tensor < count; tensor += 1) {
    for (let block = 0; block < 64; block += 1) {
      if (!stream.write(blocks[pick(tensor, block)])) await once(stream, "drain");
    }
  }
  stream.end();
  await once(stream, "finish");
}

const bytes = randomFillSync(new Uint8Array(BLOCK));
for (let k = 0; k < 16; k += 1) blake3(bytes);
const begin = performance.now();
for (let k = 0; k < 512; k += 1) blake3(bytes);
console.log(`BLAKE3 alone: ${((512 * BLOCK) / (performance.now() - begin) / 1e6).toFixed(2)} GB/s`);

const { source, path } = await locate(directory);
for (let round = 0; round < 3; round += 1) {
  const checkpoint = await openCheckpoint(source, path);
  const { isWhole, readNbytes, seconds } = await checkpoint.verify();
  console.log(
    `verify: ${(readNbytes / seconds / 1e9).toFixed(2)} GB/s of ` +
      `${(readNbytes / 1e9).toFixed(2)} GB` +
      ` in ${seconds.toFixed(2)} s, ${isWhole ? "whole" : "NOT WHOLE"}`,
  );
}
console.log(`resident: ${(process.memoryUsage().rss / 2 ** 20).toFixed(0)} MiB`);
if (!process.argv.includes("--keep") && option("--directory", "") === "") {
  rmSync(directory, { recursive: true });
}
