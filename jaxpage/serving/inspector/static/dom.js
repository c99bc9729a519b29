// Elements without HTML strings: text is text, whatever is in it.

export const $ = (id) => document.getElementById(id);

/**
 * Makes an element with attributes (functions are listeners, false leaves one out) and children
 * (strings become text).
 */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null && child !== false));
  return element;
}

export const count = (number, noun) =>
  `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

/** Fits a canvas to its box, sharp on every screen. Returns its context, in CSS pixels. */
export function fitCanvas(canvas, height) {
  const width = canvas.clientWidth;
  const scale = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
