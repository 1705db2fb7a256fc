// One round's draft, from the root to the right: a column a depth, a row a leaf. Siblings keep the
// draft's order, so that a path stepping down tells that the draft's first choice was not taken.
import { depths } from "./run.js";
import { begin, el } from "./svg.js";

const ROW = 24, BOX = 19, GAP = 22, PAD = 8, LONGEST = 14;

/** What a node is called: white space made visible, long text cut. */
export function visible(text) {
  const shown = text.replaceAll("\n", "\u23ce").replaceAll("\t", "\u21e5").replaceAll(" ", "\u00b7");
  const parts = [...shown];
  return parts.length > LONGEST ? `${parts.slice(0, LONGEST - 1).join("")}\u2026` : shown || "\u2205";
}

/** Width in pixels of a label in the style sheet's 11 px monospace font; far-eastern text is wider. */
function breadth(text) {
  return [...text].reduce((sum, c) => sum + (c.codePointAt(0) >= 0x2e80 ? 12 : 6.7), 0);
}

/** Nodes {text, depth, parent, kind, row}; node 0 is the root, the last one the drawn token. */
export function layout(tree, committed, rootText) {
  const taken = new Set(tree.accepted);
  const deep = depths(tree.parents);
  const nodes = [{ text: rootText, depth: 0, parent: -1, kind: "root" }];
  tree.tokens.forEach((token, i) => {
    const kind = taken.has(i) ? "accepted" : "rejected";
    const text = tree.texts[i];
    nodes.push({ text, depth: deep[i], parent: tree.parents[i] + 1, kind });
  });
  const drawn = committed.find((token) => token.origin !== "accepted");
  if (drawn) {
    const parent = tree.accepted.length ? tree.accepted.at(-1) + 1 : 0;
    const depth = nodes[parent].depth + 1;
    nodes.push({ text: drawn.text, depth, parent, kind: drawn.origin });
  }
  const children = nodes.map(() => []);
  nodes.forEach((node, i) => { if (i) children[node.parent].push(i); });
  let rows = 0;
  const place = (i) => { // the first child goes on its parent's row
    nodes[i].row = rows;
    children[i].forEach((child, place_) => {
      if (place_) rows += 1;
      place(child);
    });
  };
  place(0);
  return { nodes, rows: rows + 1 };
}

/** Draws a round of a run. Returns what it says in words, which the caller shows. */
export function drawTree(svg, run, index) {
  const round = run?.rounds[index];
  if (!round?.tree) {
    begin(svg, 1, 1, "No tree");
    if (!round) return "No round yet";
    if (round.drafted) return "The drafted tokens are not kept over a reload";
    return "Nothing was drafted in this round";
  }
  const ended = run.reason === "stop" && index === run.rounds.length - 1;
  const committed = run.ofRound(index).map((token) =>
    (ended && !token.text ? { ...token, text: "end of text" } : token));
  const before = run.tokens.findLast((token) => token.round < index && token.text);
  const { nodes, rows } = layout(round.tree, committed, before?.text ?? "prompt");
  const words = inWords(round, committed);
  const columns = columnsOf(nodes);
  const width = columns.at(-1).left + columns.at(-1).width + PAD;
  begin(svg, Math.ceil(width), rows * ROW + 2 * PAD, words);
  const middle = (node) => PAD + node.row * ROW + ROW / 2;
  const rejectedFirst = nodes.slice(1).sort((a, b) => (b.kind === "rejected") - (a.kind === "rejected"));
  for (const node of rejectedFirst) { // so that the accepted path lies on top
    const above = nodes[node.parent];
    const from = columns[above.depth].left + boxWidth(above);
    const to = columns[node.depth].left;
    const half = to - GAP / 2;
    const path = `M${from} ${middle(above)}H${half}V${middle(node)}H${to}`;
    svg.append(el("path", { class: `edge ${node.kind}`, d: path }));
  }
  for (const node of nodes) {
    const left = columns[node.depth].left;
    const box = { x: left, y: middle(node) - BOX / 2, width: boxWidth(node), height: BOX, rx: 4 };
    const text = el("text", { x: left + 6, y: middle(node) + 4, class: "code" }, visible(node.text));
    const name = el("title", {}, `${node.kind}: ${JSON.stringify(node.text)}`);
    svg.append(el("g", { class: `node ${node.kind}` }, name, el("rect", box), text));
  }
  return words;
}

function boxWidth(node) {
  return breadth(visible(node.text)) + 12;
}

/** Left edge and width of each depth's column. */
function columnsOf(nodes) {
  const columns = [];
  for (const node of nodes) {
    columns[node.depth] ??= { width: 0 };
    columns[node.depth].width = Math.max(columns[node.depth].width, boxWidth(node));
  }
  let left = PAD;
  for (const column of columns) {
    column.left = left;
    left += column.width + GAP;
  }
  return columns;
}

function inWords({ drafted, depth, accepted }, committed) {
  const drawn = committed.find((token) => token.origin !== "accepted");
  const kept = committed.filter((token) => token.origin === "accepted").map(({ text }) => text);
  const path = kept.length ? `, ${accepted} kept: ${JSON.stringify(kept.join(""))}` : ", none kept";
  const end = drawn ? `, then ${drawn.origin} ${JSON.stringify(drawn.text)}` : "";
  const size = drafted > depth ? `a tree of ${drafted}, ${depth} deep` : `a chain of ${drafted}`;
  return `${size[0].toUpperCase()}${size.slice(1)}${path}${end}.`;
}
