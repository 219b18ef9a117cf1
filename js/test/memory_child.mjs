// @ts-check
/** Verify a large checkpoint and print the bytes of live buffers; run with --expose-gc. @module */
import { openCheckpoint } from "../src/index.js";
import { zerosSource } from "./make.mjs";

const gc = /** @type {() => void} */ (globalThis.gc);
const count = Number(process.argv[2]);
const tensors = Array.from({ length: count }, (_, at) => ({
  name: `w${String(at).padStart(4, "0")}`,
  shape: [64, 1024, 1024],
})); // 256 MiB each
const checkpoint = await openCheckpoint(zerosSource(tensors));
gc();
const before = process.memoryUsage().arrayBuffers;
/** @type {number[]} */
const live = [];
let calls = 0;
const see = () => {
  calls += 1;
  if (calls % 64) return;
  gc();
  live.push(process.memoryUsage().arrayBuffers - before);
};
const report = await checkpoint.verify({ onProgress: see });
for await (const piece of checkpoint.streamTensor("w0000")) {
  void piece;
  see();
}
// A collection leaves now and then what was just used: the median is what is held.
live.sort((a, b) => a - b);
const median = live[live.length >> 1];
console.log(JSON.stringify({ median, nbytes: report.readNbytes, isWhole: report.isWhole }));
