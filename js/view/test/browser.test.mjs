// @ts-check
/**
 * The page in Chromium, on checkpoints of the Python package, served by `ckptfmt view`.
 *
 * `VIEW_CHECKPOINTS` names a folder that make_checkpoints.py made before, `VIEW_SHOTS` a folder for
 * pictures, `VIEW_CHROMIUM` another Chromium.
 *
 * @module
 */
import assert from "node:assert/strict";
import { execFileSync, spawn } from "node:child_process";
import { existsSync, mkdirSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { fileURLToPath } from "node:url";
import { chromium } from "playwright-core";

const ROOT = fileURLToPath(new URL("../../../", import.meta.url));
const PYTHON = join(ROOT, ".venv/bin/python");
const CHROMIUM = process.env.VIEW_CHROMIUM ?? "/usr/bin/chromium";
const SHOTS = process.env.VIEW_SHOTS;
const missing = [CHROMIUM, PYTHON].find((path) => !existsSync(path));

/** @typedef {import("playwright-core").Page} Page */

/** Serve a folder by `ckptfmt view`. @param {string} folder */
async function serve(folder) {
  const child = spawn(PYTHON, ["-m", "ckptfmt", "view", folder], { cwd: ROOT });
  let said = "";
  const url = await new Promise((resolve, reject) => {
    child.stdout.on("data", (data) => {
      said += data;
      const found = /http:\S+/.exec(said);
      if (found) resolve(found[0]);
    });
    child.stderr.on("data", (data) => reject(new Error(String(data))));
  });
  return { url, close: () => child.kill("SIGINT") };
}

describe("the page in a browser", { skip: missing && `there is no ${missing}` }, () => {
  const given = process.env.VIEW_CHECKPOINTS;
  let folder = given ?? "";
  /** @type {any} */
  let expected;
  /** @type {import("playwright-core").Browser} */
  let browser;
  /** @type {{url: string, close: () => void}} */
  let server;

  before(async () => {
    if (given === undefined) {
      folder = mkdtempSync(join(tmpdir(), "ckptfmt-view-"));
      const script = fileURLToPath(new URL("make_checkpoints.py", import.meta.url));
      execFileSync(PYTHON, [script, folder], { stdio: "ignore" });
    }
    expected = JSON.parse(readFileSync(join(folder, "expected.json"), "utf8"));
    if (SHOTS) mkdirSync(SHOTS, { recursive: true });
    server = await serve(folder);
    browser = await chromium.launch({
      executablePath: CHROMIUM,
      args: [
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-sync",
        "--disable-background-networking",
        "--disable-component-update",
      ],
    });
  });

  after(async () => {
    await browser?.close();
    server?.close();
    if (given === undefined) rmSync(folder, { recursive: true, force: true });
  });

  /**
   * Open the page. The test fails by a request to another origin or an error of the page.
   *
   * @param {string} hash @param {any} [options] @param {string} [url]
   */
  async function openPage(hash, options = {}, url = server.url) {
    const context = await browser.newContext({
      viewport: { width: 1440, height: 900 },
      ...options,
    });
    const page = await context.newPage();
    /** @type {string[]} */
    const faults = [];
    const { origin } = new URL(url);
    page.on("request", (request) => {
      const wanted = request.url();
      if (!/^(blob|data):/.test(wanted) && new URL(wanted).origin !== origin) faults.push(wanted);
    });
    page.on("pageerror", (error) => faults.push(String(error)));
    page.on("console", (message) => {
      // A file that isn't there is asked for: `run.json` of a checkpoint.
      if (message.type() === "error" && !/404/.test(message.text())) faults.push(message.text());
    });
    page.setDefaultTimeout(20_000);
    await page.goto(url + hash);
    return {
      page,
      close: async () => {
        assert.deepEqual(faults, []);
        await context.close();
      },
    };
  }

  /** @param {Page} page @param {string} name */
  const shoot = async (page, name) => {
    if (SHOTS) await page.screenshot({ path: join(SHOTS, `${name}.png`) });
  };

  /** @param {string} path @param {Record<string, string>} [more] */
  const at = (path, more = {}) => `#${new URLSearchParams({ view: "checkpoint", path, ...more })}`;

  /** @param {Page} page @returns {Promise<string[][]>} the cells of the grid of values */
  const cellsOf = async (page) => {
    await page.locator(".values:not([aria-busy]) table.grid").waitFor();
    return page
      .locator("table.grid tbody tr")
      .evaluateAll((rows) =>
        rows.map((row) => [...row.querySelectorAll("td")].map((cell) => cell.textContent ?? "")),
      );
  };

  test("a folder of runs and checkpoints is listed", async () => {
    const { page, close } = await openPage("");
    await page.getByRole("link", { name: "many" }).waitFor();
    assert.equal(await page.locator(".folder li").count(), 6);
    await close();
  });

  test("a run: checkpoints, lineage, and what the next launch resumes from", async () => {
    const { page, close } = await openPage("#view=run&path=run");
    await page.getByRole("heading", { name: "Checkpoints" }).waitFor();
    assert.equal(await page.locator(".next-name").textContent(), "resumes from step 7");
    assert.equal(await page.getByRole("grid").getAttribute("aria-rowcount"), "9");
    const first = await page.locator(".checkpoints .canvas .row[aria-rowindex='2']").textContent();
    assert.match(first ?? "", /^73committed/);
    const picture = await page.getByRole("img").first().getAttribute("aria-label");
    assert.match(picture ?? "", /launch 3 resumed from step-00000005-l0002/);
    assert.equal(await page.locator(".lineage .dot:not(.on)").count(), 1);
    await shoot(page, "run");
    await page.getByRole("button", { name: "Verify this choice" }).click();
    await page.getByText("The next launch resumes from step-00000007-l0003").first().waitFor();
    await page.getByRole("link", { name: "step 7" }).click();
    await page.getByRole("heading", { name: "Step 7" }).waitFor();
    await page.goBack();
    await page.getByRole("heading", { name: "Lineage" }).waitFor();
    await close();
  });

  test("a delta has its bases, and the values of Python", async () => {
    const { page, close } = await openPage(
      at("run/step-00000007-l0003", { tensor: "weights/0.weight" }),
    );
    assert.equal(await page.locator(".subtitle .badge").first().textContent(), "delta");
    const cells = await cellsOf(page);
    assert.deepEqual(
      cells.map((row) => row.map((cell) => Math.fround(Number(cell)))),
      expected.weight,
    );
    await page.locator(".places .badge.delta").first().waitFor();
    await shoot(page, "delta");
    await close();
  });

  test("a tensor: slices, a summary of the whole, where it lies", async () => {
    const { page, close } = await openPage(at("kinds", { tensor: "weights/cube" }));
    await page.getByText("to 23", { exact: true }).waitFor();
    assert.ok(await page.getByRole("button", { name: "Earlier rows" }).isDisabled());
    await page.getByLabel("Dim 0").fill("1");
    await page.getByLabel("Dim 0").press("Tab");
    await page.getByLabel("Dim 1").fill("2");
    await page.getByLabel("Dim 1").press("Tab");
    await page.getByLabel("First row").fill("3");
    await page.getByLabel("First row").press("Tab");
    await page.getByLabel("First column").fill("4");
    await page.getByLabel("First column").press("Enter");
    await page.waitForFunction(
      () => document.querySelector("table.grid thead th")?.textContent === "4",
    );
    const cells = await cellsOf(page);
    assert.deepEqual(
      cells.map((row) => row.map((cell) => Math.fround(Number(cell)))),
      expected.window,
    );
    await page.getByRole("button", { name: "Summarise the whole tensor" }).click();
    await page.locator(".whole .stats").waitFor();
    const stats = await page.locator(".whole .stat").allTextContents();
    assert.equal(Math.fround(Number(stats[0].slice(3))), expected.min);
    assert.ok(Math.abs(Number(stats[2].slice(4)) - expected.mean) < 1e-6);
    assert.deepEqual(stats.slice(4, 6), ["NaN1", "Inf1"]);
    assert.equal(stats[7], "Count14,400");
    await page.getByText(/bytes [\d,]+ to [\d,]+/).waitFor();
    await shoot(page, "tensor");
    await close();
  });

  test("all kinds of elements, and a name is never markup", async () => {
    const { page, close } = await openPage(at("kinds", { tensor: "weights/big" }));
    assert.deepEqual(await cellsOf(page), [["4611686018427387905", "-9007199254740993", "0"]]);
    for (const [name, cells] of /** @type {[string, string[][]][]} */ ([
      [
        "wide",
        [
          ["0.1", "3.141592653589793"],
          ["1e+300", "-0.0"],
        ],
      ],
      ["wave", [["1.0+2.0i", "-0.0-0.5i"]]],
      ["scalar", [["2.5"]]],
      ["flags", [["true", "false"]]],
      ["<img src=x onerror=alert(1)>", [["1.0"]]],
    ])) {
      await page
        .locator(".tensors .canvas .name", {
          hasText: name.startsWith("<") ? name : new RegExp(`^${name}$`),
        })
        .click();
      await page.locator(".detail h2", { hasText: name }).first().waitFor();
      await page.locator("table.grid").waitFor();
      assert.deepEqual(await cellsOf(page), cells, name);
    }
    await close();
  });

  test("aliases and buffers that aren't persistent are marked", async () => {
    const { page, close } = await openPage(at("tied"));
    const name = page.locator(".tensors .canvas .name");
    await name.filter({ hasText: "= head.weight" }).waitFor();
    await name.filter({ hasText: "masknon-persistent" }).waitFor();
    await page.getByLabel("Search tensors").fill("HEAD.W");
    await page.locator(".result", { hasText: "1 of" }).waitFor();
    await name.first().click();
    await page.locator(".detail dd", { hasText: "head.weight" }).waitFor();
    await close();
  });

  test("plain values are a tree, with all digits", async () => {
    const { page, close } = await openPage(at("kinds", { tab: "values" }));
    await page.locator("summary", { hasText: /^config/ }).click();
    await page.locator(".line", { hasText: /^seed1180591620717411303424/ }).waitFor();
    await page.locator(".line", { hasText: /^third0\.3333333333333333/ }).waitFor();
    await page.locator("summary", { hasText: /^names/ }).click();
    await page.getByRole("button", { name: "Show 200 more" }).click();
    await page.locator(".line", { hasText: "layer-399" }).waitFor();
    await shoot(page, "values");
    await page.getByRole("tab", { name: /^Streams/ }).click();
    await page.locator(".tree:visible").first().waitFor();
    await close();
  });

  test("10,000 tensors: search, scrolling, figures", async () => {
    const { page, close } = await openPage("");
    await page.getByRole("link", { name: "many" }).waitFor();
    const first = await page.evaluate(async (hash) => {
      const begin = performance.now();
      location.hash = hash;
      while (!document.querySelector(".tensors .canvas .row")) {
        await new Promise((resolve) => requestAnimationFrame(resolve));
      }
      return performance.now() - begin;
    }, at("many"));
    const session = await page.context().newCDPSession(page);
    await session.send("Performance.enable");
    const measure = async () => {
      const { metrics } = await session.send("Performance.getMetrics");
      const spent = ["ScriptDuration", "LayoutDuration", "RecalcStyleDuration"];
      return metrics.reduce((sum, { name, value }) => sum + (spent.includes(name) ? value : 0), 0);
    };
    /** Scroll some pixels each frame. @param {number} pixels */
    const scroll = async (pixels) => {
      const before = await measure();
      const frames = await page.evaluate(async (step) => {
        const body = /** @type {HTMLElement} */ (document.querySelector(".tensors .table-body"));
        /** @type {number[]} */
        const times = [];
        body.scrollTop = 0;
        let last = performance.now();
        for (let k = 0; k < 180; k += 1) {
          body.scrollTop += step;
          await new Promise((resolve) => requestAnimationFrame(resolve));
          const now = performance.now();
          times.push(now - last);
          last = now;
        }
        times.sort((a, b) => a - b);
        const { length } = body.querySelectorAll(".row");
        return { median: times[90], longest: times[179], elements: length };
      }, pixels);
      const spent = ((await measure()) - before) * (1000 / 180);
      console.log(
        `scroll by ${pixels} pixels a frame: median frame ${frames.median.toFixed(1)} ms,` +
          ` longest ${frames.longest.toFixed(1)} ms,` +
          ` ${spent.toFixed(1)} ms of script, style and layout for each`,
      );
      return frames;
    };
    console.log(`10,000 tensors: first row after ${first.toFixed(0)} ms`);
    const frames = await scroll(150);
    await scroll(1760);
    // Wide bounds: the figures are those of an idle machine.
    assert.ok(first < 10_000);
    assert.ok(frames.median < 100);
    assert.ok(frames.elements < 100);
    await page.getByLabel("Search tensors").fill("layers.77. block.3");
    await page.locator(".result", { hasText: "1 of 10,000 tensors" }).waitFor();
    await page.locator(".tensors .canvas .row").first().click();
    assert.deepEqual((await cellsOf(page))[1], ["773.0", "773.0", "773.0"]);
    await page.getByLabel("Search tensors").fill("nothing such");
    await page.getByText("No tensor has such a name.").waitFor();
    await close();
  });

  test("the keyboard alone", async () => {
    const { page, close } = await openPage(at("many"));
    await page.getByRole("grid").waitFor();
    await page.locator("#skip").focus();
    await page.keyboard.press("Enter");
    assert.equal(await page.evaluate(() => document.activeElement?.id), "main");
    // The buttons and links, then the tabs, the search and the table.
    for (let k = 0; k < 20; k += 1) {
      if (await page.evaluate(() => document.activeElement?.id === "search")) break;
      await page.keyboard.press("Tab");
    }
    await page.keyboard.type("block.5");
    await page.keyboard.press("ArrowDown");
    assert.equal(await page.evaluate(() => document.activeElement?.getAttribute("role")), "grid");
    await page.keyboard.press("ArrowDown");
    await page.keyboard.press("End");
    await page.keyboard.press("ArrowUp");
    const active = await page.evaluate(() => {
      const id = document.activeElement?.getAttribute("aria-activedescendant") ?? "";
      return document.getElementById(id)?.firstElementChild?.textContent;
    });
    assert.equal(active, "layers.998.block.5.weight");
    await shoot(page, "keyboard");
    await page.keyboard.press("Enter");
    await page.locator("table.grid").waitFor();
    assert.equal(await page.evaluate(() => document.activeElement?.id), "tensor-title");
    await page.keyboard.press("Escape");
    await page.locator(".detail").waitFor({ state: "detached" });
    assert.equal(await page.evaluate(() => document.activeElement?.getAttribute("role")), "grid");
    await close();
  });

  test("a verification finds one flipped bit, and names the block", async () => {
    const { page, close } = await openPage(at("damaged"));
    await page.getByRole("button", { name: "Verify every byte" }).click();
    await page.getByText("Damaged: 1 finding").first().waitFor();
    const finding = await page.locator(".error").textContent();
    assert.match(
      finding ?? "",
      /BLOCK_DIGEST.*block 0 of the tensor "w\d".*safetensors, bytes.*REQ-OPN-006/s,
    );
    assert.match((await page.locator("#status").textContent()) ?? "", /Damaged/);
    await shoot(page, "damaged");
    await close();
  });

  test("whole checkpoints are whole, of several writers and with bases", async () => {
    for (const path of ["writers", "run/step-00000004-l0001", "kinds"]) {
      const { page, close } = await openPage(at(path));
      await page.getByRole("button", { name: "Verify every byte" }).click();
      await page.getByText("Whole: a run may continue").first().waitFor();
      await close();
    }
  });

  test("chosen files: a run, and a verification", async () => {
    const { page, close } = await openPage("", {}, server.url.replace(/\?.*/, ""));
    await shoot(page, "start");
    await page.locator("#folder-input").setInputFiles(join(folder, "run"));
    await page.getByRole("heading", { name: "Lineage" }).waitFor();
    await page.getByRole("link", { name: "step 7" }).click();
    await page.getByRole("button", { name: "Verify every byte" }).click();
    await page.getByText("Whole: a run may continue").first().waitFor();
    await close();
  });

  test("a verification can be cancelled", async () => {
    const { page, close } = await openPage(at("writers"));
    await page.route(/safetensors/, async (route) => {
      await new Promise((resolve) => setTimeout(resolve, 400));
      await route.continue().catch(() => {}); // cancelled
    });
    await page.getByRole("button", { name: "Verify every byte" }).click();
    await page.locator(".job progress").waitFor();
    await page.waitForTimeout(300);
    await page.getByRole("button", { name: "Cancel" }).click();
    await page.getByText("The verification was cancelled.").waitFor();
    await close();
  });

  test("what is no checkpoint is named, with what was expected", async () => {
    const { page, close } = await openPage("", {}, server.url.replace(/\?.*/, ""));
    await page.locator("#folder-input").setInputFiles(join(folder, "writers/parts"));
    const text = await page.locator(".error").textContent();
    assert.match(text ?? "", /NOT_COMMITTED.*manifest\.json.*run\.json/s);
    await shoot(page, "error");
    await page.locator("#folder-input").setInputFiles(join(folder, "kinds"));
    await page.getByRole("heading", { name: "Step 42" }).waitFor();
    await close();
    const other = await openPage("", {}, server.url.replace("data/", "https://example.org/run/"));
    assert.match((await other.page.locator(".error").textContent()) ?? "", /STORE_ACCESS/);
    await other.close();
    const lone = await openPage("", {}, server.url.replace("data/", "data/kinds/"));
    await lone.page.getByRole("heading", { name: "Step 42" }).waitFor();
    await lone.close();
  });

  test("a delta without its run says what is missing", async () => {
    const { page, close } = await openPage("", {}, server.url.replace(/\?.*/, ""));
    await page.locator("#folder-input").setInputFiles(join(folder, "run/step-00000002-l0001"));
    await page.locator(".tensors .canvas .name", { hasText: "0.weight" }).first().click();
    await page.locator(".detail .error-code", { hasText: "BASE_MISSING" }).waitFor();
    await page.getByText("Open the folder of the run").waitFor();
    await close();
  });

  test("the page works from a file, with chosen folders", async () => {
    const context = await browser.newContext();
    const page = await context.newPage();
    await page.goto(new URL("../dist/index.html", import.meta.url).href);
    await page.locator("#folder-input").setInputFiles(join(folder, "run"));
    await page.getByRole("heading", { name: "Lineage" }).waitFor();
    await page.getByRole("link", { name: "step 7" }).click();
    await page.getByRole("button", { name: "Verify every byte" }).click();
    await page.getByText("Whole: a run may continue").first().waitFor();
    await context.close();
  });

  test("dark, narrow, and with less motion", async () => {
    for (const [name, hash] of [
      ["run", "#view=run&path=run"],
      ["tensor", at("kinds", { tensor: "weights/cube" })],
      ["tensors", at("many")],
    ]) {
      const dark = await openPage(hash, { colorScheme: "dark", reducedMotion: "reduce" });
      await dark.page.locator(".screen").waitFor();
      await dark.page.waitForTimeout(300);
      const back = await dark.page.evaluate(() => getComputedStyle(document.body).backgroundColor);
      assert.equal(back, "rgb(14, 18, 23)");
      await shoot(dark.page, `dark-${name}`);
      await dark.close();
      const narrow = await openPage(hash, { viewport: { width: 390, height: 844 } });
      await narrow.page.locator(".screen").waitFor();
      await narrow.page.waitForTimeout(300);
      const overflow = await narrow.page.evaluate(
        () => document.documentElement.scrollWidth - innerWidth,
      );
      assert.ok(overflow <= 0, `${name} is ${overflow} pixels too wide`);
      await shoot(narrow.page, `narrow-${name}`);
      await narrow.close();
    }
  });
});
