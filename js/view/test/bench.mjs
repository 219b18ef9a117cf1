// @ts-check
/**
 * Measure a verification in Chromium: `node bench.mjs CHECKPOINT`, through `ckptfmt view` and from
 * chosen files.
 *
 * @module
 */
import { spawn } from "node:child_process";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { chromium } from "playwright-core";

const ROOT = fileURLToPath(new URL("../../../", import.meta.url));
const [folder] = process.argv.slice(2);
const server = spawn(join(ROOT, ".venv/bin/python"), ["-m", "ckptfmt", "view", folder], {
  cwd: ROOT,
});
const url = await new Promise((resolve) => {
  let said = "";
  server.stdout.on("data", (data) => {
    said += data;
    const found = /http:\S+/.exec(said);
    if (found) resolve(found[0]);
  });
});
const browser = await chromium.launch({
  executablePath: process.env.VIEW_CHROMIUM ?? "/usr/bin/chromium",
  args: [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
  ],
});
try {
  for (const kind of ["served", "chosen"]) {
    const page = await browser.newPage();
    page.setDefaultTimeout(300_000);
    await page.goto(kind === "served" ? url : url.replace(/\?.*/, ""));
    if (kind === "chosen") await page.locator("#folder-input").setInputFiles(folder);
    for (let round = 0; round < 3; round += 1) {
      await page.getByRole("button", { name: /^Verify/ }).click();
      await page.locator(".verdict, .error").first().waitFor();
      console.log(kind, await page.locator(".verdict, .error").first().textContent());
      await page.locator(".verify-place").evaluate((place) => place.replaceChildren());
    }
    await page.close();
  }
} finally {
  await browser.close();
  server.kill("SIGINT");
}
