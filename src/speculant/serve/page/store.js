// What outlives a reload. Settings stay in this browser; the conversation and the key stay in this
// tab and go with it. A browser may forbid storage: then nothing is kept, and all else works.
import { Run } from "./run.js";

function read(storage, name) {
  try {
    return JSON.parse(window[storage].getItem(name));
  } catch {
    return null;
  }
}

function write(storage, name, value) {
  try {
    window[storage].setItem(name, JSON.stringify(value));
  } catch {
    return; // full or forbidden
  }
}

export const settingsStore = {
  load: () => read("localStorage", "speculant.settings") ?? {},
  save: (settings) => write("localStorage", "speculant.settings", settings),
};

export const themeStore = {
  load: () => read("localStorage", "speculant.theme") ?? "auto",
  save: (theme) => write("localStorage", "speculant.theme", theme),
};

export const keyStore = {
  load: () => read("sessionStorage", "speculant.key") ?? "",
  save: (key) => write("sessionStorage", "speculant.key", key),
};

/** The conversation: {role: "user", text} and {role: "assistant", runs: [Run, ...]} in turn. */
export const talkStore = {
  load() {
    const saved = read("sessionStorage", "speculant.talk");
    if (!Array.isArray(saved)) return [];
    return saved.map((turn) => (turn.runs ? { ...turn, runs: turn.runs.map(Run.from) } : turn));
  },
  save: (talk) => write("sessionStorage", "speculant.talk", talk),
};
