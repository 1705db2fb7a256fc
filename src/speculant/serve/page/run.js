// One answer as it grows, and every rate that the page shows of it. The definitions are those of the
// server's metrics: only committed tokens count, and acceptance by position is unconditional.

export const ORIGINS = ["accepted", "recovered", "bonus", "plain"];

export class Run {
  /** label: who served it, as asked; wanted: the settings it was asked with. */
  constructor(label, wanted) {
    this.label = label;
    this.wanted = wanted;
    this.state = "waiting"; // then running, and one of done, stopped, failed
    this.tokens = []; // {text, origin, round}
    this.rounds = []; // {at, emitted, drafted, depth, accepted, tree}
    this.reason = null;
  }

  /** Take a chunk of the stream that came at `at` (ms). Returns the tokens that are new on screen. */
  add(chunk, at) {
    const extra = chunk.speculant;
    // the server may have taken another draft, where the wanted one is switched off
    if (chunk.metrics && this.wanted.draft !== null) {
      this.label = chunk.metrics.speculative_decoding.draft;
    }
    if (!extra) return []; // the chunk that only opens the answer
    this.reason = chunk.choices[0].finish_reason ?? this.reason;
    const tree = extra.round;
    const fresh = extra.tokens.map((token) => ({ ...token, round: this.rounds.length }));
    const emitted = fresh.filter((token) => !token.continues).length;
    this.rounds.push({
      at,
      emitted,
      drafted: tree?.tokens.length ?? 0,
      depth: tree ? Math.max(0, ...depths(tree.parents)) : 0,
      accepted: tree?.accepted.length ?? 0,
      tree: tree?.tokens.length ? tree : null,
    });
    this.tokens.push(...fresh);
    return fresh;
  }

  get text() {
    return this.tokens.map((token) => token.text).join("");
  }

  get ended() {
    return !["waiting", "running"].includes(this.state);
  }

  /** Tokens by origin. */
  counts() {
    const counts = Object.fromEntries(ORIGINS.map((origin) => [origin, 0]));
    for (const token of this.tokens) if (!token.continues) counts[token.origin] += 1;
    return counts;
  }

  get emitted() {
    return sum(this.rounds.map((round) => round.emitted));
  }

  /** Committed tokens per target forward, rounds without a draft included; null before the first. */
  get perForward() {
    return this.rounds.length ? this.emitted / this.rounds.length : null;
  }

  get drafted() {
    return sum(this.rounds.map((round) => round.drafted));
  }

  get accepted() {
    return sum(this.rounds.map((round) => round.accepted));
  }

  /** Accepted / drafted tokens; null when nothing was drafted. */
  get acceptanceRate() {
    return this.drafted ? this.accepted / this.drafted : null;
  }

  /** Of the rounds that drafted: the share that accepted position i. */
  get perPosition() {
    const rounds = this.rounds.filter((round) => round.drafted);
    const deepest = Math.max(0, ...rounds.map((round) => round.depth));
    return Array.from({ length: deepest }, (_, i) =>
      rounds.filter((round) => round.accepted > i).length / rounds.length);
  }

  /** [seconds since the first tokens came, tokens since then], a point a round. */
  get progress() {
    let total = -(this.rounds[0]?.emitted ?? 0);
    return this.rounds.map(({ at, emitted }) => {
      total += emitted;
      return [(at - this.rounds[0].at) / 1000, total];
    });
  }

  /** Tokens a second from the first tokens on, as they arrived here; null before the second round. */
  get perSecond() {
    const [seconds, tokens] = this.progress.at(-1) ?? [0, 0];
    return seconds > 0 ? tokens / seconds : null;
  }

  /** The last round that drafted something, or else the last one; -1 before the first. */
  get latestRound() {
    const drafted = this.rounds.findLastIndex((round) => round.drafted);
    return drafted < 0 ? this.rounds.length - 1 : drafted;
  }

  /** The tokens that a round committed. */
  ofRound(index) {
    return this.tokens.filter((token) => token.round === index && !token.continues);
  }

  /** For the tab's storage: without the drafted trees, which are most of the bytes. */
  toJSON() {
    const rounds = this.rounds.map((round) => ({ ...round, tree: null }));
    return { ...this, rounds, state: this.ended ? this.state : "stopped" };
  }

  static from(saved) {
    return Object.assign(new Run(saved.label, saved.wanted), saved);
  }
}

/** Depth of each node from its parents; the root's children are 1 deep. Parents come first. */
export function depths(parents) {
  const out = [];
  for (const parent of parents) out.push(parent < 0 ? 1 : out[parent] + 1);
  return out;
}

function sum(values) {
  return values.reduce((a, b) => a + b, 0);
}
