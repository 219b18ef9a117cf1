// @ts-check
/** Listings of folders on web servers. @module */

/** @typedef {import("../../src/sources/source.js").Entry} Entry */

/**
 * Parse a listing: JSON as nginx's `autoindex_format json` and `ckptfmt view` write it, or the
 * links of a page that a web server makes.
 *
 * @param {string} text
 * @param {string} type the content type
 * @returns {Entry[]}
 */
export function parseListing(text, type) {
  if (type.includes("json")) {
    const entries = JSON.parse(text);
    if (!Array.isArray(entries)) return [];
    return entries.flatMap(({ name, type: kind }) =>
      typeof name === "string" && isName(name) ? [{ name, kind: kindOf(kind) }] : [],
    );
  }
  /** @type {Map<string, Entry>} */
  const found = new Map();
  for (const [, , link] of text.matchAll(/<a\s[^>]*href=(["'])(.*?)\1/gi)) {
    const kind = link.endsWith("/") ? "folder" : "file";
    const name = decode(link.replace(/&amp;/g, "&").replace(/^\.\//, "").replace(/\/$/, ""));
    if (name !== null && isName(name) && !/^[a-z]+:/i.test(link)) found.set(name, { name, kind });
  }
  return [...found.values()];
}

/** @param {unknown} type @returns {"file" | "folder" | "other"} */
const kindOf = (type) => (type === "directory" ? "folder" : type === "file" ? "file" : "other");

/** @param {string} name */
const isName = (name) => name !== "" && name !== "." && name !== ".." && !/[/\\?#]/.test(name);

/** @param {string} text */
function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return null;
  }
}

/**
 * Return a function that lists folders below a URL.
 *
 * @param {string} base ends with `/`
 * @param {typeof globalThis.fetch} [fetch]
 * @returns {(path: string) => Promise<Entry[]>}
 */
export const listingOf =
  (base, fetch = globalThis.fetch) =>
  async (path) => {
    const encoded = path === "" ? "" : `${path.split("/").map(encodeURIComponent).join("/")}/`;
    const response = await fetch(new URL(encoded, base), {
      headers: { Accept: "application/json, text/html" },
    });
    if (response.status === 404) return [];
    if (!response.ok) throw new Error(`the server lists no folders (${response.status})`);
    return parseListing(await response.text(), response.headers.get("content-type") ?? "");
  };
