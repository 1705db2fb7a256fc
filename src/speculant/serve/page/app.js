// The page's parts put together: a message is sent, its answer streams in, the charts follow.
import { ApiError, loadServer, streamAnswer } from "./api.js";
import { drawPositions, drawRounds, drawSpeed } from "./charts.js";
import { ChatView } from "./chat.js";
import { showFigures } from "./figures.js";
import { Run } from "./run.js";
import { SettingsPanel } from "./settings.js";
import { talkStore, themeStore } from "./store.js";
import { drawTree } from "./tree.js";

const find = (id) => document.getElementById(id);
const THEMES = { auto: "\u25d0", light: "\u25cb", dark: "\u25cf" };

class Page {
  constructor() {
    this.settings = new SettingsPanel(find("settings"));
    this.chat = new ChatView(find("log"), find("scroll"),
      (run, round) => this.showRound(run, round), (turn) => this.pick(turn));
    this.talk = talkStore.load();
    this.stopper = null; // an AbortController while an answer comes
    this.shown = null; // the turn whose figures are shown
    this.round = null; // the round that is drawn; null follows the last one
    for (const turn of this.talk) this.chat.add(turn);
    this.pick(this.talk.findLast((turn) => turn.role === "assistant") ?? null);
    this.listen();
    this.refresh();
  }

  listen() {
    const prompt = find("prompt");
    find("ask").addEventListener("submit", (event) => {
      event.preventDefault(); // the policy forbids forms; and there is nowhere to go
      this.send(prompt.value);
    });
    prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send(prompt.value);
    });
    for (const sample of find("samples").children) {
      sample.addEventListener("click", () => this.send(sample.textContent));
    }
    find("stop").addEventListener("click", () => this.stopper?.abort());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stopper?.abort();
    });
    find("new-chat").addEventListener("click", () => this.renew());
    find("earlier").addEventListener("click", () => this.step(-1));
    find("later").addEventListener("click", () => this.step(1));
    find("latest").addEventListener("click", () => this.showRound(this.run, null));
    find("key").addEventListener("change", () => this.meet());
    window.addEventListener("pagehide", () => talkStore.save(this.talk));
    new ResizeObserver(() => this.redraw()).observe(find("charts"));
  }

  /** Learns what the server offers; says so where it cannot. */
  async meet() {
    try {
      await this.learn();
      this.fail(null);
    } catch (error) {
      this.fail(error);
    }
  }

  async learn() {
    this.server = await loadServer(this.settings.key.value);
    find("model").textContent = this.server.model;
    document.title = `${this.server.model} \u2013 Speculant`;
    this.settings.offer(this.server);
  }

  /** Sends a message and takes in its answer, and then plain decoding's, where both are wanted. */
  async send(text) {
    if (this.stopper || !text.trim()) return;
    this.fail(null);
    let wanted;
    try {
      if (!this.server) await this.meet();
      if (!this.server) return;
      wanted = this.settings.wanted();
    } catch (error) {
      this.fail(error);
      return;
    }
    const runs = [new Run(wanted.draft ?? "plain", wanted)];
    if (this.settings.compared) runs.push(new Run("plain", { ...wanted, draft: null }));
    const turns = [{ role: "user", text }, { role: "assistant", runs }];
    const asked = this.body(text);
    this.talk.push(...turns);
    for (const turn of turns) this.chat.add(turn);
    find("prompt").value = "";
    this.pick(turns[1]);
    this.stopper = new AbortController();
    this.refresh();
    try {
      for (const run of runs) await this.take(run, turns[1], asked);
    } catch (error) {
      this.broken(error, turns, text);
    } finally {
      this.stopper = null;
      this.finish(turns[1]);
    }
  }

  /** The conversation as the server is asked to go on with it. A model without a chat template goes on
   * with the text itself. */
  body(text) {
    if (!this.server.chat) return { prompt: text };
    const said = this.talk.map(({ role, text: words, runs }) => ({
      role, content: role === "user" ? words : runs[0].text,
    }));
    return { messages: [...said, { role: "user", content: text }] };
  }

  async take(run, turn, asked) {
    const { draft, depth, temperature, maxTokens, seed } = run.wanted;
    const speculation = draft === null ? false : { draft, num_draft_tokens: depth };
    const body = { model: this.server.model, temperature, max_tokens: maxTokens, seed, speculation };
    run.state = "running";
    this.chat.refresh(turn);
    const { signal } = this.stopper;
    const key = this.settings.key.value;
    for await (const chunk of streamAnswer(this.server.chat, { ...body, ...asked }, key, signal)) {
      this.chat.append(run, run.add(chunk, performance.now()));
      this.changed(turn);
    }
    run.state = "done";
  }

  /** An answer that did not end. A message that got none goes back into its box. */
  broken(error, turns, text) {
    if (!this.talk.includes(turns[1])) return; // a new chat was begun meanwhile
    const stopped = error.name === "AbortError";
    for (const run of turns[1].runs) {
      if (!run.ended) run.state = stopped ? "stopped" : "failed";
    }
    if (!stopped) this.fail(error);
    if (turns[1].runs[0].tokens.length) return;
    for (const turn of turns) this.chat.remove(turn);
    this.talk = this.talk.filter((turn) => !turns.includes(turn));
    find("prompt").value ||= text;
    this.pick(this.talk.at(-1) ?? null);
  }

  finish(turn) {
    if (this.talk.includes(turn)) this.chat.refresh(turn);
    const { emitted, perForward } = turn.runs[0];
    const words = perForward ? `, ${perForward.toFixed(2)} per target forward` : "";
    find("status").textContent = `The answer has ended: ${emitted} tokens${words}.`;
    talkStore.save(this.talk);
    this.refresh();
    this.redraw();
    this.learn().catch(() => {}); // a draft may have been switched off; an error is shown already
  }

  /** Shows an error's sentence, or none. Asks for the key where that is what is missing. */
  fail(error) {
    find("error").hidden = !error;
    find("error").textContent = error?.message ?? "";
    if (error instanceof ApiError && error.status === 401) this.settings.askKey();
    else if (error && !(error instanceof ApiError || error instanceof RangeError)) throw error;
  }

  renew() {
    this.stopper?.abort();
    this.talk = [];
    this.chat.clear();
    talkStore.save(this.talk);
    this.fail(null);
    this.pick(null);
    this.refresh();
    find("prompt").focus();
  }

  /** What can be done now. */
  refresh() {
    find("send").hidden = Boolean(this.stopper);
    find("stop").hidden = !this.stopper;
    find("empty").hidden = this.talk.length > 0;
    document.body.dataset.busy = Boolean(this.stopper);
  }

  /** Draws once a frame, however many chunks came. */
  changed(turn) {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      if (this.talk.includes(turn)) this.chat.refresh(turn);
      this.redraw();
    });
  }

  get run() {
    return this.shown?.runs[this.which] ?? null;
  }

  pick(turn) {
    this.shown = turn;
    this.which = 0;
    this.round = null;
    this.redraw();
  }

  showRound(run, round) {
    if (!run) return;
    this.shown = this.talk.find((turn) => turn.runs?.includes(run)) ?? null;
    this.which = this.shown?.runs.indexOf(run) ?? 0;
    this.round = round;
    this.redraw();
  }

  step(by) {
    const last = (this.run?.rounds.length ?? 0) - 1;
    const next = (this.round ?? this.run?.latestRound ?? -1) + by;
    if (next >= 0 && next <= last) this.showRound(this.run, next);
  }

  redraw() {
    const { run, shown } = this;
    const plain = shown?.runs.find((one) => one !== run && one.wanted.draft === null) ?? null;
    drawPositions(find("positions"), run);
    drawRounds(find("rounds"), run);
    drawSpeed(find("speed"), run, plain);
    const last = (run?.rounds.length ?? 0) - 1;
    const round = this.round ?? run?.latestRound ?? -1;
    find("tree-text").textContent = drawTree(find("tree"), run, round);
    find("round-name").textContent = last < 0 ? "the last round" : `round ${round + 1} of ${last + 1}`;
    find("earlier").disabled = round <= 0;
    find("later").disabled = round >= last;
    find("latest").disabled = this.round === null;
    this.chat.show(shown, run, this.round);
    showFigures(run, plain);
  }
}

/** The buttons of the header that touch nothing but the page's looks. */
function looks() {
  const theme = find("theme");
  const dress = (name) => {
    document.documentElement.dataset.theme = name;
    theme.textContent = THEMES[name];
    theme.setAttribute("aria-label", `Theme: ${name}`);
    theme.title = `Theme: ${name}`;
    themeStore.save(name);
  };
  theme.addEventListener("click", () => {
    const names = Object.keys(THEMES);
    const now = names.indexOf(document.documentElement.dataset.theme);
    dress(names[(now + 1) % names.length]);
  });
  dress(Object.hasOwn(THEMES, themeStore.load()) ? themeStore.load() : "auto");
  const views = document.querySelectorAll("[data-show]");
  for (const button of views) {
    button.addEventListener("click", () => {
      document.body.dataset.view = button.dataset.show;
      for (const other of views) other.setAttribute("aria-pressed", other === button);
    });
  }
  // room for the settings is there on a wide screen only
  find("settings").open = window.matchMedia("(min-width: 60rem) and (min-height: 44rem)").matches;
}

looks();
new Page().meet();
