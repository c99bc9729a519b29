// A box next to what is pointed at.

import { $ } from "./dom.js";

/** Shows the box at a DOMRect of what is pointed at. */
export function showTip(box, ...children) {
  const tip = $("tooltip");
  tip.replaceChildren(...children);
  tip.hidden = false;
  const rightmost = document.documentElement.clientWidth - tip.offsetWidth - 8;
  tip.style.left = `${Math.max(8, Math.min(box.left, rightmost))}px`;
  const below = box.bottom + 6;
  const above = Math.max(4, box.top - tip.offsetHeight - 6);
  tip.style.top = `${below + tip.offsetHeight < innerHeight ? below : above}px`;
}

export function hideTip() {
  $("tooltip").hidden = true;
}
