// @ts-check
/**
 * Build the page into `dist/`: `index.html`, `view.js` with the worker in it, `view.css`.
 *
 * `VIEW_ORIGINS="https://a.example https://b.example"` allows the page to read from these origins,
 * beside its own.
 *
 * @module
 */
import { readFile, writeFile, mkdir, rm } from "node:fs/promises";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";
import { build } from "esbuild";

const root = new URL(".", import.meta.url);
const out = new URL("dist/", root);
const origins = (process.env.VIEW_ORIGINS ?? "").split(/\s+/).filter(Boolean);
for (const origin of origins) {
  if (new URL(origin).origin !== origin) throw new Error(`${origin} isn't an origin`);
}
const policy = [
  "default-src 'none'",
  "base-uri 'none'",
  "form-action 'none'",
  `connect-src ${["'self'", ...origins].join(" ")}`,
  "img-src data:",
  "script-src 'self' 'wasm-unsafe-eval'",
  "style-src 'self'",
  "worker-src blob:",
].join("; ");

/** @type {import("esbuild").BuildOptions} */
const shared = {
  absWorkingDir: fileURLToPath(root),
  bundle: true,
  format: "iife",
  legalComments: "none",
  minify: true,
  target: "es2022",
  write: false,
};
const textOf = (/** @type {import("esbuild").BuildResult} */ result) =>
  result.outputFiles?.[0].text ?? "";
const worker = await build({ ...shared, entryPoints: ["src/worker.js"] });
const page = await build({
  ...shared,
  entryPoints: ["src/page.js"],
  define: {
    WORKER_TEXT: JSON.stringify(textOf(worker)),
    ALLOWED_ORIGINS: JSON.stringify(origins),
  },
});
const styles = await build({ ...shared, entryPoints: ["src/view.css"] });
const html = await readFile(new URL("index.html", root), "utf8");
const files = {
  "index.html": html.replace("CONTENT_POLICY", policy),
  "view.js": textOf(page),
  "view.css": textOf(styles),
};
await rm(out, { recursive: true, force: true });
await mkdir(out);
let total = 0;
for (const [name, text] of Object.entries(files)) {
  await writeFile(new URL(name, out), text);
  const gzipped = gzipSync(text, { level: 9 }).length;
  total += gzipped;
  console.log(`${name}: ${text.length} bytes, ${gzipped} gzipped`);
}
console.log(`the page: ${total} bytes gzipped`);
