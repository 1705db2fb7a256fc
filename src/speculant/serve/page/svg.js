// Small helpers to draw by hand. Colours come from the style sheet's classes, so that a change of
// theme needs no redrawing; the Content-Security-Policy forbids style attributes in any case.

/** An SVG element. children: elements, or text, which is inserted as text. */
export function el(name, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

/** Empties a drawing, sizes it in CSS pixels, and says in words what it shows. */
export function begin(svg, width, height, words) {
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("width", width);
  svg.setAttribute("height", height);
  svg.setAttribute("aria-label", words);
}

/** About `count` round steps from 0 to at least `most`. whole: no fractions between them. */
export function ticks(most, count = 4, whole = false) {
  const rough = Math.max(most, 1e-9) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999) * power;
  if (whole) step = Math.max(1, Math.round(step));
  const out = [];
  for (let i = 0; i === 0 || out.at(-1) < most * 0.999; i += 1) out.push(i * step);
  return out;
}
