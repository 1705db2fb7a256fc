// The three charts of the right side. Each draws one answer (or none yet) from scratch: a few hundred
// elements at most, and at most once a frame.
import { ORIGINS } from "./run.js";
import { begin, el, ticks } from "./svg.js";

const HEIGHT = 174;
const PAD = { left: 56, right: 12, top: 18, bottom: 36 };

/** A frame with axes. Returns the scales x(0..1) and y(value), and the drawing's width. */
function frame(svg, { words, yTicks, yUnit, xUnit, format = String }) {
  const width = Math.max(240, svg.parentElement.clientWidth);
  begin(svg, width, HEIGHT, words);
  const bottom = HEIGHT - PAD.bottom;
  const inner = width - PAD.left - PAD.right;
  const top = yTicks.at(-1);
  const y = (value) => bottom - (value / top) * (bottom - PAD.top);
  const x = (share) => PAD.left + share * inner;
  for (const tick of yTicks) {
    const line = { x1: PAD.left, x2: width - PAD.right, y1: y(tick), y2: y(tick) };
    svg.append(el("line", { class: tick ? "grid" : "axis", ...line }));
    svg.append(label(PAD.left - 6, y(tick) + 4, format(tick), "end"));
  }
  const middle = (PAD.top + bottom) / 2;
  const turn = `rotate(-90 10 ${middle})`;
  svg.append(label(10, middle, yUnit, "middle", { transform: turn }));
  svg.append(label(x(0.5), HEIGHT - 4, xUnit, "middle"));
  return { x, y, bottom, inner };
}

function label(x, y, text, anchor = "middle", more = {}) {
  return el("text", { x, y, "text-anchor": anchor, ...more }, text);
}

function empty(svg, text) {
  const width = Math.max(240, svg.parentElement.clientWidth);
  begin(svg, width, 56, text);
  svg.append(label(width / 2, 32, text));
}

function percent(share) {
  return `${Math.round(100 * share)} %`;
}

/** Share of the drafting rounds that accepted each position, unconditional. */
export function drawPositions(svg, run) {
  const shares = run?.perPosition ?? [];
  if (!shares.length) return empty(svg, "Nothing was drafted yet");
  const said = shares.map((share, i) => `position ${i + 1}: ${percent(share)}`).join(", ");
  const { x, y, bottom, inner } = frame(svg, {
    words: `Acceptance by position. ${said}`,
    yTicks: [0, 0.25, 0.5, 0.75, 1],
    yUnit: "share of rounds",
    xUnit: "position in the draft",
    format: percent,
  });
  const slot = inner / shares.length;
  const bar = Math.min(44, slot * 0.7);
  const every = Math.ceil(26 / slot); // so that the numbers below keep apart
  shares.forEach((share, i) => {
    const centre = x((i + 0.5) / shares.length);
    const box = { x: centre - bar / 2, y: y(share), width: bar, height: bottom - y(share) };
    svg.append(el("rect", { class: "fill accepted", ...box }));
    if (i % every === 0) svg.append(label(centre, bottom + 15, i + 1));
    if (slot >= 40) svg.append(label(centre, y(share) - 4, percent(share)));
  });
  return undefined;
}

/** What each of the last rounds committed, by origin, and the mean over all of them. */
export function drawRounds(svg, run) {
  if (!run?.rounds.length) return empty(svg, "No round yet");
  const width = Math.max(240, svg.parentElement.clientWidth) - PAD.left - PAD.right;
  const most = Math.floor(width / 7); // as many bars as can be told apart
  const first = Math.max(0, run.rounds.length - most);
  const shown = run.rounds.slice(first);
  const mean = run.perForward;
  const tallest = Math.max(2, ...shown.map((round) => round.emitted));
  const { x, y, bottom, inner } = frame(svg, {
    words: `Tokens per target forward: ${mean.toFixed(2)} on average over ${run.rounds.length} rounds`,
    yTicks: ticks(tallest, 4, true),
    yUnit: "tokens",
    xUnit: "target forward",
  });
  const slots = Math.max(shown.length, 12);
  const bar = Math.min(22, (inner / slots) * 0.78);
  shown.forEach((round, i) => {
    let below = 0;
    const counts = countOrigins(run.ofRound(first + i));
    for (const origin of ORIGINS) {
      const size = counts[origin] ?? 0;
      if (!size) continue;
      const box = { y: y(below + size), height: y(below) - y(below + size), width: bar };
      const left = x((i + 0.5) / slots) - bar / 2;
      svg.append(el("rect", { class: `fill ${origin}`, x: left, ...box }));
      below += size;
    }
  });
  for (const i of new Set([0, shown.length - 1])) {
    svg.append(label(x((i + 0.5) / slots), bottom + 15, first + i + 1));
  }
  svg.append(el("line", { class: "mean", x1: x(0), x2: x(1), y1: y(mean), y2: y(mean) }));
  svg.append(label(x(1), 10, `dashed: mean, ${mean.toFixed(2)}`, "end")); // over the bars, not on them
  return undefined;
}

function countOrigins(tokens) {
  const counts = {};
  for (const { origin } of tokens) counts[origin] = (counts[origin] ?? 0) + 1;
  return counts;
}

/** Tokens over time since the first ones came: the steeper, the faster. */
export function drawSpeed(svg, run, plain) {
  const runs = [run, plain].filter((one) => one?.rounds.length > 1);
  if (!runs.length) return empty(svg, "No time was measured yet");
  const ends = runs.map((one) => one.progress.at(-1));
  const seconds = Math.max(0.001, ...ends.map(([time]) => time));
  const tokens = Math.max(1, ...ends.map(([, count]) => count));
  const said = runs.map((one) => `${one.label} ${rate(one)} tokens/s`).join(", ");
  const marks = ticks(seconds, 4);
  const { x, y, bottom } = frame(svg, {
    words: `Speed. ${said}`,
    yTicks: ticks(tokens, 4, true),
    yUnit: "tokens",
    xUnit: "seconds since the first token",
  });
  const across = (time) => x(time / marks.at(-1));
  const digits = Math.max(0, Math.ceil(-Math.log10(marks[1])));
  for (const mark of marks) svg.append(label(across(mark), bottom + 15, mark.toFixed(digits)));
  for (const one of runs.reverse()) { // the answer over its comparison
    const points = one.progress.map(([time, count]) => `${across(time)},${y(count)}`).join(" ");
    const kind = one.wanted.draft === null ? "plain" : "accepted";
    svg.append(el("polyline", { class: `trace ${kind}`, points }));
  }
  return undefined;
}

/** Tokens a second in words. */
export function rate(run) {
  const value = run?.perSecond ?? null;
  if (value === null) return "\u2013";
  return value >= 100 ? value.toFixed(0) : value.toFixed(1);
}
