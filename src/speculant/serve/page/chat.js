// The conversation on the screen. Everything a model or a user wrote goes in as text nodes: no markup
// is ever made of it.
import { rate } from "./charts.js";
import { ORIGINS } from "./run.js";

function make(name, classes, text = "") {
  const node = document.createElement(name);
  node.className = classes;
  node.textContent = text;
  return node;
}

const WHAT = {
  accepted: "accepted draft",
  recovered: "recovered: drawn in place of a rejected draft",
  bonus: "bonus: drawn after all drafts were accepted",
  plain: "plain: nothing was drafted",
};

/** One answer: its head, its tokens as they come, and its figures below. */
class RunView {
  constructor(run, onToken) {
    this.run = run;
    this.node = make("section", "run");
    this.head = make("h3", "");
    this.body = make("div", "text");
    this.figures = make("p", "muted figures");
    this.node.append(this.head, this.body, this.figures);
    this.body.addEventListener("click", (event) => {
      const token = event.target.closest("[data-round]");
      if (token) onToken(run, Number(token.dataset.round));
    });
    this.append(run.tokens);
    this.refresh();
  }

  append(tokens) {
    for (const token of tokens) {
      if (token.continues) { // the rest of a token that is on the screen already
        if (this.last) this.last.textContent += token.text;
        continue;
      }
      const span = make("span", `tok ${ORIGINS.includes(token.origin) ? token.origin : ""}`, token.text);
      span.dataset.round = token.round;
      span.title = `${WHAT[token.origin]}, round ${token.round + 1}`;
      this.body.append(span);
      this.last = span;
    }
  }

  refresh() {
    const { run } = this;
    const busy = run.state === "running";
    this.node.classList.toggle("busy", busy);
    this.node.setAttribute("aria-busy", busy); // a reader waits for the end instead of every token
    this.head.textContent = run.wanted.draft === null ? "plain" : run.label;
    this.figures.textContent = figures(run);
  }

  mark(round) {
    for (const span of this.body.querySelectorAll(".shown")) span.classList.remove("shown");
    if (round === null) return;
    for (const span of this.body.querySelectorAll(`[data-round="${round}"]`)) {
      span.classList.add("shown");
    }
  }
}

/** A line on an answer, in words that do without the colours. */
function figures(run) {
  if (run.state === "waiting") return "waiting for the other one to end";
  if (!run.rounds.length) return run.ended ? run.state : "reading the prompt";
  const parts = [`${run.emitted} tokens`, `${run.perForward.toFixed(2)} per forward`];
  if (run.perSecond !== null) parts.push(`${rate(run)} tokens/s`);
  const ends = { stopped: "stopped", failed: "broken off" };
  if (ends[run.state]) parts.push(ends[run.state]);
  else if (run.reason === "length") parts.push("cut at the longest answer");
  return parts.join(" \u00b7 ");
}

/** The words under two answers on whether their texts agree; empty while that is open. */
export function agreement(runs) {
  if (runs.length < 2 || !runs.every((run) => run.state === "done")) return "";
  if (runs[0].text === runs[1].text) return "The same text: speculation changes the time only.";
  if (runs[0].wanted.temperature === 0) {
    return "The texts differ. At temperature 0 they do only where two tokens are as good as tied.";
  }
  return "Two samples of one distribution: this draft's own random numbers lead elsewhere.";
}

export class ChatView {
  /** onToken(run, round): a token was chosen; onPick(turn): an answer was. */
  constructor(log, scroller, onToken, onPick) {
    Object.assign(this, { log, scroller, onToken, onPick });
    this.views = new Map(); // Run -> RunView
    this.turns = new Map(); // turn -> {node, note, pick}
    // the end of the answer stays in sight, unless the reader has scrolled up
    this.follow = true;
    scroller.addEventListener("scroll", () => {
      this.follow = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 40;
    });
    new ResizeObserver(() => this.toEnd()).observe(log);
  }

  clear() {
    this.log.replaceChildren();
    this.views.clear();
    this.turns.clear();
  }

  /** Adds a turn of the conversation. */
  add(turn) {
    const node = make("li", `turn ${turn.role}`);
    this.log.append(node);
    if (turn.role === "user") {
      node.append(make("span", "unseen", "You: "), make("div", "text", turn.text));
      this.turns.set(turn, { node });
    } else {
      const answers = make("div", "answers");
      for (const run of turn.runs) {
        const view = new RunView(run, this.onToken);
        this.views.set(run, view);
        answers.append(view.node);
      }
      const note = make("p", "muted note");
      const pick = make("button", "pick", "Show in charts");
      pick.type = "button";
      pick.addEventListener("click", () => this.onPick(turn));
      node.append(answers, note, pick);
      this.turns.set(turn, { node, note, pick });
      this.refresh(turn);
    }
    this.follow = true;
    this.toEnd();
  }

  remove(turn) {
    this.turns.get(turn)?.node.remove();
    this.turns.delete(turn);
  }

  append(run, tokens) {
    this.views.get(run)?.append(tokens); // none: a new chat was begun meanwhile
  }

  refresh(turn) {
    for (const run of turn.runs) this.views.get(run).refresh();
    this.turns.get(turn).note.textContent = agreement(turn.runs);
  }

  /** Marks the answer whose figures are shown, and the tokens of one of its rounds. */
  show(turn, run, round) {
    const answers = [...this.turns].filter(([, { pick }]) => pick);
    for (const [other, { pick }] of answers) {
      pick.setAttribute("aria-pressed", other === turn);
      pick.hidden = answers.length < 2; // a single answer is in the charts already
    }
    for (const [other, view] of this.views) view.mark(other === run ? round : null);
  }

  toEnd() {
    if (this.follow) this.scroller.scrollTop = this.scroller.scrollHeight;
  }
}
