// The numbers over the charts, and what the shown answer was asked with.
import { rate } from "./charts.js";

const find = (id) => document.getElementById(id);
const DASH = "\u2013";

/** The four numbers on top, and the key of the speed's chart. plain: the answer beside it, or null. */
export function showFigures(run, plain) {
  const share = run?.acceptanceRate ?? null;
  const ratio = run?.perSecond && plain?.perSecond ? run.perSecond / plain.perSecond : null;
  find("shown").textContent = run ? howAsked(run) : "Figures of the latest answer appear here.";
  find("fig-forward").textContent = run?.perForward?.toFixed(2) ?? DASH;
  find("fig-accepted").textContent = share === null ? DASH : `${Math.round(100 * share)} %`;
  find("fig-speed").textContent = rate(run);
  find("fig-ratio").textContent = ratio === null ? DASH : `${ratio.toFixed(2)}\u00d7`;
  find("speed-text").replaceChildren(...[run, plain].flatMap((one) => (one?.perSecond ? key(one) : [])));
}

/** An entry of the key: how the line looks, and whose it is. */
function key(run) {
  const line = document.createElement("span");
  line.className = `key ${run.wanted.draft === null ? "plain" : "accepted"}`;
  const words = document.createElement("span");
  words.textContent = `${run.label} ${rate(run)} tokens/s`;
  return [line, words];
}

/** What an answer was asked with. */
function howAsked(run) {
  const { draft, depth, temperature, seed } = run.wanted;
  const how = draft === null ? "no speculation" : `${run.label}, at most ${depth} deep`;
  return `${how}, temperature ${temperature.toFixed(1)}, seed ${seed}`;
}
