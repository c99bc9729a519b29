// Colours: a hue for every request, far from those of its neighbours; everything else comes from
// the style sheet.

let cache = null;
export const forgetTheme = () => (cache = null);

/** Returns the style sheet's variable of this name, such as "ink" for --ink. */
export function themeVariable(name) {
  cache ??= { style: getComputedStyle(document.documentElement), values: new Map() };
  if (!cache.values.has(name))
    cache.values.set(name, cache.style.getPropertyValue(`--${name}`).trim());
  return cache.values.get(name);
}

/**
 * Returns the colour of request 1, 2, ...: steps of the golden angle, so that requests that run
 * together look different. Pins (0) have none.
 */
export function requestColor(number, alpha = 1) {
  const chroma = number ? themeVariable("request-chroma") : 0;
  const hue = (112.5 + 137.508 * number) % 360;
  return `oklch(${themeVariable("request-lightness")} ${chroma} ${hue.toFixed(1)} / ${alpha})`;
}

/** How strong the segments of a timeline are drawn, from quiet to loud. */
export const segmentAlpha = { queued: 0, chunk: 1, decode: 0.55, preempted: 0, swapped: 0 };
