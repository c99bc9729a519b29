// The pictures of the next message of a chat: chosen, dropped or pasted, and shown small, each with
// a button that takes it away. They are drawn on canvases, so that no image has a URL.

import { $, count, el } from "./dom.js";

const FORMATS = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const SIDE = 96; // px of the longer side of a small picture

export class Pictures {
  /** Takes isChat(): whether a chat is chosen; and history(): its messages so far. */
  constructor({ isChat, history }) {
    Object.assign(this, { isChat, history, items: [], facts: null });
    $("picture-file").addEventListener("change", (event) => {
      const files = [...event.target.files];
      event.target.value = ""; // so that the same file can be chosen again
      this.add(files);
    });
    $("prompt").addEventListener("paste", (event) => this.take(event, event.clipboardData));
    $("playground").addEventListener("drop", (event) => this.take(event, event.dataTransfer));
    for (const [kind, isOver] of Object.entries({ dragover: true, dragleave: false, drop: false }))
      $("playground").addEventListener(kind, ({ dataTransfer }) =>
        $("form").classList.toggle("over", isOver && dataTransfer.types.includes("Files")),
      );
  }

  /** Takes what /v1/capabilities says; null where nothing is known. */
  describe(facts) {
    this.facts = facts;
    $("picture-button").hidden = !facts?.model.takes_pictures;
    this.check();
  }

  /** Adds the pictures among dropped or pasted files. Other files are the page's. */
  take(event, { files }) {
    const pictures = [...files].filter(({ type }) => type.startsWith("image/"));
    if (!pictures.length) return;
    event.preventDefault();
    event.stopPropagation();
    this.add(pictures);
  }

  async add(files) {
    this.report("");
    for (const file of files) {
      try {
        const item = await read(file);
        const reason = this.refusal([...this.items, item]);
        if (reason) return this.report(reason);
        this.items.push(item);
        this.show();
      } catch {
        return this.report(`${file.name} cannot be read as a PNG, JPEG, WebP or GIF picture.`);
      }
    }
  }

  /** Returns in a sentence why these pictures cannot be sent; "" if they can. */
  refusal(items) {
    if (!items.length) return "";
    if (!this.facts?.model.takes_pictures) return "This model takes no pictures.";
    if (!this.isChat()) return "Pictures are sent in a chat: choose Chat.";
    const { max_pictures: maximum, max_body_bytes: bytes } = this.facts.limits;
    const before = this.history().flatMap(({ content }) => partsOf(content));
    const number = items.length + before.filter(({ type }) => type === "image_url").length;
    if (number > maximum)
      return `The conversation would have ${count(number, "picture")}; the most are ${maximum}.`;
    const size = JSON.stringify([before, items.map(({ url }) => url)]).length;
    if (size > bytes)
      return (
        `With this picture a request has ${mib(size)} MiB; the server takes ${mib(bytes)} MiB ` +
        "(--max-body-bytes)."
      );
    return "";
  }

  /** Says why the pictures that are there cannot be sent. Returns whether they can. */
  check() {
    this.report(this.refusal(this.items));
    return !$("picture-problem").textContent;
  }

  report(text) {
    $("picture-problem").textContent = text;
    $("picture-problem").hidden = !text;
  }

  /** Replaces the pictures: none once they are sent, or those that could not be. */
  set(items) {
    this.items = items;
    this.report("");
    this.show();
  }

  show() {
    $("pictures").hidden = !this.items.length;
    $("pictures").replaceChildren(
      ...this.items.map((item) => {
        const name = `Remove ${item.name}`;
        const remove = el("button", { type: "button", "aria-label": name, title: name }, "×");
        remove.addEventListener("click", () => this.remove(item));
        return el("li", {}, thumbnail(item), remove);
      }),
    );
  }

  remove(item) {
    const at = this.items.indexOf(item);
    this.set(this.items.filter((other) => other !== item));
    ($("pictures").querySelectorAll("button")[at] ?? $("prompt")).focus();
  }
}

/** Returns the content of a message: its text, or parts where it has pictures. */
export function contentOf(text, items) {
  if (!items.length) return text;
  const pictures = items.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return [...pictures, ...(text ? [{ type: "text", text }] : [])];
}

const partsOf = (content) => (Array.isArray(content) ? content : [{ type: "text", text: content }]);

const mib = (bytes) => (bytes / 2 ** 20).toFixed(2);

/** Reads a file. Raises an error where it is no picture, or not of a format that servers take. */
async function read(file) {
  if (!FORMATS.includes(file.type)) throw new TypeError(file.type);
  const bitmap = await createImageBitmap(file);
  const url = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
  const canvas = el("canvas");
  drawSmall(canvas, bitmap);
  return { name: file.name, url, small: canvas.toDataURL("image/webp") };
}

/** Returns a canvas with a small picture: {name, small: a data URL}. */
export function thumbnail({ name, small }) {
  const canvas = el("canvas", { class: "thumbnail", role: "img", "aria-label": name, title: name });
  const bytes = Uint8Array.from(atob(small.split(",")[1]), (letter) => letter.charCodeAt(0));
  createImageBitmap(new Blob([bytes])).then((bitmap) => drawSmall(canvas, bitmap));
  return canvas;
}

function drawSmall(canvas, bitmap) {
  const scale = Math.min(1, SIDE / Math.max(bitmap.width, bitmap.height));
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
}
